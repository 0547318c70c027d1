"""Counts, gauges and dumps of a whole process, which has more to it than its actor."""

from collections.abc import Callable, Mapping
from typing import Any

from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime
from mooncake_zmq.telemetry.metrics import Snapshot


class Facts:
    """Sources of counts, gauges and dumps, by the part of the process that they belong to."""

    def __init__(self) -> None:
        self.threads: dict[str, Mapping[str, float]] = {}
        """Counters of the data plane's threads, by part."""
        self.beside: list[Snapshot] = []
        """Counts and gauges of parts that are neither the actor nor such a thread; asked in the loop."""
        self.dumps: dict[str, Callable[[], Any]] = {}
        """Dumps of parts beside the actor, by part."""

    def of_threads(self) -> dict[str, float]:
        """Counts of the parts that run beside the loop."""
        return {name: value for part, counts in self.threads.items() for name, value in named(part, counts).items()}

    def of_process(self, runtime: ZmqRuntime) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Counts and gauges of all parts and of the runtime, for metrics and for peers that watch the process."""
        parts = [(counts_of(runtime), runtime.gauges()), (self.of_threads(), {}), *(snapshot() for snapshot in self.beside)]
        return (
            {name: value for counts, _ in parts for name, value in counts.items()},
            {name: value for _, gauges in parts for name, value in gauges.items()},
        )

    def dump(self) -> dict[str, Any]:
        """State of the parts beside the actor."""
        state = {part: dump() for part, dump in self.dumps.items()}
        return {**state, "parts": {part: dict(counts) for part, counts in self.threads.items()}}


def counts_of(runtime: ZmqRuntime) -> dict[str, float]:
    """Counts of the actor, its session and the runtime."""
    node = runtime.node
    return {**node.actor.counts, **named("session", node.session.counts), **named("zmq", runtime.counts)}


def named(part: str, values: Mapping[str, float]) -> dict[str, float]:
    """The same values under names that begin with the part's."""
    return {f"{part}_{name}": value for name, value in values.items()}
