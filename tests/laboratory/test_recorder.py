"""Token times out of runs of steps, keys out of hash ids."""

import numpy as np
import pytest

from mooncake_zmq.laboratory.gaps import longest_tenth_s
from mooncake_zmq.laboratory.keys import Prompt, block_keys
from mooncake_zmq.laboratory.machine import StepRun
from mooncake_zmq.laboratory.recorder import step_times


def test_the_steps_of_a_work_grow_by_the_same_each() -> None:
    assert step_times(StepRun(10.0, 1.0, 0.5, 3)).tolist() == [11.0, 12.5, 14.5]
    assert step_times(StepRun(20.0, 9.0, 0.0, 1)).tolist() == [29.0]


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [([], 0.0), ([3.0], 3.0), ([1.0] * 9 + [5.0], 5.0), ([1.0] * 18 + [5.0, 7.0], 6.0), ([2.0, 1.0], 2.0)],
)
def test_tbt_is_the_mean_of_the_longest_tenth_of_the_gaps(gaps: list[float], expected: float) -> None:
    assert longest_tenth_s(np.array(gaps)) == pytest.approx(expected)


def test_equal_ids_are_one_block_only_behind_equal_ids() -> None:
    assert block_keys((1, 2), 1024, 512) == block_keys((1, 2, 3), 1100, 512)
    assert block_keys((1, 2), 1024, 512)[1] != block_keys((3, 2), 1024, 512)[1]
    assert len(block_keys((1, 2), 700, 512)) == 1


def test_parts_of_a_block_have_keys_of_their_own() -> None:
    keys = block_keys((1, 2), 1024 - 100, 256)
    assert len(keys) == len(set(keys)) == 3
    assert keys == block_keys((1, 2), 1024, 256)[:3]


def test_a_trace_whose_ids_do_not_cover_its_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="2 hash ids cannot stand for 2000 tokens"):
        block_keys((1, 2), 2000, 512)


def test_what_follows_the_last_complete_block_is_the_requests_own() -> None:
    one, other = Prompt(1000, 512, 1)[:], Prompt(1000, 512, 2)[:]
    assert len(one) == len(other) == len(Prompt(1000, 512, 1)) == 4000
    assert one[: 512 * 4] == other[: 512 * 4] == bytes(2048)
    assert one[512 * 4 :] == b"\x01\0\0\0" * 488 != other[512 * 4 :]
    assert Prompt(1024, 512, 1)[:] == bytes(4096)


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (0, 2048), (2000, 2100), (2048, 4000), (3000, 4200), (4100, 9999)])
def test_a_part_of_a_prompt_is_what_stands_there_in_the_whole(start: int, stop: int) -> None:
    prompt = Prompt(1000, 512, 7, 50)
    whole = bytes(4 * 512) + b"\x07\0\0\0" * 488 + bytes(4 * 50)
    assert prompt[:] == whole
    assert prompt[start:stop] == whole[start:stop]
