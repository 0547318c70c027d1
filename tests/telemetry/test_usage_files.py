"""What API keys use is counted by day and outlives the process, whatever the disk does meanwhile."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.operate.usage import read
from mooncake_zmq.telemetry.usage import Meter, Used

DAY_S = 86_400.0
NOON = datetime(2026, 11, 27, 12, tzinfo=UTC).timestamp()


class Clock:
    def __init__(self) -> None:
        self.time = NOON

    def __call__(self) -> float:
        return self.time


def note(meter: Meter, key: str, prompt: int = 10) -> None:
    meter.note(key, prompt=prompt, cached=(1, 2, 3), completion=4)


def used_of(day: str, key: str, calls: int, prompt: int) -> Used:
    """What so many calls of `note` add up to."""
    cached = {"cached_own": calls, "cached_local": 2 * calls, "cached_remote": 3 * calls}
    return Used(day=day, key=key, calls=calls, prompt_tokens=prompt, completion_tokens=4 * calls, **cached)


def used(directory: Path) -> list[Used]:
    return sorted(read(directory), key=lambda each: (each.day, each.key))


def test_calls_of_a_key_and_a_day_are_one_line_an_append(tmp_path: Path) -> None:
    clock = Clock()
    meter = Meter(tmp_path / "made/here", "gateway-a", now=clock)
    note(meter, "alice")
    note(meter, "alice", 20)
    note(meter, "")
    clock.time += DAY_S
    note(meter, "alice")
    meter.write()
    meter.write()
    assert sorted(path.name for path in (tmp_path / "made/here").iterdir()) == [
        "usage-2026-11-27-gateway-a.jsonl",
        "usage-2026-11-28-gateway-a.jsonl",
    ]
    assert used(tmp_path / "made/here") == [
        used_of("2026-11-27", "", 1, 10),
        used_of("2026-11-27", "alice", 2, 30),
        used_of("2026-11-28", "alice", 1, 10),
    ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.booleans(), st.sampled_from(["", "full", "half"]))))
def test_whatever_the_disk_does_each_call_is_counted_once(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    directory, true_write = tmp_path_factory.mktemp("usage"), os.write
    meter = Meter(directory, "gateway-a", now=Clock())
    for key, prompt, writes, disk in steps:
        note(meter, key, prompt)

        def write(fd: int, lines: bytes, disk: str = disk) -> int:
            if disk == "full":
                raise OSError(28, "full")
            return true_write(fd, lines[: len(lines) // 2] if disk == "half" else lines)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", write)
            if writes:
                meter.write()
    meter.write()
    found = list(read(directory))
    for key in "ab":
        assert sum(each.prompt_tokens for each in found if each.key == key) == sum(n for k, n, *_ in steps if k == key)
    assert sum(each.calls for each in found) == len(steps)
    assert meter.counts["not_written"] == sum(writes and disk != "" for _, _, writes, disk in steps)


def test_a_day_whose_file_cannot_be_written_keeps_no_other_day_back(tmp_path: Path) -> None:
    clock = Clock()
    meter = Meter(tmp_path, "gateway-a", now=clock)
    note(meter, "alice", 10)
    (of_first_day,) = tmp_path.iterdir()
    of_first_day.unlink()
    of_first_day.mkdir()
    clock.time += DAY_S
    note(meter, "alice", 20)
    meter.write()
    of_first_day.rename(tmp_path / "moved")
    assert [each.prompt_tokens for each in used(tmp_path)] == [20]
    meter.write()
    assert [each.prompt_tokens for each in used(tmp_path)] == [10, 20]


def test_a_line_that_a_crash_cut_off_is_left_out_and_any_other_is_an_error(tmp_path: Path) -> None:
    meter = Meter(tmp_path, "gateway-a", now=Clock())
    note(meter, "alice")
    meter.write()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + b'{"day":"2026-')
    assert [each.calls for each in read(tmp_path)] == [1]
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"usage-2026-11-27-gateway-a\.jsonl:2: "):
        list(read(tmp_path))


def test_a_directory_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Meter(tmp_path / "file", "gateway-a")
