"""No message, from whomever and however odd, ends a conductor or spoils its state."""

import pytest
from adversary import anything, of, pauses, senders
from conductor_harness import Cluster, keys
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mooncake_zmq.core.actor import PeerDown, Received
from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    CacheLoad,
    DecodeLoad,
    PrefillLoad,
    RequestEnded,
    Schedule,
)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.just("g"), of(Schedule, RequestEnded)),
        st.tuples(st.just("say"), st.sampled_from(("p0", "p1")), of(PrefillLoad)),
        st.tuples(st.just("say"), st.sampled_from(("d0", "d1")), of(DecodeLoad)),
        st.tuples(st.just("say"), st.sampled_from(("c0", "c1")), of(CacheLoad, BlocksAnnounced)),
        st.tuples(st.just("say"), senders, anything),
        st.tuples(st.just("name"), st.sampled_from(("p0", "p1")), of(PrefillLoad)),
        st.tuples(st.just("name"), st.sampled_from(("d0", "d1")), of(DecodeLoad)),
        st.tuples(st.just("wait"), pauses, st.none()),
        st.tuples(st.just("restart"), st.sampled_from(("p0", "d0", "c0", "g")), st.none()),
    ),
    max_size=40,
)


def naming(load, conductor):
    """The report with numbers of real bookings in the place of those it has."""
    numbers = [booking.placed.booking for booking in conductor._bookings.all()] or [0]
    if isinstance(load, DecodeLoad):
        return structs.replace(load, bookings=tuple(numbers[i % len(numbers)] for i, _ in enumerate(load.bookings)))
    jobs = [structs.replace(job, booking=numbers[i % len(numbers)]) for i, job in enumerate(load.jobs)]
    return structs.replace(load, jobs=tuple(jobs))


@pytest.mark.filterwarnings("error")
@settings(max_examples=100)
@given(
    steps,
    st.sampled_from(("none", "baseline", "early", "prediction")),
    st.sampled_from(("global", "local", "match", "load", "round-robin", "random")),
    st.sampled_from((0, 1.0)),
)
def test_any_messages_leave_a_conductor_sound(steps, admission, policy, slo_s):
    cluster = Cluster(2, admission=admission, policy=policy, ttft_slo_s=slo_s, tbt_slo_s=slo_s, max_keys=4, max_bookings=3)
    roles = {"p0": "prefill", "d0": "decode", "c0": "cache-node", "g": "gateway"}
    for what, whom, message in steps:
        match what:
            case "say":
                cluster.handle(Received(whom, message))
            case "name":
                cluster.handle(Received(whom, naming(message, cluster.conductor)))
            case "wait":
                cluster.advance(whom)
            case _:
                cluster.handle(PeerDown(whom, "test"))
                cluster.up(whom, roles[whom], "h0", incarnation=int(cluster.now * 1000))
    cluster.advance(200.0)
    for name in ("p0", "p1"):
        cluster.prefill_load(name)
    for name in ("d0", "d1"):
        cluster.decode_load(name)
    answer = cluster.schedule(keys("fresh", 1), begun=True)
    assert answer.prefill in ("p0", "p1"), "and it serves as before"
