"""`bench longprompt`: conversations of 100,000 tokens through one gateway and conductor, in front of vLLM servers that sleep.

The same calls are sent, one side after the other, straight to a server, through our cluster, and through another router if its
command is given. Beside them run a few short answers, whose longest gaps show what a long prompt does to everybody else.

Servers that sleep do not tokenize, so that all of our own work counts as added. Running vLLMs may be measured instead: these
tokenize a whole conversation at each turn where they are called directly, and receive token ids from us. Each side then has
conversations of its own, or the second would find those of the first in vLLM's prefix cache.
"""

import asyncio
import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx
import msgspec
import numpy as np
import uvloop

from mooncake_zmq.bench.client_prompts import VOCABULARY
from mooncake_zmq.bench.client_stream import Seen, ask
from mooncake_zmq.bench.cluster import answers, last_lines, written_cluster
from mooncake_zmq.bench.memory import cpu_s, footprint
from mooncake_zmq.bench.others.store_driver import free_port
from mooncake_zmq.bench.report import Progress, Report
from mooncake_zmq.bench.sleeping_vllm import PREFILL_S, TOKEN, TOKEN_S
from mooncake_zmq.core.messages import MAX_TOKENS
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare as prepare_model
from mooncake_zmq.engine.sources.directory import ModelDirectory
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.refused import Refused
from mooncake_zmq.runtime.http_connections import Connections, Target

SERVERS = 2
BLOCK_TOKENS = 16
"""vLLM's default."""
NEW_WORDS = 400
"""Words, about as many tokens, that each turn adds: an answer and a question of half of them each."""
MESSAGE_WORDS = 1000
ANSWER_TOKENS = 4
BYSTANDERS = 4
WANTED_MS = {"p50": 30.0, "p99": 100.0}
GAP_WANTED_MS = 50.0
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files of a model's directory that say how texts become tokens."""
CHAT = "/v1/chat/completions"
HEADERS = {b"content-type": b"application/json"}
NODES = """
[model]
engine = "vllm"
path = "{model}"
block_tokens = {block_tokens}
max_model_len = {max_model_len}

[conductor]
admission = "none"

[vllm]
max_running = 1024
max_queued = 1024
{capacity}max_known_blocks = 4_194_304

[gateway.requests]
max_open = 2048

[[nodes]]
name = "conductor-0"
role = "conductor"

[[nodes]]
name = "gateway-0"
role = "gateway"
"""
NODE = """
[[nodes]]
name = "vllm-{number}"
role = "vllm"
host = "host-{number}"
settings = {{ url = "{url}" }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompts:
    """The load: `rate` turns a second of `chats` conversations by turns, each of `tokens` tokens at the beginning."""

    tokens: int = 100_000
    rate: float = 50.0
    seconds: float = 60.0
    chats: int = 50
    beside: str = ""
    """Command line of another router, with {urls} and {port}; empty: none."""
    vllms: tuple[str, ...] = ()
    """Addresses of running vLLMs with `model`, instead of servers that sleep."""
    model: str = "default"
    """Name or directory of the model with the tokenizer and chat template; no weights are read."""
    cache_dir: str = ""

    @property
    def turns(self) -> int:
        """Measured turns."""
        return max(1, round(self.rate * self.seconds))

    @property
    def more(self) -> bytes:
        """Fields of each call that make a real engine say one word again and again, as servers that sleep do: a model may
        begin with tokens that have no text, and times are those of text."""
        return b',"ignore_eos":true,"logit_bias":{"%d":100}' % TOKEN if self.vllms else b""

    @property
    def longest(self) -> int:
        """Tokens that a conversation has at its end, at most."""
        return int(1.03 * (self.tokens + (self.turns // self.chats + 2) * NEW_WORDS)) + ANSWER_TOKENS


@dataclass(slots=True)
class Side:
    """The results of one side of the comparison: times in seconds; CPU of its processes by name."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """The longest gap of each short answer."""
    failed: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """TTFT of the first turn of each conversation, sent alone."""
    cpu_s: dict[str, float] = field(default_factory=dict)

    def percentile_ms(self, name: str) -> float:
        """Return the percentile of TTFT by its name, "p50"."""
        return 1e3 * float(np.percentile(self.ttft_s, float(name[1:]))) if self.ttft_s else float("inf")


def bench_longprompt(wanted: LongPrompts, progress: Progress) -> Report:
    """Run all sides. Raises click.ClickException."""
    report = Report("longprompt")
    if wanted.beside and shutil.which(shlex.split(wanted.beside)[0]) is None:
        raise Refused(f"the other router does not start: there is no program {shlex.split(wanted.beside)[0]}")
    if wanted.longest > MAX_TOKENS:
        raise Refused(f"conversations would grow to {wanted.longest:,} tokens, and a prompt has {MAX_TOKENS:,} at most")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mczmq-")))
        servers = list(wanted.vllms) or stack.enter_context(sleeping_servers(SERVERS))
        served = _served_name(servers[0])
        first = iter(itertools.count(step=wanted.chats))
        direct = _side("the engine alone", servers[0], served, wanted, next(first), {}, progress)
        with _cluster(wanted, servers, scratch, progress) as (url, model, pids):
            ours = _side("mooncake_zmq", url, model, wanted, next(first), pids, progress)
            report.memory += [footprint(name, pid) for name, pid in pids.items()]
        sides = [direct, ours]
        if wanted.beside:
            with _other(wanted.beside, servers, served, scratch, progress) as (url, pid):
                sides.append(_side("the other router", url, served, wanted, next(first), {"router": pid}, progress))
    _write(report, wanted, sides)
    return report


@contextmanager
def sleeping_servers(count: int) -> Iterator[list[str]]:
    """Run so many servers that sleep in one process; yield their addresses."""
    ports = [free_port() for _ in range(count)]
    command = [sys.executable, "-m", "mooncake_zmq.bench.sleeping_vllm", *map(str, ports)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise click.ClickException("the sleeping servers did not start")
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        process.kill()
        process.wait()


def _served_name(server: str) -> str:
    """Return the name by which a server calls its model. Raises Refused if it does not answer."""
    try:
        answer = httpx.get(f"{server}/v1/models", timeout=10, verify=False)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        raise Refused(f"{server} does not say which model it serves: {error}") from None


@contextmanager
def _cluster(
    wanted: LongPrompts, servers: Sequence[str], scratch: Path, progress: Progress
) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Start a gateway, a conductor and a node for each server; yield the address, the model's name and the processes."""
    model = _described(wanted, scratch / "model", progress)
    text = NODES.format(
        model=model,
        block_tokens=BLOCK_TOKENS,
        max_model_len=wanted.longest,
        capacity="" if wanted.vllms else f"capacity_tokens = {4 * wanted.chats * wanted.longest}\n",
    )
    progress("starting a gateway, a conductor and two nodes")
    with written_cluster(text + "".join(NODE.format(number=number, url=url) for number, url in enumerate(servers))) as cluster:
        yield cluster.url, cluster.model, {name: cluster.pid(name) for name in cluster.nodes}


def _described(wanted: LongPrompts, directory: Path, progress: Progress) -> Path:
    """Write a directory as vLLM has it, without weights: the tokenizer and template of a model, a context that is long enough.
    Raises ModelError."""
    directory.mkdir()
    context = {"max_position_embeddings": 2 * wanted.longest}
    own = Path(wanted.model).expanduser()
    if own.is_dir():
        for name in TEXTS:
            if (own / name).exists():
                shutil.copy(own / name, directory)
        _write_json(directory / "config.json", ModelDirectory(own).config | context)
        return directory
    prepared = prepare_model(wanted.model, wanted.cache_dir, lambda what, share: progress(what))
    if not (prepared / "tokenizer.json").exists():
        raise ModelError(f"{wanted.model} has no tokenizer.json, which the gateway needs for texts")
    tokenizer = open_tokenizer(prepared)
    eos = min(tokenizer.eos_ids)
    config: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": tokenizer.vocab_size,
    }
    config |= {"eos_token_id": eos, "model_type": "llama"} | context
    template = {"chat_template": tokenizer.chat_template, "eos_token": tokenizer.piece(eos).decode()}
    shutil.copy(prepared / "tokenizer.json", directory)
    _write_json(directory / "config.json", config)
    _write_json(directory / "tokenizer_config.json", template)
    return directory


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.encode(value))


@contextmanager
def _other(command: str, servers: Sequence[str], served: str, scratch: Path, progress: Progress) -> Iterator[tuple[str, int]]:
    """Start another router by its command line, and wait until it answers a request."""
    port = free_port()
    words = shlex.split(command.format(urls=" ".join(servers), port=port))
    progress(f"starting {words[0]}")
    log = scratch / "router.log"
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        body = {"model": served, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True}
        if not answers(partial(httpx.post, f"{url}{CHAT}", json=body, timeout=5, verify=False), process, START_TIMEOUT_S):
            raise Refused(f"the other router does not answer:\n{last_lines(log)}")
        yield url, process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- the load


class _Chat:
    """One conversation: JSON of its messages, made before it is due."""

    def __init__(self, number: int, wanted: LongPrompts) -> None:
        self._random = random.Random(number)
        self._more = wanted.more
        self._messages = [self._message("user", f"Conversation {number}. ")]
        roles = itertools.cycle(("assistant", "user"))
        for _ in range(max(0, wanted.tokens // MESSAGE_WORDS - 1) // 2 * 2):
            self._messages.append(self._message(next(roles)))

    def _message(self, role: str, before: str = "", words: int = MESSAGE_WORDS) -> bytes:
        text = before + " ".join(self._random.choices(VOCABULARY, k=words))
        return msgspec.json.encode({"role": role, "content": text})

    def body(self, model: str, tokens: int) -> bytes:
        """Return the body of the next turn's call."""
        head = b'{"model":"%b","messages":[' % model.encode()
        return head + b",".join(self._messages) + b'],"max_tokens":%d,"temperature":0,"stream":true%b}' % (tokens, self._more)

    def go_on(self) -> None:
        """Add an answer and the next question."""
        for role in ("assistant", "user"):
            self._messages.append(self._message(role, words=NEW_WORDS // 2))


def _side(name: str, url: str, model: str, wanted: LongPrompts, first: int, pids: dict[str, int], progress: Progress) -> Side:
    """Measure one side. `first`: the number of its first conversation."""
    side = Side(name)
    chats = [_Chat(first + number, wanted) for number in range(wanted.chats)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_load(side, url, model, wanted, chats, pids, progress))
    if not side.ttft_s:
        raise click.ClickException(f"{name} answered none of {wanted.turns} turns: {side.failed[0]}")
    return side


async def _load(
    side: Side, url: str, model: str, wanted: LongPrompts, chats: Sequence["_Chat"], pids: dict[str, int], progress: Progress
) -> None:
    progress(f"{side.name}: the first turns of {wanted.chats} conversations of {wanted.tokens:,} tokens, one after the other")
    connections = Connections(Target.of(url))
    for chat in chats:
        seen = await _asked(connections, chat.body(model, 1), 1)
        if seen.outcome == "finished":
            side.first_s.append(seen.ttft_s)
        else:
            side.failed.append(f"a first turn: {seen.error} {seen.said}")
        chat.go_on()
    progress(f"{side.name}: {wanted.turns:,} further turns, {wanted.rate:g} a second")
    before = {process: cpu_s(pid) for process, pid in pids.items()}
    standing = [
        asyncio.create_task(_stand_by(side, connections, model, wanted.seconds, wanted.more)) for _ in range(BYSTANDERS)
    ]
    began, asking = time.perf_counter(), []
    for turn in range(wanted.turns):
        chat = chats[turn % len(chats)]
        body = chat.body(model, ANSWER_TOKENS)
        chat.go_on()
        await asyncio.sleep(began + turn / wanted.rate - time.perf_counter())
        asking.append(asyncio.create_task(_turn(side, connections, body)))
    await asyncio.gather(*asking, *standing)
    side.cpu_s = {process: cpu_s(pid) - before[process] for process, pid in pids.items()}
    await connections.close()


async def _turn(side: Side, connections: Connections, body: bytes) -> None:
    seen = await _asked(connections, body, ANSWER_TOKENS)
    if seen.outcome == "finished":
        side.ttft_s.append(seen.ttft_s)
    else:
        side.failed.append(f"{seen.error} {seen.said}")


async def _stand_by(side: Side, connections: Connections, model: str, seconds: float, more: bytes) -> None:
    """Stream short answers, one after the other, and note the longest gap of each."""
    tokens, until = round(2 / TOKEN_S), time.perf_counter() + seconds
    message = msgspec.json.encode({"role": "user", "content": "Say something."})
    body = b'{"model":"%b","messages":[%b],"max_tokens":%d,"stream":true%b}' % (model.encode(), message, tokens, more)
    while time.perf_counter() + tokens * TOKEN_S + PREFILL_S < until or not side.gaps_s:
        seen = await _asked(connections, body, tokens)
        if seen.outcome == "finished" and len(seen.token_s) > 1:
            side.gaps_s.append(float(np.diff(seen.token_s).max()))
        else:
            side.failed.append(f"a short answer: {seen.error} {seen.said}")
            return


async def _asked(connections: Connections, body: bytes, tokens: int) -> Seen:
    return await ask(connections, CHAT, HEADERS, body, Seen(output_tokens=tokens), ANSWER_TIMEOUT_S)


# --- the result


def _write(report: Report, wanted: LongPrompts, sides: Sequence[Side]) -> None:
    direct, ours, *others = sides
    load_name = f"{wanted.tokens:,} tokens, {wanted.rate:g}/s"

    def added(side: Side, name: str) -> float:
        return side.percentile_ms(name) - direct.percentile_ms(name)

    row, asked = report.row, wanted.turns
    row(f"turns answered, {load_name} / sent", "turns", len(ours.ttft_s), asked, higher=True)
    for name, most in WANTED_MS.items():
        row(f"TTFT added, {name}, {load_name} / wanted", "ms", added(ours, name), most)
    row("a first turn, alone: TTFT added / a further turn's", "ms", _first_ms(ours, direct), added(ours, "p50"))
    row("longest gap of a short answer beside them: added, p99 / wanted", "ms", _gap_ms(ours) - _gap_ms(direct), GAP_WANTED_MS)
    for other in others:
        row("turns answered / the other router's", "turns", len(ours.ttft_s), len(other.ttft_s), higher=True)
        for name in WANTED_MS:
            row(f"TTFT added, {name} / the other router's", "ms", added(ours, name), added(other, name))
        row("longest gap, p99 / the other router's", "ms", _gap_ms(ours), _gap_ms(other))
        row("CPU of a turn / the other router's", "ms", _cpu_ms(ours, asked), _cpu_ms(other, asked))
    report.notes += [_note(side, asked) for side in sides]


def _first_ms(side: Side, direct: Side) -> float:
    return 1e3 * (median(side.first_s or [float("inf")]) - median(direct.first_s or [0.0]))


def _gap_ms(side: Side) -> float:
    return 1e3 * float(np.percentile(side.gaps_s, 99)) if side.gaps_s else float("inf")


def _cpu_ms(side: Side, turns: int) -> float:
    return 1e3 * sum(side.cpu_s.values()) / turns


def _note(side: Side, turns: int) -> str:
    by_process = ", ".join(f"{name} {1e3 * used / turns:.1f}" for name, used in side.cpu_s.items())
    failed = f"; {len(side.failed)} failed, the first: {side.failed[0]}" if side.failed else ""
    return (
        f"{side.name}: TTFT p50, p90, p99 {', '.join(f'{side.percentile_ms(name):.0f}' for name in ('p50', 'p90', 'p99'))} ms; "
        f"longest gap of a short answer p50, p99 {1e3 * median(side.gaps_s or [0]):.0f}, {_gap_ms(side):.0f} ms"
        + (f"; CPU ms a turn: {by_process}" if by_process else "")
        + failed
    )
