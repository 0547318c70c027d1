"""The HTTP calls that a gateway serves, and the requests that its actor has for them: limits, ids, mailboxes.

Everything here runs without locks on one asyncio loop, to which the runtime is attached, and never waits for a peer. An HTTP
call whose body is complete holds its slots and its requests in a `Call`; leaving the call cancels the requests that have not
ended.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as count_up
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from msgspec import structs

from mooncake_zmq.core.actor import FromClient, ToClient
from mooncake_zmq.gateway.http.backing import Backing
from mooncake_zmq.gateway.http.loop_turns import LoopTurns
from mooncake_zmq.gateway.http.metrics import EdgeMetrics, RequestTimes
from mooncake_zmq.gateway.http.shared_amount import SharedAmount
from mooncake_zmq.gateway.requests.answer import TOKEN
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
from mooncake_zmq.gateway.requests.traces import Names, Traces
from mooncake_zmq.gateway.settings import EdgeSettings

OUTPUTS_AT_ONCE = 256
BUFFERED_OF_EACH = 8
"""Tokens of each choice that may always wait for a reader, even with many probabilities."""
ENDS = (Finished, Failed, Rendered)
AwaitedT = TypeVar("AwaitedT")


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


class Calls:
    """The calls of one gateway, between many HTTP connections and one actor."""

    def __init__(
        self,
        settings: EdgeSettings,
        backing: Backing,
        *,
        max_open: int,
        id_prefix: str,
        clock: Callable[[], float],
        metrics: EdgeMetrics,
        traces: Traces,
        count: Callable[[str], None],
        turns_away: Callable[[], bool],
    ) -> None:
        """Serve no call yet. `max_open`: requests that the actor takes at once. `id_prefix` is that of no other incarnation of
        any gateway. `count` counts an event by its name. `turns_away` returns whether new calls are refused."""
        self.settings = settings
        self.clock = clock
        self.traces = traces
        self.count = count
        self._backing = backing
        self._metrics = metrics
        self._turns_away = turns_away
        self._id_prefix = id_prefix
        self._numbers = count_up(1)
        self._open: dict[str, _Open] = {}
        self._with_outputs: list[Call] = []
        self._turns = LoopTurns(time.monotonic)
        """The turns by which the outputs of tenants' calls are written."""
        self._max_open = max_open
        self.slots_taken = 0
        """Slots that calls hold: zero when idle."""
        self.bodies = 0
        """Calls whose body is being received or parsed."""
        self.reading_bytes = SharedAmount(settings.max_reading_bytes, "bytes of bodies")
        """Bytes of the long bodies among them."""
        self.held_scores = SharedAmount(settings.max_held_scores, "probabilities")
        """Probabilities for which answers without streaming have reserved room."""
        self.held_image_bytes = SharedAmount(settings.max_held_image_bytes, "bytes of images")

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
        self._metrics.observe(request.times, output, self.clock())
        if type(output) is not TOKEN and isinstance(output, ENDS):
            del self._open[effect.request_id]
        request.call.receive(request.index, output)

    @property
    def open_requests(self) -> int:
        """Requests that the actor has and that have not ended: zero when idle."""
        return len(self._open)

    def waiting_and_running(self, model: str) -> tuple[int, int]:
        """Return the number of requests for the model with this identity, without and with a first token."""
        ours = [request.times.first_token_at is not None for request in self._open.values() if request.times.model == model]
        return len(ours) - sum(ours), sum(ours)

    def gauges(self) -> dict[str, float]:
        """Return levels that are zero when idle."""
        return {
            "edge_open_requests": self.open_requests,
            "edge_slots_taken": self.slots_taken,
            "edge_bodies": self.bodies,
            "edge_reading_bytes": self.reading_bytes.taken,
            "edge_held_scores": self.held_scores.taken,
            "edge_held_image_bytes": self.held_image_bytes.taken,
        }

    def new_id(self) -> str:
        """Return a request id that is unique among all incarnations of all gateways."""
        return f"{self._id_prefix}-{next(self._numbers):x}"

    def take_slots(self, wanted: int) -> None:
        """Take slots for a call. Raises Full."""
        self._check_room(wanted)
        self.slots_taken += wanted

    def _check_room(self, wanted: int) -> None:
        if self._turns_away():
            self.count("edge_rejected[reason=draining]")
            raise Full("the gateway is draining: try another one")
        if self.slots_taken + wanted > self._max_open:
            self.count("edge_rejected[reason=full]")
            raise Full(f"the gateway serves {self.slots_taken} requests and has no room for {wanted} more")

    def give_slots(self, slots: int) -> None:
        self.slots_taken -= slots
        assert self.slots_taken >= 0

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
        self._backing.inject(FromClient(ids[0], first))

    def open_chat(self, call: "Call", request_id: str, chat: ChatToRender) -> None:
        """Pass a chat to the actor that is to be written as tokens."""
        self._open[request_id] = _Open(call, 0, RequestTimes(call.began_at, 0, chat.model))
        self._backing.inject(FromClient(request_id, chat))

    def cancel(self, request_id: str, finished_reason: str) -> None:
        """Cancel a request at every hop, unless it has ended. `finished_reason`: the label under which metrics count it."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._metrics.count_end(request.times, finished_reason, self.clock())
            self._backing.inject(FromClient(request_id, ClientGone()))

    def stop(self, request_id: str) -> None:
        """End an answer in which a stop string was found: the actor cancels the rest and still sends `Finished`."""
        if request_id in self._open:
            self._backing.inject(FromClient(request_id, StopFound()))


class Reading:
    """One body while it is received and parsed: it holds its share of `max_reading_bytes`."""

    def __init__(self, calls: Calls, tenant: str) -> None:
        self._calls = calls
        self._tenant = tenant
        self._bytes = 0
        self._held_bytes = 0
        calls.bodies += 1

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._calls.bodies -= 1
        if self._held_bytes:
            self._calls.reading_bytes.give_back(self._tenant, self._held_bytes)

    def add(self, count_bytes: int) -> None:
        """Count further bytes of the body. Raises Full, and Limited where its tenant has too many. Short bodies do not count:
        the limit on connections covers them."""
        calls = self._calls
        self._bytes += count_bytes
        held = self._bytes if self._bytes > calls.settings.short_body_bytes else 0
        if held and not calls.reading_bytes.take(self._tenant, held - self._held_bytes):
            calls.count("edge_rejected[reason=bodies]")
            raise Full(f"the gateway is reading {calls.bodies} bodies and has no room for this one")
        self._held_bytes = held


def _wants_none(_outputs: list[tuple[int, ClientOutput]]) -> bool:
    return False


class Call:
    """One HTTP call: its slots, its requests (one for each choice) and the mailbox of their outputs."""

    def __init__(self, calls: Calls) -> None:
        calls.take_slots(1)
        self._calls = calls
        self.slots = 1
        self._ids: list[str] = []
        self._outputs: list[tuple[int, ClientOutput]] = []
        self._kept: Iterator[ClientOutput] = iter(())
        """The outputs of its only choice that the actor gave before."""
        self._waiting: asyncio.Future[None] | None = None
        self._nudged = False
        self._is_queued = False
        self._broken = False
        """Whether the shortcut raised: which of its outputs were sent is unknown."""
        self.shortcut: Callable[[list[tuple[int, ClientOutput]]], bool] = _wants_none
        """Takes outputs at once while a reader waits. It returns False to leave them to the reader."""
        self._max_buffered = calls.settings.max_buffered_outputs
        self._at_once = 0
        """Outputs that came in one turn while a reader waited for them, until it waits again."""
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
        self.began_at = calls.clock()

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shortcut = _wants_none  # it may refer to this call: break the cycle, so that the prompt is freed at once
        self._cancel_all("abort")
        if self._held_scores:
            self._calls.held_scores.give_back(self.tenant, self._held_scores)
        if self._held_images is not None:
            self._calls.held_image_bytes.give_back(*self._held_images)
        self._calls.give_slots(self.slots)

    def hold(self, tenant: str, scores: int) -> None:
        """Note the tenant, and reserve room for the probabilities that are kept until the answer is complete. Raises Full, and
        Limited where the tenant has too many."""
        if scores and not self._calls.held_scores.take(tenant, scores):
            self._calls.count("edge_rejected[reason=scores]")
            raise Full("the gateway holds too many probabilities of other answers: try again, or stream the answer")
        self.tenant, self._held_scores = tenant, scores

    async def render(self, chat: ChatToRender, held_bytes: int) -> Rendered | Failed:
        """Have a chat written as tokens. Raises Full if there is no room for its images, Limited where the tenant has too many,
        and HungUp."""
        if not self._calls.held_image_bytes.take(chat.tenant, held_bytes):
            self._calls.count("edge_rejected[reason=images]")
            raise Full("the gateway holds too many images of other calls: try again")
        self._held_images = chat.tenant, held_bytes
        if self._gone:
            raise HungUp
        self._ids = [f"{self._calls.new_id()}.chat"]
        self._calls.open_chat(self, self._ids[0], chat)
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
            self._calls.take_slots(len(requests) - 1)
        self.slots += len(requests) - 1
        if likeliest := requests[0].sampling.logprobs:
            self._max_buffered = min(
                self._max_buffered, max(BUFFERED_OF_EACH * len(requests), self._max_buffered // (1 + likeliest))
            )
        names = self.names or Names(self._calls.new_id())
        self._ids = [names.id + (f".{index}" if index else "") for index in range(len(requests))]
        self._calls.traces.name(self._ids, names)
        for index in range(0, len(requests), each):
            if not self._too_slow:
                self._calls.open(self, self._ids[index : index + each], index, requests[index : index + each])

    def answer(self, outputs: Iterator[ClientOutput]) -> None:
        """Answer the call, which has one choice, by outputs that the actor gave before. Raises HungUp if the client has
        disconnected."""
        if self._gone:
            raise HungUp
        self._ids = [self._calls.new_id()]
        self._kept = outputs

    def receive(self, index: int, output: ClientOutput) -> None:
        """Take an output of a choice. A reader that lags too far behind gets only an error; one that waits does not lag,
        however much comes at once."""
        lags = self._waiting is None and len(self._outputs) >= self._max_buffered + self._at_once
        if lags and not self._too_slow:
            self._too_slow = True
            self._calls.count("edge_clients_too_slow")
            self._cancel_all("abort")
            self._outputs = [(index, Failed(status=503, code="client_too_slow", message="the client reads too slowly"))]
        if not self._too_slow:
            self._outputs.append((index, output))
        if self._waiting is not None and not self._is_queued:
            self._is_queued = True
            self._calls.schedule_output(self)

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
                self._at_once = len(self._outputs)
                self._wake()

    async def take(self) -> list[tuple[int, ClientOutput]]:
        """Wait for outputs and return them in order, or none after a nudge. Raises HungUp if the client has disconnected, and
        RuntimeError after an error in the shortcut, which the loop logs. A reader that lagged gets them in batches that take
        the loop a few milliseconds each, and so does that of a kept answer."""
        if not self._outputs:
            self._outputs = [(0, output) for output in islice(self._kept, OUTPUTS_AT_ONCE)]
        if self._outputs:
            await asyncio.sleep(0)
        while not self._outputs and not self._gone and not self._nudged:
            self._at_once = 0
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
        self._calls.stop(self._ids[index])

    def _cancel_all(self, finished_reason: str) -> None:
        for request_id in self._ids:
            self._calls.cancel(request_id, finished_reason)
