"""What an engine takes, measured as its process starts: close to the truth, soon over, and blind to other processes' work."""

import numpy as np
import pytest

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.engine import own_costs
from mooncake_zmq.engine.own_costs import Clocks, measured, unhindered_s
from mooncake_zmq.engine.toy import ToyEngine


class Timed(ToyEngine):
    """Takes what `costs` say, with so much more a chunk, by a clock of its own."""

    def __init__(self, costs, chunk_s=0.0):
        super().__init__()
        self.costs, self.chunk_s, self.now, self.lengths = costs, chunk_s, 0.0, []

    def prefill(self, sequence, tokens, **more):
        self.lengths.append(len(tokens))
        self.now += self.chunk_s + self.costs.compute_s(len(tokens), 0) * (2.0 if len(self.lengths) == 1 else 1.0)
        return super().prefill(sequence, tokens, **more)

    def decode(self, sequences, tokens):
        end = self.now + self.costs.step_s(len(sequences), sum(each.length for each in sequences))
        logits = super().decode(sequences, tokens)
        self.now = end
        return logits

    def measure(self, most_tokens=512):
        return measured(self, Costs(), most_tokens=most_tokens, clocks=Clocks(lambda: self.now, lambda: 0.0))


@pytest.mark.parametrize("factor", [0.001, 0.3, 1.0, 5.0])
def test_costs_are_as_many_times_the_assumed_ones_as_the_engine_takes(factor):
    engine = Timed(Costs().scaled(prefill=factor, decode=2 * factor))
    found = engine.measure()
    assert found.compute_s(2000, 0) == pytest.approx(engine.costs.compute_s(2000, 0))
    assert found.step_s(8, 5000) == pytest.approx(engine.costs.step_s(8, 5000), rel=1e-3)
    assert found.transfer_s(100) == Costs().transfer_s(100), "nothing was moved"


def test_what_a_chunk_takes_whatever_its_length_is_not_blamed_on_its_tokens():
    engine = Timed(Costs(), chunk_s=0.05)
    assert engine.measure().compute_s(512, 0) < 1.25 * engine.costs.compute_s(512, 0)


def test_a_quick_engine_is_measured_by_a_whole_chunk_and_a_slow_one_not_for_minutes():
    quick, slow = Timed(Costs().scaled(prefill=0.001, decode=1.0)), Timed(Costs().scaled(prefill=100.0, decode=1.0))
    quick.measure()
    assert max(quick.lengths) == 512
    slow.measure()
    assert max(slow.lengths) == 8
    assert slow.now < 10.0


def test_a_chunk_or_model_of_few_tokens_is_enough():
    engine = Timed(Costs())
    engine.measure(most_tokens=4)
    assert max(engine.lengths) == 4


def test_the_clock_stands_while_the_thread_waits_for_a_core(monkeypatch, tmp_path):
    told = tmp_path / "schedstat"
    monkeypatch.setattr(own_costs, "SCHEDSTAT", str(told))
    monkeypatch.setattr(own_costs.time, "perf_counter", lambda: 100.0)
    told.write_text("5 2000000000 7\n")
    assert unhindered_s() == pytest.approx(98.0)
    told.unlink()
    assert unhindered_s() == 100.0


def test_what_was_measured_leaves_the_engine_as_it_was():
    engine = ToyEngine()
    before = engine.prefill(engine.new_sequence(8), np.arange(5, dtype=np.int32))
    measured(engine, Costs(), most_tokens=64)
    assert np.array_equal(engine.prefill(engine.new_sequence(8), np.arange(5, dtype=np.int32)), before)


def test_costs_that_somebody_gave_are_theirs():
    assert Costs().are_default
    assert Costs(kv_bytes_per_token=5, transfer_bytes_per_s=1.0).are_default
    assert not Costs(prefill_token_s=1e-3).are_default
    assert not Costs(decode_context_s=1e-9).are_default


def test_waits_that_are_told_late_make_no_work_shorter_than_what_it_computed():
    """Seen on a busy machine: the toy's step had taken less than nothing, and the process ended."""
    told = iter(range(0, -1000, -1))
    found = measured(ToyEngine(), Costs(), most_tokens=64, clocks=Clocks(lambda: float(next(told))))
    assert found.step_s(1, 0) > 0
    assert found.compute_s(64, 0) > 0
