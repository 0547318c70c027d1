"""Tokens that may come next in an answer that follows a grammar, by llguidance. The table of the vocabulary is made once, when
a constraint is first used. `gateway.openai.constraints` writes grammars, this module reads them.

The library bounds most of its work but not all: on some grammars it never returns, when it reads them or many tokens later. So
this runs only in a process of its own, see `engine.grammars`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from mooncake_zmq.core.grammar import links

if TYPE_CHECKING:  # imported where it is needed: gateways and engines load this module too
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILED = 32
"""Compiled grammars that are kept, the last ones used: a copy of one takes 15 us, compiling it a millisecond or, at worst, a
second."""
MAX_LINKS = 4000
"""Links of one grammar at most, see `core.grammar`. A gateway admits a quarter of it."""
SHOWN_CHARS = 200
OVERLAPPING = "oneOf whose choices may both hold is not supported: use anyOf"


class ConstraintError(Exception):
    """A constraint that is invalid, or that cannot be followed within the limits: in one line."""


class ConstraintNotReady(ConstraintError):
    """The constraint was not read in time, or is not wanted any more, which says nothing about it."""


class Words(Protocol):
    """The methods of a tokenizer that a grammar needs; `engine.tokenizer.Tokenizer` has them."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]

    def piece(self, token: int) -> bytes: ...
    def encode(self, text: str, *, special: bool = True) -> Sequence[int]: ...


class NamedWords(Struct, frozen=True):
    """The special tokens of a vocabulary, and the number of all its tokens, with room for each byte: the form in which they are
    sent to another process."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    pieces: dict[int, bytes]

    @classmethod
    def of(cls, words: Words, vocab_size: int) -> "NamedWords":
        """Read them from a tokenizer. `vocab_size`: ids that the engine gives logits for."""
        named = sorted(words.special_ids.union(words.eos_ids))
        room = max(vocab_size, 256 + len(named))
        return cls(room, words.eos_ids, words.special_ids, {token: words.piece(token) for token in named})


class Bytes:
    """A model's vocabulary with a token for each byte and its special ones, and no others: its table is made quickly. A grammar
    has an answer in this vocabulary if and only if it has one in the model's, unless that lacks bytes."""

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
    """The position of one answer in its grammar."""

    def __init__(self, matcher: "LLMatcher", eos_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_ids = list(eos_ids)
        self._vocab_size = vocab_size
        self._ended = False

    def feed(self, token: int) -> None:
        """Append a token to the answer; behind an end of sequence only further ones may follow. Raises ConstraintError."""
        if token in self._eos_ids:
            if not self._ended and not self._matcher.is_accepting():
                raise ConstraintError("the answer ended where its grammar does not")
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            raise ConstraintError(_reason(self._matcher) or f"token {token} does not follow the grammar")

    def allowed(self) -> bytes:
        """Return a bit for each id, set if it may come next, the lowest bit of each byte first. The end of sequence may come
        exactly where the grammar accepts. Raises ConstraintError."""
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
    """Makes matchers over one vocabulary. It recurses deeply: its thread needs a large stack."""

    def __init__(self, words: Callable[[], Words], vocab_size: int) -> None:
        """`words`: opens the tokenizer. `vocab_size`: ids that the engine gives logits for."""
        self._words = words
        self._vocab_size = vocab_size
        self._table: LLTokenizer | None = None
        self._eos_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[bytes, LLMatcher | str] = OrderedDict()
        """By digest: the compiled grammar, or the reason of its refusal."""

    def matcher(self, constraint: bytes, answer: Sequence[int] = ()) -> Matcher:
        """Return a matcher behind the answer so far. Raises ConstraintError."""
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
    """Return the identity of a grammar."""
    return hashlib.blake2b(constraint, digest_size=16).digest()


def _limits() -> "LLParserLimits":
    """Return limits of at most some 20 ms a token and 25 MB a grammar, measured with adversarial grammars; plain ones need 1 %
    of it."""
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
    """A tokenizer in the form that llguidance's `TokenizerWrapper` takes."""

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
        """Encode text that the grammar forces, as the model would write it; some tokenizers put a space before it."""
        text = raw.decode(errors="replace")
        ids = self._words.encode(text, special=False)
        same = max(ids, default=0) < len(self.tokens) and b"".join(self.tokens[token] for token in ids) == raw
        return [*ids] if same else self.greedy(text)


def _reason(matcher: "LLMatcher") -> str:
    """Return the library's message, which may quote the grammar at any length."""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:SHOWN_CHARS]
    return OVERLAPPING if "coerce_one_of" in text else text
