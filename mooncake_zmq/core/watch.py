"""Bookkeeping of watching: a node's watchers, and a gateway's reports from its peers. `core.node` sends the messages. PURE."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import MAX_LEVEL, MAX_LEVELS, MAX_REFUSALS, MAX_SECONDS, Moved, Report, Watch, clip

EVERY_S = 1.0
"""Interval of reports to one watcher."""
MAX_WATCHERS = 16
"""Gateways that one node reports to; a further one is ignored until one of them stops watching."""
WATCH_S = 10.0
"""Duration of one `Watch`, repeated after half of it: a node soon stops reporting to a watcher that is gone."""
STALE_S = 5.0
"""Age from which a report no longer shows the node's present state."""
MAX_LABEL = 160
EPSILON_S = 1e-6


class Watchers:
    """The watchers of a node and when each one's watch ends: bounded in number and in time."""

    def __init__(self, counts: Tally) -> None:
        self._counts = counts
        self._until: dict[str, float] = {}
        self._sent_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def ask(self, now: float, watcher: str, for_s: float) -> None:
        """Add a watcher, or extend its watch. Its report is due at once unless it got one within a second."""
        self._expire(now)
        if watcher not in self._until and len(self._until) >= MAX_WATCHERS:
            self._counts.add("watches_refused")
        else:
            self._until[watcher] = now + for_s

    def due(self, now: float) -> list[str]:
        """Return the watchers whose report is due now, and count it as sent."""
        self._expire(now)
        due = [watcher for watcher in self._until if now - self._sent_at.get(watcher, -EVERY_S) >= EVERY_S - EPSILON_S]
        self._sent_at.update(dict.fromkeys(due, now))
        return due

    def _expire(self, now: float) -> None:
        for watcher in [each for each, until in self._until.items() if until <= now]:
            del self._until[watcher]
            self._sent_at.pop(watcher, None)


@dataclass(frozen=True, slots=True)
class PeerReport:
    """The last report of the incarnation `incarnation` of a node."""

    at: float
    incarnation: int
    report: Report


class Looking:
    """Reports that a gateway gets from its peers while it watches. `reports` holds the last one of each peer that is up."""

    def __init__(self) -> None:
        self.until = float("-inf")
        self.reports: dict[str, PeerReport] = {}
        self._asked: dict[str, tuple[int, float]] = {}
        """Incarnation and time of the last `Watch`, by peer."""

    def look(self, now: float, for_s: float) -> None:
        """Watch the peers for `for_s` seconds from now on."""
        self.until = max(self.until, now + for_s)

    def to_ask(self, now: float, incarnations: Mapping[str, int]) -> list[tuple[str, Watch]]:
        """Return a `Watch` for each peer that needs one now. `incarnations`: the incarnations of the peers that are up."""
        for gone in [peer for peer in self._asked if peer not in incarnations]:
            del self._asked[gone]
            self.reports.pop(gone, None)
        never = (0, float("-inf"))
        watches: list[tuple[str, Watch]] = []
        for peer, incarnation in incarnations.items():
            known, at = self._asked.get(peer, never)
            if known != incarnation or now - at >= WATCH_S / 2:
                self._asked[peer] = incarnation, now
                watches.append((peer, Watch(for_s=WATCH_S)))
        return watches

    def receive_report(self, now: float, peer: str, report: Report) -> None:
        """Keep a peer's report if it was requested."""
        if peer in self._asked:
            self.reports[peer] = PeerReport(now, self._asked[peer][0], report)

    def awaits(self, incarnations: Mapping[str, int]) -> bool:
        """Return whether a peer that is up has not reported in its present incarnation."""
        return any(
            peer not in self.reports or self.reports[peer].incarnation != incarnation
            for peer, incarnation in incarnations.items()
        )


def report(
    *,
    uptime_s: float,
    draining: bool,
    cordoned: bool = False,
    counts: Mapping[str, float],
    gauges: Mapping[str, float],
    moved: Iterable[Moved],
    refused: Mapping[str, str],
) -> Report:
    """Return a report of what fits: gauges first, then counters by name; the others are only counted in `left_off`."""
    levels, totals = _levels(gauges)[:MAX_LEVELS], _levels(counts)
    totals = totals[: MAX_LEVELS - len(levels)]
    shown = sorted(refused.items())[:MAX_REFUSALS]
    return Report(
        uptime_s=min(max(0.0, uptime_s), MAX_SECONDS),  # beyond a limit, no peer would read the report
        draining=draining,
        cordoned=cordoned,
        gauges=tuple(levels),
        counts=tuple(totals),
        moved=tuple(moved),
        refused=tuple([(name, clip(why)) for name, why in shown]),
        left_off=len(gauges) + len(counts) + len(refused) - len(levels) - len(totals) - len(shown),
    )


def _levels(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the levels that a message may hold, by name."""
    return [
        (name, float(value))  # a bool would be sent as one, and the receiver would drop the message
        for name, value in sorted(values.items())
        if len(name) <= MAX_LABEL and -MAX_LEVEL <= value <= MAX_LEVEL
    ]
