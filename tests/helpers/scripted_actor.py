"""A gateway without a cluster: an actor that plays a script, and clients to speak with it."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import httpx
import uvicorn
from msgspec import structs

from mooncake_zmq.core.actor import FromClient, ToClient
from mooncake_zmq.core.messages import Hello, Parsers, Report, StateReported
from mooncake_zmq.core.watch import PeerReport
from mooncake_zmq.engine.tokenizer import ByteVocabulary, byte_tokenizer
from mooncake_zmq.gateway.http.acceptor import Acceptor, new_loop, server_config
from mooncake_zmq.gateway.http.app import create_app
from mooncake_zmq.gateway.http.edge import Edge
from mooncake_zmq.gateway.requests.client_events import (
    ChatToRender,
    ClientOutput,
    ClientRequest,
    Failed,
    Finished,
    Rendered,
    StopFound,
    TokenOut,
)
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.readiness import ClusterView
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import AnswersSettings, ConnectionSettings, EdgeSettings
from mooncake_zmq.kv.block_hash import unpack_tokens
from mooncake_zmq.runtime.listening import listen

EOS = 256
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
TWO_CALLS = f'Let me see. {CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'
PLACES = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
"""The parameters of `weather`."""
Batches = list[list[ClientOutput]]


def tokens(text: str | bytes, start: int = 0) -> list[ClientOutput]:
    raw = text.encode() if isinstance(text, str) else text
    return [TokenOut(start + index, byte) for index, byte in enumerate(raw)]


def finished(reason: str = "stop", **changes: Any) -> Finished:
    account = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "cached_own": 1,
        "cached_local": 2,
        "cached_remote": 1,
        "prefill": "prefill-0",
        "decode": "decode-0",
        "attempts": 1,
    }
    return Finished(reason=reason, **(account | changes))


def one_by_one(outputs: Iterable[ClientOutput]) -> Batches:
    """Each output in its own loop iteration, as decode steps come."""
    return [[output] for output in outputs]


def cut(outputs: Sequence[ClientOutput], sizes: Iterable[int]) -> Batches:
    """The outputs in batches of these sizes, and the rest in one."""
    ends = [0, *accumulate(sizes), len(outputs)]
    return [batch for begin, end in pairwise(ends) if (batch := [*outputs[begin:end]])]


def saying(text: str, reason: str = "stop", **settings: Any) -> "ScriptedActor":
    """A gateway whose every answer is this text."""
    return ScriptedActor(
        lambda _request, _number: one_by_one([*tokens(text), finished(reason)]), **{"max_model_len": 4096, **settings}
    )


def hello(role: str) -> Hello:
    return Hello(protocol=1, role=role, host="h", model="m", tokenizer="t", layout="l")


@dataclass
class ScriptedActor:
    """Answers every request with the batches of `script(request, number)`; a script without an end waits for a cancel."""

    script: Callable[[ClientRequest, int], Batches] = lambda _request, _number: [[*tokens("ok"), finished()]]
    settings: EdgeSettings = field(default_factory=EdgeSettings)
    answers: AnswersSettings = field(default_factory=AnswersSettings)
    max_open: int = 256
    allow_open: bool = False
    cors_origins: tuple[str, ...] = ()
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    share: bool = False
    max_model_len: int = 64
    vocab_size: int = 512
    kv_codec: str = "exact"
    """With another one a token's KV takes 90 bytes."""
    adapters: tuple[str, ...] = ()
    requests: dict[str, ClientRequest] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    up: dict[str, Hello] = field(default_factory=lambda: {role: hello(role) for role in ("conductor", "prefill", "decode")})
    view: ClusterView = ClusterView(ready=True, cache_nodes=("cache-1", "cache-0"))
    actor_counts: dict[str, float] = field(default_factory=dict)
    tls: Callable[[], ssl.SSLContext] | None = None
    listed: list[Listed] = field(default_factory=list)
    reports: dict[str, PeerReport] = field(default_factory=dict)
    looks: list[float] = field(default_factory=list)
    states: dict[str, StateReported] = field(default_factory=dict)
    cordons: list[tuple[str, bool]] = field(default_factory=list)
    writes_later: bool = False
    writes: list[Callable[[], None]] = field(default_factory=list)
    """Lines of the log that are not written yet, where `writes_later`."""
    others: tuple[ServedModel, ...] = ()
    """Further models; the first one has an identity of its own then."""
    offered: Parsers = Parsers()
    """The parsers of the model's vLLMs."""
    render: Callable[[ChatToRender], Rendered | Failed] | None = None
    """Writes chats with images, as a vLLM does; None: no vLLM serves the model."""
    rendered: list[ChatToRender] = field(default_factory=list)
    deaf: bool = False
    """No node does what it is asked to."""

    def __post_init__(self) -> None:
        model = ServedModel(
            id="toy",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            block_tokens=4,
            model_fingerprint="weights",
            layout_fingerprint="layout",
            tokenizer=byte_tokenizer(),
            kv_codec=self.kv_codec,
            kv_bytes_per_token=0 if self.kv_codec == "exact" else 90,
            identity="weights" if self.others else "",
            adapters=self.adapters,
            takes_images=self.render is not None,
        )
        self.edge = Edge(
            name="gw",
            incarnation=0xABC,
            models=ServedModels(model, *self.others),
            settings=self.settings,
            max_open=self.max_open,
            allow_open=self.allow_open,
            backing=self,
            listed=self.listed,
            parsers=lambda model: self.offered,
            answers=self.answers,
        )
        self.app = create_app(self.edge, self.cors_origins)
        self._playing: set[asyncio.Task[None]] = set()

    @property
    def model(self) -> ServedModel:
        return self.edge.models.each[0]

    @model.setter
    def model(self, model: ServedModel) -> None:
        self.edge.models = ServedModels(model)

    @property
    def prompt(self) -> str:
        """The text of the only request's prompt, with its special tokens."""
        return ByteVocabulary().decode(unpack_tokens(self.only.tokens), special=True)

    @property
    def only(self) -> ClientRequest:
        (request,) = self.requests.values()
        return request

    def inject(self, event: FromClient) -> None:
        if isinstance(event.input, ChatToRender) and self.render is not None:
            self.rendered.append(event.input)
            asyncio.get_running_loop().call_soon(self.edge.calls.deliver, ToClient(event.request_id, self.render(event.input)))
            return
        if not isinstance(event.input, ClientRequest):
            self.cancelled.append(event.request_id)
            if isinstance(event.input, StopFound):
                account = ToClient(event.request_id, finished())
                asyncio.get_running_loop().call_soon(self.edge.calls.deliver, account)
            return
        request = event.input
        for request_id, seed in ((event.request_id, request.sampling.seed), *request.siblings):
            own = structs.replace(request, sampling=structs.replace(request.sampling, seed=seed), siblings=())
            assert request_id not in self.requests
            task = asyncio.create_task(self._play(request_id, self.script(own, len(self.requests))))
            self.requests[request_id] = own
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)

    def peers(self) -> dict[str, Hello]:
        return self.up

    def departed(self) -> list[str]:
        return []

    def refusals(self) -> dict[str, str]:
        return {"prefill-9": "model differs"}

    def cluster(self) -> ClusterView:
        return self.view

    def counts(self) -> dict[str, float]:
        return self.actor_counts

    def gauges(self) -> dict[str, float]:
        return {"requests[state=placing]": 0.0}

    def cordoned(self) -> bool:
        return self.edge.name in self.reports and self.reports[self.edge.name].report.cordoned

    def is_listening(self) -> bool:
        return False

    def call_later(self, write: Callable[[], None]) -> None:
        self.writes.append(write) if self.writes_later else write()

    def look(self, for_s: float) -> None:
        self.looks.append(for_s)

    def last_reports(self) -> dict[str, PeerReport]:
        return self.reports

    def awaits_reports(self) -> bool:
        return False

    def ask_state(self, node: str, ask_id: int, on_answer: Callable[[StateReported], None], part: str = "") -> None:
        if node in self.states:
            on_answer(self.states[node])

    def set_cordon(self, node: str, cordoned: bool) -> None:
        self.cordons.append((node, cordoned))
        if not self.deaf:
            self.reports[node] = PeerReport(self.edge.clock(), 1, Report(uptime_s=1.0, draining=cordoned, cordoned=cordoned))

    async def _play(self, request_id: str, batches: Batches) -> None:
        for batch in batches:
            for output in batch:
                self.edge.calls.deliver(ToClient(request_id, output))
            for _ in range(12):  # let the reader come around to waiting again
                await asyncio.sleep(0)

    def call(self, method: str, path: str, *, idle: bool = True, **arguments: Any) -> httpx.Response:
        """One HTTP call in a loop of its own; afterwards nothing may be left open (`idle`)."""

        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, **arguments)

        response = asyncio.run(go())
        if idle:
            self.check_idle()
        return response

    def complete(self, **body: Any) -> httpx.Response:
        return self.call("POST", "/v1/completions", json={"model": "toy", "prompt": "hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.call("POST", "/v1/chat/completions", json={"model": "toy", "messages": messages, **body})

    def check_idle(self) -> None:
        assert self.edge.calls.open_requests == 0
        assert self.edge.calls.slots_taken == 0
        assert self.edge.calls.held_image_bytes.taken == 0

    def serve(self, client: Callable[[int], Awaitable[None]]) -> None:
        """Run `client(port)` against a real server on a loopback port, behind a acceptor as a gateway's is."""

        async def go() -> None:
            server = uvicorn.Server(server_config(self.app, self.connections))
            listener = listen("127.0.0.1", 0, share=self.share)
            self.acceptor = Acceptor(
                server,
                listener,
                self.connections,
                send_timeout_s=self.settings.send_timeout_s,
                tls=self.tls,
                count=self.edge.count,
            )
            serving = asyncio.create_task(server.serve(sockets=[]))
            await self.acceptor.open()
            try:
                await client(listener.getsockname()[1])
            finally:
                self.acceptor.close()
                listener.close()
                server.should_exit = True
                await serving
            assert not self.acceptor.connections

        with asyncio.Runner(loop_factory=partial(new_loop, tls=self.tls is not None)) as runner:
            runner.run(go())
        self.check_idle()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, at most 5 s."""
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream; [DONE] as text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    payloads = [part.removeprefix("data: ") for part in parts]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def failing(status: int = 503, retry_after_s: float | None = 2.5) -> Failed:
    return Failed(status=status, code="no_decode", message="no decode node", retry_after_s=retry_after_s)
