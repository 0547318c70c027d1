"""Measurements of an engine, and the costs that are fitted to them by least squares. PURE.

Prefill of n tokens behind a prefix of p: a n' + b ((p + n)^2 - p^2), n' the tokens computed: the paper's polynomial. A decode
step: fixed + request * batch + context * tokens, tokens those of all its sequences together. Relative errors are
minimized: a short prompt's milliseconds count as much as a long one's seconds. Costs are never below 0.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, structs
from numpy.typing import NDArray

from mooncake_zmq.core.costs import Costs

FORMAT = 2
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Rows = Meta(min_length=2, max_length=4096)


class ProfileError(Exception):
    """A profile that cannot be read or fitted; the message is one line."""


class PrefillTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Duration of the prefill of `tokens` tokens behind a cached prefix of `prefix` tokens."""

    tokens: Count
    prefix: Annotated[int, Meta(ge=0, le=1 << 31)]
    seconds: Seconds


class StepTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Duration of a decode step of `batch` sequences of `context` tokens each."""

    batch: Count
    context: Count
    seconds: Seconds


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine on one machine, as `mooncake-zmq profile` writes it."""

    format: int = FORMAT
    model: str
    """The value of --model."""
    fingerprint: str
    """Fingerprint of the model's shape and weights: costs of one model do not hold for another."""
    threads: Count
    backend: str
    """The value of --backend."""
    machine: str
    prefill: Annotated[tuple[PrefillTime, ...], Rows]
    decode: Annotated[tuple[StepTime, ...], Rows]


class _Written(msgspec.Struct):
    """The field that profiles of every version have."""

    format: int


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """The costs that a profile determines: the fields of the same names in `Costs`."""

    prefill_token_s: float
    prefill_square_s: float
    decode_step_s: float
    decode_request_s: float
    decode_context_s: float

    @property
    def costs(self) -> Costs:
        """These costs, with the defaults of all others."""
        return Costs(**structs.asdict(self))


def encode(profile: Profile) -> bytes:
    """Return a profile as indented JSON, to be read by people too."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode(content: bytes) -> Profile:
    """Return the profile in a file's content. Raises ProfileError."""
    try:
        written = msgspec.json.decode(content, type=_Written).format
        if written != FORMAT:
            raise ProfileError(f"format {written}, and this version reads {FORMAT}: measure again")
        return msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"not a profile: {str(error).replace('`', '')}") from None


def fit(profile: Profile) -> Fitted:
    """Return the costs that fit a profile best. Raises ProfileError if the measurements do not determine them."""
    prefill = [(t.tokens, (t.prefix + t.tokens) ** 2 - t.prefix**2) for t in profile.prefill]
    token_s, square_s = _least_squares(prefill, [t.seconds for t in profile.prefill])
    decode = [(1, t.batch, t.batch * t.context) for t in profile.decode]
    fixed_s, request_s, context_s = _least_squares(decode, [t.seconds for t in profile.decode])
    if token_s <= 0:
        raise ProfileError("its prefill times do not grow with the tokens: measure again, with nothing else running")
    if fixed_s <= 0:
        raise ProfileError("its decode steps have no fixed part: measure again, with nothing else running")
    return Fitted(
        prefill_token_s=token_s,
        prefill_square_s=square_s,
        decode_step_s=fixed_s,
        decode_request_s=request_s,
        decode_context_s=context_s,
    )


def _least_squares(terms: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Return the coefficients >= 0 with the least sum of squared relative errors. Raises ProfileError if not determined.

    The most negative coefficient is dropped until none is: with two or three of them that finds the constrained optimum in
    all but contrived cases.
    """
    relative: NDArray[np.float64] = np.array(terms, np.float64) / np.array(seconds)[:, None]
    scale = np.abs(relative).max(axis=0)  # unscaled, squared tokens would lose the smaller terms to rounding
    relative /= scale
    if np.linalg.matrix_rank(relative) < len(scale):
        raise ProfileError("too few measurements to fit: give two or more lengths, batches and contexts")
    kept = list(range(len(scale)))
    result = [0.0] * len(scale)
    while kept:
        found = np.linalg.lstsq(relative[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if found.min() >= 0:
            for at, value in zip(kept, found, strict=True):
                result[at] = float(value / scale[at])
            break
        kept.pop(int(found.argmin()))
    return result
