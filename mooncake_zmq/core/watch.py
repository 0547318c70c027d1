"""Who looks at a node, and what a gateway that looks has heard of others: bookkeeping alone; `core.node` says it. PURE."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mooncake_zmq.core.messages import MAX_LEVEL, MAX_LEVELS, MAX_REFUSALS, Moved, Report, Watch, clip
from mooncake_zmq.core.shell import Tally

EVERY_S = 1.0
"""Between two reports to one watcher."""
MAX_WATCHERS = 16
"""Gateways that one node reports to; a further one is not heard until one of them looks no more."""
WATCH_S = 10.0
"""For how long a gateway asks at a time, and twice as often: a node whose watcher is gone soon tells nobody."""
STALE_S = 5.0
"""A report that is older says nothing of how the node is now."""
MAX_LABEL = 160
EPSILON_S = 1e-6


class Watchers:
    """Who asked a node to report, and until when: bounded in number and in time."""

    def __init__(self, counts: Tally) -> None:
        self._counts = counts
        self._until: dict[str, float] = {}
        self._told_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def ask(self, now: float, watcher: str, for_s: float) -> None:
        """One wants to be told from now on for a while; it is due at once unless it was told within a second."""
        self._expire(now)
        if watcher not in self._until and len(self._until) >= MAX_WATCHERS:
            self._counts.add("watches_refused")
        else:
            self._until[watcher] = now + for_s

    def due(self, now: float) -> list[str]:
        """Those to be told now, who count as told."""
        self._expire(now)
        due = [watcher for watcher in self._until if now - self._told_at.get(watcher, -EVERY_S) >= EVERY_S - EPSILON_S]
        self._told_at.update(dict.fromkeys(due, now))
        return due

    def _expire(self, now: float) -> None:
        for watcher in [each for each, until in self._until.items() if until <= now]:
            del self._until[watcher]
            self._told_at.pop(watcher, None)


@dataclass(frozen=True, slots=True)
class Heard:
    """The last report of a node, in the life `incarnation`."""

    at: float
    incarnation: int
    report: Report


class Looking:
    """What a gateway hears of its peers while somebody looks. `heard` holds one report a peer, as long as that is there."""

    def __init__(self) -> None:
        self.until = float("-inf")
        self.heard: dict[str, Heard] = {}
        self._asked: dict[str, tuple[int, float]] = {}
        """By peer: its life, and when it was asked."""

    def look(self, now: float, for_s: float) -> None:
        """Somebody looks, and perhaps for so long."""
        self.until = max(self.until, now + for_s)

    def to_ask(self, now: float, lives: Mapping[str, int]) -> list[tuple[str, Watch]]:
        """Whom to ask now, of the peers that are up, by their lives, while somebody looks."""
        for gone in [peer for peer in self._asked if peer not in lives]:
            del self._asked[gone]
            self.heard.pop(gone, None)
        never = (0, float("-inf"))
        asks: list[tuple[str, Watch]] = []
        for peer, life in lives.items():
            known, at = self._asked.get(peer, never)
            if known != life or now - at >= WATCH_S / 2:
                self._asked[peer] = life, now
                asks.append((peer, Watch(for_s=WATCH_S)))
        return asks

    def hear(self, now: float, peer: str, report: Report) -> None:
        """A peer reports; nothing is kept that nobody asked for."""
        if peer in self._asked:
            self.heard[peer] = Heard(now, self._asked[peer][0], report)

    def awaits(self, lives: Mapping[str, int]) -> bool:
        """Has somebody who is up never reported in this life?"""
        return any(peer not in self.heard or self.heard[peer].incarnation != life for peer, life in lives.items())


def report(
    *,
    uptime_s: float,
    draining: bool,
    resting: bool = False,
    counts: Mapping[str, float],
    gauges: Mapping[str, float],
    moved: Iterable[Moved],
    refused: Mapping[str, str],
) -> Report:
    """What fits into one: gauges first, then counters by name; the rest is counted."""
    levels, totals = _levels(gauges)[:MAX_LEVELS], _levels(counts)
    totals = totals[: MAX_LEVELS - len(levels)]
    told = sorted(refused.items())[:MAX_REFUSALS]
    return Report(
        uptime_s=max(0.0, uptime_s),
        draining=draining,
        resting=resting,
        gauges=tuple(levels),
        counts=tuple(totals),
        moved=tuple(moved),
        refused=tuple([(name, clip(why)) for name, why in told]),
        left_off=len(gauges) + len(counts) + len(refused) - len(levels) - len(totals) - len(told),
    )


def _levels(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Those that a message may say, by name."""
    return [
        (name, float(value))  # a truth value would be sent as one, and its message dropped unread
        for name, value in sorted(values.items())
        if len(name) <= MAX_LABEL and -MAX_LEVEL <= value <= MAX_LEVEL
    ]
