"""KV events as subscribers decode them: both shapes, cut to size, and what remains after any sequence of them."""

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens
from mooncake_zmq.kv.events import (
    MAX_EVENT_BLOCKS,
    MAX_EVENT_TOKENS,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventEncoder,
    EventFormat,
    Medium,
    batch_bytes,
)

BLOCK = 4
ROOT = b"r" * 16
BOTH = pytest.mark.parametrize("form", list(EventFormat))


def chain(blocks, start=0):
    tokens = pack_tokens(range(start, start + blocks * BLOCK))
    return tuple(extend_keys(ROOT, tokens, BLOCK)), tokens


def decode(payload):
    """(time, events as maps, rank): what a subscriber that follows the conventions makes of either shape."""
    time_s, events, *rest = msgpack.unpackb(payload)
    return time_s, [event if isinstance(event, dict) else from_array(event) for event in events], rest


def from_array(event):
    names = {
        "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }
    return {"type": event[0], **dict(zip(names[event[0]], event[1:], strict=True))}


def fold(held, event):
    """Apply a decoded event to the set of (hash, medium) held."""
    match event["type"]:
        case "BlockStored":
            held.update((one, event["medium"]) for one in event["block_hashes"])
        case "BlockRemoved":
            held.difference_update((one, event["medium"]) for one in event["block_hashes"])
        case "AllBlocksCleared":
            held.clear()


@BOTH
def test_a_subscriber_reads_what_was_said(form):
    keys, tokens = chain(2)
    events = (AllBlocksCleared(), BlocksStored(keys, Medium.CPU, ROOT, tokens), BlocksRemoved(keys[1:], Medium.DISK))
    time_s, decoded, rank = decode(EventEncoder(form, BLOCK).encode(1234.5, events))
    assert (time_s, rank) == (1234.5, [None])
    assert decoded == [
        {"type": "AllBlocksCleared"},
        {
            "type": "BlockStored",
            "block_hashes": list(keys),
            "parent_block_hash": ROOT,
            "token_ids": list(range(8)),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [keys[1]], "medium": "DISK"},
    ]


@BOTH
def test_what_is_not_known_is_nil_or_empty(form):
    _, (event,), _ = decode(EventEncoder(form, BLOCK).encode(0, (BlocksStored(chain(1)[0], Medium.DISK),)))
    assert (event["parent_block_hash"], event["token_ids"], event["medium"]) == (None, [], "DISK")


# Typed as the engines' own subscribers type them, so that a missing or misplaced element is an error.
class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[bytes]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


def test_the_array_shape_fits_a_typed_subscriber():
    keys, tokens = chain(3)
    events = (BlocksStored(keys, Medium.CPU, b"", tokens), BlocksRemoved(keys, Medium.CPU), AllBlocksCleared())
    batch = msgspec.msgpack.decode(EventEncoder(EventFormat.ARRAY, BLOCK).encode(1, events), type=Batch)
    assert batch.events == [
        Stored(list(keys), None, list(range(12)), BLOCK, None, "CPU", None),
        Removed(list(keys), "CPU"),
        Cleared(),
    ]


def test_a_long_event_is_cut_along_its_chain():
    encoder = EventEncoder(EventFormat.MAP, BLOCK)
    keys, tokens = chain(2 * encoder.max_blocks + 3)
    batches = encoder.batches((BlocksStored(keys, Medium.CPU, ROOT, tokens),))
    parts = [event for batch in batches for event in batch]
    assert [len(part.keys) for part in parts] == [encoder.max_blocks, encoder.max_blocks, 3]
    parent = ROOT
    for part in parts:
        assert part.parent == parent
        assert tuple(extend_keys(part.parent, part.tokens, BLOCK)) == part.keys
        parent = part.keys[-1]


def test_a_long_event_that_is_no_chain_has_no_parents():
    encoder = EventEncoder(EventFormat.MAP, BLOCK)
    keys, _ = chain(encoder.max_blocks + 1)
    assert {event.parent for batch in encoder.batches((BlocksStored(keys, Medium.DISK),)) for event in batch} == {b""}


@pytest.mark.parametrize("block_tokens", [1, 32, 1000, 4096, MAX_EVENT_TOKENS * 2])
def test_an_event_is_bounded_in_blocks_and_in_tokens(block_tokens):
    most = EventEncoder(EventFormat.MAP, block_tokens).max_blocks
    assert 1 <= most <= MAX_EVENT_BLOCKS
    assert most == 1 or most * block_tokens <= MAX_EVENT_TOKENS


LARGEST = bytes.fromhex("ffffff7f")  # the token id that takes the most bytes


@BOTH
@pytest.mark.parametrize("block_tokens", [1, 16, 512, MAX_EVENT_TOKENS * 2])
@pytest.mark.parametrize("blocks", [1, 7, 3000])
def test_a_batch_is_bounded_in_bytes(form, block_tokens, blocks):
    encoder = EventEncoder(form, block_tokens)
    keys = tuple(number.to_bytes(16, "big") for number in range(min(blocks, 200_000 // block_tokens + 1)))
    long = BlocksStored(keys, Medium.DISK, ROOT, LARGEST * (len(keys) * block_tokens))
    short = [BlocksStored((key,), Medium.DISK, ROOT, LARGEST * block_tokens) for key in keys[:100]]
    batches = encoder.batches(
        [long, *short, AllBlocksCleared(), BlocksRemoved(keys, Medium.DISK), *[AllBlocksCleared()] * 3000]
    )
    for batch in batches:
        assert len(encoder.encode(1e9, batch)) <= batch_bytes(batch) <= encoder.max_batch_bytes
    assert sum(len(getattr(event, "keys", ())) for batch in batches for event in batch) == 2 * len(keys) + len(short)


KEYS = chain(12)[0]
some_keys = st.lists(st.sampled_from(KEYS), max_size=12).map(tuple)
media = st.sampled_from(list(Medium))
sequences = st.lists(
    st.one_of(
        st.builds(BlocksStored, some_keys, media),
        st.builds(BlocksStored, some_keys, media, st.just(ROOT)),
        st.builds(BlocksRemoved, some_keys, media),
        st.just(AllBlocksCleared()),
    ),
    max_size=30,
)


@given(sequences, st.sampled_from(list(EventFormat)), st.integers(1, 8))
def test_a_subscriber_that_folds_any_sequence_knows_what_is_held(events, form, max_blocks):
    encoder = EventEncoder(form, BLOCK)
    encoder.max_blocks = max_blocks
    truth = set()
    for event in events:
        match event:
            case BlocksStored(keys, medium):
                truth |= {(key, medium.value) for key in keys}
            case BlocksRemoved(keys, medium):
                truth -= {(key, medium.value) for key in keys}
            case AllBlocksCleared():
                truth = set()
    held = set()
    for batch in encoder.batches(events):
        assert all(len(getattr(event, "keys", ())) <= max_blocks for event in batch)
        for event in decode(encoder.encode(0, batch))[1]:
            fold(held, event)
    assert held == truth
