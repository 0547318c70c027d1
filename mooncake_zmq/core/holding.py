"""The longest request that decodes hold: gateways refuse longer ones, and conductors keep the decodes that it needs. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from mooncake_zmq.core.messages import MAX_LENDERS


@dataclass(frozen=True, slots=True)
class Holding:
    """The KV tokens of one decode, and those of them that it lends at most; whether it takes requests, and borrows for them."""

    tokens: int
    lends: int
    takes: bool
    borrows: bool


def longest_request(decodes: Sequence[Holding], block_tokens: int) -> int:
    """Return the most tokens of prompt and output together, in whole blocks: what the largest decode that takes requests has,
    with what the MAX_LENDERS others that lend most lend it if it borrows; 0 if none takes requests."""
    lent = [each.lends // block_tokens for each in decodes]
    largest = nlargest(MAX_LENDERS + 1, range(len(decodes)), key=lent.__getitem__)
    blocks = [0]
    for place, each in enumerate(decodes):
        if each.takes:
            others = sum([lent[other] for other in largest if other != place][:MAX_LENDERS])
            blocks.append(each.tokens // block_tokens + others * each.borrows)
    return max(blocks) * block_tokens
