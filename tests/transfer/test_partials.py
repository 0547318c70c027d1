"""A borrower gets a part of attention from a lender, or a failure: never less of it, never more."""

import math
import threading

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mooncake_zmq.core.records import encode
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.transfer import partials
from mooncake_zmq.transfer.partials import AskPart, Borrowed, BorrowedKV, Lender, PartGiven, PartialHost
from mooncake_zmq.transfer.stream import StreamError
from mooncake_zmq.transfer.tickets import Ticket

ENDPOINT, TOKENS = "tcp://127.0.0.1:0", 80


@pytest.fixture(scope="module")
def engine():
    return weights.open_model(prepare('dummy:{"layers": 2}', default_cache_dir()))


class House:
    def __init__(self, engine, *, sealed=True):
        self.engine, self.crashes = engine, []
        self.host = PartialHost(engine.spec, engine.attend_part, ENDPOINT, sealed=sealed, on_crash=self.crashes.append)

    def lender(self):
        return Lender(self.engine.spec, self.host.where, ENDPOINT, self.host.ticket())

    def lend(self, seed=1, *, grows=False):
        sequence = self.engine.new_sequence(TOKENS + 4)
        tokens = np.random.default_rng(seed).integers(0, 500, TOKENS).astype(np.int32)
        self.engine.prefill(sequence, tokens, logits_at=None)
        return self.host.lend(sequence, grows=grows), sequence


@pytest.fixture(params=[True, False], ids=["sealed", "clear"])
def house(engine, request):
    house = House(engine, sealed=request.param)
    yield house
    house.host.close()
    assert not house.crashes


@pytest.fixture
def lender(house):
    lender = house.lender()
    yield lender
    lender.lose("over")


def queries_of(engine, rows):
    spec, random = engine.spec, np.random.default_rng(9)
    shapes = (spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim), (spec.kv_heads, spec.head_dim)
    return [random.normal(size=(rows, *shapes[each > 0])).astype(np.float32) for each in range(3)]


def asked(engine, borrowed, rows, layer=0):
    """What a step's layer gets, and the step."""
    elsewhere = BorrowedKV(engine.spec, borrowed, rows)
    elsewhere.ask(layer, *queries_of(engine, rows))
    return elsewhere.answers(layer), elsewhere


def test_rows_get_the_attention_of_their_loans(engine, house, lender):
    other = house.lender()
    (first, one), (second, two), (third, three) = (house.lend(seed) for seed in range(3))
    borrowed = [Borrowed(0, lender, first, TOKENS), Borrowed(2, lender, second, TOKENS), Borrowed(2, other, third, TOKENS)]
    found, elsewhere = asked(engine, borrowed, 4, layer=1)
    queries = queries_of(engine, 4)[0]
    assert not elsewhere.failed
    assert_allclose(found.mixed[0], engine.attend_part(1, [one], [TOKENS], queries[:1]).mixed[0], rtol=1e-5)
    both = engine.attend_part(1, [two], [TOKENS], queries[2:3])
    both.merge(engine.attend_part(1, [three], [TOKENS], queries[2:3]))
    assert_allclose(found.mixed[2], both.mixed[0], rtol=1e-4, atol=1e-6)
    assert (found.states[[1, 3], ..., 1] == 0).all()
    other.lose("over")


def test_a_loan_that_grows_takes_the_new_kv(engine, house, lender):
    loan, sequence = house.lend(grows=True)
    for layer in range(2):
        found, elsewhere = asked(engine, [Borrowed(0, lender, loan, TOKENS, grows=True)], 1, layer)
    queries, keys, values = queries_of(engine, 1)
    assert not elsewhere.failed
    assert sequence.length == TOKENS + 1
    assert_allclose(sequence.values[1, :, TOKENS], values[0])
    assert_allclose(found.mixed, engine.attend_part(1, [sequence], [TOKENS + 1], queries).mixed, rtol=1e-5)


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS + 1, 0])
def test_a_loan_of_another_length_than_the_borrower_thinks_fails_the_row(engine, house, lender, tokens):
    loan, _ = house.lend()
    _, elsewhere = asked(engine, [Borrowed(0, lender, loan, tokens)], 2)
    assert list(elsewhere.failed) == [0]
    assert lender.lost


def test_a_loan_that_was_taken_back_fails_its_row_and_no_other_lenders(engine, house, lender):
    other = house.lender()
    (first, _), (second, _) = house.lend(), house.lend()
    assert house.host.take_back(first) is not None
    assert house.host.take_back(first) is None
    _, elsewhere = asked(engine, [Borrowed(0, lender, first, TOKENS), Borrowed(1, other, second, TOKENS)], 2)
    assert list(elsewhere.failed) == [0]
    _, elsewhere = asked(engine, [Borrowed(0, lender, second, TOKENS)], 2)
    assert list(elsewhere.failed) == [0], "who answered wrongly is asked no more"
    other.lose("over")


def test_a_loan_is_taken_back_only_between_two_answers(engine, house, lender, monkeypatch):
    begun, go_on, order = threading.Event(), threading.Event(), []

    def slow(*arguments):
        begun.set()
        go_on.wait(20)
        order.append("attended")
        return engine.attend_part(*arguments)

    monkeypatch.setattr(house.host, "_attend", slow)
    loan, _ = house.lend()
    elsewhere = BorrowedKV(engine.spec, [Borrowed(0, lender, loan, TOKENS)], 1)
    elsewhere.ask(0, *queries_of(engine, 1))
    begun.wait(20)
    taker = threading.Thread(target=lambda: (house.host.take_back(loan), order.append("taken back")))
    taker.start()
    taker.join(0.05)
    go_on.set()
    taker.join(20)
    assert order == ["attended", "taken back"]
    elsewhere.answers(0)
    assert not elsewhere.failed


def test_a_lender_that_dies_fails_its_rows(engine, house, lender):
    loan, _ = house.lend()
    elsewhere = BorrowedKV(engine.spec, [Borrowed(0, lender, loan, TOKENS)], 1)
    house.host.close()
    elsewhere.ask(0, *queries_of(engine, 1))
    found = elsewhere.answers(0)
    assert list(elsewhere.failed) == [0]
    assert found.states[0, ..., 1].max() == 0


def test_a_lender_that_is_silent_fails_its_rows_in_time(engine, house, lender, monkeypatch):
    monkeypatch.setattr(partials, "ANSWER_S", 0.2)
    loan, _ = house.lend()
    elsewhere = BorrowedKV(engine.spec, [Borrowed(0, lender, loan, TOKENS)], 1)
    with house.host._lock:  # it hangs
        elsewhere.ask(0, *queries_of(engine, 1))
        elsewhere.answers(0)
    assert list(elsewhere.failed) == [0]


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, 0.0])
def test_numbers_that_are_no_attention_fail_the_row(engine, house, lender, monkeypatch, nonsense):
    def wrong(*arguments):
        result = engine.attend_part(*arguments)
        result.states[..., 1] = nonsense
        return result

    monkeypatch.setattr(house.host, "_attend", wrong)
    loan, _ = house.lend()
    _, elsewhere = asked(engine, [Borrowed(0, lender, loan, TOKENS)], 1)
    assert elsewhere.failed == {0: "no result of attention"}


def test_an_answer_to_another_question_fails_the_row(engine, house, lender):
    loan, _ = house.lend()
    elsewhere = BorrowedKV(engine.spec, [Borrowed(0, lender, loan, TOKENS)], 1)
    elsewhere.ask(0, *queries_of(engine, 1))
    lender._number += 1
    elsewhere.answers(0)
    assert elsewhere.failed == {0: "an answer to what was not asked"}


@pytest.mark.parametrize("request_", [b"\xff" * 64, encode(PartGiven(1)), encode(AskPart(1, 99, (2,), (TOKENS,)))])
def test_a_borrower_that_breaks_the_protocol_ends_its_own_stream_alone(engine, house, request_):
    stranger, good = house.lender(), house.lender()
    loan, _ = house.lend()
    stranger._stream.send_views([memoryview(len(request_).to_bytes(4, "little") + request_)])
    with pytest.raises(StreamError):
        stranger.answer(1)
    assert not asked(engine, [Borrowed(0, good, loan, TOKENS)], 1)[1].failed
    stranger.lose("over")
    good.lose("over")


def test_without_a_ticket_there_is_no_lender(house):
    with pytest.raises(StreamError):
        Lender(house.engine.spec, house.host.where, ENDPOINT, Ticket(b"\0" * 40, b"\0" * 32, False))


def test_loans_have_a_limit(house, monkeypatch):
    monkeypatch.setattr(partials, "MAX_LOANS", 1)
    assert house.lend()[0] is not None
    assert house.lend()[0] is None
