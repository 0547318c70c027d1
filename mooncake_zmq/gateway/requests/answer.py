"""The tokens of one answer: put in order, each once, and timed. PURE."""

from collections.abc import Sequence
from typing import Final

from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import MAX_RUN, StopRule, TokenLogprob
from mooncake_zmq.gateway.requests.client_events import TokenOut
from mooncake_zmq.gateway.requests.token_gaps import Gaps

TOKEN: Final = TokenOut
"""The type of most outputs: what is `Final`, machine code reads without a search by name."""
EARLY_TOKENS = MAX_RUN
"""Limit on the tokens kept that arrived ahead of a missing one: a decode's may overtake the prefill's first. Any more are
dropped: the attempt then stalls and is placed again."""


class Answer:
    """The tokens of one answer over all its attempts, and the timing of those of the attempt under way."""

    def __init__(self, stop: StopRule, counts: Tally) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        """Why the answer is complete; None while more tokens are due."""
        self.resumed_at = 0
        """Number of tokens when the attempt under way began."""
        self.ttft_s: float | None = None
        """TTFT of the attempt under way, once its first token has arrived."""
        self.gaps = Gaps()
        self._stop = stop
        self._most, self._eos_ids = stop.max_tokens, frozenset(stop.eos_ids)
        self._counts = counts
        self._early: dict[int, tuple[int, TokenLogprob | None]] = {}
        self._began_at = 0.0
        self._token_at = 0.0

    @property
    def arrived(self) -> int:
        """Number of tokens that arrived in the attempt under way."""
        return len(self.tokens) + len(self._early) - self.resumed_at

    @property
    def left(self) -> int:
        """Number of tokens that may still come."""
        return self._stop.max_tokens - len(self.tokens)

    def begin_attempt(self, now: float) -> None:
        """Forget early tokens and the timing of the last attempt."""
        self._early.clear()
        self._began_at = now
        self.ttft_s, self.resumed_at, self.gaps = None, len(self.tokens), Gaps()

    def take(self, now: float, first: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[TokenOut]:
        """Take a run of tokens of the attempt under way, from index `first` on. Return those that are due, up to the last."""
        self._time(now, first, len(tokens))
        due: list[TokenOut] = []
        for offset, token in enumerate(tokens):
            if self.reason is not None:
                break
            self._order(first + offset, token, logprobs[offset] if logprobs else None, due)
        return due

    def arrive(self, now: float) -> None:
        """Note that the first part of the answer arrived in the attempt under way."""
        self.ttft_s = now - self._began_at

    def check(self) -> None:
        """Assert what always holds of an answer that is not complete."""
        assert len(self._early) <= EARLY_TOKENS
        assert len(self.tokens) < max(1, self._stop.max_tokens), "the last token ends a request"

    def _order(self, index: int, token: int, logprob: TokenLogprob | None, due: list[TokenOut]) -> None:
        following = len(self.tokens)
        if index == following and not self._early:
            self._append(token, logprob, due)
            return
        if index < following:
            self._counts.add("duplicate_tokens")
            return
        if index == following or len(self._early) < EARLY_TOKENS:
            self._early[index] = token, logprob
        else:
            self._counts.add("early_tokens_dropped")
        while self.reason is None and len(self.tokens) in self._early:
            early, its_logprob = self._early.pop(len(self.tokens))
            self._append(early, its_logprob, due)

    def _append(self, token: int, logprob: TokenLogprob | None, due: list[TokenOut]) -> None:
        due.append(TOKEN(len(self.tokens), token, logprob))
        self.tokens.append(token)
        if len(self.tokens) >= self._most or token in self._eos_ids:  # else there is no reason
            self.reason = self._stop.reason(token, len(self.tokens))

    def _time(self, now: float, first: int, count: int) -> None:
        """Note when these tokens arrived. Tokens ahead of a missing one are timed with the missing one."""
        new = first + count - len(self.tokens)
        if first > len(self.tokens) or new <= 0:
            return
        new += sum(1 for index in self._early if index >= first + count) if self._early else 0
        gap_s = now - self._token_at
        if self.ttft_s is None:
            self.arrive(now)
            gap_s = 0.0
            new -= 1
        if new:
            self.gaps.add(gap_s, new)
        self._token_at = now
