"""All messages between actors, which are frozen, tagged and bounded, with their only `encode` and `decode`.

The wire is MessagePack; types are checked on arrival. Messages name blocks and never carry a KV byte. They hold durations,
never clock readings: a holder counts `ttl_s` from when it *sent* the request, the granter from when it handled it, so the
holder always stops first. Delivery (at most once, in order, within a conversation) is `core.session`'s work.
"""

import msgspec

from mooncake_zmq.core.messages.computing import (
    MAX_MOVED,
    MAX_RESERVE_BYTES,
    MAX_TEXTS,
    MAX_VECTORS_BYTES,
    AttemptFailed,
    CancelRequest,
    DecodeDenied,
    DecodeReserved,
    DecodeTimes,
    Embedding,
    Eviction,
    EvictionKind,
    FirstToken,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    LayersReady,
    PlaceElsewhere,
    PromptScored,
    ReserveDecode,
    StartPrefill,
    TextsEmbedded,
    TokensDecoded,
    WeightsReported,
    for_sibling,
)
from mooncake_zmq.core.messages.fields import (
    LEAST_LOGPROB,
    MAX_BLOCKS,
    MAX_BODIES,
    MAX_CONSTRAINT_BYTES,
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_MESSAGE_BYTES,
    MAX_MODEL_NAME,
    MAX_NODES,
    MAX_PRIORITY,
    MAX_RUN,
    MAX_SCORED,
    MAX_SECONDS,
    MAX_TEXT,
    MAX_TOKENS,
    MAX_VERSION_CHARACTERS,
    MAX_WEIGHT_VERSIONS,
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Checksum,
    Count,
    Priority,
    ProtocolError,
    Slo,
    SlotRef,
    TokenLogprob,
    clip,
)
from mooncake_zmq.core.messages.greeting import (
    MAX_MODELS,
    Envelope,
    Goodbye,
    Hello,
    Part,
    SegmentRef,
)
from mooncake_zmq.core.messages.lending import (
    GROWTH_TOKENS,
    MAX_LENDERS,
    BlocksLent,
    FillLoan,
    LendBlocks,
    LoanEnded,
    LoanFilled,
    LoanPlace,
    ReturnBlocks,
)
from mooncake_zmq.core.messages.load import (
    MAX_ADAPTERS,
    MAX_OVERTAKE,
    MAX_REPORTED,
    AdaptersListed,
    BlocksAnnounced,
    CacheLoad,
    ChangeRole,
    DecodeLoad,
    Measured,
    PrefillLoad,
    QueuedJob,
    SourceRate,
    WaitEnded,
)
from mooncake_zmq.core.messages.pipeline import (
    MAX_PARTS,
    EndStage,
    StageChunk,
    StageDone,
    StageFailed,
    StageReady,
    StartStage,
)
from mooncake_zmq.core.messages.placing import (
    NodesReported,
    Outcome,
    Placed,
    Rejected,
    RejectReason,
    RequestEnded,
    Schedule,
)
from mooncake_zmq.core.messages.pool import (
    MAX_FETCHED_BLOCKS,
    BlocksArrived,
    BlocksLeased,
    ChangeReplica,
    CommitSlots,
    GrantedSlot,
    LeaseBlocks,
    LeaseRenewed,
    ReclaimSlots,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    ShortenFetch,
    SlotsReserved,
)
from mooncake_zmq.core.messages.protocols import FIELDS_SINCE, has_field, speaks, without_newer_fields
from mooncake_zmq.core.messages.reading import (
    MAX_READ_BYTES,
    AnswerRead,
    AnswerUnread,
    CallRead,
    End,
    Parsers,
    ParsersReported,
    ReadAnswer,
)
from mooncake_zmq.core.messages.rendering import (
    MAX_IMAGES,
    MAX_IMAGES_BYTES,
    MAX_RENDERED_BYTES,
    ChatRendered,
    ChatUnrendered,
    Image,
    RenderChat,
)
from mooncake_zmq.core.messages.sampling import (
    Sampled,
    Sampling,
    Sibling,
    StopRule,
)
from mooncake_zmq.core.messages.watching import (
    MAX_DUMP_BYTES,
    MAX_LEVEL,
    MAX_LEVELS,
    MAX_REFUSALS,
    MAX_TRANSFER_STATS,
    AskState,
    Moved,
    Report,
    SetCordon,
    StateReported,
    Watch,
)

_Placing = Hello | Goodbye | Schedule | Placed | Rejected | RequestEnded
_Reporting = PrefillLoad | AdaptersListed | DecodeLoad | CacheLoad | WaitEnded | BlocksAnnounced
_Prefilling = StartPrefill | FirstToken | PromptScored | TextsEmbedded | AttemptFailed | PlaceElsewhere | CancelRequest
_Reserving = ReserveDecode | DecodeReserved | DecodeDenied
_HandingOff = HandoffBlocks | LayersReady | HandoffDone | HandoffReceived | HandoffFailed
_Lending = LendBlocks | BlocksLent | FillLoan | LoanFilled | ReturnBlocks | LoanEnded
_Decoding = TokensDecoded | WeightsReported | ParsersReported
_Reading = ReadAnswer | AnswerRead | AnswerUnread | RenderChat | ChatRendered | ChatUnrendered
_Leasing = LeaseBlocks | BlocksLeased | BlocksArrived | ShortenFetch | RenewLease | LeaseRenewed | ReleaseLease
_Putting = ReserveSlots | SlotsReserved | CommitSlots | ReclaimSlots | ChangeReplica | ReportCorrupt | ChangeRole
_Staging = StartStage | StageReady | StageChunk | StageDone | StageFailed | EndStage
_Watching = NodesReported | Watch | Report | AskState | StateReported | SetCordon
_Computing = _Prefilling | _Reserving | _HandingOff | _Lending | _Decoding | _Reading
Message = _Placing | _Reporting | _Computing | _Leasing | _Putting | _Staging | _Watching


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | Envelope, protocol: int = PROTOCOL_VERSION) -> bytes:
    """Return the MessagePack bytes of a message or an envelope for a peer of a protocol. Raises ValueError if they exceed
    `MAX_MESSAGE_BYTES`."""
    packed = _encoder.encode(message if protocol >= FIELDS_SINCE else without_newer_fields(message, protocol))
    if len(packed) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(packed)} bytes exceeds {MAX_MESSAGE_BYTES}; split it")
    return packed


# Typed decoders compare a length with its field's limit before they allocate anything for it, and need one pass.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError)
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def decode(raw: bytes) -> Message:
    """Return the message in `raw`; raises ProtocolError, and nothing else, on any other bytes."""
    try:
        return _message_decoder.decode(raw)
    except _NOT_OURS as error:
        raise ProtocolError(f"not a message: {error}") from None


def decode_envelope(raw: bytes) -> Envelope:
    """Return the envelope in `raw`; raises ProtocolError, and nothing else, on any other bytes."""
    try:
        return _envelope_decoder.decode(raw)
    except _NOT_OURS as error:
        raise ProtocolError(f"not an envelope: {error}") from None
