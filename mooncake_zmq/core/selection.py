"""Attention to few of many tokens, as a decode orders it and its engine does it. PURE."""

from msgspec import Struct

SINKS, RECENT = 4, 32
"""The first tokens, and the last ones, to which a step attends however it chooses others: measured in a prototype; PQCache's
scripts have 32 and 32."""


class Selection(Struct, frozen=True, gc=False):
    """A way to choose the tokens that a step attends to beside the first and last ones, and their number."""

    kind: str
    """One of `decode.selection`."""
    tokens: int
