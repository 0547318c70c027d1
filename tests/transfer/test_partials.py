"""A borrower gets a part of attention from a lender, or a failure: never less of it, never more."""

import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.waiting import eventually
from numpy.testing import assert_allclose

from mooncake_zmq.bench.attend import cut
from mooncake_zmq.core.records import encode
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.elsewhere import FarKV
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.transfer import partials
from mooncake_zmq.transfer.partials import MAX_ROWS, AskPart, Borrowed, BorrowedKV, Lender, PartGiven, PartialHost
from mooncake_zmq.transfer.sockets import listen_beside
from mooncake_zmq.transfer.stream import StreamError
from mooncake_zmq.transfer.tickets import Ticket

ENDPOINT, TOKENS, LENT = "tcp://127.0.0.1:0", 80, 64
LONG_S = 20.0


@pytest.fixture(scope="module")
def engine():
    return weights.open_model(prepare('dummy:{"layers": 2}', default_cache_dir()))


class House:
    def __init__(self, engine, *, sealed=True):
        self.engine, self.crashes, self.tickets = engine, [], {}
        self.host = PartialHost(engine.spec, engine.attend_part, ENDPOINT, sealed=sealed, on_crash=self.crashes.append)

    def lender(self, ticket=None):
        ticket = ticket or self.host.ticket()
        lender = Lender(self.engine.spec, self.host.where, ENDPOINT, ticket, timeout_s=LONG_S)
        self.tickets[lender] = ticket
        return lender

    def lend(self, lender, seed=1, *, grows=False, room=4):
        sequence = self.engine.new_sequence(TOKENS + room)
        tokens = np.random.default_rng(seed).integers(0, 500, TOKENS).astype(np.int32)
        self.engine.prefill(sequence, tokens, logits_at=None)
        return self.give(lender, sequence, grows=grows), sequence

    def give(self, lender, sequence, *, grows=False):
        return self.host.lend(self.tickets[lender].token, sequence, grows=grows)

    def close(self):
        for lender in self.tickets:
            lender.lose("over")
        self.host.close()
        assert not self.crashes


@pytest.fixture(params=[True, False], ids=["sealed", "clear"])
def house(engine, request):
    house = House(engine, sealed=request.param)
    yield house
    house.close()


@pytest.fixture
def other_house(engine):
    house = House(engine)
    yield house
    house.close()


@pytest.fixture
def lender(house):
    return house.lender()


def queries_of(engine, rows):
    spec, random = engine.spec, np.random.default_rng(9)
    shapes = (spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim), (spec.kv_heads, spec.head_dim)
    return [random.normal(size=(rows, *shapes[each > 0])).astype(np.float32) for each in range(3)]


def begun(engine, borrowed, rows, wait_s=LONG_S):
    """Begin a step of rows that lack just these parts."""
    lacking, far = [0] * rows, {each.row for each in borrowed if each.grows}
    for each in borrowed:
        lacking[each.row] += each.tokens
    elsewhere = BorrowedKV(engine.spec, borrowed, wait_s=wait_s)
    elsewhere.begin([FarKV(n, n + 1) if row in far else SimpleNamespace(before=n) for row, n in enumerate(lacking)])
    return elsewhere


def asked(engine, borrowed, rows, layer=0, wait_s=LONG_S):
    """Return what a step's layer gets, and the step."""
    elsewhere = begun(engine, borrowed, rows, wait_s)
    elsewhere.ask(layer, *queries_of(engine, rows))
    return elsewhere.answers(layer), elsewhere


def test_rows_get_the_attention_of_their_loans(engine, house, lender):
    other = house.lender()
    (first, one), (second, two), (third, three) = (house.lend(each, seed) for seed, each in enumerate([lender, lender, other]))
    borrowed = [Borrowed(0, lender, first, TOKENS), Borrowed(2, lender, second, TOKENS), Borrowed(2, other, third, TOKENS)]
    found, elsewhere = asked(engine, borrowed, 4, layer=1)
    queries = queries_of(engine, 4)[0]
    assert not elsewhere.failed
    assert_allclose(found.mixed[0], engine.attend_part(1, [one], [TOKENS], queries[:1]).mixed[0], rtol=1e-5)
    both = engine.attend_part(1, [two], [TOKENS], queries[2:3])
    both.merge(engine.attend_part(1, [three], [TOKENS], queries[2:3]))
    assert_allclose(found.mixed[2], both.mixed[0], rtol=1e-4, atol=1e-6)
    assert (found.states[[1, 3], ..., 1] == 0).all()
    assert lender.moved_bytes == 2 * (queries[0].nbytes + found.mixed[0].nbytes + found.states[0].nbytes)


def test_a_loan_that_grows_takes_the_new_kv(engine, house, lender):
    loan, sequence = house.lend(lender, grows=True)
    for layer in range(2):
        found, elsewhere = asked(engine, [Borrowed(0, lender, loan, TOKENS, grows=True)], 1, layer)
    queries, keys, values = queries_of(engine, 1)
    assert not elsewhere.failed
    assert sequence.length == TOKENS + 1
    assert_allclose(sequence.values[1, :, TOKENS], values[0])
    assert_allclose(found.mixed, engine.attend_part(1, [sequence], [TOKENS + 1], queries).mixed, rtol=1e-5)


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS + 1, 0])
@pytest.mark.parametrize("grows", [False, True], ids=["fixed", "grows"])
def test_a_loan_of_another_length_than_asked_for_fails_the_row(engine, house, lender, tokens, grows):
    loan, _ = house.lend(lender, grows=grows)
    _, elsewhere = asked(engine, [Borrowed(0, lender, loan, tokens, grows)], 2)
    rewinds = grows and tokens == TOKENS - 1
    assert list(elsewhere.failed) == ([] if rewinds else [0])
    assert house.host.counts["refused"] == (not rewinds)


def test_a_loan_that_is_full_grows_no_more(engine, house, lender):
    loan, _ = house.lend(lender, grows=True, room=0)
    assert (
        asked(engine, [Borrowed(0, lender, loan, TOKENS, grows=True)], 1)[1].failed[0].lost.startswith("the connection ended")
    )


def test_a_loan_is_of_one_ticket_alone(engine, house, lender):
    thief = house.lender()
    loan, _ = house.lend(lender)
    assert asked(engine, [Borrowed(0, thief, loan, TOKENS)], 1)[1].failed[0].lost.startswith("the connection ended")
    assert house.host.counts["refused"] == 1
    assert not asked(engine, [Borrowed(0, lender, loan, TOKENS)], 1)[1].failed


def test_a_ticket_has_one_stream(engine, house, lender):
    loan, _ = house.lend(lender)
    assert not asked(engine, [Borrowed(0, lender, loan, TOKENS)], 1)[1].failed, "its stream is there"
    again = Lender(engine.spec, house.host.where, ENDPOINT, house.tickets[lender], timeout_s=LONG_S)
    assert list(asked(engine, [Borrowed(0, again, loan, TOKENS)], 1)[1].failed) == [0]
    assert house.host.counts["streams_refused"] == 1
    assert not asked(engine, [Borrowed(0, lender, loan, TOKENS)], 1)[1].failed


@pytest.mark.parametrize("grows", [False, True])
def test_a_loan_is_of_one_row_alone(engine, house, lender, grows):
    loan, _ = house.lend(lender, grows=grows)
    _, elsewhere = asked(engine, [Borrowed(row, lender, loan, TOKENS, grows) for row in range(2)], 2)
    assert set(elsewhere.failed) == {0, 1}
    assert elsewhere.failed[0].lost.startswith("the connection ended")


def test_loans_end_with_the_stream_of_their_ticket(engine, house, lender):
    (left, sequence), (_, taken), other = house.lend(lender), house.lend(lender), house.lender()
    kept, _ = house.lend(other)
    house.host.take_back(taken)
    assert list(house.host._loans) == [left, kept]
    assert not asked(engine, [Borrowed(0, lender, left, TOKENS)], 1)[1].failed, "its stream is there"
    lender.lose("over")
    eventually(lambda: list(house.host._loans) == [kept])
    house.host.take_back(sequence)
    assert sequence.capacity > 0, "its memory is its owner's"
    assert taken.capacity > 0


@pytest.mark.parametrize(
    ("parts", "lacking"),
    [
        ([], [64]),
        ([(0, 0, 64)], [63]),
        ([(0, 0, 64)], [64, 1]),
        ([(0, 0, 64), (0, 1, 64)], [64]),
        ([(0, 0, 32), (0, 0, 32)], [64]),
        ([(1, 0, 64)], [0]),
        ([(-1, 0, 64)], [64]),
        ([(0, 0, 64)], [FarKV(64, 70)]),
        ([(0, 0, 32, True), (0, 1, 32, True)], [FarKV(64, 70)]),
        ([(0, 0, 63, True)], [FarKV(64, 70)]),
        ([(0, 0, 64, True)], [64]),
        ([(row, 0, 1) for row in range(MAX_ROWS + 1)], [1] * (MAX_ROWS + 1)),
    ],
)
def test_a_step_begins_only_with_just_the_parts_that_it_lacks(engine, parts, lacking):
    lenders = [object(), object()]
    elsewhere = BorrowedKV(engine.spec, [Borrowed(row, lenders[at], 1, *of_it) for row, at, *of_it in parts], wait_s=LONG_S)
    with pytest.raises(ValueError, match="part|row"):
        elsewhere.begin([each if isinstance(each, FarKV) else SimpleNamespace(before=each) for each in lacking])


def test_a_loan_that_was_taken_back_fails_its_row_and_no_other_lenders(engine, house, lender):
    other = house.lender()
    (first, taken), (third, _), (second, _) = house.lend(lender), house.lend(lender), house.lend(other)
    for _ in range(2):
        house.host.take_back(taken)
    _, elsewhere = asked(engine, [Borrowed(0, lender, first, TOKENS), Borrowed(1, other, second, TOKENS)], 2)
    assert list(elsewhere.failed) == [0]
    _, elsewhere = asked(engine, [Borrowed(0, lender, third, TOKENS)], 2)
    assert list(elsewhere.failed) == [0], "a lender that is lost is asked no more"


def test_a_loan_is_taken_back_only_between_two_answers(engine, house, lender, monkeypatch):
    attends, go_on, waits, order = threading.Event(), threading.Event(), threading.Event(), []
    lock = house.host._lock

    class Watched:
        def __enter__(self):
            waits.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def slow(*arguments):
        attends.set()
        go_on.wait(20)
        order.append("attended")
        return engine.attend_part(*arguments)

    monkeypatch.setattr(house.host, "_attend", slow)
    loan, sequence = house.lend(lender)
    elsewhere = begun(engine, [Borrowed(0, lender, loan, TOKENS)], 1)
    elsewhere.ask(0, *queries_of(engine, 1))
    assert attends.wait(20)
    assert lock.locked()
    monkeypatch.setattr(house.host, "_lock", Watched())
    taker = threading.Thread(target=lambda: (house.host.take_back(sequence), order.append("taken back")))
    taker.start()
    assert waits.wait(20)
    go_on.set()
    taker.join(20)
    assert order == ["attended", "taken back"]
    elsewhere.answers(0)
    assert not elsewhere.failed


def test_a_lender_that_dies_fails_its_rows(engine, house, lender):
    loan, _ = house.lend(lender)
    elsewhere = begun(engine, [Borrowed(0, lender, loan, TOKENS)], 1)
    house.host.close()
    elsewhere.ask(0, *queries_of(engine, 1))
    found = elsewhere.answers(0)
    assert list(elsewhere.failed) == [0]
    assert found.states[0, ..., 1].max() == 0


def test_rows_of_a_silent_lender_are_late_and_tried_again_once_it_has_answered(engine, house, lender):
    loan, sequence = house.lend(lender)
    parts, queries = [Borrowed(0, lender, loan, TOKENS)], queries_of(engine, 1)
    with house.host._lock:  # it hangs
        _, elsewhere = asked(engine, parts, 1, wait_s=0.05)
        assert elsewhere.late == {0: lender}
        _, elsewhere = asked(engine, parts, 1)
        assert (elsewhere.late, elsewhere.failed) == ({0: lender}, {}), "it is not asked before it has answered, nor waited for"
    eventually(lambda: lender._stream.has_more(-math.inf))
    found, elsewhere = asked(engine, parts, 1, layer=1)
    assert (elsewhere.late, elsewhere.failed) == ({}, {})
    assert_allclose(found.mixed[0], engine.attend_part(1, [sequence], [TOKENS], queries[0]).mixed[0], rtol=1e-5)


def test_a_late_lender_that_dies_meanwhile_fails_its_rows(engine, house, lender):
    parts = [Borrowed(0, lender, house.lend(lender)[0], TOKENS)]
    with house.host._lock:
        assert asked(engine, parts, 1, wait_s=0.0)[1].late
    house.host.close()
    elsewhere = begun(engine, parts, 1)  # what it sent before may be there
    elsewhere.ask(0, *queries_of(engine, 1))
    elsewhere.answers(0)
    assert (list(elsewhere.failed), elsewhere.late) == ([0], {})


def test_a_lender_that_stops_within_an_answer_fails_its_rows(engine, house, lender, monkeypatch):
    monkeypatch.setattr(lender, "_timeout_s", 0.2)
    parts = [Borrowed(0, lender, house.lend(lender)[0], TOKENS)]
    assert not asked(engine, parts, 1)[1].failed, "its stream is there"
    (opened,) = house.host._host._open.values()
    stream = opened.served.stream
    monkeypatch.setattr(stream, "send", lambda *_: stream.connection.send(b"ha"))
    assert list(asked(engine, parts, 1)[1].failed) == [0]


def test_a_lender_that_is_slow_has_no_more_time_for_many_layers(engine, house, lender, monkeypatch):
    slowly = threading.Event()
    monkeypatch.setattr(house.host, "_attend", lambda *arguments: (slowly.wait(0.2), engine.attend_part(*arguments))[1])
    loan, _ = house.lend(lender)
    elsewhere = begun(engine, [Borrowed(0, lender, loan, TOKENS)], 1, wait_s=0.5)
    for _ in range(4):
        elsewhere.ask(0, *queries_of(engine, 1))
        elsewhere.answers(0)
    assert list(elsewhere.late) == [0]


def test_the_time_for_answers_is_that_of_waits_and_none_of_what_the_step_takes_itself(engine, house, lender, monkeypatch):
    untils, answer, late_s = [], Lender.answer, 0.0
    monkeypatch.setattr(partials, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s))
    monkeypatch.setattr(Lender, "answer", lambda *asked: (untils.append(asked[2]), answer(*asked))[1])
    elsewhere = begun(engine, [Borrowed(0, lender, house.lend(lender)[0], TOKENS)], 1)
    for layer in range(2):
        elsewhere.ask(layer, *queries_of(engine, 1))
        elsewhere.answers(layer)
        late_s += 2 * LONG_S
    assert untils[1] - untils[0] > LONG_S
    assert elsewhere._left_s < LONG_S


def test_lenders_that_are_silent_cost_no_other_lenders_rows_and_one_wait(engine, house, other_house, monkeypatch):
    untils, answer = [], Lender.answer
    monkeypatch.setattr(Lender, "answer", lambda *asked: (untils.append(asked[2]), answer(*asked))[1])
    other = other_house.lender()
    sound, _ = other_house.lend(other)
    silent = [house.lender() for _ in range(3)]
    parts = [Borrowed(row, each, house.lend(each)[0], TOKENS) for row, each in enumerate(silent)]
    elsewhere = begun(engine, [*parts, Borrowed(3, other, sound, TOKENS)], 4, wait_s=1.0)
    elsewhere._wait_s = LONG_S
    with house.host._lock:
        for layer in range(2):
            elsewhere.ask(layer, *queries_of(engine, 4))
            found = elsewhere.answers(layer)
    assert sorted(elsewhere.late) == [0, 1, 2]
    assert len(untils) == 5
    assert len(set(untils[:4])) == 1, "all have the same time"
    assert untils[4] > untils[0], "a new one for those that are left"
    assert found.states[3, ..., 1].min() > 0


def test_a_row_that_failed_is_asked_for_no_more(engine, house, lender, other_house):
    other = other_house.lender()
    gone, taken = house.lend(lender)
    house.host.take_back(taken)
    (grown, sequence), (sound, _) = other_house.lend(other, grows=True), other_house.lend(other)
    parts = [
        Borrowed(0, lender, gone, TOKENS),
        Borrowed(0, other, grown, TOKENS, grows=True),
        Borrowed(1, other, sound, TOKENS),
    ]
    elsewhere = begun(engine, parts, 2)
    for layer in range(2):
        elsewhere.ask(layer, *queries_of(engine, 2))
        found = elsewhere.answers(layer)
    assert list(elsewhere.failed) == [0]
    assert sequence.length == TOKENS, "the failed row's KV is not taken"
    assert found.states[1, ..., 1].min() > 0


NO_SUMS = [("mixed", None, bad) for bad in (math.nan, math.inf, 3e38)]
NO_SUMS += [("states", 0, bad) for bad in (math.nan, math.inf, -math.inf, 3e38)]
NO_SUMS += [("states", 1, bad) for bad in (math.nan, math.inf, 0.0, 3e38, 1.1 * TOKENS)]


@pytest.mark.parametrize(("array", "column", "nonsense"), NO_SUMS)
def test_numbers_that_no_attention_gives_fail_the_row(engine, house, lender, monkeypatch, array, column, nonsense):
    def wrong(*arguments):
        result = engine.attend_part(*arguments)
        getattr(result, array)[0, 0, 0, column or 0] = nonsense
        return result

    monkeypatch.setattr(house.host, "_attend", wrong)
    loan, _ = house.lend(lender)
    _, elsewhere = asked(engine, [Borrowed(0, lender, loan, TOKENS)], 1)
    assert elsewhere.failed[0].lost == "no result of attention"


def test_an_answer_to_another_question_fails_the_row(engine, house, lender):
    loan, _ = house.lend(lender)
    elsewhere = begun(engine, [Borrowed(0, lender, loan, TOKENS)], 1)
    elsewhere.ask(0, *queries_of(engine, 1))
    lender._number += 1
    elsewhere.answers(0)
    assert elsewhere.failed[0].lost == "an answer to what was not asked"


@pytest.mark.parametrize(
    "request_",
    [
        lambda _: b"\xff" * 64,
        lambda _: encode(PartGiven(1)),
        lambda loan: encode(AskPart(1, 99, (loan,), (TOKENS,))),
        lambda loan: encode(AskPart(1, 0, (loan, loan + 5), (TOKENS, TOKENS))),
        lambda loan: encode(AskPart(1, 0, (loan,), (TOKENS, TOKENS))),
        lambda _: encode(AskPart(1, 0, (), ())),
    ],
    ids=["garbage", "answer", "layer", "unknown", "lengths", "nothing"],
)
def test_a_borrower_that_breaks_the_protocol_ends_its_own_stream_alone(engine, house, monkeypatch, request_):
    monkeypatch.setattr(partials, "STALL_S", math.inf)
    stranger, good = house.lender(), house.lender()
    own, (loan, _) = house.lend(stranger)[0], house.lend(good)
    request = request_(own)
    stranger._stream.send_views([memoryview(len(request).to_bytes(4, "little") + request)])
    with pytest.raises(StreamError, match="the connection ended"):
        stranger.answer([Borrowed(0, stranger, own, TOKENS)], time.monotonic() + 20)
    assert not asked(engine, [Borrowed(0, good, loan, TOKENS)], 1)[1].failed


def test_a_borrower_that_sends_half_a_request_is_given_up(house, monkeypatch):
    monkeypatch.setattr(partials, "STALL_S", 0.2)
    lender = house.lender()
    loan, _ = house.lend(lender)
    lender._stream.send(AskPart(1, 0, (loan,), (TOKENS,)))
    with pytest.raises(StreamError, match="the connection ended"):
        lender.answer([Borrowed(0, lender, loan, TOKENS)], time.monotonic() + 20)


def test_a_borrower_may_be_silent_between_two_requests(engine, house, lender):
    loan, _ = house.lend(lender)
    assert not asked(engine, [Borrowed(0, lender, loan, TOKENS)], 1)[1].failed
    (opened,) = house.host._host._open.values()
    eventually(lambda: opened.served.stream.stop_at == math.inf)


def test_a_lender_that_answers_nothing_is_not_attached_to(house):
    listener, where = listen_beside(ENDPOINT, 0)
    with listener, pytest.raises(StreamError, match="no answer in time"):
        Lender(house.engine.spec, where, ENDPOINT, house.host.ticket(), timeout_s=0.2)


def test_without_a_ticket_there_is_no_lender(house):
    with pytest.raises(StreamError, match="the connection ended"):
        Lender(house.engine.spec, house.host.where, ENDPOINT, Ticket(b"\0" * 40, b"\0" * 32, False), timeout_s=LONG_S)


def test_loans_have_a_limit(house, lender, monkeypatch):
    monkeypatch.setattr(partials, "MAX_LOANS", 1)
    assert house.lend(lender)[0] is not None
    assert house.lend(lender)[0] is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("either", ["numpy", "compiled"])
def test_a_lender_that_dies_between_two_layers_fails_its_rows_alone_which_may_be_tried_again(either):
    path = prepare('dummy:{"layers": 2}', default_cache_dir())
    try:
        engine = weights.open_model(path) if either == "numpy" else weights.open_compiled(path, threads=1, compacted=False)
    except ModelError as error:
        pytest.skip(error.message)

    def dying(layer, *arguments):
        if layer == 1:
            raise StreamError("dies")
        return engine.attend_part(layer, *arguments)

    dies, lives = House(engine), House(engine)
    dies.host._attend = dying
    first, second, third = dies.lender(), lives.lender(), lives.lender()
    whole = engine.new_sequence(TOKENS + 1)
    engine.prefill(whole, np.random.default_rng(5).integers(0, 500, TOKENS).astype(np.int32))
    lent = [cut(engine, whole, 0, LENT, 0) for _ in range(3)]
    kept = [cut(engine, whole, LENT, TOKENS, 1) for _ in range(2)]
    far, holder = FarKV(TOKENS, TOKENS + 1), cut(engine, whole, 0, TOKENS, 1)
    parts = [
        Borrowed(0, first, dies.give(first, lent[0]), LENT),
        Borrowed(1, second, lives.give(second, lent[1]), LENT),
        Borrowed(2, first, dies.give(first, holder, grows=True), TOKENS, grows=True),
    ]
    again = [Borrowed(0, third, lives.give(third, lent[2]), LENT)]
    exact = engine.decode([whole], np.array([7], np.int32))[0]
    elsewhere = BorrowedKV(engine.spec, parts, wait_s=LONG_S)
    found = engine.decode_elsewhere([*kept, far], np.array([7] * 3, np.int32), elsewhere)
    assert set(elsewhere.failed) == {0, 2}
    assert_allclose(found[1], exact, rtol=2e-3, atol=2e-4)
    kept[0].length -= 1
    found = engine.decode_elsewhere(kept[:1], np.array([7], np.int32), BorrowedKV(engine.spec, again, wait_s=LONG_S))
    assert_allclose(found[0], exact, rtol=2e-3, atol=2e-4)
    dies.close()
    lives.close()
