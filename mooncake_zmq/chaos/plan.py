"""The faults of a run as data: kinds, times and targets, drawn from a seed before anything runs. PURE: it touches nothing."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from mooncake_zmq.core.roles import Role


class Kind(Enum):
    """The kinds of faults of a cluster of real processes."""

    KILL = "kill"
    """The target is killed by SIGKILL; its supervisor starts it again after `duration_s`."""
    FLAP = "flap"
    """The target is killed `amount` times, each `duration_s` after its last start, and every other time after all peers know of
    it."""
    STOP = "stop"
    """The target is stopped by SIGSTOP for `duration_s`, mostly beyond the peer timeout, sometimes beyond a lease."""
    DRAIN = "drain"
    """The target is drained by SIGTERM, and started again once it has ended."""
    ROLLING = "rolling"
    """The targets are drained and started again, one after the other."""
    ROTATE = "rotate"
    """As `rolling`, and each target's key is rotated before its restart; the former keys are deleted in the end."""
    TAKEOVER = "takeover"
    """The conductor in use is stopped: the other one must decide."""
    REBOOT = "reboot"
    """Every node of a host is killed at once, and its runtime directory and shared memory are empty when they start again."""
    LOST_CLOCK = "lost_clock"
    """A host reboots with its clock `amount` seconds ahead, and again with the right time: nothing on it remembers the
    incarnations in between, whose numbers were greater."""
    POOLS = "pools"
    """Every cache-node is killed at once."""
    EVERYTHING = "everything"
    """Every node is killed at once, and then started."""
    PARTITION = "partition"
    """The first target's host and the second's lose each other's packets."""
    ONE_WAY = "one_way"
    """Packets from the first target's host to the second's are lost; the other way works."""
    DELAY = "delay"
    """Packets of the target's host take `amount` seconds longer."""
    DISK_FULL = "disk_full"
    """The SSD of the target's host takes no more bytes."""
    DISK_FAIL = "disk_fail"
    """Reads and writes of the SSD of the target's host fail."""
    FLIP_DISK = "flip_disk"
    """`amount` bytes in the target's files on SSD change."""
    FLIP_MEMORY = "flip_memory"
    """One byte changes in each of `amount` committed blocks of the target, in shared memory."""
    CLOCK = "clock"
    """The wall clock of the target's host is `amount` seconds off; the target restarts then, and again afterwards."""
    FORGE = "forge"
    """`amount` frames from strangers reach the target's control socket, valid ones among them."""

    @property
    def is_outage(self) -> bool:
        """Return whether it takes something away that streams may be using."""
        return self in _OUTAGES

    @property
    def ends_processes(self) -> bool:
        """Return whether a process ends by it."""
        return self.is_outage and self not in (Kind.STOP, Kind.TAKEOVER, Kind.PARTITION, Kind.ONE_WAY)


_OUTAGES = frozenset(
    (
        *(Kind.KILL, Kind.FLAP, Kind.STOP, Kind.DRAIN, Kind.ROLLING, Kind.ROTATE, Kind.TAKEOVER, Kind.CLOCK),
        *(Kind.REBOOT, Kind.LOST_CLOCK, Kind.POOLS, Kind.EVERYTHING, Kind.PARTITION, Kind.ONE_WAY),
    )
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `targets` are names of nodes. It begins `at_s` after the start, or later: see `beside`."""

    kind: Kind
    at_s: float
    duration_s: float
    targets: tuple[str, ...]
    amount: float = 0.0
    beside: bool = False
    """Whether it begins without waiting for the end of the outage before it."""

    def __str__(self) -> str:
        lasting = f" for {self.duration_s:.1f} s" if self.duration_s else ""
        amount = f" x{self.amount:g}" if self.amount else ""
        return f"{self.kind.value} {', '.join(self.targets)}{lasting}{amount}{_BESIDE * self.beside}"


_BESIDE = " (beside the one before)"

SETTLE_S = 3.0
"""The estimated time until a cluster is whole again after an outage."""
BESIDE_SHARE = 0.2
"""The share of outages that overlap with another one."""
LONG_S = 180.0
"""The length from which on a run has time to restart every node in turn."""
CLOCK_JUMPS_S = (86_400.0, -86_400.0, 3_600.0, -90.0, 7.5)
RESTART_S = (0.2, 3.0)
FLAP_S = (0.1, 1.5)
"""The range of uptimes of a node that flaps: some end before the first greeting of a peer."""
STOP_S = ((0.3, 2.0), (3.5, 6.0), (10.0, 14.0))
"""Ranges of durations: shorter than the peer timeout, longer, and longer than most leases."""


def draw_plan(seed: int, duration_s: float, nodes: Mapping[str, Role], kinds: Collection[Kind] = tuple(Kind)) -> list[Fault]:
    """Return the faults of a run: every kind once, in the seed's order, before any comes again. `nodes`: their roles by name,
    in the deployment's order."""
    random = Random(f"chaos {seed}")
    faults: list[Fault] = []
    at_s, free_at_s = 1.0, 0.0
    for kind in _deal(random, [kind for kind in Kind if kind in kinds]):
        beside = kind.is_outage and bool(faults) and random.random() < BESIDE_SHARE
        if kind.is_outage and not beside:
            at_s = max(at_s, free_at_s)
        if at_s >= duration_s:
            break
        fault = _draw(random, kind, round(at_s, 1), nodes, beside=beside, long=duration_s >= LONG_S)
        faults.append(fault)
        if kind.is_outage:
            free_at_s = max(free_at_s, at_s + fault.duration_s + SETTLE_S)
        at_s += random.uniform(0.3, 3.0)
    return faults


def _deal(random: Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    while kinds:
        yield from random.sample(kinds, len(kinds))


def _draw(random: Random, kind: Kind, at_s: float, nodes: Mapping[str, Role], *, beside: bool, long: bool) -> Fault:
    def of(*roles: Role) -> list[str]:
        return [name for name, role in nodes.items() if role in roles]

    def fault(targets: Sequence[str], duration_s: float = 0.0, amount: float = 0.0) -> Fault:
        return Fault(kind, at_s, round(duration_s, 1), tuple(targets), amount, beside)

    anyone = random.choice(list(nodes))
    pools = of("cache-node")
    match kind:
        case Kind.KILL:
            return fault([anyone], random.uniform(*RESTART_S))
        case Kind.FLAP:
            return fault([anyone], random.uniform(*FLAP_S), random.randint(3, 6))
        case Kind.STOP:
            return fault([anyone], random.uniform(*random.choice(STOP_S)))
        case Kind.DRAIN:
            return fault([anyone])
        case Kind.ROLLING | Kind.ROTATE:
            return fault(list(nodes) if long else random.choice((of("prefill"), of("decode"), pools)))
        case Kind.TAKEOVER:
            return fault(of("conductor")[:1], random.uniform(*STOP_S[1]))
        case Kind.REBOOT:
            return fault([random.choice(pools)], random.uniform(*RESTART_S))
        case Kind.LOST_CLOCK:
            return fault([random.choice(pools)], random.uniform(*RESTART_S), random.choice((60.0, 3_600.0, 86_400.0)))
        case Kind.POOLS:
            return fault(pools, random.uniform(*RESTART_S))
        case Kind.EVERYTHING:
            return fault(list(nodes), random.uniform(*RESTART_S))
        case Kind.PARTITION | Kind.ONE_WAY:
            return fault(random.sample(pools, 2), random.uniform(2.0, 8.0))
        case Kind.DELAY:
            return fault([random.choice(pools)], random.uniform(3.0, 10.0), round(random.uniform(0.01, 0.1), 3))
        case Kind.DISK_FULL | Kind.DISK_FAIL:
            return fault([random.choice(pools)], random.uniform(2.0, 8.0))
        case Kind.FLIP_DISK:
            return fault([random.choice(pools)], amount=random.randint(20, 2000))
        case Kind.FLIP_MEMORY:
            return fault([random.choice(of("cache-node", "prefill"))], amount=random.randint(5, 200))
        case Kind.CLOCK:
            return fault([anyone], random.uniform(2.0, 5.0), random.choice(CLOCK_JUMPS_S))
        case Kind.FORGE:
            return fault([anyone], amount=random.randint(50, 500))
