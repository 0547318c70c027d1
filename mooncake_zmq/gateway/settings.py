"""What an operator sets for a gateway: its requests, its HTTP edge, its connections. PURE."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsSettings:
    """How a gateway drives its requests."""

    conductors: tuple[str, ...] = ()
    """In order of preference: the first one alive decides, the others only listen."""
    max_open: int = 256
    """Requests (choices, not HTTP calls) open at once; one more is answered 503. A call takes its place once its body is
    here."""
    deadline_s: float = 600.0
    """Every request ends by then, with an error if need be."""
    placement_wait_s: float = 10.0
    """How long a new request waits for a conductor, a prefill and a decode to be there before it is answered 503."""
    stall_s: float = 60.0
    """An attempt that brings no token for this long is given up and placed again: longer than the longest prefill's queue."""
    max_attempts: int = 12
    """Attempts of one request that may break (a node died, a block did not verify) before it gets an error: it may be what
    breaks them. Those that found no room do not count; the deadline bounds them."""
    backoff_s: float = 0.05
    """Pause before the second attempt; doubled for each further one."""
    backoff_max_s: float = 1.0
    """Longest pause between attempts."""
    ready_wait_s: float = 10.0
    """How long a gateway that could serve says so not yet, because its conductor has not heard every node of the config and
    all blocks: a node that is away for longer costs time, not service."""

    def __post_init__(self) -> None:
        if min(self.max_open, self.max_attempts) < 1:
            raise ValueError("max_open and max_attempts must be at least 1")
        if min(self.deadline_s, self.placement_wait_s, self.stall_s, self.backoff_s) <= 0:
            raise ValueError("deadline_s, placement_wait_s, stall_s and backoff_s must be positive")
        if not self.ready_wait_s >= 0:
            raise ValueError("ready_wait_s must not be negative")
        if self.backoff_max_s < self.backoff_s:
            raise ValueError("backoff_max_s must not be below backoff_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Limits of HTTP calls, all checked before a prompt is tokenized."""

    max_body_bytes: int = 4 << 20
    """Bytes of one HTTP body. The longest prompt a message carries, 512 Ki token ids, is about 4 MiB of JSON; to read that as
    JSON keeps the interpreter for 30 to 50 ms."""
    body_timeout_s: float = 30.0
    """Seconds a client may take to send its body."""
    max_reading_bytes: int = 64 << 20
    """Bytes of all bodies together that came in and are not requests yet; a call that would need more is answered 503. Short
    ones do not count."""
    max_choices: int = 128
    """Choices (prompts times n) of one HTTP call, within `requests.max_open`: one call must not take every slot."""
    max_echo_chars: int = 1 << 20
    """Characters that `echo` may repeat in one answer, over all its choices: to write many MiB of JSON stops every stream."""
    full_retry_after_s: float = 1.0
    """Retry-After of a 503 for want of a slot: about the time in which a busy gateway ends some request."""
    max_buffered_outputs: int = 8192
    """Tokens waiting for one HTTP call's reader; one more and the client is cut off as too slow. About 1 MiB. Of tokens with
    probabilities so many fewer wait, but eight of each choice."""
    max_held_scores: int = 1 << 21
    """Probabilities of tokens that answers which are not streamed may come to, all calls together: they are held until an
    answer is whole, at some 150 bytes each. One call may have a quarter of them (else 400); one that finds no room is answered
    503."""
    send_timeout_s: float = 60.0
    """Seconds a client may take nothing of what is ready for it before it counts as gone. It is cut off, and its requests are
    cancelled; up to then 64 KiB wait in its connection and `max_buffered_outputs` before it."""
    keep_alive_s: float = 15.0
    """A stream that has nothing to tell says so this often, by a comment that clients pass over: proxies and clients cut
    connections on which nothing comes, and a long prompt takes minutes. From the first comment on, an error can only come in
    the stream. 0: never."""
    short_body_bytes: int = 32 << 10
    """Bodies up to this are prepared by a thread of their own, so that they wait for no long one."""
    tokenize_threads: int = 2
    """Threads for longer bodies: one long prompt does not hold up another, and the engines keep their cores."""
    tool_call_parser: Literal["", "hermes", "llama3_json", "mistral"] = ""
    """How the model writes calls of tools; empty: as its chat template tells."""

    def __post_init__(self) -> None:
        at_least_one = ("max_body_bytes", "max_choices", "max_buffered_outputs", "max_held_scores", "tokenize_threads")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("body_timeout_s", "full_retry_after_s", "send_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        for name in ("short_body_bytes", "max_echo_chars", "keep_alive_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        if self.max_reading_bytes < self.max_body_bytes:
            raise ValueError("max_reading_bytes must not be below max_body_bytes, or such a body could never be read")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Limits of HTTP connections, whatever is said on them.

    Over a limit one connection makes room: of the tenant, or the address without a key, that has most to spare, the one that
    was longest without a call; if all have one, that whose body has been on its way for longest, and for a second at least. If
    there is none to spare, the newcomer is answered 503.
    """

    max_connections: int = 1024
    """Connections at once; fewer where the process may not open as many files (RLIMIT_NOFILE, which is raised if it can be)."""
    max_per_address: int = 512
    """Of these from one IPv4 address or IPv6 /64, this machine's own too. Behind a proxy all come from one: raise it there."""
    max_tenant_share: float = 0.5
    """Part of `max_connections` that calls with one API key may have, idle ones between them included. Over it the tenant's own
    connections make room; where it has none to spare, its call is answered 429."""
    head_timeout_s: float = 10.0
    """Seconds from a connection's first byte of a call, or from its beginning, until the call's headers are whole. Over TLS
    the greeting has as long, before that."""
    idle_timeout_s: float = 30.0
    """Seconds a connection may stay between two calls. Longer than clients keep theirs, who else meet a closed one."""
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
