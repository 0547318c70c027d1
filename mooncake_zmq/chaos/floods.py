"""Floods of one tenant, by its own API key and its own store key; each kind lasts for a while.

Each kind runs in a process of its own that gets only the CPU that nothing else uses (`python -m mooncake_zmq.chaos.floods`, see
`begin`): a flood comes from another machine, whose work is no load on the cluster.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

BEGUN = "begun"
"""The first line that the process prints, once the flood has reached its target; the second one is the result."""
REACH_TIMEOUT_S = 30.0
"""The time within which it must: where all CPUs are busy it comes late."""
POLL_S = 0.02
AT_ONCE = 96
"""The calls that most kinds have open at a time: half as many again as a quarter of a gateway's slots."""
CONNECTIONS = 700
"""The connections open at a time where they are the load: more than one tenant, or one address, may have."""
CALL_TIMEOUT_S = 30.0
LONG_TOKENS = 1000
HUGE_TOKENS = 3900
"""The length of a huge prompt: as long as the deployment's model takes."""
READS_BYTES = 512
STORE_VALUE_BYTES = 1 << 20
STORE_THREADS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """The gateway and store to flood, and the tenant's keys."""

    host: str
    port: int
    key: str
    sources: tuple[str, ...]
    """The addresses to connect from."""
    store: str = ""
    """The endpoint of a store; empty: none."""
    keys: str = ""
    """The directory of CURVE keys; empty: TCP in clear."""
    key_name: str = ""
    namespace: str = ""


class Flood:
    """One kind of flood in progress. `got`: the number of answers by status, or by what became of the connection."""

    def __init__(self, target: Target, ends_at: float) -> None:
        """`ends_at`: by the monotonic clock."""
        from mooncake_zmq.engine.toy import EOS_ID  # not before the command line has bounded NumPy's threads

        self.target = target
        self.ends_at = ends_at
        self.got: Counter[str] = Counter()
        self.random = Random("flood")
        self._vocabulary = range(EOS_ID)
        self._sources = itertools.cycle(target.sources)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends_at

    def prompt(self, count: int) -> list[int]:
        """Return token ids that no call has used before."""
        return self.random.choices(self._vocabulary, k=count)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection from the next address, and abort it at the end."""
        source = next(self._sources), 0
        reader, writer = await asyncio.open_connection(self.target.host, self.target.port, local_addr=source)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def note_status(self, reader: asyncio.StreamReader) -> None:
        """Count the status of the answer that begins, or a connection that was cut before it."""
        self.got[(await reader.readline())[9:12].decode("latin-1") or "cut"] += 1

    def head(self, length: int, *, key: str | None = None, path: str = "/v1/completions") -> bytes:
        secret = self.target.key if key is None else key
        return (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\ncontent-length: {length}\r\n\r\n"
        ).encode()

    async def call(self, body: bytes, *, key: str | None = None, path: str = "/v1/completions", upto_bytes: int = -1) -> None:
        """Make one call, read its answer to the end or up to `upto_bytes`, and close the connection."""
        async with asyncio.timeout(CALL_TIMEOUT_S), self.connection() as (reader, writer):
            writer.write(self.head(len(body), key=key, path=path) + body)
            await self.note_status(reader)
            await reader.read(upto_bytes)

    async def again(self, count: int, once: Callable[[], Awaitable[None]]) -> None:
        """Repeat `once` until the time is up, `count` at a time."""

        async def one() -> None:
            while not self.over:
                try:
                    await once()
                except (OSError, asyncio.IncompleteReadError, TimeoutError):
                    self.got["cut"] += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(count)]
            while not self.over:
                await asyncio.sleep(POLL_S)
            for task in tasks:
                task.cancel()


def _body(**said: Any) -> bytes:
    return json.dumps({"model": "toy", "temperature": 0} | said).encode()


async def open_requests(flood: Flood) -> None:
    """Open more streams at once than the tenant's share."""
    await flood.again(AT_ONCE, lambda: flood.call(_body(prompt=flood.prompt(64), max_tokens=100, ignore_eos=True, stream=True)))


async def many_choices(flood: Flood) -> None:
    """Ask for as many choices in each call as are allowed."""
    await flood.again(AT_ONCE, lambda: flood.call(_body(prompt=flood.prompt(64), max_tokens=50, ignore_eos=True, n=32)))


async def stalled_bodies(flood: Flood) -> None:
    """Send calls whose bodies never end, from several addresses."""

    async def stall() -> None:
        async with flood.connection() as (reader, writer):
            writer.write(flood.head(1000) + b"{")
            await flood.note_status(reader)

    await flood.again(CONNECTIONS, stall)


async def stalled_heads(flood: Flood) -> None:
    """Send calls whose headers never end."""

    async def stall() -> None:
        async with flood.connection() as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            flood.got["opened"] += 1
            await flood.note_status(reader)

    await flood.again(CONNECTIONS, stall)


async def connections(flood: Flood) -> None:
    """Open and close connections, each with a call that needs no slot, with and without a key."""
    keys = itertools.cycle((flood.target.key, "wrong"))

    async def come_and_go() -> None:
        async with flood.connection() as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n" % next(keys).encode())
            await flood.note_status(reader)

    await flood.again(AT_ONCE, come_and_go)


async def grammar_bombs(flood: Flood) -> None:
    """Send different grammars that all take long to compile."""
    numbers = itertools.count()

    async def bomb() -> None:
        number = next(numbers)
        parts = [{"type": "string", "pattern": f"^.*a.{{{i},{i + 18}}}b{number}.*$"} for i in range(18)]
        await flood.call(_body(prompt=flood.prompt(8), max_tokens=8, guided_json={"allOf": parts}))

    await flood.again(AT_ONCE, bomb)


async def logprobs(flood: Flood) -> None:
    """Ask for the probabilities of every token for several choices, which a gateway holds until the answers are whole."""
    said = {"max_tokens": 100, "ignore_eos": True, "n": 8, "logprobs": 20}
    await flood.again(AT_ONCE, lambda: flood.call(_body(prompt=flood.prompt(16), **said)))


async def slow_readers(flood: Flood) -> None:
    """Begin streams and do not read them."""

    async def stop_reading() -> None:
        async with flood.connection() as (reader, writer):
            body = _body(prompt=flood.prompt(16), max_tokens=LONG_TOKENS, ignore_eos=True, stream=True, n=4, logprobs=5)
            writer.write(flood.head(len(body)) + body)
            await flood.note_status(reader)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(flood.random.uniform(2.0, 10.0))

    await flood.again(AT_ONCE, stop_reading)


async def priorities(flood: Flood) -> None:
    """Ask for priorities and SLOs that the tenant's key does not permit."""
    options = itertools.cycle(({"priority": -1000}, {"ttft_slo": 0}, {"tbt_slo": 10}, {"priority": 1000}))
    await flood.again(
        AT_ONCE, lambda: flood.call(_body(prompt=flood.prompt(64), max_tokens=50, ignore_eos=True, **next(options)))
    )


async def huge_prompts(flood: Flood) -> None:
    """Send prompts as long as the model takes, and bodies that are larger than the gateway takes."""
    numbers = itertools.count()
    text = "x " * (1 << 20)

    async def ask() -> None:
        match next(numbers) % 8:
            case 0:
                await flood.call(_body(prompt=text))
            case 1:
                await flood.call(_body(prompt=text), path="/tokenize")
            case 2:
                await flood.call(b"x" * (5 << 20))
            case _:
                await flood.call(_body(prompt=flood.prompt(HUGE_TOKENS), max_tokens=8))

    await flood.again(16, ask)


async def hang_ups(flood: Flood) -> None:
    """Close calls as soon as they are made, or as their answer begins."""
    numbers = itertools.count()

    async def leave() -> None:
        body = _body(prompt=flood.prompt(200), max_tokens=LONG_TOKENS, ignore_eos=True, stream=True)
        if next(numbers) % 2:
            await flood.call(body, upto_bytes=READS_BYTES)
        else:
            async with flood.connection() as (_, writer):
                writer.write(flood.head(len(body)) + body)
                await asyncio.sleep(0.01)
            flood.got["left"] += 1

    await flood.again(AT_ONCE, leave)


def _client(target: Target) -> Any:
    from mooncake_zmq.store.client.client import StoreClient
    from mooncake_zmq.store.client.peer import ClientSettings

    settings = ClientSettings(
        share_memory=False, keys=target.keys, key_name=target.key_name, allow_plain_tcp=not target.keys, timeout_s=5.0
    )
    client = StoreClient([target.store], settings)
    if (why := client.connect()) is not None:
        raise OSError(why)
    return client


async def _by_threads(flood: Flood, work: Callable[[Any, int], str]) -> None:
    """Repeat `work` in several threads with a client of the store each, until the time is up; it returns what it got."""

    def one(thread: int) -> None:
        client = _client(flood.target)
        try:
            for number in itertools.count():
                if flood.over:
                    return
                flood.got[work(client, thread << 20 | number)] += 1
        finally:
            client.close()

    await asyncio.gather(*[asyncio.to_thread(one, thread) for thread in range(STORE_THREADS)])


async def store_puts(flood: Flood) -> None:
    """Put values of a MiB, without end."""
    import numpy as np

    value = np.frombuffer(os.urandom(STORE_VALUE_BYTES), np.uint8)

    def put(client: Any, number: int) -> str:
        (code,) = client.put([f"{flood.target.namespace}{number}"], [[(value.ctypes.data, value.nbytes)]])
        return f"put {code}"

    await _by_threads(flood, put)


async def store_leases_and_scans(flood: Flood) -> None:
    """Take leases and do not release them, list all keys, and remove absent keys and all keys."""
    import numpy as np

    value = np.frombuffer(os.urandom(4096), np.uint8)

    def work(client: Any, number: int) -> str:
        names = [f"{flood.target.namespace}small/{number % 4096 + i}" for i in range(64)]
        match number % 4:
            case 0:
                client.put(names, [[(value.ctypes.data, value.nbytes)]] * len(names))
                return "put"
            case 1:
                client.hold(names)
                return "leased"
            case 2:
                return f"listed {'some' if sum(1 for _ in client.list_keys()) else 'none'}"
            case _:
                client.remove_all()
                return "removed"

    await _by_threads(flood, work)


KINDS: dict[str, Callable[[Flood], Awaitable[None]]] = {
    each.__name__.replace("_", " "): each
    for each in (
        *(open_requests, many_choices, stalled_bodies, stalled_heads, connections, grammar_bombs, logprobs, slow_readers),
        *(priorities, huge_prompts, hang_ups, store_puts, store_leases_and_scans),
    )
}


REACHED = {
    "stalled bodies": ("429", "503"),
    "stalled heads": ("opened",),
    "connections": ("200",),
    "priorities": ("403",),
    "huge prompts": ("200", "413"),
    "store puts": ("put 0",),
    "store leases and scans": ("listed some",),
}
"""Results that only a flood gets that reaches its target, by kind; one of any other kind is served or refused for its share."""


def reached(kind: str, got: Mapping[str, int]) -> bool:
    """Return whether a flood reached its target."""
    return any(got.get(status) for status in REACHED.get(kind, ("200", "429")))


async def begin(kind: str, target: Target, duration_s: float) -> asyncio.subprocess.Process:
    """Start a process that floods for so long once it has reached its target, and then prints the result."""
    said = json.dumps({"kind": kind, "duration_s": duration_s, "target": asdict(target)})
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mooncake_zmq.chaos.floods", said, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


def main(arguments: Sequence[str]) -> None:
    """Flood, and print the result."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    said = json.loads(arguments[0])
    target = Target(**said["target"] | {"sources": tuple(said["target"]["sources"])})

    async def run() -> Flood:
        flood = Flood(target, time.monotonic() + REACH_TIMEOUT_S)
        flooding = asyncio.ensure_future(KINDS[said["kind"]](flood))
        while not (flooding.done() or reached(said["kind"], flood.got)):
            await asyncio.sleep(POLL_S)
        sys.stdout.write(f"{BEGUN}\n")
        sys.stdout.flush()
        if not flood.over:
            flood.ends_at = time.monotonic() + said["duration_s"]
        await flooding
        return flood

    before_s = time.process_time()
    got = asyncio.run(run()).got
    sys.stdout.write(json.dumps({"got": dict(got), "cpu_s": time.process_time() - before_s}))


if __name__ == "__main__":
    main(sys.argv[1:])
