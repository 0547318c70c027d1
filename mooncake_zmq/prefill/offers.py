"""Computed blocks that other requests may reuse: here from the end of their chunk on, and in the pool by puts. PURE."""

from collections.abc import Sequence

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.actor_parts import Ids
from mooncake_zmq.core.messages import SlotsReserved
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClient, PutEnded
from mooncake_zmq.prefill.job import Job, tokens_of
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.slab_announcer import SlabAnnouncer
from mooncake_zmq.prefill.waiting import Waiting


class Offers:
    """Offer the blocks of one prefill, and hold the pins of the slots that puts read."""

    def __init__(
        self,
        *,
        settings: PrefillSettings,
        layout: BlockLayout,
        slab: Slab,
        pool: PoolClient,
        announcer: SlabAnnouncer,
        waiting: Waiting,
        ids: Ids,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._pool = pool
        self._announcer = announcer
        self._waiting = waiting
        self._ids = ids

    def keep_chunk(self, now: float, job: Job) -> list[Effect]:
        """Make the complete blocks of the chunk that ended reusable here, and offer them to the pool."""
        slots = self._slab.slots
        first, base = job.chunk_first_block, len(job.prefix)
        stop = min(job.chunk_stop // self._layout.block_tokens, job.exact_blocks)
        kept = job.new_slots[first - base : stop - base]
        if not kept:
            return []
        keys = job.request.keys[first:stop]
        if self._settings.own_reuse:  # a block that is never looked up needs no name
            self._announcer.computed([key for slot, key in zip(kept, keys, strict=True) if slots.name(slot, key)])
        slots.commit_all(kept, job.checksums[first - base : stop - base])
        effects = self._put(now, job, first, kept, more=job.computed < job.length)
        return effects + self._waiting.end_found(keys)

    def own_hits(self, now: float, job: Job) -> list[Effect]:
        """Offer a job's own hits to the pool, which may have evicted them."""
        return self._put(now, job, 0, job.own_slots) if job.own_slots else []

    def _put(self, now: float, job: Job, first: int, slots: Sequence[int], *, more: bool = False) -> list[Effect]:
        """Put the blocks from index `first` on, which are in `slots`; `more` of them follow soon."""
        request, stop, size = job.request, first + len(slots), self._layout.block_tokens * 4
        self._slab.slots.pin(slots)
        effects = self._pool.put(
            now,
            self._ids.new(),
            request.keys[first:stop],
            self._slab.refs(slots),
            tuple(slots),
            parent=request.keys[first - 1] if first else None,
            tokens=tokens_of(request)[first * size : stop * size],
            tenant=request.tenant,
            more=more,
            spare=job.spare,
        )
        if effects is None:
            self._slab.slots.unpin(slots)
            return []
        return effects

    def on_reserved(self, now: float, _sender: str, message: SlotsReserved) -> list[Effect]:
        """Copy blocks into the slots that the pool granted."""
        return self.ended(self._pool.on_reserved(now, message, self._ids.new()))

    def ended(self, ended: PutEnded) -> list[Effect]:
        """Unpin the slots of puts that ended."""
        for token in ended.tokens:
            assert isinstance(token, tuple)
            self._slab.slots.unpin(token)
        return ended.effects

    @property
    def pinned(self) -> list[int]:
        """Slab slots pinned for puts, each as often as it is pinned."""
        return [slot for token in self._pool.tokens if isinstance(token, tuple) for slot in token]
