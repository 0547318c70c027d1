"""The live executor on a stand-in's GPU: one part that was not waited for, or read too early, would change what is sampled."""

import gc
import threading

import pytest
from cuda_stand_in import Gpu
from test_executor import GREEDY, PROMPT, Rig, loads, opened, reference

from mooncake_zmq.core.actor import OpenSequence, WorkDone
from mooncake_zmq.core.messages import SegmentRef
from mooncake_zmq.core.work import (
    BlocksCopied,
    BlocksPulled,
    CopyBlocks,
    ForkSequence,
    PullBlocks,
    SequenceBlock,
    SequenceForked,
    WorkFailed,
)
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.toy import ToyEngine
from mooncake_zmq.transfer.cuda import DeviceSegment, DeviceSequence


class DeviceToy(ToyEngine):
    """The toy with its sequences on the GPU. What it computes lands there at once; what is copied, when that is waited for."""

    def __init__(self, cuda):
        super().__init__()
        self._cuda = cuda

    def new_sequence(self, capacity_tokens):
        spec = self.spec
        shape = {"layers": spec.layers, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
        return DeviceSequence(self._cuda, **shape, capacity_tokens=capacity_tokens)

    def prefill(self, sequence, tokens, **options):
        if not isinstance(sequence, DeviceSequence):
            return super().prefill(sequence, tokens, **options)
        bare = SequenceKV.__new__(SequenceKV)
        bare.keys, bare.values = sequence.keys._array, sequence.values._array
        bare.capacity, bare.length = sequence.capacity, sequence.length
        bare.before, bare.dropped = sequence.before, sequence.dropped
        logits = super().prefill(bare, tokens, **options)
        sequence.length = bare.length
        return logits


class DeviceRig(Rig):
    def hello(self):
        hello = super().hello()
        if not isinstance(self.segment, DeviceSegment):
            return hello
        segment = hello.segment
        ref = SegmentRef(
            path=segment.path,
            endpoint=segment.endpoint,
            slots=segment.slots,
            device=self.segment.device,
            handle=self.segment.handle,
        )
        return type(hello)(**{name: getattr(hello, name) for name in hello.__struct_fields__} | {"segment": ref})


@pytest.fixture
def make_rig(make_segment, make_slab, make_cuda, crashes, tmp_path):
    """A process: "gpu" with a slab there, "pinned" with its sequences there and slots in host memory, "cpu" without."""
    rigs = []

    def make(name, where, **options):
        cuda = options.pop("cuda", None) or (None if where == "cpu" else make_cuda())
        segment = make_slab(cuda, name, slots=16) if where == "gpu" else make_segment(name, slots=16)
        engine = DeviceToy(cuda) if cuda else ToyEngine()
        rigs.append(DeviceRig(name, segment, crashes, tmp_path, engine=engine, serve=True, cuda=cuda, **options))
        rigs[-1].cuda = cuda
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        ended = [event.work_id for event in rig.events if isinstance(event, WorkDone)]
        assert sorted(ended) == list(range(1, rig.next_id + 1)), "every work ends exactly once"
        if rig.cuda:
            gc.collect()
            counts = rig.cuda.counts
            assert (counts["opened"], counts["pinned_bytes"]) == (counts["closed"], counts["unpinned_bytes"])


@pytest.mark.parametrize("where", ["gpu", "pinned"])
def test_chunks_then_steps_equal_the_bare_engine(make_rig, where):
    rig = make_rig("a", where)
    token, more = reference()
    refs, first = rig.prefill()
    assert first == token
    assert rig.decode(1, first) == more
    host = make_rig("b", "cpu")
    assert [ref.checksum for ref in host.prefill()[0]] == [ref.checksum for ref in refs], "of the same bytes"


def test_copies_of_a_sequence_go_on_as_it_does(make_rig):
    rig = make_rig("a", "gpu")
    token, more = reference()
    rig.prefill()
    for sequence in (2, 3):
        rig.executor.open_sequence(OpenSequence(sequence, 32))
    assert rig.run(ForkSequence(1, (2, 3), len(PROMPT))) == SequenceForked()
    assert [rig.decode(sequence, token) for sequence in (1, 3, 2)] == [more] * 3


@pytest.mark.parametrize("verify_local", [True, False])
@pytest.mark.parametrize("source", ["gpu", "cpu"])
@pytest.mark.parametrize("target", ["own", "gpu", "pinned", "cpu"])
def test_a_loaded_prefix_gives_the_same_tokens(make_rig, source, target, verify_local):
    a = make_rig("a", source, verify_local=verify_local)
    rig = a if target == "own" else make_rig("b", target, verify_local=verify_local)
    token, more = reference()
    refs, _ = a.prefill()
    rig.meet(a)
    rig.executor.open_sequence(OpenSequence(9, 32))
    outputs = rig.grants(8)
    work = rig.compute(9, 12, PROMPT[12:], prefix=loads(refs[:3]), outputs=outputs, sampling=GREEDY)
    result = rig.result(work)
    assert (result.token, result.failed) == (token, ())
    assert result.checksums == (refs[3].checksum,)
    assert rig.decode(9, token) == more


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("host", ["here", "there"])
@pytest.mark.parametrize("source", ["gpu", "cpu"])
@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_a_decode_pulls_what_a_prefill_wrote(make_rig, source, target, host, committed):
    a, rig = make_rig("a", source, host=host), make_rig("b", target)
    token, more = reference()
    refs, _ = a.prefill()
    if not committed:
        refs = [opened(ref) for ref in refs]
    rig.meet(a)
    rig.executor.open_sequence(OpenSequence(1, 32))
    result = rig.run(PullBlocks(1, loads(refs)))
    assert isinstance(result, BlocksPulled)
    assert (result.failed, len(result.parts)) == ((), 12)
    assert rig.decode(1, token) == more
    far = host == "there" or (source, target) == ("gpu", "cpu")
    assert rig.executor.read_counts["reads"] == (4 if far else 0)


def test_layers_that_come_in_frames_reach_the_device(make_rig):
    a, rig = make_rig("a", "cpu", host="there"), make_rig("b", "gpu")
    token, more = reference()
    refs, _ = a.prefill()
    rig.meet(a)
    rig.executor.open_sequence(OpenSequence(1, 32))
    work = rig.compute(1, 12, PROMPT[12:], prefix=loads(refs[:3]), outputs=rig.grants(8), sampling=GREEDY)
    assert rig.result(work).token == token
    assert rig.decode(1, token) == more


@pytest.mark.parametrize("prefill", ["gpu", "pinned"])
def test_blocks_go_to_the_pool_and_come_back(make_rig, prefill):
    """Own slab to the pool, a sequence to the pool, the pool to a sequence: with one side on the GPU."""
    a, pool, rig = make_rig("a", prefill), make_rig("c", "cpu"), make_rig("b", "pinned")
    token, more = reference()
    refs, _ = a.prefill()
    for each in (a, rig):
        each.meet(pool)
    grants = pool.grants(0, 1, 2)
    copies = ((refs[0], grants[0]), (refs[1], grants[1]), (SequenceBlock(1, 2), grants[2]))
    result = a.run(CopyBlocks(copies))
    assert isinstance(result, BlocksCopied)
    assert result.checksums == tuple(ref.checksum for ref in refs[:3])
    pooled = pool.commit(grants, result.checksums)
    rig.executor.open_sequence(OpenSequence(1, 32))
    work = rig.compute(1, 12, PROMPT[12:], prefix=loads(pooled), outputs=rig.grants(8), sampling=GREEDY)
    assert rig.result(work).token == token
    assert rig.decode(1, token) == more
    assert rig.cuda.counts["pinned_bytes"] > 0
    assert a.cuda.counts["pinned_bytes"] > 0


@pytest.mark.parametrize("source", ["own slab", "sequence", "far"])
def test_no_put_pins_the_pool_on_the_runtimes_thread(make_rig, source):
    """It takes seconds, for which no heartbeat would be sent."""
    rig, pool, far = make_rig("a", "gpu"), make_rig("c", "cpu"), make_rig("b", "cpu", host="there")
    rig.meet(pool, far)
    refs, _ = (far if source == "far" else rig).prefill()
    grants = pool.grants(0)
    result = rig.run(CopyBlocks(((SequenceBlock(1, 0) if source == "sequence" else refs[0], grants[0]),)))
    assert result.checksums == (refs[0].checksum,)
    assert threading.current_thread() not in rig.cuda.xp.runtime.registering_threads
    assert bool(rig.cuda.counts["pinned_bytes"]) == (source != "far"), "frames are put there by the host"
    if source == "far":
        (pooled,) = pool.commit(grants, result.checksums)
        rig.executor.open_sequence(OpenSequence(1, 32))
        assert rig.run(PullBlocks(1, loads([pooled]))).failed == ()
        assert rig.cuda.counts["pinned_bytes"], "at the first copy of the GPU's"
        assert threading.current_thread() not in rig.cuda.xp.runtime.registering_threads


def test_a_sequence_without_memory_fails_its_works_and_no_others(make_rig):
    rig = make_rig("a", "gpu")
    free = rig.cuda.xp.runtime.free_bytes
    rig.cuda.xp.runtime.free_bytes = 10
    rig.executor.open_sequence(OpenSequence(7, 32))
    rig.cuda.xp.runtime.free_bytes = free
    failed = rig.result(rig.compute(7, 0, PROMPT[:4], outputs=rig.grants(9)))
    assert failed == WorkFailed("no memory for the sequence")
    rig.executor.close_sequence(7)
    token, more = reference()
    _, first = rig.prefill()
    assert (first, rig.decode(1, first)) == (token, more)


def test_memory_that_runs_out_in_a_chunk_fails_the_chunk(make_rig, monkeypatch):
    rig = make_rig("a", "gpu")
    rig.executor.open_sequence(OpenSequence(1, 32))
    monkeypatch.setattr(rig.executor._engine, "prefill", lambda *_arguments, **_options: rig.cuda.xp.empty(2 << 30))
    failed = rig.result(rig.compute(1, 0, PROMPT[:4], outputs=rig.grants(9)))
    assert isinstance(failed, WorkFailed)
    assert "out of memory" in failed.reason


def test_a_gpu_that_the_decode_does_not_see_is_read_over_its_server(make_rig, make_cuda):
    a = make_rig("a", "gpu")
    rig = make_rig("b", "pinned", cuda=make_cuda(Gpu(uuid=b"another GPU 1234")))
    token, more = reference()
    refs, _ = a.prefill()
    rig.meet(a)
    rig.executor.open_sequence(OpenSequence(1, 32))
    assert rig.run(PullBlocks(1, loads(refs))).failed == ()
    assert rig.decode(1, token) == more
    assert rig.executor.read_counts["reads"] == 4


def test_a_restarted_prefill_is_read_by_its_new_handle_alone(make_rig):
    a, rig = make_rig("a", "gpu"), make_rig("b", "pinned")
    rig.meet(a)
    refs, _ = a.prefill()
    rig.executor.open_sequence(OpenSequence(1, 32))
    rig.executor.forget_peer("a")
    gc.collect()
    assert rig.cuda.counts["opened"] == rig.cuda.counts["closed"] == 1
    result = rig.run(PullBlocks(1, loads(refs)))
    assert (result.failed, result.corrupt) == ((0, 1, 2, 3), ())
