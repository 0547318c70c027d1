"""The two-phase puts of a pool's clients: slots are reserved, written by the client, then committed. PURE.

A put that runs past its time puts its slots into quarantine until its writer answers or is known to be dead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.actor import CancelTimer, Effect, Send, SetTimer, Start
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import CommitSlots, GrantedSlot, ReclaimSlots, ReserveSlots, SlotsReserved
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.core.work import ProbeProcess, ProcessProbed, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksStored, Medium
from mooncake_zmq.kv.key_table import EMPTY
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.lease import HolderId
from mooncake_zmq.kv.shares import NOBODY
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node.chains import Chains
from mooncake_zmq.pool.node.contents import Contents
from mooncake_zmq.pool.node.peers import Peers
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.pool.node.tenants import PoolTenants


@dataclass(slots=True)
class Put:
    """A client's reserved slots by index in its request, and what is announced of them once they are committed."""

    keys: tuple[Key, ...]
    slots: dict[int, int]
    parent: Key | None
    tokens: bytes
    more: bool = False
    quarantined: bool = False


class BlockPuts:
    """The puts that are not committed yet, and the probes of writers that are late."""

    def __init__(
        self,
        settings: CacheNodeSettings,
        layout: BlockLayout,
        slots: Slots,
        contents: Contents,
        *,
        chains: Chains,
        tenants: PoolTenants,
        peers: Peers,
        drain: Leaving,
        new_id: Callable[[], int],
        stored: Callable[[Sequence[BlocksStored]], None],
        advance: Callable[[float, Sequence[Key]], list[Effect]],
        counts: Tally,
    ) -> None:
        """`stored` is called with what was committed, `advance` then continues the leases that wait for it."""
        self.open: dict[HolderId, Put] = {}
        self._settings = settings
        self._layout = layout
        self._slots = slots
        self._contents = contents
        self._chains = chains
        self._tenants = tenants
        self._peers = peers
        self._drain = drain
        self._new_id = new_id
        self._stored = stored
        self._advance = advance
        self._counts = counts
        self._probes: dict[int, tuple[str, int]] = {}

    @property
    def writing(self) -> list[int]:
        """Return the slots of all open puts, for the owner's `check`."""
        return [slot for put in self.open.values() for slot in put.slots.values()]

    def probes(self, work_id: int) -> bool:
        """Return whether this work is the probe of a late writer."""
        return work_id in self._probes

    def on_reserve(self, _now: float, sender: str, message: ReserveSlots) -> list[Effect]:
        """Grant slots for the blocks that are missing, as far as there is room."""
        writer = self._peers.holder(sender, message.put_id)
        if writer in self.open:
            return []
        found = self._slots.find_all(message.keys)
        if found.count(EMPTY) > self._slots.count(SlotState.FREE):  # a put must not evict the chain that it continues
            self._chains.touch(message.parent, self._slots.committed_of(found))
        tokens = self._fitting_tokens(message)
        owner = self._tenants.number(message.tenant)
        room = 0 if self._drain.draining else self._room_for(sender)
        owners = [owner] * len(message.keys) if owner != NOBODY else ()
        slots, held = self._slots.reserve_missing(message.keys, room, owners, found)
        generations = self._slots.generation
        grants = [GrantedSlot(index=index, slot=slot, generation=generations[slot]) for index, slot in slots.items()]
        denied = len(message.keys) - held - len(grants)
        self._counts.add("put_blocks[result=granted]", len(grants))
        self._counts.add("put_blocks[result=held]", held)
        self._counts.add("put_blocks[result=denied]", denied)
        if owner != NOBODY:
            self._counts.add(f"tenant_put_blocks[tenant={message.tenant},result=granted]", len(grants))
            self._counts.add(f"tenant_put_blocks[tenant={message.tenant},result=denied]", denied)
        self._counts.add("dedup_saved_bytes", held * self._layout.block_bytes)
        reply = Send(sender, SlotsReserved(put_id=message.put_id, grants=tuple(grants)))
        if not grants:
            return [reply]
        self.open[writer] = Put(message.keys, slots, message.parent, tokens, message.more)
        ttl_s = min(message.ttl_s, self._settings.max_lease_s)
        return [SetTimer(("put", writer.node, writer.incarnation, writer.number), ttl_s), reply]

    def _room_for(self, client: str) -> int:
        """Return how many slots this client may reserve beside those that it has reserved or has in quarantine."""
        open_slots = sum(len(put.slots) for writer, put in self.open.items() if writer.node == client)
        return max(1, int(self._settings.max_put_share * self._slots.capacity)) - open_slots

    def _fitting_tokens(self, message: ReserveSlots) -> bytes:
        """Return the tokens of a put, or none if they cannot be those of its blocks. They only go into KV events."""
        fits = len(message.tokens) == len(message.keys) * self._layout.block_tokens * 4
        if message.tokens and not fits:
            self._counts.add("put_tokens_misfit")
        return message.tokens if fits and self._settings.kv_events.tokens else b""

    def on_commit(self, now: float, sender: str, message: CommitSlots) -> list[Effect]:
        """Commit the blocks whose checksums the writer names, and free the put's other slots."""
        writer = self._peers.holder(sender, message.put_id)
        put = self.open.pop(writer, None)
        if put is None:
            return []
        checksums = {} if put.quarantined else dict(message.checksums)
        if put.quarantined:
            self._counts.add("late_commits")
        stored: list[int] = []
        slots: list[int] = []
        size = self._contents.token_bytes
        for index, slot in put.slots.items():
            if index in checksums:
                parent = put.keys[index - 1] if index else put.parent
                self._contents.put(slot, parent, put.tokens[index * size : (index + 1) * size] if size else b"")
                stored.append(index)
                slots.append(slot)
            else:
                self._slots.free(slot)
        effects: list[Effect] = [CancelTimer(("put", writer.node, writer.incarnation, writer.number))]
        if not stored:
            return effects
        self._slots.commit_all(slots, [checksums[index] for index in stored])
        if not put.more:
            self._chains.touch(put.parent, slots)
        self._report_stored(put, stored)
        return effects + self._advance(now, [put.keys[index] for index in stored])

    def _report_stored(self, put: Put, stored: Sequence[int]) -> None:
        """Report one event for each unbroken part of the put's chain."""
        size = self._layout.block_tokens * 4
        for first, stop in _runs(stored):
            parent = put.keys[first - 1] if first else put.parent
            keys = put.keys[first:stop]
            self._stored([BlocksStored(keys, Medium.CPU, parent or b"", put.tokens[first * size : stop * size])])

    def on_expired(self, writer: HolderId) -> list[Effect]:
        """Put the slots of a late put into quarantine, as the writer may still write, and ask whether it still runs."""
        put = self.open.get(writer)
        if put is None:
            return []
        if not put.quarantined:
            put.quarantined = True
            self._counts.add("puts_quarantined")
            for slot in put.slots.values():
                self._slots.quarantine(slot)
        probe_id = self._new_id()
        self._probes[probe_id] = (writer.node, writer.incarnation)
        return [
            SetTimer(("put", writer.node, writer.incarnation, writer.number), self._settings.probe_s),
            Send(writer.node, ReclaimSlots(put_id=writer.number)),
            Start(probe_id, ProbeProcess(writer.node, writer.incarnation), self._settings.probe_s),
        ]

    def on_probed(self, work_id: int, result: ProcessProbed | WorkFailed) -> tuple[str, int] | None:
        """Return the writer, by node and incarnation, that the probe found dead, if it did."""
        writer = self._probes.pop(work_id)
        return writer if isinstance(result, ProcessProbed) and not result.alive else None

    def end(self, node: str, incarnations: range) -> None:
        """Free the slots of dead writers: these incarnations of `node`."""
        for writer in [w for w in self.open if w.node == node and w.incarnation in incarnations]:
            for slot in self.open.pop(writer).slots.values():
                self._slots.free(slot)


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending indices as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
