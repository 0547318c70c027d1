"""Verdicts on what a run observed, as pure functions that tests give planted faults; nothing here observes a cluster."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mooncake_zmq.chaos.plan import Kind


class Verdict(Enum):
    """The verdict on the tokens that a client got."""

    RIGHT = "right"
    """All expected tokens, or as many as came before the connection broke."""
    SHORT = "short"
    """Right tokens, but the last ones are missing."""
    WRONG = "wrong"
    LOST = "lost"
    """A token is missing, and the following ones came in its place."""
    DUPLICATED = "duplicated"
    """A token came twice, or more tokens came than were asked for."""


_CERTAIN = 3
"""The length of the run of tokens that proves a shift: of 512 ids a single one matches by chance now and then."""


def judge(tokens: Sequence[int], expected: Sequence[int]) -> Verdict:
    """Compare an answer with that of an undisturbed run."""
    agree = next((at for at, (one, other) in enumerate(zip(tokens, expected, strict=False)) if one != other), None)
    if agree is None:
        if len(tokens) > len(expected):
            return Verdict.DUPLICATED
        return Verdict.RIGHT if len(tokens) == len(expected) else Verdict.SHORT
    rest = list(tokens[agree : agree + _CERTAIN])
    if _occurs(rest, expected[agree + 1 :]):
        return Verdict.LOST
    return Verdict.DUPLICATED if _occurs(rest, expected[: agree + _CERTAIN - 1]) else Verdict.WRONG


def _occurs(part: list[int], whole: Sequence[int]) -> bool:
    return any(list(whole[at : at + len(part)]) == part for at in range(len(whole) - len(part) + 1))


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that a process holds."""

    descriptors: int
    rss_bytes: int


MORE_DESCRIPTORS = 24
"""The allowed growth in descriptors. Links to other hosts' data and mapped segments are opened at their first use, some fifteen
in all; a leak with each request or fault passes this soon."""
MORE_RSS_BYTES = 48 << 20
"""The allowed growth in memory: Python's heap after thousands of requests, and the touched pages of peers' segments."""


def grown(
    before: Mapping[str, Footprint], after: Mapping[str, Footprint], more_rss_bytes: int = MORE_RSS_BYTES
) -> Iterator[str]:
    """Yield a problem for each process that holds more than when the cluster was fresh and idle."""
    for name, now in after.items():
        then = before.get(name)
        if then is None:
            continue
        if now.descriptors > then.descriptors + MORE_DESCRIPTORS:
            yield f"{name} has {now.descriptors} descriptors open, and had {then.descriptors} before"
        if now.rss_bytes > then.rss_bytes + more_rss_bytes:
            yield f"{name} has {now.rss_bytes >> 20} MiB resident, and had {then.rss_bytes >> 20} before"


MORE_FOR_STRANGERS_BYTES = 64 << 20
"""The most memory that hostile inputs may make a process hold at any time, beyond its first footprint, and keep: the allocator
returns little of what many small messages took."""


def swollen(before: Mapping[str, Footprint], peaks: Mapping[str, Footprint]) -> Iterator[str]:
    """Yield a problem for each process whose peak was too large."""
    for name, most in peaks.items():
        if name in before and most.rss_bytes > before[name].rss_bytes + MORE_FOR_STRANGERS_BYTES:
            yield f"{name} had {most.rss_bytes >> 20} MiB resident at its worst, and {before[name].rss_bytes >> 20} before"


WARM_S = 60.0
"""The age of an incarnation before which its memory is not judged: it still opens and imports what it uses."""
JUDGED_S = 900.0
"""The observed time of warm incarnations from which on a slope means something."""
MAX_GROWTH_BYTES_PER_H = 32 << 20


@dataclass(slots=True)
class Growth:
    """The slope of one node's memory over the age of its incarnations, by least squares with one intercept per incarnation. It
    shows what leaks with time or requests, whatever each incarnation began with. Holds sums alone."""

    observed_s: float = 0.0
    """The time over which warm incarnations were observed."""
    _variance: float = 0.0
    _covariance: float = 0.0
    _incarnation: int = 0
    _count: int = 0
    _mean_age_s: float = 0.0
    _mean_bytes: float = 0.0
    _last_age_s: float = 0.0

    def saw(self, incarnation: int, age_s: float, rss_bytes: int) -> None:
        """Add one sample of the node in its incarnation `incarnation`, in order of time."""
        if age_s < WARM_S:
            return
        if incarnation != self._incarnation:
            self._incarnation, self._count, self._mean_age_s, self._mean_bytes, self._last_age_s = (
                incarnation,
                0,
                0.0,
                0.0,
                age_s,
            )
        self.observed_s += age_s - self._last_age_s
        self._last_age_s = age_s
        self._count += 1
        off_s = age_s - self._mean_age_s
        self._mean_age_s += off_s / self._count
        self._mean_bytes += (rss_bytes - self._mean_bytes) / self._count
        self._variance += off_s * (age_s - self._mean_age_s)
        self._covariance += off_s * (rss_bytes - self._mean_bytes)

    @property
    def bytes_per_h(self) -> float:
        return 3600 * self._covariance / self._variance if self._variance else 0.0


def growing(growths: Mapping[str, Growth]) -> Iterator[str]:
    """Yield a problem for each node whose memory grew all the time, if it was observed long enough."""
    for name, growth in growths.items():
        if growth.observed_s >= JUDGED_S and growth.bytes_per_h > MAX_GROWTH_BYTES_PER_H:
            yield (
                f"{name} grew by {growth.bytes_per_h / (1 << 20):.0f} MiB an hour over {growth.observed_s / 60:.0f} minutes; "
                f"{MAX_GROWTH_BYTES_PER_H >> 20} are allowed"
            )


def unreached(dumps: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return a problem for each node that does not answer and each peer whose session is not up."""
    return [f"{name} does not answer" for name in names if name not in dumps] + [
        f"{name} is not connected to {peer}"
        for name, dump in dumps.items()
        for peer, state in dump["session"]["peers"].items()
        if not state["up"]
    ]


def busy(dumps: Mapping[str, Any]) -> list[str]:
    """Return a problem for each gauge that is zero in an idle cluster: requests, leases, slots being written, works."""
    return [
        f"{node} has {name} {value:g}"
        for node, dump in dumps.items()
        for name, value in dump["gauges"].items()
        if value and not name.startswith(("capacity_", "cached_"))
    ]


def strangers_in_memory(names: Collection[str], incarnations: Mapping[str, int]) -> list[str]:
    """Return a problem for each segment that belongs to no running incarnation. `names`: files in a host's shared memory;
    `incarnations`: the incarnation of each node."""
    alive = {f"={node}{part}={incarnation}" for node, incarnation in incarnations.items() for part in ("", ".objects")}
    return [
        f"{name} is the segment of no node" for name in names if not any(name.endswith(incarnation) for incarnation in alive)
    ]


@dataclass(frozen=True, slots=True)
class Allowed:
    """A log event of the level error that is right after faults of some kinds, and only then."""

    event: str
    kinds: tuple[Kind, ...]
    because: str


ALLOWED = (
    Allowed(
        "disk_fault", (Kind.DISK_FULL, Kind.DISK_FAIL), "an SSD was made full or failing, and its tier reports what failed"
    ),
    Allowed(
        "block_corrupt_in_memory", (Kind.FLIP_MEMORY,), "a block in DRAM was damaged, and its pool reports that it dropped it"
    ),
)


def bad_lines(lines: Sequence[str], kinds: Collection[Kind]) -> list[str]:
    """Return a log's lines that report a broken rule: of the levels error and critical, or no record at all, such as a
    traceback. `kinds`: the kinds of faults in the run."""
    allowed = {each.event for each in ALLOWED if not set(kinds).isdisjoint(each.kinds)}
    return [line for line in lines if line.strip() and _is_bad(line, allowed)]


def warned(lines: Sequence[str]) -> Counter[str]:
    """Count each warning by its event."""
    found: Counter[str] = Counter()
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            found[record["event"]] += record["level"] == "warning"
    return +found


def _is_bad(line: str, allowed: Collection[str]) -> bool:
    try:
        record = json.loads(line)
        return record["level"] in ("error", "critical") and record["event"] not in allowed
    except (ValueError, KeyError, TypeError):
        return True
