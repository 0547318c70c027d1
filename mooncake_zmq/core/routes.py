"""The messages that each role may send to each other role, for the live mesh and the simulated one. PURE.

Two processes keep a conversation if either may send the other a message, so the table of messages is the table of links too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_zmq.core.messages import (
    AdaptersListed,
    AnswerRead,
    AnswerUnread,
    AskState,
    AttemptFailed,
    BlocksAnnounced,
    BlocksArrived,
    BlocksLeased,
    BlocksLent,
    CacheLoad,
    CancelRequest,
    ChangeReplica,
    ChangeRole,
    ChatRendered,
    ChatUnrendered,
    CommitSlots,
    DecodeDenied,
    DecodeLoad,
    DecodeReserved,
    EndStage,
    FillLoan,
    FirstToken,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    LayersReady,
    LeaseBlocks,
    LeaseRenewed,
    LendBlocks,
    LoanEnded,
    LoanFilled,
    NodesReported,
    ParsersReported,
    Placed,
    PlaceElsewhere,
    PrefillLoad,
    PromptScored,
    ReadAnswer,
    ReclaimSlots,
    Rejected,
    ReleaseLease,
    RenderChat,
    RenewLease,
    Report,
    ReportCorrupt,
    RequestEnded,
    ReserveDecode,
    ReserveSlots,
    ReturnBlocks,
    Schedule,
    SetCordon,
    ShortenFetch,
    SlotsReserved,
    StageChunk,
    StageDone,
    StageFailed,
    StageReady,
    StartPrefill,
    StartStage,
    StateReported,
    TextsEmbedded,
    TokensDecoded,
    WaitEnded,
    Watch,
    WeightsReported,
)
from mooncake_zmq.core.roles import ROLES, Role


@dataclass(frozen=True, slots=True)
class Member:
    """A node in the configuration: its role, the role that it may change to, and its host. `fingerprints`: those by name that
    it must greet with, where it is for one of several models."""

    roles: tuple[str, ...]
    host: str
    fingerprints: Mapping[str, str] = field(default_factory=dict)


Kinds = frozenset[type]
_TO_POOL: Kinds = frozenset((LeaseBlocks, RenewLease, ReleaseLease, ReserveSlots, CommitSlots, ReportCorrupt))
_FROM_POOL: Kinds = frozenset((BlocksLeased, LeaseRenewed, SlotsReserved, ReclaimSlots))

_SAYS: Mapping[tuple[str, str], Kinds] = {
    ("gateway", "conductor"): frozenset((Schedule, RequestEnded)),
    ("conductor", "gateway"): frozenset((NodesReported, Placed, Rejected)),
    ("prefill", "conductor"): frozenset((PrefillLoad, BlocksAnnounced)),
    ("decode", "conductor"): frozenset((DecodeLoad,)),
    ("cache-node", "conductor"): frozenset((CacheLoad, BlocksAnnounced)),
    ("conductor", "prefill"): frozenset((ChangeRole, WaitEnded)),
    ("conductor", "decode"): frozenset((ChangeRole,)),
    ("conductor", "cache-node"): frozenset((ChangeReplica,)),
    ("gateway", "prefill"): frozenset((StartPrefill, CancelRequest)),
    ("prefill", "gateway"): frozenset((FirstToken, PromptScored, AttemptFailed, PlaceElsewhere)),
    ("gateway", "decode"): frozenset((CancelRequest,)),
    ("decode", "gateway"): frozenset((TokensDecoded, AttemptFailed, PlaceElsewhere)),
    ("gateway", "vllm"): frozenset((StartPrefill, CancelRequest, ReadAnswer, RenderChat)),
    ("vllm", "gateway"): frozenset(
        (
            FirstToken,
            PromptScored,
            TextsEmbedded,
            TokensDecoded,
            WeightsReported,
            AttemptFailed,
            PlaceElsewhere,
            ParsersReported,
            AnswerRead,
            AnswerUnread,
            ChatRendered,
            ChatUnrendered,
        )
    ),
    ("vllm", "conductor"): frozenset((PrefillLoad, DecodeLoad, BlocksAnnounced, AdaptersListed)),
    ("vllm", "vllm"): frozenset((StartPrefill,)),
    ("prefill", "decode"): frozenset((ReserveDecode, HandoffBlocks, LayersReady, HandoffDone, HandoffFailed)),
    ("decode", "prefill"): frozenset((DecodeReserved, DecodeDenied, HandoffReceived, HandoffFailed, ReportCorrupt)),
    ("decode", "decode"): frozenset((LendBlocks, BlocksLent, FillLoan, LoanFilled, ReturnBlocks, LoanEnded)),
    ("prefill", "prefill"): frozenset((StartStage, StageReady, StageChunk, StageDone, StageFailed, EndStage)),
    ("prefill", "cache-node"): _TO_POOL | {ShortenFetch},
    ("cache-node", "prefill"): _FROM_POOL | {BlocksArrived},
    # Across hosts they send nothing, but a handoff may name blocks in the pool of the prefill's host, and a decode can read
    # only at a place that a peer's Hello named.
    ("decode", "cache-node"): _TO_POOL,
    ("cache-node", "decode"): _FROM_POOL,
    ("cache-node", "cache-node"): frozenset((LeaseBlocks, ReleaseLease, BlocksLeased, ReportCorrupt)),
}
_LOOKS: Kinds = frozenset((Watch, AskState, SetCordon))
_SHOWS: Kinds = frozenset((Report, StateReported))


def _with_watching(says: Mapping[tuple[str, str], Kinds]) -> dict[tuple[str, str], Kinds]:
    """Add watching and cordoning: gateways alone may do both, to every node, other gateways included."""
    whole = dict(says)
    for role in ROLES:
        for pair, kinds in ((("gateway", role), _LOOKS), ((role, "gateway"), _SHOWS)):
            whole[pair] = whole.get(pair, frozenset()) | kinds
    return whole


SAYS: Mapping[tuple[str, str], Kinds] = _with_watching(_SAYS)
"""Types of all messages that a role may send to another, by (sender, receiver); other pairs exchange nothing."""

_TO_WATCH = (("gateway", "gateway"), ("gateway", "cache-node"), ("cache-node", "gateway"))
"""Pairs of roles that exchange nothing but watching."""
_ON_ONE_HOST = (("prefill", "cache-node"), ("cache-node", "prefill"))
_IN_PIPELINES = (("prefill", "prefill"),)
_DISAGGREGATED = (("vllm", "vllm"),)
_LENDING = (("decode", "decode"),)


def are_connected(
    role: Role,
    host: str,
    other_role: Role,
    other_host: str,
    *,
    pipelines: bool = False,
    watched: bool = False,
    disaggregated: bool = False,
    lending: bool = False,
) -> bool:
    """Return whether two processes of these roles and hosts keep a conversation. Each costs both sides a heartbeat, so two
    prefills keep one only in a deployment with `pipelines`, two vLLMs only where some prefill and some decode
    (`disaggregated`), two decodes only where one may borrow KV of another (`lending`), and `_TO_WATCH` only where nodes are
    `watched`."""
    pair = (role, other_role)
    if pair in _TO_WATCH:
        return watched
    if pair in _ON_ONE_HOST:
        return host == other_host
    if pair in _IN_PIPELINES:
        return pipelines
    if pair in _DISAGGREGATED:
        return disaggregated
    if pair in _LENDING:
        return lending
    return pair in SAYS or (other_role, role) in SAYS


def may_connect(
    roles: Sequence[Role],
    host: str,
    other_roles: Sequence[Role],
    other_host: str,
    *,
    pipelines: bool = False,
    watched: bool = False,
    disaggregated: bool = False,
    lending: bool = False,
) -> bool:
    """Return whether two processes need a link if either may change among its roles: a link outlasts a change of role."""
    pairs = [(role, other) for role in roles for other in other_roles]
    flags = {"pipelines": pipelines, "watched": watched, "disaggregated": disaggregated, "lending": lending}
    return any(are_connected(one, host, other, other_host, **flags) for one, other in pairs)
