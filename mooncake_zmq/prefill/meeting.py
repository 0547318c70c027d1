"""One job's cached blocks that are fetched from the last one on, while the engine computes the first ones. PURE.

Where both ends meet follows from what was measured: a part of the head is computed if that ends before what is missing behind
it will have come. Blocks come in any order, and some never: the engine computes what is missing before those that are here.
"""

from dataclasses import dataclass, field

from mooncake_zmq.core.messages import SlotRef

EXPECTED_BLOCKS = 8
"""Number of blocks that came, as much as which the expected rate counts."""
LEAST_PART = 4
"""Divisor of the usual chunk of a head: a shorter one costs nearly a whole pass over the weights, and is worth no wait."""


@dataclass(slots=True)
class Meeting:
    """The blocks that are fetched for one job. Blocks are numbered as those of the prompt."""

    first: int
    """The first block of the lease."""
    stop: int
    """The block after the last one that is fetched."""
    block_s: float
    """Expected seconds for each block that comes."""
    began_at: float
    grows: bool = True
    """Whether more blocks may come."""
    latest_at: float = 0.0
    """When the latest block came."""
    came: int = 0
    """Number of blocks that came."""
    arrived: dict[int, SlotRef] = field(default_factory=dict)
    """Blocks that came and are not loaded yet."""
    remote: set[int] = field(default_factory=set)
    """Those of them that came from another host."""
    computed: int = 0
    """Number of blocks that were computed while those behind them were fetched."""

    def take(self, now: float, blocks: dict[int, SlotRef], remote: set[int], head: int) -> None:
        """Record blocks that came; those before the block `head` are computed by now."""
        self.came += len(blocks)
        self.latest_at = now
        self.arrived |= {block: ref for block, ref in blocks.items() if head <= block < self.stop}
        self.remote |= remote

    def lose(self) -> None:
        """Nothing more comes, and what came cannot be read any more."""
        self.grows = False
        self.arrived.clear()

    def after_run(self, block: int) -> int:
        """Return the first block from `block` on that is not here."""
        while block in self.arrived:
            block += 1
        return block

    def take_run(self, block: int) -> list[SlotRef]:
        """Remove and return the blocks that are here from `block` on."""
        return [self.arrived.pop(each) for each in range(block, self.after_run(block))]

    def gap_stop(self, block: int) -> int | None:
        """Return the next block after `block` that is here; None if there is none."""
        return min([each for each in self.arrived if each > block], default=None)

    def missing(self, block: int) -> int:
        """Return how many blocks from `block` on are still to come."""
        return max(0, self.stop - block - sum([each >= block for each in self.arrived]))

    def remaining_s(self, now: float, missing: int) -> float:
        """Return in how many seconds so many blocks will have come. One that is overdue is expected after as long again."""
        latest_at = max(self.began_at, self.latest_at)
        block_s = (EXPECTED_BLOCKS * self.block_s + latest_at - self.began_at) / (EXPECTED_BLOCKS + self.came)
        waited_s = now - latest_at
        return max(missing * block_s - waited_s, waited_s)

    def head_blocks(self, now: float, block: int, *, compute_s: float, least: int, most: int) -> int:
        """Return how many blocks from `block` on to compute next, each in `compute_s`: half of those that are computed before
        the others have come, but at least `least` and at most `most`, the lengths of chunks. 0 if it is not worth a chunk."""
        missing = self.missing(block)
        if not missing:
            return 0
        remaining_s = self.remaining_s(now, missing)
        blocks = round(remaining_s / (remaining_s / missing + compute_s)) if remaining_s > 0 else 0
        if blocks < min(missing, max(1, least // LEAST_PART)):
            return 0
        gap = (self.gap_stop(block) or self.stop) - block
        return min(blocks, max(least, blocks // 2), most, gap)
