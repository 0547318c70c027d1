"""Several answers to one prompt are placed as what they are: one prefill, and as many requests on one decode."""

from conductor_harness import BLOCK, COSTS, Cluster

from mooncake_zmq.core.messages import Placed, Rejected, RejectReason


def test_a_decode_is_chosen_that_has_room_for_all():
    cluster = Cluster()
    need = 4 * 2 * BLOCK
    cluster.decode_load("d0", free=need - 1)
    cluster.decode_load("d1", running=20, free=need)
    assert cluster.schedule(tokens=BLOCK + 10, max_tokens=100).decode == "d0"
    assert cluster.schedule(tokens=BLOCK + 10, max_tokens=100, choices=4).decode == "d1"
    cluster.decode_load("d1", running=20, free=need, room=3)
    assert cluster.schedule(tokens=BLOCK + 10, max_tokens=100, choices=4).decode == "d0", "which takes some"


def test_where_not_all_fit_one_is_placed_and_none_is_refused_for_the_others():
    cluster = Cluster()
    for name in ("d0", "d1"):
        cluster.decode_load(name, room=2)
    assert isinstance(cluster.schedule(tokens=100, choices=128), Placed)
    for name in ("d0", "d1"):
        cluster.decode_load(name, room=0)
    answer = cluster.schedule(tokens=100, choices=2)
    assert (type(answer), answer.reason) == (Rejected, RejectReason.NO_ROOM)


def test_all_of_them_count_until_the_decode_reports_them():
    cluster = Cluster(1)
    cluster.decode_load("d0", room=6)
    answer = cluster.schedule(tokens=100, choices=4)
    assert cluster.conductor.gauges(cluster.now)["decode_requests"] == 4
    node = cluster.conductor._decodes.by_name["d0"]
    assert (node.places, node.coming_requests) == (2, 4)
    cluster.decode_load("d0", reserved=4, room=2, bookings=(answer.booking,) * 4)
    assert (node.places, node.there) == (2, 0), "reserved, and on their way still"
    cluster.end(answer)
    assert (node.places, node.coming_requests) == (2, 0)


def test_as_many_as_would_make_the_steps_too_long_are_refused():
    answers = []
    for choices in (2, 6):
        cluster = Cluster(1, tbt_slo_s=1.1 * COSTS.step_s(8, 8 * 200))
        cluster.decode_load("d0", running=5, context_tokens=5 * 100)
        answers.append(cluster.schedule(tokens=100, choices=choices))
    assert isinstance(answers[0], Placed)
    assert (type(answers[1]), answers[1].reason) == (Rejected, RejectReason.TBT)


def test_the_prefill_is_booked_once():
    one, many = Cluster(1), Cluster(1)
    one.schedule(tokens=20_000)
    many.schedule(tokens=20_000, choices=16)
    later = [cluster.schedule(tokens=100).ttft_s for cluster in (one, many)]
    assert later[0] == later[1]
