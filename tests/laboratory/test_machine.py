"""The modelled machine: works take what they cost, share what their hosts share, and end exactly once."""

import pytest
from lab_bench import COSTS, Bench

from mooncake_zmq.core.actor import WorkProgress
from mooncake_zmq.core.messages import Sampling, SlotRef
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksCopied,
    BlocksPulled,
    ChunkComputed,
    ComputeChunk,
    CopyBlocks,
    DecodeStep,
    DiskBlock,
    DiskWritten,
    PullBlocks,
    SlotGrant,
    StepDecoded,
    StepEntry,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.laboratory.machine import BLOCK, LAYERS, PART, REPORTED_LAYERS
from mooncake_zmq.laboratory.resources import Shared, through

PLACES = {"prefill": "a", "pool": "a", "decode": "b", "decode-2": "c", "pool-b": "b"}
GREEDY = Sampling()
BLOCK_BYTES = 512 * 1000


def ref(node: str, slot: int = 0) -> SlotRef:
    return SlotRef(node=node, incarnation=1, slot=slot, generation=2, checksum=BLOCK)


def loads(node: str, blocks: int) -> tuple[BlockLoad, ...]:
    return tuple(BlockLoad(block, ref(node, block), 0, LAYERS, 512) for block in range(blocks))


def pull(node: str, blocks: int = 10) -> PullBlocks:
    return PullBlocks(1, loads(node, blocks))


def copy(source: object, blocks: int, target: str = "pool") -> CopyBlocks:
    return CopyBlocks(tuple((source, SlotGrant(target, 1, slot, 1)) for slot in range(blocks)))  # type: ignore[misc]


def chunk(tokens: int, *, start: int = 0, prefix: tuple[BlockLoad, ...] = (), prefix_s: float = 100.0) -> ComputeChunk:
    return ComputeChunk(1, start, bytes(4 * tokens), prefix, (SlotGrant("prefill", 1, 0, 1),), GREEDY, prefix_s)


def steps(count: int, *positions: int) -> DecodeStep:
    return DecodeStep(tuple(StepEntry(at, 0, position, GREEDY) for at, position in enumerate(positions)), count)


def test_a_resource_gives_all_who_come_together_its_bandwidth_between_them() -> None:
    shared = Shared(100.0)
    assert [shared.take(0.0, 50.0), shared.take(0.0, 50.0), shared.take(0.2, 100.0)] == [0.5, 1.0, 2.0]
    assert shared.take(10.0, 100.0) == 11.0, "what nobody used is gone"
    assert shared.busy_s == pytest.approx(3.0)


def test_a_way_over_two_resources_is_as_long_as_the_busier_one_takes() -> None:
    slow, quick = Shared(10.0), Shared(100.0)
    quick.take(0.0, 1000.0)
    assert through(0.0, 20.0, (slow, quick)) == pytest.approx(10.2)
    assert slow.free_at == 2.0, "the other one is free for somebody else meanwhile"
    assert through(3.0, 0.0, (slow, quick)) == 3.0


@pytest.mark.parametrize(("readers", "each_s"), [(["decode"], 0.0512), (["decode", "decode-2"], 0.0512)])
def test_pulls_from_one_host_share_what_leaves_its_nic(readers: list[str], each_s: float) -> None:
    """A planted fault, bandwidth that nobody shares, would let both end at the first one's time."""
    bench = Bench(PLACES)
    for reader in readers:
        bench.start(reader, 1, pull("prefill"))
    bench.pass_time(1.0)
    ends = [bench.ends(reader)[1][0] for reader in readers]
    assert ends == [pytest.approx(each_s * (index + 1)) for index in range(len(readers))]


def test_a_pull_on_the_own_host_takes_the_bus_alone_and_what_is_in_the_own_slab_nothing() -> None:
    bench = Bench(PLACES)
    bench.start("prefill", 1, pull("pool"))
    bench.start("prefill", 2, pull("prefill"))
    bench.pass_time(1.0)
    ends = bench.ends("prefill")
    assert ends[1][0] == pytest.approx(10 * BLOCK_BYTES / 1e9)
    assert ends[2][0] == 0.0
    assert bench.hosts["a"].outgoing.busy_s == 0.0


def test_what_was_pulled_folds_to_what_was_announced() -> None:
    bench = Bench(PLACES)
    bench.start("decode", 1, pull("prefill", 3))
    bench.pass_time(1.0)
    result = bench.ends("decode")[1][1]
    assert isinstance(result, BlocksPulled)
    assert result.parts == tuple((block, layer, PART) for block in range(3) for layer in range(LAYERS))
    assert block_checksum([PART] * LAYERS) == BLOCK


@pytest.mark.parametrize(
    ("source", "target", "bytes_per_s"),
    [
        (ref("prefill"), "pool", 1e9),
        (ref("pool"), "pool-b", 1e8),
        (DiskBlock(0, b"k" * 16, BLOCK), "pool", 1e7),
    ],
)
def test_copies_into_a_pool_take_the_way_they_come(source: object, target: str, bytes_per_s: float) -> None:
    bench = Bench(PLACES)
    bench.start(target, 1, copy(source, 4, target))
    bench.pass_time(10.0)
    at, result = bench.ends(target)[1]
    assert at == pytest.approx(4 * BLOCK_BYTES / bytes_per_s)
    assert result == BlocksCopied((BLOCK,) * 4)


def test_reads_and_writes_share_the_disk() -> None:
    bench = Bench(PLACES)
    block = DiskBlock(0, b"k" * 16, BLOCK)
    bench.start("pool", 1, WriteToDisk(((ref("pool"), block),) * 2))
    bench.start("pool", 2, copy(block, 2))
    bench.pass_time(10.0)
    ends = bench.ends("pool")
    assert ends[1][0] == pytest.approx(2 * BLOCK_BYTES / 1e7)
    assert ends[1][1] == DiskWritten((True, True))
    assert ends[2][0] == pytest.approx(4 * BLOCK_BYTES / 1e7)


@pytest.mark.parametrize(("blocks", "longer"), [(1, "compute"), (2000, "load")])
def test_loading_a_prefix_overlaps_with_computing(blocks: int, longer: str) -> None:
    bench = Bench(PLACES)
    start = blocks * 512
    bench.start("prefill", 1, chunk(10, start=start, prefix=loads("pool", blocks)))
    bench.pass_time(100.0)
    at, result = bench.ends("prefill")[1]
    compute_s, load_s = COSTS.compute_s(start + 10, start), blocks * BLOCK_BYTES / 1e9
    assert (load_s > compute_s) == (longer == "load")
    assert at == pytest.approx(max(compute_s, load_s))
    assert isinstance(result, ChunkComputed)
    assert (result.checksums, result.token, result.failed) == ((BLOCK,), 0, ())


def test_a_prefix_that_comes_after_its_lease_has_failed() -> None:
    bench = Bench(PLACES)
    bench.start("prefill", 1, chunk(512, start=10_240, prefix=loads("pool", 20), prefix_s=0.001))
    bench.pass_time(100.0)
    at, result = bench.ends("prefill")[1]
    assert at == pytest.approx(0.001)
    assert isinstance(result, ChunkComputed)
    assert result.failed == tuple(range(20))


def test_a_chunk_tells_how_far_it_is_before_it_ends() -> None:
    bench = Bench(PLACES)
    bench.start("prefill", 1, chunk(1000))
    bench.pass_time(100.0)
    whole_s = COSTS.compute_s(1000, 0)
    told = [(at, event.progress.stop_layer) for at, event in bench.told["prefill"] if isinstance(event, WorkProgress)]
    assert [layer for _, layer in told] == [*REPORTED_LAYERS, LAYERS]
    assert [at for at, _ in told] == pytest.approx([whole_s * layer / LAYERS for _, layer in told])


def test_an_engine_does_one_thing_at_a_time() -> None:
    bench = Bench(PLACES)
    bench.start("prefill", 1, chunk(1000))
    bench.start("prefill", 2, chunk(1000))
    bench.pass_time(100.0)
    ends = bench.ends("prefill")
    assert ends[2][0] == pytest.approx(2 * ends[1][0])
    assert bench.machine("prefill").busy_s == pytest.approx(ends[2][0])


def test_a_cancelled_chunk_stops_at_once_and_tells_no_more() -> None:
    bench = Bench(PLACES)
    bench.start("prefill", 1, chunk(10_000))
    bench.pass_time(0.1)
    bench.machine("prefill").cancel(1)
    bench.pass_time(100.0)
    at, result = bench.ends("prefill")[1]
    assert at == pytest.approx(0.1)
    assert result == WorkFailed("cancelled")
    assert not [event for _, event in bench.told["prefill"] if isinstance(event, WorkProgress)]
    assert bench.machine("prefill").busy_s == pytest.approx(0.1)


def test_a_work_that_takes_too_long_fails_at_its_deadline() -> None:
    bench = Bench(PLACES)
    bench.start("decode", 1, pull("prefill", 1000), deadline_s=0.5)
    bench.pass_time(100.0)
    assert bench.ends("decode") == {1: (0.5, WorkFailed("deadline"))}


def test_steps_take_what_their_batch_and_growing_contexts_cost() -> None:
    bench = Bench(PLACES)
    bench.start("decode", 1, steps(3, 999, 4999))
    bench.pass_time(100.0)
    at, result = bench.ends("decode")[1]
    assert at == pytest.approx(sum(COSTS.step_s(2, 6000 + 2 * made) for made in range(3)))
    assert isinstance(result, StepDecoded)
    assert result.tokens == ((0, 0),) * 3
    assert result.elapsed_s == pytest.approx(at)


@pytest.mark.parametrize(("cancelled_at", "made"), [(0.001, 1), (0.0221, 1), (0.0223, 2), (0.05, 3), (5.0, 40)])
def test_steps_end_at_the_next_border_when_they_are_cancelled(cancelled_at: float, made: int) -> None:
    bench = Bench(PLACES)
    bench.start("decode", 1, steps(40, 9_999, 9_999))
    bench.pass_time(cancelled_at)
    bench.machine("decode").cancel(1)
    bench.machine("decode").cancel(1)
    bench.pass_time(100.0)
    at, result = bench.ends("decode")[1]
    assert isinstance(result, StepDecoded)
    assert len(result.tokens) == made
    assert at == pytest.approx(sum(COSTS.step_s(2, 20_000 + 2 * step) for step in range(made)))
    assert bench.machine("decode").last_run is not None


def test_a_machine_whose_process_died_tells_nothing() -> None:
    bench = Bench(PLACES)
    bench.start("decode", 1, steps(3, 10))
    bench.world.crash("decode")
    bench.world.restart("decode")
    bench.pass_time(10.0)
    assert bench.told["decode"] == []
