"""The current state of the cluster as one gateway sees it. Nodes send reports only while a client reads them."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from mooncake_zmq.core.messages import Hello, StateTold
from mooncake_zmq.core.watch import Heard
from mooncake_zmq.gateway.requests.cluster_snapshot import Degraded, Listed, Seen, by_reason, degraded, picture, told_node

LOOK_S = 90.0
"""Time for which reports continue after a client read them: longer than a scraper's interval, so that it gets recent ones."""
FIRST_REPORTS_S = 0.3
"""Time for which the first reader waits for reports."""
POLL_S = 0.01
FRESH_S = 0.25
"""Shortest time between two snapshots, however many clients read."""
MAX_STATES, STATE_S = 8, 5.0
"""Limit on the states that are awaited at once, and the timeout of each."""
MAX_RESTS, REST_S = 8, 5.0
"""Limit on the nodes that are being cordoned or uncordoned at once, and the timeout of each."""


class NoNode(Exception):
    """A node did not answer or refused. `status`: the HTTP status."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class Watching(Protocol):
    """Interface of the process for reports; see `core.node.Node`."""

    def look(self, for_s: float) -> None:
        """Have the peers send reports for `for_s` seconds."""

    def heard(self) -> Mapping[str, Heard]:
        """Return the last reports, this gateway's own among them."""

    def awaits_reports(self) -> bool:
        """Return whether a peer that is up has not reported yet."""

    def ask_state(self, node: str, ask_id: int, tell: Callable[[StateTold], None]) -> None:
        """Request the whole state of a node; `tell` is called with it if it arrives."""

    def rest(self, node: str, resting: bool) -> None:
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
        recent: Callable[[], list[dict[str, Any]]],
        about: Mapping[str, Any],
        clock: Callable[[], float],
    ) -> None:
        """Hold no report yet. `about`: constant fields of the snapshot, for JSON."""
        self._about = about
        self._gateway, self._model, self._listed, self._watching = gateway, model, listed, watching
        self._status, self._peers, self._refusals, self._clock = status, peers, refusals, clock
        self._recent = recent
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
            heard=self._watching.heard(),
        )

    def degraded(self) -> list[Degraded]:
        """Return everything that is degraded."""
        return degraded(self.seen())

    def told(self) -> list[dict[str, str]]:
        """Return everything that is degraded, for JSON."""
        return [asdict(each) for each in self.degraded()]

    def gauges(self) -> dict[str, float]:
        """Return the degraded nodes by reason, for metrics; reading them requests reports too."""
        self._watching.look(LOOK_S)
        return by_reason(self.degraded())

    def picture(self) -> dict[str, Any]:
        """Return the snapshot, for JSON. The object stays the same until the next snapshot."""
        if self._clock() - self._made_at >= FRESH_S:
            self._made_at, self._snapshot = (
                self._clock(),
                picture(self.seen()) | {"about": self._about, "recent": self._recent()},
            )
        return self._snapshot

    async def state(self, node: str) -> bytes:
        """Return the whole state of a node, as JSON. Raises NoNode."""
        self._listed_as(node)
        if self._states >= MAX_STATES:
            raise NoNode(503, "overloaded", f"{MAX_STATES} states are being waited for")
        if node != self._gateway and node not in self._peers():
            raise NoNode(503, "node_down", f"{node} does not answer")
        told: asyncio.Future[StateTold] = asyncio.get_running_loop().create_future()
        self._last_ask_id += 1
        self._states += 1
        try:
            self._watching.ask_state(node, self._last_ask_id, lambda state: None if told.done() else told.set_result(state))
            async with asyncio.timeout(STATE_S):
                state = await told
        except TimeoutError:
            raise NoNode(504, "node_silent", f"{node} did not tell its state within {STATE_S:g} s") from None
        finally:
            self._states -= 1
        if state.error:
            raise NoNode(503, "state_too_long", f"{node}: {state.error}")
        return state.state

    async def rest(self, node: str, resting: bool) -> dict[str, Any]:
        """Cordon or uncordon a node, and return its state afterwards. Raises NoNode."""
        role = self._listed_as(node).role
        if self._cordoning >= MAX_RESTS:
            raise NoNode(503, "overloaded", f"{MAX_RESTS} nodes are being waited for")
        self._cordoning += 1
        try:
            async with asyncio.timeout(REST_S):
                await self.look()
                if resting and role == "conductor" and not self._is_cordoned(node) and not self._other_conductors(node):
                    text = f"gateways would go on asking {node}: no other conductor is there that does not rest"
                    raise NoNode(409, "last_conductor", text)
                return await self._set_cordon(node, resting)
        except TimeoutError:
            raise NoNode(504, "node_silent", f"{node} did not say within {REST_S:g} s that it does") from None
        finally:
            self._cordoning -= 1

    async def _set_cordon(self, node: str, resting: bool) -> dict[str, Any]:
        """Send the command once and wait: a message to a node that is up arrives, or the node goes down."""
        if not self._is_there(node):
            raise NoNode(503, "node_down", f"{node} does not answer")
        self._watching.rest(node, resting)
        while (report := self.seen().report(node)) is None or report.resting != resting:
            if not self._is_there(node):
                raise NoNode(503, "node_down", f"{node} went away")
            await asyncio.sleep(POLL_S)
        return next(told_node(self.seen(), each) for each in self._listed if each.name == node)

    def _is_cordoned(self, node: str) -> bool:
        report = self.seen().report(node)
        return report is not None and report.resting

    def _other_conductors(self, node: str) -> list[str]:
        """Return the conductors that gateways would use in place of this one, as far as is known."""
        seen = self.seen()
        others = [each.name for each in self._listed if each.role == "conductor" and each.name != node]
        resting = [name for name in others if (report := seen.report(name)) is not None and report.draining]
        return [name for name in others if self._is_there(name) and name not in resting]

    def _is_there(self, node: str) -> bool:
        return node == self._gateway or node in self._peers()

    def _listed_as(self, node: str) -> Listed:
        found = next((each for each in self._listed if each.name == node), None)
        if found is None:
            raise NoNode(404, "unknown_node", f"there is no node {node[:64]!r}")
        return found
