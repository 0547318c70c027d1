"""The settings of a gateway: its requests, its HTTP edge, its connections. PURE."""

from dataclasses import dataclass
from typing import Literal

from mooncake_zmq.core.messages import MAX_IMAGES, MAX_IMAGES_BYTES, MAX_SECONDS

LEAST_BODY_BYTES = 4 << 20
TOKEN_BYTES = 12
"""Bytes of JSON that a token of a long prompt is assumed to take on average: an id with its comma has at most 9 (in Python's
form), text in Latin script about 4, and two characters written as \\uXXXX, as for Chinese text, 12. No bound holds for all
text, as one token may be a hundred spaces: what has more bytes needs `max_body_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsSettings:
    """Limits and timeouts of a gateway's requests."""

    conductors: tuple[str, ...] = ()
    """Conductors in order of preference: the first one that is up decides, the others only receive announcements."""
    max_open: int = 256
    """Requests (choices, not HTTP calls) open at once; one more is answered 503. A call counts once its body is
    complete."""
    deadline_s: float = 600.0
    """Time within which every request ends, with an error if necessary."""
    placement_wait_s: float = 10.0
    """Time that a new request waits until a conductor, a prefill and a decode are up, before it is answered 503."""
    stall_s: float = 60.0
    """Time without a token after which an attempt is given up and placed again: longer than the longest prefill's queue."""
    max_attempts: int = 12
    """Attempts of one request that may break (a node died, a block did not verify) before it gets an error: the request itself
    may break them. Attempts that found no room, or for which a link had yet to come up, do not count; the deadline bounds
    them."""
    backoff_s: float = 0.05
    """Pause before the second attempt; doubled for each further one."""
    backoff_max_s: float = 1.0
    """Longest pause between attempts."""
    ready_wait_s: float = 10.0
    """Longest time that a gateway that could serve reports "starting", because its conductor lacks the reports of a configured
    node or some blocks. A node that is down for longer does not keep the gateway from serving."""

    def __post_init__(self) -> None:
        if min(self.max_open, self.max_attempts) < 1:
            raise ValueError("max_open and max_attempts must be at least 1")
        if min(self.deadline_s, self.placement_wait_s, self.stall_s, self.backoff_s) <= 0:
            raise ValueError("deadline_s, placement_wait_s, stall_s and backoff_s must be positive")
        if self.deadline_s > MAX_SECONDS:
            raise ValueError(f"deadline_s must be at most {MAX_SECONDS:g}")
        if not self.ready_wait_s >= 0:
            raise ValueError("ready_wait_s must not be negative")
        if self.backoff_max_s < self.backoff_s:
            raise ValueError("backoff_max_s must not be below backoff_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Limits of HTTP calls, all checked before a prompt is tokenized."""

    max_body_bytes: int = 0
    """Bytes of one HTTP body; 0: 12 for each token of the longest context, but at least 4 MiB, and at most half of
    `max_reading_bytes`. Parsing 4 MiB of token ids occupies the interpreter for 30 to 50 ms."""
    body_timeout_s: float = 30.0
    """Seconds a client may take to send its body."""
    max_reading_bytes: int = 64 << 20
    """Bytes of all bodies together that are being received or parsed; a call that would need more is answered 503, and 429
    where its tenant alone would hold more than half. Short bodies do not count."""
    max_choices: int = 128
    """Choices (prompts times n) of one HTTP call, within `requests.max_open`: one call must not take every slot."""
    max_echo_chars: int = 1 << 20
    """Characters that `echo` may repeat in one answer, over all its choices: writing many MiB of JSON delays every stream."""
    full_retry_after_s: float = 1.0
    """Retry-After of a 503 for want of a slot: about the time in which a busy gateway ends some request."""
    max_buffered_outputs: int = 8192
    """Tokens waiting for one HTTP call's reader, about 1 MiB; with one more, the client is cut off as too slow. The limit is
    lower for tokens with probabilities, but at least eight for each choice."""
    max_held_scores: int = 1 << 21
    """Probabilities of tokens that all answers without streaming may hold together, and of prompts' tokens (`echo`) those of
    streams too, at about 150 bytes each: they are kept until the answer is complete. One call may hold a quarter of them (else
    400) and one tenant half (else 429); a call that finds no room is answered 503."""
    max_images: int = 16
    """Images of one chat; with more it is answered 400."""
    max_image_bytes: int = 4 << 20
    """Bytes of all images of one chat, as the data URLs in which they come, a third more than the images; with more it is
    answered 413."""
    max_held_image_bytes: int = 256 << 20
    """Bytes of images that all calls may hold together: they are kept until the answer is complete. One tenant may hold half of
    them (else 429); a call that finds no room is answered 503."""
    send_timeout_s: float = 60.0
    """Seconds for which a client may read nothing, though data is ready, before it counts as gone: it is cut off and its
    requests are cancelled. Up to then 64 KiB wait in its connection, and `max_buffered_outputs` tokens before it."""
    keep_alive_s: float = 15.0
    """Interval at which a stream without data sends a comment, which clients ignore: proxies and clients cut idle connections,
    and a long prompt takes minutes. After the first comment, an error can only be sent in the stream. 0: never."""
    short_body_bytes: int = 32 << 10
    """Largest body that a thread for short bodies prepares, so that it does not wait for a long one."""
    tokenize_threads: int = 2
    """Threads for longer bodies: one long prompt does not delay another, and the engines keep their cores."""
    kv_budget: bool = False
    """Whether a request may ask that its decode holds only a share of its prompt's tokens: `"mooncake": {"kv_budget": 0.5}`.
    Such an answer is approximate, and says so; its prompt is computed as a whole, and nothing of it is reused. For exact KV
    that our own engine computes on CPUs."""
    tool_call_parser: Literal[
        "", "hermes", "llama3_json", "mistral", "qwen3_xml", "glm45", "minimax_m2", "kimi_k2", "deepseek_v31", "vllm"
    ] = ""
    """Format in which the model writes tool calls; empty: the format of its chat template, or where that is not known, whatever
    the parser of the model's vLLMs reads (`--tool-call-parser`); vllm: the latter in any case."""
    reasoning_parser: Literal["", "none", "think", "mistral", "seed_oss", "vllm"] = ""
    """Marks between which the model writes its reasoning: <think>, [THINK] or <seed:think>, and the same with a slash; empty:
    those that its chat template contains, or where it has none, whatever the parser of the model's vLLMs reads
    (`--reasoning-parser`); vllm: the latter in any case; none: its reasoning is a part of the text."""

    def __post_init__(self) -> None:
        at_least_one = ("max_choices", "max_buffered_outputs", "max_held_scores", "tokenize_threads")
        if not 0 <= self.max_images <= MAX_IMAGES or not 0 < self.max_image_bytes <= MAX_IMAGES_BYTES:
            raise ValueError(f"max_images must be at most {MAX_IMAGES}, and max_image_bytes at most {MAX_IMAGES_BYTES}")
        if self.max_held_image_bytes < 8 * self.max_image_bytes:
            text = "max_held_image_bytes must be at least 8 times max_image_bytes: a tenant may hold half, a call three copies"
            raise ValueError(text)
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("body_timeout_s", "full_retry_after_s", "send_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        for name in ("max_body_bytes", "short_body_bytes", "max_echo_chars", "keep_alive_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        if self.max_reading_bytes < 2 * (self.max_body_bytes or LEAST_BODY_BYTES):
            raise ValueError("max_reading_bytes must be at least twice max_body_bytes, as a tenant may use half of it")

    def body_bytes(self, longest_context: int) -> int:
        """Return the bytes that one body may have where the longest context served has so many tokens."""
        enough = max(LEAST_BODY_BYTES, TOKEN_BYTES * longest_context)
        return self.max_body_bytes or min(enough, self.max_reading_bytes // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersSettings:
    """Settings of the answers that a gateway keeps, to give them again."""

    enabled: bool = False
    """Whether complete answers at temperature 0 are kept, and given again to the same tenant for the same prompt."""
    approximate: bool = False
    """Whether chats are the same if their messages differ in case, white space, forms of characters (NFC) or periods and
    question marks at their end alone. Not for code, and other texts in which these have a meaning."""
    max_error: float = 0.01
    """Largest estimated share of wrong answers among those that were given again. A class of prompts (those of a tenant with
    one system prompt) is served only while the upper bound on its share is not above this: at 0.01 once 380 answers that would
    have been given agreed with an engine's, at 0.05 once 73 did, those to one prompt a twentieth of them at most. 1: it is
    always served."""
    max_interval: float = 12.0
    """The largest mean number of hits between two verifications of an answer: about as many are wrong after it changed."""
    interval_growth: float = 2.0
    """Factor by which that number grows from 1, each time that an engine gives the same answer."""
    max_entries: int = 20_000
    """Answers kept; a tenant may have half. The least recently used make room: a tenant's own over its half, those of the
    tenant with the most entries or bytes over the whole."""
    max_bytes: int = 64 << 20
    """Bytes of the answers kept, at 4 a token and 1,024 an answer; a tenant may have half, as with `max_entries`."""

    def __post_init__(self) -> None:
        if not 0 < self.max_error <= 1:
            raise ValueError("max_error must be above 0 and at most 1")
        if not self.max_interval >= 1 or not self.interval_growth > 1:
            raise ValueError("max_interval must be at least 1, and interval_growth above 1")
        if self.max_entries < 2 or self.max_bytes < 4096:
            raise ValueError("max_entries must be at least 2, and max_bytes at least 4096")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Limits of HTTP connections, independent of their calls.

    Over a limit one connection is closed to make room. It belongs to the tenant, or the address without a key, that has the
    most to spare, and was without a call for longest. If all have calls, it is the one whose body has taken longest to arrive,
    at least a second. If no connection can be closed, the new one is answered 503.
    """

    max_connections: int = 1024
    """Connections at once; fewer where the process may not open as many files (RLIMIT_NOFILE, which is raised if it can be)."""
    max_per_address: int = 512
    """Connections from one IPv4 address or IPv6 /64, this machine's own included. Behind a proxy all come from one: raise
    it."""
    max_tenant_share: float = 0.5
    """Share of `max_connections` for the calls with one API key, idle connections between them included. Over it the tenant's
    own connections are closed to make room; if none can be closed, its call is answered 429."""
    head_timeout_s: float = 10.0
    """Seconds from a connection's first byte of a call, or from its beginning, until the call's headers are complete. Over
    TLS the handshake has as long, before that."""
    idle_timeout_s: float = 30.0
    """Seconds a connection may be idle between two calls: longer than clients keep theirs, which else meet a closed
    connection."""
    max_head_bytes: int = 16 << 10
    """Bytes of request line and headers; more is answered 400."""

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_per_address", "head_timeout_s", "idle_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        if not 0 < self.max_tenant_share <= 1:
            raise ValueError("max_tenant_share must be above 0 and at most 1")
        if not 1024 <= self.max_head_bytes <= 1 << 20:
            raise ValueError("max_head_bytes must be between 1 KiB and 1 MiB")
