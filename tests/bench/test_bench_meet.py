"""The throttled link of `bench meet`. The bench itself is run as the pages' command."""

import pytest

from mooncake_zmq.bench import meet, throttled


def test_a_bucket_lets_through_what_its_file_says_and_learns_of_a_change(tmp_path, monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(throttled.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(throttled.time, "sleep", sleep)
    file = tmp_path / "rate"
    file.write_text("1000 all")
    bucket = throttled.Bucket(file)
    for _ in range(10):
        bucket.take(100)
    assert sum(slept) == pytest.approx(1.0 - throttled.BURST_S)
    slept.clear()
    file.write_text("1e12")
    bucket.take(100)
    assert sum(slept) < throttled.BURST_S + 0.01


def test_the_rates_lie_on_both_sides_of_the_one_at_which_both_ways_take_equally_long():
    assert len(meet.RATES) == 6
    assert min(meet.RATES) < 1.0 < max(meet.RATES)
    assert 1.0 in meet.RATES
