"""No message of those that a peer's role may say, and however odd, ends a cache-node or spoils its state."""

from dataclasses import replace

import pytest
from actor_harness import LAYOUT, ROLES, Harness
from adversary import KEYS, anything, pauses, said, senders
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mooncake_zmq.core.actor import Received
from mooncake_zmq.core.messages import BlocksLeased, CommitSlots, LeaseBlocks, ReleaseLease, ReserveSlots, ShortenFetch
from mooncake_zmq.core.work import BlocksCopied, CopyBlocks, DiskWritten, ProbeProcess, ProcessProbed, WorkFailed, WriteToDisk
from mooncake_zmq.pool.node.cache_node import CacheNode
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.settings import CacheNodeSettings, KvEventsSettings, SsdSettings

CAPACITY = 8
MAX_LEASES = 4
BASE = CacheNodeSettings(
    pool_bytes=CAPACITY * LAYOUT.slot_bytes, fetch_lease_s=20.0, max_lease_s=60.0, probe_s=1.0, max_leases_per_client=MAX_LEASES
)
PEERS = {name: ROLES[name[0]] for name in ("p0", "d0", "c0", "c1", "k")}


def outcome(work, share):
    """What copies and disks make of a work; every so often it fails, or its bytes are not what was told."""
    if share > 0.9:
        return WorkFailed("odd")
    match work:
        case CopyBlocks(copies=copies):
            told = [source.checksum if share < 0.7 else None for source, _ in copies]
            return BlocksCopied(tuple(told), () if share < 0.8 else (0,))
        case WriteToDisk(blocks=blocks):
            return DiskWritten(tuple(share < 0.5 for _ in blocks))
        case ProbeProcess():
            return ProcessProbed(share < 0.5)
    raise TypeError(work)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), said("cache-node", PEERS)),
        st.tuples(st.just("say"), said("cache-node", PEERS)),
        st.tuples(st.just("say"), st.tuples(senders.filter(PEERS.__contains__), anything)),
        st.tuples(st.just("put"), st.integers(1, 5)),
        st.tuples(st.just("lease"), st.integers(1, 5)),
        st.tuples(st.just("tail"), st.integers(0, 3)),
        st.tuples(st.just("shorten"), st.integers(0, 4)),
        st.tuples(st.just("reuse"), st.integers(0, 5)),
        st.tuples(st.just("answer"), st.integers(0, 9)),
        st.tuples(st.just("late"), st.integers(0, 5)),
        st.tuples(st.just("work"), st.floats(0, 1)),
        st.tuples(st.just("work"), st.floats(0, 0.5)),
        st.tuples(st.just("wait"), pauses),
        st.tuples(st.just("restart"), st.sampled_from(tuple(PEERS))),
    ),
    min_size=10,
    max_size=40,
)


@pytest.mark.filterwarnings("error")
@settings(max_examples=100)
@given(steps, st.booleans(), st.booleans())
def test_any_messages_leave_a_cache_node_sound(steps, tells, has_disk):
    node = new_node(tells, has_disk)
    for what, how in steps:
        take_step(node, what, how)
        gauges = node.actor.gauges(node.now)
        assert gauges["leases"] + gauges["pending_leases"] <= MAX_LEASES * len(PEERS) + BASE.max_requested_copies
    settle(node)
    assert not node.busy()


def settle(node):
    """Whoever wrote or read is dead, and all that was under way fails."""
    for name in PEERS:
        node.down(name)
        node.up(name, incarnation=1 << 48)
        node.down(name)
    for _ in range(20):
        while node.works:
            work_id, work = next(iter(node.works.items()))
            node.done(work_id, ProcessProbed(False) if isinstance(work, ProbeProcess) else WorkFailed("test"))
        node.advance(70.0)


def new_node(tells, has_disk):
    settings = replace(BASE, kv_events=KvEventsSettings(endpoint="tcp://*:1" if tells else ""))
    disk = DiskContents()
    if has_disk:
        ssd = SsdSettings(directory="/disk", bytes=16 * LAYOUT.slot_bytes, ahead=0.5, batch_blocks=2)
        settings, disk = replace(settings, ssd=ssd), DiskContents(16)
    actor = CacheNode(name="me", host="h0", incarnation=3, settings=settings, layout=LAYOUT, disk=disk)
    node = Harness(actor)
    for name in PEERS:
        node.up(name, 7, host="h1" if name in ("c0", "c1") else "h0")
    return node


def take_lease(lease_id, wanted):
    return LeaseBlocks(lease_id=lease_id, keys=wanted, sources=("c0", "c1"), fetch_s=5.0, ttl_s=5.0)


def take_step(node, what, how):
    match what:
        case "say":
            node.handle(Received(*how))
        case "put":
            put_id = 1000 + len(node.work_ids) + how
            node.handle(Received("p0", ReserveSlots(put_id=put_id, keys=KEYS[:how], ttl_s=5.0)))
            node.handle(Received("p0", CommitSlots(put_id=put_id, checksums=tuple((i, i + 1) for i in range(how)))))
        case "lease":
            ask = take_lease(5000 + how, KEYS[:how])
            node.handle(Received("d0", ask))
        case "tail":
            ask = structs.replace(take_lease(6000 + how, KEYS[: how + 2]), tail_first=how + 1)
            node.handle(Received("p0", ask))
        case "shorten":
            for number in range(4):
                node.handle(Received("p0", ShortenFetch(lease_id=6000 + number, first=how)))
        case "reuse":
            node.handle(Received("d0", ReleaseLease(lease_id=5000)))
            ask = take_lease(5000, KEYS[how : how + 2])
            node.handle(Received("d0", ask))
        case "late":
            asked = [(to, message) for to, message in node.sent if isinstance(message, LeaseBlocks)]
            for to, ask in asked[-2 - how :][:1]:
                columns = {"slots": (1,), "generations": (2,), "checksums": (5,)}
                node.handle(Received(to, BlocksLeased(lease_id=ask.lease_id, node=to, incarnation=7, **columns)))
        case "answer":
            asked = [(to, message) for to, message in node.sent if isinstance(message, LeaseBlocks)]
            if asked:
                to, ask = asked[-1]
                columns = {"slots": tuple(range(how)), "generations": (2,) * how, "checksums": (5,) * how}
                node.handle(Received(to, BlocksLeased(lease_id=ask.lease_id, node=to, incarnation=7, **columns)))
        case "work" if node.works:
            work_id, work = sorted(node.works.items())[0]
            node.done(work_id, outcome(work, how))
        case "wait":
            node.advance(how)
        case "restart":
            node.down(how)
            node.up(how, int(node.now * 1000) + 8)


def test_a_source_speaks_of_its_own_blocks_alone():
    node = new_node(tells=False, has_disk=False)
    node.handle(Received("d0", LeaseBlocks(lease_id=1, keys=KEYS[:1], sources=("c0",), fetch_s=5.0, ttl_s=5.0)))
    ask = node.one(LeaseBlocks, "c0")
    of_another = BlocksLeased(lease_id=ask.lease_id, node="c1", incarnation=7, slots=(0,), generations=(2,), checksums=(5,))
    node.handle(Received("c0", of_another))
    assert not node.works
    assert node.one(BlocksLeased, "d0").slots == ()
    own = structs.replace(of_another, node="c0")
    node.handle(Received("c0", own))
    assert not node.works, "it had its say"
