"""A prompt whose tail is fetched while its head is computed: what is computed when, and what becomes of it whatever comes."""

from dataclasses import replace

import pytest
from actor_harness import LAYOUT
from test_prefill import Node, prompt

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    BlocksArrived,
    BlocksLeased,
    CancelRequest,
    FirstToken,
    HandoffBlocks,
    LeaseBlocks,
    PrefillLoad,
    ReleaseLease,
    ShortenFetch,
    SlotRef,
)
from mooncake_zmq.core.work import ComputeChunk
from mooncake_zmq.prefill.meeting import Meeting

B = LAYOUT.block_tokens
SLOW = Costs(kv_bytes_per_token=1000, transfer_bytes_per_s=1e4, prefill_token_s=0.1, prefill_square_s=0.0)
"""A block is computed as quickly as it is fetched: 0.4 s."""
CACHED = 6
LENGTH = 6 * B + 2


class Meets(Node):
    def __init__(self, **settings):
        super().__init__(**({"costs": SLOW, "meet": True, "meet_chunk_tokens": 2 * B, "chunk_tokens": 4 * B} | settings))

    def begin(self, request_id="r", cached=CACHED, here=0, length=LENGTH, **options):
        """A prompt with so many cached blocks, the first few of them in the host's pool; the lease's number."""
        self.start(request_id, prompt(length), reuse_blocks=cached, sources=("c9",), **options)
        ask = self.one(LeaseBlocks, "c")
        assert ask.tail_first == cached
        self.reserve(request_id)
        columns = {"slots": tuple(range(here)), "generations": (2,) * here, "checksums": tuple(range(500, 500 + here))}
        self.say("c", BlocksLeased(lease_id=ask.lease_id, node="c", incarnation=7, more=True, **columns))
        return ask.lease_id

    def come(self, lease_id, *blocks, last=False, remote=0):
        columns = {
            "blocks": blocks,
            "slots": blocks,
            "generations": (2,) * len(blocks),
            "checksums": tuple(500 + block for block in blocks),
        }
        arrived = BlocksArrived(lease_id=lease_id, node="c", incarnation=7, remote=remote, last=last, **columns)
        self.say("c", arrived)

    def chunk(self):
        """(first block, tokens, loaded blocks) of the chunk in flight; None if there is none."""
        works = [work for work in self.works.values() if isinstance(work, ComputeChunk)]
        if not works:
            return None
        (work,) = works
        return work.start // B, len(work.tokens) // 4, tuple(load.block for load in work.prefix)


def test_the_head_is_computed_while_the_tail_comes_and_both_make_the_prompt():
    node = Meets()
    lease = node.begin()
    assert node.chunk() == (0, 2 * B, ())
    assert node.one(ShortenFetch, "c") == ShortenFetch(lease_id=lease, first=2)
    node.come(lease, 5, remote=1)
    node.come(lease, 4, remote=1)
    node.computed()
    assert node.chunk() == (2, B, ()), "of two blocks that are missing one is computed"
    node.come(lease, 3, last=True, remote=1)
    node.computed()
    assert node.chunk() == (6, 2, (3, 4, 5))
    node.computed()
    first = node.one(FirstToken, "g")
    assert (first.met, first.remote, first.local, first.own) == (3 * B, 3 * B, 0, 0)
    assert (node.actor.counts["meets"], node.actor.counts["blocks_met"]) == (1, 3)
    announced = [(m.first_block, len(m.sources), m.ready) for m in node.take(HandoffBlocks, "d")]
    assert announced == [(0, 2, False), (2, 1, False), (3, 3, True), (6, 1, False)]
    node.received()
    assert node.take(ReleaseLease, "c")
    node.put_all()
    assert not node.busy()


def test_a_lost_tail_block_is_computed_between_those_that_came():
    node = Meets()
    lease = node.begin()
    node.come(lease, 5, 3, last=True)
    node.computed()
    assert node.chunk() == (2, B, ())
    node.computed()
    assert node.chunk() == (4, B, (3,))
    node.computed()
    assert node.chunk() == (6, 2, (5,))
    node.computed()
    assert node.one(FirstToken, "g").local == 2 * B


def test_a_prompt_that_comes_goes_before_the_head_of_one_that_waits_for_blocks():
    node = Meets()
    lease = node.begin()
    assert node.chunk() == (0, 2 * B, ())
    node.start("other", prompt(2 * B, base=200))
    node.lease()
    node.reserve("other")
    node.take(ShortenFetch)
    node.come(lease, 4, 5)
    node.advance(0.8)
    node.computed()
    assert node.chunk() == (0, 2 * B, ()), "the other one's"
    assert node.take(ShortenFetch) == []
    node.come(lease, 2, 3, last=True)
    node.computed()
    assert node.chunk() == (6, 2, tuple(range(2, CACHED)))


def test_a_prefill_that_has_another_prompt_waits_for_all_blocks():
    node = Meets()
    node.ready("other", prompt(2 * B, base=100))
    node.start("r", prompt(LENGTH), reuse_blocks=CACHED, sources=("c9",))
    assert node.one(LeaseBlocks, "c").tail_first == 0


@pytest.mark.parametrize(("block_s", "blocks"), [(0.001, 0), (0.04, 4), (0.4, 16), (40.0, 20)])
def test_how_much_is_computed_follows_from_the_rates(block_s, blocks):
    """Of 64 blocks half of what is computed until both ends meet, between the lengths of a short chunk and a long one."""
    meeting = Meeting(0, 64, block_s, 100.0)
    assert meeting.head_blocks(100.0, 0, compute_s=0.4, least=4, most=20) == blocks


def test_the_nearer_both_ends_are_the_shorter_is_a_chunk_and_at_last_the_engine_waits():
    meeting, chunks, block = Meeting(0, 64, 0.4, 100.0), [], 0
    while chunk := meeting.head_blocks(100.0, block, compute_s=0.4, least=4, most=64):
        meeting.stop -= chunk  # as much is fetched
        block += chunk
        chunks.append(chunk)
    assert chunks == [16, 8, 4, 4]


def test_a_source_that_stops_is_outrun():
    meeting = Meeting(0, 6, 0.01, 100.0)
    meeting.take(100.0, {5: SlotRef(node="c", incarnation=7, slot=5, generation=2, checksum=5)}, set(), 0)
    assert meeting.head_blocks(100.1, 0, compute_s=1.0, least=8, most=8) == 0
    assert meeting.head_blocks(110.0, 0, compute_s=1.0, least=8, most=8) == 3
    assert meeting.head_blocks(200.0, 0, compute_s=1.0, least=8, most=8) == 5, "but never what is here"


@pytest.mark.parametrize("end", ["cancel", "pool", "lease", "deadline", "decode"])
@pytest.mark.parametrize("computing", [False, True])
def test_nothing_is_left_of_a_meeting_that_ends(end, computing):
    node = Meets(**({} if computing else {"costs": Costs(transfer_bytes_per_s=1e12)}))
    lease = node.begin()
    assert (node.chunk() is not None) == computing
    node.come(lease, 5)
    match end:
        case "cancel":
            node.say("g", CancelRequest(request_id="r", attempt=1))
        case "pool":
            node.down("c")
        case "lease":
            node.advance(30.0)
        case "deadline":
            node.advance(70.0)
        case "decode":
            node.down("d")
    node.finish()
    node.advance(1.0)
    node.finish()
    if end in ("pool", "lease"):
        assert node.one(FirstToken, "g").local == 0, "what was leased is not read any more"
        node.received()
    node.put_all()
    assert not node.busy()
    assert not node.sequences


def test_blocks_that_do_not_come_find_room_or_the_job_is_placed_again():
    node = Meets(slab_bytes=8 * LAYOUT.slot_bytes, costs=Costs(transfer_bytes_per_s=1e12))
    first = node.begin("a")
    node.start("b", prompt(6 * B + 1, base=100), reuse_blocks=0)
    node.lease()
    node.reserve("b")
    assert node.chunk() == (0, 4 * B, ()), "b's: it took the room"
    node.come(first, last=True)
    node.computed()
    assert "a" not in {job["request"] for job in node.actor.dump(node.now)["jobs"]}
    assert node.actor.counts["jobs_failed"] == 1


def test_a_pool_of_the_former_protocol_answers_with_everything_before_its_lease_ends():
    node = Meets()
    node.down("c")
    node.up("c", 7, protocol=22)
    node.start("r", prompt(LENGTH), reuse_blocks=CACHED, sources=("c9",))
    (ask,) = [ask for _, ask in node.sent if isinstance(ask, LeaseBlocks)]
    assert (ask.tail_first, ask.fetch_s) == (0, node.settings.pool.fetch_s)
    node.reserve()
    assert node.chunk() is None
    node.lease(CACHED, remote=CACHED)
    assert node.chunk() == (6, 2, tuple(range(CACHED)))


def test_without_it_a_job_waits_for_its_lease():
    node = Meets(meet=False)
    node.start("r", prompt(LENGTH), reuse_blocks=CACHED, sources=("c9",))
    assert [ask.tail_first for _, ask in node.sent if isinstance(ask, LeaseBlocks)] == [0]
    node.lease(CACHED)
    node.reserve()
    assert node.chunk() == (6, 2, tuple(range(CACHED)))


def test_the_report_says_whether_it_meets_and_counts_no_block_that_is_fetched():
    node = Meets(costs=Costs(transfer_bytes_per_s=1e12))
    node.begin()
    node.take(PrefillLoad)
    node.advance(0.3)
    (report,) = node.take(PrefillLoad, "k")[-1:]
    assert report.meets
    assert report.jobs[0].left_s == pytest.approx(Costs().compute_s(LENGTH, CACHED * B), rel=0.01)


def test_the_report_counts_a_chunk_of_the_head_and_what_follows_the_tail():
    node = Meets()
    node.begin()
    assert node.chunk() == (0, 2 * B, ())
    node.take(PrefillLoad)
    node.advance(node.settings.report_s)
    (report,) = node.take(PrefillLoad, "k")[-1:]
    chunk_s = SLOW.compute_s(2 * B, 0) - node.settings.report_s
    assert report.jobs[0].left_s == pytest.approx(chunk_s + SLOW.compute_s(LENGTH, CACHED * B))


def test_a_prompt_whose_blocks_come_later_than_they_are_computed_keeps_its_turn():
    node = Meets(costs=replace(SLOW, transfer_bytes_per_s=1e3))
    node.begin()
    assert node.chunk() == (0, 2 * B, ())
    node.start("other", prompt(2 * B, base=200))
    node.lease()
    node.reserve("other")
    node.computed()
    assert node.chunk() == (2, 2 * B, ()), "not the other one's"


def test_a_lease_that_grows_although_everything_is_there_meets_nothing():
    node = Meets()
    lease = node.begin(here=CACHED)
    assert node.chunk() == (6, 2, tuple(range(CACHED)))
    node.come(lease, 3, last=True)
    node.computed()
    assert node.one(FirstToken, "g").met == 0


def test_blocks_of_other_leases_or_places_are_not_taken():
    node = Meets(costs=Costs(transfer_bytes_per_s=1e12))
    lease = node.begin()
    for message in (
        BlocksArrived(lease_id=lease + 1, node="c", incarnation=7, last=True),
        BlocksArrived(lease_id=lease, node="x", incarnation=7, blocks=(5,), slots=(1,), generations=(2,), checksums=(3,)),
        BlocksArrived(lease_id=lease, node="c", incarnation=7, blocks=(99,), slots=(1,), generations=(2,), checksums=(3,)),
    ):
        node.say("c", message)
    (job,) = node.actor.jobs
    assert job.meeting.grows
    assert not job.meeting.arrived
    assert node.chunk() is None
