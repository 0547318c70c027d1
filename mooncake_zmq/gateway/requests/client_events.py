"""What clients want of the gateway's actor, and what it has for them: passed between it and the HTTP edge. PURE."""

from msgspec import Struct

from mooncake_zmq.core.messages import Sampling, StopRule, TokenLogprob


class ClientRequest(Struct, frozen=True, kw_only=True):
    """A validated request from the HTTP edge. `tokens`: int32 bytes; `keys`: of its complete blocks under `root`.

    SLOs: None is the deployment's own, 0 none. `priority`: a larger number waits longer.
    """

    tokens: bytes
    root: bytes
    keys: tuple[bytes, ...]
    sampling: Sampling
    stop: StopRule
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int = 0
    tenant: str = ""
    """Whose shares of the pools its blocks are charged to."""
    siblings: tuple[tuple[str, int], ...] = ()
    """Further answers to the same prompt: request id and seed of each. They are requests of their own, and their prompt is
    computed once as long as none of them has a token."""
    call: str = ""
    """Which requests make one answer, if they are several: they wait for one another rather than be refused."""
    prompt_logprobs: int | None = None
    """Tell the probabilities of the prompt's tokens too, and so many of the likeliest. It is computed whole then, and has no
    siblings."""


class ClientGone(Struct, frozen=True):
    """The client hung up: cancel at every hop. Nothing more is sent to the client."""


class StopFound(Struct, frozen=True):
    """The edge found a stop string in the text: cancel at every hop and answer `Finished`."""


ClientInput = ClientRequest | ClientGone | StopFound


class TokenOut(Struct, frozen=True, gc=False):
    """Token `index` (from 0, in order, exactly once)."""

    index: int
    token: int
    logprob: TokenLogprob | None = None


class PromptLogprobs(Struct, frozen=True):
    """Probabilities of the prompt's tokens from position `first` on: all but the first token's, in order, each once, before the
    answer's first token."""

    first: int
    logprobs: tuple[TokenLogprob, ...]


class Finished(Struct, frozen=True, kw_only=True):
    """The end: `reason` is "stop" or "length". Cached tokens: loaded and verified by the prefill of the first attempt.

    `queue_s`, `prefill_s`: how long the last attempt waited for its prefill and was computed there; 0 if it gave no token.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_own: int
    cached_local: int
    cached_remote: int
    prefill: str
    decode: str
    attempts: int
    queue_s: float = 0.0
    prefill_s: float = 0.0


class Failed(Struct, frozen=True, kw_only=True):
    """The one explicit error: an HTTP status before the first token, an error object in the stream after it."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


ClientOutput = TokenOut | PromptLogprobs | Finished | Failed
