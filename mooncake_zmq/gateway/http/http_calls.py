"""The edge between HTTP calls and the gateway's actor: limits, request ids, mailboxes. It never waits for a peer.

Everything here runs without locks on one asyncio loop, to which the runtime is attached. An HTTP call whose body is complete
holds its slots and its requests in a `Call`; leaving the call cancels the requests that have not ended.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import structlog
from msgspec import structs

from mooncake_zmq.core.actor import FromClient, ToClient
from mooncake_zmq.core.messages import Parsers
from mooncake_zmq.gateway.http.backing import Backing
from mooncake_zmq.gateway.http.cluster_reports import Overview
from mooncake_zmq.gateway.http.loop_turns import LoopTurns
from mooncake_zmq.gateway.http.metrics import EdgeMetrics, RequestTimes
from mooncake_zmq.gateway.http.reuse_port import LISTENING
from mooncake_zmq.gateway.http.shared_amount import SharedAmount
from mooncake_zmq.gateway.requests.client_events import (
    ChatToRender,
    ClientGone,
    ClientOutput,
    ClientRequest,
    Failed,
    Finished,
    Rendered,
    StopFound,
)
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.history import SLO_MET, SLO_MISSED, History
from mooncake_zmq.gateway.requests.readiness import least_missing, missing_roles
from mooncake_zmq.gateway.requests.request_log import RequestEntry, Slos, line
from mooncake_zmq.gateway.requests.tenants import Tenants
from mooncake_zmq.gateway.requests.traces import Names, Traces
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.telemetry.usage import Meter

OUTPUTS_AT_ONCE = 256
BUFFERED_OF_EACH = 8
"""Tokens of each choice that may always wait for a reader, even with many probabilities."""
LINES_AT_ONCE = 32
"""Log lines written in one turn of the loop: each takes about 40 us."""
ENDS = (Finished, Failed, Rendered)
AwaitedT = TypeVar("AwaitedT")
_log = structlog.get_logger("gateway")


def no_parsers(_model: str) -> Parsers:
    """Return the parsers of a model without vLLMs."""
    return Parsers()


class Full(Exception):
    """No slot is free, there is no memory for a body, or the gateway drains or is cordoned: HTTP 503 with Retry-After."""


class HungUp(Exception):
    """The client has disconnected: no answer can be sent."""


@dataclass(slots=True)
class _Open:
    """One request that the actor has and that has not ended."""

    call: "Call"
    index: int
    times: RequestTimes


class Edge:
    """The edge of one gateway: it connects many HTTP calls with one actor."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        models: ServedModels,
        settings: EdgeSettings,
        max_open: int,
        backing: Backing,
        clock: Callable[[], float] = time.monotonic,
        tenants: Tenants | None = None,
        allow_open: bool = False,
        listed: Sequence[Listed] = (),
        about: Mapping[str, Any] | None = None,
        export: Callable[[RequestEntry, Names], None] = lambda entry, names: None,
        meter: Meter | None = None,
        parsers: Callable[[str], Parsers] = no_parsers,
    ) -> None:
        """Open an edge. `max_open`: requests that the actor takes at once. `tenants`: those that may call; None: any caller on
        this machine, or with `allow_open` on any machine. `listed`: the nodes of the deployment. `about`: further fields of
        /cluster. `export`: called with each request that ended. `meter` counts what API keys use. `parsers` returns
        those of a model's vLLMs, in any thread."""
        self.tenants = tenants
        self.allow_open = allow_open
        self.name = name
        self.models = models
        self.settings = settings
        self.backing = backing
        self.metrics = self._metrics()
        self.clock = clock
        self._slos = Slos((about or {}).get("ttft_slo_s"), (about or {}).get("tbt_slo_s"))
        self.history = History()
        """The last five minutes in numbers."""
        self.overview = self._overview(listed, about or {})
        self.draining = False
        self._export = export
        self.meter = meter
        self.parsers = parsers
        self._unwritten: deque[tuple[RequestEntry, Names]] = deque()
        self._will_write = False
        self.traces = Traces(self._slos)
        """The last requests that ended."""
        self.counts: dict[str, float] = {}
        """Counters of the edge itself, named as the actor's are."""
        self.parts: dict[str, Mapping[str, float]] = {}
        """Counters of the edge's components, by component."""
        self._id_prefix = f"{name}-{incarnation:x}"
        self._numbers = count(1)
        self._open: dict[str, _Open] = {}
        self._with_outputs: list[Call] = []
        self._turns = LoopTurns(clock)
        """The turns by which the outputs of tenants' calls are written."""
        self._max_open, self._slots_taken = max_open, 0
        self.bodies = 0
        """Calls whose body is being received or parsed."""
        self.reading_bytes = SharedAmount(settings.max_reading_bytes, "bytes of bodies")
        """Bytes of the long bodies among them."""
        self.held_scores = SharedAmount(settings.max_held_scores, "probabilities")
        """Probabilities for which answers without streaming have reserved room."""
        self.held_image_bytes = SharedAmount(settings.max_held_image_bytes, "bytes of images")

    def _metrics(self) -> EdgeMetrics:
        return EdgeMetrics(
            {model.identity: model.id for model in self.models.each},
            waiting_and_running=self.waiting_and_running,
            counts=lambda: {**self.backing.counts(), **self.own_counts()},
            gauges=lambda: {**self.backing.gauges(), **self.own_gauges(), **self.overview.gauges()},
        )

    def _overview(self, listed: Sequence[Listed], about: Mapping[str, Any]) -> Overview:
        return Overview(
            self.name,
            self.models.shown,
            listed,
            self.backing,
            status=self.status,
            peers=self.backing.peers,
            refusals=self.backing.refusals,
            departed=self.backing.departed,
            recent=lambda wanted: self.traces.recent(self.clock(), wanted),
            steps=lambda: self.history.steps,
            about=about,
            clock=lambda: self.clock(),
        )

    def reading(self, tenant: str = "") -> "Reading":
        """Begin to read the body of a new HTTP call. Raises Full if the call could not be served now."""
        self._check_room(1)
        return Reading(self, tenant)

    def call(self) -> "Call":
        """Take a slot for an HTTP call whose body is complete. Raises Full."""
        return Call(self)

    def schedule_output(self, call: "Call") -> None:
        """Have a call send its client what arrived, once the runtime's turn is over."""
        if not self._with_outputs:
            asyncio.get_running_loop().call_soon(self._process_all)
        self._with_outputs.append(call)

    def _process_all(self) -> None:
        """Have the calls send what arrived. What does not fit into this turn of the loop goes by turns among the tenants."""
        calls, self._with_outputs = iter(self._with_outputs), []
        try:
            for call in calls:
                if self._turns.has_time:
                    call.send_output()
                else:
                    self._turns.add((call.tenant, ""), call.send_output)
        finally:  # an error concerns one call alone: the others follow in the next turn
            if rest := list(calls):
                self._with_outputs = rest + self._with_outputs
                asyncio.get_running_loop().call_soon(self._process_all)

    def deliver(self, effect: ToClient) -> None:
        """Pass an output of the actor to its call. Outputs after a cancel are dropped."""
        request = self._open.get(effect.request_id)
        if request is None:
            self.count("edge_outputs_dropped")
            return
        output: ClientOutput = effect.output
        self.metrics.observe(request.times, output, self.clock())
        if isinstance(output, ENDS):
            del self._open[effect.request_id]
        request.call.receive(request.index, output)

    def ended(self, entry: RequestEntry) -> None:
        """Keep the trace of a request that ended, export it, and write one line in the log."""
        for of, met in self._slos.judge(entry):
            self.count(f"{SLO_MET if met else SLO_MISSED}[of={of}]")
        names = self.traces.end(entry)
        self._export(entry, names)
        self._unwritten.append((entry, names))
        self._write_later()

    def sample(self) -> None:
        """End a step of the history; to be called every `STEP_S`."""
        self.history.sample({**self.backing.counts(), **self.own_counts(), **self.metrics.counted()})
        self.overview.note()

    def close(self) -> None:
        """Write the log lines that are left."""
        while self._unwritten:
            self._write_line()

    def _write_later(self) -> None:
        """Write log lines later, so that the end of an answer does not wait for them."""
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
        entry, names = self._unwritten.popleft()
        ids = {"id": entry.request_id, "x_request_id": names.client_id, "trace_id": names.trace_id}
        _log.info("request", **ids, **line(entry))

    def drain(self) -> None:
        """Refuse new calls; the open ones continue. The runtime informs the actor."""
        self.draining = True

    def shows_reuse(self, salt: str | None) -> bool:
        """Return whether a client may learn how much of its prompt was cached. It may not where that reveals the prompts of
        strangers, but it may of callers with its salt or on its machine. Timing reveals it too: salts prevent that."""
        return bool(salt) or self.tenants is not None or not self.allow_open

    @property
    def turns_away(self) -> bool:
        """Whether new calls are refused: the gateway drains or is cordoned."""
        return self.draining or self.backing.cordoned()

    @property
    def open_requests(self) -> int:
        """Requests that the actor has and that have not ended: zero when idle."""
        return len(self._open)

    @property
    def slots_taken(self) -> int:
        """Slots that open calls hold: zero when idle."""
        return self._slots_taken

    def waiting_and_running(self, model: str) -> tuple[int, int]:
        """Return the number of requests for the model with this identity, without and with a first token."""
        ours = [request.times.first_token_at is not None for request in self._open.values() if request.times.model == model]
        return len(ours) - sum(ours), sum(ours)

    def status(self) -> str:
        """Return "ok" if the cluster can serve, as far as this gateway knows, else the reason why not."""
        return "draining" if self.turns_away else self.cluster_status()

    def cluster_status(self) -> str:
        """Return the cluster's status, whether or not this gateway accepts calls."""
        return "unavailable" if self.missing() else "ok" if self.backing.cluster().ready else "starting"

    @property
    def may_open(self) -> bool:
        """Whether all roles that a request needs are connected. Cordoned nodes count: an operator uncordons them through an
        open gateway."""
        return self.backing.cluster().ready and not least_missing(self.backing.peers().values(), self.models.identities)

    def missing(self) -> list[str]:
        """Return the roles of which no node accepts requests. The cluster serves if it serves any of several models: this is
        for the one that lacks least."""
        return min(_missing_by_model(self).values(), key=len)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the cluster can serve, and details: missing roles, degraded nodes, peers."""
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
            "degraded": self.overview.degraded_parts(),
            "gateway": self.name,
            "missing": self.missing(),
            "not_connected": list(cluster.missing),
            "model": self.models.shown,
            **_kv_of(self.models.only),
            **({} if self.models.only else {"models": _missing_by_model(self)}),
            "peers": {role: sorted(names) for role, names in up.items()},
            "refused": dict(self.backing.refusals()),
            "open_requests": self.open_requests,
        }
        return ok, detail

    def own_counts(self) -> dict[str, float]:
        """Return the counters of the edge and its components, without the actor's."""
        parts = {f"{part}_{name}": value for part, counts in self.parts.items() for name, value in counts.items()}
        return {**self.counts, **parts, **(self.tenants.counts() if self.tenants is not None else {})}

    def own_gauges(self) -> dict[str, float]:
        """Return the levels of the edge, without the actor's. All but the last are zero when idle."""
        levels = {
            "edge_open_requests": self.open_requests,
            "edge_slots_taken": self.slots_taken,
            "edge_bodies": self.bodies,
            "edge_reading_bytes": self.reading_bytes.taken,
            "edge_held_scores": self.held_scores.taken,
            "edge_held_image_bytes": self.held_image_bytes.taken,
            LISTENING: float(self.backing.is_listening()),
        }
        return {**levels, **(self.tenants.gauges() if self.tenants is not None else {})}

    def new_id(self) -> str:
        """Return a request id that is unique among all incarnations of all gateways."""
        return f"{self._id_prefix}-{next(self._numbers):x}"

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def take_slots(self, wanted: int) -> None:
        """Take slots for a call. Raises Full."""
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
        """Pass the requests for answers to one prompt to the actor: the first of them lists the others as its siblings."""
        prompt_tokens = len(requests[0].tokens) // 4
        for index, request_id in enumerate(ids, first_index):
            self._open[request_id] = _Open(call, index, RequestTimes(call.began_at, prompt_tokens, requests[0].model))
            prompt_tokens = 0  # counted once
        first = requests[0]
        if call.slots > 1:
            siblings = tuple((other, request.sampling.seed) for other, request in zip(ids[1:], requests[1:], strict=True))
            first = structs.replace(first, siblings=siblings, call=call.name)
        self.backing.inject(FromClient(ids[0], first))

    def cancel(self, request_id: str, finished_reason: str) -> None:
        """Cancel a request at every hop, unless it has ended. `finished_reason`: the label under which metrics count it."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self.metrics.count_end(request.times, finished_reason, self.clock())
            self.backing.inject(FromClient(request_id, ClientGone()))

    def stop(self, request_id: str) -> None:
        """End an answer in which a stop string was found: the actor cancels the rest and still sends `Finished`."""
        if request_id in self._open:
            self.backing.inject(FromClient(request_id, StopFound()))


def _kv_of(model: ServedModel | None) -> dict[str, Any]:
    """Return how blocks hold the model's KV, as a detail of health; empty: another program has it."""
    if model is None or not model.kv_bytes_per_token:
        return {}
    return {"kv": {"codec": model.kv_codec, "bytes_per_token": model.kv_bytes_per_token}}


def _missing_by_model(edge: Edge) -> dict[str, list[str]]:
    """Return the roles of which no node accepts requests for a model, by the model's name."""
    closed = edge.backing.cluster().closed
    there = [hello for name, hello in edge.backing.peers().items() if name not in closed]
    return {model.id: missing_roles(there, model.identity) for model in edge.models.each}


def _pass_on_chat(edge: Edge, call: "Call", request_id: str, chat: ChatToRender) -> None:
    """Pass a chat to the actor that is to be written as tokens."""
    edge._open[request_id] = _Open(call, 0, RequestTimes(call.began_at, 0, chat.model))
    edge.backing.inject(FromClient(request_id, chat))


class Reading:
    """One body while it is received and parsed: it holds its share of `max_reading_bytes`."""

    def __init__(self, edge: Edge, tenant: str) -> None:
        self._edge = edge
        self._tenant = tenant
        self._bytes = 0
        self._held_bytes = 0
        edge.bodies += 1

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._edge.bodies -= 1
        if self._held_bytes:
            self._edge.reading_bytes.give_back(self._tenant, self._held_bytes)

    def add(self, count_bytes: int) -> None:
        """Count further bytes of the body. Raises Full, and Limited where its tenant has too many. Short bodies do not count:
        the limit on connections covers them."""
        edge = self._edge
        self._bytes += count_bytes
        held = self._bytes if self._bytes > edge.settings.short_body_bytes else 0
        if held and not edge.reading_bytes.take(self._tenant, held - self._held_bytes):
            edge.count("edge_rejected[reason=bodies]")
            raise Full(f"the gateway is reading {edge.bodies} bodies and has no room for this one")
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
        self._is_queued = False
        self._broken = False
        """Whether the shortcut raised: which of its outputs were sent is unknown."""
        self.shortcut: Callable[[list[tuple[int, ClientOutput]]], bool] = _wants_none
        """Takes outputs at once while a reader waits. It returns False to leave them to the reader."""
        self._max_buffered = edge.settings.max_buffered_outputs
        self._held_scores = 0
        self._held_images: tuple[str, int] | None = None
        """Its tenant, and the bytes of its images."""
        self.tenant = ""
        """The tenant by whose turns its outputs are sent."""
        self._gone = False
        self._awaited: asyncio.Future[Any] | None = None
        """Work that is cancelled when the client disconnects."""
        self._too_slow = False
        self.names: Names | None = None
        """Names of its requests; None: an id of the edge's own."""
        self.began_at = edge.clock()

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shortcut = _wants_none  # it may refer to this call: break the cycle, so that the prompt is freed at once
        self._cancel_all("abort")
        if self._held_scores:
            self._edge.held_scores.give_back(self.tenant, self._held_scores)
        if self._held_images is not None:
            self._edge.held_image_bytes.give_back(*self._held_images)
        self._edge.give_slots(self.slots)

    def hold(self, tenant: str, scores: int) -> None:
        """Note the tenant, and reserve room for the probabilities that are kept until the answer is complete. Raises Full, and
        Limited where the tenant has too many."""
        if scores and not self._edge.held_scores.take(tenant, scores):
            self._edge.count("edge_rejected[reason=scores]")
            raise Full("the gateway holds too many probabilities of other answers: try again, or stream the answer")
        self.tenant, self._held_scores = tenant, scores

    async def render(self, chat: ChatToRender, held_bytes: int) -> Rendered | Failed:
        """Have a chat written as tokens. Raises Full if there is no room for its images, Limited where the tenant has too many,
        and HungUp."""
        if not self._edge.held_image_bytes.take(chat.tenant, held_bytes):
            self._edge.count("edge_rejected[reason=images]")
            raise Full("the gateway holds too many images of other calls: try again")
        self._held_images = chat.tenant, held_bytes
        if self._gone:
            raise HungUp
        self._ids = [f"{self._edge.new_id()}.chat"]
        _pass_on_chat(self._edge, self, self._ids[0], chat)
        ((_, output),) = await self.take()
        self._ids = []
        assert isinstance(output, Rendered | Failed)
        return output

    def submit(self, requests: Sequence[ClientRequest], each: int = 1) -> None:
        """Pass the choices to the actor, of which `each` in a row have one prompt. Raises Full if there are too few slots, and
        HungUp if the client has disconnected."""
        if self._gone:
            raise HungUp
        if len(requests) > 1:  # a call with one has its slot, also where the gateway began to drain since
            self._edge.take_slots(len(requests) - 1)
        self.slots += len(requests) - 1
        if likeliest := requests[0].sampling.logprobs:
            self._max_buffered = min(
                self._max_buffered, max(BUFFERED_OF_EACH * len(requests), self._max_buffered // (1 + likeliest))
            )
        names = self.names or Names(self._edge.new_id())
        self._ids = [names.id + (f".{index}" if index else "") for index in range(len(requests))]
        self._edge.traces.name(self._ids, names)
        for index in range(0, len(requests), each):
            if not self._too_slow:
                self._edge.open(self, self._ids[index : index + each], index, requests[index : index + each])

    def receive(self, index: int, output: ClientOutput) -> None:
        """Take an output from the edge. A reader that lags too far behind gets only an error."""
        if len(self._outputs) >= self._max_buffered and not self._too_slow:
            self._too_slow = True
            self._edge.count("edge_clients_too_slow")
            self._cancel_all("abort")
            self._outputs = [(index, Failed(status=503, code="client_too_slow", message="the client reads too slowly"))]
        if not self._too_slow:
            self._outputs.append((index, output))
        if self._waiting is not None and not self._is_queued:
            self._is_queued = True
            self._edge.schedule_output(self)

    def send_output(self) -> None:
        """Process all outputs of one turn of the runtime: the shortcut takes them if it can, else the reader is woken."""
        self._is_queued = False
        outputs, self._outputs = self._outputs, []  # more may arrive while these are processed
        taken: bool | None = None
        try:
            taken = self._waiting is not None and 0 < len(outputs) <= OUTPUTS_AT_ONCE and self.shortcut(outputs)
        finally:
            self._broken |= taken is None
            if not taken:
                self._outputs = outputs + self._outputs
                self._wake()

    async def take(self) -> list[tuple[int, ClientOutput]]:
        """Wait for outputs and return them in order, or none after a nudge. Raises HungUp if the client has disconnected, and
        RuntimeError after an error in the shortcut, which the loop logs. A reader that lagged gets them in batches that take
        the loop a few milliseconds each."""
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
        """Wake the reader, even if there is no output."""
        self._nudged = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    @property
    def name(self) -> str:
        """Name of the call: the id of its first request."""
        return self._ids[0]

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected. Any thread may read it."""
        return self._gone

    async def unless_gone(self, awaited: asyncio.Future[AwaitedT]) -> AwaitedT:
        """Return the result. If the client disconnects meanwhile, cancel the work and raise HungUp at once."""
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
        """Cancel everything, because the client has disconnected."""
        self._gone = True
        if self._awaited is not None:
            self._awaited.cancel()
        self._cancel_all("abort")
        self._wake()

    def stop(self, index: int) -> None:
        """End a choice in which a stop string was found."""
        self._edge.stop(self._ids[index])

    def _cancel_all(self, finished_reason: str) -> None:
        for request_id in self._ids:
            self._edge.cancel(request_id, finished_reason)
