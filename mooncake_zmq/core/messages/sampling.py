"""Sampling parameters and stop rules, which several messages hold."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    MAX_CONSTRAINT_BYTES,
    Count,
    Likeliest,
    Penalty,
    Record,
    RequestId,
    Seed,
    Token,
    TokenLogprob,
)


class Sampling(Record, frozen=True):
    """Sampling parameters. Temperature 0 is greedy; top_k 0 and top_p 1 cut nothing. Only (seed, position) give randomness."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Seed = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the likeliest token's probability below which tokens are cut."""
    presence_penalty: Penalty = 0.0
    """Amount subtracted from the logit of each token in the answer."""
    frequency_penalty: Penalty = 0.0
    """Amount subtracted from a token's logit for each occurrence in the answer."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Divisor of the logits of tokens in prompt or answer; negative logits are multiplied by it."""
    logit_bias: Annotated[tuple[tuple[Token, Annotated[float, Meta(ge=-100, le=100)]], ...], Meta(max_length=1024)] = ()
    logprobs: Likeliest | None = None
    """Number of likeliest tokens whose logprobs are returned beside each token's own. None: no logprobs."""
    prompt_tokens: Count = 0
    """Position at which the answer begins, the same in every attempt."""
    constraint: Annotated[bytes, Meta(max_length=MAX_CONSTRAINT_BYTES)] = b""
    """Grammar of the answer's text, as `engine.constraint` reads it; empty: none."""

    @property
    def penalizes(self) -> bool:
        """Whether earlier occurrences of a token change its logit."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def reads_past(self) -> bool:
        """Whether a choice depends on the earlier tokens themselves, beyond their KV."""
        return self.penalizes or bool(self.constraint)

    @property
    def past_from(self) -> int:
        """Position of the first token that a choice depends on."""
        return 0 if self.repetition_penalty != 1.0 else self.prompt_tokens

    def past(self, tokens: bytes) -> bytes:
        """Return the tokens that a choice depends on, of a prompt and the answer so far (int32 bytes)."""
        return tokens[4 * self.past_from :] if self.reads_past else b""

    def fits(self, past: bytes, tokens: int) -> bool:
        """Return whether this can be the past of `tokens` tokens."""
        wanted = tokens - self.past_from if self.reads_past else 0
        return self.prompt_tokens <= tokens and len(past) == 4 * wanted

    @property
    def largest_token(self) -> int:
        """Largest token of `logit_bias`."""
        return max((token for token, _ in self.logit_bias), default=0)


class StopRule(Record, frozen=True):
    """Rule for the end of a request's tokens, used by gateway and decode alike."""

    max_tokens: Count
    min_tokens: Count = 0
    eos_ids: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()

    def reason(self, token: int, count: int) -> str | None:
        """Return the finish reason after `count` output tokens, the last being `token`; None to go on."""
        if token in self.eos_ids and count > self.min_tokens:
            return "stop"
        return "length" if count >= self.max_tokens else None

    def cut(self, tokens: Sequence[int], count: int) -> tuple[int, bool]:
        """Return how many of `tokens`, sampled in a run after `count` output tokens, belong to the request, and whether they
        end it: the result of `reason` for all at once."""
        room = min(len(tokens), max(1, self.max_tokens - count))
        if self.eos_ids and not set(self.eos_ids).isdisjoint(tokens):
            for index in range(max(0, self.min_tokens - count), room):
                if tokens[index] in self.eos_ids:
                    return index + 1, True
        return room, room >= self.max_tokens - count


class Sibling(Record, frozen=True):
    """A further choice for a prompt: a separate request from its first token on that differs only in its seed."""

    request_id: RequestId
    attempt: Count
    seed: Seed


MAX_CHOICES = 128
Siblings = Annotated[tuple[Sibling, ...], Meta(max_length=MAX_CHOICES - 1)]
Sampled = tuple[Token, TokenLogprob | None]
"""A sampled token, and its logprob if requested."""
