"""Requests for vectors: one answer of them, from the node that was asked, whatever is lost, refused or late before."""

import struct

import pytest
from actor_harness import LAYOUT, Harness
from msgspec import structs

from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    Embedding,
    Placed,
    RequestEnded,
    Sampling,
    Schedule,
    StartPrefill,
    StopRule,
    TextsEmbedded,
)
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Failed, Finished, Vectors
from mooncake_zmq.gateway.requests.requests import Requests, RequestsSettings
from mooncake_zmq.kv.block_hash import namespace, pack_tokens

EMBEDDING = Embedding((1, 2), dimensions=2)
VECTORS = struct.pack("<4f", 1, 2, 3, 4)
REQUEST = ClientRequest(
    tokens=pack_tokens([5, 6, 7]),
    root=namespace(model="m", layout="l"),
    keys=(),
    sampling=Sampling(),
    stop=StopRule(max_tokens=1),
    embedding=EMBEDDING,
)


class Node(Harness):
    """A gateway whose request is placed on `v0`, while `v1` is there too."""

    def __init__(self, request=REQUEST):
        settings = RequestsSettings(conductors=("k0",), max_open=8, deadline_s=30.0, max_attempts=4)
        super().__init__(Requests(name="me", host="h0", incarnation=1, settings=settings, layout=LAYOUT))
        for name in ("k0", "v0", "v1"):
            self.up(name)
        self.client("r", request)
        self.attempt = 0
        self.place("v0")

    def place(self, to):
        asked = self.one(Schedule)
        self.attempt = asked.attempt
        plan = {"reuse_blocks": 0, "sources": (), "ttft_s": 0.0, "tbt_s": 0.0}
        self.say("k0", Placed(request_id="r", attempt=asked.attempt, prefill=to, decode=to, **plan))
        return asked

    def embeds(self, by="v0", vectors=VECTORS, attempt=None):
        self.say(
            by, TextsEmbedded(request_id="r", attempt=attempt or self.attempt, vectors=vectors, queue_s=1.0, prefill_s=2.0)
        )

    def goes_on(self, to="v1"):
        """Return the question for the place of the next attempt."""
        self.advance(1)
        return self.place(to)


def test_vectors_are_the_whole_answer_and_end_the_request_everywhere():
    node = Node()
    start = node.one(StartPrefill, "v0")
    assert (start.embedding, start.keys) == (EMBEDDING, ())
    node.embeds()
    (_, vectors), (_, end) = node.clients
    assert vectors == Vectors(VECTORS)
    assert isinstance(end, Finished)
    assert (end.reason, end.prompt_tokens, end.completion_tokens, end.queue_s, end.prefill_s) == ("stop", 3, 0, 1.0, 2.0)
    assert node.one(RequestEnded, "k0").attempt == 1
    assert not node.busy()
    node.embeds()
    assert len(node.clients) == 2, "a second time"


def test_a_node_lost_in_mid_call_costs_no_answer():
    node = Node()
    node.take(StartPrefill)
    node.down("v0")
    assert "v0" in node.goes_on().exclude
    assert node.one(StartPrefill, "v1").embedding == EMBEDDING
    node.embeds("v1")
    assert [type(output) for _, output in node.clients] == [Vectors, Finished]
    assert node.clients[1][1].attempts == 2


def test_a_call_that_failed_is_made_again_and_what_its_node_says_later_is_dropped():
    node = Node()
    node.say("v0", AttemptFailed("r", 1, "vLLM at ...: ReadTimeout"))
    node.goes_on()
    node.embeds("v0", attempt=1)
    node.embeds("v0")
    assert not node.clients, "neither the attempt nor the node"
    node.embeds("v1")
    assert [type(output) for _, output in node.clients] == [Vectors, Finished]


def test_what_the_model_does_not_do_is_an_error_at_once():
    node = Node()
    node.say("v0", AttemptFailed("r", 1, "no dimensions but 8", stuck=True))
    ((_, failed),) = node.clients
    assert (failed.status, failed.code, failed.message) == (
        400,
        "invalid_value",
        "the model does not embed so (no dimensions but 8)",
    )
    assert not node.busy()


@pytest.mark.parametrize("vectors", [VECTORS[:4], VECTORS[:12], VECTORS + VECTORS])
def test_vectors_of_another_number_or_size_are_tried_elsewhere(vectors):
    node = Node()
    node.embeds(vectors=vectors)
    assert not node.clients
    assert "v0" in node.goes_on().exclude


def test_vectors_where_tokens_were_asked_for_are_dropped():
    node = Node(structs.replace(REQUEST, embedding=None))
    node.embeds()
    assert not node.clients
    assert node.busy()


def test_a_request_that_is_too_late_is_cancelled_at_its_node():
    node = Node()
    node.advance(31)
    ((_, failed),) = node.clients
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (504, "deadline_exceeded")
    assert node.one(CancelRequest, "v0").attempt == 1
    assert not node.busy()
