"""The blocks that a KV cache group of vLLM needs of a prefix: all of them, those of a window, or one state. PURE.

A model with several kinds of attention has a group of layers for each kind, and each group has its own block for the same
tokens. A prefix can be loaded up to any length at which every group has what it needs; the rule is that of vLLM's own prefix
cache (`find_longest_cache_hit` of its managers).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

STATE_TOKENS = 2
"""A state is a window of the block before the next token: the last token computed, and the next one."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `window`: the number of tokens that the next one attends to, itself included; 0: all. `chunk`: the
    number of tokens of a chunk beyond which none is attended to; 0: there are no chunks. `is_state`: a block holds the state
    after its last token, and most tokens have none."""

    window: int = 0
    chunk: int = 0
    is_state: bool = False

    @property
    def needs_all(self) -> bool:
        """Return whether a prefix needs all blocks of this group."""
        return not (self.window or self.chunk)

    def first(self, stop: int, block_tokens: int) -> int:
        """Return the first block that a prefix of `stop` blocks needs of this group."""
        if self.chunk:
            return stop * block_tokens // self.chunk * self.chunk // block_tokens
        return max(0, (stop * block_tokens - self.window + 1) // block_tokens) if self.window else 0


ATTENTION = Group()
"""A group of full attention, which single-group models have."""
STATE = Group(window=STATE_TOKENS, is_state=True)


def longest(groups: Sequence[Group], there: Sequence[Sequence[bool]], first: int, block_tokens: int) -> int:
    """Return the most blocks of a prefix that can be had if its first `first` blocks are there: the largest number at which
    each group has what it needs.

    `there`: for each group, whether its blocks from `first` on are stored; all groups have as many.
    """
    runs = [list(accumulate(row, lambda run, is_there: run + 1 if is_there else 0, initial=0)) for row in there]
    for stop in range(first + len(there[0]), first, -1):
        needs = (stop - max(first, group.first(stop, block_tokens)) for group in groups)
        if all(run[stop - first] >= needed for run, needed in zip(runs, needs, strict=True)):
            return stop
    return first


def fitting(groups: Sequence[Group], first: int, stop: int, room: int, block_tokens: int) -> list[range]:
    """Return, for each group, which of the blocks from `first` to `stop` are to be saved if `room` blocks may be in all.

    If all fit, they are all. Otherwise they are those that the longest prefix that fits needs: a window's other blocks serve
    shorter prefixes only, and what is left for later the engine may have freed by then. The range of a group of states has as
    many blocks as it may save.
    """

    def needed(end: int) -> list[range]:
        return [range(max(first, group.first(end, block_tokens)), end) for group in groups]

    if len(groups) * (stop - first) <= room:
        return [range(first, stop)] * len(groups)
    # A longer prefix may need fewer blocks: one that ends with a chunk needs none of that group.
    return next(ranges for end in range(stop, first - 1, -1) if sum(map(len, ranges := needed(end))) <= room)
