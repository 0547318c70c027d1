"""Finds by trying what no answer of a vLLM says: where it publishes its KV events, and whether it reports reused tokens.

A prompt of one block and one token is sent under a salt of its own. A server that publishes then stores a block under that
salt, which is received at one of the endpoints; the same prompt again is reused, which the answer says or not.
"""

import queue
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic

import httpx

from mooncake_zmq.core.messages import Sampling, StopRule
from mooncake_zmq.core.work import Generate
from mooncake_zmq.kv.block_hash import KEY_BYTES, pack_tokens, salt_of
from mooncake_zmq.kv.engine_events import EngineEvent, EngineStored
from mooncake_zmq.runtime.generation import GENERATE, Answer, EventLines, request_body
from mooncake_zmq.runtime.kv_subscriber import KvSubscriber
from mooncake_zmq.runtime.mistakes import ServerError
from mooncake_zmq.runtime.vllm_answers import JSON, Nonsense

TRIES = 4
"""A subscription that is not complete yet misses the first events."""
EVENT_S = 1.0
"""Longest wait for the event of a prompt that was answered."""


@dataclass(frozen=True, slots=True)
class Probed:
    """`kv_events`: the endpoint; empty if none of the given ones has the server's events."""

    kv_events: str
    reports_reuse: bool


Came = tuple[str, tuple[EngineEvent, ...]]


def probe(client: httpx.Client, block_tokens: int, endpoints: Sequence[str]) -> Probed:
    """Try a server that takes token ids. Raises ServerError and httpx.HTTPError."""
    came: queue.SimpleQueue[Came] = queue.SimpleQueue()
    crashes: list[BaseException] = []
    endpoint = ""
    with ExitStack() as stack:
        for each in endpoints:
            subscriber = KvSubscriber(
                each, replay_endpoint="", topic="", on_events=partial(_put, came, each), on_crash=crashes.append
            )
            stack.callback(subscriber.close)
        for _ in range(TRIES):
            root = secrets.token_bytes(KEY_BYTES)
            _generate(client, block_tokens + 1, root)
            if endpoint := _endpoint_of(came, salt_of(root)):
                break
    if crashes:
        raise crashes[0]
    return Probed(endpoint, reports_reuse=_generate(client, block_tokens + 1, root).reused > 0)


def _put(came: "queue.SimpleQueue[Came]", endpoint: str, events: tuple[EngineEvent, ...]) -> None:
    came.put((endpoint, events))


def _endpoint_of(came: "queue.SimpleQueue[Came]", salt: str) -> str:
    """Return where a block was stored under this salt; empty if that was not received in time."""
    deadline = monotonic() + EVENT_S
    while (left_s := deadline - monotonic()) > 0:
        try:
            endpoint, events = came.get(timeout=left_s)
        except queue.Empty:
            break
        if any(isinstance(event, EngineStored) and event.salt == salt for event in events):
            return endpoint
    return ""


def _generate(client: httpx.Client, tokens: int, root: bytes) -> Answer:
    """Send a prompt of so many tokens as a node does, and return the answer of one token."""
    work = Generate(tokens=pack_tokens((0,) * tokens), count=0, root=root, sampling=Sampling(), stop=StopRule(max_tokens=1))
    answer, lines = Answer(1), EventLines()
    with client.stream("POST", GENERATE, content=request_body(work), headers=JSON) as response:
        if response.status_code != httpx.codes.OK:
            raise ServerError(f"{client.base_url} answers {response.status_code} to a prompt of {tokens} tokens")
        try:
            for raw in response.iter_raw():
                for data in lines.feed(raw):
                    answer.take(data)
        except Nonsense as nonsense:
            raise ServerError(f"{client.base_url}: {nonsense}") from nonsense
    return answer
