"""Events between clients and the gateway's actor, which the HTTP edge passes on. PURE."""

from msgspec import Struct, structs

from mooncake_zmq.core.messages import CallRead, Embedding, Eviction, Image, Parsers, Sampling, StopRule, TokenLogprob


class Reading(Struct, frozen=True, kw_only=True):
    """How the parsers of a vLLM read an answer."""

    parsers: Parsers
    """The parsers that the vLLM has, no more and no less."""
    chat: bytes
    """JSON of the fields of the client's request that they look at."""
    textless: frozenset[int] = frozenset()
    """Tokens that they do not get, since their text is no part of an answer."""
    whole: bool = False
    """Whether the answer is read once, when it is complete."""


class ClientRequest(Struct, frozen=True, kw_only=True):
    """A validated request from the HTTP edge. `tokens`: int32 bytes; `keys`: keys of its complete blocks under `root`.

    An SLO of None is the deployment's, and 0 is no SLO. `priority`: a larger number waits longer.
    """

    tokens: bytes
    root: bytes
    model: str = ""
    """Identity of the model that answers, as nodes greet with it; empty: the only one of the cluster."""
    model_name: str = ""
    """Name by which the client asked for it."""
    adapter: str = ""
    """The adapter of a vLLM with which the model answers, which `root` covers; empty: none."""
    keys: tuple[bytes, ...]
    sampling: Sampling
    stop: StopRule
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int = 0
    exact: bool = False
    """Whether the answer must not be approximate."""
    tenant: str = ""
    """Tenant to whose shares of the pools its blocks are charged."""
    siblings: tuple[tuple[str, int], ...] = ()
    """Request id and seed of each further answer to the same prompt. They are requests of their own, and their prompt is
    computed once as long as none of them has a token."""
    call: str = ""
    """Name of the call, if several requests make one answer: its later parts wait instead of being refused."""
    prompt_logprobs: int | None = None
    """Number of the likeliest tokens to send for each token of the prompt, with its probability; None: send none. The prompt is
    then computed as a whole, and has no siblings."""
    reading: Reading | None = None
    """How the parsers of a vLLM read the answer; None: the edge reads it."""
    embedding: Embedding | None = None
    """The texts in `tokens` whose vectors are the answer, in place of tokens; None: tokens are."""
    images: tuple[Image, ...] = ()
    """The images in `tokens`, in order, with their data URLs."""
    eviction: Eviction | None = None
    """How few of `tokens` its decode is to hold; None: all."""

    def choice(self, seed: int) -> "ClientRequest":
        """Return the request for one of its answers alone."""
        return structs.replace(self, sampling=structs.replace(self.sampling, seed=seed), siblings=())


class ChatToRender(Struct, frozen=True, kw_only=True):
    """A chat with images that a vLLM of a model is to write as tokens: JSON, as in `RenderChat`, and how many images it has.
    `Rendered` or `Failed` ends it."""

    chat: bytes
    images: int
    tenant: str = ""
    model: str = ""
    """As in `ClientRequest`."""


class ClientGone(Struct, frozen=True):
    """The client disconnected: cancel at every hop. Nothing more is sent to the client."""


class StopFound(Struct, frozen=True):
    """The edge found a stop string in the text: cancel at every hop and answer `Finished`."""


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


class Vectors(Struct, frozen=True):
    """The vectors of all texts of a request: float32 bytes, one after the other, of equal length. `Finished` follows."""

    vectors: bytes


class Rendered(Struct, frozen=True):
    """The tokens of a chat (int32 bytes), and where its images are in them."""

    tokens: bytes
    images: tuple[Image, ...]


class TextRead(Struct, frozen=True):
    """Parts that vLLM's parsers read in the tokens since the last `TextRead`: reasoning first, then text, then calls."""

    reasoning: str
    text: str
    calls: tuple[CallRead, ...]


class TextUnread(Struct, frozen=True):
    """The tokens since the last `TextRead`, and all that follow, are not read, and why: their text is the answer."""

    reason: str


VersionSpan = tuple[str | None, int, int]
"""Tokens start..stop of an answer, made by weights of this version: (version, start, stop); None: of one that is not known."""


class Finished(Struct, frozen=True, kw_only=True):
    """The end of an answer. `reason` is "stop" or "length". The prefill of the first attempt loaded and verified the cached
    tokens.

    `queue_s`, `prefill_s`: time that the last attempt waited and computed in its prefill; 0 if it brought no token.
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
    """Number of attempts, without those of `relocations`."""
    relocations: int = 0
    """Number of attempts that began because a node drained."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    versions: tuple[VersionSpan, ...] = ()
    """Versions of the weights that made the tokens, without a gap; empty where no engine named any."""
    computed_of_cached: int = 0
    """Prompt tokens with KV elsewhere that the prefill computed while KV after them was fetched."""
    parts: int = 0
    """Prompt tokens with KV of earlier prompts, computed behind other tokens: the answer is approximate if there are any."""
    recomputed: int = 0
    """Tokens of these that were computed again."""
    borrowed_tokens: int = 0
    """Tokens whose KV other decodes than its own held."""
    selected: bool = False
    """Whether a decode attended to few of many tokens."""
    dropped: int = 0
    """Prompt tokens whose KV was dropped before the answer, as the client asked: it is approximate if there are any."""

    @property
    def is_approximate(self) -> bool:
        """Whether another answer may be the exact one."""
        return self.parts > 0 or self.selected or self.dropped > 0


class Failed(Struct, frozen=True, kw_only=True):
    """The one explicit error: an HTTP status before the first token, an error object in the stream after it."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


ClientOutput = TokenOut | PromptLogprobs | Vectors | Rendered | TextRead | TextUnread | Finished | Failed
