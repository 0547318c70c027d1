"""The share of a prompt's tokens that its decode is to hold, as a request asks for it. PURE."""

import math
from typing import Annotated, get_args

from msgspec import Meta, Struct

from mooncake_zmq.core.messages import Eviction, EvictionKind
from mooncake_zmq.core.selection import SINKS
from mooncake_zmq.gateway.openai.errors import invalid, quoted

KINDS: tuple[EvictionKind, ...] = get_args(EvictionKind)
MEASURED = ("pyramid",)
"""Kinds that are measured alone: later layers hold fewer tokens, which blocks do not."""


class KvBudget(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The object `mooncake` of a request: the share of its prompt's tokens that a decode holds, and how they are chosen."""

    kv_budget: Annotated[float, Meta(gt=0, le=1)]
    evict: Annotated[str, Meta(max_length=64)] = "recent"

    def kind(self) -> EvictionKind:
        """Return how tokens are chosen. Raises RequestError."""
        for kind in KINDS:
            if kind == self.evict:
                return kind
        measured = f"{self.evict} is only measured, by `mooncake-zmq bench codecs --eviction`" if self.evict in MEASURED else ""
        raise invalid("mooncake", f"evict is one of {', '.join(KINDS)}: {measured or quoted(self.evict)}")

    def eviction(self, tokens: int) -> Eviction | None:
        """Return how few tokens of a prompt are held; None: the share is all of so few. Raises RequestError."""
        eviction = Eviction(kind=self.kind(), kept=max(SINKS + 1, math.ceil(self.kv_budget * tokens)))
        return eviction if eviction.fits(tokens) else None
