"""A vLLM's own prefix cache as its KV events tell of it: in our keys, of any block length, and never more than is there."""

import contextlib
import itertools
import math

import msgpack
import pytest
import structlog
import waiting
import xxhash
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from test_vllm_node import BASE, LAYOUT, Harness
from waiting import eventually

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import BlocksAnnounced
from mooncake_zmq.core.work import EngineReported, WatchEngine
from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens, root_of_salt, salt_of
from mooncake_zmq.kv.engine_events import EngineBatch, EngineCleared, EngineRemoved, EngineStored, EventError, decode_batch
from mooncake_zmq.kv.image_keys import digest_of, keys_with_images
from mooncake_zmq.runtime import kv_subscriber
from mooncake_zmq.runtime.kv_events import END
from mooncake_zmq.runtime.kv_subscriber import KvSubscriber
from mooncake_zmq.vllm_node.mirror import Mirror
from mooncake_zmq.vllm_node.vllm_node import VllmNode

ROOT = bytes(range(16))
SALT = salt_of(ROOT)


def hashes(tokens, size):
    ends = range(size, len(tokens) + 1, size)
    return [xxhash.xxh3_128_digest(f"{size}{tokens[:end]}".encode()) for end in ends]


def test_one_name_for_two_blocks_is_the_last_one():
    seen = mirror()
    first, second = list(range(4)), list(range(10, 14))
    seen.apply([stored(first, 4)])
    came, gone = seen.apply([EngineStored((hashes(first, 4)[0],), None, pack_tokens(second), 4, SALT)])
    assert (came, gone) == (extend_keys(ROOT, pack_tokens(second), 4), extend_keys(ROOT, pack_tokens(first), 4))
    seen.check()


def stored(tokens, size, first=0, salt=SALT):
    """vLLM's blocks of a prompt from block `first` on."""
    names = hashes(tokens, size)
    packed = pack_tokens(tokens[first * size : len(names) * size])
    return EngineStored(tuple(names[first:]), names[first - 1] if first else None, packed, size, "" if first else salt)


def mirror(block_tokens=4, most=1000):
    return Mirror(block_tokens, most, root_of_salt)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12])
def test_stored_blocks_are_our_keys_whatever_their_length(size):
    seen, tokens = mirror(), list(range(50))
    keys = extend_keys(ROOT, pack_tokens(tokens[: len(tokens) // size * size]), 4)
    assert seen.apply([stored(tokens, size)]) == (keys, [])
    assert seen.apply([stored(tokens, size)]) == ([], [])
    assert seen.apply([EngineCleared()]) == ([], keys)
    assert not seen.held


def test_a_chain_may_come_in_pieces():
    seen, tokens = mirror(), list(range(24))
    seen.apply([stored(tokens[:9], 3)])
    seen.apply([stored(tokens, 3, first=3)])
    assert seen.held == extend_keys(ROOT, pack_tokens(tokens), 4)


def test_a_block_of_ours_goes_with_the_first_of_those_it_needs():
    seen, tokens = mirror(8), list(range(24))
    names, keys = hashes(tokens, 4), extend_keys(ROOT, pack_tokens(tokens), 8)
    seen.apply([stored(tokens, 4)])
    assert seen.apply([EngineRemoved((names[2],))]) == ([], [keys[1]])
    assert seen.apply([EngineRemoved((names[3], b"nobody"))]) == ([], [])
    assert seen.held == [keys[0], keys[2]]


def test_one_group_with_full_attention_stands_for_all():
    seen, tokens = mirror(), list(range(16))
    names, keys = hashes(tokens, 4), extend_keys(ROOT, pack_tokens(tokens), 4)
    event = stored(tokens, 4)
    assert seen.apply([structs.replace(event, group=2)]) == (keys, [])
    assert seen.apply([structs.replace(event, group=3), EngineRemoved((names[0],), 3), EngineRemoved((names[1],), 0)]) == (
        [],
        [],
    )
    assert seen.apply([EngineRemoved((names[2],), 2)]) == ([], [keys[2]])
    seen.apply([EngineCleared()])
    assert seen.apply([event]) == (keys, []), "after another start of the engine it may be another group"


def test_what_is_not_ours_or_hangs_in_the_air_is_passed_over():
    seen, tokens = mirror(), list(range(16))
    assert seen.apply([stored(tokens, 4, salt="a tenant's own"), stored(tokens, 4, first=2)]) == ([], [])
    assert seen.unknown == 6


def test_no_more_blocks_are_noted_than_allowed():
    seen = mirror(4, most=3)
    came, _ = seen.apply([stored(list(range(40)), 4)])
    assert len(came) == len(seen) == 3
    assert seen.unknown == 7


changes = st.lists(
    st.tuples(st.sampled_from("srs"), st.integers(0, 3), st.integers(0, 8), st.integers(1, 8), st.sampled_from((1, 2, 3, 6))),
    max_size=30,
)


@settings(max_examples=80)
@given(changes)
def test_nothing_is_said_to_be_there_that_is_not(steps):
    seen, there, told = mirror(4), {}, set()
    for kind, prompt, first, count, size in steps:
        tokens = [prompt % 2, *range(10), prompt, *range(20, 43)]
        names = hashes(tokens, size)
        if kind == "s":
            first = min(first, len(names) - 1)
            tokens = tokens[: (first + count) * size]
            event = stored(tokens, size, first=first)
            if not first or names[first - 1] in there:
                there |= {name: None for name in event.hashes}
        else:
            event = EngineRemoved(tuple(names[first : first + count]))
            for name in event.hashes:
                there.pop(name, None)
        came, gone = seen.apply([event])
        told = (told | set(came)) - set(gone)
        seen.check()
        assert told == set(seen.held)
    spans = {}
    for prompt in range(4):  # several begin alike, and blocks of either may be there
        tokens = [prompt % 2, *range(10), prompt, *range(20, 43)]
        for index, key in enumerate(extend_keys(ROOT, pack_tokens(tokens), 4)):
            for size in (1, 2, 3, 6):
                names = hashes(tokens, size)[index * 4 // size : -(-(index + 1) * 4 // size)]
                spans.setdefault(key, []).append(names)
    assert all(any(all(name in there for name in span) for span in spans[key]) for key in told)


# --- the wire


def as_map(tokens, salt, **more):
    return {
        "type": "BlockStored",
        "block_hashes": [b"a" * 32, -5],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[salt], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def batch(*events, time_s=1.5):
    return msgpack.packb([time_s, list(events), None])


FOUR = EngineStored((b"a" * 32, (2**64 - 5).to_bytes(8, "big")), None, pack_tokens([1, 2, 3, 4]), 2, SALT)


def test_both_shapes_of_the_wire_are_read():
    event = as_map([1, 2, 3, 4], SALT)
    array = ["BlockStored", *list(event.values())[1:], "something new"]
    removed, cleared = EngineRemoved((b"h",)), EngineCleared()
    assert decode_batch(batch(event, {"type": "BlockRemoved", "block_hashes": [b"h"]}, {"type": "AllBlocksCleared"})) == (
        EngineBatch(1.5, (FOUR, removed, cleared))
    )
    assert decode_batch(batch(array, ["BlockRemoved", [b"h"], "GPU"], ["AllBlocksCleared"], ["Later", 3])) == (
        EngineBatch(1.5, (FOUR, removed, cleared))
    )


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "STORAGE"},
        {"lora_id": 3},
        {"group_idx": 1, "kv_cache_spec_kind": None},
        {"kv_cache_spec_kind": "sliding_window"},
        {"extra_keys": None},
        {"extra_keys": [None, None]},
        {"extra_keys": [[SALT, "lora"], None]},
        {"extra_keys": [[SALT], ["image"]]},
        {"extra_keys": [[SALT, ["image", "3"]], None]},
    ],
)
def test_blocks_that_no_request_of_ours_can_reuse_are_passed_over(more):
    assert decode_batch(batch(as_map([1, 2, 3, 4], SALT, **more))).events == ()


CAT, DOG = "ca" * 32, "d0" * 32
ADAPTED = {"lora_id": 1, "lora_name": "poet"}
OURS = salt_of(bytes(range(16)))


def test_blocks_of_an_adapter_are_read_under_the_salt_that_covers_it():
    first = as_map([1, 2, 3, 4], OURS, **ADAPTED, extra_keys=[["poet", OURS], ["poet"]])
    later = as_map([5, 6, 7, 8], "", **ADAPTED, parent_block_hash=b"p", extra_keys=[["poet"], ["poet"]])
    assert decode_batch(batch(first, later)).events == (
        structs.replace(FOUR, salt=OURS),
        structs.replace(FOUR, parent=b"p", tokens=pack_tokens([5, 6, 7, 8]), salt=""),
    )


@pytest.mark.parametrize(
    "extra_keys",
    [
        [["poet", "a salt of another"], ["poet"]],
        [["poet"], ["poet"]],
        [["poet", OURS], ["poet", "image"]],
        [["poet", OURS], None],
        [[OURS], None],
        [[OURS, OURS], [OURS]],
        None,
    ],
)
def test_blocks_of_an_adapter_with_other_keys_are_passed_over(extra_keys):
    assert decode_batch(batch(as_map([1, 2, 3, 4], OURS, **ADAPTED, extra_keys=extra_keys))).events == ()


def test_images_are_read_where_they_begin_and_not_where_they_go_on():
    keys = [[[CAT, 1], [DOG, 0], SALT], [[DOG, -2]]]
    (event,) = decode_batch(batch(as_map([1, 3, 3, 3], SALT, extra_keys=keys))).events
    assert event == structs.replace(FOUR, tokens=pack_tokens([1, 3, 3, 3]), images=((0, digest_of(DOG)), (1, digest_of(CAT))))
    later = as_map([3, 3, 3, 5], "", parent_block_hash=b"p", extra_keys=[[[DOG, -4]], [["poet:" + CAT, 1]]])
    (event,) = decode_batch(batch(later)).events
    assert event.images == ((3, digest_of(CAT)),)


def seen_with_images(tokens, images, size, block_tokens=4):
    """Return the keys that a mirror has of a prompt that vLLM reports in blocks of `size` tokens."""
    seen, extra, parent = Mirror(block_tokens, 100, {"": None, SALT: ROOT}.get), [], None
    for first in range(0, len(tokens) - size + 1, size):
        extra = [[name, at - first] for at, length, name in images if at < first + size and first < at + length]
        raw = as_map(
            tokens[first : first + size],
            SALT,
            block_hashes=[f"{first}".encode()],
            block_size=size,
            parent_block_hash=parent,
            extra_keys=[[*extra, *([] if parent else [SALT])] or None],
        )
        parent = f"{first}".encode()
        seen.apply(decode_batch(batch(raw)).events)
        seen.check()
    return seen.held


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_keys_of_prompts_with_images_are_those_that_a_gateway_makes(size):
    tokens = [7, 3, 3, 3, 3, 3, 8, 3, 3, 9, 10, 11]

    def keys(first, second):
        begins = ((1, digest_of(first)), (7, digest_of(second)))
        made = keys_with_images(ROOT, pack_tokens(tokens), 4, begins)
        assert seen_with_images(tokens, ((1, 5, first), (7, 2, second)), size) == made
        return made

    both, other, last = keys(CAT, DOG), keys(DOG, DOG), keys(CAT, CAT)
    assert not set(both) & set(other), "equal tokens of other images"
    assert both[:1] == last[:1]
    assert not set(both[1:]) & set(last)
    assert not set(both) & set(extend_keys(ROOT, pack_tokens(tokens), 4))


def test_blocks_of_full_attention_are_read_whichever_group_has_them():
    event = as_map([1, 2, 3, 4], SALT, group_idx=2)
    removed = {"type": "BlockRemoved", "block_hashes": [b"h"], "group_idx": 1}
    assert decode_batch(batch(event, removed)).events == (structs.replace(FOUR, group=2), EngineRemoved((b"h",), 1))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb(3),
        msgpack.packb(["now", []]),
        batch(3),
        batch(as_map([1, 2, 3], SALT)),
        batch(as_map([1, 2, 3, -1], SALT)),
        batch(as_map([1, 2, 3, "4"], SALT)),
        batch(as_map([1, 2, 3, 4], SALT, block_hashes=[1 << 63, "x"])),
        batch(as_map([1, 2, 3, 4], SALT, block_hashes=None)),
        batch(as_map([], SALT, block_size=0)),
        batch({"type": "BlockRemoved"}),
        batch(as_map([1, 2, 3, 4], SALT, group_idx="1")),
        batch(as_map([1, 2, 3, 4], SALT, group_idx=-1)),
        b"\x91" * 5000,
    ],
)
def test_anything_else_is_one_error(payload):
    with pytest.raises(EventError):
        decode_batch(payload)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_a_batch_or_that_error(payload):
    with contextlib.suppress(EventError):
        decode_batch(payload)


class Publisher:
    """A vLLM's sockets: what was published can be replayed from `kept` on."""

    def __init__(self):
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.router = self.context.socket(zmq.ROUTER)
        for each in (self.pub, self.router):
            each.setsockopt(zmq.LINGER, 0)
            each.bind("tcp://127.0.0.1:*")
        self.endpoint, self.replay = (each.get_string(zmq.LAST_ENDPOINT) for each in (self.pub, self.router))
        self.told = []

    def send(self, number, *events, time_s=1.0):
        self.pub.send_multipart([b"", number.to_bytes(8, "big"), batch(*events, time_s=time_s)])

    def answer(self, batches):
        assert self.router.poll(20_000), "a replay is asked for"
        who, empty, start = self.router.recv_multipart()
        for number, payload in batches:
            if number >= int.from_bytes(start, "big"):
                self.router.send_multipart([who, empty, number.to_bytes(8, "big"), payload])
        self.router.send_multipart([who, empty, END, b""])
        return int.from_bytes(start, "big")

    def until(self, count):
        eventually(lambda: len(self.told) >= count)
        return self.told

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def publisher():
    made = Publisher()
    yield made
    made.close()


def removed(name):
    return {"type": "BlockRemoved", "block_hashes": [name]}


def test_gaps_are_replayed_and_a_new_life_of_vllm_clears_what_was_heard(publisher):
    crashes = []
    heard = KvSubscriber(
        publisher.endpoint, replay_endpoint=publisher.replay, topic="", on_events=publisher.told.append, on_crash=crashes.append
    )
    try:
        assert publisher.pub.recv() == b"\x01"
        assert publisher.answer([(0, batch(removed(b"0"), time_s=1.0)), (1, batch(removed(b"1"), time_s=2.0))]) == 0
        publisher.until(2)
        publisher.send(1, removed(b"1"), time_s=2.0)  # it was replayed already
        publisher.send(4, removed(b"4"), time_s=5.0)
        assert publisher.answer([(2, batch(removed(b"2"), time_s=3.0)), (3, batch(removed(b"3"), time_s=4.0))]) == 2
        assert [event.hashes[0] for (event,) in publisher.until(5)] == [b"0", b"1", b"2", b"3", b"4"]
        publisher.send(0, removed(b"new"), time_s=9.0)
        assert publisher.until(7)[5:] == [(EngineCleared(),), (EngineRemoved((b"new",)),)]
        publisher.send(7, removed(b"7"), time_s=10.0)
        publisher.answer([])
        assert publisher.until(9)[7:] == [(EngineCleared(),), (EngineRemoved((b"7",)),)], "what was lost may have been removals"
        publisher.pub.send_multipart([b"", (8).to_bytes(8, "big"), b"garbage"])
        assert publisher.until(10)[9:] == [(EngineCleared(),)]
        publisher.pub.send_multipart([b"odd"])
        publisher.send(9, removed(b"9"), time_s=11.0)
        assert publisher.until(11)[10:] == [(EngineRemoved((b"9",)),)]
    finally:
        heard.close()
    assert not crashes


def test_a_vllm_that_ends_is_cleared_whatever_numbers_and_times_the_next_one_has(publisher):
    crashes = []
    heard = KvSubscriber(
        publisher.endpoint, replay_endpoint="", topic="", on_events=publisher.told.append, on_crash=crashes.append
    )
    numbers = itertools.count()

    def is_bound():
        with contextlib.suppress(zmq.ZMQError):  # sockets are closed later than by the call
            publisher.pub.bind(publisher.endpoint)
            return True

    try:
        assert publisher.pub.recv() == b"\x01"
        for number in range(2):
            publisher.send(number, removed(b"old"), time_s=10.0)
        publisher.until(2)
        publisher.pub.close()
        publisher.pub = publisher.context.socket(zmq.XPUB)
        waiting.eventually(is_bound)
        assert publisher.pub.recv() == b"\x01"

        def is_heard():
            publisher.send(next(numbers), removed(b"new"), time_s=1.0)  # its clock was set back
            return (EngineRemoved((b"new",)),) in publisher.told

        waiting.eventually(is_heard)
        assert publisher.told[2] == (EngineCleared(),)
    finally:
        heard.close()
    assert not crashes


@pytest.mark.parametrize("listens", [True, False])
def test_an_endpoint_where_nothing_listens_is_logged_once(publisher, monkeypatch, tmp_path, listens):
    if not listens:
        monkeypatch.setattr(kv_subscriber, "UNREACHED_S", 0.0)
    endpoint = publisher.endpoint if listens else f"ipc://{tmp_path}/none"
    crashes = []
    with structlog.testing.capture_logs() as logs:
        heard = KvSubscriber(endpoint, replay_endpoint="", topic="", on_events=publisher.told.append, on_crash=crashes.append)
        try:
            waiting.eventually(lambda: heard._warns_at == math.inf)
            assert not listens or publisher.pub.recv() == b"\x01"
        finally:
            heard.close()
    assert [(line["event"], line["endpoint"]) for line in logs] == [("kv_events_not_reached", endpoint)] * (not listens)
    assert not crashes


# --- the actor


def test_conductors_hear_of_blocks_that_vllm_holds_now_and_when_they_come():
    own = type(BASE)(kv_events="tcp://127.0.0.1:5557")
    node = Harness(VllmNode(name="me", host="h0", incarnation=2, settings=own, layout=LAYOUT, costs=Costs()))
    node.up("k")
    (watch,) = [work_id for work_id, work in node.works.items() if isinstance(work, WatchEngine)]
    tokens = list(range(LAYOUT.block_tokens * 3))
    keys = extend_keys(ROOT, pack_tokens(tokens), LAYOUT.block_tokens)
    node.progress(watch, EngineReported((stored(tokens, LAYOUT.block_tokens),)))
    assert node.one(BlocksAnnounced).stored == tuple(keys)
    node.progress(watch, EngineReported((EngineRemoved((hashes(tokens, LAYOUT.block_tokens)[2],)),)))
    assert node.one(BlocksAnnounced).removed == (keys[2],)
    node.down("k")
    node.up("k", 2)
    assert node.one(BlocksAnnounced).stored == tuple(keys[:2])
    assert not node.busy()
