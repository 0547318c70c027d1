"""The owner of requests: placement, attempts, tokens, resume, cancel. PURE."""

from dataclasses import dataclass

from mooncake_zmq.messages import Sampling, StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A validated request from the HTTP edge. `tokens`: int32 bytes; `keys`: of its complete blocks under `root`."""

    tokens: bytes
    root: bytes
    keys: tuple[bytes, ...]
    sampling: Sampling
    stop: StopRule


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client hung up, or a stop string was found: cancel at every hop. Nothing more is sent to the client."""


ClientInput = ClientRequest | ClientGone


@dataclass(frozen=True, slots=True)
class TokenOut:
    """Token `index` (from 0, in order, exactly once)."""

    index: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end: `reason` is "stop" or "length". Cached tokens: loaded and verified by the prefill of the first attempt."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_own: int
    cached_local: int
    cached_remote: int
    prefill: str
    decode: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The one explicit error: an HTTP status before the first token, an error object in the stream after it."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


ClientOutput = TokenOut | Finished | Failed
