"""The operator of the simulated cluster: looks at it, changes roles, cordons nodes and lets them serve again."""

from collections.abc import Sequence

from mooncake_zmq.core.actor import Asked
from mooncake_zmq.core.commands import SetRole
from mooncake_zmq.core.roles import BECOMES
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.violation import Violation

LOOK_EVERY_S = 0.7


class Operator:
    """The operator of a simulator's cluster, who asks by a gateway or a conductor that runs, if there is one."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def look_on(self, gateways: Sequence[str], until_s: float) -> None:
        """Look at the cluster by one gateway after the other; their state for that is bounded."""
        simulator = self._simulator
        first, *rest = gateways
        process = simulator.processes[first]
        if process.current is not None:
            simulator.in_incarnation(process, simulator.now, simulator.sessions.look, process, 2 * LOOK_EVERY_S)
        self._check_watching(len(gateways))
        if simulator.now + LOOK_EVERY_S < until_s:
            simulator.at(simulator.now + LOOK_EVERY_S, self.look_on, (*rest, first), until_s)

    def _check_watching(self, gateways: int) -> None:
        for process in self._simulator.processes.values():
            running = process.current
            if running is None or running.node is None:
                continue
            node, works = running.node, len(running.machine.works)
            stats = node.transfer_stats
            kept = (len(node.watchers), len(node.looking.reports), len(stats) if stats is not None else 0)
            if kept[0] > gateways or kept[1] > len(process.spec.peers) or kept[2] > works:
                raise Violation("I4", f"{process.name} keeps {kept} of watchers, reports and transfers, with {works} works")

    def ask_for_role(self, name: str) -> None:
        """Ask a conductor that runs, if there is one, to change a node's role."""
        simulator = self._simulator
        spec = simulator.processes[name].spec
        conductors = [
            each for each in simulator.processes.values() if each.spec.role == "conductor" and each.current is not None
        ]
        if conductors:
            process = simulator.random.choice(conductors)
            change = SetRole(name, BECOMES[spec.role])
            simulator.in_incarnation(process, simulator.now, simulator.handle, process, Asked("role", change))

    def cordon(self, name: str, on: bool) -> None:
        """Cordon or uncordon a node by a gateway that runs, if there is one."""
        simulator = self._simulator
        gateways = [each for each in simulator.processes.values() if each.spec.role == "gateway" and each.current is not None]
        talking = [each for each in gateways if name in (each.name, *each.spec.peers)]
        if talking:
            process = simulator.random.choice(talking)
            simulator.in_incarnation(process, simulator.now, simulator.sessions.set_cordon, process, name, on)

    def uncordon(self, name: str, looks: int = 2) -> None:
        """Uncordon a node until it serves, and look once more: an earlier command by a gateway that was stopped may come
        late."""
        simulator = self._simulator
        running = simulator.processes[name].current
        if running is not None and running.node is not None and running.node.cordoned:
            self.cordon(name, False)
            looks = 2
        if looks > 1:
            simulator.at(simulator.now + LOOK_EVERY_S, self.uncordon, name, looks - 1)
