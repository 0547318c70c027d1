"""Messages from a cache-node to the conductors: all blocks at first, then changes, and what fetching takes. PURE."""

from collections.abc import Sequence

from msgspec import structs

from mooncake_zmq.core.actor import Effect, EngineBlocksReported, Send, SetTimer
from mooncake_zmq.core.messages import BlocksAnnounced, CacheLoad, Message
from mooncake_zmq.core.reports import REPORT
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import Medium
from mooncake_zmq.pool.node.announcer import Announcer, announcements
from mooncake_zmq.pool.node.contents import in_chains
from mooncake_zmq.pool.node.disk_tier import DiskTier
from mooncake_zmq.pool.node.gathering import Gatherer
from mooncake_zmq.pool.node.parts import Parts

MAX_SOURCES = 256
"""The most sources that one `CacheLoad` reports."""


class Conductors:
    """The conductors' view of this pool, brought up to date after every event."""

    def __init__(self, parts: Parts, disk: DiskTier, gatherer: Gatherer, announcer: Announcer) -> None:
        self._slots = parts.slots
        self._disk = disk
        self._gatherer = gatherer
        self._peers = parts.peers
        self._announcer = announcer
        self._misses = parts.misses
        self._drain = parts.drain
        self._report_s = parts.settings.report_s
        self._counts = parts.counts
        self._in_store: dict[Key, None] = {}
        """Blocks of vLLMs in the store beside the pool."""
        self._newcomers: list[str] = []
        """Conductors that connected in this event."""
        self._reporting = False
        """Whether the timer of the next `CacheLoad` is armed."""

    def connected(self, name: str) -> None:
        """Note a new conductor, which is sent everything at the end of this event."""
        self._newcomers.append(name)

    def announce(self) -> list[Effect]:
        """Send what this event changed in either tier; a conductor that has just connected is sent all that is held now."""
        changed = self._announcer.pending or self._disk.stored or self._slots.evicted or self._disk.slots.evicted
        if not changed and not self._newcomers:
            return []
        if self._disk.stored:
            new = [key for key, _ in self._disk.stored if self._slots.committed(key) is None]
            self._announcer.stored(in_chains(Medium.DISK, self._disk.stored), new)
            self._disk.stored.clear()
        left_dram, left_disk = tuple(self._slots.evicted), tuple(self._disk.slots.evicted)
        if left_dram or left_disk:
            self._disk.left(left_dram, left_disk)
            self._counts.add("evicted_blocks[tier=dram]", len(left_dram))
            self._counts.add("evicted_blocks[tier=disk]", len(left_disk))
            self._slots.evicted.clear()
            self._disk.slots.evicted.clear()
        informed = [] if self._drain.cordoned else self._informed()
        effects = self._announcer.flush([(Medium.CPU, left_dram), (Medium.DISK, left_disk)], informed)
        self._misses.left(self._announcer.gone)
        if self._newcomers:
            everything: list[Message] = [] if self._drain.cordoned else [*self._all_held()]
            everything += _of_store(list(self._in_store))
            if self._drain.cordoned:
                everything.append(CacheLoad(sources=(), cordoned=True))
            everything.append(BlocksAnnounced(complete=True))
            effects += [Send(newcomer, message) for newcomer in self._newcomers for message in everything]
            self._newcomers.clear()
        return effects

    def _all_held(self) -> list[BlocksAnnounced]:
        dram = self._slots.committed_keys()
        disk = [key for key in self._disk.slots.committed_keys() if self._slots.committed(key) is None]
        return announcements(dram, on_disk=disk if self._disk.readable else ())

    def _informed(self) -> list[str]:
        """Return the conductors that have been sent everything, and are sent what changes."""
        return [name for name in self._peers.conductors() if name not in self._newcomers]

    def cordoned(self) -> list[Effect]:
        """Take back all blocks from the conductors, which then plan without them."""
        held = dict.fromkeys([*self._slots.committed_keys(), *self._disk.slots.committed_keys()])
        cordoned: list[Message] = [CacheLoad(sources=(), cordoned=True), *announcements((), list(held))]
        return self._to_all(cordoned)

    def uncordoned(self) -> list[Effect]:
        """Report that blocks can be had again; all of them are announced at the end of this event."""
        self._newcomers = self._peers.conductors()
        return self._to_all([CacheLoad(sources=(), cordoned=False)])

    def _to_all(self, messages: Sequence[Message]) -> list[Effect]:
        return [Send(name, message) for message in messages for name in self._peers.conductors()]

    def on_store_changed(self, change: EngineBlocksReported) -> list[Effect]:
        """Pass on what changed in the store beside the pool, and keep it for conductors that connect later."""
        self._in_store |= dict.fromkeys(change.stored)
        for key in change.removed:
            self._in_store.pop(key, None)
        informed = self._informed()
        return [Send(name, message) for message in _of_store(change.stored, change.removed) for name in informed]

    def begin_reports(self) -> list[Effect]:
        """Start the reports of what fetching takes, as soon as anything is fetched."""
        if self._reporting or not self._gatherer.fetches:
            return []
        self._reporting = True
        return [SetTimer(REPORT, self._report_s)]

    def report(self, now: float) -> list[Effect]:
        """Report what fetching takes. Reports end, with an empty one, once nothing is fetched and all measurements are old."""
        sources = self._gatherer.sources(now)
        self._reporting = bool(sources)
        load = CacheLoad(sources=tuple(sources[:MAX_SOURCES]), cordoned=self._drain.cordoned)
        timers: list[Effect] = [SetTimer(REPORT, self._report_s)] if sources else []
        return [*[Send(name, load, lossy=True) for name in self._peers.conductors()], *timers]


def _of_store(stored: Sequence[Key], removed: Sequence[Key] = ()) -> list[BlocksAnnounced]:
    return [structs.replace(message, engine_blocks=True) for message in announcements(stored, removed)]
