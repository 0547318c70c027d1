"""Counts the KV bytes that a node has moved, by kind and peer, from the works that it starts and their results. PURE."""

from collections.abc import Iterable

from mooncake_zmq.core.messages import MAX_COUNT, MAX_TRANSFER_STATS, Moved, SlotRef
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksCopied,
    BlocksPulled,
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    CopyBlocks,
    DiskBlock,
    DiskWritten,
    PullBlocks,
    Result,
    StageComputed,
    Work,
    WriteToDisk,
)
from mooncake_zmq.kv.layout import BlockLayout

OTHERS = "others"
"""Peer under which the bytes of all peers beyond the table's limit are counted."""
COUNTED: frozenset[type] = frozenset((ComputeChunk, ComputeStage, CopyBlocks, PullBlocks, WriteToDisk))
"""Works that move KV that already existed."""


class TransferStats:
    """Byte counts since the node's start. `pending` is bounded by the works in flight."""

    def __init__(self, node: str, layout: BlockLayout) -> None:
        self._node = node
        self._layout = layout
        self._bytes: dict[tuple[str, str], int] = {}
        self._pending: dict[int, Work] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, work_id: int, work: Work) -> None:
        """Note that a work of `COUNTED` has started."""
        self._pending[work_id] = work

    def end(self, work_id: int, result: Result) -> None:
        """Count what a work of any kind has moved, now that it has ended."""
        work = self._pending.pop(work_id, None)
        match work, result:
            case ComputeChunk(), ChunkComputed():
                self._loaded(work.prefix, result.failed)
            case ComputeStage(), StageComputed():
                self._loaded(work.chunk.prefix, result.failed)
            case PullBlocks(), BlocksPulled():
                source = {load.block: load.source.node for load in work.loads}
                for block, _, _ in result.parts:
                    self._add("handoff", source[block], self._layout.part_bytes)
            case CopyBlocks(), BlocksCopied():
                for (origin, grant), checksum in zip(work.copies, result.checksums, strict=True):
                    if checksum is not None:
                        self._add(*self._kind_of(origin, grant.node), self._layout.block_bytes)
            case WriteToDisk(), DiskWritten():
                self._add("demote", "", sum(result.written) * self._layout.block_bytes)

    def totals(self) -> tuple[Moved, ...]:
        """Return all that was moved, up to what a message may say: beyond that no peer would read it."""
        return tuple([Moved(kind=kind, peer=peer, bytes=min(moved, MAX_COUNT)) for (kind, peer), moved in self._bytes.items()])

    def _loaded(self, prefix: Iterable[BlockLoad], failed: Iterable[int]) -> None:
        missed = set(failed)
        for load in prefix:
            if load.block not in missed:
                parts = load.stop_layer - load.first_layer
                kind = "reuse" if load.source.node == self._node else "load"
                self._add(kind, load.source.node, parts * self._layout.part_bytes)

    def _kind_of(self, origin: object, target: str) -> tuple[str, str]:
        if target != self._node:
            return "put", target
        if isinstance(origin, DiskBlock):
            return "promote", ""
        return "fetch", origin.node if isinstance(origin, SlotRef) else ""

    def _add(self, kind: str, peer: str, size_bytes: int) -> None:
        if not size_bytes:
            return
        key = kind, peer
        if key not in self._bytes and len(self._bytes) >= MAX_TRANSFER_STATS - len(KINDS):
            key = kind, OTHERS
        self._bytes[key] = self._bytes.get(key, 0) + size_bytes


KINDS = ("reuse", "load", "handoff", "put", "fetch", "promote", "demote")
"""Kinds of transfers: from the own slab; from another's memory into the engine; from a prefill to a decode; into a pool; from a
pool of another host; from and to the own SSD."""
