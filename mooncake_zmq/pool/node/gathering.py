"""Brings together in DRAM what a lease asked for: promotion from the own SSD, fetches from several nodes at once. PURE.

Each source is given batches of the missing blocks in their order, at most `PIPELINE` at a time, so that all of them work at
once and the nearest blocks come first. A source that turns out to lack a block is asked for nothing after it: what it holds
of a chain begins at the root. A source slower than computing is not asked. At the deadline the leading run that is here counts.

A gathering from the tail has its batches in the reverse order, for a reader that computes the head meanwhile. What comes is
handed over at once, whatever is missing before it, and the reader says from where on it still needs blocks.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mooncake_zmq.core.actor import Effect, Send, Start
from mooncake_zmq.core.messages import BlocksLeased, LeaseBlocks, ReleaseLease, ReportCorrupt, SlotRef, SourceRate
from mooncake_zmq.core.work import BlocksCopied, CopyBlocks, DiskBlock, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.lease import HolderId
from mooncake_zmq.kv.shares import NO_OWNER
from mooncake_zmq.pool.node.client import COPY_MARGIN
from mooncake_zmq.pool.node.contents import UNKNOWN, Content
from mooncake_zmq.pool.node.disk_tier import DiskTier
from mooncake_zmq.pool.node.misses import CORRUPT, FAILED, LACKS, NO_ROOM, SLOW
from mooncake_zmq.pool.node.parts import Parts

DISK = ""
"""The source that is this node's own SSD tier."""
PIPELINE = 2
"""Batches under way from one source for one lease: while one is copied, the next is looked up."""
TAIL_PART = 8
"""Divisor of the blocks of a gathering from the tail that no source was asked for, for the length of a batch: the nearer both
ends are, the shorter it is, as what is under way where they meet was mostly fetched in vain."""
TAIL_BATCH_S = 0.03, 0.2
"""A batch of a gathering from the tail is not so short that its messages take a notable part of its time, and not so long that
its reader computes most of the head before it learns of any block."""
MAX_PROMOTED_SHARE = 0.25
"""Part of DRAM that promotions may hold: a disk that hangs must not take all of it. Past it the disk is not asked."""
RATE_BLOCKS = 64
"""Blocks from a source after which what was measured before counts half: two batches of the usual size."""
RATE_LASTS_S = 30.0
"""A source found slow is tried again after this."""


@dataclass(slots=True)
class Gathering:
    """Blocks that `holder` waits for. Those already here are pinned, or they might be evicted meanwhile.

    `requested`: a conductor requested the copies, and no answer is sent.
    """

    holder: HolderId
    keys: tuple[Key, ...]
    deadline: float
    ttl_s: float = 0.0
    compute_s: float = 0.0
    requested: bool = False
    contents: bool = False
    """The holder wants to know what the blocks hold."""
    limits: dict[str, int] = field(default_factory=dict)
    """Source -> index in `keys` from which on it has nothing."""
    run: list[int] = field(default_factory=list)
    """Slots of the leading run that is here, pinned; a key asked for twice is pinned twice."""
    ahead: dict[Key, int] = field(default_factory=dict)
    """Blocks here after the first one that misses, pinned too, so that they stay until the run reaches them."""
    came_from: dict[Key, str] = field(default_factory=dict)
    open: Counter[str] = field(default_factory=Counter)
    """Batches under way for this gathering, by source."""
    asked: set[Key] = field(default_factory=set)
    """Keys of those batches."""
    lost: dict[Key, str] = field(default_factory=dict)
    """Why these did not come from the source that was asked last, or that would have been."""
    waits_for: frozenset[Key] = frozenset()
    """All keys, once it waits: what comes or fails concerns it only if it is among these."""
    tail: "Tail | None" = None
    """Its blocks from the last one on, if it is gathered from there."""
    begun: bool = False
    """Its lease has begun, and grows."""

    @property
    def here(self) -> int:
        """Length of the leading run that is here, or that its holder computes by itself."""
        return len(self.run) if self.tail is None else self.tail.first

    @property
    def is_complete(self) -> bool:
        """Whether everything is here."""
        return self.here >= len(self.keys) if self.tail is None else not self.tail.missing

    @property
    def pinned(self) -> list[int]:
        """Slots pinned for this gathering, once for each pin."""
        return self.run + list(self.ahead.values()) + ([slot for _, slot in self.tail.fresh] if self.tail else [])


@dataclass(slots=True)
class Tail:
    """The blocks of a gathering from the tail, by their indices: `missing`, from the `first` on that its holder does not
    compute itself; `given` to the lease; and `fresh`, pinned and to be given to it."""

    run: int
    """Blocks of the leading run that was here."""
    missing: list[int]
    first: int
    given: set[int] = field(default_factory=set)
    fresh: list[tuple[int, int]] = field(default_factory=list)

    def shorten(self, first: int) -> None:
        """Want nothing before this index any more."""
        self.first = max(self.first, first)
        self.missing = [index for index in self.missing if index >= self.first]

    def take(self, slots: Sequence[int | None]) -> list[int]:
        """Take those of the missing blocks that are in slots now, and return the slots."""
        found = [(index, slot) for index, slot in zip(self.missing, slots, strict=True) if slot is not None]
        if found:
            self.given.update([index for index, _ in found])
            self.fresh += found
            self.missing = [index for index in self.missing if index not in self.given]
        return [slot for _, slot in found]

    def hand_over(self) -> list[tuple[int, int]]:
        """Return the fresh blocks, which the lease holds from now on."""
        fresh, self.fresh = self.fresh, []
        return fresh


@dataclass(slots=True)
class _Fetch:
    """One batch from one source: our lease there, then a copy into own slots."""

    source: str
    gathering: Gathering
    keys: tuple[Key, ...]
    asked_at: float
    copies: list[tuple[Key, int, SlotRef | DiskBlock]] = field(default_factory=list)
    contents: dict[Key, Content] = field(default_factory=dict)
    """The contents of its blocks, as the source sent them."""
    owners: dict[Key, int] = field(default_factory=dict)
    """The blocks' owners, as the source sent them; empty if they have none."""


@dataclass(slots=True)
class _Rate:
    """The recent speed of one source: its recent blocks, older ones counting less, and the seconds in which they came."""

    measured_at: float
    seconds: float = 0.0
    blocks: float = 0.0

    @property
    def block_s(self) -> float:
        return self.seconds / self.blocks if self.blocks else 0.0


class Gatherer:
    """All gatherings of one cache-node. Its owner answers those that appear in `finished`, and hands over what came to those in
    `grown`."""

    def __init__(self, parts: Parts, disk: DiskTier, *, stored: Callable[[Sequence[Key]], None]) -> None:
        """`stored` is called with blocks that came to stand in the DRAM slots."""
        self.gatherings: dict[HolderId, Gathering] = {}
        self.finished: list[Gathering] = []
        self.grown: list[Gathering] = []
        """Gatherings from the tail to which something came, to be handed over."""
        self._settings = parts.settings
        self._dram = parts.slots
        self._contents = parts.contents
        self._disk = disk
        self._tenants = parts.tenants
        self._grant = parts.grant
        self._new_id = parts.new_id
        self._stored = stored
        self._counts = parts.counts
        self._fetches: dict[int, _Fetch] = {}
        """By the id of our lease at the source; of the copy, if the source is the own disk."""
        self._copying: dict[int, int] = {}
        """Work id of a copy -> fetch."""
        self._flying: set[Key] = set()
        """Keys being copied, for any gathering."""
        self._promoting = 0
        """Blocks on their way from the own disk."""
        self._rates: dict[str, _Rate] = {}
        """The recent speed of each source."""

    @property
    def fetches(self) -> int:
        """Batches under way."""
        return len(self._fetches)

    @property
    def writing(self) -> list[int]:
        """DRAM slots that copies write to, for the owner's `check`."""
        return [slot for fetch in self._fetches.values() for _, slot, _ in fetch.copies]

    def coming(self, gathering: Gathering) -> set[Key]:
        """Keys on their way here, for this gathering or another."""
        return gathering.asked | self._flying if self._flying else gathering.asked

    def copies(self, work_id: int) -> bool:
        """Is this work one of ours?"""
        return work_id in self._copying

    # --- beginnings and ends

    def begin(self, now: float, gathering: Gathering, sources: Sequence[str], *, tail_first: int = 0) -> list[Effect]:
        """Pin what is here and ask for the rest. It may be finished at once. `tail_first`: if the first so many blocks are not
        all here, fetch these from the last one on."""
        everyone = (DISK, *sources) if self._disk.readable else tuple(sources)
        gathering.limits = {source: tail_first or len(gathering.keys) for source in everyone}
        self.gatherings[gathering.holder] = gathering
        self._pin_present(gathering)
        if gathering.here < tail_first:
            run = gathering.here
            gathering.tail = Tail(run, list(range(run, tail_first)), run)
            self._dram.unpin(list(gathering.ahead.values()))
            gathering.ahead.clear()
        elif tail_first:  # all that the plan reuses is here
            gathering.deadline = now
        effects = self._advance(now, gathering)
        if gathering.holder in self.gatherings:
            gathering.waits_for = frozenset(gathering.keys)
        return effects

    def advance_waiting(self, now: float, keys: Collection[Key]) -> list[Effect]:
        """These blocks came, or did not: see to everyone who waits for one of them."""
        waiting = [g for g in self.gatherings.values() if not g.waits_for.isdisjoint(keys)]
        return [effect for gathering in waiting for effect in self._advance(now, gathering)]

    def _advance(self, now: float, gathering: Gathering) -> list[Effect]:
        """Ask for more of what is missing; finish if nothing more can come in time."""
        self._pin_present(gathering)
        effects: list[Effect] = []
        if not gathering.is_complete and now < gathering.deadline:
            effects = self._ask_sources(now, gathering)
            if self._may_come(now, gathering):
                if gathering.tail is not None and gathering.tail.fresh:
                    self.grown.append(gathering)
                return effects
        self.gatherings.pop(gathering.holder, None)
        self.finished.append(gathering)
        return effects

    def shorten(self, now: float, holder: HolderId, first: int) -> list[Effect]:
        """The holder needs nothing before this block any more."""
        gathering = self.gatherings.get(holder)
        if gathering is None or gathering.tail is None:
            return []
        gathering.tail.shorten(first)
        return self._advance(now, gathering)

    def expire(self, now: float, holder: HolderId) -> None:
        """The deadline: what is still on its way comes too late for this lease, but not for the pool."""
        gathering = self.gatherings.pop(holder, None)
        if gathering is not None:
            self._pin_present(gathering)
            self.finished.append(gathering)

    def drop(self, holder: HolderId) -> None:
        """The holder does not wait for this gathering any more."""
        gathering = self.gatherings.pop(holder, None)
        if gathering is not None:
            self._dram.unpin(gathering.pinned)
            if gathering.tail is not None:
                gathering.tail.hand_over()

    def source_down(self, now: float, source: str) -> list[Effect]:
        """Requests to this source will not be answered. Copies under way fail by themselves."""
        for gathering in self.gatherings.values():
            gathering.limits.pop(source, None)
        self._rates.pop(source, None)
        for fetch_id in [i for i, fetch in self._fetches.items() if fetch.source == source and not fetch.copies]:
            self._lose(self._fetches[fetch_id], self._fetches[fetch_id].keys, FAILED)
            self._close(fetch_id)
        return [effect for gathering in list(self.gatherings.values()) for effect in self._advance(now, gathering)]

    # --- asking

    def _pin_present(self, gathering: Gathering) -> None:
        if gathering.tail is not None:
            self._dram.pin(gathering.tail.take(self._dram.present([gathering.keys[i] for i in gathering.tail.missing])))
            return
        missing = gathering.keys[gathering.here :]
        present = self._dram.present(missing)
        run: list[int] = []
        for slot in present:
            if slot is None:
                break
            run.append(slot)
        self._dram.pin(run)
        gathering.run += run
        if len(run) == len(missing) and not gathering.ahead:
            return
        if gathering.ahead:
            self._dram.unpin([gathering.ahead.pop(key) for key in missing[: len(run)] if key in gathering.ahead])
        after = zip(missing[len(run) :], present[len(run) :], strict=True)
        ahead = {key: slot for key, slot in after if slot is not None}
        for key in gathering.ahead.keys() & ahead.keys():
            del ahead[key]
        self._dram.pin(list(ahead.values()))
        gathering.ahead.update(ahead)

    def _may_come(self, now: float, gathering: Gathering) -> bool:
        """Is the first missing block on its way for anybody, or can it still be asked for? (A put's writer owes no haste.) Of a
        gathering from the tail, any block."""
        if gathering.tail is not None:
            return bool(gathering.asked) or any(gathering.keys[index] in self._flying for index in gathering.tail.missing)
        key = gathering.keys[gathering.here]
        if key in self._flying or key in gathering.asked:
            return True
        return any(
            limit > gathering.here and self._wanted(source, key) and not self._too_slow(now, gathering, source)
            for source, limit in gathering.limits.items()
            if gathering.open[source]  # else it would have been asked just now
        )

    def _ask_sources(self, now: float, gathering: Gathering) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(PIPELINE):
            for source in list(gathering.limits):
                if gathering.open[source] < PIPELINE:
                    effects += self._ask(now, gathering, source)
        return effects

    def _ask(self, now: float, gathering: Gathering, source: str) -> list[Effect]:
        keys = tuple(self._batch(now, gathering, source))
        if not keys:
            return []
        fetch_id = self._new_id()
        fetch = self._fetches[fetch_id] = _Fetch(source, gathering, keys, now)
        gathering.open[source] += 1
        gathering.asked.update(keys)
        if source == DISK:
            self._promoting += len(keys)
            blocks = [(key, block) for key in keys if (block := self._disk.find(key)) is not None]
            return self._copy(fetch_id, fetch, blocks, gathering.deadline - now)
        ask = LeaseBlocks(
            lease_id=fetch_id,
            keys=keys,
            sources=(),
            fetch_s=gathering.deadline - now,
            ttl_s=self._settings.fetch_lease_s,
            compute_s=gathering.compute_s,
            contents=self._contents.token_bytes > 0,
        )
        return [Send(source, ask)]

    def _batch(self, now: float, gathering: Gathering, source: str) -> list[Key]:
        """The next blocks to have from `source`."""
        batch: list[Key] = []
        if source == DISK and self._promoting >= self._dram.capacity * MAX_PROMOTED_SHARE:
            return batch
        if gathering.tail is not None:
            return self._tail_batch(now, gathering, gathering.tail, source)
        for key in gathering.keys[gathering.here : gathering.limits[source]]:
            if key in gathering.asked or not self._wanted(source, key):
                continue
            if not batch and self._too_slow(now, gathering, source):
                self._counts.add(f"gather_refused[source={'disk' if source == DISK else 'node'},reason=slower_than_computing]")
                rest = gathering.keys[gathering.here : gathering.limits[source]]
                gathering.lost.update(dict.fromkeys((each for each in rest if self._wanted(source, each)), SLOW))
                gathering.limits[source] = 0
                break
            batch.append(key)
            if len(batch) == self._settings.fetch_batch_blocks:
                break
        return batch

    def _tail_batch(self, now: float, gathering: Gathering, tail: Tail, source: str) -> list[Key]:
        """Return the last blocks that `source` may have, in their order."""
        batch: list[Key] = []
        most = self._tail_batch_blocks(now, gathering, tail, source)
        for index in reversed(tail.missing):
            key = gathering.keys[index]
            if index < gathering.limits[source] and key not in gathering.asked and self._wanted(source, key):
                batch.append(key)
                if len(batch) == most:
                    break
            elif batch:
                break
        return batch[::-1]

    def _tail_batch_blocks(self, now: float, gathering: Gathering, tail: Tail, source: str) -> int:
        blocks, rate = (len(tail.missing) - len(gathering.asked)) // TAIL_PART, self._rates.get(source)
        if rate is not None and rate.block_s > 0 and now - rate.measured_at < RATE_LASTS_S:
            least_s, most_s = TAIL_BATCH_S
            blocks = min(max(blocks, int(least_s / rate.block_s)), int(most_s / rate.block_s))
        return max(1, min(blocks, self._settings.fetch_batch_blocks))

    def expected_block_s(self, now: float, gathering: Gathering) -> float:
        """Return in how many seconds each block comes from the sources that were asked, by what was measured lately; 0 if that
        is not known of all."""
        asked = [self._rates.get(source) for source, batches in gathering.open.items() if batches]
        recent = [rate.block_s for rate in asked if rate is not None and now - rate.measured_at < RATE_LASTS_S]
        if not recent or len(recent) < len(asked) or min(recent) <= 0:
            return 0.0
        return 1.0 / math.fsum([1.0 / block_s for block_s in recent])

    def _wanted(self, source: str, key: Key) -> bool:
        """Is `source` the one to have this block from? The own disk goes before other nodes."""
        return not self._dram.held(key) and (source == DISK) == (self._disk.find(key) is not None)

    def _too_slow(self, now: float, gathering: Gathering, source: str) -> bool:
        rate = self._rates.get(source)
        if gathering.compute_s <= 0 or rate is None:
            return False
        return rate.block_s > gathering.compute_s and now - rate.measured_at < RATE_LASTS_S

    # --- what comes

    def on_leased(self, now: float, sender: str, message: BlocksLeased) -> list[Effect]:
        """A source answers which blocks of a batch it holds."""
        fetch = self._fetches.get(message.lease_id)
        if fetch is None or fetch.source != sender or fetch.copies:
            return [Send(sender, ReleaseLease(lease_id=message.lease_id))]
        gathering = self._waiting(fetch)
        leased = len(message.slots) if message.node == sender else 0  # it speaks of its own slots alone
        if gathering is not None and leased < len(fetch.keys) and sender in gathering.limits:
            lacks = gathering.keys.index(fetch.keys[leased])
            gathering.limits[sender] = min(gathering.limits[sender], lacks)
            self._lose(fetch, fetch.keys[leased:], LACKS)
        time_left = fetch.asked_at + self._settings.fetch_lease_s * (1 - COPY_MARGIN) - now
        if gathering is not None:
            time_left = min(time_left, gathering.deadline - now)
        blocks: list[tuple[Key, SlotRef | DiskBlock]] = []
        if gathering is not None and time_left > 0 and leased:
            blocks = list(zip(fetch.keys, message.sources, strict=False))
            fetch.contents = self._fitting_contents(fetch.keys, message)
            fetch.owners = dict(zip(fetch.keys, map(self._tenants.number, message.tenants), strict=False))
        effects = self._copy(message.lease_id, fetch, blocks, time_left)
        return effects + (self._advance(now, gathering) if gathering is not None else [])

    def _fitting_contents(self, keys: Sequence[Key], message: BlocksLeased) -> dict[Key, Content]:
        """The contents that the source sent, unless they cannot be right: like a put's, its tokens are only passed on."""
        if not self._contents.token_bytes or not message.tokens:
            return {}
        if not all(self._contents.fits(tokens) for tokens in message.tokens if tokens):
            self._counts.add("fetched_tokens_misfit")
            return {}
        return dict(zip(keys, map(Content, message.parents, message.tokens), strict=False))

    def _owners(self, fetch: _Fetch, blocks: Sequence[tuple[Key, SlotRef | DiskBlock]]) -> list[int]:
        """The owner of each block; empty if all are known to have none."""
        if self._dram.shares is None:
            return []
        of_disk, owners = self._disk.slots.owner_of, fetch.owners
        return [of_disk(each.slot) if isinstance(each, DiskBlock) else owners.get(key, NO_OWNER) for key, each in blocks]

    def _copy(
        self, fetch_id: int, fetch: _Fetch, blocks: Sequence[tuple[Key, SlotRef | DiskBlock]], time_left: float
    ) -> list[Effect]:
        keys = [key for key, _ in blocks]
        slots, held = self._dram.reserve_missing(keys, len(keys), self._owners(fetch, blocks))
        if len(slots) + held < len(keys):
            self._counts.add("fetches_denied[reason=no_room]")
            self._lose(fetch, [key for index, key in enumerate(keys) if index not in slots], NO_ROOM)
            gathering = self._waiting(fetch)
            if gathering is not None:
                gathering.limits.pop(fetch.source, None)
        fetch.copies = [(blocks[index][0], slot, blocks[index][1]) for index, slot in slots.items()]
        self._disk.slots.pin([source.slot for _, _, source in fetch.copies if isinstance(source, DiskBlock)])
        self._flying.update([key for key, _, _ in fetch.copies])
        if not fetch.copies:
            return self._close(fetch_id)
        work_id = self._new_id()
        self._copying[work_id] = fetch_id
        return [Start(work_id, CopyBlocks(tuple((source, self._grant(slot)) for _, slot, source in fetch.copies)), time_left)]

    def on_copied(self, now: float, work_id: int, result: BlocksCopied | WorkFailed) -> list[Effect]:
        """A batch has come, or not."""
        fetch_id = self._copying.pop(work_id)
        fetch = self._fetches[fetch_id]
        copies, fetch.copies = fetch.copies, []
        self._flying.difference_update(key for key, _, _ in copies)
        checksums: Sequence[int | None] = result.checksums if isinstance(result, BlocksCopied) else [None] * len(copies)
        bad = set(result.corrupt) if isinstance(result, BlocksCopied) else set()
        gathering = self._waiting(fetch)
        # All at once and from the root on, so that children go before parents.
        self._disk.slots.unpin([source.slot for _, _, source in copies if isinstance(source, DiskBlock)])
        came: dict[Key, Content] = {}
        whole: list[tuple[int, int]] = []
        corrupt: list[SlotRef] = []
        tier = "disk" if fetch.source == DISK else "node"
        for index, ((key, slot, source), checksum) in enumerate(zip(copies, checksums, strict=True)):
            if checksum is not None and checksum == source.checksum:
                whole.append((slot, checksum))
                came[key] = (
                    self._disk.content(source.slot) if isinstance(source, DiskBlock) else fetch.contents.get(key, UNKNOWN)
                )
                continue
            self._dram.free(slot)
            self._lose(fetch, (key,), CORRUPT if index in bad else FAILED)
            if index in bad and isinstance(source, DiskBlock):
                self._disk.corrupt(source)
                continue  # the disk says itself what it has: what comes after this block may still be there
            if index in bad and isinstance(source, SlotRef):
                corrupt.append(source)
            if gathering is not None and fetch.source in gathering.limits:
                gathering.limits[fetch.source] = min(gathering.limits[fetch.source], gathering.keys.index(key))
        self._counts.add(f"fetched_blocks[source={tier}]", len(came))
        self._counts.add(f"fetch_failures[source={tier}]", len(copies) - len(came))
        self._counts.add("fetched_blocks_corrupt", len(corrupt))
        if came:
            self._dram.commit_all([slot for slot, _ in whole], [checksum for _, checksum in whole])
            self._measure(now, fetch, len(came))
        if gathering is not None:
            gathering.came_from.update(dict.fromkeys(came, fetch.source))
        self._note(came, [slot for slot, _ in whole], gathering)
        self._stored(list(came))
        if isinstance(result, BlocksCopied) and result.fault:
            # After that: what came is on disk too until then, and only by this in DRAM alone.
            self._disk.fail(now, result.fault)
        effects: list[Effect] = [Send(fetch.source, ReportCorrupt(slots=tuple(corrupt)))] if corrupt else []
        return effects + self._close(fetch_id) + self.advance_waiting(now, fetch.keys)

    def _waiting(self, fetch: _Fetch) -> Gathering | None:
        """For whom it was asked, if that still waits: a holder that uses a number twice waits for something else by now."""
        gathering = fetch.gathering
        return gathering if self.gatherings.get(gathering.holder) is gathering else None

    def _lose(self, fetch: _Fetch, keys: Iterable[Key], why: str) -> None:
        """These do not come by this fetch; should they come by another, the reason is not used."""
        gathering = self._waiting(fetch)
        if gathering is not None:
            gathering.lost.update(dict.fromkeys(keys, why))

    def _note(self, came: Mapping[Key, Content], slots: Sequence[int], gathering: Gathering | None) -> None:
        """Keep what these blocks hold; where that is not known, what they follow in the chain that was asked for, if any."""
        keys = gathering.keys if gathering is not None else ()
        before = {key: parent for parent, key in pairwise(keys) if key in came}
        for (key, content), slot in zip(came.items(), slots, strict=True):
            self._contents.put(slot, content.parent if content.tokens else before.get(key), content.tokens)

    def _measure(self, now: float, fetch: _Fetch, blocks: int) -> None:
        """Batches overlap: what a block takes is counted from the end of the batch before, if that came later."""
        rate = self._rates.get(fetch.source)
        if rate is None or now - rate.measured_at >= RATE_LASTS_S:  # whatever was wrong then says nothing about now
            rate = self._rates[fetch.source] = _Rate(measured_at=fetch.asked_at)
        keep = 0.5 ** (blocks / RATE_BLOCKS)
        rate.seconds = keep * rate.seconds + now - max(fetch.asked_at, rate.measured_at)
        rate.blocks = keep * rate.blocks + blocks
        rate.measured_at = now

    def sources(self, now: float) -> list[SourceRate]:
        """The report on each source: its seconds a block lately, and how many blocks are requested and not here."""
        pending: dict[str, int] = {}
        for fetch in self._fetches.values():
            pending[fetch.source] = pending.get(fetch.source, 0) + len(fetch.keys)
        fresh = {source: rate.block_s for source, rate in self._rates.items() if now - rate.measured_at < RATE_LASTS_S}
        names = dict.fromkeys([*pending, *fresh])
        return [SourceRate(source=name, block_s=fresh.get(name, 0.0), pending_blocks=pending.get(name, 0)) for name in names]

    def _close(self, fetch_id: int) -> list[Effect]:
        """A batch is done with: give the source its lease back."""
        fetch = self._fetches.pop(fetch_id)
        if fetch.source == DISK:
            self._promoting -= len(fetch.keys)
        gathering = self._waiting(fetch)
        if gathering is not None:
            gathering.open[fetch.source] -= 1
            gathering.asked.difference_update(fetch.keys)
        return [] if fetch.source == DISK else [Send(fetch.source, ReleaseLease(lease_id=fetch_id))]
