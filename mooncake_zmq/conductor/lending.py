"""The ledger of KV that decodes lend each other: what they reported, less what was promised to requests on their way. PURE."""

from collections.abc import Collection

from mooncake_zmq.conductor.decodes import DecodeNode
from mooncake_zmq.core.messages import MAX_LENDERS


def borrowing(
    nodes: Collection[DecodeNode], need_tokens: int, prompt_tokens: int, tenant: str
) -> tuple[DecodeNode, dict[str, int]] | None:
    """Return the decode that has to borrow least for a request that no decode has room for, and the KV tokens of each decode
    that is asked for them, what lends most first, so that few are; None if too little is lent. Only KV of the prompt is
    borrowed. A tenant that has something at a decode leaves room to others there, and so does not borrow behind it."""
    largest = sorted((node for node in nodes if _left(node) > 0), key=lambda node: (-_left(node), node.name))
    largest = largest[: MAX_LENDERS + 1]
    borrowers = [node for node in nodes if node.borrows and node.places >= 1 and tenant not in node.tenants]
    for borrower in sorted(borrowers, key=lambda node: -node.free):
        lacking = max(0, need_tokens - borrower.free)
        if lacking > prompt_tokens:
            return None
        wanted = max(lacking, prompt_tokens - borrower.own_tokens)
        lent: dict[str, int] = {}
        for lender in [node for node in largest if node is not borrower][:MAX_LENDERS]:
            lent[lender.name] = min(_left(lender), wanted)
            wanted -= lent[lender.name]
        if sum(lent.values()) >= lacking:
            return borrower, lent
    return None


def _left(node: DecodeNode) -> int:
    """Return the KV tokens that a decode lends, less those of requests that have yet to reserve theirs."""
    return min(node.lendable, node.free)
