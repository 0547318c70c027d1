"""What may come next in an answer that follows a grammar, by llguidance. The table of the vocabulary is made once, where a
constraint is first asked for. What is asked is none of its business: `gateway.constraints` writes grammars, this reads them."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.grammar import links

if TYPE_CHECKING:  # else where it is needed: to load it takes as long as half of a node's start
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILED = 32
"""Grammars kept ready, the last ones used: a copy of one takes 15 us, compiling it a millisecond or, at worst, a second."""
MAX_COMPILE_S = 8.0
"""Of one grammar, in its thread's own time: far beyond what a gateway lets through, so that no engine refuses that."""
MAX_WAIT_S = 20.0
"""A step waits for a grammar, and all answers in the batch with it."""
MAX_LINKS = 4000
"""Of one grammar, see `core.grammar`. A gateway lets a quarter of it through."""
COMPILE_STACK_BYTES = 256 << 20
"""The library goes one call deeper, of at most 6 KB, for each link of a chain, and ends the process where the stack does."""
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


class Bytes:
    """A model's vocabulary with a token for each byte and its special ones, and no others: the table of it is made at once. A
    grammar that has answers in the one has them in the other."""

    def __init__(self, words: Words, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = words.eos_ids
        self.special_ids = words.special_ids
        named = self.special_ids.union(self.eos_ids)
        plain = (token for token in range(vocab_size) if token not in named)
        self._ids = {bytes([byte]): token for byte, token in zip(range(256), plain, strict=False)}
        self._pieces = {token: piece for piece, token in self._ids.items()} | {token: words.piece(token) for token in named}

    def piece(self, token: int) -> bytes:
        return self._pieces.get(token, b"")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text.encode(errors="replace")]


class Matcher:
    """One answer's place in its grammar. Not thread-safe."""

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

    def allowed(self) -> NDArray[np.bool_]:
        """Which ids may come next. The end of sequence: exactly where the grammar accepts. Raises ConstraintError."""
        if self._ended:
            bits = np.zeros(self._vocab_size, np.bool_)
            bits[self._eos_ids] = True
            return bits
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ConstraintError(_reason(self._matcher))
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        bits[self._eos_ids] = self._matcher.is_accepting()
        if not bits.any():
            raise ConstraintError("no token can follow")
        return bits


class Begun:
    """A matcher that another thread makes."""

    def __init__(self, made: "Future[Matcher]") -> None:
        self._made = made
        self._wait_s = MAX_WAIT_S

    def settle(self, until_s: float) -> None:
        """Return when it is made or has failed, or at this moment of `time.monotonic`: thereafter nobody waits for it."""
        if not self._made.done():
            wait_for([self._made], max(0.0, until_s - time.monotonic()))
        self._wait_s = 0.0

    def get(self) -> Matcher:
        """Waits for it, though not for long. Raises ConstraintError."""
        try:
            return self._made.result(self._wait_s)
        except TimeoutError:
            raise ConstraintNotReady(f"its grammar was not ready in {MAX_WAIT_S:g} s") from None
        except CancelledError:
            raise ConstraintNotReady("its grammar is no longer wanted") from None

    def drop(self) -> None:
        """Nobody wants it any more."""
        self._made.cancel()


class Grammars:
    """Matchers over one vocabulary, made one after the other in a thread of their own. Safe to share between threads."""

    def __init__(self, words: Callable[[], Words], vocab_size: int, *, max_compile_s: float = MAX_COMPILE_S) -> None:
        """`words`: opens the tokenizer. `vocab_size`: ids that the engine gives logits for."""
        self._max_compile_s = max_compile_s
        self._words = words
        self._vocab_size = vocab_size
        self._table: LLTokenizer | None = None
        self._eos_ids: tuple[int, ...] = ()
        self._compiled: OrderedDict[bytes, LLMatcher | str] = OrderedDict()
        """By digest; why it is refused, of those that are. The thread's alone."""
        self._thread = _deep_thread("grammars")

    def matcher(self, constraint: bytes, answer: Sequence[int] = ()) -> Matcher:
        """Behind the answer so far. Raises ConstraintError."""
        return self._thread.submit(self._make, constraint, answer).result()

    def begin(self, constraint: bytes, answer: Sequence[int]) -> Begun:
        """The same, without waiting for it."""
        return Begun(self._thread.submit(self._make, constraint, answer))

    def check(self, constraint: bytes) -> None:
        """Raises ConstraintError unless an answer can begin."""
        self._thread.submit(lambda: self._make(constraint, ()).allowed()).result()

    def close(self) -> None:
        """Begin nothing more. May be called twice."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self, constraint: bytes, answer: Sequence[int]) -> Matcher:
        digest = hashlib.blake2b(constraint, digest_size=16).digest()
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

    def _compile(self, constraint: bytes) -> "LLMatcher | str":
        from llguidance import LLMatcher

        table = self._table = self._table or self._make_table()
        began_s = time.thread_time()
        try:
            grammar = constraint.decode()
            if (found := links(grammar)) > MAX_LINKS:
                return f"its {found} rules and references are more than {MAX_LINKS}"
            matcher = LLMatcher(table, grammar, log_level=0, limits=_limits())
        except (ValueError, RecursionError) as error:
            return f"no grammar: {error}"
        if matcher.is_error():
            return _reason(matcher)
        took_s = time.thread_time() - began_s
        if took_s > self._max_compile_s:
            return f"it took {took_s:.1f} s to compile, and may take {self._max_compile_s:g}"
        return matcher

    def _make_table(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._words(), self._vocab_size)
        self._eos_ids = vocabulary.eos_ids
        table = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._vocab_size)
        vocabulary.greedy = table.greedy_tokenize
        return table


_stack_size = threading.Lock()
"""It is the process's, for the threads that are begun next."""


def _deep_thread(name: str) -> ThreadPoolExecutor:
    """One thread that may go deep."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _stack_size:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            executor.submit(int)  # it begins with the first that it is given
        finally:
            threading.stack_size(before)
    return executor


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
