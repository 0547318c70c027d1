"""The events that `bench schedule` gives a conductor: a cluster of any size that serves a trace, seen from the conductor alone.
PURE: the same events for the same trace, so that two runs time the same work.

Every host has a prefill, a decode and a cache-node, or a vLLM and a cache-node. A placed request is queued at its prefill, its
blocks are announced from there when it is computed, it decodes, and it ends; pools evict the oldest. Loads are reported every
quarter second by every node.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from mooncake_zmq.core.actor import Event, PeerUp, Received
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    PROTOCOL_VERSION,
    AdaptersListed,
    BlocksAnnounced,
    DecodeLoad,
    Hello,
    Measured,
    Outcome,
    Placed,
    PrefillLoad,
    QueuedJob,
    RequestEnded,
    Schedule,
)
from mooncake_zmq.core.order import Order
from mooncake_zmq.kv.block_hash import KEY_BYTES, Key
from mooncake_zmq.laboratory.cluster import CHUNK_TOKENS
from mooncake_zmq.prefill.settings import PrefillSettings

REPORT_S = 0.25
POOL_BLOCKS = 6_000
"""Blocks of one host's pool: three million tokens in the traces' blocks."""
CAPACITY_TOKENS = 2_000_000
MAX_BATCH = 64
DEFAULTS = PrefillSettings()
ORDER = Order(DEFAULTS.overtake, DEFAULTS.priority_s)
"""The prefills' default order."""
HEADROOM = 0.8
"""Share of the prefills' time that the trace's work takes: the replay's speed follows from it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the trace."""

    keys: tuple[Key, ...]
    tokens: int
    output_tokens: int
    adapter: str = ""


@dataclass(slots=True)
class _Request:
    asked: Asked
    placed: Placed
    gap_s: float
    at: float
    work_s: float
    first_at: float = 0.0


@dataclass(slots=True)
class _Host:
    number: int
    queue: deque[_Request] = field(default_factory=deque)
    free_at: float = 0.0
    running: dict[int, _Request] = field(default_factory=dict)
    pool: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    computed_s: float = 0.0


class ClusterLoad:
    """Yields events in the order of virtual time; `answer` takes the conductor's placements."""

    def __init__(self, asked: Sequence[Asked], *, hosts: int, costs: Costs, vllms: bool = False) -> None:
        """`vllms`: one on each host computes. A tenth of them lacks each adapter that is asked for."""
        self._prefill, self._decode = ("v", "v") if vllms else ("p", "d")
        self._adapters = sorted({each.adapter for each in asked} - {""})
        self._asked = asked
        self._costs = costs
        self._hosts = [_Host(number) for number in range(hosts)]
        self._names = {
            f"{kind}{number:04}": host for number, host in enumerate(self._hosts) for kind in (self._prefill, self._decode, "c")
        }
        self._due: list[tuple[float, int, str, int]] = []
        self._serial = 0
        self._requests: dict[int, _Request] = {}
        mean_s = sum(costs.compute_s(each.tokens, 0) for each in asked) / len(asked)
        self._gap_s = mean_s / hosts / HEADROOM

    def joins(self) -> Iterator[Event]:
        """Yield the events with which the nodes join."""
        for name, host in {"gateway": None, **self._names}.items():
            role = {"g": "gateway", "p": "prefill", "d": "decode", "c": "cache-node", "v": "vllm"}[name[0]]
            place = f"host{0 if host is None else host.number:04}"
            hello = Hello(protocol=PROTOCOL_VERSION, role=role, host=place, model="m", tokenizer="t", layout="l")
            yield PeerUp(name, 1, hello)
            if host is not None and role == "vllm":
                has = [each for at, each in enumerate(self._adapters) if (host.number + at) % 10]
                yield Received(name, AdaptersListed(adapters=tuple(has)))

    def events(self) -> Iterator[tuple[float, Event]]:
        """Yield all later events, in order; take the next only after `answer` has had the effects of the last."""
        for number in range(len(self._hosts)):
            self._later(REPORT_S * (1 + number / len(self._hosts)), "report", number)
        for number, asked in enumerate(self._asked):
            at = number * self._gap_s
            while self._due and self._due[0][0] <= at:
                when, _, what, about = heapq.heappop(self._due)
                for event in self._happen(when, what, about):
                    yield when, event
            schedule = Schedule(
                request_id=f"r{number}",
                attempt=1,
                keys=asked.keys,
                tokens=asked.tokens,
                max_tokens=2 * asked.output_tokens,
                adapter=asked.adapter,
            )
            yield at, Received("gateway", schedule)

    def answer(self, now: float, number: int, placed: Placed) -> None:
        """Take the conductor's placement of the request of this number."""
        asked, host = self._asked[number], self._names[placed.prefill]
        prefix = placed.reuse_blocks * (asked.tokens // max(1, len(asked.keys)))
        work_s = self._costs.compute_s(asked.tokens, min(prefix, asked.tokens - 1))
        request = _Request(asked, placed, gap_s=0.03, at=now, work_s=work_s)
        host.free_at = max(now, host.free_at) + work_s
        request.first_at = host.free_at
        host.queue.append(request)
        self._requests[number] = request
        self._later(host.free_at, "first", number)

    def _later(self, at: float, what: str, about: int) -> None:
        self._serial += 1
        heapq.heappush(self._due, (at, self._serial, what, about))

    def _happen(self, now: float, what: str, about: int) -> Iterator[Event]:
        if what == "report":
            self._later(now + REPORT_S, "report", about)
            yield Received(f"{self._prefill}{about:04}", self._prefill_load(now, self._hosts[about]))
            yield Received(f"{self._decode}{about:04}", self._decode_load(self._hosts[about]))
            return
        request = self._requests[about]
        if what == "first":
            host = self._names[request.placed.prefill]
            host.queue.popleft()
            host.computed_s += request.work_s
            self._names[request.placed.decode].running[about] = request
            self._later(now + request.gap_s * request.asked.output_tokens, "end", about)
            announced = self._keep(host, request.asked.keys)
            if announced is not None:
                yield Received(f"c{host.number:04}", announced)
            return
        del self._requests[about], self._names[request.placed.decode].running[about]
        outcome = Outcome(
            ttft_s=request.first_at - request.at,
            predicted_ttft_s=request.placed.ttft_s,
            tbt_s=request.gap_s,
            predicted_tbt_s=request.placed.tbt_s,
            max_tokens=2 * request.asked.output_tokens,
            output_tokens=request.asked.output_tokens,
            ended=True,
        )
        yield Received("gateway", RequestEnded(request_id=f"r{about}", attempt=1, outcome=outcome))

    def _keep(self, host: _Host, keys: Sequence[Key]) -> BlocksAnnounced | None:
        pool = host.pool
        stored = tuple([key for key in keys if key not in pool])
        for key in reversed(keys):  # the last blocks of a prompt are removed first: no block remains without those before it
            pool[key] = None
            pool.move_to_end(key)
        removed = tuple([pool.popitem(last=False)[0] for _ in range(len(pool) - POOL_BLOCKS)])
        return BlocksAnnounced(stored=stored, removed=removed) if stored or removed else None

    def _prefill_load(self, now: float, host: _Host) -> PrefillLoad:
        jobs: list[QueuedJob] = []
        begins = now
        for request in host.queue:
            rank_s = ORDER.rank(request.at, request.work_s) - now
            left_s = max(0.0, request.first_at - begins)
            jobs.append(QueuedJob(booking=request.placed.booking, rank_s=rank_s, left_s=left_s))
            begins = max(begins, request.first_at)
        measured = Measured(seconds=host.computed_s, predicted_s=host.computed_s)
        return PrefillLoad(
            jobs=tuple(jobs),
            overtake=ORDER.overtake,
            priority_s=ORDER.priority_s,
            chunk_tokens=CHUNK_TOKENS,
            room=max(0, 64 - len(jobs)),
            compute=measured,
        )

    def _decode_load(self, host: _Host) -> DecodeLoad:
        running = host.running.values()
        context = sum([request.asked.tokens for request in running])
        return DecodeLoad(
            running=len(running),
            reserved=0,
            free_tokens=max(0, CAPACITY_TOKENS - context),
            capacity_tokens=CAPACITY_TOKENS,
            context_tokens=context,
            max_batch=MAX_BATCH,
            room=max(0, 4 * MAX_BATCH - len(running)),
            step_s=0.03,
            step=Measured(seconds=0.03, predicted_s=0.03),
            bookings=tuple([request.placed.booking for request in running])[:512],
        )


def generated_trace(random: Random, requests: int) -> list[tuple[Key, ...]]:
    """Make chats whose next turn extends the last one, mostly soon after it; most of them share one of a few system prompts."""
    fresh = iter(range(1 << 62))
    systems = [_take(fresh, random.randint(1, 6)) for _ in range(8)]
    chats: list[tuple[int, ...]] = []
    trace: list[tuple[Key, ...]] = []
    for _ in range(requests):
        if chats and random.random() < 0.5:
            back = min(int(random.expovariate(1 / 100)), len(chats) - 1)
            prompt = chats.pop(-1 - back)
        else:
            prompt = systems[min(int(random.expovariate(1.0)), len(systems) - 1)] if random.random() < 0.8 else ()
        prompt += _take(fresh, 1 + min(int(random.expovariate(1 / 15)), 200))
        chats.append(prompt)
        trace.append(_keys(prompt))
    return trace


def of_models(asked: Sequence[Asked], models: int, adapters: int) -> list[Asked]:
    """Return the same requests, each chat of one of so many models or of one of their adapters, whose keys differ. A request
    goes on with a chat if it has all its complete blocks."""
    kinds: dict[Key, int] = {}
    """The last key of each chat -> what computes it: a model, or behind these an adapter."""
    found: list[Asked] = []
    for number, each in enumerate(asked):
        kind = next((kinds[key] for key in reversed(each.keys) if key in kinds), number % (models + adapters))
        if each.keys:
            kinds[each.keys[-1]] = kind
        keys = tuple([key[:8] + kind.to_bytes(KEY_BYTES - 8, "little") for key in each.keys])
        found.append(replace(each, keys=keys, adapter=f"adapter-{kind - models}" if kind >= models else ""))
    return found


def _keys(ids: Iterable[int]) -> tuple[Key, ...]:
    return tuple(number.to_bytes(KEY_BYTES, "little") for number in ids)


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))
