"""Hints of a request about its KV in `kv_transfer_params`: where to look first, and what is still being saved. PURE.

Any client of a vLLM can send any hint. Stores are named, never addressed: a name that none of ours has is ignored, and a wait
for blocks that do not come delays only that request, up to a limit in the settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SOURCES = "mooncake_zmq.sources"
COMING_TOKENS = "mooncake_zmq.coming_tokens"
MAX_SOURCES = 16
MAX_NAME = 64
MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class Hints:
    """`sources`: names of stores. `coming_tokens`: the KV of so many tokens is stored, or is being saved right now."""

    sources: tuple[str, ...] = ()
    coming_tokens: int = 0


NO_HINTS = Hints()


def as_parameters(sources: Sequence[str], coming_tokens: int) -> dict[str, Any]:
    """Return the hints as `kv_transfer_params`; empty if there are none."""
    said: dict[str, Any] = {SOURCES: list(sources)} if sources else {}
    return said | ({COMING_TOKENS: coming_tokens} if coming_tokens else {})


def read(parameters: object) -> Hints:
    """Return the hints in any received value; whatever is malformed gives no hint."""
    if not isinstance(parameters, Mapping):
        return NO_HINTS
    names, coming = parameters.get(SOURCES), parameters.get(COMING_TOKENS)
    if not isinstance(names, list) or len(names) > MAX_SOURCES or not all(_is_name(name) for name in names):
        names = []
    if type(coming) is not int or not 0 <= coming <= MAX_TOKENS:
        coming = 0
    return Hints(tuple(names), coming)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME
