"""The cluster as this gateway sees it now: reports are asked for while somebody looks, and put together as `cluster` says."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from mooncake_zmq.core.messages import Hello, StateTold
from mooncake_zmq.core.watch import Heard
from mooncake_zmq.gateway.requests.cluster_snapshot import Degraded, Listed, Seen, by_reason, degraded, picture, told_node

LOOK_S = 90.0
"""How long after somebody looked reports still come: longer than a scraper waits, so that what it gets is never old."""
FIRST_REPORTS_S = 0.3
"""How long the first look waits for reports."""
POLL_S = 0.01
FRESH_S = 0.25
"""A picture is made at most this often, however many ask."""
MAX_STATES, STATE_S = 8, 5.0
"""States that are being waited for at once, and how long one may take."""
MAX_RESTS, REST_S = 8, 5.0
"""Likewise nodes that were asked to rest or to serve again."""


class NoNode(Exception):
    """A node does not tell or do what was asked; `status`: of HTTP."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class Watching(Protocol):
    """What is asked of the process; see `core.node.Node`."""

    def look(self, for_s: float) -> None:
        """Have the peers report for so long."""

    def heard(self) -> Mapping[str, Heard]:
        """The last reports, this gateway's own among them."""

    def awaits_reports(self) -> bool:
        """Has a peer that is up not reported yet?"""

    def ask_state(self, node: str, ask_id: int, tell: Callable[[StateTold], None]) -> None:
        """Ask a node for all its state; `tell` hears it, perhaps."""

    def rest(self, node: str, resting: bool) -> None:
        """Have a node, or this gateway itself, rest or serve again: its reports tell once it does."""


class Overview:
    """The cluster as this gateway sees it now."""

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
        """`about`: what never changes, for JSON."""
        self._about = about
        self._gateway, self._model, self._listed, self._watching = gateway, model, listed, watching
        self._status, self._peers, self._refusals, self._clock = status, peers, refusals, clock
        self._recent = recent
        self._looks_until = float("-inf")
        self._made_at = float("-inf")
        self._picture: dict[str, Any] = {}
        self._states = self._rests = 0
        self._asks = 0

    async def look(self) -> None:
        """Somebody looks; if nobody did lately, wait a little for what the nodes say."""
        now = self._clock()
        first, self._looks_until = now >= self._looks_until, now + LOOK_S
        self._watching.look(LOOK_S)
        if first:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_REPORTS_S):
                    while self._watching.awaits_reports():
                        await asyncio.sleep(POLL_S)

    def seen(self) -> Seen:
        """All that is known."""
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
        """What is not as it should be."""
        return degraded(self.seen())

    def told(self) -> list[dict[str, str]]:
        """The same for JSON."""
        return [asdict(each) for each in self.degraded()]

    def gauges(self) -> dict[str, float]:
        """The same for metrics, whose scraper looks too."""
        self._watching.look(LOOK_S)
        return by_reason(self.degraded())

    def picture(self) -> dict[str, Any]:
        """Everything, for JSON; the same object as long as it is the same picture."""
        if self._clock() - self._made_at >= FRESH_S:
            self._made_at, self._picture = (
                self._clock(),
                picture(self.seen()) | {"about": self._about, "recent": self._recent()},
            )
        return self._picture

    async def state(self, node: str) -> bytes:
        """All of a node's state, as JSON. Raises NoNode."""
        self._listed_as(node)
        if self._states >= MAX_STATES:
            raise NoNode(503, "overloaded", f"{MAX_STATES} states are being waited for")
        if node != self._gateway and node not in self._peers():
            raise NoNode(503, "node_down", f"{node} does not answer")
        told: asyncio.Future[StateTold] = asyncio.get_running_loop().create_future()
        self._asks += 1
        self._states += 1
        try:
            self._watching.ask_state(node, self._asks, lambda state: None if told.done() else told.set_result(state))
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
        """Have a node rest or serve again, and say how it is once it does. Raises NoNode."""
        role = self._listed_as(node).role
        if self._rests >= MAX_RESTS:
            raise NoNode(503, "overloaded", f"{MAX_RESTS} nodes are being waited for")
        self._rests += 1
        try:
            async with asyncio.timeout(REST_S):
                await self.look()
                if resting and role == "conductor" and not self._rests_already(node) and not self._other_conductors(node):
                    text = f"gateways would go on asking {node}: no other conductor is there that does not rest"
                    raise NoNode(409, "last_conductor", text)
                return await self._rested(node, resting)
        except TimeoutError:
            raise NoNode(504, "node_silent", f"{node} did not say within {REST_S:g} s that it does") from None
        finally:
            self._rests -= 1

    async def _rested(self, node: str, resting: bool) -> dict[str, Any]:
        """Asked once only: a message to one who is up arrives, or he is not up any more."""
        if not self._is_there(node):
            raise NoNode(503, "node_down", f"{node} does not answer")
        self._watching.rest(node, resting)
        while (report := self.seen().report(node)) is None or report.resting != resting:
            if not self._is_there(node):
                raise NoNode(503, "node_down", f"{node} went away")
            await asyncio.sleep(POLL_S)
        return next(told_node(self.seen(), each) for each in self._listed if each.name == node)

    def _rests_already(self, node: str) -> bool:
        report = self.seen().report(node)
        return report is not None and report.resting

    def _other_conductors(self, node: str) -> list[str]:
        """Those that gateways would ask in its place, as far as is known."""
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
