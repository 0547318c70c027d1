"""The last five minutes and the last requests of the cluster's other gateways, which are asked only while a client looks at
this gateway."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qs, urlencode

import msgspec

from mooncake_zmq.core.messages import StateReported
from mooncake_zmq.gateway.requests.history import STEP_S, Step
from mooncake_zmq.gateway.requests.traces import RECENT, Wanted

HISTORY, REQUESTS = "history", "requests?"
"""Parts of a gateway's state: its steps; its last requests that pass the filter which follows as a query."""
FRESH_S = 3 * STEP_S
"""Age up to which another gateway's history counts."""
ANSWER_S = 1.0
"""Timeout of another gateway's requests."""
MAX_TENANT_CHARS = 128
MAX_QUERY_CHARS = 512
"""The part of a filter's query that is read."""


class Asking(Protocol):
    """Interface of the process for asking peers; see `core.node.Node`."""

    def ask_state(self, node: str, ask_id: int, on_answer: Callable[[StateReported], None], part: str = "") -> None:
        """Request the state of a node or a part of it; `on_answer` is called with it if it arrives."""


class PeerGateways:
    """The other gateways as this one sees them. `there`: returns the peers that are up."""

    def __init__(
        self,
        names: Sequence[str],
        asking: Asking,
        *,
        there: Callable[[], Mapping[str, object]],
        new_id: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._names, self._asking, self._there, self._new_id, self._clock = names, asking, there, new_id, clock
        self._histories: dict[str, tuple[float, list[Step]]] = {}
        self._asked_at = float("-inf")

    def refresh(self) -> None:
        """Ask for the histories of the others, unless that was done within the last step."""
        now = self._clock()
        if now - self._asked_at >= STEP_S:
            self._asked_at = now
            for name in self._up():
                self._asking.ask_state(name, self._new_id(), partial(self._keep, name), HISTORY)

    def histories(self) -> list[list[Step]]:
        """Return the recent histories of the others."""
        oldest = self._clock() - FRESH_S
        kept = [self._histories[name] for name in self._up() if name in self._histories]
        return [steps for at, steps in kept if at >= oldest]

    async def requests(self, wanted: Wanted) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the last requests of the others, and the gateways that did not send theirs."""
        up = self._up()
        answers = await asyncio.gather(*(self._requests_of(name, wanted) for name in up))
        found = [each for records in answers if records is not None for each in records]
        silent = [name for name, records in zip(up, answers, strict=True) if records is None]
        return found, [*silent, *(name for name in self._names if name not in up)]

    async def _requests_of(self, name: str, wanted: Wanted) -> list[dict[str, Any]] | None:
        arrived: asyncio.Future[StateReported] = asyncio.get_running_loop().create_future()
        self._asking.ask_state(
            name,
            self._new_id(),
            lambda state: None if arrived.done() else arrived.set_result(state),
            REQUESTS + query_of(wanted),
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                state = await arrived
            return [{**each, "gateway": name} for each in msgspec.json.decode(state.state, type=list[dict[str, Any]])[:RECENT]]
        except (TimeoutError, msgspec.DecodeError):
            return None

    def _keep(self, name: str, state: StateReported) -> None:
        try:
            self._histories[name] = self._clock(), msgspec.json.decode(state.state, type=list[dict[str, int]])
        except msgspec.DecodeError:
            self._histories.pop(name, None)

    def _up(self) -> list[str]:
        there = self._there()
        return [name for name in self._names if name in there]


def part_of(name: str, steps: Sequence[Step], recent: Callable[[Wanted], list[dict[str, Any]]]) -> bytes:
    """Return the named part of this gateway's own state, for another gateway."""
    if name.startswith(REQUESTS):
        return msgspec.json.encode(recent(wanted_of(name.removeprefix(REQUESTS))))
    return msgspec.json.encode(steps)


def query_of(wanted: Wanted) -> str:
    """Return a filter as the query of a URL."""
    flags = {name: "1" for name in ("failed", "slow") if getattr(wanted, name)}
    return urlencode(flags | ({"tenant": wanted.tenant} if wanted.tenant else {}))


def wanted_of(query: str) -> Wanted:
    """Return the filter of a query."""
    given = parse_qs(query[:MAX_QUERY_CHARS])
    tenant = given.get("tenant", [""])[0][:MAX_TENANT_CHARS]
    return Wanted(failed="failed" in given, slow="slow" in given, tenant=tenant)
