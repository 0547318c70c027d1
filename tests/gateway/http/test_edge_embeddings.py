"""POST /v1/embeddings at the edge: its shapes, its keys and quotas, and whatever is refused."""

import base64
import struct
from dataclasses import replace

import msgspec
import pytest
from scripted_actor import ScriptedActor, failing, finished
from test_edge_keys import guarded

from mooncake_zmq.gateway.requests.client_events import Vectors
from mooncake_zmq.operate.usage import read
from mooncake_zmq.telemetry.usage import Meter


def vectors_of(request):
    """Two numbers for each text: the number of its tokens, and one."""
    return struct.pack(f"<{2 * len(request.embedding.lengths)}f", *[each for n in request.embedding.lengths for each in (n, 1)])


def embedding(actor=None):
    actor = actor or ScriptedActor()
    actor.script = lambda request, _number: [[Vectors(vectors_of(request)), finished()]]
    actor.model = replace(actor.model, embeds=True)
    return actor


def ask(actor, key=None, **body):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return actor.call("POST", "/v1/embeddings", json={"input": "hello", **body}, headers=headers)


def test_vectors_come_in_order_as_numbers_or_bytes():
    answer = ask(embedding(), input=["abc", "de"]).json()
    assert [each["embedding"] for each in answer["data"]] == [[3.0, 1.0], [2.0, 1.0]]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    (whole,) = ask(embedding(), encoding_format="base64").json()["data"]
    assert struct.unpack("<2f", base64.b64decode(whole["embedding"])) == (5.0, 1.0)


def test_vectors_are_written_one_by_one(monkeypatch):
    """To write all of them at once would take a second, in which no stream goes on."""
    written, encode = [], msgspec.json.encode
    monkeypatch.setattr(msgspec.json, "encode", lambda value: written.append(value) or encode(value))
    ask(embedding(), input=["abc", "de"])
    assert written[:2] == [[3.0, 1.0], [2.0, 1.0]]
    assert [type(each["embedding"]) for each in written[2]["data"]] == [msgspec.Raw] * 2


def test_who_has_no_key_gets_no_vectors():
    actor = embedding(guarded())
    assert ask(actor).status_code == 401
    assert ask(actor, "mallory").status_code == 401
    assert not actor.requests
    assert ask(actor, "alice").status_code == 200
    assert actor.only.tenant == "alice"


@pytest.mark.parametrize("limits", [{"requests": 1}, {"tokens": 8}])
def test_more_than_a_minutes_amount_is_429(limits):
    actor = embedding(guarded(**limits))
    assert ask(actor, "alice").status_code == 200
    answer = ask(actor, "alice")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert ask(actor, "bob").status_code == 200, "others have their own"


def test_tenants_share_no_root_whatever_salt_they_wish():
    roots = set()
    for key, more in (("alice", {}), ("bob", {}), ("alice", {"cache_salt": "s"}), ("bob", {"cache_salt": "s"})):
        actor = embedding(guarded())
        assert ask(actor, key, **more).status_code == 200
        roots.add(actor.only.root)
    assert len(roots) == 4


def test_what_a_key_uses_is_counted_and_a_failed_call_is_not(tmp_path):
    actor = embedding(guarded())
    actor.edge.meter = Meter(tmp_path, "gw", now=lambda: 0.0)
    ask(actor, "alice")
    actor.script = lambda _request, _number: [[failing()]]
    assert ask(actor, "alice").status_code == 503
    actor.edge.meter.write()
    (alice,) = read(tmp_path)
    assert (alice.key, alice.calls, alice.prompt_tokens, alice.completion_tokens) == ("alice", 1, 5, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, None),
        ({"input": [[1], "a"]}, None),
        ({"input": ["a"] * 2049}, None),
        ({"input": [600]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"stream": True}, "stream"),
        ({"model": "other"}, "model"),
        ({"input": "a" * 100}, "input"),
    ],
)
def test_what_is_no_text_is_refused(body, param):
    actor = embedding()
    answer = ask(actor, **body)
    assert answer.status_code in (400, 404)
    assert param is None or answer.json()["error"]["param"] == param
    assert not actor.requests
