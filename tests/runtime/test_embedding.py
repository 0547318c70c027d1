"""The answers of a vLLM that embeds: read if they are one vector for each text, refused otherwise."""

import base64
import json
import struct

import pytest

from mooncake_zmq.core.messages import Embedding
from mooncake_zmq.core.work import Embed
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.runtime.embedding import embedding_body, vectors_in
from mooncake_zmq.runtime.vllm_answers import Nonsense

WORK = Embed(pack_tokens((1, 2, 3)), Embedding((2, 1)), bytes(16))


def answer(*vectors: tuple[float, ...], first: int = 0) -> bytes:
    coded = [base64.b64encode(struct.pack(f"<{len(each)}f", *each)).decode() for each in vectors]
    return json.dumps({"data": [{"index": index, "embedding": each} for index, each in enumerate(coded, first)]}).encode()


def test_texts_go_out_in_order_and_vectors_come_back_in_order() -> None:
    assert json.loads(embedding_body(WORK))["input"] == [[1, 2], [3]]
    assert vectors_in(answer((1.0, 2.0), (3.0, 4.0)), WORK) == struct.pack("<4f", 1, 2, 3, 4)
    backwards = json.loads(answer((1.0,), (2.0,)))
    backwards["data"].reverse()
    assert vectors_in(json.dumps(backwards).encode(), WORK) == struct.pack("<2f", 1, 2)


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b'{"data": [{"index": 0, "embedding": "?"}]}',
        '{"data": [{"index": 0, "embedding": "\u00e9"}]}'.encode(),
        answer((1.0,)),
        answer((1.0,), (2.0, 3.0)),
        answer((1.0,), (2.0,), first=1),
        answer((), ()),
        answer((1.0,), (float("nan"),)),
    ],
)
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(Nonsense):
        vectors_in(raw, WORK)


def test_vectors_have_the_dimensions_that_were_asked_for() -> None:
    work = Embed(WORK.tokens, Embedding((2, 1), dimensions=2), WORK.root)
    assert vectors_in(answer((1.0, 2.0), (3.0, 4.0)), work)
    with pytest.raises(Nonsense):
        vectors_in(answer((1.0,), (2.0,)), work)
