"""The scheduler's half, without vLLM: each request's promised blocks, and which blocks are being loaded and saved. PURE: it
decides; lookups and copies are done by others.

A promise is a lookup that holds the blocks it found in the pool, from the scheduler's question until they are loaded or the
request ends otherwise. Blocks that are being saved are returned to the caller, who keeps them from being reused in the
meantime.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.vllm.choice import Choice, Verdict
from mooncake_zmq.vllm.groups import ATTENTION, Group, fitting, longest
from mooncake_zmq.vllm.hints import NO_HINTS, Hints
from mooncake_zmq.vllm.names import BlockKeys, group_prefix, object_names

AGAIN_S = 0.01
"""Interval of further lookups for blocks that are still being saved by another engine."""
HOLD_LEFT_S = 2.0
"""A promise that holds no longer than this is looked up again."""
REOFFER_S = 60.0
"""Time after which a block may be offered to the pool again."""
RECENT_KEYS = 1 << 16
MAX_REQUESTS = 1 << 16
"""Most requests tracked at a time; others are neither looked up nor saved."""


class Lookup(Protocol):
    """A question to the pool."""

    def answer(self) -> int | None:
        """Return how many of the leading names are stored and held; None while that is unknown. May wait a few milliseconds."""

    @property
    def found(self) -> Sequence[bool]:
        """For each name whether it is stored and held, once there is an answer; where nothing was asked it is empty."""

    @property
    def until(self) -> float:
        """When the hold expires (monotonic clock), once there is an answer."""

    @property
    def holders(self) -> tuple[str, ...]:
        """Names of the stores that have some of the blocks, once there is an answer."""

    @property
    def reached(self) -> bool:
        """Whether any store answered, once there is an answer."""


class Pool(Protocol):
    """The pool in which blocks are looked up."""

    def ask(self, names: list[str], first: Sequence[str]) -> Lookup:
        """Begin a lookup. `first`: names of stores to ask before the others."""

    def release(self, lookup: Lookup) -> None:
        """End the hold of a lookup."""


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one KV cache group, with their keys."""

    keys: tuple[Key, ...] = ()
    blocks: tuple[int, ...] = ()


class _ByGroup:
    """Blocks of one request, by number of their KV cache group."""

    __slots__ = ()
    groups: tuple[Part, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks, group after group."""
        return tuple(block for part in self.groups for block in part.blocks)


@dataclass(frozen=True, slots=True)
class Load(_ByGroup):
    """Blocks of one request to load from the pool, by number of their KV cache group. `prefix_blocks`: how many blocks longer
    its prefix gets. `holders`: names of the stores that had them when they were promised."""

    number: int
    request_id: str
    groups: tuple[Part, ...]
    prefix_blocks: int
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Save(_ByGroup):
    """Blocks to offer to the pool once this step is computed, by number of their KV cache group."""

    number: int
    groups: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders to the workers for one step. `idle`: the step computes nothing. `deserted`: nor is there any request, so only
    saves can be under way."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    idle: bool = False
    deserted: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """One request of a step. `computed`: tokens whose KV is complete after it; `known`: tokens that are final, unlike
    drafts. `states`: the states that are complete after it, as group, block, and the number of tokens they are of."""

    request_id: str
    computed: int
    known: int
    states: Sequence[tuple[int, int, int]] = ()


@dataclass(frozen=True, slots=True)
class _Promise:
    first: int
    stop: int
    lookup: Lookup
    asked_at: float


@dataclass(slots=True)
class _Request:
    """A tracked request. `own`: blocks that the engine's own cache had at the last question. `saved`: blocks offered to the
    pool, or loaded from it, of the `complete` ones, all of whose tokens are computed and certain."""

    keys: BlockKeys
    hints: Hints
    coming_until: float | None = None
    """How long to wait for blocks that are still being saved; None before the first lookup."""
    own: int = 0
    saved: int = 0
    complete: int = 0
    promise: _Promise | None = None
    load: Load | None = None
    decided: tuple[int, int] | None = None
    """The values of `own` and of the end of the wanted blocks at the last decision on whether loading is worth it. Both
    change while the request waits, above all by a preemption."""
    is_worth_it: bool = True
    has_failed: bool = False
    """Whether a load failed; no more blocks of this request are loaded."""

    def is_left(self, own: int, stop: int) -> bool:
        """Return whether loading was found not to be worth it for these values."""
        return self.decided == (own, stop) and not self.is_worth_it


@dataclass(slots=True)
class Ledger:
    """Decide on loads and saves. `most_saving`: most blocks held for saving at a time; others wait for a later step.
    `lookup_s`: a lookup without an answer by then is a miss. `coming_s`: likewise for blocks that another engine is saving.
    `choice`: which blocks are worth loading; None: all are."""

    block_tokens: int
    pool: Pool
    may_load: bool
    may_save: bool
    most_saving: int
    lookup_s: float = 1.0
    coming_s: float = 1.0
    choice: Choice | None = None
    groups: tuple[Group, ...] = (ATTENTION,)
    """The KV cache groups, in the engine's order."""
    offers_loaded: bool = False
    """Whether blocks that were loaded are offered to the pool too: of several copies a store may have lost one."""
    prefixes: tuple[str, ...] = ()
    """One name prefix per rank; before they are known nothing is looked up or saved."""
    counts: Counter[str] = field(default_factory=Counter)
    _requests: dict[str, _Request] = field(default_factory=dict)
    _loads: list[Load] = field(default_factory=list)
    _saves: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _reports: Counter[int] = field(default_factory=Counter)
    _saving: int = 0
    _number: int = 0
    _recent: OrderedDict[Key, float] = field(default_factory=OrderedDict)

    def add(self, request_id: str, keys: BlockKeys, hints: Hints = NO_HINTS) -> None:
        """Track a new request."""
        if len(self._requests) < MAX_REQUESTS:
            self._requests[request_id] = _Request(keys, hints)
        else:
            self.counts["unfollowed"] += 1

    def matched(self, now: float, request_id: str, own_tokens: int, tokens: int) -> int | None:
        """Return how many tokens, beyond `own_tokens`, the pool has of a request of `tokens`; None: ask again later.

        As in the engine's own cache, the last token is always computed.
        """
        request = self._requests.get(request_id)
        if request is None or not self.prefixes or not self.may_load:
            return 0
        own, partial = divmod(own_tokens, self.block_tokens)
        stop = (tokens - 1) // self.block_tokens
        if partial or request.has_failed or stop <= own or request.is_left(own, stop):
            self._let_go(request)
            return 0
        request.own = own
        promise = request.promise
        if promise is None or promise.first > own or promise.stop != stop or self._is_stale(promise, now):
            promise = self._ask(now, request, own, stop)
        found = promise.lookup.answer()
        if found is None:
            if now - promise.asked_at < self.lookup_s:
                return None
            self.counts["lookups_slow"] += 1
            self._let_go(request)
            return 0
        there = self._there(promise, found)
        if promise.lookup.reached and self._is_coming(now, request, there, stop):
            if now - promise.asked_at >= AGAIN_S:
                self._ask(now, request, own, stop)
            return None
        if there <= own or not self._is_worth_it(request, stop, there - own, tokens - own_tokens):
            return 0
        return (there - own) * self.block_tokens

    def allocated(self, request_id: str, external_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """Take note that the request has `blocks` by group, all that it needs now; those from the pool are to be loaded."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if external_tokens:
            stop = request.own + external_tokens // self.block_tokens
            keys = request.keys.upto(stop)
            holders = request.promise.lookup.holders if request.promise is not None else ()
            self._number += 1
            starts = [max(request.own, group.first(stop, self.block_tokens)) for group in self.groups]
            parts = [
                Part(tuple(keys[start:]), tuple(of_group[start:stop])) for start, of_group in zip(starts, blocks, strict=True)
            ]
            request.load = Load(self._number, request_id, tuple(parts), stop - request.own, holders)
            self._loads.append(request.load)
            # With windows some of the blocks are not loaded: what is in them has no name.
            if not (self.offers_loaded and all(group.needs_all for group in self.groups)):
                request.saved = max(request.saved, stop)
            self.counts["promised_blocks"] += len(request.load.blocks)
        elif request.load is None:
            self._let_go(request)

    def step(self, now: float, scheduled: Iterable[Progress], blocks_of: Callable[[str], Sequence[Sequence[int]]]) -> Orders:
        """Return the orders for a step that computes for `scheduled`. `blocks_of`: all blocks of one of these requests, by
        group."""
        saves: list[Save] = []
        idle = True
        for progress in scheduled:
            idle = False
            request = self._requests.get(progress.request_id)
            if request is not None and self.may_save and self.prefixes:
                request.complete = min(progress.computed, progress.known) // self.block_tokens
                if request.complete > request.saved and self._saving < self.most_saving:
                    saves += self._save(now, request, progress.states, blocks_of(progress.request_id))
        loads, self._loads = self._loads, []
        return Orders(tuple(loads), tuple(saves), idle, deserted=idle and not self._requests)

    def loaded(self, request_ids: Iterable[str], failed: set[int], failed_requests: Iterable[str] = ()) -> None:
        """Take note that these loads ended. `failed`: blocks that are missing and computed; one rank may report before
        another. `failed_requests`: likewise, where there are several groups: their requests are computed as a whole."""
        if failed:
            self._fail(failed)
        for request_id in failed_requests:
            if (request := self._requests.get(request_id)) is not None:
                self._load_no_more(request)
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.load is not None:
                self._let_go(request)
                request.load = None

    def saved(self, numbers: Iterable[int], ranks: int) -> list[int]:
        """Take note of a rank's part of each save. Returns the blocks of completed saves, which may be reused."""
        over: list[int] = []
        for number in numbers:
            if number in self._saves:
                self._reports[number] += 1
                if self._reports[number] == ranks:
                    del self._reports[number]
                    over += self._saves.pop(number)
        self._saving -= len(over)
        return over

    def finished(self, request_id: str) -> None:
        """Stop tracking a request that ended in any way; saves of its blocks continue."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._let_go(request)
            self.counts["unoffered_blocks"] += max(0, request.complete - request.saved)

    def kept(self) -> Iterable[int]:
        """Blocks held for saving."""
        return (block for blocks in self._saves.values() for block in blocks)

    @property
    def saving(self) -> int:
        """Number of blocks held for saving."""
        return self._saving

    @property
    def following(self) -> int:
        """Number of tracked requests."""
        return len(self._requests)

    # --- inside

    def _ask(self, now: float, request: _Request, first: int, stop: int) -> _Promise:
        self._let_go(request)
        prefixes = [group_prefix(rank, group) for group in range(len(self.groups)) for rank in self.prefixes]
        names = object_names(prefixes, request.keys.upto(stop)[first:])
        request.promise = _Promise(first, stop, self.pool.ask(names, request.hints.sources), now)
        return request.promise

    def _fail(self, blocks: set[int]) -> None:
        """Load nothing more for the requests of these blocks: a pool that keeps failing would make them wait for ever."""
        for request in self._requests.values():
            if request.load is not None and not blocks.isdisjoint(request.load.blocks):
                self._load_no_more(request)

    def _load_no_more(self, request: _Request) -> None:
        if not request.has_failed:
            request.has_failed = True
            request.saved = min(request.saved, request.own)
            self.counts["failed_loads"] += 1

    def _there(self, promise: _Promise, leading: int) -> int:
        """Return how many blocks of a prefix can be had. `leading`: how many of the first names are stored."""
        ranks = len(self.prefixes)
        found = promise.lookup.found
        if all(group.needs_all for group in self.groups) or not found:
            return promise.first + leading // (ranks * len(self.groups))
        each = ranks * len(self.groups)
        there = [
            [all(found[at : at + ranks]) for at in range(group * ranks, len(found), each)] for group in range(len(self.groups))
        ]
        return longest(self.groups, there, promise.first, self.block_tokens)

    def _is_coming(self, now: float, request: _Request, there: int, stop: int) -> bool:
        """Return whether more than the `there` stored blocks is worth waiting for."""
        if request.coming_until is None:
            request.coming_until = now + self.coming_s
        if there >= min(request.hints.coming_tokens // self.block_tokens, stop):
            return False
        if now >= request.coming_until:
            self.counts["late_requests"] += 1
            request.hints = replace(request.hints, coming_tokens=0)
            return False
        return True

    def _is_worth_it(self, request: _Request, stop: int, blocks: int, of_tokens: int) -> bool:
        """Decide once for the present values. Blocks that another engine prefilled for the request are always worth loading."""
        if self.choice is None or request.hints.coming_tokens:
            return True
        if request.decided != (request.own, stop):
            request.decided = (request.own, stop)
            request.is_worth_it = self._decide(self.choice, blocks, of_tokens)
        if not request.is_worth_it:
            self._let_go(request)
            request.saved = max(request.saved, request.own + blocks)
        return request.is_worth_it

    def _decide(self, choice: Choice, blocks: int, of_tokens: int) -> bool:
        verdict = choice.verdict(blocks, blocks * self.block_tokens, of_tokens)
        if verdict is not Verdict.LOAD:
            self.counts["left_blocks" if verdict is Verdict.LEAVE else "probed_blocks"] += blocks
        return verdict is not Verdict.LEAVE

    def _is_stale(self, promise: _Promise, now: float) -> bool:
        return promise.lookup.answer() is not None and now > promise.lookup.until - HOLD_LEFT_S

    def _let_go(self, request: _Request) -> None:
        promise, request.promise = request.promise, None
        if promise is not None:
            self.pool.release(promise.lookup)

    def _save(
        self, now: float, request: _Request, states: Sequence[tuple[int, int, int]], blocks: Sequence[Sequence[int]]
    ) -> list[Save]:
        room = self.most_saving - self._saving
        ranges = fitting(self.groups, request.saved, request.complete, room, self.block_tokens)
        request.saved = max(indexes.stop for indexes in ranges)
        keys = request.keys.upto(request.complete)
        parts = []
        for number, (group, of_group, indexes) in enumerate(zip(self.groups, blocks, ranges, strict=True)):
            if group.is_state:  # which is complete only where the engine says so: it writes states in place
                there = sorted((tokens // self.block_tokens - 1, block) for at, block, tokens in states if at == number)
                there = there[len(there) - min(len(there), len(indexes)) :]
            else:
                there = [(index, of_group[index]) for index in indexes if index < len(of_group)]
            # Block 0 stands for one that the engine has freed.
            wanted = [
                (keys[index], block)
                for index, block in there
                if block and index < request.complete and self._is_news(now, keys[index], number)
            ]
            parts.append(Part(tuple(key for key, _ in wanted), tuple(block for _, block in wanted)))
        if not any(part.blocks for part in parts):
            return []
        self._number += 1
        save = Save(self._number, tuple(parts))
        self._saves[save.number] = save.blocks
        self._saving += len(save.blocks)
        return [save]

    def _is_news(self, now: float, key: Key, group: int) -> bool:
        """Return whether a block was not offered recently, and record the offer."""
        key = key + bytes([group]) if group else key
        offered_at = self._recent.get(key)
        if offered_at is not None and now - offered_at < REOFFER_S:
            return False
        self._recent[key] = now
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT_KEYS:
            self._recent.popitem(last=False)
        return True
