"""Keeps the ids of long texts between special tokens, so that the next turn of a conversation has only its new text tokenized.

Special tokens cut a text before it is tokenized, so the ids of what lies between two of them depend on nothing else: they are
the same wherever the text stands again. A chat template writes one around each message.
"""

import hashlib
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from mooncake_zmq.engine.recent_values import RecentValues

SHORTEST = 64
"""Characters of a text below which it is tokenized each time: to find it would take as long."""
MAX_BYTES = 64 << 20
"""Limit on the ids kept, 4 bytes each: the least recently used texts go first."""
PROBES = ("a", " a", "a ", "A b", "\n", "\n\na", "1 2", "  ", "é", "▁a")
"""Texts by which a tokenizer shows whether it treats the beginning of a text differently from the rest."""


class Added(Protocol):
    """The part of `tokenizers.AddedToken` that decides where it is found in a text."""

    @property
    def content(self) -> str: ...
    @property
    def lstrip(self) -> bool: ...
    @property
    def rstrip(self) -> bool: ...
    @property
    def single_word(self) -> bool: ...
    @property
    def normalized(self) -> bool: ...


Encode = Callable[[Sequence[str]], list[list[int]]]


def cuts(added: Sequence[tuple[int, Added]], encode: Encode) -> dict[str, int]:
    """Return the tokens, by name, at which a text may be cut before it is tokenized; empty: nowhere. `encode` tokenizes several
    texts. Tokens that are looked for in the normalized text are found inside the pieces. If any of the others takes blanks or
    depends on its neighbours, or if the tokenizer itself shows that it treats the beginning of a text differently, no text is
    cut."""
    names = {token.content: number for number, token in added if not token.normalized and token.content}
    plain = not any(token.lstrip or token.rstrip or token.single_word for _, token in added)
    if not names or not plain:
        return {}
    name, number = next(iter(names.items()))
    alone = encode(PROBES)
    amid = encode([f"{name}{probe}{name}{probe}" for probe in PROBES])
    return names if all(found == [number, *ids, number, *ids] for found, ids in zip(amid, alone, strict=True)) else {}


class TextCache:
    """The ids of texts, each for the clients that may know of each other. Safe to share between threads."""

    def __init__(self, encode: Encode, cuts: dict[str, int], max_bytes: int = MAX_BYTES) -> None:
        self._encode, self._cuts = encode, cuts
        longest_first = sorted(cuts, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if cuts else None
        self._kept: RecentValues[array[int]] = RecentValues(max_bytes)

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept."""
        return self._kept.bytes

    def encode(self, text: str, salt: str | None) -> "array[int]":
        """Return the ids of a text. What was kept for another `salt` is not used, as its speed would show that someone else has
        sent the same text. None: nothing is kept or used."""
        if self._cut is None or salt is None or len(text) < SHORTEST:
            return array("i", self._encode([text])[0])
        pieces = self._cut.split(text)
        known = {piece: array("i", (self._cuts[piece],)) for piece in pieces if piece in self._cuts}
        long = {piece: _key(salt, piece) for piece in pieces if len(piece) >= SHORTEST}
        known |= {piece: ids for piece, name in long.items() if (ids := self._kept.find(name)) is not None}
        new = [piece for piece in dict.fromkeys(pieces) if piece and piece not in known]
        for piece, made in zip(new, self._encode(new), strict=True):
            known[piece] = array("i", made)
            if piece in long:
                self._kept.keep(long[piece], known[piece])
        whole = array("i")
        for piece in filter(None, pieces):
            whole += known[piece]
        return whole


def _key(salt: str, piece: str) -> bytes:
    """Return a digest of both, of a kind for which no two texts with the same one can be found."""
    return hashlib.blake2b(piece.encode(), key=hashlib.blake2b(salt.encode()).digest(), digest_size=32).digest()
