"""The gateway's HTTP application: routes, streaming and disconnects of clients."""

import asyncio
import contextlib
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_zmq.engine.constraint import NamedWords
from mooncake_zmq.engine.fair_pool import FairPool
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.gateway.answers.table import Stored
from mooncake_zmq.gateway.anthropic import messages, replies
from mooncake_zmq.gateway.anthropic.replies import MessagesReply
from mooncake_zmq.gateway.http import admin, cluster_routes, plain_routes
from mooncake_zmq.gateway.http.acceptor import network_of
from mooncake_zmq.gateway.http.auth import Refusals, Usage, is_below, tenant_at
from mooncake_zmq.gateway.http.call_key import authorization_of
from mooncake_zmq.gateway.http.calls import Call, Full, HungUp, Reading
from mooncake_zmq.gateway.http.edge import Edge
from mooncake_zmq.gateway.http.kept_answers import Asking
from mooncake_zmq.gateway.http.keyless import check_caller
from mooncake_zmq.gateway.http.plain_routes import json_response
from mooncake_zmq.gateway.http.sse import AnyReply, Stream, Stuck, accept, accept_tokens
from mooncake_zmq.gateway.openai.bodies import SEED_BITS, ChatBody, CompletionBody
from mooncake_zmq.gateway.openai.embeddings import Embeddings, prepare_embeddings
from mooncake_zmq.gateway.openai.errors import QUOTED_CHARS, RequestError, quoted
from mooncake_zmq.gateway.openai.prepare import Prepared, Unrendered, prepare
from mooncake_zmq.gateway.openai.responses import EVENT_STREAM, Reply, server_sent
from mooncake_zmq.gateway.openai.tokens import detokenize, tokenize
from mooncake_zmq.gateway.requests.client_events import Failed
from mooncake_zmq.gateway.requests.tenants import Limited, Tenant
from mooncake_zmq.gateway.requests.traces import names_of
from mooncake_zmq.gateway.responses_api import items
from mooncake_zmq.gateway.responses_api.replies import ResponsesReply
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import EdgeSettings

CLIENT_CLOSED_REQUEST = 499
"""The status in the log and the metrics of a call whose client disconnected; it is not sent."""
CLIENT_ID_CHARS = 256
"""A longer x-request-id is not echoed."""
SWITCH_S = 0.0005
"""Time after which a thread that prepares a prompt yields the interpreter: the loop needs it again after every system call, so
that Python's default of 5 ms would add up."""
AT_ONCE_BYTES = 1 << 10
"""The longest body that is prepared on the loop: it takes a tenth of a millisecond as a rule, and 2 ms at worst."""
STREAM_TYPE = (b"content-type", EVENT_STREAM["content-type"].encode())
CLUSTER_ID = b"x-mooncake-request-id"
"""The header with the gateway's own id of a call."""
CONSTRAINING = (b'"response_format"', b'"guided_', b'"structured_outputs"', b'"tool_choice"', b'"strict"', b'"json_')
"""Texts of which every body that asks for a grammar contains one; other bodies may too."""
ESCAPED_NAME = re.compile(rb"\\u00[4-7]")
"""A letter or an underscore as a JSON escape: such a body may contain the same names in other bytes."""
MESSAGES = "/v1/messages"
"""The path of Anthropic's API; its errors, and those of the paths below it, have that API's shape."""
TOO_MANY_CONNECTIONS = "too_many_connections"
TAKEN_AWAY = "this API key was taken away"
COMPILE_S = 1.0
"""The longest time to compile a grammar, which every engine that follows it has to compile too."""

WorkT = TypeVar("WorkT")

_log = structlog.get_logger("gateway")


def create_app(edge: Edge, cors_origins: Sequence[str] = ()) -> Starlette:
    """Return the ASGI application over `edge`, which runs on the loop that calls `edge.calls.deliver`. `cors_origins`: whose
    pages may call."""
    threads = _Threads(edge.settings)
    grammars = {model.identity: _grammars_of(model) for model in edge.models.each}
    counts: dict[str, float] = {}
    for each in grammars.values():
        each.counts = counts
    edge.parts["grammar_processes"] = counts

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        threads.close()
        for each in grammars.values():
            await asyncio.to_thread(each.close)

    completions = _Generation(edge, threads, CompletionBody, grammars)
    chats = _Generation(edge, threads, ChatBody, grammars)
    of_anthropic = _Messages(edge, threads, messages.MessagesChat, grammars)
    responses = _Responses(edge, threads, ChatBody, grammars)
    counted = _Tokens(edge, partial(messages.count_tokens, settings=edge.settings))
    app = Starlette(
        routes=[
            Route("/v1/completions", _Posted(edge, threads, completions), methods=["POST"]),
            Route("/v1/chat/completions", _Posted(edge, threads, chats), methods=["POST"]),
            Route("/v1/responses", _Posted(edge, threads, responses), methods=["POST"]),
            Route(MESSAGES, _Posted(edge, threads, of_anthropic), methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", _Posted(edge, threads, counted), methods=["POST"]),
            Route("/v1/embeddings", _Posted(edge, threads, _Embeddings(edge, threads)), methods=["POST"]),
            Route("/tokenize", _Posted(edge, threads, _Tokens(edge, tokenize)), methods=["POST"]),
            Route("/detokenize", _Posted(edge, threads, _Tokens(edge, detokenize)), methods=["POST"]),
            *plain_routes.routes(edge),
            *admin.routes(edge.overview, keyed=lambda: edge.tenants is not None),
            *cluster_routes.routes(
                edge.overview,
                edge.ended.traces,
                cluster_routes.Events(edge.overview, lambda: edge.draining, edge.settings.send_timeout_s, _hang_up),
            ),
        ],
        middleware=[*_cors(cors_origins), Middleware(_Envelope, edge=edge, origins=cors_origins)],
        exception_handlers={HTTPException: _routing_error, RequestError: _request_error, Exception: _our_bug},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _grammars_of(model: ServedModel) -> Grammars:
    words = NamedWords.of(model.tokenizer, model.vocab_size)  # no more than that: the whole vocabulary's table takes memory
    return Grammars(words, words.vocab_size, max_compile_s=COMPILE_S)


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Before everything else: a browser asks without a key whether it may ask with one."""
    if not origins:
        return []
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", CLUSTER_ID.decode(), "retry-after", "retry-after-ms"),
    )
    return [cors]


class _Threads:
    """Threads that prepare requests from bodies and write the scores of whole prompts as JSON, so that the loop is free for
    streams. Only the shortest bodies are prepared on the loop, in at most half of its time. Short bodies do not wait for long
    ones, and none waits for the grammar of another."""

    def __init__(self, settings: EdgeSettings) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._short_bytes = settings.short_body_bytes
        self._at_once_bytes = min(AT_ONCE_BYTES, settings.short_body_bytes)
        self._short = FairPool("prepare")
        self._long = FairPool("prepare-long", settings.tokenize_threads)
        self._constrained = FairPool("prepare-grammar")
        self._loop_free_at = 0.0
        """Time until which no body is prepared on the loop."""

    async def run(self, call: Call, tenant: Tenant | None, raw: bytearray, work: Callable[[], WorkT]) -> WorkT:
        """Run `work` for this body. Raises what `work` raises, and HungUp."""
        name = tenant.name if tenant else ""
        if len(raw) > self._short_bytes:
            pool = self._long
            constrains = await call.unless_gone(asyncio.wrap_future(pool.submit(name, lambda: _may_constrain(raw))))
        else:
            pool, constrains = self._short, _may_constrain(raw)
        if constrains:
            pool = self._constrained
        elif len(raw) <= self._at_once_bytes and time.monotonic() >= self._loop_free_at:
            return self._at_once(work)
        return await call.unless_gone(asyncio.wrap_future(pool.submit(name, work)))

    def _at_once(self, work: Callable[[], WorkT]) -> WorkT:
        """Run `work` on the loop: passing it to a thread and back would take longer."""
        began = time.monotonic()
        try:
            return work()
        finally:
            ended = time.monotonic()
            self._loop_free_at = ended + (ended - began)

    def begin(self, tenant: str, work: Callable[[], WorkT]) -> asyncio.Future[WorkT]:
        """Begin work on a long prompt."""
        return asyncio.wrap_future(self._long.submit(tenant, work))

    async def encode(self, tenant: str, work: Callable[[], bytes]) -> bytes:
        """Run `work`, which writes a long part of a reply. No other task uses the reply meanwhile."""
        return await asyncio.wrap_future(self._long.submit(tenant, work))

    def close(self) -> None:
        """Begin no further work."""
        for pool in (self._short, self._long, self._constrained):
            pool.close()


def _may_constrain(raw: bytearray) -> bool:
    """Return whether a body may ask for a grammar."""
    return any(word in raw for word in CONSTRAINING) or ESCAPED_NAME.search(raw) is not None


class _Posted(Generic[WorkT]):
    """A POST, as an ASGI application: its body is read within the limits and made into something by a thread, then answered."""

    def __init__(self, edge: Edge, threads: _Threads, asked: "_Asked[WorkT]") -> None:
        self._edge = edge
        self._threads = threads
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        try:
            with contextlib.ExitStack() as stack:
                usage = stack.enter_context(Usage(self._edge.tenants, tenant, self._edge.clock))
                with self._edge.calls.reading(tenant.name if tenant else "") as reading:
                    raw = await _read_body(Request(scope, receive), reading, self._edge)
                    usage.prepare()
                    call = stack.enter_context(self._edge.calls.call())
                    call.names = scope["state"]["names"]
                    watcher = asyncio.create_task(_watch(receive, call))
                    stack.callback(watcher.cancel)
                    prepared = await self._prepare(call, raw, tenant)
                    del raw
                answer = self._asked.answer(call, prepared, usage, scope, send)
                del prepared  # the images of a chat are held once it is written, not the chat
                await answer
        except Stuck:
            scope["state"]["reported"] = False  # its requests know only that they were cancelled
            await _hang_up(scope, receive)
        except (HungUp, ClientDisconnect):
            scope["state"]["status"] = CLIENT_CLOSED_REQUEST
        except Full as full:
            retry_after_s = self._edge.settings.full_retry_after_s
            raise RequestError(503, str(full), code="overloaded", retry_after_s=retry_after_s) from None
        except Limited as limited:
            raise RequestError(429, str(limited), code="rate_limit_exceeded", retry_after_s=limited.retry_after_s) from None

    async def _prepare(self, call: Call, raw: bytearray, tenant: Tenant | None) -> WorkT:
        def work() -> WorkT:
            if call.gone:  # while this waited for a thread
                raise HungUp
            return self._asked.prepare(raw, tenant)

        return await self._threads.run(call, tenant, raw, work)


class _Asked(Protocol[WorkT]):
    """The processing of one kind of POST."""

    def prepare(self, raw: bytearray, tenant: Tenant | None) -> WorkT:
        """Prepare the requests of a body, in a thread. Raises RequestError."""

    async def answer(self, call: Call, prepared: WorkT, usage: Usage, scope: Scope, send: Send) -> None:
        """Answer the call, on the loop."""


class _Tokens:
    """POST /tokenize or /detokenize."""

    def __init__(self, edge: Edge, work: Callable[[bytearray, ServedModels], bytes]) -> None:
        self._models = edge.models
        self._work = work

    def prepare(self, raw: bytearray, tenant: Tenant | None) -> bytes:
        return self._work(raw, self._models)

    async def answer(self, call: Call, prepared: bytes, usage: Usage, scope: Scope, send: Send) -> None:
        await Response(prepared, media_type="application/json")(scope, _nothing, send)


class _Generation:
    """POST /v1/completions or /v1/chat/completions."""

    _reply: type[AnyReply] = Reply

    def __init__(
        self, edge: Edge, threads: _Threads, kind: type[CompletionBody] | type[ChatBody], grammars: Mapping[str, Grammars]
    ) -> None:
        self._edge = edge
        self._threads = threads
        self._kind = kind
        self._grammars = grammars

    def prepare(self, raw: bytearray, tenant: Tenant | None) -> Prepared:
        edge = self._edge
        seed = partial(secrets.randbits, SEED_BITS)
        kept = edge.answers.settings if edge.answers is not None and self._reply is Reply else None
        return prepare(raw, self._kind, edge.models, edge.settings, seed, tenant, self._grammars, edge.parsers, kept)

    async def _rendered(self, call: Call, prepared: Prepared, unrendered: Unrendered) -> Prepared:
        """Have a vLLM write a chat with images as tokens. Raises RequestError, Full, Limited and HungUp."""
        output = await call.render(unrendered.chat, unrendered.held_bytes)
        if isinstance(output, Failed):
            raise RequestError.of(output)
        whole = await call.unless_gone(self._threads.begin(unrendered.chat.tenant, partial(unrendered.prepared, output)))
        return replace(whole, spaces=prepared.spaces)

    async def answer(self, call: Call, prepared: Prepared, usage: Usage, scope: Scope, send: Send) -> None:
        if prepared.unrendered is not None:
            usage.has_work = True
            prepared = await self._rendered(call, prepared, prepared.unrendered)
        each = prepared.body.choices_per_prompt
        usage.take(prepared.requests, each)
        call.hold(prepared.requests[0].tenant, prepared.held_scores)
        shows_reuse = self._edge.shows_reuse(prepared.body.cache_salt)
        with Asking(self._edge.answers, prepared, takes_part=shows_reuse) as asking:
            if isinstance(asking.found, Stored):
                call.answer(asking.found.outputs())
                scope["state"]["facts"] |= {"answered_from": "cache"}
            else:
                # Where strangers share a root, an approximate answer would depend on what they have asked, and reveal it.
                requests = prepared.requests
                if not shows_reuse:
                    requests = [msgspec.structs.replace(request, exact=True) for request in requests]
                call.submit(requests, each)
                scope["state"]["reported"] = True
            reply = self._reply(
                replace(prepared, of_kept=asking.outcome),
                prepared.model,
                request_id=scope["state"]["id"],
                created=int(time.time()),
                shows_reuse=shows_reuse,
            )
            encode = partial(self._threads.encode, prepared.requests[0].tenant)
            try:
                if prepared.body.stream:
                    await Stream(call, reply, scope, send, encode, self._edge.settings).run()
                else:
                    call.shortcut = partial(accept_tokens, call, reply)
                    while not reply.done:
                        accept(call, reply, await call.take())
                    whole = await encode(reply.encoded) if reply.is_long_as_whole else reply.encoded()
                    await Response(whole, media_type="application/json")(scope, _nothing, send)
            finally:
                usage.tokens_used = reply.prompt_tokens + reply.completion_tokens
                self._meter(prepared, reply)
                scope["state"]["facts"] |= {
                    "prompt_tokens": reply.prompt_tokens,
                    "completion_tokens": reply.completion_tokens,
                    "finish_reasons": [choice.finish_reason for choice in prepared.choices],
                }

    def _meter(self, prepared: Prepared, reply: AnyReply) -> None:
        """Count what a call has used; one that got neither a token nor an end has used nothing."""
        if self._edge.meter is None or not (reply.completion_tokens or any(each.finished for each in prepared.choices)):
            return
        ended = [each.finished for each in prepared.choices[:: prepared.body.choices_per_prompt] if each.finished]
        self._edge.meter.note(
            prepared.requests[0].tenant,
            prompt=reply.prompt_tokens,
            cached=(
                sum(each.cached_own for each in ended),
                sum(each.cached_local for each in ended),
                sum(each.cached_remote for each in ended),
            ),
            completion=reply.completion_tokens,
        )


class _Embeddings:
    """POST /v1/embeddings."""

    def __init__(self, edge: Edge, threads: _Threads) -> None:
        self._edge = edge
        self._threads = threads

    def prepare(self, raw: bytearray, tenant: Tenant | None) -> Embeddings:
        return prepare_embeddings(raw, self._edge.models, self._edge.settings, tenant)

    async def answer(self, call: Call, prepared: Embeddings, usage: Usage, scope: Scope, send: Send) -> None:
        tenant = prepared.requests[0].tenant
        usage.take(prepared.requests)
        call.hold(tenant, 0)
        call.submit(prepared.requests)
        scope["state"]["reported"] = True
        try:
            while not prepared.done:
                prepared.accept(await call.take())
            whole = await self._threads.encode(tenant, prepared.encoded)
            await Response(whole, media_type="application/json")(scope, _nothing, send)
        finally:
            usage.tokens_used = prepared.embedded_tokens
            if self._edge.meter is not None and prepared.embedded_tokens:
                self._edge.meter.note(tenant, prompt=prepared.embedded_tokens, cached=(0, 0, 0), completion=0)
            scope["state"]["facts"] |= {"prompt_tokens": prepared.embedded_tokens, "completion_tokens": 0}


class _Messages(_Generation):
    """POST /v1/messages."""

    _reply = MessagesReply

    def prepare(self, raw: bytearray, tenant: Tenant | None) -> Prepared:
        return super().prepare(bytearray(messages.as_chat(raw, self._edge.models)), tenant)


class _Responses(_Generation):
    """POST /v1/responses."""

    _reply = ResponsesReply

    def prepare(self, raw: bytearray, tenant: Tenant | None) -> Prepared:
        chat, spaces = items.as_chat(raw, self._edge.models)
        return replace(super().prepare(bytearray(chat), tenant), spaces=spaces)


async def _hang_up(scope: Scope, receive: Receive) -> None:
    """Cut the connection: its client does not read. The server must know before the application returns without an end."""
    scope["state"]["status"] = CLIENT_CLOSED_REQUEST
    abort = scope["state"].get("abort")
    if abort is not None:
        abort()
        await cluster_routes.until_gone(receive)


async def _read_body(request: Request, reading: Reading, edge: Edge) -> bytearray:
    settings = edge.settings
    limit = settings.body_bytes(edge.models.longest_context)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit):
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                reading.add(len(chunk))
                body += chunk
    except TimeoutError:
        text = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise RequestError(408, text, code="body_timeout") from None
    return body


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is larger than {limit} bytes", code="body_too_large")


async def _watch(receive: Receive, call: Call) -> None:
    await cluster_routes.until_gone(receive)
    call.hang_up()


class _Envelope:
    """Around every call: its id, the x-request-id echo, and one line in the log when it ends."""

    def __init__(self, app: ASGIApp, edge: Edge, origins: Sequence[str]) -> None:
        self._app = app
        self._edge = edge
        self._origins = origins
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at = self._edge.clock()
        headers = dict(scope["headers"])
        own_id = self._edge.calls.new_id()
        client_id = headers.get(b"x-request-id", b"")
        traceparent = headers.get(b"traceparent", b"")[:CLIENT_ID_CHARS].decode("latin-1")
        names = names_of(own_id, client_id[:CLIENT_ID_CHARS].decode("latin-1"), traceparent)
        echoed = client_id if 0 < len(client_id) <= CLIENT_ID_CHARS else own_id.encode()
        # A fresh dict: the server may share its own between all calls.
        state = scope["state"] = {
            **scope.get("state", {}),
            "id": own_id,
            "names": names,
            "echoed": echoed,
            "status": 500,
            "facts": {},
            "reported": False,
            "tenant": None,
        }

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                if message["status"] >= 400 and self._edge.tenants is not None:
                    await self._put_off(scope)
                ids = ((b"x-request-id", echoed), (CLUSTER_ID, own_id.encode()))
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            if self._edge.tenants is None:
                check_caller(scope, Headers(scope=scope), allow_open=self._edge.allow_open, origins=self._origins)
            state["tenant"] = tenant = tenant_at(self._edge.tenants, scope["path"], authorization_of(scope["headers"]))
            if tenant is None:
                await self._app(scope, receive, send_with_id)
            else:
                await self._run_for(tenant, scope, receive, send_with_id)
        except RequestError as error:  # who has no key gets no further
            await _refuse(error, scope, receive, send_with_id)
        except BaseException:
            state["reported"] = False
            raise
        finally:
            self._edge.count(f"edge_http_responses[status={state['status']}]")
            # What was made into requests has a line for each of them, and says there how it ended; unless that was our bug.
            log = _log.info if scope["path"].startswith("/v1/") and not state["reported"] else _log.debug
            log(
                "http",
                method=scope["method"],
                path=scope["path"][:QUOTED_CHARS],
                status=state["status"],
                duration_s=round(self._edge.clock() - began_at, 6),
                id=own_id,
                x_request_id=names.client_id,
                traceparent=traceparent,
                **state["facts"],
            )

    async def _put_off(self, scope: Scope) -> None:
        """Wait with a refusal, if its client asks for too many; its connection makes room meanwhile."""
        tenant, (address, _) = scope["state"]["tenant"], scope.get("client") or ("", 0)
        delay_s = self._refusals.delay_s(self._edge.clock(), tenant.name if tenant else f"at {network_of(address)}")
        if delay_s:
            self._edge.count("edge_refusals_put_off")
            scope["state"].get("refuse", _ignore)()
            await asyncio.sleep(delay_s)

    async def _run_for(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call of a tenant, and end it if its key is revoked."""
        state, tenants, loop = scope["state"], self._edge.tenants, asyncio.get_running_loop()
        assert tenants is not None
        state["facts"] = {"tenant": tenant.name}
        if not state.get("claim", _always)(tenant.name):
            raise RequestError(429, f"{tenant.name} has as many connections as it may", code=TOO_MANY_CONNECTIONS)
        begun, is_stream = False, False

        async def send_watched(message: Message) -> None:
            nonlocal begun, is_stream
            if message["type"] == "http.response.start":
                begun, is_stream = True, STREAM_TYPE in message["headers"]
            await send(message)

        while_good = asyncio.timeout(None)

        def end() -> None:
            if not while_good.expired():
                while_good.reschedule(loop.time())

        try:
            async with while_good:
                with tenants.calling(tenant, end):
                    await self._app(scope, receive, send_watched)
            return
        except TimeoutError:
            if not while_good.expired():
                raise
        self._edge.count("edge_calls_cut")
        error = RequestError(401, TAKEN_AWAY, code="invalid_api_key")
        if not begun:
            raise error
        try:
            if not (is_stream and state.get("push", _cannot)(_error_event(error, scope))):
                raise TimeoutError  # the client takes nothing now, or only what was promised by its length
            async with asyncio.timeout(self._edge.settings.send_timeout_s):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            await _hang_up(scope, receive)


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a call with an error. Close its connection if it was one too many or its key was revoked."""
    close = {"connection": "close"} if error.code == TOO_MANY_CONNECTIONS or error.message == TAKEN_AWAY else {}
    await json_response(_error_body(error, scope), error.status, {**error.headers(), **close})(scope, receive, send)


def _error_body(error: RequestError, scope: Scope) -> dict[str, Any]:
    """Return an error in the shape of the API that was called."""
    return replies.error_body(error) if is_below(scope["path"], (MESSAGES,)) else error.body()


def _error_event(error: RequestError, scope: Scope) -> bytes:
    """Return an error as an event of the stream that was called for."""
    return replies.error_event(error) if is_below(scope["path"], (MESSAGES,)) else server_sent(error.body())


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    # The rest of a body that was refused half-way is not worth reading: close.
    close = {"connection": "close"} if error.status in (408, 413) else {}
    return json_response(_error_body(error, request.scope), error.status, {**error.headers(), **close})


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    text = f"{request.method} {quoted(request.url.path)}: {error.detail}"
    if error.status_code == 404:
        text += _nearest_path(request)
    body = _error_body(RequestError(error.status_code, text, code=code), request.scope)
    return json_response(body, error.status_code, dict(error.headers or {}))


def _nearest_path(request: Request) -> str:
    """Return a hint at the path that was meant, or "" if none is near. Many programs leave out /v1, or give it twice."""
    paths = [route.path for route in request.app.routes if isinstance(route, Route)]
    bare = request.url.path.rstrip("/").removeprefix("/v1").removeprefix("/v1")
    near = next((path for path in (bare, f"/v1{bare}") if path in paths), None)
    near = near or next(iter(get_close_matches(f"/v1{bare}", paths, 1, cutoff=0.8)), None)
    return f"; did you mean {near}?" if near else ""


async def _our_bug(request: Request, _error: Exception) -> Response:
    """Starlette raises the error again once this is sent, so that the server logs it."""
    error = RequestError(500, "internal error of the gateway", code="internal_error")
    return json_response(_error_body(error, request.scope), 500, {"x-request-id": request.state.echoed.decode("latin-1")})


def _always(_tenant: str) -> bool:
    """Stands in where the server counts no connections."""
    return True


def _ignore() -> None:
    """Stands in where the server counts no connections."""


def _cannot(_event: bytes) -> bool:
    """Stands in where the server takes only ASGI's messages."""
    return False


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
