"""`bench client`: replays a trace against an OpenAI endpoint, each request at its time, and records its answer.

No request waits for the answer of another one, until `max_open` streams are open. The lag of the client itself is measured and
reported apart from the server's times.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from mooncake_zmq.bench.client_prompts import PromptForm, pieces
from mooncake_zmq.bench.client_stream import NONSENSE, Seen, ask
from mooncake_zmq.bench.report import Progress
from mooncake_zmq.laboratory.study import Arrival
from mooncake_zmq.refused import Refused
from mooncake_zmq.runtime.http_connections import Broken, Connections, Target

Beyond = Literal["wait", "drop"]

PROGRESS_S = 5.0
LOOK_S = 0.02
"""Seconds between two measurements of the loop's own lag."""
AHEAD = 128
"""Bodies that are encoded before they are due: in the public traces dozens of requests come at one time."""
NOT_SENT = "not sent: too many open"
CONNECT_S = 30.0


class NoServer(Refused):
    """The server does not say which model it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The server to call and how to call it."""

    url: str
    model: str = ""
    """Name of the model; empty: the first that the server lists."""
    api_key: str = ""
    speed: float = 1.0
    max_open: int = 1024
    """Streams that may be open at once; see `beyond`."""
    beyond: Beyond = "wait"
    """Policy for a request that comes while `max_open` streams are open: it waits for one of them to end, and those after it
    wait too; or it is not sent at all, which counts as a failure."""
    form: PromptForm = field(default_factory=PromptForm)
    chat: bool = False
    """Send a conversation of one message instead of a prompt; `form` must be text."""
    plain: bool = False
    """Leave out vLLM's parameters: answers may then end before the trace's do, and pieces of text count as tokens."""
    timeout_s: float = 600.0
    """Seconds that one answer may take."""

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The headers of each call."""
        key = {b"authorization": b"Bearer " + self.api_key.encode()} if self.api_key else {}
        return {b"content-type": b"application/json", b"accept": b"text/event-stream", **key}


@dataclass(slots=True)
class Replayed:
    """The record of a whole replay."""

    model: str
    seen: list[Seen] = field(default_factory=list)
    loop_lag_s: list[float] = field(default_factory=list)
    """Lateness of each wake-up of the loop: received bytes may have waited for as long before they got their time stamp."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of this process."""


async def replay(client: Client, arrivals: Sequence[Arrival], progress: Progress) -> Replayed:
    """Send all requests and wait for the last answer. Raises NoServer, and ValueError for a request that JSON cannot
    express."""
    connections = Connections(Target.of(client.url))
    replayed = Replayed(client.model or (await served_by(client)).model)
    replayed.seen = [
        Seen(
            due_s=each.at_s / client.speed,
            input_tokens=client.form.length(each),
            output_tokens=each.output_tokens,
            exact=not client.plain,
        )
        for each in arrivals
    ]
    bodies: asyncio.Queue[bytes] = asyncio.Queue(AHEAD)
    try:
        async with asyncio.TaskGroup() as group:
            making = group.create_task(_make(client, replayed.model, arrivals, bodies))
            while not bodies.full() and not making.done():
                await asyncio.sleep(0)
            cpu_s, began = time.process_time(), time.perf_counter()
            async with _attended(replayed, began, progress):
                await _Sender(client, connections, replayed, began).run(bodies)
            replayed.wall_s, replayed.cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await connections.close()
    return replayed


class _Sender:
    def __init__(self, client: Client, connections: Connections, replayed: Replayed, began: float) -> None:
        self._client, self._connections = client, connections
        self._replayed, self._began = replayed, began
        self._room = asyncio.Semaphore(client.max_open)

    async def run(self, bodies: "asyncio.Queue[bytes]") -> None:
        freed_s = 0.0
        """The time at which the last request that had to wait got a stream: until then it delayed all behind it."""
        async with asyncio.TaskGroup() as group:
            for seen in self._replayed.seen:
                body = await bodies.get()
                await asyncio.sleep(max(0.0, self._began + seen.due_s - time.perf_counter()))
                seen.held_s = max(0.0, freed_s - seen.due_s)
                if self._room.locked():
                    if self._client.beyond == "drop":
                        seen.error = NOT_SENT
                        continue
                    asked_s = self._now_s()
                    await self._room.acquire()
                    freed_s = self._now_s()
                    seen.held_s += freed_s - asked_s
                else:
                    await self._room.acquire()
                group.create_task(self._one(body, seen))

    def _now_s(self) -> float:
        return time.perf_counter() - self._began

    async def _one(self, body: bytes, seen: Seen) -> None:
        client = self._client
        seen.late_s = max(0.0, self._now_s() - seen.due_s - seen.held_s)
        try:
            await ask(self._connections, client.path, client.headers, body, seen, client.timeout_s)
        finally:
            self._room.release()


async def _make(client: Client, model: str, arrivals: Sequence[Arrival], bodies: "asyncio.Queue[bytes]") -> None:
    """Encode bodies before they are due, one block in each turn of the loop, so that open streams do not wait for it."""
    for arrival in arrivals:
        wanted: dict[str, object] = {
            "model": model,
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not client.plain:
            wanted |= {"ignore_eos": True, "return_token_ids": True}
        parts = [msgspec.json.encode(wanted)[:-1], b',"messages":[{"role":"user","content":' if client.chat else b',"prompt":']
        for piece in pieces(arrival, client.form):
            parts.append(piece)
            await asyncio.sleep(0)
        parts.append(b"}]}" if client.chat else b"}")
        await bodies.put(b"".join(parts))


@contextlib.asynccontextmanager
async def _attended(replayed: Replayed, began: float, progress: Progress) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(_look(replayed.loop_lag_s)), asyncio.create_task(_report_progress(replayed, began, progress))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _look(lags_s: list[float]) -> None:
    while True:
        due = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lags_s.append(max(0.0, time.perf_counter() - due))


async def _report_progress(replayed: Replayed, began: float, progress: Progress) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        now_s = time.perf_counter() - began
        sent = sum(1 for each in replayed.seen if each.late_s or each.status or each.error)
        over = [each for each in replayed.seen if each.ended_s >= 0 or each.error]
        tokens = sum(len(each.token_s) for each in replayed.seen)
        bad = sum(1 for each in over if each.outcome != "finished")
        progress(
            f"{now_s:.0f} s: {sent:,} of {len(replayed.seen):,} sent, {sent - len(over):,} open, {len(over):,} over, "
            f"{bad:,} of them rejected or failed, {tokens:,} tokens"
        )


class _Whole:
    """An answer that is not streamed; see `http_connections.Receiver`."""

    def __init__(self) -> None:
        self.status = 0
        self.said = b""

    def answered(self, at: float, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def body(self, at: float, piece: bytes) -> None:
        self.said = (self.said + piece)[: 1 << 20]

    def again(self) -> None:
        """See `http_connections.Receiver`."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is called. `max_model_len`: the most tokens of a request; None: the server states none."""

    model: str
    max_model_len: int | None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def served_by(client: Client) -> Served:
    """Ask the server for its first model, or the one that is named, and its limit. Raises NoServer, except for a model that is
    named."""
    connections, whole = Connections(Target.of(client.url)), _Whole()
    try:
        async with asyncio.timeout(CONNECT_S):
            await connections.call(b"GET", "/v1/models", client.headers, b"", whole)
        cards = msgspec.json.decode(whole.said, type=_Cards).data
        card = next(each for each in cards if each.id == (client.model or each.id))
        return Served(card.id, card.max_model_len)
    except (TimeoutError, Broken, StopIteration, *NONSENSE) as error:
        if client.model:
            return Served(client.model, None)
        why = f"answered {whole.status}" if whole.status not in (0, 200) else str(error) or type(error).__name__
        what_to_do = ""
        if whole.status in (401, 403):
            what_to_do = ": give an API key by --api-key or OPENAI_API_KEY"
        elif whole.status:
            what_to_do = ": name the model by --model"
        raise NoServer(f"{client.url}/v1/models: {why}{what_to_do}") from None
    finally:
        await connections.close()
