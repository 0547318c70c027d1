"""Turns the tokens of a growing answer into text that never ends inside a character."""

from typing import Final

from mooncake_zmq.gateway.served_model import Tokenizer

REPLACEMENT: Final = "\ufffd"
"""The text of bytes that are not, or not yet, a character."""
PENDING_TOKENS_MAX: Final = 16
"""A character has at most 4 bytes: so many tokens that end in none are invalid bytes, and become text as they are."""


class TokenStream:
    """The text of a growing sequence of tokens.

    The text of token n can depend on its left neighbour (a space may be dropped at the start), so `_ids` begins with the
    last emitted piece, which ends at `_read`; each step decodes both it and the whole, and emits what the whole adds.
    Where a text is exactly the bytes of its tokens, nothing depends on the emitted text, and none of it is kept: most tokens
    are then looked up by themselves.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        """Begin an empty sequence; `special`: its text has the names of special tokens."""
        self._tokenizer = tokenizer
        self._special = special
        self._joins_bytes = tokenizer.joins_bytes
        self._text_of = tokenizer.texts(special)
        self._ids: list[int] = []
        self._read = 0
        self._emitted = ""
        """The text of the ids that end at `_read`."""

    def push(self, token: int) -> str:
        """Add a token, and return the text that is complete with it."""
        if self._joins_bytes and not self._ids:
            text = self._text_of(token)
            if text and not text.endswith(REPLACEMENT):
                return text
        self._ids.append(token)
        return self._emit(len(self._ids) - self._read > PENDING_TOKENS_MAX)

    def flush(self) -> str:
        """Return the text that is still held back, complete or not."""
        return self._emit(True)

    def _emit(self, whole: bool) -> str:
        emitted = self._emitted
        text = self._tokenizer.decode(self._ids, special=self._special)
        if len(text) <= len(emitted) or (text.endswith(REPLACEMENT) and not whole):
            if whole:  # e.g. special tokens: to keep them would make each further one cost more
                del self._ids[self._read :]
            return ""
        if self._joins_bytes:
            self._ids.clear()
            return text
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._emitted = self._tokenizer.decode(self._ids, special=self._special)
        return text[len(emitted) :]
