"""The edge between HTTP calls and the gateway's actor: limits, request ids, mailboxes. It never waits for a peer.

Everything here runs on one asyncio loop, the loop to which the runtime is attached: no locks. An HTTP call whose body is here
holds its slots and its requests in a `Call`; leaving the call, in whatever way, cancels what has not ended.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Protocol, TypeVar

import structlog
from msgspec import structs

from mooncake_zmq.core.actor import FromClient, ToClient
from mooncake_zmq.core.messages import Hello
from mooncake_zmq.gateway.http.cluster_reports import Overview, Watching
from mooncake_zmq.gateway.http.metrics import EdgeMetrics, RequestTimes
from mooncake_zmq.gateway.http.reuse_port import LISTENING
from mooncake_zmq.gateway.requests.client_events import ClientGone, ClientOutput, ClientRequest, Failed, Finished, StopFound
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.readiness import ClusterView, missing_roles
from mooncake_zmq.gateway.requests.request_log import Account, line
from mooncake_zmq.gateway.requests.tenants import Tenants
from mooncake_zmq.gateway.requests.traces import Names, Traces
from mooncake_zmq.gateway.served_model import ServedModel
from mooncake_zmq.gateway.settings import EdgeSettings

OUTPUTS_AT_ONCE = 256
BUFFERED_OF_EACH = 8
"""Tokens of each choice that may wait for a reader, however much comes with them."""
LINES_AT_ONCE = 32
"""Of the log, in a turn of the loop: some 40 us each."""
ENDS = (Finished, Failed)
AwaitedT = TypeVar("AwaitedT")
_log = structlog.get_logger("gateway")


class Backing(Watching, Protocol):
    """What the edge asks of the process it is the face of. Called on the loop; every method returns at once."""

    def inject(self, event: FromClient) -> None:
        """Give the actor an event. Its effects may come back through `Edge.deliver` before this returns."""

    def peers(self) -> Mapping[str, Hello]:
        """The peers in conversation with this gateway: `Session.up_peers`."""

    def refusals(self) -> Mapping[str, str]:
        """Why a peer was refused, by name: `Session.refusals`."""

    def cluster(self) -> ClusterView:
        """What the conductor told of the cluster: `Requests.cluster`."""

    def counts(self) -> Mapping[str, float]:
        """Monotonic counters of actor, session and runtime, named as `Actor.counts` says."""

    def gauges(self) -> Mapping[str, float]:
        """Current levels, named likewise."""

    def resting(self) -> bool:
        """An operator wants this gateway to take no new calls, for a while."""

    def is_listening(self) -> bool:
        """Whether the process accepts connections."""

    def call_later(self, write: Callable[[], None]) -> None:
        """Call `write` soon, when the clients of what ended now have their answers."""


class Full(Exception):
    """No slot is free, there is no memory for a body, or the gateway drains or rests: HTTP 503 with Retry-After."""


class HungUp(Exception):
    """The client is gone; there is nobody to answer."""


@dataclass(slots=True)
class _Open:
    """One request in the actor's hands."""

    call: "Call"
    index: int
    times: RequestTimes


class Edge:
    """Between many HTTP calls and one actor."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        model: ServedModel,
        settings: EdgeSettings,
        max_open: int,
        backing: Backing,
        clock: Callable[[], float] = time.monotonic,
        tenants: Tenants | None = None,
        allow_open: bool = False,
        listed: Sequence[Listed] = (),
        about: Mapping[str, Any] | None = None,
        export: Callable[[Account, Names], None] = lambda account, names: None,
    ) -> None:
        """`max_open`: requests that the actor takes at once. `tenants`: who may call; None: this machine, or with
        `allow_open` everybody. `listed`: the nodes of the deployment. `about`: more for /cluster. `export` is given each
        request that is over."""
        self.tenants = tenants
        self.allow_open = allow_open
        self.name = name
        self.model = model
        self.settings = settings
        self.backing = backing
        self.metrics = self._metrics()
        self.clock = clock
        self.overview = self._overview(listed, about or {})
        self.draining = False
        self._export = export
        self._unwritten: deque[tuple[Account, Names]] = deque()
        self._will_write = False
        self.traces = Traces()
        """The last requests that are over."""
        self.counts: dict[str, float] = {}
        """Counters of the edge itself, named as the actor's are."""
        self.parts: dict[str, Mapping[str, float]] = {}
        """Those of what works for it, each named by its part."""
        self._id_prefix = f"{name}-{incarnation:x}"
        self._numbers = count(1)
        self._open: dict[str, _Open] = {}
        self._to_tell: list[Call] = []
        self._max_open = max_open
        self._slots_taken = 0
        self.bodies = 0
        """Calls whose body is coming in, or is not a request yet."""
        self.reading_bytes = 0
        """What the long ones among these hold: zero when idle."""
        self.held_scores = 0
        """Probabilities that answers which are not streamed may come to: zero when idle."""

    def _metrics(self) -> EdgeMetrics:
        return EdgeMetrics(
            self.model.id,
            waiting_and_running=self.waiting_and_running,
            counts=lambda: {**self.backing.counts(), **self.own_counts()},
            gauges=lambda: {**self.backing.gauges(), **self.own_gauges(), **self.overview.gauges()},
        )

    def _overview(self, listed: Sequence[Listed], about: Mapping[str, Any]) -> Overview:
        return Overview(
            self.name,
            self.model.id,
            listed,
            self.backing,
            status=self.status,
            peers=self.backing.peers,
            refusals=self.backing.refusals,
            recent=lambda: self.traces.recent(),
            about=about,
            clock=lambda: self.clock(),
        )

    def reading(self) -> "Reading":
        """A new HTTP call whose body is to be read; raises Full if it could not be served now."""
        self._check_room(1)
        return Reading(self)

    def call(self) -> "Call":
        """Take a slot for an HTTP call that is whole; raises Full."""
        return Call(self)

    def tell(self, call: "Call") -> None:
        """Have a call tell its client what came, once the runtime's turn is over."""
        if not self._to_tell:
            asyncio.get_running_loop().call_soon(self._tell_all)
        self._to_tell.append(call)

    def _tell_all(self) -> None:
        calls, self._to_tell = iter(self._to_tell), []
        try:
            for call in calls:
                call.tell()
        finally:  # an error is of one call alone: the others are told in the next turn
            if rest := list(calls):
                self._to_tell = rest + self._to_tell
                asyncio.get_running_loop().call_soon(self._tell_all)

    def deliver(self, effect: ToClient) -> None:
        """The actor has something for a client. What comes after a cancel is dropped."""
        request = self._open.get(effect.request_id)
        if request is None:
            self.count("edge_outputs_dropped")
            return
        output: ClientOutput = effect.output
        self.metrics.observe(request.times, output, self.clock())
        if isinstance(output, ENDS):
            del self._open[effect.request_id]
        request.call.receive(request.index, output)

    def ended(self, account: Account) -> None:
        """A request is over, in whatever way: a trace for whoever asks, and one line in the log."""
        names = self.traces.end(account)
        self._export(account, names)
        self._unwritten.append((account, names))
        self._write_later()

    def close(self) -> None:
        """Write what is still to be written."""
        while self._unwritten:
            self._write_line()

    def _write_later(self) -> None:
        """The end of an answer does not wait for its line in the log."""
        if self._unwritten and not self._will_write:
            self._will_write = True
            self.backing.call_later(self._write_some)

    def _write_some(self) -> None:
        self._will_write = False
        try:
            for _ in range(min(LINES_AT_ONCE, len(self._unwritten))):
                self._write_line()
        finally:
            self._write_later()

    def _write_line(self) -> None:
        account, names = self._unwritten.popleft()
        told = {"id": account.request_id, "x_request_id": names.client_id, "trace_id": names.trace_id}
        _log.info("request", **told, **line(account))

    def drain(self) -> None:
        """Refuse new calls; the open ones go on. The actor hears of it from the runtime."""
        self.draining = True

    def tells_reuse(self, salt: str | None) -> bool:
        """May a client learn how much of its prompt was cached? Not where that tells what strangers have asked: of those that
        share its salt with it, or its machine, it may know. Time tells too, which is why there are salts."""
        return bool(salt) or self.tenants is not None or not self.allow_open

    @property
    def turns_away(self) -> bool:
        """It takes no new calls: its process ends, or rests."""
        return self.draining or self.backing.resting()

    @property
    def open_requests(self) -> int:
        """Requests in the actor's hands: zero when idle."""
        return len(self._open)

    @property
    def slots_taken(self) -> int:
        """Slots that open calls hold: zero when idle."""
        return self._slots_taken

    def waiting_and_running(self) -> tuple[int, int]:
        """Requests without and with a first token."""
        running = sum(request.times.first_token_at is not None for request in self._open.values())
        return len(self._open) - running, running

    def status(self) -> str:
        """Whether the cluster can serve, as far as this gateway knows: "ok", or why not."""
        return "draining" if self.turns_away else self.cluster_status()

    def cluster_status(self) -> str:
        """The same, whether or not this gateway takes calls."""
        return "unavailable" if self.missing() else "ok" if self.backing.cluster().ready else "starting"

    @property
    def may_open(self) -> bool:
        """Has it met all that a request needs, whoever of them rests: it is there then, to have them serve again?"""
        return self.backing.cluster().ready and not missing_roles(self.backing.peers().values())

    def missing(self) -> list[str]:
        """Roles that nobody has who takes requests."""
        closed = self.backing.cluster().closed
        return missing_roles(hello for name, hello in self.backing.peers().items() if name not in closed)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the cluster can serve, what is missing, and what is not as it should be."""
        up: dict[str, list[str]] = {"conductor": [], "prefill": [], "decode": []}
        for name, hello in self.backing.peers().items():
            if hello.role != "gateway":
                up.setdefault(hello.role, []).append(name)
        cluster = self.backing.cluster()
        if cluster.cache_nodes is not None:
            up["cache-node"] = list(cluster.cache_nodes)
        status = self.status()
        ok = status == "ok"
        detail = {
            "status": status,
            "degraded": self.overview.told(),
            "gateway": self.name,
            "missing": self.missing(),
            "not_heard": list(cluster.missing),
            "model": self.model.id,
            "peers": {role: sorted(names) for role, names in up.items()},
            "refused": dict(self.backing.refusals()),
            "open_requests": self.open_requests,
        }
        return ok, detail

    def own_counts(self) -> dict[str, float]:
        """Without the actor's."""
        parts = {f"{part}_{name}": value for part, counts in self.parts.items() for name, value in counts.items()}
        return {**self.counts, **parts, **(self.tenants.counts() if self.tenants is not None else {})}

    def own_gauges(self) -> dict[str, float]:
        """Without the actor's; all but the last zero when idle."""
        levels = {
            "edge_open_requests": self.open_requests,
            "edge_slots_taken": self.slots_taken,
            "edge_bodies": self.bodies,
            "edge_reading_bytes": self.reading_bytes,
            "edge_held_scores": self.held_scores,
            LISTENING: float(self.backing.is_listening()),
        }
        return {**levels, **(self.tenants.gauges() if self.tenants is not None else {})}

    def new_id(self) -> str:
        """Unique among all lives of all gateways."""
        return f"{self._id_prefix}-{next(self._numbers):x}"

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def take_slots(self, wanted: int) -> None:
        """Raises Full."""
        self._check_room(wanted)
        self._slots_taken += wanted

    def _check_room(self, wanted: int) -> None:
        if self.turns_away:
            self.count("edge_rejected[reason=draining]")
            raise Full("the gateway is draining: try another one")
        if self._slots_taken + wanted > self._max_open:
            self.count("edge_rejected[reason=full]")
            raise Full(f"the gateway serves {self._slots_taken} requests and has no room for {wanted} more")

    def give_slots(self, slots: int) -> None:
        self._slots_taken -= slots
        assert self._slots_taken >= 0

    def open(self, call: "Call", ids: Sequence[str], first_index: int, requests: Sequence[ClientRequest]) -> None:
        """Requests for answers to one prompt, the first of which tells the actor of the others."""
        prompt_tokens = len(requests[0].tokens) // 4
        for index, request_id in enumerate(ids, first_index):
            self._open[request_id] = _Open(call, index, RequestTimes(call.began_at, prompt_tokens))
            prompt_tokens = 0  # counted once
        first = requests[0]
        if call.slots > 1:
            siblings = tuple((other, request.sampling.seed) for other, request in zip(ids[1:], requests[1:], strict=True))
            first = structs.replace(first, siblings=siblings, call=call.name)
        self.backing.inject(FromClient(ids[0], first))

    def cancel(self, request_id: str, finished_reason: str) -> None:
        """Cancel at every hop, unless it has ended. `finished_reason`: as the metrics shall count it."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self.metrics.count_end(request.times, finished_reason, self.clock())
            self.backing.inject(FromClient(request_id, ClientGone()))

    def stop(self, request_id: str) -> None:
        """A stop string was found: the actor cancels the rest and still gives its account."""
        if request_id in self._open:
            self.backing.inject(FromClient(request_id, StopFound()))


class Reading:
    """One body while it comes in and is made into requests: its share of `max_reading_bytes`."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._bytes = 0
        self._held_bytes = 0
        edge.bodies += 1

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._edge.bodies -= 1
        self._edge.reading_bytes -= self._held_bytes

    def add(self, count_bytes: int) -> None:
        """So many bytes more have come; raises Full. Short bodies are not counted: connections are."""
        edge = self._edge
        self._bytes += count_bytes
        held = self._bytes if self._bytes > edge.settings.short_body_bytes else 0
        if edge.reading_bytes + held - self._held_bytes > edge.settings.max_reading_bytes:
            edge.count("edge_rejected[reason=bodies]")
            raise Full(f"the gateway is reading {edge.bodies} bodies and has no room for this one")
        edge.reading_bytes += held - self._held_bytes
        self._held_bytes = held


def _wants_none(_outputs: list[tuple[int, ClientOutput]]) -> bool:
    return False


class Call:
    """One HTTP call: its slots, its requests (one for each choice) and the mailbox of their outputs."""

    def __init__(self, edge: Edge) -> None:
        edge.take_slots(1)
        self._edge = edge
        self.slots = 1
        self._ids: list[str] = []
        self._outputs: list[tuple[int, ClientOutput]] = []
        self._waiting: asyncio.Future[None] | None = None
        self._nudged = False
        self._is_told = False
        self._broken = False
        """The shortcut raised: what of these outputs was said is not known."""
        self.shortcut: Callable[[list[tuple[int, ClientOutput]]], bool] = _wants_none
        """Takes outputs at once, while nobody takes any from here; False: it does not want these."""
        self._max_buffered = edge.settings.max_buffered_outputs
        self._held_scores = 0
        self._gone = False
        self._awaited: asyncio.Future[Any] | None = None
        """What is of no use without the client."""
        self._too_slow = False
        self.names: Names | None = None
        """What its requests are found by; None: by an id of our own."""
        self.began_at = edge.clock()

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shortcut = _wants_none  # it may know this call: neither is to wait for the collector of cycles, with its prompt
        self._cancel_all("abort")
        self._edge.held_scores -= self._held_scores
        self._edge.give_slots(self.slots)

    def hold(self, scores: int) -> None:
        """It may keep so many probabilities until its answer is whole; raises Full."""
        edge = self._edge
        if edge.held_scores + scores > edge.settings.max_held_scores:
            edge.count("edge_rejected[reason=scores]")
            raise Full("the gateway holds too many probabilities of other answers: try again, or stream the answer")
        edge.held_scores += scores
        self._held_scores += scores

    def submit(self, requests: Sequence[ClientRequest], each: int = 1) -> None:
        """Hand the choices to the actor, `each` in a row being for one prompt; raises Full when they are more than there are
        slots, HungUp when nobody waits."""
        if self._gone:
            raise HungUp
        self._edge.take_slots(len(requests) - 1)
        self.slots += len(requests) - 1
        if told := requests[0].sampling.logprobs:
            self._max_buffered = min(
                self._max_buffered, max(BUFFERED_OF_EACH * len(requests), self._max_buffered // (1 + told))
            )
        names = self.names or Names(self._edge.new_id())
        self._ids = [names.id + (f".{index}" if index else "") for index in range(len(requests))]
        self._edge.traces.name(self._ids, names)
        for index in range(0, len(requests), each):
            if not self._too_slow:
                self._edge.open(self, self._ids[index : index + each], index, requests[index : index + each])

    def receive(self, index: int, output: ClientOutput) -> None:
        """From the edge. A reader that lags too far behind loses everything but an explicit error."""
        if len(self._outputs) >= self._max_buffered and not self._too_slow:
            self._too_slow = True
            self._edge.count("edge_clients_too_slow")
            self._cancel_all("abort")
            self._outputs = [(index, Failed(status=503, code="client_too_slow", message="the client reads too slowly"))]
        if not self._too_slow:
            self._outputs.append((index, output))
        if self._waiting is not None and not self._is_told:
            self._is_told = True
            self._edge.tell(self)

    def tell(self) -> None:
        """From the edge, once for all that came in a turn of the runtime: past the reader if that can be, else he is woken."""
        self._is_told = False
        outputs, self._outputs = self._outputs, []  # more may come while these are looked at
        taken: bool | None = None
        try:
            taken = self._waiting is not None and 0 < len(outputs) <= OUTPUTS_AT_ONCE and self.shortcut(outputs)
        finally:
            self._broken |= taken is None
            if not taken:
                self._outputs = outputs + self._outputs
                self._wake()

    async def take(self) -> list[tuple[int, ClientOutput]]:
        """What has come, in order; nothing only after a nudge. Raises HungUp when the client is gone, RuntimeError after an
        error in the shortcut, which the loop tells of. Of a reader that lagged no more at once than keeps the loop for a few
        milliseconds."""
        if self._outputs:
            await asyncio.sleep(0)
        while not self._outputs and not self._gone and not self._nudged:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._nudged = False
        if self._gone:
            raise HungUp
        if self._broken:
            raise RuntimeError("the shortcut failed: the answer ends here")
        if len(self._outputs) <= OUTPUTS_AT_ONCE:
            outputs, self._outputs = self._outputs, []
        else:
            outputs, self._outputs = self._outputs[:OUTPUTS_AT_ONCE], self._outputs[OUTPUTS_AT_ONCE:]
        return outputs

    def nudge(self) -> None:
        """Whoever takes shall come back, with nothing if there is nothing."""
        self._nudged = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    @property
    def name(self) -> str:
        """What its requests are one call by: the first one's id."""
        return self._ids[0]

    @property
    def gone(self) -> bool:
        """Has the client hung up? Any thread may ask."""
        return self._gone

    async def unless_gone(self, awaited: asyncio.Future[AwaitedT]) -> AwaitedT:
        """Its result, while the client waits for that: else it is cancelled, and HungUp raised at once."""
        if self._gone:
            awaited.cancel()
        self._awaited = awaited
        try:
            return await awaited
        except asyncio.CancelledError:
            if self._gone:
                raise HungUp from None
            raise
        finally:
            self._awaited = None

    def hang_up(self) -> None:
        """The client is gone."""
        self._gone = True
        if self._awaited is not None:
            self._awaited.cancel()
        self._cancel_all("abort")
        self._wake()

    def stop(self, index: int) -> None:
        """A stop string ended this choice: the rest of it is not wanted."""
        self._edge.stop(self._ids[index])

    def _cancel_all(self, finished_reason: str) -> None:
        for request_id in self._ids:
            self._edge.cancel(request_id, finished_reason)
