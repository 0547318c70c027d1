"""The ledger of what decodes lend: who borrows for a request that no decode has room for, and of whom."""

import pytest
from conductor_harness import BLOCK, Cluster, hello
from msgspec import structs

from mooncake_zmq.core.actor import PeerUp
from mooncake_zmq.core.messages import GROWTH_TOKENS, Placed, Rejected, RejectReason

FREE = 8 * BLOCK
PROMPT = 12 * BLOCK


def lending(hosts=4, **more):
    """Decodes of eight blocks, of which each but d0 lends as many as its number."""
    cluster = Cluster(hosts)
    for number in range(hosts):
        loads = {"free": FREE, "capacity": FREE, "borrows": True, "lendable": number * BLOCK} | more
        cluster.decode_load(f"d{number}", **loads)
    return cluster


def place(cluster, tokens=PROMPT, max_tokens=1, **more):
    return cluster.schedule(tokens=tokens, max_tokens=max_tokens, **more)


def test_a_prompt_without_room_anywhere_goes_to_a_decode_that_borrows_most_of_the_one_that_lends_most():
    placed = place(lending())
    assert isinstance(placed, Placed)
    assert placed.lenders == tuple(name for name in ("d3", "d2", "d1") if name != placed.decode)


def test_a_prompt_that_has_room_somewhere_borrows_nothing():
    cluster = lending()
    cluster.decode_load("d2", free=2 * FREE, capacity=2 * FREE)
    placed = place(cluster)
    assert (placed.decode, placed.lenders) == ("d2", ())


def test_the_decode_with_the_most_free_kv_borrows():
    cluster = lending()
    cluster.decode_load("d3", free=FREE - BLOCK, capacity=FREE, borrows=True, lendable=8 * BLOCK)
    cluster.decode_load("d0", free=FREE, capacity=FREE, borrows=False)
    cluster.decode_load("d1", free=FREE - BLOCK, capacity=FREE, borrows=True)
    assert place(cluster).decode == "d2"


@pytest.mark.parametrize(("own", "borrows"), [(PROMPT - 1, True), (PROMPT, False)])
def test_a_decode_that_has_room_borrows_what_it_does_not_want_of_a_prompt(own, borrows):
    cluster = Cluster(3)
    cluster.decode_load("d0", borrows=True, own_tokens=own)
    for name in ("d1", "d2"):
        cluster.decode_load(name, lendable=PROMPT, room=0)
    placed = place(cluster)
    assert (placed.decode, bool(placed.lenders)) == ("d0", borrows)
    assert place(cluster, tokens=4 * PROMPT).decode == "d0", "it has what is not lent"


def test_a_tenant_that_has_something_at_a_decode_borrows_nothing_behind_it():
    cluster = Cluster(2)
    cluster.decode_load("d0", borrows=True, own_tokens=0)
    cluster.decode_load("d1", lendable=4 * PROMPT, room=0)
    assert [place(cluster, tenant="t").lenders for _ in range(2)] == [("d1",), ()]


@pytest.mark.parametrize("more", [{"borrows": False}, {"lendable": BLOCK}, {"free": 0, "lendable": 2 * BLOCK}])
def test_a_prompt_for_which_too_little_is_lent_is_refused_for_now(more):
    refused = place(lending(**more))
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectReason.NO_ROOM


def report(cluster, name, **more):
    cluster.decode_load(name, **({"free": FREE, "capacity": FREE, "borrows": True, "lendable": 5 * BLOCK} | more))


def test_what_was_promised_is_promised_to_no_other_until_it_is_reserved():
    cluster = lending(2, lendable=5 * BLOCK)
    placed = place(cluster)
    (lender,) = placed.lenders
    for name in ("d0", "d1"):
        report(cluster, name)
    assert isinstance(place(cluster), Rejected), "its lender has yet to be asked"
    assert isinstance(place(cluster, FREE - BLOCK), Rejected), "nor has another prompt room there"
    report(cluster, placed.decode, free=0, bookings=(placed.booking,))
    report(cluster, lender, free=3 * BLOCK, lendable=0)
    assert isinstance(place(cluster, 4 * BLOCK), Rejected)
    report(cluster, lender)
    assert place(cluster, 7 * BLOCK).decode == lender, "what is reserved is in its report"


def test_what_was_promised_to_a_request_that_ended_is_lent_to_another():
    cluster = lending(2, lendable=5 * BLOCK)
    placed = place(cluster)
    cluster.end(placed)
    assert place(cluster) is not None
    assert isinstance(place(cluster), Rejected)


def test_a_lender_that_leaves_is_promised_no_more():
    cluster = lending(2, lendable=5 * BLOCK)
    placed = place(cluster)
    (lender,) = placed.lenders
    cluster.down(lender)
    cluster.up(lender, "decode", "h0", 2)
    report(cluster, lender)
    cluster.end(placed)
    assert isinstance(place(cluster), Placed)


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
def test_an_attempt_that_goes_on_where_it_is_is_promised_nothing_again(is_up):
    cluster = lending(2, lendable=5 * BLOCK)
    placed = place(cluster, request_id="r")
    (lender,) = placed.lenders
    if is_up:
        report(cluster, placed.decode, free=0, bookings=(placed.booking,))
    else:
        cluster.down(lender)
    assert isinstance(place(cluster, 99 * BLOCK, request_id="r", attempt=2), Rejected)
    if is_up:
        assert place(cluster, FREE - BLOCK).decode == lender, "what is reserved is in its report"


@pytest.mark.parametrize("order", [("d0", "d1"), ("d1", "d0")])
@pytest.mark.parametrize("free", [FREE, FREE - BLOCK])
def test_the_only_lender_does_not_borrow_whatever_it_has_and_when_it_reported(order, free):
    cluster = Cluster(2)
    for name in order:
        report(cluster, name, free=free if name == "d0" else FREE, lendable=FREE if name == "d1" else 0)
    placed = place(cluster)
    assert (placed.decode, placed.lenders) == ("d0", ("d1",))


def test_no_more_output_is_counted_than_a_decode_leaves_room_for():
    cluster = lending(lendable=FREE)
    longest = 4 * FREE - GROWTH_TOKENS
    assert isinstance(place(cluster, longest, max_tokens=longest), Placed)


def test_excluded_decodes_neither_borrow_nor_lend_while_there_are_others():
    cluster = lending(lendable=5 * BLOCK)
    placed = place(cluster, exclude=("d0", "d1"))
    assert {placed.decode, *placed.lenders} == {"d2", "d3"}
    placed = place(lending(2, lendable=5 * BLOCK), exclude=("d0",))
    assert {placed.decode, *placed.lenders} == {"d0", "d1"}


def test_nothing_is_borrowed_while_a_node_would_not_pass_on_of_whom():
    cluster = lending(lendable=5 * BLOCK)
    cluster.handle(PeerUp("g2", 1, structs.replace(hello("gateway", "h1"), protocol=22)))
    cluster.decode_load("d0", free=FREE, capacity=FREE, borrows=True, lendable=5 * BLOCK)
    assert place(cluster).decode != "d0"


def test_several_answers_to_a_prompt_borrow_for_the_first():
    placed = place(lending(lendable=5 * BLOCK), choices=3)
    assert placed.lenders


def lends_only(cluster, name):
    cluster.decode_load(name, room=0, max_batch=0, lendable=PROMPT)


def test_without_a_decode_that_serves_a_request_waits_for_one_whatever_lends():
    cluster = Cluster(2)
    lends_only(cluster, "d1")
    cluster.down("d0")
    assert place(cluster).reason is RejectReason.NO_DECODE
    cluster.up("d0", "decode", "h0", 2)
    cluster.decode_load("d0", free=0)
    assert place(cluster).reason is RejectReason.NO_ROOM


def test_several_answers_to_a_prompt_are_whole_where_there_is_room_whatever_a_decode_wants_of_it():
    cluster = Cluster(2)
    cluster.decode_load("d0", borrows=True, own_tokens=0)
    lends_only(cluster, "d1")
    assert place(cluster, choices=3).lenders == ()
    assert cluster.conductor._decodes.by_name["d0"].coming_requests == 3
    assert place(cluster).lenders == ("d1",)


def test_a_prompt_of_which_few_tokens_are_kept_goes_where_these_have_room_and_borrows_nothing():
    cluster = lending()
    placed = place(cluster, kept_tokens=FREE - BLOCK)
    assert isinstance(placed, Placed)
    assert (placed.lenders, placed.stages) == ((), ())
    cluster = lending()
    refused = place(cluster, kept_tokens=FREE)
    assert isinstance(refused, Rejected), "with its answer it has no room, and is not lent any"
    assert refused.reason is RejectReason.NO_ROOM


def test_a_decode_that_borrows_what_it_does_not_want_of_a_prompt_holds_what_is_kept_of_one():
    cluster = Cluster(1)
    cluster.decode_load("d0", borrows=True, own_tokens=0)
    assert place(cluster, kept_tokens=BLOCK).decode == "d0"


def test_a_decode_of_whose_room_nothing_is_known_is_taken_only_when_no_other_has_room_or_borrows():
    cluster = lending()
    cluster.up("d9", "decode", "h9")
    placed = place(cluster)
    assert placed.lenders
    assert placed.decode != "d9"
    for number in range(4):
        cluster.decode_load(f"d{number}", free=FREE, capacity=FREE)
    assert place(cluster).decode == "d9"
