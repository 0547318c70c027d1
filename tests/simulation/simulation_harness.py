"""A small world with actors that do what a test tells them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mooncake_zmq.core.actor import Effect, Event
from mooncake_zmq.core.session import SessionSettings
from mooncake_zmq.simulation.checkers import Checkers
from mooncake_zmq.simulation.engine import sim_layout
from mooncake_zmq.simulation.injection import Injection
from mooncake_zmq.simulation.machine import Hardware
from mooncake_zmq.simulation.share_checker import ShareChecker
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.world import ProcessSpec

LAYOUT = sim_layout(4)
STEADY = Hardware(jitter=0.0)


@dataclass
class Puppet:
    """Writes down what it hears; does what `react` says, and what a test hands to the simulator for it."""

    incarnation: int
    react: Callable[[float, Event], list[Effect]] = lambda now, event: []
    heard: list[tuple[float, Event]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def handle(self, now: float, event: Event) -> list[Effect]:
        self.heard.append((now, event))
        return self.react(now, event)

    def check(self, now: float) -> None:
        pass

    def gauges(self, now: float) -> dict[str, float]:
        return {}

    def dump(self, now: float) -> dict[str, Any]:
        return {}

    def events(self, kind: type) -> list[Any]:
        return [event for _, event in self.heard if isinstance(event, kind)]


class World:
    """Puppets by name, all incarnations of each, on two hosts."""

    def __init__(
        self, places: dict[str, str], *, slots: int = 4, role: str = "prefill", seed: int = 1, blocks: Any = None
    ) -> None:
        self.puppets: dict[str, list[Puppet]] = {name: [] for name in places}
        self.checkers = Checkers(
            blocks=blocks or {},
            roots=(),
            block_tokens=LAYOUT.block_tokens,
            max_lease_s=10.0,
            shares=ShareChecker({}, {}),
        )
        specs = [
            ProcessSpec(
                name=name,
                role="cache-node" if name.startswith("cache") else role,
                host=host,
                peers=tuple(other for other in places if other != name),
                make=lambda incarnation, _disk, name=name: self._make(name, incarnation),
                slots=slots,
            )
            for name, host in places.items()
        ]
        self.simulator = Simulator(
            random=Random(seed),
            specs=specs,
            layout=LAYOUT,
            hardware=STEADY,
            session=SessionSettings(heartbeat_s=0.4, peer_timeout_s=1.3, retransmit_s=0.3),
            checkers=self.checkers,
        )
        self.injection = Injection(self.simulator)
        self.simulator.run_until(0.5)

    def _make(self, name: str, incarnation: int) -> Puppet:
        puppet = Puppet(incarnation)
        self.puppets[name].append(puppet)
        return puppet

    def puppet(self, name: str) -> Puppet:
        """The present current."""
        return self.puppets[name][-1]

    def does(self, name: str, *effects: Effect) -> None:
        """Let the process carry out effects now, as if its actor had just asked for them."""
        process = self.simulator.processes[name]
        assert process.current is not None
        puppet = self.puppet(name)
        before, puppet.react = puppet.react, lambda now, event: list(effects)
        self.simulator.from_client(name, "test", "do")
        self.simulator.run_until(self.simulator.now)
        puppet.react = before

    def machine(self, name: str) -> Any:
        current = self.simulator.processes[name].current
        assert current is not None
        return current.machine

    def pass_time(self, seconds: float) -> None:
        self.simulator.run_until(self.simulator.now + seconds)
