"""The way in which each kind of work is carried out on a simulated machine."""

from mooncake_zmq.core.work import (
    BorrowParts,
    ComputeChunk,
    ComputeStage,
    CopyBlocks,
    DecodeStep,
    Embed,
    ForkSequence,
    Generate,
    LendSequence,
    ProbeEngine,
    ProbeProcess,
    ProcessProbed,
    PullBlocks,
    ReadTokens,
    SampleTokens,
    TakeBack,
    WatchEngine,
    WriteChat,
    WriteToDisk,
)
from mooncake_zmq.simulation import copy_works, disk_works, engine_works, loan_works, vllm_works
from mooncake_zmq.simulation.machine import Machine, Running, Steps


def steps_of(machine: Machine, running: Running) -> Steps:
    """Return the steps of a work, by its kind."""
    match running.work:
        case ComputeChunk() as work:
            return engine_works.compute(machine, running, work)
        case ComputeStage() as work:
            return engine_works.compute_stage(machine, running, work)
        case PullBlocks() as work:
            return copy_works.pull(machine, running, work)
        case DecodeStep() as work:
            return engine_works.decode(machine, running, work)
        case ForkSequence() as work:
            return engine_works.fork(machine, running, work)
        case SampleTokens() as work:
            return engine_works.sample_late(machine, work)
        case CopyBlocks() as work:
            return copy_works.copy(machine, running, work)
        case WriteToDisk() as work:
            return disk_works.write_to_disk(machine, work)
        case ProbeProcess() as work:
            return probe(machine, work)
        case LendSequence() as work:
            return loan_works.lend(machine, work)
        case TakeBack() as work:
            return loan_works.take_back(machine, work)
        case BorrowParts() as work:
            return loan_works.borrow(machine, work)
        case Generate() as work:
            return vllm_works.generate(machine, running, work)
        case Embed() as work:
            return vllm_works.embed(machine, running, work)
        case ProbeEngine() as work:
            return vllm_works.probe_engine(machine, work)
        case ReadTokens() as work:
            return vllm_works.read_tokens(machine, work)
        case WriteChat() as work:
            return vllm_works.write_chat(machine, work)
        case WatchEngine() as work:
            raise TypeError(work)  # simulated ones publish nothing


def probe(machine: Machine, work: ProbeProcess) -> Steps:
    """Return whether a process still holds the lock of its incarnation."""
    yield machine.took(machine.world.hardware.probe_s)
    return ProcessProbed(machine.world.alive(work.node, work.incarnation))
