"""The ledger of what decodes lend: who borrows for a request that no decode has room for, and of whom."""

import pytest
from conductor_harness import BLOCK, Cluster, hello
from msgspec import structs

from mooncake_zmq.core.actor import PeerUp
from mooncake_zmq.core.messages import Placed, Rejected, RejectReason

FREE = 8 * BLOCK
PROMPT = 12 * BLOCK


def lending(hosts=4, **more):
    """Decodes of eight blocks, of which each but d0 lends as many as its number."""
    cluster = Cluster(hosts)
    for number in range(hosts):
        loads = {"free": FREE, "capacity": FREE, "borrows": True, "lendable": number * BLOCK} | more
        cluster.decode_load(f"d{number}", **loads)
    return cluster


def place(cluster, tokens=PROMPT, **more):
    return cluster.schedule(tokens=tokens, max_tokens=1, **more)


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


@pytest.mark.parametrize("more", [{"borrows": False}, {"lendable": BLOCK}, {"free": 0, "lendable": 2 * BLOCK}])
def test_a_prompt_for_which_too_little_is_lent_is_refused_for_now(more):
    refused = place(lending(**more))
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectReason.NO_ROOM


def test_what_was_promised_is_promised_to_no_other_until_it_is_reported_again():
    cluster = lending(2, lendable=5 * BLOCK)
    placed = place(cluster)
    (lender,) = placed.lenders
    assert isinstance(place(cluster), Rejected)
    cluster.end(placed)
    for name in ("d0", "d1"):
        cluster.decode_load(name, free=FREE, capacity=FREE, borrows=True, lendable=5 * BLOCK)
    assert isinstance(place(cluster), Placed)
    assert lender in ("d0", "d1")


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
