"""The drain of a node of a healed cluster in the middle of long answers: they go on elsewhere, and the node is soon idle."""

from typing import Any

from mooncake_zmq.simulation.cluster import GRACE_S
from mooncake_zmq.simulation.cordon_checker import HAS
from mooncake_zmq.simulation.models import adapters_of
from mooncake_zmq.simulation.operator import Operator
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.violation import Violation

BEGINS_S = 0.6
"""The time from the arrival of the requests to the drain: most of them have a part of their answer."""
WITHIN_S = GRACE_S + 0.6
"""The time within which a drained node has nothing left where others have room: the grace, the way of the operator's order, and
the end of what was in flight. The answers take two to five times as long."""
LOOKS = 12
"""The number of looks at the other nodes during that time."""
SPARE_TOKENS = 16
"""KV that a decode needs beside what a request holds at another one."""


class DrainTrial:
    """Drains the decode or vLLM of a simulator's cluster that has the most requests."""

    def __init__(self, simulator: Simulator, operator: Operator) -> None:
        self._simulator = simulator
        self._operator = operator
        self.drained = 0.0
        """The number of requests that the drained node had."""
        self._troubled: set[str] = set()
        """The vLLMs that were not well at some look."""

    def begin(self) -> None:
        """Schedule the drain, its check and its end."""
        self._simulator.at(self._simulator.now + BEGINS_S, self._drain)

    def _drain(self) -> None:
        name, self.drained = max(((name, self._left(name)) for name in self._engines()), key=lambda each: each[1])
        self._operator.cordon(name, True)
        for look in range(LOOKS):
            self._simulator.at(self._simulator.now + look * WITHIN_S / LOOKS, self._look)
        self._simulator.at(self._simulator.now + WITHIN_S, self._check, name)

    def _look(self) -> None:
        now = self._simulator.now
        self._troubled |= {name for name in self._engines() if self._actor(name).gauges(now).get("capacity_engines") == 0}

    def _check(self, name: str) -> None:
        """Check I4: the node is idle unless no other could take what it has."""
        left = self._left(name)
        if left and any(self._has_room(name, other) for other in self._engines() if other not in {name, *self._troubled}):
            raise Violation("I4", f"{name} has {left:g} requests {WITHIN_S:g} s after its drain began, and another has room")
        self._operator.uncordon(name)

    def _has_room(self, name: str, other: str) -> bool:
        """Return whether another node could take any request of a drained one."""
        processes = self._simulator.processes
        one, two = [(spec.role, spec.model, spec.part) for spec in (processes[name].spec, processes[other].spec)]
        levels = self._actor(other).gauges(self._simulator.now)
        if one[0] == "vllm":
            needed = {job.request.adapter for job in self._actor(name)._jobs.values()} - {""}
            return one == two and levels["requests_waiting"] == 0 and needed <= set(adapters_of(other, one[1]))
        held = max((each.budget_tokens for each in self._actor(name).requests), default=0)
        return one == two and levels["capacity_tokens"] - levels["reserved_tokens"] >= held + SPARE_TOKENS

    def _left(self, name: str) -> float:
        levels = self._actor(name).gauges(self._simulator.now)
        return float(sum(levels[gauge] for gauge in HAS[self._simulator.processes[name].spec.role]))

    def _engines(self) -> list[str]:
        processes = self._simulator.processes
        return [name for name, each in processes.items() if each.spec.role in ("decode", "vllm") and each.current is not None]

    def _actor(self, name: str) -> Any:
        current = self._simulator.processes[name].current
        assert current is not None, f"{name} runs, as nothing fails by now"
        return current.actor
