"""What may come next in an answer that follows a grammar, by llguidance. The table of the vocabulary is made once, where a
constraint is first asked for. `gateway.openai.constraints` writes grammars, this reads them.

A grammar may be written so that the library, which knows bounds for most of its work and not for all, never comes back: when it
reads it, or many tokens later. So this runs in a process of its own alone, see `engine.grammars`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from mooncake_zmq.core.grammar import links

if TYPE_CHECKING:  # else where it is needed: gateways and engines load the rest of this too
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILED = 32
"""Grammars kept ready, the last ones used: a copy of one takes 15 us, compiling it a millisecond or, at worst, a second."""
MAX_LINKS = 4000
"""Of one grammar, see `core.grammar`. A gateway lets a quarter of it through."""
SHOWN_CHARS = 200


class ConstraintError(Exception):
    """A constraint that is none, or that cannot be followed within the limits: in one line."""


class ConstraintNotReady(ConstraintError):
    """It was not read in time, or is not wanted any more, which says nothing about it."""


class Words(Protocol):
    """What is needed of a tokenizer; `engine.tokenizer.Tokenizer` is one."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]

    def piece(self, token: int) -> bytes: ...
    def encode(self, text: str, *, special: bool = True) -> list[int]: ...


class NamedWords(Struct, frozen=True):
    """The tokens of a vocabulary that are no text, and how many there are in all: as another process is told."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    pieces: dict[int, bytes]

    @classmethod
    def of(cls, words: Words, vocab_size: int) -> "NamedWords":
        """`vocab_size`: ids that the engine gives logits for."""
        named = sorted(words.special_ids.union(words.eos_ids))
        return cls(vocab_size, words.eos_ids, words.special_ids, {token: words.piece(token) for token in named})


class Bytes:
    """A model's vocabulary with a token for each byte and its special ones, and no others: the table of it is made at once. A
    grammar that has answers in the one has them in the other."""

    def __init__(self, named: NamedWords) -> None:
        self.vocab_size = named.vocab_size
        self.eos_ids = named.eos_ids
        self.special_ids = named.special_ids
        plain = (token for token in range(named.vocab_size) if token not in named.pieces)
        self._ids = {bytes([byte]): token for byte, token in zip(range(256), plain, strict=False)}
        self._pieces = {token: piece for piece, token in self._ids.items()} | named.pieces

    def piece(self, token: int) -> bytes:
        return self._pieces.get(token, b"")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text.encode(errors="replace")]


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: "LLMatcher", eos_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_ids = list(eos_ids)
        self._vocab_size = vocab_size
        self._ended = False

    def feed(self, token: int) -> None:
        """It stands there now. Behind the first end of sequence only further ones do. Raises ConstraintError."""
        if token in self._eos_ids:
            if not self._ended and not self._matcher.is_accepting():
                raise ConstraintError("the answer ended where its grammar does not")
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            raise ConstraintError(_reason(self._matcher) or f"token {token} does not follow the grammar")

    def allowed(self) -> bytes:
        """Which ids may come next, the lowest bit of each byte first. The end of sequence: exactly where the grammar accepts.
        Raises ConstraintError."""
        bits = bytearray(-(-self._vocab_size // 8) if self._ended else self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise ConstraintError(_reason(self._matcher))
        accepts = self._ended or self._matcher.is_accepting()
        for token in self._eos_ids:
            bit = 1 << token % 8
            bits[token // 8] = bits[token // 8] | bit if accepts else bits[token // 8] & ~bit
        if not any(bits):
            raise ConstraintError("no token can follow")
        return bytes(bits)


class Compiler:
    """Matchers over one vocabulary. It goes deep: its thread needs a large stack."""

    def __init__(self, words: Callable[[], Words], vocab_size: int) -> None:
        """`words`: opens the tokenizer. `vocab_size`: ids that the engine gives logits for."""
        self._words = words
        self._vocab_size = vocab_size
        self._table: LLTokenizer | None = None
        self._eos_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[bytes, LLMatcher | str] = OrderedDict()
        """By digest; why it is refused, of those that are."""

    def matcher(self, constraint: bytes, answer: Sequence[int] = ()) -> Matcher:
        """Behind the answer so far. Raises ConstraintError."""
        digest = digest_of(constraint)
        found = self._compiled.get(digest)
        if found is None:
            found = self._compile(constraint)
            while len(self._compiled) >= MAX_COMPILED:
                self._compiled.popitem(last=False)
            self._compiled[digest] = found
        self._compiled.move_to_end(digest)
        if isinstance(found, str):
            raise ConstraintError(found)
        matcher = Matcher(found.deep_copy(), self._eos_ids, self._vocab_size)
        for token in answer:
            matcher.feed(token)
        return matcher

    def prepare(self) -> "LLTokenizer":
        """Make the table of the vocabulary, if that is not done. Raises ConstraintError."""
        self._table = self._table or self._make_table()
        return self._table

    def _compile(self, constraint: bytes) -> "LLMatcher | str":
        from llguidance import LLMatcher

        table = self.prepare()
        try:
            grammar = constraint.decode()
            if (found := links(grammar)) > MAX_LINKS:
                return f"its {found} rules and references are more than {MAX_LINKS}"
            matcher = LLMatcher(table, grammar, log_level=0, limits=_limits())
        except (ValueError, RecursionError) as error:
            return f"no grammar: {error}"
        return _reason(matcher) if matcher.is_error() else matcher

    def _make_table(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._words(), self._vocab_size)
        self._eos_ids = vocabulary.eos_ids
        table = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._vocab_size)
        vocabulary.greedy = table.greedy_tokenize
        return table


def digest_of(constraint: bytes) -> bytes:
    """What a grammar is known by."""
    return hashlib.blake2b(constraint, digest_size=16).digest()


def _limits() -> "LLParserLimits":
    """At most some 20 ms a token and 25 MB a grammar, measured with grammars written for that; plain ones need 1 % of it."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_items_in_row=1_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class _Vocabulary:
    """A tokenizer as llguidance's `TokenizerWrapper` takes it."""

    bos_token_id = None

    def __init__(self, words: Words, vocab_size: int) -> None:
        self.eos_ids = tuple(token for token in words.eos_ids if token < vocab_size)
        if not self.eos_ids:
            raise ConstraintError("the model has no token that ends an answer")
        self.eos_token_id = self.eos_ids[0]
        known = min(vocab_size, words.vocab_size)
        self.tokens = [words.piece(token) for token in range(known)] + [b""] * (vocab_size - known)
        self.special_token_ids = sorted(token for token in words.special_ids if token < vocab_size)
        self.greedy: Callable[[str], list[int]] = lambda text: []
        self._words = words

    def __call__(self, raw: bytes) -> list[int]:
        """Text that a grammar leaves no choice about, as the model would write it; some tokenizers put a space before it."""
        text = raw.decode(errors="replace")
        ids = self._words.encode(text, special=False)
        same = max(ids, default=0) < len(self.tokens) and b"".join(self.tokens[token] for token in ids) == raw
        return ids if same else self.greedy(text)


def _reason(matcher: "LLMatcher") -> str:
    """The library's words, which may quote the grammar at any length."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:SHOWN_CHARS]
