"""Contents of the blocks of one tier: the block that each follows, and its tokens, for KV events of their copies. PURE."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key
from mooncake_zmq.kv.events import TOKEN_BYTES, BlocksStored, Medium

NONE = bytes(KEY_BYTES)


class Content(NamedTuple):
    """The contents of one block: the key of the block that it follows (None: it begins a prompt, or that is not known), and its
    tokens (int32 bytes; empty: not known)."""

    parent: Key | None = None
    tokens: bytes = b""


UNKNOWN = Content()


class Contents:
    """Columns by slot, which stand until the slot's next block: 16 bytes, and with tokens 4 for each and one more, so 145 for
    a block of 32."""

    def __init__(self, slots: int, block_tokens: int) -> None:
        """`block_tokens`: tokens kept of each block; 0: none, and of a block only its parent."""
        self.token_bytes = block_tokens * TOKEN_BYTES
        self._parents = bytearray(slots * KEY_BYTES)
        self._tokens = np.zeros(slots * self.token_bytes, np.uint8).data  # takes memory only as it is first written
        self._known = bytearray(slots if block_tokens else 0)
        """1: the tokens are known."""

    def put(self, slot: int, parent: Key | None, tokens: bytes = b"") -> None:
        """The slot has this block now. Tokens that do not fit are not kept."""
        start = slot * KEY_BYTES
        self._parents[start : start + KEY_BYTES] = parent or NONE
        if size := self.token_bytes:
            fits = self._known[slot] = self.fits(tokens)
            if fits:
                self._tokens[slot * size : (slot + 1) * size] = tokens

    def fits(self, tokens: bytes) -> bool:
        """Are these as many tokens as a block has?"""
        return len(tokens) == self.token_bytes > 0

    def parent(self, slot: int) -> Key | None:
        """The block that this one follows, wherever that stands now."""
        parent = bytes(self._parents[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])
        return None if parent == NONE else parent

    def of(self, slot: int) -> Content:
        """The known content of the slot's block."""
        size = self.token_bytes
        known = size and self._known[slot]
        return Content(self.parent(slot), bytes(self._tokens[slot * size : (slot + 1) * size]) if known else b"")


def in_chains(medium: Medium, blocks: Iterable[tuple[Key, Content]]) -> list[BlocksStored]:
    """Stored events for these blocks, whatever their order: an unbroken part of a chain in one, parents before children.

    Blocks of which nothing is known share one event, which has neither parent nor tokens.
    """
    contents = dict(blocks)
    children: dict[Key, list[Key]] = {}
    heads: list[Key] = []
    for key, (parent, _) in contents.items():
        if parent is not None and parent in contents:
            children.setdefault(parent, []).append(key)
        else:
            heads.append(key)
    unknown = [key for key in heads if contents[key] == UNKNOWN and key not in children]
    heads = [key for key in reversed(heads) if contents[key] != UNKNOWN or key in children]
    events: list[BlocksStored] = []
    while heads:
        run = [heads.pop()]
        while run[-1] in children:
            first, *others = children.pop(run[-1])
            heads += reversed(others)
            run.append(first)
        for _, some in groupby(run, lambda key: bool(contents[key].tokens)):
            part = list(some)
            tokens = b"".join([contents[key].tokens for key in part])
            events.append(BlocksStored(tuple(part), medium, contents[part[0]].parent or b"", tokens))
    # Only false contents make a block its own ancestor, but their sender is not known here.
    unknown += [key for circle in children.values() for key in circle]
    return [*events, BlocksStored(tuple(unknown), medium)] if unknown else events
