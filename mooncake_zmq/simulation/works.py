"""The way in which each kind of work is carried out on a simulated machine."""

from collections.abc import Callable, Mapping
from typing import Any

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
    Work,
    WriteChat,
    WriteToDisk,
)
from mooncake_zmq.simulation import copy_works, disk_works, engine_works, loan_works, vllm_works
from mooncake_zmq.simulation.machine import Machine, Running, Steps


def probe(machine: Machine, _: Running, work: ProbeProcess) -> Steps:
    """Return whether a process still holds the lock of its incarnation."""
    yield machine.took(machine.world.hardware.probe_s)
    return ProcessProbed(machine.world.alive(work.node, work.incarnation))


STEPS: Mapping[type[Work], Callable[[Machine, Running, Any], Steps]] = {
    ComputeChunk: engine_works.compute,
    ComputeStage: engine_works.compute_stage,
    PullBlocks: copy_works.pull,
    DecodeStep: engine_works.decode,
    ForkSequence: engine_works.fork,
    SampleTokens: engine_works.sample_late,
    CopyBlocks: copy_works.copy,
    WriteToDisk: disk_works.write_to_disk,
    ProbeProcess: probe,
    LendSequence: loan_works.lend,
    TakeBack: loan_works.take_back,
    BorrowParts: loan_works.borrow,
    Generate: vllm_works.generate,
    Embed: vllm_works.embed,
    ProbeEngine: vllm_works.probe_engine,
    ReadTokens: vllm_works.read_tokens,
    WriteChat: vllm_works.write_chat,
}
"""All kinds but `WatchEngine`: simulated engines publish nothing."""


def steps_of(machine: Machine, running: Running) -> Steps:
    """Return the steps of a work, by its kind."""
    return STEPS[type(running.work)](machine, running, running.work)
