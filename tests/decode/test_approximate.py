"""KV of which only the leading blocks are exact: those alone are kept and offered under keys, and so for every choice. And
decodes that choose what they attend to, whose KV is exact up to there."""

import pytest
from test_decode import ROOT, B, Node, assert_nothing_left
from test_forks import Family

from mooncake_zmq.core.messages import LeaseBlocks, ReserveSlots, TokensDecoded
from mooncake_zmq.core.selection import RECENT, SINKS, Selection
from mooncake_zmq.core.work import DecodeStep, ForkSequence
from mooncake_zmq.decode.settings import DecodeSettings
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


CHOSEN = 3 * B - 2
LENGTH = SINKS + RECENT + CHOSEN - 1
"""A prompt whose first step attends to all of it and its first token."""


def steps_of(approximate=True, gateway=None, **settings):
    """What the steps of a prompt of LENGTH tokens choose, which of their messages say so, and the keys that are offered."""
    tokens = pack_tokens([1000 + i for i in range(LENGTH)])
    keys = tuple(extend_keys(ROOT, tokens, B))
    node = Node(**({"capacity_tokens": 100 * B, "selection": "quest", "selection_tokens": CHOSEN} | settings))
    if gateway is not None:
        node.up("g9", 7, **gateway)
    changes = {} if gateway is None else {"gateway": "g9"}
    block_tokens = tokens[: len(keys) * B * 4]
    node.reserve(
        "r",
        LENGTH,
        prefill="p1",
        new_keys=keys,
        block_tokens=block_tokens,
        max_tokens=3 * B,
        approximate=approximate,
        **changes,
    )
    node.blocks("r", prefill="p1")
    node.pulled()
    node.handoff_done("r", prefill="p1")
    chosen, said, put, token = [], [], [], 20
    while works := [work for work in node.works.values() if isinstance(work, DecodeStep)]:
        chosen.append(works[0].entries[0].selection)
        put += [key for _, message in node.sent if isinstance(message, ReserveSlots) for key in message.keys]
        node.put_all()
        node.sent.clear()
        node.step(token)
        said += [bool(message.approximate) for _, message in node.sent if isinstance(message, TokensDecoded)]
        token += 1
    node.put_all()
    assert_nothing_left(node)
    return chosen, said, put, keys, node


def test_a_decode_chooses_once_there_are_more_tokens_says_so_and_offers_nothing_computed_from_then_on():
    chosen, said, put, keys, node = steps_of()
    assert chosen == [None] + [Selection("quest", CHOSEN)] * (len(chosen) - 1)
    assert said == [False] + [True] * (len(said) - 1)
    assert put == list(keys), "the prompt is exact"
    assert len(chosen) > 2 * B, "whole blocks were decoded"
    assert node.actor.counts["generation_tokens_approximate"] == len(chosen) - 1


@pytest.mark.parametrize(
    "plain", [{"approximate": False}, {"gateway": {"protocol": 22}}, {"selection": "none"}, {"selection_tokens": 7 * B}]
)
def test_a_decode_attends_to_all_where_the_answer_must_be_exact_or_cannot_say_that_it_is_not(plain):
    chosen, said, put, keys, _ = steps_of(**plain)
    assert not any(chosen)
    assert not any(said)
    assert put[: len(keys)] == list(keys)
    assert len(put) > len(keys)


def test_the_choices_of_a_prompt_begin_one_a_step_and_such_steps_are_not_measured():
    node = Family(capacity_tokens=100 * B, max_requests=8, selection="quest", selection_tokens=CHOSEN)
    node.reserve_three(LENGTH + 1, max_tokens=3 * B, approximate=True)
    node.blocks("r")
    node.pulled()
    node.handoff_done("r", token=20)
    node.forked()
    choosing = []
    while works := [work for work in node.works.values() if isinstance(work, DecodeStep)]:
        choosing.append(sum(entry.selection is not None for entry in works[0].entries))
        node.step(21 + len(choosing), elapsed_s=60.0 if len(choosing) <= 3 else 0.01)
        node.put_all()
    assert choosing[:5] == [1, 2, 3, 3, 3]
    assert node.told().step.seconds < 1.0


@pytest.mark.parametrize("loans", [{"borrow": True}, {"lend_tokens": 4}])
def test_selection_is_for_kv_that_is_all_here(loans):
    with pytest.raises(ValueError, match="leave borrow and lend_tokens out"):
        DecodeSettings(selection="kcache", **loans)
