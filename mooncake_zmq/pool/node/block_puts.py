"""The two-phase puts of a pool's clients: slots are reserved, written by the client, then committed. PURE.

A put that runs past its time puts its slots into quarantine until its writer answers or is known to be dead.
"""

from collections.abc import Callable, Sequence

from mooncake_zmq.core.actor import Effect, Send, Start
from mooncake_zmq.core.messages import CommitSlots, GrantedSlot, ReclaimSlots, ReserveSlots, SlotsReserved
from mooncake_zmq.core.work import ProbeProcess, ProcessProbed, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksStored, Medium
from mooncake_zmq.kv.key_table import EMPTY
from mooncake_zmq.kv.lease import Process
from mooncake_zmq.kv.shares import NO_OWNER
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.pool.node.parts import BlockPut, Parts


class BlockPuts:
    """The puts that are not committed yet, and the probes of writers that are late."""

    def __init__(
        self,
        parts: Parts,
        *,
        stored: Callable[[Sequence[BlocksStored]], None],
        advance: Callable[[float, Sequence[Key]], list[Effect]],
    ) -> None:
        """`stored` is called with what was committed, `advance` then continues the leases that wait for it."""
        self._parts = parts
        self._settings = parts.settings
        self._layout = parts.layout
        self._slots = parts.slots
        self._contents = parts.contents
        self._chains = parts.chains
        self._holders = parts.holders
        self._peers = parts.peers
        self._counts = parts.counts
        self._stored = stored
        self._advance = advance
        self._probes: dict[int, Process] = {}

    @property
    def open(self) -> list[BlockPut]:
        """Return the puts that have not ended."""
        return [put for holder in self._holders.clients.values() for put in holder.puts.values()]

    @property
    def writing(self) -> list[int]:
        """Return the slots of all open puts, for the owner's `check`."""
        return [slot for put in self.open for slot in put.rows]

    def probes(self, work_id: int) -> bool:
        """Return whether this work is the probe of a late writer."""
        return work_id in self._probes

    def on_reserve(self, now: float, sender: str, message: ReserveSlots) -> list[Effect]:
        """Grant slots for the blocks that are missing, as far as there is room."""
        writer = self._peers.holder(sender, message.put_id)
        if self._holders.put_of(writer.process, writer.number) is not None:
            return []
        found = self._slots.find_all(message.keys)
        if found.count(EMPTY) > self._slots.count(SlotState.FREE):  # a put must not evict the chain that it continues
            self._chains.touch(message.parent, self._slots.committed_of(found))
        tokens = self._fitting_tokens(message)
        owner = self._parts.tenants.number(message.tenant)
        usage = self._holders.of(writer.process, sender).usage
        room = (
            0
            if self._parts.drain.draining
            else max(1, int(self._settings.max_put_share * self._slots.capacity)) - usage.reserved
        )
        owners = [owner] * len(message.keys) if owner != NO_OWNER else ()
        slots, held = self._slots.reserve_missing(message.keys, room, owners, found)
        generations = self._slots.generation
        grants = [GrantedSlot(index=index, slot=slot, generation=generations[slot]) for index, slot in slots.items()]
        denied = len(message.keys) - held - len(grants)
        self._counts.add("put_blocks[result=granted]", len(grants))
        self._counts.add("put_blocks[result=held]", held)
        self._counts.add("put_blocks[result=denied]", denied)
        if owner != NO_OWNER:
            self._counts.add(f"tenant_put_blocks[tenant={message.tenant},result=granted]", len(grants))
            self._counts.add(f"tenant_put_blocks[tenant={message.tenant},result=denied]", denied)
        self._counts.add("dedup_saved_bytes", held * self._layout.block_bytes)
        reply = Send(sender, SlotsReserved(put_id=message.put_id, grants=tuple(grants)))
        if not grants:
            return [reply]
        put = BlockPut(writer.process, writer.number, now + min(message.ttl_s, self._settings.max_lease_s), message.keys, slots)
        put.parent, put.tokens, put.more, put.spare = message.parent, tokens, message.more, message.spare
        usage.reserved += put.reserved
        self._holders.put(put)
        return [reply]

    def _fitting_tokens(self, message: ReserveSlots) -> bytes:
        """Return the tokens of a put, or none if they cannot be those of its blocks. They only go into KV events."""
        fits = len(message.tokens) == len(message.keys) * self._layout.block_tokens * 4
        if message.tokens and not fits:
            self._counts.add("put_tokens_misfit")
        return message.tokens if fits and self._settings.kv_events.tokens else b""

    def on_commit(self, now: float, sender: str, message: CommitSlots) -> list[Effect]:
        """Commit the blocks whose checksums the writer names, and free the put's other slots."""
        writer = self._peers.holder(sender, message.put_id)
        put = self._holders.end_put(writer.process, writer.number)
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
        if not stored:
            return []
        self._slots.mark(slots, spare=put.spare)
        self._slots.commit_all(slots, [checksums[index] for index in stored])
        if not put.more:
            self._chains.touch(put.parent, slots)
        self._report_stored(put, stored)
        return self._advance(now, [put.keys[index] for index in stored])

    def _report_stored(self, put: BlockPut, stored: Sequence[int]) -> None:
        """Report one event for each unbroken part of the put's chain."""
        size = self._layout.block_tokens * 4
        for first, stop in _runs(stored):
            parent = put.keys[first - 1] if first else put.parent
            keys = put.keys[first:stop]
            self._stored([BlocksStored(keys, Medium.CPU, parent or b"", put.tokens[first * size : stop * size])])

    def on_late(self, now: float, put: BlockPut) -> list[Effect]:
        """Put the slots of a late put into quarantine, as the writer may still write, and ask whether it still runs, again and
        again until it ends."""
        if not put.quarantined:
            self._holders.quarantine(put)
            self._counts.add("puts_quarantined")
        put.expires_at = now + self._settings.probe_s
        self._holders.time(put)
        probe_id = self._parts.new_id()
        self._probes[probe_id] = put.client
        node, incarnation = put.client
        return [
            Send(node, ReclaimSlots(put_id=put.number)),
            Start(probe_id, ProbeProcess(node, incarnation), self._settings.probe_s),
        ]

    def on_probed(self, work_id: int, result: ProcessProbed | WorkFailed) -> tuple[str, int] | None:
        """Return the writer, by node and incarnation, that the probe found dead, if it did."""
        writer = self._probes.pop(work_id)
        return writer if isinstance(result, ProcessProbed) and not result.alive else None


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending indices as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
