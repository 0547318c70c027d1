"""Messages between decodes of which one holds KV of the other's requests, see `decode.borrowing` and `decode.lending`."""

from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    MAX_BLOCKS,
    Checksum,
    Count,
    Counts,
    Name,
    Record,
    Seconds,
    SlotRef,
    TaggedRecord,
    Tenant,
    Text,
)

MAX_LENDERS = 16
"""Decodes that may be named to a request that borrows."""
GROWTH_TOKENS = 256
"""Output for which a request that borrows leaves room at its decode; for more it needs what others free, or goes elsewhere."""
Lenders = Annotated[tuple[Name, ...], Meta(max_length=MAX_LENDERS)]
Blocks = Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]


class LoanPlace(Record, frozen=True):
    """The address at which a lender answers queries to a loan, the loan's number there, and the ticket of its stream."""

    where: Annotated[str, Meta(max_length=256)]
    number: Count
    token: Annotated[bytes, Meta(max_length=64)]
    secret: Annotated[bytes, Meta(max_length=64)]
    sealed: bool


class LendBlocks(TaggedRecord, frozen=True):
    """Request to hold complete blocks of a request, at most so many and for `ttl_s`. `loan`: the borrower's number, once."""

    loan: Count
    blocks: Blocks
    ttl_s: Seconds
    tenant: Tenant = ""


class BlocksLent(TaggedRecord, frozen=True):
    """Reply of the lender, which has room for so many blocks; a refusal is a `LoanEnded`."""

    loan: Count
    blocks: Blocks
    place: LoanPlace


class FillLoan(TaggedRecord, frozen=True):
    """Request to read (block of the loan, source, first layer, stop layer) of complete blocks, one at a time."""

    loan: Count
    loads: Annotated[tuple[tuple[Count, SlotRef, Count, Count], ...], Meta(max_length=MAX_BLOCKS)]


class LoanFilled(TaggedRecord, frozen=True):
    """Reply of the lender: (block, layer, checksum) of all that was read and verified, and the blocks that failed."""

    loan: Count
    parts: Annotated[tuple[tuple[Count, Count, Checksum], ...], Meta(max_length=MAX_BLOCKS)]
    failed: Counts = ()
    corrupt: Counts = ()


class ReturnBlocks(TaggedRecord, frozen=True):
    """Message of the borrower that a loan is over."""

    loan: Count


class LoanEnded(TaggedRecord, frozen=True):
    """Message of the lender that it refuses a loan, or ends it."""

    loan: Count
    reason: Text
