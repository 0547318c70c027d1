"""Bugs planted in the pools of blocks: in leases, puts, slots, disks, copies, and in what is announced of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from mooncake_zmq.core.actor import Effect, Received, Send
from mooncake_zmq.core.messages import BlocksAnnounced, BlocksLeased, CommitSlots, LeaseRenewed, SlotsReserved
from mooncake_zmq.core.work import DiskBlock
from mooncake_zmq.decode.decode import Decode
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.eviction import Lru
from mooncake_zmq.kv.shares import Shares
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node import client, disk_tier, parts
from mooncake_zmq.pool.node.block_leases import BlockLeases
from mooncake_zmq.pool.node.block_puts import BlockPuts
from mooncake_zmq.pool.node.cache_node import CacheNode
from mooncake_zmq.pool.node.client import PoolClient, PutEnded
from mooncake_zmq.pool.node.conductors import Conductors
from mooncake_zmq.pool.node.contents import Content, Contents
from mooncake_zmq.pool.node.gathering import Gatherer
from mooncake_zmq.pool.node.parts import BlockPut
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.simulation import copy_works, engine_store, engine_works, memory, reads
from mooncake_zmq.simulation.planted_stores import Replacements, silent


class _PinlessSlots(Slots):
    """Slots that a lease does not pin: they stay among those to evict."""

    def pin(self, slots: Sequence[int]) -> None:
        pass

    def unpin(self, slots: Sequence[int]) -> None:
        self.touch(slots)

    def check(self) -> None:
        pass


def evict_leased() -> Replacements:
    return [(parts, "Slots", _PinlessSlots), (CacheNode, "check", silent)]


def no_generation_check() -> Replacements:
    """Reads ignore generations, as the rule is one that live reads follow too."""

    def always(*_: object, **__: object) -> bool:
        return True

    return [(reading, rule, always) for rule in ("generation_stands", "row_stands", "part_stands")]


def disk_unverified() -> Replacements:
    """Bytes read from disk are taken for those that the index names, and their checksum for the one that was asked for."""
    copy = copy_works.finish_copy

    def trusting(machine: Any, running: Any, copied: Any) -> Any:
        checksum = copy(machine, running, copied)
        source = next((source for source, grant in running.work.copies if grant is copied.grant), None)
        return source.checksum if checksum is not None and isinstance(source, DiskBlock) else checksum

    def always(*_: object) -> bool:
        return True

    return [
        (reading, "header_stands", always),
        (reading, "payload_stands", always),
        (copy_works, "finish_copy", trusting),
    ]


class _ExclusiveSlots(_PinlessSlots):
    """Slots in which a block that is being promoted is the next to go, as DRAM will have it."""

    def pin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.demote(slot)


def disk_unpinned() -> Replacements:
    """Disk slots are not kept for the copies that read them."""
    return [(disk_tier, "Slots", _ExclusiveSlots), (CacheNode, "check", silent)]


def late_writer() -> Replacements:
    """A put past its time is given back at once: no quarantine, no probe whether its writer still writes."""

    def on_late(self: BlockPuts, _now: float, put: BlockPut) -> list[Effect]:
        for slot in put.rows if self._holders.end_put(put.client, put.number) else ():
            self._slots.free(slot)
        return []

    return [(BlockPuts, "on_late", on_late)]


def commit_unverified() -> Replacements:
    """All blocks of a put are committed, those whose copy failed too."""
    on_commit = BlockPuts.on_commit

    def commit_all(self: BlockPuts, now: float, sender: str, message: CommitSlots) -> list[Effect]:
        writer = self._peers.holder(sender, message.put_id)
        put = self._holders.put_of(writer.process, writer.number)
        checksums = dict(message.checksums)
        everything = tuple((index, checksums.get(index, 1)) for index in put.slots) if put else ()
        return on_commit(self, now, sender, CommitSlots(put_id=message.put_id, checksums=everything))

    return [(BlockPuts, "on_commit", commit_all)]


def lease_leak() -> Replacements:
    """Leases end neither by release nor by expiry."""

    def ignore(self: BlockLeases, *_: object) -> list[Effect]:
        return []

    def expire(self: CacheNode, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while (held := self._holders.ends.pop_due(now)) is not None:
            effects += self._puts.on_late(now, held) if isinstance(held, BlockPut) else ()
        self._holders.expire(now, self._leases.on_over, lambda _: None)
        return effects

    return [(BlockLeases, "on_release", ignore), (CacheNode, "_expire", expire)]


def contents_stale() -> Replacements:
    """The contents of a slot's first block are announced for all that follow it there."""
    put = Contents.put

    def once(self: Contents, slot: int, parent: Key | None, tokens: bytes = b"") -> None:
        if not self.of(slot).tokens:
            put(self, slot, parent, tokens)

    return [(Contents, "put", once)]


def contents_lost() -> Replacements:
    """The contents that a source reports of its blocks are not kept."""

    def silent(self: Gatherer, *_: object) -> dict[Key, Content]:
        return {}

    return [(Gatherer, "_fitting_contents", silent)]


def index_lies() -> Replacements:
    """Evicted blocks are never taken back from the conductors."""
    announce = Conductors.announce

    def stored_only(self: Conductors) -> list[Effect]:
        effects = []
        for effect in announce(self):
            if isinstance(effect, Send) and isinstance(effect.message, BlocksAnnounced):
                news = effect.message
                if news.stored or news.on_disk:
                    effects.append(Send(effect.to, BlocksAnnounced(stored=news.stored, on_disk=news.on_disk)))
        return list(effects)

    return [(Conductors, "announce", stored_only)]


def announce_early() -> Replacements:
    """Blocks are announced when their slots are granted, before anything is in them."""
    on_reserve = BlockPuts.on_reserve

    def announcing(self: BlockPuts, now: float, sender: str, message: Any) -> list[Effect]:
        effects = on_reserve(self, now, sender, message)
        granted = tuple(key for key in message.keys if self._slots.held(key) and self._slots.committed(key) is None)
        conductors = self._peers.conductors() if granted else ()
        return effects + [Send(name, BlocksAnnounced(stored=granted)) for name in conductors]

    return [(BlockPuts, "on_reserve", announcing)]


def tail_early() -> Replacements:
    """Blocks that are fetched from the tail are handed over when their copies begin, before their generations stand."""
    copy = Gatherer._copy

    def handing_over(self: Gatherer, fetch_id: int, fetch: Any, blocks: Any, time_left: float) -> list[Effect]:
        effects = copy(self, fetch_id, fetch, blocks, time_left)
        gathering = self._waiting(fetch)
        if gathering is not None and gathering.tail is not None:
            begun = {key: slot for key, slot, _ in fetch.copies}
            self._dram.pin(gathering.tail.take([begun.get(gathering.keys[index]) for index in gathering.tail.missing]))
            self.grown.append(gathering)
        return effects

    return [(Gatherer, "_copy", handing_over), (CacheNode, "check", silent)]


def put_never_ends() -> Replacements:
    """The writer never reports that its copy is done."""
    on_copied = PoolClient.on_copied

    def silent(self: PoolClient, work_id: int, result: Any) -> PutEnded:
        return PutEnded([], on_copied(self, work_id, result).tokens)

    return [(PoolClient, "on_copied", silent), (PoolClient, "on_reclaim", lambda self, now, sender, message: [])]


def disk_stays_off() -> Replacements:
    """An SSD that was full or failed is never tried again."""

    def ignore(self: disk_tier.DiskTier, now: float) -> None:
        pass

    return [(disk_tier.DiskTier, "retry", ignore)]


def share_ignored() -> Replacements:
    """An owner below its share takes from the one that has most."""
    victims = Shares.victims

    def of_anybody(self: Shares, owner: int, *, free: bool) -> Lru | None:
        order = victims(self, owner, free=free)
        return order if order is None or self.held[owner] >= self.most[owner] > 0 else max(self._orders, key=len)

    return [(Shares, "victims", of_anybody), (CacheNode, "check", silent)]


def copies_without_owner() -> Replacements:
    """The owners of the blocks that another host fetches are not sent."""

    def none(self: CacheNode, *_: object) -> tuple[str, ...]:
        return ()

    return [(CacheNode, "_owners", none)]


def copied_short() -> Replacements:
    """A choice begins with all but the last token of its prompt's KV."""
    fork = engine_works.fork

    def short(machine: Any, running: Any, work: Any) -> Any:
        return fork(machine, running, structs.replace(work, tokens=work.tokens - 1))

    return [(engine_works, "fork", short)]


def saved_wrong() -> Replacements:
    """The blocks that vLLMs load differ from those that they saved."""
    put = engine_store.EngineStore.put

    def spoilt(self: engine_store.EngineStore, key: Key, block: engine_store.SavedBlock) -> None:
        put(self, key, replace(block, kv=block.kv[4:] + block.kv[:4]))

    return [(engine_store.EngineStore, "put", spoilt)]


def _takes_what_is_gone(late: Callable[[Any, Any], bool]) -> Replacements:
    """Patch reads so that a reader for which `late` holds keeps what is in the slot, although the leased copy has gone."""

    def trusting(machine: Any, ref: Any, segment: Any) -> bool:
        there = segment is not None and reads.readable(machine, segment, attached=True)
        return there and not memory.generation_stands(segment, ref)

    def first_half(self: Any) -> bytes | None:
        half = first(self)
        segment = self._machine.find(self._ref.node, self._ref.incarnation)
        if half is None and late(self._machine, self._running) and trusting(self._machine, self._ref, segment):
            part = segment.part(self._ref.slot, self._layer)
            self._segment, self._half = segment, bytes(part[: len(part) // 2])
            return bytes(self._half)
        return half

    def second_half(self: Any) -> bytes | None:
        part = second(self)
        believes = part is None and self._half and late(self._machine, self._running)
        if believes and trusting(self._machine, self._ref, self._segment):
            part = self._half + bytes(self._segment.part(self._ref.slot, self._layer)[len(self._half) :])
            self._machine.world.watcher.verified(self._segment, self._ref, self._layer, part)
        return part

    first, second = reads.SlotRead.first_half, reads.SlotRead.second_half
    return [(reads.SlotRead, "first_half", first_half), (reads.SlotRead, "second_half", second_half)]


def woken_believes() -> Replacements:
    """A host that was suspended believes in the leases that it had."""
    return _takes_what_is_gone(lambda machine, running: machine.woke_at >= 0)


def stopped_believes() -> Replacements:
    """A reader that was stopped amid a read believes in the lease that it had."""
    return _takes_what_is_gone(lambda machine, running: machine.stopped_at >= running.started_at)


def ttl_from_receipt() -> Replacements:
    """Every holder's clock begins when the answer arrives."""

    def from_receipt(handle: Callable[[Any, float, Any], list[Effect]]) -> Callable[[Any, float, Any], list[Effect]]:
        def handled(self: Any, now: float, event: Any) -> list[Effect]:
            pool: PoolClient = self._pool
            if isinstance(event, Received):
                match event.message:
                    case BlocksLeased(lease_id=lease_id) | LeaseRenewed(lease_id=lease_id):
                        lease = pool._leases.get(lease_id)
                        if lease is not None:
                            lease.expires_at = now + pool.settings.lease_ttl_s
                            lease.renewal_sent_at = now if lease.renewal_sent_at is not None else None
                    case SlotsReserved(put_id=put_id):
                        put = pool._puts.get(put_id)
                        if put is not None:
                            put.sent_at = now
            return handle(self, now, event)

        return handled

    return [
        (Prefill, "handle", from_receipt(Prefill.handle)),
        (Decode, "handle", from_receipt(Decode.handle)),
        (client, "COPY_MARGIN", 0.0),
    ]
