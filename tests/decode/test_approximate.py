"""KV of which only the leading blocks are exact: those alone are kept and offered under keys, and so for every choice."""

import pytest
from test_decode import ROOT, B, Node, assert_nothing_left
from test_forks import Family

from mooncake_zmq.core.messages import LeaseBlocks, ReserveSlots
from mooncake_zmq.core.work import DecodeStep, ForkSequence
from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens

TOKENS = pack_tokens([1000 + i for i in range(4 * B + 2)])
KEYS = tuple(extend_keys(ROOT, TOKENS, B))


def hand_off(node, exact_blocks):
    node.reserve("r", 4 * B + 2, prefill="p1", new_keys=KEYS, block_tokens=TOKENS[: 4 * B * 4], max_tokens=20)
    node.blocks("r", prefill="p1")
    node.pulled()
    node.handoff_done("r", prefill="p1", exact_blocks=exact_blocks)


def offered(node):
    """The keys of all blocks that are offered to the pool until the requests end."""
    keys, token = [], 20
    while any(isinstance(work, DecodeStep) for work in node.works.values()):
        keys += [key for _, message in node.sent if isinstance(message, ReserveSlots) for key in message.keys]
        node.put_all()
        node.step(token)
        token += 1
    return keys


@pytest.mark.parametrize("exact_blocks", [0, 1, 4, None])
def test_only_exact_blocks_are_offered_and_kept(exact_blocks):
    node = Node(capacity_tokens=100 * B)
    hand_off(node, exact_blocks)
    output = offered(node)
    if exact_blocks is None:
        assert output[:4] == list(KEYS)
        assert len(output) > 4
    else:
        assert output == list(KEYS[:exact_blocks])
    node.sent.clear()
    node.reserve("next", 5 * B, prefill="p1", reuse=4)
    copies = [work for work in node.works.values() if isinstance(work, ForkSequence)]
    assert [copy.tokens for copy in copies] == (
        [] if exact_blocks == 0 else [B * (4 if exact_blocks is None else exact_blocks)]
    )
    assert len(node.take(LeaseBlocks, "c")) == (2 if exact_blocks == 1 else 1), "the pool has what is left"


def test_no_choice_of_a_prompt_offers_what_it_decodes_behind_approximate_kv():
    node = Family(capacity_tokens=100 * B, max_requests=8)
    node.reserve_three(max_tokens=2 * B)
    node.blocks("r")
    node.pulled()
    node.handoff_done("r", token=20, exact_blocks=0)
    node.forked()
    assert offered(node) == []
    assert_nothing_left(node)
