"""Decodes that lend each other KV: what is asked, read and returned, and that whatever goes wrong costs an attempt alone."""

from dataclasses import replace

import pytest
from actor_harness import LAYOUT, Harness

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    MAX_BLOCKS,
    AttemptFailed,
    BlocksLent,
    CancelRequest,
    DecodeDenied,
    DecodeLoad,
    DecodeReserved,
    FillLoan,
    HandoffBlocks,
    HandoffDone,
    HandoffReceived,
    LendBlocks,
    LoanEnded,
    LoanFilled,
    LoanPlace,
    ReserveDecode,
    ReserveSlots,
    ReturnBlocks,
    Sampling,
    Sibling,
    SlotRef,
    StopRule,
    TokensDecoded,
)
from mooncake_zmq.core.work import (
    BlocksPulled,
    BorrowParts,
    DecodeStep,
    Done,
    LendSequence,
    LentPart,
    PullBlocks,
    SequenceLent,
    StepDecoded,
    TakeBack,
    WorkFailed,
)
from mooncake_zmq.decode.decode import Decode
from mooncake_zmq.decode.lateness import AGAIN_S, LEAST_S, lenders_s
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens
from mooncake_zmq.kv.checksum import block_checksum

B, LAYERS = LAYOUT.block_tokens, LAYOUT.layers
ROOT = namespace(model="m", layout="l")
BASE = DecodeSettings(capacity_tokens=4 * B, lend_tokens=3 * B, borrow=True, max_requests=6)
PLACE = LoanPlace(where="there", number=3, token=b"t", secret=b"s", sealed=False)
PROMPT = 8 * B + 2
"""A prompt of nine blocks: of these five or more have no room in a decode."""


def part(block, layer):
    return 1000 * block + layer


def source(block):
    return SlotRef(node="p0", incarnation=7, slot=block, generation=2, checksum=block_checksum(parts_of(block)))


def parts_of(block):
    return [part(block, layer) for layer in range(LAYERS)]


class Node(Harness):
    """A decode with a gateway, a prefill, and the decodes d1 and d2, which lend to it or borrow."""

    def __init__(self, layout=LAYOUT, **settings):
        self.settings = replace(BASE, **settings)
        super().__init__(Decode(name="me", host="h0", incarnation=2, settings=self.settings, layout=layout, costs=Costs()))
        for name in ("g", "k", "c", "p0", "d1", "d2"):
            self.up(name, 7)

    def reserve(self, request_id="r", length=PROMPT, *, lenders=("d1", "d2"), max_tokens=2, **changes):
        packed = pack_tokens([1000 + i for i in range(length)])
        keys = extend_keys(ROOT, packed, B)
        fields = {
            "request_id": request_id,
            "attempt": 1,
            "gateway": "g",
            "tokens": length,
            "reuse_keys": tuple(keys[:1]),
            "last_key": keys[-1],
            "tail": packed[len(keys) * B * 4 :],
            "first_index": 0,
            "sampling": Sampling(),
            "stop": StopRule(max_tokens=max_tokens, eos_ids=(9,)),
            "deadline_s": 60.0,
            "new_keys": tuple(keys[1:]),
            "block_tokens": packed[: len(keys) * B * 4],
            "lenders": lenders,
        }
        self.say("p0", ReserveDecode(**(fields | changes)))

    def lend(self, lender="d1", blocks=None):
        ask = self.one(LendBlocks, lender)
        self.say(lender, BlocksLent(loan=ask.loan, blocks=blocks or ask.blocks, place=PLACE))
        return ask

    def connect(self, result=None):
        work_id, work = self.work(BorrowParts)
        self.done(work_id, result or Done())
        return work

    def announce(self, first=0, stop=9):
        sources = tuple(map(source, range(first, stop)))
        self.say("p0", HandoffBlocks(request_id="r", attempt=1, first_block=first, sources=sources, ready=True))

    def filled(self, lender="d1", *, wrong=0, **changes):
        ask = self.one(FillLoan, lender)
        parts = tuple(
            (block, layer, part(source.slot, layer) + wrong) for block, source, *_ in ask.loads for layer in range(LAYERS)
        )
        self.say(lender, LoanFilled(**({"loan": ask.loan, "parts": parts} | changes)))
        return ask

    def pulled(self, first):
        """End the copy of this decode's own blocks, which begin with block `first` of the prompt."""
        work_id, work = self.work(PullBlocks)
        parts = tuple((load.block, layer, part(first + load.block, layer)) for load in work.loads for layer in range(LAYERS))
        self.done(work_id, BlocksPulled(parts, ()))
        return work

    def hand_off(self, lent=5, blocks=9):
        self.announce(0, blocks)
        if lent:
            self.filled()
        self.pulled(lent)
        folded = block_checksum([block_checksum(parts_of(block)) for block in range(blocks)])
        self.say("p0", HandoffDone(request_id="r", attempt=1, layers=LAYERS, blocks=blocks, checksum=folded, token=5, index=0))

    def run_alone(self):
        """Begin a request of two blocks, which is to grow beyond them."""
        self.reserve(length=2 * B - 1, max_tokens=2 * B, lenders=(), reuse_keys=(), new_keys=(), block_tokens=b"")
        self.hand_off(0, 2)

    def step(self, token=7):
        work_id, _ = self.work(DecodeStep)
        self.done(work_id, StepDecoded(((token,),), 0.01))


@pytest.fixture
def node():
    return Node()


def assert_nothing_left(node):
    assert node.busy() == {}
    assert node.sequences == set()
    assert not [timer for timer in node.timers if timer[0] in ("deadline", "lent")]


# --- the borrower


def test_a_prompt_without_room_is_answered_with_what_others_lend(node):
    node.reserve()
    assert node.lend().blocks == 5
    assert not node.take(DecodeReserved), "nothing is handed off before all has a place"
    assert node.connect().parts == (LentPart("d1", PLACE, 5 * B),)
    assert node.one(DecodeReserved, "p0").held_blocks == 0
    assert node.busy() == {"reserved_tokens": 4 * B, "borrowed_tokens": 5 * B, "requests_waiting": 1}
    node.hand_off()
    assert node.one(HandoffReceived, "p0")
    work_id, work = node.work(DecodeStep)
    assert work.entries[0].position == PROMPT
    node.done(work_id, StepDecoded(((9,),), 0.01))
    tokens = node.one(TokensDecoded, "g")
    assert tokens.times[0].borrowed_tokens == 5 * B
    assert node.one(ReturnBlocks, "d1")
    assert not node.take(ReserveSlots), "blocks in several places are not offered"
    assert_nothing_left(node)


def test_blocks_are_numbered_from_the_first_of_each_place(node):
    node.reserve()
    node.lend(blocks=2)
    node.lend("d2")
    node.connect()
    node.announce()
    assert [load[0] for load in node.filled("d1").loads] == [0, 1]
    assert [(block, source.slot) for block, source, *_ in node.filled("d2").loads] == [(0, 2), (1, 3), (2, 4)]
    assert [(load.block, load.source.slot) for load in node.pulled(5).loads] == [(0, 5), (1, 6), (2, 7), (3, 8)]


def test_no_more_is_read_at_a_time_than_one_answer_names():
    node = Node(replace(LAYOUT, block_tokens=1, layers=MAX_BLOCKS // 512))
    node.reserve(length=700, reuse_keys=(), new_keys=(), block_tokens=b"", tail=b"")
    node.lend()
    node.connect()
    node.announce(0, 700)
    assert sum(stop - first for *_, first, stop in node.one(FillLoan).loads) == MAX_BLOCKS


def test_the_next_lender_is_asked_for_the_rest_and_for_what_one_refused(node):
    node.reserve(lenders=("d3", "d1", "d2"))
    refused = node.one(LendBlocks, "d1")
    node.say("d1", LoanEnded(loan=refused.loan, reason="no"))
    assert node.lend("d2").blocks == 5
    assert [part.lender for part in node.connect().parts] == ["d2"]


def test_what_is_no_decode_or_down_is_not_asked(node):
    node.reserve(lenders=("p0", "d1", "d2"))
    assert not node.take(LendBlocks, "p0")
    node.down("d2")
    node.lend(blocks=2)
    assert node.one(DecodeDenied, "p0").full
    assert_nothing_left(node)


def test_a_prompt_for_which_too_little_is_lent_is_denied_and_what_was_lent_returned(node):
    node.reserve()
    node.lend(blocks=2)
    node.say("d2", LoanEnded(loan=node.one(LendBlocks, "d2").loan, reason="no"))
    assert node.one(DecodeDenied, "p0").full
    assert node.one(ReturnBlocks, "d1")
    assert_nothing_left(node)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [({"borrow": False}, {}), ({}, {"lenders": ()})],
    ids=["by setting", "without lenders"],
)
def test_nothing_is_borrowed(settings, changes):
    node = Node(**settings)
    node.reserve(**changes)
    denied = node.one(DecodeDenied)
    assert "longer" in denied.reason
    assert denied.full == (settings == {}), "one that borrows takes it with lenders: the request is not at fault"
    assert not node.take(LendBlocks)


def test_a_prompt_whose_last_block_has_no_room_here_finds_no_room_for_now(node):
    node.reserve("s", length=3 * B)
    node.take(DecodeReserved)
    node.reserve()
    assert node.one(DecodeDenied).full
    assert not node.take(LendBlocks)


def test_nothing_is_borrowed_for_a_prompt_that_has_room(node):
    node.reserve(length=2 * B)
    assert node.one(DecodeReserved)
    assert not node.take(LendBlocks)


@pytest.mark.parametrize(
    ("own", "length", "blocks"),
    [(0, PROMPT, 8), (0, 4 * B, 3), (0, B, 0), (2 * B, PROMPT, 6), (2 * B - 2, 2 * B - 2, 0), (2 * B - 2, 2 * B - 3, 0)],
)
def test_no_more_whole_blocks_of_a_prompt_are_here_than_a_decode_wants(own, length, blocks):
    node = Node(capacity_tokens=20 * B, own_tokens=own)
    node.reserve(length=length)
    asked = node.take(LendBlocks)
    assert [ask.blocks for ask in asked] == [blocks] * (blocks > 0)
    assert bool(node.take(DecodeReserved)) == (blocks == 0)


@pytest.mark.parametrize("blocks", [0, 3])
def test_what_nothing_lends_of_a_prompt_is_here_if_there_is_room(blocks):
    node = Node(capacity_tokens=20 * B, own_tokens=0)
    node.reserve(lenders=("d1",))
    if not blocks:
        node.say("d1", LoanEnded(loan=node.one(LendBlocks, "d1").loan, reason="no"))
        assert node.one(DecodeReserved)
        assert node.busy()["reserved_tokens"] == 9 * B
        return
    node.lend(blocks=blocks)
    node.connect()
    node.hand_off(blocks)
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((9,),), 0.01))
    assert node.one(TokensDecoded, "g").times[0].borrowed_tokens == blocks * B
    assert_nothing_left(node)


def test_a_decode_without_a_batch_lends_and_takes_no_request():
    node = Node(max_batch=0, capacity_tokens=20 * B)
    assert lent_out(node).blocks == 2
    node.reserve()
    assert node.one(DecodeDenied).full
    node.advance(1.0)
    report = node.take(DecodeLoad, "k")[-1]
    assert (report.room, report.lendable) == (0, B)


def test_further_choices_of_a_prompt_that_is_elsewhere_are_placed_by_themselves(node):
    node.reserve(siblings=(Sibling(request_id="s", attempt=1, seed=1),))
    assert node.one(AttemptFailed, "g").full
    assert node.one(LendBlocks)


def asked(node):
    node.reserve()


def lent(node):
    asked(node)
    node.lend()


def connected(node):
    lent(node)
    node.connect()


def filling(node):
    connected(node)
    node.announce()


def running(node):
    connected(node)
    node.hand_off()


STAGES = [asked, lent, connected, filling, running]


def end_works(node):
    for work_id, work in list(node.works.items()):
        node.done(work_id, StepDecoded(((9,),), 0.01) if isinstance(work, DecodeStep) else WorkFailed("test"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_lender_that_is_down_costs_the_attempt(node, stage):
    stage(node)
    node.down("d1")
    failed = node.one(AttemptFailed, "g")
    assert (failed.avoid, failed.stuck) == ("d1", False)
    end_works(node)
    assert_nothing_left(node)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_loan_that_its_lender_ends_costs_the_attempt(node, stage):
    stage(node)
    loan = next(iter(node.actor.requests.live.values())).loans[0]
    node.say("d1", LoanEnded(loan=loan.number, reason="leaving"))
    assert node.one(AttemptFailed, "g").full
    end_works(node)
    assert_nothing_left(node)


@pytest.mark.parametrize("stage", STAGES)
def test_a_cancelled_request_returns_what_it_borrowed(node, stage):
    stage(node)
    node.say("g", CancelRequest(request_id="r", attempt=1))
    assert node.one(ReturnBlocks, "d1")
    end_works(node)
    assert_nothing_left(node)


@pytest.mark.parametrize("stage", [asked, filling])
def test_a_lender_that_does_not_answer_in_time_costs_the_attempt(node, stage):
    stage(node)
    node.advance(60.0)
    assert "deadline" in node.one(AttemptFailed, "g").reason
    assert_nothing_left(node)


def test_a_lender_that_is_not_reached_costs_the_attempt(node):
    lent(node)
    node.connect(WorkFailed("test", avoid="d1"))
    assert node.one(AttemptFailed, "g").avoid == "d1"
    assert_nothing_left(node)


def test_a_step_without_a_lender_costs_the_attempt_alone(node):
    running(node)
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((0,),), 0.01, failed=((0, WorkFailed("lost", avoid="d1")),)))
    failed = node.one(AttemptFailed, "g")
    assert (failed.reason, failed.avoid, failed.stuck) == ("lost", "d1", False)
    assert_nothing_left(node)


def long_running(**settings):
    """Return a decode with one request in its batch, which borrows and goes on for long."""
    node = Node(capacity_tokens=20 * B, own_tokens=2 * B, **settings)
    node.reserve(max_tokens=40)
    lent = node.lend().blocks
    node.connect()
    node.hand_off(lent)
    return node


def late(node, tokens=(0,), lender="d1"):
    """End a work in whose last step the lender of the first request was late."""
    work_id, work = node.work(DecodeStep)
    node.done(work_id, StepDecoded((tokens,), 0.01, late=((0, lender),)))
    return work


def beside(node, **changes):
    """Begin a request whose KV is all here beside one that borrows, in the same batch."""
    node.reserve("s", length=2 * B - 1, max_tokens=40, lenders=(), reuse_keys=(), new_keys=(), block_tokens=b"", **changes)
    node.say("p0", HandoffBlocks(request_id="s", attempt=1, first_block=0, sources=tuple(map(source, range(2))), ready=True))
    node.pulled(0)
    folded = block_checksum([block_checksum(parts_of(block)) for block in range(2)])
    node.say(
        "p0",
        HandoffDone(request_id="s", attempt=1, layers=LAYERS, blocks=2, checksum=folded, token=5, index=0),
    )


def test_steps_go_on_without_a_request_whose_lender_is_late_which_is_tried_again():
    node = long_running()
    beside(node)
    assert len(late(node).entries) == 1, "the other one joined later"
    for token in (7, 8):
        work_id, work = node.work(DecodeStep)
        assert (len(work.entries), work.lenders_s) == (1, 0.0), "none of them waits for a lender"
        node.done(work_id, StepDecoded(((token,),), 0.01))
        assert [entry[0] for entry in node.one(TokensDecoded, "g").entries] == ["s"]
    node.advance(AGAIN_S)
    node.step()
    work_id, work = node.work(DecodeStep)
    assert [entry.position for entry in work.entries] == [PROMPT, 2 * B - 1 + 3], "it has made no token meanwhile"
    assert work.lenders_s == LEAST_S
    node.done(work_id, StepDecoded(((7, 9),), 0.01))
    assert {entry[0] for entry in node.take(TokensDecoded, "g")[-1].entries} == {"r", "s"}


def test_a_request_that_is_alone_is_tried_again_too_and_keeps_the_tokens_before_the_late_one():
    node = long_running(max_steps=4)
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((7,), (0,)), 0.01, late=((0, "d1"),)))
    assert node.one(TokensDecoded, "g").entries[0][-1] == (7,)
    assert not node.works
    node.advance(AGAIN_S)
    assert node.work(DecodeStep)[1].entries[0].position == PROMPT + 1


def test_a_lender_that_is_late_for_long_costs_the_attempt_and_is_avoided(node):
    running(node)
    until = node.now + node.settings.lender_timeout_s
    while not (failed := node.take(AttemptFailed, "g")):
        late(node)
        node.advance(AGAIN_S)
    assert until <= node.now <= until + 2 * AGAIN_S
    assert (failed[0].avoid, failed[0].stuck) == ("d1", False)
    assert node.one(ReturnBlocks, "d1")
    end_works(node)
    assert_nothing_left(node)


def test_a_lender_that_is_late_for_one_token_after_another_costs_nothing():
    node = long_running()
    for _ in range(2 * round(node.settings.lender_timeout_s / AGAIN_S)):
        late(node)
        node.advance(AGAIN_S)
        node.step()
    assert not node.take(AttemptFailed)


@pytest.mark.parametrize(("step_s", "waits_s"), [(0.0, LEAST_S), (0.1, 0.4), (60.0, 2.0)])
def test_a_step_waits_for_lenders_for_a_few_steps_at_most(step_s, waits_s):
    assert lenders_s(step_s, 2.0) == waits_s


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": ((5, 0, 1),)},
        {"parts": ((0, LAYERS, 1),)},
        {"parts": (), "failed": (5,)},
        {"parts": (), "failed": (0,), "corrupt": (99,)},
        {"parts": (), "failed": (0,), "corrupt": (0,)},
    ],
    ids=["a block beyond", "a layer beyond", "a failed block beyond", "a corrupt block beyond", "a block that did not verify"],
)
def test_an_answer_that_is_wrong_costs_the_attempt(node, changes):
    filling(node)
    node.filled(**changes)
    assert node.one(AttemptFailed, "g")
    assert_nothing_left(node)


@pytest.mark.parametrize("changes", [{"parts": ((3, 0, 1),)}, {"parts": (), "failed": (3,), "corrupt": (3,)}])
def test_blocks_that_a_lender_was_not_to_read_yet_cost_the_attempt(node, changes):
    connected(node)
    node.announce(0, 2)
    node.filled(**changes)
    assert node.one(AttemptFailed, "g").avoid == "d1"
    assert_nothing_left(node)


def test_blocks_that_were_read_twice_or_are_others_than_handed_off_are_not_decoded(node):
    connected(node)
    node.announce()
    ask = node.filled(wrong=1)
    node.say("d1", LoanFilled(loan=ask.loan, parts=()))
    assert node.one(AttemptFailed, "g").avoid == "d1"


def test_more_than_was_asked_for_is_not_taken(node):
    asked(node)
    node.lend(blocks=6)
    assert node.one(AttemptFailed, "g").avoid == "d1"
    assert_nothing_left(node)


def test_a_request_that_borrows_grows_in_its_own_kv(node):
    connected_node = Node(capacity_tokens=6 * B)
    connected_node.reserve(max_tokens=2 * B)
    ask = connected_node.lend()
    assert ask.blocks == 5, "room for its output is left"
    connected_node.connect()
    assert connected_node.busy()["reserved_tokens"] == 4 * B


# --- the lender


def lend(node, borrower="d1", loan=1, blocks=2, ttl_s=60.0, tenant=""):
    node.say(borrower, LendBlocks(loan=loan, blocks=blocks, ttl_s=ttl_s, tenant=tenant))


def lent_out(node, **fields):
    lend(node, **fields)
    work_id, _ = node.work(LendSequence)
    node.done(work_id, SequenceLent(PLACE))
    return node.one(BlocksLent, fields.get("borrower", "d1"))


def load(block, first_layer=0, stop_layer=LAYERS):
    return block, source(block), first_layer, stop_layer


def test_a_loan_holds_kv_until_it_is_returned_and_nothing_reads_it(node):
    assert lent_out(node) == BlocksLent(loan=1, blocks=2, place=PLACE)
    assert node.busy() == {"lent_tokens": 2 * B, "reserved_tokens": 2 * B}
    node.say("d1", FillLoan(loan=1, loads=(load(1),)))
    work_id, work = node.work(PullBlocks)
    assert [(each.block, each.tokens) for each in work.loads] == [(1, B)]
    node.say("d1", ReturnBlocks(loan=1))
    assert node.busy(), "a block is still copied into it"
    node.done(work_id, BlocksPulled(((1, 0, 7),), ()))
    assert not node.take(LoanFilled)
    assert node.busy(), "a query may still read it"
    work_id, _ = node.work(TakeBack)
    node.done(work_id, Done())
    assert_nothing_left(node)


def test_what_was_read_is_answered(node):
    lent_out(node)
    node.say("d1", FillLoan(loan=1, loads=(load(0), load(1))))
    work_id, _ = node.work(PullBlocks)
    node.done(work_id, BlocksPulled(((0, 0, 7),), (1,), (1,)))
    assert node.one(LoanFilled, "d1") == LoanFilled(loan=1, parts=((0, 0, 7),), failed=(1,), corrupt=(1,))


def test_what_is_asked_while_blocks_are_read_ends_the_loan(node):
    lent_out(node)
    for _ in range(2):
        node.say("d1", FillLoan(loan=1, loads=(load(0),)))
    assert node.one(LoanEnded, "d1")
    assert len(node.works) == 1


def test_a_loan_of_a_tenant_leaves_room_for_others():
    node = Node(capacity_tokens=16 * B, lend_tokens=16 * B)
    node.reserve(length=3 * B - 1, tenant="red")
    lend(node, blocks=13, tenant="red")
    assert 0 < node.busy()["lent_tokens"] < 13 * B


def test_no_more_is_lent_than_may_be_and_there_is(node):
    assert lent_out(node, blocks=9).blocks == 3
    lend(node, "d2", 2)
    assert node.one(LoanEnded, "d2").loan == 2
    busy = Node()
    busy.reserve(length=3 * B - 1)
    assert lent_out(busy, blocks=9).blocks == 1
    leaving = Node()
    leaving.run_out_of_drain()
    lend(leaving)
    assert leaving.one(LoanEnded, "d1")


def test_the_report_says_what_it_would_lend(node):
    lent_out(node, blocks=1)
    node.take(DecodeLoad)
    node.advance(node.settings.report_s)
    report = node.take(DecodeLoad, "k")[-1]
    assert (report.lendable, report.borrows, report.free_tokens) == (2 * B, True, 3 * B)


@pytest.mark.parametrize("loads", [(load(2),), (load(0, stop_layer=LAYERS + 1),), (load(0, first_layer=LAYERS),)])
def test_blocks_beyond_a_loan_end_it(node, loads):
    lent_out(node)
    node.say("d1", FillLoan(loan=1, loads=loads))
    assert node.one(LoanEnded, "d1").reason == "more blocks than may be read"


@pytest.mark.parametrize("why", ["down", "its time", "leaving", "out of time", "no memory"])
def test_a_loan_ends_with_its_borrower_its_time_and_its_lender(node, why):
    lend(node, ttl_s=5.0)
    work_id, _ = node.work(LendSequence)
    node.done(work_id, WorkFailed("test") if why == "no memory" else SequenceLent(PLACE))
    match why:
        case "down":
            node.down("d1")
        case "its time":
            node.advance(5.0)
        case "leaving":
            node.drain()
            node.advance(node.settings.drain_grace_s)
            assert not node.drained
        case "out of time":
            node.run_out_of_drain()
            assert not node.drained
    assert bool(node.take(LoanEnded, "d1")) == (why != "down")
    work_id, _ = node.work(TakeBack)
    node.done(work_id, Done())
    assert_nothing_left(node)
    assert node.drained == (why in ("leaving", "out of time"))


def test_the_same_number_of_a_borrower_that_restarted_is_another_loan(node):
    lent_out(node)
    node.down("d1")
    node.up("d1", 8)
    assert lent_out(node, blocks=1).blocks == 1
    work_id, _ = node.work(TakeBack)
    node.done(work_id, Done())
    assert node.busy()["lent_tokens"] == B


def test_a_loan_ends_for_an_older_request_that_grows(node):
    node.run_alone()
    assert lent_out(node).blocks == 2
    node.step()
    assert node.one(LoanEnded, "d1").reason == "preempted"
    assert not node.take(AttemptFailed)
    work_id, _ = node.work(TakeBack)
    node.done(work_id, Done())
    node.step()
    assert (node.busy()["reserved_tokens"], node.busy()["requests_running"]) == (3 * B, 1)


def test_a_younger_request_that_grows_ends_and_no_loan(node):
    lent_out(node)
    node.run_alone()
    node.step()
    assert node.one(AttemptFailed, "g").reason == "preempted"
    assert not node.take(LoanEnded)
