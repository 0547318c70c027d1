"""The ledger of KV that decodes lend each other: what they reported, less what was promised since. PURE."""

from collections.abc import Collection, Sequence
from typing import Final

from mooncake_zmq.conductor.decodes import DecodeNode

MAX_LENDERS: Final = 16


def borrower(nodes: Sequence[DecodeNode], need_tokens: int, prompt_tokens: int, without: Collection[str]) -> DecodeNode | None:
    """Return the decode that has to borrow least for a request that no decode has room for; None if the others lend too
    little. Only KV of the prompt is borrowed."""
    able = [node for node in nodes if node.borrows and node.places >= 1 and not node.draining and node.name not in without]
    best = max(able, key=lambda node: node.free, default=None)
    if best is None:
        return None
    lent = sum([_left(lender) for lender in lenders(nodes, best, without)])
    return best if need_tokens - best.free <= min(prompt_tokens, lent) else None


def lenders(nodes: Sequence[DecodeNode], borrower: DecodeNode, without: Collection[str]) -> list[DecodeNode]:
    """Return those that lend, in the order in which they are asked: what lends most first, so that few are."""
    able = [node for node in nodes if _left(node) > 0 and node is not borrower and node.name not in without]
    return sorted(able, key=lambda node: (-_left(node), node.name))[:MAX_LENDERS]


def promise(lenders: Sequence[DecodeNode], lacking: int) -> None:
    """Deduct what a request lacks from what these lend, until they report again."""
    for node in lenders:
        taken = min(_left(node), lacking)
        node.lendable -= taken
        lacking -= taken


def _left(node: DecodeNode) -> int:
    """Return the KV tokens that a decode lends, less those of requests that have yet to reserve theirs."""
    return min(node.lendable, node.free)
