"""How a long command shows how far it is: a line each minute where there is no terminal."""

import pytest

from mooncake_zmq.laboratory.command import runs_display
from mooncake_zmq.telemetry import progress
from mooncake_zmq.telemetry.progress import progress_display


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_comes_each_minute_with_the_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display("work") as display:
        for share in (0.1, 0.2, 0.25):
            clock[0] += 40.0
            display.show(share, f"{share:.2f} of it")
    assert capsys.readouterr().err == "0.20 of it, 20%; about 6 min left\n"


def test_nothing_done_says_nothing_of_the_rest(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display("work") as display:
        clock[0] += 60.0
        display.show(0.0, "work")
    assert capsys.readouterr().err == "work, 0%\n"


def test_a_line_said_comes_at_once(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display("work") as display:
        display.say("seed=1 failed")
        display.show(1.0, "work")
    assert capsys.readouterr().err == "seed=1 failed\n"


def test_runs_of_the_laboratory_say_how_far_they_are_together(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with runs_display("fig5", 4) as advance:
        advance(0, 1.0)
        clock[0] += 61.0
        advance(1, 0.5)
    assert capsys.readouterr() == ("", "fig5, 4 runs, 38%; about 2 min left\n")
