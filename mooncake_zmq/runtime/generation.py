"""Executes `Generate` at a vLLM server over HTTP, all streams in one thread. It decides nothing.

vLLM's `/inference/v1/generate` (`--enable-scale-out`) takes token ids and streams token ids as server-sent events. Hanging up
ends a request there. Everything received is checked against a limit: the server is another program.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import structlog
from msgspec import Struct

from mooncake_zmq.core.actor import OpenSequence, WorkDone, WorkProgress
from mooncake_zmq.core.grammar import lark_of, schema_of
from mooncake_zmq.core.messages import (
    LEAST_LOGPROB,
    MAX_LOGPROBS,
    MAX_MODEL_NAME,
    MAX_RUN,
    MAX_SCORED,
    MAX_VERSION_CHARACTERS,
    MAX_WEIGHT_VERSIONS,
    Hello,
    Parsers,
    TokenLogprob,
)
from mooncake_zmq.core.work import (
    Embed,
    EngineProbed,
    EngineReported,
    Generate,
    Generated,
    ProbeEngine,
    PromptScoresGenerated,
    ReadTokens,
    Result,
    TokensGenerated,
    WatchEngine,
    Work,
    WorkFailed,
    WriteChat,
)
from mooncake_zmq.kv.block_hash import salt_of, unpack_tokens
from mooncake_zmq.runtime.derender import parsers_of, read_tokens
from mooncake_zmq.runtime.embedding import EMBEDDINGS, ONE_TEXT, embed
from mooncake_zmq.runtime.http_connections import Broken, Connections, Target
from mooncake_zmq.runtime.kv_subscriber import KvSubscriber, OnEvents
from mooncake_zmq.runtime.rendering import REFUSED, parts_of, without_repeats, write_chat
from mooncake_zmq.runtime.vllm_answers import Nonsense, asked, for_model, models_in, shown
from mooncake_zmq.runtime.vllm_stream import Refusal, Stream
from mooncake_zmq.vllm.hints import as_parameters

log = structlog.get_logger()

READ_OUT_S = 0.05
KEPT, KEPT_S = 32, 2.0
"""Most idle connections, and how long they are kept: vLLM closes them after five seconds."""
LIST_S = 0.5
"""The longest wait for the list of adapters, which a health check asks for beside it."""
GENERATE = "/inference/v1/generate"
PIECE_BYTES = 64 << 10
"""Bytes of token ids that are written as JSON at once, in half a millisecond. Longer prompts are written in a thread."""
ONE_TOKEN = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False}}
"""The shortest request."""
MAX_LINE_BYTES = 256 << 10
"""Longest event; those that we request take about 300 bytes."""
SCORE_BYTES = 160
"""The most bytes of one token's logprob in a whole answer, with its rank and text."""
UNNAMED = "default"
"""vLLM's version of weights without a name."""
SEED_LIMIT = (1 << 63) - 1

Emit = Callable[[WorkProgress | WorkDone[Result]], None]


class ImagesRefused(Exception):
    """A refusal of a prompt with images that has no answer yet; the text is vLLM's, as one line."""


class _Candidate(Struct, frozen=True):
    token_id: int
    logprob: float


class _Scored(_Candidate, frozen=True):
    """A token with its logprob, and candidates in its place: the token itself first, then the likeliest."""

    top_logprobs: list[_Candidate] = []


class _Scores(Struct, frozen=True):
    content: list[_Scored] | None = None


class _Span(Struct, frozen=True):
    version: str
    start: int


class _Choice(Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Scores | None = None
    weight_versions: Any = None


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct, frozen=True):
    """One event, as far as we use it."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunk_decoder: msgspec.json.Decoder[_Chunk] = msgspec.json.Decoder(_Chunk)
DONE = b"[DONE]"


class EventLines:
    """Split received bytes into the data of server-sent events, of which each of vLLM's is one line."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def feed(self, raw: bytes) -> Iterator[bytes]:
        """Yield the complete data so far. Raises Nonsense."""
        *lines, self._rest = (self._rest + raw).split(b"\n")
        if len(self._rest) > self._max_bytes or any(len(line) > self._max_bytes for line in lines):
            raise Nonsense(f"vLLM sends a line of more than {self._max_bytes} bytes")
        for line in lines:
            name, _, value = line.rstrip(b"\r").partition(b":")
            if name == b"data":
                yield value.strip()


class _PromptScore(Struct, frozen=True):
    logprob: float


class _Whole(Struct, frozen=True):
    """A whole answer, as far as its prompt's logprobs are read: none for the first token, then by token id."""

    prompt_logprobs: list[dict[int, _PromptScore] | None]


_whole_decoder: msgspec.json.Decoder[_Whole] = msgspec.json.Decoder(_Whole)


def prompt_scores(raw: bytes | bytearray, tokens: bytes, likeliest: int) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of all `tokens` (int32 bytes) but the first, from vLLM's whole answer. Raises Nonsense."""
    try:
        scores = _whole_decoder.decode(raw).prompt_logprobs[1:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Nonsense(f"vLLM sends no logprobs of the prompt: {shown(str(error))}") from None
    following = unpack_tokens(tokens)[1:]
    if len(scores) != len(following):
        raise Nonsense(f"vLLM gives logprobs of {len(scores)} tokens of a prompt where {len(following)} were asked for")
    found = []
    for token, by_token in zip(following, scores, strict=True):
        if by_token is None or token not in by_token or min(by_token) < 0:
            raise Nonsense("vLLM gives logprobs without that of the prompt's own token")
        candidates = [_Candidate(other, score.logprob) for other, score in by_token.items()]
        found.append((_bounded(by_token[token].logprob), _likeliest(candidates, likeliest)))
    return tuple(found)


@dataclass(slots=True)
class Answer:
    """One stream of events, read so far: what may be reported at once, and what waits for the end. `limit`: tokens
    requested; `likeliest`: number of likeliest tokens to report with each token's logprob, None: no logprobs. `prompt`: tokens
    that the prompt has once vLLM has put its images in; None: it has none."""

    limit: int
    likeliest: int | None = None
    prompt: int | None = None
    ready: list[int] = field(default_factory=list)
    ready_logprobs: list[TokenLogprob] = field(default_factory=list)
    last: tuple[int, ...] | None = None
    """Tokens of the event with which the output ended."""
    last_logprobs: tuple[TokenLogprob, ...] = ()
    reused: int = 0
    versions: tuple[tuple[str, int], ...] = ()
    """Versions of the weights, each with the number of tokens before it; none where none has a name."""
    done: bool = False
    _count: int = 0

    def take(self, data: bytes) -> None:
        """Take one event's data. Raises Nonsense."""
        if data == DONE or self.done:
            self.done = True
            return
        chunk = _decoded(data)
        if chunk.error is not None:
            raise Nonsense(f"vLLM failed: {shown(str(chunk.error))}")
        counted = None if chunk.usage is None else chunk.usage.prompt_tokens
        if None not in (self.prompt, counted) and counted != self.prompt:
            raise Nonsense(f"vLLM makes {counted} tokens of a prompt with images that has {self.prompt}")
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.reused = max(0, min(chunk.usage.prompt_tokens_details.cached_tokens or 0, 1 << 48))
        for choice in chunk.choices:
            self._take(choice)

    def _take(self, choice: _Choice) -> None:
        tokens = choice.token_ids or []
        self._count += len(tokens)
        if self._count > self.limit:
            raise Nonsense("vLLM gives more tokens than were asked for")
        if self.last is not None:
            raise Nonsense("vLLM goes on after the end of an answer")
        logprobs = [] if self.likeliest is None else _logprobs(tokens, choice.logprobs, self.likeliest)
        if choice.finish_reason is None:
            self.ready += tokens
            self.ready_logprobs += logprobs
        elif choice.finish_reason in ("stop", "length"):
            # Of many tokens at once all but the last piece is reported as progress: a message holds no more.
            self.ready += tokens[: -self.run]
            self.ready_logprobs += logprobs[: -self.run]
            self.last, self.last_logprobs = tuple(tokens[-self.run :]), tuple(logprobs[-self.run :])
            self.versions = _versions(choice.weight_versions, self._count)
        else:
            raise Nonsense(f"vLLM ended the answer: {shown(choice.finish_reason)}")

    @property
    def run(self) -> int:
        """The most tokens that one report may have."""
        return MAX_RUN if self.likeliest is None else MAX_SCORED


def _versions(given: Any, tokens: int) -> tuple[tuple[str, int], ...]:
    """Return versions of weights, the latest that a message holds; none where they are not those of the answer's tokens, which
    are right all the same."""
    try:
        spans = msgspec.convert(given or [], list[_Span])
    except msgspec.ValidationError:
        return ()
    starts = [span.start for span in spans]
    if starts != sorted(set(starts)) or any(not 0 <= start < tokens for start in starts):
        return ()
    if all(span.version == UNNAMED for span in spans):
        return ()
    return tuple((span.version[:MAX_VERSION_CHARACTERS], span.start) for span in spans[-MAX_WEIGHT_VERSIONS:])


def _logprobs(tokens: list[int], given: _Scores | None, likeliest: int) -> list[TokenLogprob]:
    """Return the logprobs of tokens. Raises Nonsense."""
    scored = (given.content if given is not None else None) or []
    if [each.token_id for each in scored] != tokens or any(each.token_id < 0 for all in scored for each in all.top_logprobs):
        raise Nonsense("vLLM gives other logprobs than those of its tokens")
    return [(_bounded(each.logprob), _likeliest(each.top_logprobs, likeliest)) for each in scored]


def _likeliest(candidates: Iterable[_Candidate], count: int) -> tuple[tuple[int, float], ...]:
    best = sorted({each.token_id: _bounded(each.logprob) for each in candidates}.items(), key=lambda each: (-each[1], each[0]))
    return tuple(best[:count])


def _bounded(logprob: float) -> float:
    """Return a logprob within what messages hold; NaN is the least."""
    return min(0.0, logprob) if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _decoded(data: bytes) -> _Chunk:
    try:
        return _chunk_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Nonsense(f"vLLM sends what is no event of its own: {shown(str(error))}") from None


def structured(grammar: bytes) -> dict[str, Any]:
    """Return a grammar of llguidance's as vLLM takes it: a JSON schema, or text in Lark's syntax. Raises Nonsense."""
    try:
        if (schema := schema_of(grammar)) is None:
            return {"grammar": lark_of(grammar)}
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Nonsense(f"the grammar is none of ours: {shown(str(error))}") from None
    return {"json": {name: value for name, value in schema.items() if name != "x-guidance"}}


def _ids(tokens: bytes) -> msgspec.Raw:
    """Return token ids (int32 bytes) as JSON, made piece by piece: other threads run in between."""
    starts = range(0, len(tokens), PIECE_BYTES)
    pieces = (msgspec.json.encode(unpack_tokens(tokens[start : start + PIECE_BYTES]))[1:-1] for start in starts)
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


def request_body(work: Generate, model: str = "") -> bytes:
    """Return the body for `/inference/v1/generate`. `model`: the name that vLLM has to serve, if any."""
    return msgspec.json.encode(_asked(work, model))


def scoring_body(work: Generate, model: str = "") -> bytes:
    """Return the body of a request for the logprobs of the work's prompt alone, which vLLM gives in whole answers."""
    body = _asked(work, model)
    del body["stream"], body["stream_options"]
    likeliest = {"prompt_logprobs": work.prompt_likeliest, "max_tokens": 1, "temperature": 0.0, "detokenize": False}
    return msgspec.json.encode(body | {"sampling_params": likeliest})


def _asked(work: Generate, model: str) -> dict[str, Any]:
    """Return the body's fields. The root of the keys is the salt of vLLM's cache: tenants share none of it."""
    sampling, stop = work.sampling, work.stop
    left = stop.max_tokens - work.count
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": left,
        "min_tokens": min(left, max(0, stop.min_tokens - work.count)),
        "stop_token_ids": list(stop.eos_ids),
        "ignore_eos": True,
        "detokenize": False,
    }
    if sampling.constraint:
        parameters["structured_outputs"] = structured(sampling.constraint)
    if sampling.logprobs is not None:
        # The sampled token is one of those that vLLM returns, whether or not it is one of the likeliest.
        parameters["logprobs"] = min(sampling.logprobs + 1, MAX_LOGPROBS)
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.temperature > 0:
        # vLLM's generator counts draws, not positions: a continued answer must not begin with the same draws.
        parameters["seed"] = (sampling.seed + work.count) & SEED_LIMIT
    body: dict[str, Any] = {
        "token_ids": _ids(without_repeats(work.tokens, work.images)),
        "sampling_params": parameters,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt_of(work.root),
    }
    if sampling.constraint:
        # A vLLM with a parser of reasoning holds an answer to its grammar only after reasoning, unless that has ended.
        body["reasoning_ended"] = True
    if work.images:
        body["content_parts"] = parts_of(work.images)
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if hints := as_parameters(work.sources, work.coming_tokens):
        body["kv_transfer_params"] = hints
    return for_model(body, work.adapter or model)


class Generation:
    """Execute the works of a node beside vLLM: `start` and `cancel` from the runtime's thread, `emit` from its own."""

    def __init__(
        self,
        url: str,
        *,
        connect_s: float,
        emit: Emit,
        on_crash: Callable[[BaseException], None],
        subscribe: Callable[[OnEvents], KvSubscriber] | None = None,
        embeds: bool = False,
        model: str = "",
    ) -> None:
        """`embeds`: the server's model gives vectors, no tokens. `model`: the name by which the server serves its model, which
        goes with each request, so that vLLM itself refuses those for another one; "": not known. `subscribe`: begins to receive
        vLLM's KV events, for `WatchEngine`."""
        self._url = url.rstrip("/")
        self._subscribe = subscribe
        self._embeds, self._model = embeds, model
        self._subscriber: KvSubscriber | None = None
        self._connect_s = connect_s
        self._emit = emit
        self._on_crash = on_crash
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Running works; for the own thread only."""
        self._ends: set[asyncio.Task[None]] = set()
        """Transfers of answers whose results are emitted, which end within READ_OUT_S."""
        self._loop = asyncio.new_event_loop()
        self._client = _client(self._url, connect_s)
        target = Target.of(self._url)
        context = httpx.create_ssl_context(trust_env=False) if target.tls else None
        self._connections = Connections(target, context, connect_s=connect_s, most_idle=KEPT)
        """For answers; `_client` is for everything else."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    def start(self, work_id: int, work: Work, deadline_s: float) -> None:
        """Start a work, which ends with exactly one `WorkDone` in any case; a watch ends with the process."""
        assert not self._closed, "closed"
        if isinstance(work, WatchEngine):
            assert self._subscribe is not None, "nothing to hear"
            self._subscriber = self._subscribe(lambda events: self._emit(WorkProgress(work_id, EngineReported(events))))
            return
        self._loop.call_soon_threadsafe(self._begin, work_id, work, deadline_s)

    def cancel(self, work_id: int) -> None:
        """Hang up on a work, unless it has ended."""
        self._loop.call_soon_threadsafe(self._cancel, work_id)

    def engine_overdue_s(self) -> float:
        """Return 0: the actor itself notices that its vLLM hangs."""
        return 0.0

    def close(self) -> None:
        """End all works and the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._subscriber is not None:
            self._subscriber.close()
        ended: Future[None] = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # A node beside vLLM holds no blocks; `runtime.executor.executor` is for nodes with slots and sequences.

    def fence(self, generations: tuple[tuple[int, int], ...]) -> None:
        raise AssertionError("no segment here")

    def open_sequence(self, asked: OpenSequence) -> None:
        raise AssertionError("no sequences here")

    def close_sequence(self, sequence: int) -> None:
        raise AssertionError("no sequences here")

    def learn_peer(self, name: str, incarnation: int, hello: Hello) -> None:
        """Do nothing: peers' segments are not read."""

    def forget_peer(self, name: str) -> None:
        """Do nothing: peers' segments are not read."""

    # --- the own thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, work_id: int, work: Work, deadline_s: float) -> None:
        task = self._loop.create_task(self._carry_out(work_id, work, deadline_s))
        self._tasks[work_id] = task
        task.add_done_callback(lambda ended: self._ended(work_id, ended))

    def _cancel(self, work_id: int) -> None:
        if task := self._tasks.get(work_id):
            task.cancel()

    def _ended(self, work_id: int, task: asyncio.Task[None]) -> None:
        del self._tasks[work_id]
        if task.cancelled():  # before it began
            self._emit(WorkDone(work_id, WorkFailed("cancelled")))
        elif (error := task.exception()) is not None:  # our bug: a thread has no caller that could crash
            self._on_crash(error)
            log.critical("worker_crashed", thread="generation", exc_info=error)

    async def _end_all(self) -> None:
        tasks = [*self._tasks.values(), *self._ends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._connections.close()
        await self._client.aclose()

    async def _carry_out(self, work_id: int, work: Work, deadline_s: float) -> None:
        result: Result
        try:
            async with asyncio.timeout(deadline_s):
                result = await self._result(work_id, work)
        except asyncio.CancelledError:
            result = WorkFailed("cancelled")
        except TimeoutError:
            result = WorkFailed("no answer in time")
        except (Nonsense, ImagesRefused) as error:
            result = WorkFailed(str(error), stuck=isinstance(error, ImagesRefused))
        except Broken as error:
            result = WorkFailed(f"vLLM at {self._url}: {error}")
        except (httpx.HTTPError, httpx.StreamError) as error:
            result = WorkFailed(f"vLLM at {self._url}: {type(error).__name__}{_reason(error)}")
        self._emit(WorkDone(work_id, result))

    async def _result(self, work_id: int, work: Work) -> Result:
        match work:
            case Generate():
                return await self._generate(work_id, work)
            case ProbeEngine(generate, parsers):
                path, body = trial(self._model, embeds=self._embeds)
                status, _ = await (
                    asked(self._client, "POST", path, body) if generate else asked(self._client, "GET", "/health")
                )
                well = status == httpx.codes.OK
                reason = "" if well else f"it answers {status}"
                if not well:
                    return EngineProbed(well, reason)
                names, adapters = await self._listed() or ((), None)
                if self._model and names and self._model not in names:
                    return EngineProbed(False, f"it serves {shown(', '.join(names))} in place of {self._model}")
                return EngineProbed(well, reason, adapters, await self._parsers() if parsers else None)
            case ReadTokens():
                return await read_tokens(self._client, work, self._model)
            case WriteChat():
                return await write_chat(self._client, work, self._model)
            case Embed():
                return await embed(self._client, work, self._connect_s, self._model)
            case _:
                raise TypeError(work)

    async def _listed(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the names of the model and of the adapters that vLLM lists, or None if it does not answer that: it may be well
        all the same."""
        try:
            async with asyncio.timeout(LIST_S):
                models = models_in(*await asked(self._client, "GET", "/v1/models"))
        except (httpx.HTTPError, Nonsense, TimeoutError):
            return None
        if models is None:
            return None
        adapters = tuple(each.id for each in models if each.parent is not None and len(each.id) <= MAX_MODEL_NAME)
        return tuple(each.id for each in models if each.parent is None), adapters

    async def _parsers(self) -> Parsers | None:
        """Return the parsers that vLLM was started with, or None if it does not answer that. One that embeds has none."""
        if self._embeds:
            return Parsers()
        try:
            async with asyncio.timeout(LIST_S):
                return await parsers_of(self._client)
        except (httpx.HTTPError, Nonsense, TimeoutError):
            return None

    async def _post(self, work: Generate, body: bytes, take: Callable[[bytes], bool]) -> None:
        """Ask vLLM to generate, until `take` has a complete answer. Raises Broken, ImagesRefused, and Nonsense, also for a
        refusal."""
        try:
            rest = await Stream(take, work.quiet_s).post(self._connections, GENERATE, body)
        except Refusal as refusal:
            reason = shown(refusal.reason.decode("utf-8", "replace"))
            if refusal.status in REFUSED and work.images and not work.count:
                raise ImagesRefused(reason) from None
            raise Nonsense(f"vLLM answers {refusal.status}: {reason}") from None
        if not rest.done():  # what comes with the last event delays no result; the connection then serves another request
            self._ends.add(rest)
            rest.add_done_callback(self._ends.discard)
            self._loop.call_later(READ_OUT_S, rest.cancel)

    async def _score(self, work_id: int, work: Generate, likeliest: int) -> None:
        """Report the logprobs of the prompt. Raises Nonsense."""
        most = (likeliest + 2) * SCORE_BYTES * (len(work.tokens) // 4) + MAX_LINE_BYTES
        raw = bytearray()

        def take(piece: bytes) -> bool:
            raw.extend(piece)
            if len(raw) > most:
                raise Nonsense(f"vLLM sends more than {most} bytes of logprobs")
            return False

        await self._post(work, scoring_body(work, self._model), take)
        scores = await asyncio.to_thread(prompt_scores, raw, work.tokens, likeliest)
        for start in range(0, len(scores), MAX_SCORED):
            found = PromptScoresGenerated(start + 1, scores[start : start + MAX_SCORED])
            self._emit(WorkProgress(work_id, found))

    async def _generate(self, work_id: int, work: Generate) -> Result:
        if work.prompt_likeliest is not None:
            await self._score(work_id, work, work.prompt_likeliest)
        prompt = len(work.tokens) // 4 if work.images else None
        answer, lines = Answer(work.stop.max_tokens - work.count, work.sampling.logprobs, prompt), EventLines()
        long = len(work.tokens) + sum(len(image.url) for image in work.images) > PIECE_BYTES
        body = await asyncio.to_thread(request_body, work, self._model) if long else request_body(work, self._model)

        def take(piece: bytes) -> bool:
            for data in lines.feed(piece):
                answer.take(data)
            self._report(work_id, answer)
            return answer.done

        await self._post(work, body, take)
        if answer.last is None:
            raise Nonsense("vLLM hung up in mid-answer")
        return Generated(answer.last, answer.reused, answer.last_logprobs, answer.versions)

    def _report(self, work_id: int, answer: Answer) -> None:
        while answer.ready:
            run = answer.run
            made = TokensGenerated(tuple(answer.ready[:run]), tuple(answer.ready_logprobs[:run]))
            self._emit(WorkProgress(work_id, made))
            del answer.ready[:run], answer.ready_logprobs[:run]


def trial(model: str, *, embeds: bool) -> tuple[str, dict[str, Any]]:
    """Return the shortest request of a server, as its path and body."""
    path, body = (EMBEDDINGS, ONE_TEXT) if embeds else (GENERATE, ONE_TOKEN)
    return path, for_model(body, model)


def _client(url: str, connect_s: float) -> httpx.AsyncClient:
    """Return a client of vLLM that ignores the environment's proxies and allows as many streams as the actor begins."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=connect_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT, keepalive_expiry=KEPT_S),
        headers={"accept-encoding": "identity"},
        trust_env=False,
    )


def _reason(error: Exception) -> str:
    text = shown(str(error))
    return f": {text}" if text else ""
