"""State that the parts of a cache-node share: the table of its DRAM slots, what holds them, and its peers. PURE."""

from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import SlotGrant
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.lease import Process
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node.chains import Chains
from mooncake_zmq.pool.node.contents import Contents
from mooncake_zmq.pool.node.misses import Misses
from mooncake_zmq.pool.node.peers import Peers
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.pool.rules.holders import Holders, Put
from mooncake_zmq.pool.rules.tenants import PoolTenants, slots_of


class BlockPut(Put[Process]):
    """A put of blocks: its slots by index in its request, and what is announced of them once they are committed."""

    def __init__(self, client: Process, number: int, expires_at: float, keys: tuple[Key, ...], slots: dict[int, int]) -> None:
        super().__init__(client, number, expires_at)
        self.keys, self.slots = keys, slots
        self.rows = list(slots.values())
        self.reserved = len(slots)
        self.parent: Key | None = None
        self.tokens = b""
        self.more = self.spare = False


class Parts:
    """The parts of one incarnation."""

    def __init__(self, name: str, incarnation: int, settings: CacheNodeSettings, layout: BlockLayout, counts: Tally) -> None:
        self.name, self.incarnation, self.settings, self.layout, self.counts = name, incarnation, settings, layout, counts
        self.new_id = Ids().new
        self.tenants = PoolTenants(settings.tenants)
        slots = settings.pool_bytes // layout.slot_bytes
        self.slots = Slots(slots, slots_of([each.dram_bytes for each in settings.tenants], settings.pool_bytes, slots))
        events = settings.kv_events
        self.contents = Contents(self.slots.capacity, layout.block_tokens if events.endpoint and events.tokens else 0)
        self.chains = Chains(self.slots, self.contents)
        self.holders: Holders[Process, BlockPut] = Holders(self.slots)
        self.peers = Peers()
        self.drain = Drain("", counts)
        self.misses = Misses()

    def ref(self, slot: int) -> SlotRef:
        """Name a committed slot as a source."""
        generation, checksum = self.slots.generation[slot], self.slots.checksum[slot]
        return SlotRef(node=self.name, incarnation=self.incarnation, slot=slot, generation=generation, checksum=checksum)

    def grant(self, slot: int) -> SlotGrant:
        """Permit a work to write a slot."""
        return SlotGrant(self.name, self.incarnation, slot, self.slots.generation[slot])
