"""The works of lending: what a machine lends is read by another one's steps, as it stands then."""

from collections.abc import Sequence

import numpy as np

from mooncake_zmq.core.messages import LoanPlace
from mooncake_zmq.core.work import BorrowParts, Done, LendSequence, SequenceLent, TakeBack, WorkFailed, lender_lost
from mooncake_zmq.simulation.engine import SimSequence
from mooncake_zmq.simulation.machine import Machine, Running, Steps


def lend(machine: Machine, _: Running, work: LendSequence) -> Steps:
    stop = yield machine.took(machine.world.hardware.probe_s)
    if stop or machine.world.random.random() < machine.world.copy_fail:
        return WorkFailed(stop or "injected failure")
    machine.lent[work.sequence] = machine.sequences[work.sequence]
    token = machine.incarnation.to_bytes(8)
    return SequenceLent(LoanPlace(where="", number=work.sequence, token=token, secret=b"", sealed=False))


def take_back(machine: Machine, _: Running, work: TakeBack) -> Steps:
    yield machine.took(machine.world.hardware.probe_s)
    machine.lent.pop(work.sequence, None)
    return Done()


def borrow(machine: Machine, _: Running, work: BorrowParts) -> Steps:
    stop = yield machine.took(machine.world.hardware.network_start_s)
    if stop:
        return WorkFailed(stop)
    if lost := [part for part in work.parts if machine.world.lent(machine.name, part) is None]:
        return lender_lost(lost[0].lender, "not reached")
    machine.sequences[work.sequence].borrowed = work.parts
    return Done()


def ask(machine: Machine, sequences: Sequence[int]) -> None:
    """Note that a step asks for all that lenders hold of these sequences."""
    for sequence in sequences:
        for part in machine.sequences[sequence].borrowed:
            machine.world.asked_of(part.lender)


def silent_lender(machine: Machine, sequence: int) -> str:
    """Return the first lender of a sequence that does not answer now; empty: there is none."""
    for part in machine.sequences[sequence].borrowed:
        if machine.world.reach(machine.name, part.lender, int.from_bytes(part.place.token)) == "silent":
            return part.lender
    return ""


def whole(machine: Machine, sequence: SimSequence) -> SimSequence | WorkFailed:
    """Return a sequence with all that others hold of it, which is merged as it is named, if each part is reached."""
    parts: list[SimSequence] = []
    for each in sequence.borrowed:
        part = machine.world.lent(machine.name, each)
        if part is None:
            return lender_lost(each.lender, "not reached")
        parts.append(part)
    before = sum(part.capacity for part in parts)
    merged = SimSequence(before + sequence.capacity)
    merged.kv = np.concatenate([*[part.kv for part in parts], sequence.kv], axis=2)
    begins = 0
    merged.approximate_from = merged.capacity
    for part in (*parts, sequence):
        if part.approximate_from < part.capacity:
            merged.approximate_from = min(merged.approximate_from, begins + part.approximate_from)
        begins += part.capacity
    return merged
