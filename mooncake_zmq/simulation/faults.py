"""Faults as data: kind, targets, time and duration. A seed draws them before its run begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import permutations
from random import Random


class FaultKind(Enum):
    """The kinds of faults in the world of a simulation."""

    DROP = "drop"
    """Frames between any two processes are lost with probability `amount`."""
    DUPLICATE = "duplicate"
    """Frames arrive twice with probability `amount`."""
    DELAY = "delay"
    """Frames take up to `amount` seconds longer each, and overtake one another."""
    PARTITION = "partition"
    """The first target's host and the second's receive nothing from each other."""
    ONE_WAY = "one_way"
    """The second target's host receives nothing from the first's; the other way works."""
    CRASH = "crash"
    """The process loses everything, and restarts after `duration_s`."""
    CLOCK = "clock"
    """The process restarts by a clock that is far ahead, and again after `duration_s` by the right clock."""
    IMPOSTOR = "impostor"
    """The second target is sent a frame by a stranger that claims to be the first one."""
    PAUSE = "pause"
    """The process is stopped by SIGSTOP for `duration_s`: queued events are then late, and copies under way finish late."""
    SUSPEND = "suspend"
    """The target's host is suspended for `duration_s`, as a virtual machine is: nothing there runs, nothing arrives, its clock
    stands still, and it goes on as if no time had passed. `amount` of 1: in the middle of its next read from another host."""
    STOP_READER = "stop_reader"
    """The process is stopped in the middle of its next read of another's slots, for longer than it may read there."""
    STOP_LENDER = "stop_lender"
    """The process is stopped at the next step that asks it for a part of attention."""
    LATE = "late"
    """The targets get no CPU for `duration_s`: they stand still while their sockets fill, and their hosts' kernels show it."""
    STOP_ASKER = "stop_asker"
    """The process is stopped as soon as it has asked a pool for a lease or slots, for longer than the grant lasts."""
    STOP_WRITER = "stop_writer"
    """The process is stopped in the middle of its next copy into a pool, for longer than it may write there."""
    DRAIN = "drain"
    """The operator drains the process, which may take `duration_s`; then it hands over what it has left, exits, and
    restarts."""
    CORDON = "cordon"
    """The operator cordons the target by any gateway that runs, so that it takes nothing new, and uncordons it after
    `duration_s`."""
    ROLE = "role"
    """The operator has the target change its role, and change it again after `duration_s`, to what it then may become."""
    TANGLE = "tangle"
    """The target is cordoned, asked to change its role, and crashes, each while the others last; `amount` numbers the order."""
    CRASH_SENDER = "crash_sender"
    """The process crashes while its store's next value is on its way to a client, and restarts after `duration_s`."""
    SLOW = "slow"
    """Copies and computing on the target's host take `amount` times as long."""
    COPY_FAIL = "copy_fail"
    """Copies report failure with probability `amount`."""
    COPY_TEAR = "copy_tear"
    """Copied bytes are damaged on the way, as by a concurrent writer, with probability `amount` per block."""
    BIT_FLIP = "bit_flip"
    """One bit of each of `amount` blocks held by the target changes, in DRAM and on disk."""
    DISK_FULL = "disk_full"
    """The target's SSD takes no more writes for a while."""
    DISK_FAIL = "disk_fail"
    """The target's SSD fails reads and writes for a while."""
    DISK_SLOW = "disk_slow"
    """The target's SSD takes `amount` times as long for each block."""
    GARBAGE = "garbage"
    """`amount` frames reach the target that are noise, a stranger's, or of an ended incarnation."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `targets` are process names."""

    kind: FaultKind
    at_s: float
    duration_s: float
    targets: tuple[str, ...]
    amount: float = 0.0

    def __str__(self) -> str:
        amount = f" x{self.amount:.3g}" if self.amount else ""
        return f"{self.kind.value}@{self.at_s:.2f}+{self.duration_s:.2f}s({','.join(self.targets)}){amount}"


MIN_FAULTS, MAX_FAULTS, MIN_KINDS = 8, 14, 4


_OF_BLOCKS = (
    *(FaultKind.CORDON, FaultKind.ROLE, FaultKind.TANGLE, FaultKind.LATE, FaultKind.SUSPEND, FaultKind.STOP_READER),
    *(FaultKind.STOP_ASKER, FaultKind.STOP_WRITER, FaultKind.STOP_LENDER, FaultKind.COPY_FAIL, FaultKind.GARBAGE),
)
_READERS = ("prefill", "decode")
LONG_STOP_S = 3.2
"""A stop that is longer than the simulated cluster's `lease_ttl_s`."""
SHORT_DRAIN_S = 0.02
"""A drain that is too short for running works to end."""
STRESS_FAULTS = 4
"""The number of additional faults of each kind to be stressed."""


_DRAWN_ALONE = (
    *(FaultKind.CORDON, FaultKind.LATE, FaultKind.SUSPEND, FaultKind.STOP_READER, FaultKind.STOP_LENDER),
    *(FaultKind.TANGLE, FaultKind.CRASH_SENDER),
)
USUAL = tuple(kind for kind in FaultKind if kind not in _DRAWN_ALONE)
"""The kinds that every seed draws from. Others are drawn by themselves, so that these draws do not depend on them."""
AMID_LATENESS = (
    *(FaultKind.COPY_FAIL, FaultKind.COPY_TEAR, FaultKind.BIT_FLIP),
    *(FaultKind.DISK_FULL, FaultKind.DISK_FAIL, FaultKind.DISK_SLOW),
)
"""The kinds that a seed with late processes draws from: none that may end a conversation, or have a copy that began in the last
moments of a lease, as many do after a lateness, outlast it."""
OF_READERS = (
    *(FaultKind.ROLE, FaultKind.TANGLE),
    *(FaultKind.STOP_ASKER, FaultKind.STOP_WRITER, FaultKind.STOP_READER),
)
"""The kinds that need a prefill or a decode, which a seed whose vLLMs compute alone does not have."""
STORE_FAULTS = tuple(kind for kind in FaultKind if kind not in (*_OF_BLOCKS, FaultKind.CRASH_SENDER))
"""The kinds that a seed with stores alone draws from."""


def draw_faults(
    random: Random,
    *,
    processes: Sequence[str],
    segments: Sequence[str],
    window_s: float,
    stress: Sequence[FaultKind] = (),
    kinds: Sequence[FaultKind] = USUAL,
) -> tuple[Fault, ...]:
    """Draw at least 8 faults of at least 4 kinds, at random times within the window. `segments`: processes that hold blocks."""
    kinds = list(kinds)
    chosen = random.sample(kinds, MIN_KINDS)
    chosen += random.choices(kinds, k=random.randint(MIN_FAULTS, MAX_FAULTS) - MIN_KINDS)
    chosen += list(stress) * STRESS_FAULTS
    faults = [_draw(random, kind, processes, segments, window_s) for kind in chosen]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_cordons(random: Random, *, processes: Sequence[str], window_s: float) -> tuple[Fault, ...]:
    """Draw the cordons that an operator sets for a while. Drawn by themselves, so that other faults do not depend on them."""
    return tuple(_draw(random, FaultKind.CORDON, processes, (), window_s) for _ in range(random.randint(3, 7)))


TANGLES = tuple(permutations((FaultKind.CORDON, FaultKind.ROLE, FaultKind.CRASH)))
"""The orders in which the steps of a tangle begin."""


def draw_tangle(random: Random, *, processes: Sequence[str], window_s: float) -> tuple[Fault, ...]:
    """Draw a node that gets all of an operator's commands and a crash at once. Drawn by itself, so that other faults do not
    depend on it."""
    return (_draw(random, FaultKind.TANGLE, processes, (), window_s),)


def draw_crash_of_sender(random: Random, *, segments: Sequence[str], window_s: float) -> tuple[Fault, ...]:
    """Draw the crash of a store while it sends. Drawn by itself, so that other faults do not depend on it."""
    return (_draw(random, FaultKind.CRASH_SENDER, segments, segments, window_s),)


SUSPENDED_S = (0.3, 4.0)
"""The range of suspensions: some last longer than the host's leases."""


def draw_halts(random: Random, *, processes: Sequence[str], window_s: float) -> tuple[Fault, ...]:
    """Draw hosts that are suspended for a while, and a reader that stops half-way."""
    suspends = [_draw(random, FaultKind.SUSPEND, processes, (), window_s) for _ in range(random.randint(1, 3))]
    readers = [name for name in processes if name.startswith(_READERS)]
    return (*suspends, *(_draw(random, FaultKind.STOP_READER, readers, (), window_s) for _ in readers[:1]))


def draw_stops_of_lenders(random: Random, *, processes: Sequence[str], window_s: float) -> tuple[Fault, ...]:
    """Draw decodes that stop while they are asked for what they lend, some of them for so short that their borrowers wait."""
    return tuple(_draw(random, FaultKind.STOP_LENDER, processes, (), window_s) for _ in range(random.randint(1, 4)))


UNEXPECTED_S = 0.4
"""The lateness that a process bears whose past gives no reason to expect it: peer timeout, less a heartbeat, a tick and the
way."""
STILL_S = (1.0, 3.4)
"""The range of stalls of the whole machine: less than what the peer timeout is stretched by."""


def draw_lates(random: Random, *, processes: Sequence[str], window_s: float) -> tuple[Fault, ...]:
    """Draw processes that are late one after the other, by no more than sessions bear: at first by little, once all at the same
    time by much, and from then on by about as much as they have reported."""
    at_s, still_s = random.uniform(0.5, 1.5), random.uniform(*STILL_S)
    faults = [
        Fault(FaultKind.LATE, at_s, random.uniform(0.05, UNEXPECTED_S), (random.choice(processes),)),
        Fault(FaultKind.LATE, at_s + 1.0, still_s, tuple(processes)),
    ]
    at_s += 2.0 + still_s
    while at_s < window_s:
        late_s = random.uniform(0.2, UNEXPECTED_S + still_s)
        faults.append(Fault(FaultKind.LATE, at_s, late_s, (random.choice(processes),)))
        at_s += late_s + 0.8
    return tuple(faults)


def _draw(random: Random, kind: FaultKind, processes: Sequence[str], segments: Sequence[str], window_s: float) -> Fault:
    at_s = random.uniform(0.02, 0.9) * window_s
    duration_s = random.choice((random.uniform(0.05, 0.8), random.uniform(0.8, 0.5 * window_s)))
    one, two = random.sample(processes, 2)
    match kind:
        case FaultKind.DROP:
            return Fault(kind, at_s, duration_s, (), random.uniform(0.02, 0.4))
        case FaultKind.DUPLICATE:
            return Fault(kind, at_s, duration_s, (), random.uniform(0.05, 0.5))
        case FaultKind.DELAY:
            return Fault(kind, at_s, duration_s, (), random.uniform(0.01, 0.6))
        case FaultKind.PARTITION | FaultKind.ONE_WAY:
            return Fault(kind, at_s, duration_s, (one, two))
        case FaultKind.IMPOSTOR:
            return Fault(kind, at_s, 0.0, (one, two))
        case FaultKind.CLOCK | FaultKind.CRASH | FaultKind.PAUSE | FaultKind.LATE:
            return Fault(kind, at_s, duration_s, (one,))
        case FaultKind.SUSPEND:
            return Fault(kind, at_s, random.uniform(*SUSPENDED_S), (one,), random.choice((0.0, 1.0)))
        case FaultKind.DRAIN:
            return Fault(kind, at_s, random.choice((SHORT_DRAIN_S, duration_s)), (one,))
        case FaultKind.CORDON:
            roles = list(dict.fromkeys(name.rpartition("-")[0] for name in processes))
            role = random.choice(roles)  # or a role with few nodes would hardly ever be drawn
            return Fault(kind, at_s, duration_s, (random.choice([name for name in processes if name.startswith(role)]),))
        case FaultKind.TANGLE:
            changeable = random.choice([name for name in processes if name.startswith(_READERS)])
            return Fault(kind, at_s, random.uniform(0.8, 2.0), (changeable,), random.randrange(len(TANGLES)))
        case FaultKind.CRASH_SENDER:
            store = random.choice([name for name in segments if name.startswith("cache")])
            return Fault(kind, at_s, random.uniform(0.05, 0.8), (store,))
        case FaultKind.ROLE:
            changeable = random.choice([name for name in processes if name.startswith(("prefill", "decode"))])
            return Fault(kind, at_s, duration_s, (changeable,))
        case FaultKind.STOP_ASKER | FaultKind.STOP_WRITER | FaultKind.STOP_READER:
            pool_client = random.choice([name for name in processes if name.startswith(_READERS)])
            return Fault(kind, 0.5 * at_s, LONG_STOP_S * random.uniform(1, 1.4), (pool_client,))
        case FaultKind.STOP_LENDER:
            decode = random.choice([name for name in processes if name.startswith("decode")])
            return Fault(kind, 0.5 * at_s, duration_s, (decode,))
        case FaultKind.SLOW:
            return Fault(kind, at_s, duration_s, (one,), random.uniform(3, 40))
        case FaultKind.COPY_FAIL:
            return Fault(kind, at_s, duration_s, (), random.uniform(0.05, 0.5))
        case FaultKind.COPY_TEAR:
            return Fault(kind, at_s, duration_s, (), random.uniform(0.02, 0.3))
        case FaultKind.BIT_FLIP:
            return Fault(kind, at_s, 0.0, (random.choice(segments),), random.randint(1, 6))
        case FaultKind.DISK_FULL | FaultKind.DISK_FAIL | FaultKind.DISK_SLOW:
            cache_node = random.choice([name for name in segments if name.startswith("cache")])
            amount = random.uniform(5, 50) if kind is FaultKind.DISK_SLOW else 0.0
            return Fault(kind, at_s, duration_s, (cache_node,), amount)
        case FaultKind.GARBAGE:
            return Fault(kind, at_s, 0.0, (one,), random.randint(3, 20))
