"""Decoding of the KV events that a vLLM publishes about its own prefix cache. PURE; both shapes of the wire format are read.

Only what can be reused for a request of ours is kept: full-attention blocks in the engine's own memory, of text and images,
under a cache salt or after such a block. The rest is passed over.
"""

from typing import Any

from msgspec import Struct

from mooncake_zmq.kv.block_hash import pack_tokens, root_of_salt
from mooncake_zmq.kv.image_keys import Begin, digest_of

MAX_PAYLOAD_BYTES = 8 << 20
MAX_HASH_BYTES = 64
MAX_TOKEN = (1 << 31) - 1
MAX_GROUP = 1 << 16
OWN_MEDIA = (None, "GPU", "CPU")
"""The engine's own memory: a CPU engine's is CPU."""
FULL_ATTENTION = (None, "full_attention", "mla_attention")
FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind"),
)
"""The fields of a stored event, in the order in which arrays have them."""
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


class EventError(Exception):
    """Bytes that are no batch of KV events: in one line."""


class EngineStored(Struct, frozen=True, gc=False):
    """The engine holds these blocks, a chain after the block `parent`; None: they begin a prompt, under `salt`. `tokens`: int32
    bytes, of `block_tokens` a block. `group`: the KV cache group, of those with full attention."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    block_tokens: int
    salt: str = ""
    group: int = 0
    images: tuple[Begin, ...] = ()
    """The images that begin in `tokens`, in order."""


class EngineRemoved(Struct, frozen=True, gc=False):
    """It no longer holds these blocks of this KV cache group, of whichever kind."""

    hashes: tuple[bytes, ...]
    group: int = 0


class EngineCleared(Struct, frozen=True, gc=False):
    """Nothing said before counts any more."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class EngineBatch(Struct, frozen=True):
    """The events that matter, in order, and when they happened (seconds since 1970, by the engine's clock)."""

    time_s: float
    events: tuple[EngineEvent, ...]


def decode_batch(payload: bytes) -> EngineBatch:
    """Raises EventError on anything but a batch."""
    import msgpack  # a node without an engine's events does not need it

    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventError(f"a batch of {len(payload)} bytes")
    most = len(payload)
    try:
        batch = msgpack.unpackb(
            payload,
            strict_map_key=False,
            max_array_len=most,
            max_map_len=most,
            max_str_len=most,
            max_bin_len=most,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError, OverflowError, TypeError) as error:
        raise EventError(f"not MessagePack: {str(error)[:200]}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise EventError("not a batch of events")
    if not isinstance(batch[0], int | float):
        raise EventError("a batch without its time")
    events = [_event(each) for each in batch[1]]
    return EngineBatch(float(batch[0]), tuple([event for event in events if event is not None]))


def _event(raw: Any) -> EngineEvent | None:
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        fields = dict(zip(FIELDS if kind == "BlockStored" else REMOVED_FIELDS, raw[1:], strict=False))
    else:
        raise EventError("an event that is neither a map nor an array")
    match kind:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            if fields.get("medium") not in OWN_MEDIA:
                return None
            return EngineRemoved(_hashes(fields.get("block_hashes")), _group(fields))
        case "AllBlocksCleared":
            return EngineCleared()
    return None  # of a later version


def _stored(fields: dict[Any, Any]) -> EngineStored | None:
    kind, group = fields.get("kv_cache_spec_kind"), _group(fields)
    if fields.get("medium") not in OWN_MEDIA or kind not in FULL_ATTENTION or (kind is None and group):
        return None
    hashes, parent, size = _hashes(fields.get("block_hashes")), fields.get("parent_block_hash"), fields.get("block_size")
    tokens = fields.get("token_ids")
    if type(size) is not int or not 0 < size <= 1 << 20 or not isinstance(tokens, list) or len(tokens) != size * len(hashes):
        raise EventError("a stored event whose tokens do not fit its blocks")
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in tokens):
        raise EventError("a stored event with tokens that are none")
    adapted = fields.get("lora_id") is not None or fields.get("lora_name") is not None
    images, extra_keys = _without_images(fields.get("extra_keys"), size)
    salt = _salt(extra_keys, first=parent is None, adapted=adapted)
    if salt is None or not hashes:
        return None
    return EngineStored(hashes, None if parent is None else _hash(parent), pack_tokens(tokens), size, salt, group, images)


def _without_images(extra_keys: Any, size: int) -> tuple[tuple[Begin, ...], list[Any]]:
    """Return the images that begin in an event's blocks of `size` tokens, and the extra keys beside those of images. A block
    that an image only continues in has a key of it too, from a place before the block."""
    begins, rest = list[Begin](), list[Any]()
    for block, keys in enumerate(extra_keys if isinstance(extra_keys, list) else []):
        if not isinstance(keys, list):
            rest.append(keys)
            continue
        of_images = [key for key in keys if _is_of_image(key)]
        starts = [(block * size + at, digest_of(name.rpartition(":")[2])) for name, at in of_images if 0 <= at < size]
        begins += sorted(starts)
        rest.append([key for key in keys if not _is_of_image(key)])
    return tuple(begins), rest


def _is_of_image(key: Any) -> bool:
    """Return whether an extra key has an image's name, perhaps after an adapter's, and where it begins."""
    return isinstance(key, list) and len(key) == 2 and isinstance(key[0], str) and type(key[1]) is int


def _group(fields: dict[Any, Any]) -> int:
    """Return the index of the KV cache group; engines of one group may leave it out."""
    group = fields.get("group_idx")
    if group is None:
        return 0
    if type(group) is not int or not 0 <= group <= MAX_GROUP:
        raise EventError("a KV cache group that is none")
    return group


def _salt(extra_keys: Any, *, first: bool, adapted: bool) -> str | None:
    """Return the salt among the extra keys of a prompt's first block; None: there is none where there must be one, or another
    key. With an adapter every block has the adapter's keys beside it, and the salt is one of `salt_of`."""
    keys = list(extra_keys) if isinstance(extra_keys, list) else []
    usual = keys[-1] if adapted and keys and not first else []
    salt: Any = ""
    if first:
        own = keys.pop(0) if keys else None
        if not isinstance(own, list):
            return None
        salts = [key for key in own if not adapted or (isinstance(key, str) and root_of_salt(key) is not None)]
        if len(salts) != 1 or not isinstance(salts[0], str):
            return None
        salt = salts[0]
        usual = [key for key in own if key != salt]
    return salt if adapted == bool(usual) and all((key or []) == usual for key in keys) else None


def _hashes(raw: Any) -> tuple[bytes, ...]:
    if not isinstance(raw, list):
        raise EventError("an event without block hashes")
    return tuple([_hash(each) for each in raw])


def _hash(raw: Any) -> bytes:
    """Bytes, or an integer of 64 bits with or without a sign."""
    if isinstance(raw, bytes) and len(raw) <= MAX_HASH_BYTES:
        return raw
    if type(raw) is int and -(1 << 63) <= raw < 1 << 64:
        return (raw & ((1 << 64) - 1)).to_bytes(8, "big")
    raise EventError("a block hash that is none")
