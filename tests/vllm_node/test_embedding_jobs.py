"""Texts that a vLLM embeds for gateways: one answer, and the end of the job whatever becomes of the call."""

import pytest
from test_vllm_node import BASE, Node

from mooncake_zmq.core.messages import AttemptFailed, CancelRequest, Embedding, TextsEmbedded
from mooncake_zmq.core.work import Embed, Embedded, WorkFailed
from mooncake_zmq.kv.block_hash import pack_tokens

TEXTS = Embedding((2, 3), dimensions=4)
VECTORS = bytes(32)


def asked(**changes):
    """A node that has been asked, and its work."""
    node = Node()
    node.begin(length=5, max_tokens=1, embedding=TEXTS, **changes)
    return node, node.work(Embed)


def test_vectors_go_to_the_gateway_and_end_the_job():
    node, (work_id, work) = asked(adapter="poet")
    assert (work.tokens, work.embedding, work.adapter) == (pack_tokens(range(5)), TEXTS, "poet")
    assert work.quiet_s == BASE.quiet_s
    node.now += 2
    node.done(work_id, Embedded(VECTORS))
    embedded = node.one(TextsEmbedded, "g")
    assert (embedded.vectors, embedded.attempt, embedded.prefill_s) == (VECTORS, 1, 2.0)
    assert not node.busy()


@pytest.mark.parametrize("stuck", [False, True])
def test_a_call_that_fails_ends_the_attempt_and_what_no_vllm_does_the_request(stuck):
    node, (work_id, _) = asked()
    node.done(work_id, WorkFailed("no dimensions but 8", stuck=stuck))
    failed = node.one(AttemptFailed, "g")
    assert (failed.reason, failed.stuck) == ("no dimensions but 8", stuck)
    assert not node.busy()


def test_a_deadline_or_a_cancel_hangs_up_and_what_comes_later_is_dropped():
    for end in ("deadline", "cancel", "gateway"):
        node, (work_id, _) = asked(deadline_s=5.0)
        if end == "deadline":
            node.advance(5)
            assert node.one(AttemptFailed, "g").reason == "deadline passed"
        elif end == "cancel":
            node.say("g", CancelRequest(request_id="r", attempt=1))
        else:
            node.down("g")
        assert node.cancelled == [work_id]
        node.done(work_id, Embedded(VECTORS))
        assert not node.take(TextsEmbedded)
        assert not node.busy()


def test_texts_that_are_not_the_tokens_are_refused():
    node = Node()
    node.begin(length=6, max_tokens=1, embedding=TEXTS)
    assert node.one(AttemptFailed).reason == "the texts are not those of its tokens"
    assert not node.busy()


def test_calls_wait_for_their_turn_as_prompts_do():
    node = Node()
    for number in range(BASE.max_running + 1):
        node.begin(f"r{number}", length=5, max_tokens=1, embedding=TEXTS)
    works = [work_id for work_id, work in node.works.items() if isinstance(work, Embed)]
    assert len(works) == BASE.max_running
    node.done(works[0], Embedded(VECTORS))
    assert len([work for work in node.works.values() if isinstance(work, Embed)]) == BASE.max_running
