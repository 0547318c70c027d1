"""The current state of the cluster as one gateway sees it. Nodes send reports only while a client reads them."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from mooncake_zmq.core.messages import Hello, StateReported
from mooncake_zmq.core.watch import PeerReport
from mooncake_zmq.gateway.http.peer_gateways import Asking, PeerGateways, part_of
from mooncake_zmq.gateway.requests.cluster_snapshot import Degraded, Listed, Seen, by_reason, degraded, node_record, snapshot
from mooncake_zmq.gateway.requests.history import Step, merged
from mooncake_zmq.gateway.requests.traces import RECENT, Wanted

LOOK_S = 90.0
"""Time for which reports continue after a client read them: longer than a scraper's interval, so that it gets recent ones."""
FIRST_REPORTS_S = 1.0
"""Time for which the first reader waits for reports."""
POLL_S = 0.01
FRESH_S = 0.25
"""Shortest time between two snapshots, however many clients read."""
MAX_STATES, STATE_S = 8, 5.0
"""Limit on the states that are awaited at once, and the timeout of each."""
MAX_CORDONS, CORDON_S, CORDON_AGAIN_S = 8, 5.0, 1.0
"""Limit on the nodes that are being cordoned or uncordoned at once, the timeout of each, and the time after which the command
is sent again."""


class NoNode(Exception):
    """A node did not answer or refused. `status`: the HTTP status."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class Watching(Asking, Protocol):
    """Interface of the process for reports; see `core.node.Node`."""

    def look(self, for_s: float) -> None:
        """Have the peers send reports for `for_s` seconds."""

    def last_reports(self) -> Mapping[str, PeerReport]:
        """Return the last reports, this gateway's own among them."""

    def awaits_reports(self) -> bool:
        """Return whether a peer that is up has not reported yet."""

    def set_cordon(self, node: str, cordoned: bool) -> None:
        """Cordon or uncordon a node or this gateway itself: its reports show once it is done."""


class Overview:
    """The current state of the cluster as this gateway sees it."""

    def __init__(
        self,
        gateway: str,
        model: str,
        listed: Sequence[Listed],
        watching: Watching,
        *,
        status: Callable[[], str],
        peers: Callable[[], Mapping[str, Hello]],
        refusals: Callable[[], Mapping[str, str]],
        departed: Callable[[], Sequence[str]],
        recent: Callable[[Wanted], list[dict[str, Any]]],
        steps: Callable[[], Sequence[Step]],
        about: Mapping[str, Any],
        clock: Callable[[], float],
    ) -> None:
        """Hold no report yet. `about`: constant fields of the snapshot, for JSON."""
        self._about = about
        self._gateway, self._model, self._listed, self._watching = gateway, model, listed, watching
        self._status, self._peers, self._clock = status, peers, clock
        self._refusals, self._departed = refusals, departed
        self._recent, self._steps = recent, steps
        self._since: dict[tuple[str, str], float] = {}
        """Time at which each degradation, by reason and node, was first noted."""
        self._others = PeerGateways(
            [node.name for node in listed if node.role == "gateway" and node.name != gateway],
            watching,
            there=peers,
            new_id=self._new_id,
            clock=clock,
        )
        self._looks_until = float("-inf")
        self._made_at = float("-inf")
        self._snapshot: dict[str, Any] = {}
        self._states = self._cordoning = 0
        self._last_ask_id = 0

    async def look(self) -> None:
        """Have the nodes report. Without recent reports, wait a little for the first ones."""
        now = self._clock()
        first, self._looks_until = now >= self._looks_until, now + LOOK_S
        self._watching.look(LOOK_S)
        if first:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_REPORTS_S):
                    while self._watching.awaits_reports():
                        await asyncio.sleep(POLL_S)

    def seen(self) -> Seen:
        """Return all that this gateway knows."""
        return Seen(
            now=self._clock(),
            gateway=self._gateway,
            status=self._status(),
            model=self._model,
            listed=self._listed,
            peers=self._peers(),
            refusals=self._refusals(),
            departed=self._departed(),
            last_reports=self._watching.last_reports(),
            since=self._since,
            steps=merged([self._steps(), *self._others.histories()]),
        )

    def note(self) -> None:
        """Note what is degraded now, so that later snapshots say since when."""
        now = self._clock()
        self._since = {(each.reason, each.node): self._since.get((each.reason, each.node), now) for each in self.degraded()}

    def degraded(self) -> list[Degraded]:
        """Return everything that is degraded."""
        return degraded(self.seen())

    def degraded_parts(self) -> list[dict[str, str]]:
        """Return everything that is degraded, for JSON."""
        return [asdict(each) for each in self.degraded()]

    def gauges(self) -> dict[str, float]:
        """Return the degraded nodes by reason, for metrics; reading them requests reports too."""
        self._watching.look(LOOK_S)
        return by_reason(self.degraded())

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot, for JSON. The object stays the same until the next snapshot."""
        if self._clock() - self._made_at >= FRESH_S:
            self._others.refresh()
            self.note()
            self._made_at, self._snapshot = (
                self._clock(),
                snapshot(self.seen()) | {"about": self._about},
            )
        return self._snapshot

    async def requests(self, wanted: Wanted) -> dict[str, Any]:
        """Return the last ended requests of all gateways that pass a filter, the newest first, for JSON. `silent`: the
        gateways whose requests are not among them."""
        own = [{**each, "gateway": self._gateway} for each in self._recent(wanted)]
        others, silent = await self._others.requests(wanted)
        newest = sorted([*own, *others], key=lambda each: float(each.get("ago_s", 0.0)))[:RECENT]
        return {"recent": newest, "silent": silent}

    def part(self, name: str) -> bytes:
        """Return a part of this gateway's state, for another gateway."""
        return part_of(name, self._steps(), self._recent)

    def _new_id(self) -> int:
        self._last_ask_id += 1
        return self._last_ask_id

    async def state(self, node: str) -> bytes:
        """Return the whole state of a node, as JSON. Raises NoNode."""
        self._listed_as(node)
        if self._states >= MAX_STATES:
            raise NoNode(503, "overloaded", f"{MAX_STATES} states are being waited for")
        if node != self._gateway and node not in self._peers():
            raise NoNode(503, "node_down", f"{node} does not answer")
        arrived: asyncio.Future[StateReported] = asyncio.get_running_loop().create_future()
        self._states += 1
        try:
            self._watching.ask_state(node, self._new_id(), lambda state: None if arrived.done() else arrived.set_result(state))
            async with asyncio.timeout(STATE_S):
                state = await arrived
        except TimeoutError:
            raise NoNode(504, "node_silent", f"{node} did not send its state within {STATE_S:g} s") from None
        finally:
            self._states -= 1
        if state.error:
            raise NoNode(503, "state_too_long", f"{node}: {state.error}")
        return state.state

    async def set_cordon(self, node: str, cordoned: bool) -> dict[str, Any]:
        """Cordon or uncordon a node, and return its state afterwards. Raises NoNode."""
        role = self._listed_as(node).role
        if self._cordoning >= MAX_CORDONS:
            raise NoNode(503, "overloaded", f"{MAX_CORDONS} nodes are being waited for")
        self._cordoning += 1
        try:
            async with asyncio.timeout(CORDON_S):
                await self.look()
                if cordoned and role == "conductor" and not self._is_cordoned(node) and not self._other_conductors(node):
                    text = f"{node} is the only conductor that is not drained: gateways would go on asking it"
                    raise NoNode(409, "last_conductor", text)
                return await self._set_cordon(node, cordoned)
        except TimeoutError:
            raise NoNode(504, "node_silent", f"{node} did not say within {CORDON_S:g} s that it does") from None
        finally:
            self._cordoning -= 1

    async def _set_cordon(self, node: str, cordoned: bool) -> dict[str, Any]:
        """Send the command and wait. It is sent again each second: a node that has just restarted lost what was sent to the
        incarnation before."""
        if not self._is_there(node):
            raise NoNode(503, "node_down", f"{node} does not answer")
        sent_at = float("-inf")
        while (report := self.seen().report(node)) is None or report.cordoned != cordoned or sent_at < 0:
            if not self._is_there(node):
                raise NoNode(503, "node_down", f"{node} went away")
            if (now := self.seen().now) - sent_at >= CORDON_AGAIN_S:
                self._watching.set_cordon(node, cordoned)
                sent_at = now
            await asyncio.sleep(POLL_S)
        return next(node_record(self.seen(), each) for each in self._listed if each.name == node)

    def _is_cordoned(self, node: str) -> bool:
        report = self.seen().report(node)
        return report is not None and report.cordoned

    def _other_conductors(self, node: str) -> list[str]:
        """Return the conductors that gateways would use in place of this one, as far as is known."""
        seen = self.seen()
        model = self._listed_as(node).model
        same = [each for each in self._listed if each.role == "conductor" and each.model == model]
        others = [each.name for each in same if each.name != node]
        cordoned = [name for name in others if (report := seen.report(name)) is not None and report.draining]
        return [name for name in others if self._is_there(name) and name not in cordoned]

    def _is_there(self, node: str) -> bool:
        return node == self._gateway or node in self._peers()

    def _listed_as(self, node: str) -> Listed:
        found = next((each for each in self._listed if each.name == node), None)
        if found is None:
            raise NoNode(404, "unknown_node", f"there is no node {node[:64]!r}")
        return found
