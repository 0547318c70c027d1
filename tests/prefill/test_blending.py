"""Parts of earlier prompts in other ones: what is reused and told, whose it is, and that nothing behind it gets a key."""

import numpy as np
import pytest
from actor_harness import LAYOUT, leased
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefill import ROOT, B, Node, prompt

from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    CancelRequest,
    FirstToken,
    HandoffDone,
    LeaseBlocks,
    ReserveSlots,
)
from mooncake_zmq.core.work import ComputeChunk, WorkFailed
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens

SYSTEM, ONE, TWO = prompt(2 * B), prompt(3 * B, base=100), prompt(2 * B + 1, base=200)
FIRST = [*SYSTEM, *ONE, *TWO, 400, 401, 402]
SHUFFLED = [*SYSTEM, 300, *TWO, *ONE, 301, 302]
OTHER_ROOT = namespace(model="m", layout="l", salt="other")


class Blends(Node):
    def __init__(self, **changes):
        super().__init__(**({"blend": True, "blend_least_tokens": B, "slab_bytes": 64 * LAYOUT.slot_bytes} | changes))

    def begin(self, request_id, tokens, *, root=ROOT, **options):
        """Start a job; returns its first chunk."""
        self.start(request_id, tokens, root=root, keys=keys_of(tokens, root), **options)
        if any(isinstance(message, LeaseBlocks) for _, message in self.sent):
            self.lease()
        self.reserve(request_id, attempt=options.get("attempt", 1))
        return self.work(ComputeChunk)[1]

    def complete(self, request_id, attempt=1):
        """Compute what is left of a job; returns what its gateway and its decode are told."""
        while any(isinstance(work, ComputeChunk) for work in self.works.values()):
            self.computed(recomputed=3 if self.work(ComputeChunk)[1].parts else 0)
        self.received(request_id, attempt)
        self.put_all()
        return self.one(FirstToken, "g"), self.take(HandoffDone, "d")[-1]


def keys_of(tokens, root=ROOT):
    return tuple(extend_keys(root, pack_tokens(tokens), B))


@pytest.fixture
def node():
    node = Blends()
    assert node.begin("first", FIRST).parts == ()
    first, done = node.complete("first")
    assert (first.parts, first.recomputed, done.exact_blocks) == (0, 0, None)
    node.sent.clear()
    return node


def test_documents_in_another_order_are_reused_behind_the_exact_prefix_and_told(node):
    work = node.begin("again", SHUFFLED)
    assert (work.start, len(work.tokens) // 4) == (2 * B, len(SHUFFLED) - 2 * B), "everything behind it is one work"
    found = [(part.at, part.computed_at, part.tokens) for part in work.parts]
    assert found == [(2 * B + 1, 5 * B, 2 * B), (2 * B + 1 + len(TWO), 2 * B, 3 * B)]
    behind = LAYOUT.blocks_for(len(SHUFFLED))
    parts = sum(part.tokens for part in work.parts)
    assert [load.block for load in work.prefix] == [0, 1, *range(behind, behind + parts // B)]
    assert node.longest_sequence == (behind + parts // B) * B
    first, done = node.complete("again")
    assert (first.own, first.parts, first.recomputed) == (2 * B, parts, 3)
    assert done.exact_blocks == 2
    assert node.actor.counts["jobs_blended"] == 1
    assert not node.busy()


def test_nothing_behind_the_exact_prefix_gets_a_key(node):
    node.begin("again", SHUFFLED)
    node.complete("again")
    assert [message.keys for message in node.take(ReserveSlots, "c")] == []
    assert node.take(BlocksAnnounced, "k") == []
    assert [node.actor.holds(key) for key in keys_of(SHUFFLED)] == [True, True, *[False] * (len(SHUFFLED) // B - 2)]
    node.sent.clear()
    work = node.begin("exactly", SHUFFLED, exact=True)
    assert (work.start, work.parts) == (2 * B, ())
    first, done = node.complete("exactly")
    assert (first.own, first.parts, done.exact_blocks) == (2 * B, 0, None)
    assert all(node.actor.holds(key) for key in keys_of(SHUFFLED))


def test_what_is_computed_before_the_first_part_is_exact_and_gets_its_keys(node):
    new = prompt(5 * B, base=350)
    tokens = [*SYSTEM, *new, *ONE, 301]
    work = node.begin("again", tokens)
    chunks = []
    while not work.parts:
        chunks.append((work.start, len(work.tokens) // 4))
        node.computed()
        work = node.work(ComputeChunk)[1]
    assert chunks == [(2 * B, 2 * B), (4 * B, 2 * B), (6 * B, B)]
    assert work.start == 7 * B
    assert [node.actor.holds(key) for key in keys_of(tokens)] == [True] * 7 + [False] * 3
    _, done = node.complete("again")
    assert done.exact_blocks == 7
    assert [node.actor.holds(key) for key in keys_of(tokens)] == [True] * 7 + [False] * 3


@pytest.mark.parametrize(
    "changes",
    [{"exact": True}, {"first_index": 1}, {"prompt_logprobs": 0}, {"root": OTHER_ROOT}],
    ids=lambda changes: next(iter(changes)),
)
def test_an_answer_that_may_not_be_approximate_or_of_another_tenant_is_not(node, changes):
    node.begin("again", SHUFFLED, **changes)
    first, done = node.complete("again")
    assert (first.parts, done.exact_blocks) == (0, None)


@pytest.mark.parametrize("name", ["d", "g"])
def test_no_peer_is_sent_approximate_kv_that_it_cannot_know_of(node, name):
    node.down(name)
    node.up(name, 8, protocol=22)
    node.begin("again", SHUFFLED)
    node.finish()
    assert node.one(FirstToken).parts == 0


@pytest.mark.parametrize(
    "changes",
    [{"blend": False}, {"own_reuse": False}, {"blend_least_tokens": 4 * B}, {"blend_most_tokens": len(SHUFFLED) - 2 * B - 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_decide_whether_parts_are_reused(changes):
    node = Blends(**changes)
    node.begin("first", FIRST)
    node.complete("first")
    node.begin("again", SHUFFLED)
    assert node.complete("again")[0].parts == 0


def test_parts_of_little_of_a_prompt_are_not_worth_it(node):
    node.begin("again", [*SYSTEM, *ONE, *prompt(20 * B, base=500)])
    assert node.complete("again")[0].parts == 0


@pytest.mark.parametrize(("slots", "blocks"), [(13, 5), (12, 0)])
def test_a_part_stays_while_it_is_read_and_is_not_taken_where_it_leaves_no_room(slots, blocks):
    """The prompt needs 8 slots, of which it finds 2, and its parts 5."""
    node = Blends(slab_bytes=slots * LAYOUT.slot_bytes)
    node.begin("first", FIRST)
    node.complete("first")
    work = node.begin("again", SHUFFLED)
    assert sum(part.tokens for part in work.parts) // B == blocks
    held = {load.source.slot for load in work.prefix}
    assert held.isdisjoint(grant.slot for grant in work.outputs)
    node.complete("again")
    assert not node.busy()


@pytest.mark.parametrize("end", ["computed", "failed", "lost", "cancelled"])
def test_parts_are_held_until_the_chunk_that_reads_them_ends(node, end):
    work = node.begin("again", SHUFFLED)
    slots, pins = [load.source.slot for load in work.prefix[2:]], node.actor.slots.pins
    assert [pins[slot] for slot in slots] == [1] * 5
    if end == "failed":
        node.done(node.work(ComputeChunk)[0], WorkFailed("test"))
    else:
        if end == "cancelled":
            node.say("g", CancelRequest(request_id="again", attempt=1))
            assert [pins[slot] for slot in slots] == [1] * 5, "it still reads them"
        node.computed(failed=(work.prefix[-1].block,) if end == "lost" else ())
    assert [pins[slot] for slot in slots] == [0] * 5
    node.received("again")
    node.put_all()
    assert not node.busy()


def test_the_blocks_of_another_prompt_are_parts_where_those_of_the_latest_are_gone(node):
    later = [*prompt(3, base=600), *ONE[:-3], *prompt(B, base=700)]
    shift = [*prompt(B, base=800), *ONE, *prompt(B, base=900)]
    for name, tokens in (("later", later), ("shift", shift)):
        node.begin(name, tokens, exact=True)
        node.complete(name)
    for key in keys_of(shift):
        node.actor.slots.forget(node.actor.slots.committed(key))
    work = node.begin("again", SHUFFLED)
    assert sum(part.tokens for part in work.parts) == 5 * B


def test_a_part_that_does_not_verify_is_forgotten_and_the_next_attempt_has_none(node):
    work = node.begin("again", SHUFFLED)
    load = work.prefix[-1]
    key = node.actor.slots.key_of(load.source.slot)
    node.computed(corrupt=(load.block,))
    assert not node.actor.holds(key)
    assert not node.busy()
    assert node.begin("again", SHUFFLED, attempt=2).parts == (), "an answer that failed once is computed exactly"


def test_a_prompt_that_waits_for_blocks_which_get_no_key_computes_them_itself(node):
    node.begin("other", prompt(3 * B, base=900))
    node.start("again", SHUFFLED)
    waits = {"coming_blocks": 4, "coming_s": 60.0, "conductor": "k"}
    node.start("waits", [*SHUFFLED, 7], keys=keys_of([*SHUFFLED, 7]), **waits)
    assert "waiting" in {job["state"] for job in node.actor.dump(node.now)["jobs"]}
    node.lease()
    node.reserve("again")
    node.finish()
    assert "waiting" not in {job["state"] for job in node.actor.dump(node.now)["jobs"]}


def waiting(node):
    return {job["request"] for job in node.actor.dump(node.now)["jobs"] if job["state"] == "waiting"}


def wait_for(node, request_id, tokens):
    """Start a prompt that is to wait for its first four blocks."""
    node.start(request_id, tokens, keys=keys_of(tokens), coming_blocks=4, coming_s=60.0, conductor="k")


def test_a_prompt_that_arrives_later_does_not_wait_for_blocks_which_get_no_key(node):
    node.begin("again", SHUFFLED)
    wait_for(node, "later", [*SHUFFLED, 7])
    assert waiting(node) == set()
    node.complete("again")
    wait_for(node, "last", [*SHUFFLED, 8])
    assert waiting(node) == set()


def test_a_prompt_waits_for_blocks_that_another_computes_exactly(node):
    node.begin("again", SHUFFLED)
    node.start("exactly", SHUFFLED, keys=keys_of(SHUFFLED), exact=True)
    wait_for(node, "later", [*SHUFFLED, 7])
    assert waiting(node) == {"later"}
    node.complete("again")
    node.lease()
    node.reserve("exactly")
    node.finish()
    assert node.actor.counts["waits_ended[by=slab]"] == 1
    node.received("exactly")
    assert waiting(node) == set()


def test_a_prompt_that_waits_for_exact_blocks_waits_on_where_another_is_blended(node):
    node.start("exactly", SHUFFLED, keys=keys_of(SHUFFLED), exact=True)
    wait_for(node, "waits", [*SHUFFLED, 7])
    node.start("again", SHUFFLED, keys=keys_of(SHUFFLED))
    while asked := node.take(LeaseBlocks, "c"):
        for ask in asked:
            node.say("c", leased(ask.lease_id, []))
    node.reserve("again")
    assert node.actor.counts["jobs_blended"] == 1
    assert waiting(node) == {"waits"}


def test_blocks_that_were_computed_exactly_after_all_are_waited_for_again(node):
    node.begin("again", SHUFFLED)
    node.complete("again")
    node.begin("exactly", SHUFFLED, exact=True)
    node.complete("exactly")
    for key in keys_of(SHUFFLED)[2:]:
        node.actor.slots.forget(node.actor.slots.committed(key))
    wait_for(node, "later", [*SHUFFLED, 7])
    assert waiting(node) == {"later"}


def test_prompts_whose_waits_are_vain_get_their_places_at_once(node):
    node.start("again", SHUFFLED)
    wait_for(node, "waits", [*SHUFFLED, 7])
    node.lease()
    node.reserve("again")
    states = {job["request"]: job["state"] for job in node.actor.dump(node.now)["jobs"]}
    assert states == {"again": "computing", "waits": "preparing"}


DOCUMENTS = [np.random.default_rng(seed).integers(0, 40, 3 * B + seed % 3).tolist() for seed in range(4)]
PROMPTS = st.tuples(
    st.sampled_from([ROOT, OTHER_ROOT]),
    st.sampled_from(["exact", "done", "done", "done", "cancel", "lost", "decode", "corrupt"]),
    st.lists(
        st.one_of(st.sampled_from(DOCUMENTS), st.lists(st.integers(0, 3), min_size=1, max_size=2 * B)), min_size=1, max_size=5
    ),
)


@settings(max_examples=150)
@given(st.lists(PROMPTS, min_size=2, max_size=8), st.integers(16, 40))
def test_parts_are_of_the_same_tokens_and_tenant_behind_the_exact_prefix_and_keys_stay_exact(prompts, slots):
    node = Blends(slab_bytes=slots * LAYOUT.slot_bytes, max_active=1, short_jobs=0)
    exact = {}
    for number, (root, end, pieces) in enumerate(prompts):
        tokens = [token for piece in pieces for token in piece][: (slots - 1) * B]
        keys = keys_of(tokens, root)
        node.begin(str(number), tokens, root=root, exact=end == "exact")
        while works := [work for work in node.works.values() if isinstance(work, ComputeChunk)]:
            (work,) = works
            if work.parts:
                _check_parts(node, work, tokens, root, exact)
            else:
                stop = work.start // B + len(work.tokens) // 4 // B
                exact |= {key: (root, tokens[block * B :][:B]) for block, key in enumerate(keys[:stop])}
            _end_chunk(node, work, str(number), end)
        if "d" not in node.peers:
            node.up("d", 10 + number, host="h1")
        node.received(str(number))
        node.put_all()
        node.sent.clear()
        assert not node.busy()
        named = {key for slot in range(node.actor.slots.capacity) if (key := node.actor.slots.key_of(slot)) is not None}
        assert named <= exact.keys()


def _end_chunk(node, work, request_id, end):
    """End a chunk, or its job meanwhile."""
    if end == "cancel":
        node.say("g", CancelRequest(request_id=request_id, attempt=1))
    elif end == "decode" and "d" in node.peers:
        node.down("d")
    lost = work.prefix[-1:] if end in ("lost", "corrupt") else ()
    blocks = tuple(load.block for load in lost)
    node.computed(**({"failed": blocks} if end == "lost" else {"corrupt": blocks}))


def _check_parts(node, work, tokens, root, exact):
    loads = {load.block: load.source.slot for load in work.prefix}
    begin = work.start
    for part in work.parts:
        assert begin <= part.at <= len(tokens) - part.tokens
        begin = part.at + part.tokens
        for block in range(part.tokens // B):
            key = node.actor.slots.key_of(loads[part.block + block])
            assert exact[key] == (root, tokens[part.at + block * B :][:B])
