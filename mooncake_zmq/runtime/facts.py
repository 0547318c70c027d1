"""Counts, gauges and dumps of a whole process: of the actor and of everything else in it."""

import resource
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mooncake_zmq import __version__
from mooncake_zmq.core import node as node_module
from mooncake_zmq.native.mypyc_code import EXTENSION
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime
from mooncake_zmq.transfer.process_memory import resident_bytes

if TYPE_CHECKING:
    from mooncake_zmq.telemetry.metrics import Snapshot


class Facts:
    """Hold the sources of counts, gauges and dumps, by the component of the process."""

    def __init__(self, *, node: str, host: str, role: str) -> None:
        resident_bytes()  # opened before descriptors run out
        code = "machine" if str(node_module.__file__).endswith(EXTENSION) else "python"
        self._release = f"release[node={node},host={host},role={role},version={__version__},code={code}]"
        self.threads: dict[str, Mapping[str, float]] = {}
        """Counters of the data plane's threads, by component."""
        self.beside: list[Snapshot] = []
        """Counts and gauges of components that are neither the actor nor such a thread; read in the loop."""
        self.dumps: dict[str, Callable[[], Any]] = {}
        """Dumps of components beside the actor, by component."""

    def of_threads(self) -> dict[str, float]:
        """Return counts of the components that run beside the loop."""
        return {name: value for part, counts in self.threads.items() for name, value in named(part, counts).items()}

    def of_process(self, runtime: ZmqRuntime) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return counts and gauges of all components and of the runtime, for metrics and for peers that watch the process."""
        parts = [
            (counts_of(runtime), runtime.gauges()),
            (self.of_threads(), {}),
            *(snapshot() for snapshot in self.beside),
            self.of_itself(),
        ]
        return (
            {name: value for counts, _ in parts for name, value in counts.items()},
            {name: value for _, gauges in parts for name, value in gauges.items()},
        )

    def of_itself(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return the process's CPU time, its resident memory, and a gauge that is 1 and whose labels are node and release."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        gauges = {"process_resident_bytes": resident_bytes(), self._release: 1}
        return {"process_cpu_seconds": used.ru_utime + used.ru_stime}, gauges

    def dump(self) -> dict[str, Any]:
        """Return the state of the components beside the actor."""
        state = {part: dump() for part, dump in self.dumps.items()}
        return {**state, "parts": {part: dict(counts) for part, counts in self.threads.items()}}


def counts_of(runtime: ZmqRuntime) -> dict[str, float]:
    """Return counts of the actor, its session and the runtime."""
    node = runtime.node
    return {**node.actor.counts, **named("session", node.session.counts), **named("zmq", runtime.counts)}


def named(part: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values under names with this component's prefix."""
    return {f"{part}_{name}": value for name, value in values.items()}
