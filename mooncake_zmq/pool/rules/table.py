"""The table that leases and puts need: its rows are the slots of blocks (`kv.slots`) or the entries of values. PURE."""

from collections.abc import Sequence
from typing import Protocol


class Table(Protocol):
    """Rows that clients read under leases and write by puts; each shows a generation, which is odd while it is written."""

    def pin(self, rows: Sequence[int], /) -> None:
        """Keep rows from being evicted, each as often as it is named."""

    def unpin(self, rows: Sequence[int], /) -> None:
        """End a `pin`."""

    def quarantine(self, row: int, /) -> None:
        """Keep a row that is being written from everybody, as its writer is late and may still write."""

    def free(self, row: int, /) -> None:
        """Take back a row whose writer does not write any more; it was never readable."""

    def is_readable(self, row: int, generation: int, /) -> bool:
        """Return whether what was read under this generation can still be found there."""

    def forget(self, row: int, /) -> None:
        """Let no new reader find what a readable row holds; it is free once it is not pinned."""


def report_corrupt(table: Table, row: int, generation: int) -> bool:
    """Forget a copy whose bytes did not verify. False if it is gone already."""
    if not table.is_readable(row, generation):
        return False
    table.forget(row)
    return True
