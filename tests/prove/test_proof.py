"""A proof finds each kind of wrong answer, and says so if it has shown nothing. Its servers are stand-ins here."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random

import click
import httpx
import pytest
from click.testing import CliRunner, Result

from mooncake_zmq.prove import command, run
from mooncake_zmq.prove.connectors import CONNECTORS, OBJECT_BYTES, Storage, _flip_files, _store
from mooncake_zmq.prove.planted_names import keys_without_prefix
from mooncake_zmq.prove.prompts import Questions
from mooncake_zmq.prove.run import CHAPTERS, Outcome, Proof, judge
from mooncake_zmq.prove.server import Answer, Launch
from mooncake_zmq.vllm.names import token_keys

ANSWERS = 400


class StandIn:
    """A server whose tokens are a function of the prompt and of the model at its path. `lies`: wrong tokens, one in so many."""

    lies = 0
    loads = 1.0
    margin = 1.0
    fails = 0
    asked = 0

    def __init__(self, launch: Launch, _log: Path) -> None:
        config = json.loads((launch.model / "config.json").read_text())
        self._model = config["rope_theta"], hash((launch.model / "model.safetensors").read_bytes()), launch.arguments[-1:]
        self._stores = launch.transfer is not None
        self._dead = False
        self._loaded = 0.0

    def ready(self) -> "StandIn":
        return self

    def kill(self) -> None:
        self._dead = True

    def log(self) -> str:
        return ""

    def ask(self, prompt: Sequence[int], count: int, *, margins: bool = False) -> Answer:
        kind = type(self)
        if self._stores:
            kind.asked += 1
            self._loaded += kind.loads
            time.sleep(0.001)
            if self._dead or (kind.fails and kind.asked % kind.fails == 0):
                raise httpx.ReadError("gone")
        tokens = [Random(f"{self._model[:2]} {prompt}").randrange(3, 500) + place for place in range(count)]
        if self._stores and kind.lies and kind.asked % kind.lies == 0:
            tokens[-1] += 1
        return Answer(tokens, [kind.margin] * count if margins else [])

    def stream(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        yield from self.ask(prompt, count).tokens

    def hang_up(self, prompt: Sequence[int], count: int, after_s: float) -> None:
        del prompt, count, after_s

    def loaded_tokens(self) -> float:
        return self._loaded

    def preemptions(self) -> float:
        return 0.0


@contextmanager
def no_storage(_scratch: Path, _planted: str) -> Iterator[Storage]:
    yield Storage({"kv_connector": "stand-in"}, flip=lambda _random: True)


def proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **faults: float) -> list[Outcome]:
    stand_in = type("Faulty", (StandIn,), faults)
    monkeypatch.setattr(run, "Server", stand_in)
    monkeypatch.setitem(CONNECTORS, "none", no_storage)
    return Proof(python="python", connector="none", answers=ANSWERS, seed=3, scratch=tmp_path).run()


def test_right_answers_of_every_chapter_are_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = proved(tmp_path, monkeypatch)
    assert [outcome.problems for outcome in outcomes] == [[]] * len(CHAPTERS)
    kinds = sum((outcome.verdicts for outcome in outcomes), start=type(outcomes[0].verdicts)())
    assert sum(kinds.values()) == ANSWERS
    assert {*kinds} <= {"right", "left", "cut"}
    assert kinds["right"] > ANSWERS / 2
    assert kinds["left"] > 20


def test_wrong_tokens_are_found_but_not_between_equals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = proved(tmp_path / "wrong", monkeypatch, lies=2)
    assert all(outcome.verdicts["wrong"] for outcome in wrong)
    assert "computed" in wrong[0].details[0]
    tied = proved(tmp_path / "tied", monkeypatch, lies=2, margin=1e-4)
    assert sum(outcome.verdicts["tied"] for outcome in tied) > 10
    assert not any(outcome.problems for outcome in tied)


def test_failures_and_a_connector_that_loads_nothing_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = proved(tmp_path / "failed", monkeypatch, fails=10)
    assert failed[0].verdicts["failed"]
    assert "gone" in failed[0].details[0]
    idle = proved(tmp_path / "idle", monkeypatch, loads=0.0)
    assert {outcome.chapter.name for outcome in idle if outcome.problems} == {each.name for each in CHAPTERS if each.loads}


def test_a_chapter_of_flipped_bits_proves_nothing_where_none_was_flipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CHAPTERS", [each for each in CHAPTERS if each.flips])
    assert [outcome.problems for outcome in proved(tmp_path / "some", monkeypatch)] == [[]]
    monkeypatch.setitem(CONNECTORS, "empty", lambda _scratch, _planted: nullcontext(Storage({"kv_connector": "stand-in"})))
    (none,) = Proof(python="python", connector="empty", answers=ANSWERS, seed=3, scratch=tmp_path).run()
    assert none.problems == ["no KV was stored to flip bits of, so nothing is proved"]


@pytest.mark.timeout(60)
def test_a_server_that_does_not_start_ends_the_proof_and_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[StandIn] = []

    class NotAgain(StandIn):
        def ready(self) -> "StandIn":
            servers.append(self)
            if len(servers) == 3:
                raise click.ClickException("vLLM ended; its log ends with: no memory")
            return self

    monkeypatch.setattr(run, "Server", NotAgain)
    monkeypatch.setitem(CONNECTORS, "none", no_storage)
    with pytest.raises(click.ClickException, match="no memory"):
        Proof(python="python", connector="none", answers=ANSWERS, seed=3, scratch=tmp_path).run()
    assert all(server._dead for server in servers)


def test_tokens_that_were_loaded_before_a_chapter_with_kills_are_not_counted_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CHAPTERS", CHAPTERS[:2])
    first, killed = proved(tmp_path, monkeypatch)
    answers = [sum(outcome.verdicts.values()) for outcome in (first, killed)]
    assert first.loaded_tokens == answers[0]
    assert 0 < killed.loaded_tokens <= answers[1]


@pytest.mark.parametrize(
    ("tokens", "whole", "verdict"),
    [
        ([1, 2, 3], True, "right"),
        ([1, 2], True, "wrong"),
        ([1, 2], False, "right"),
        ([1, 9, 3], True, "wrong"),
        ([9, 2, 3], True, "tied"),
        ([1, 2, 3, 4], True, "wrong"),
    ],
)
def test_an_answer_is_wrong_from_the_first_token_that_was_less_likely(tokens: list[int], whole: bool, verdict: str) -> None:
    assert judge(tokens, Answer([1, 2, 3], [1e-4, 1.0, 1.0]), whole=whole, tie=1e-3) == verdict


def test_other_tokens_are_wrong_where_nothing_is_known_of_their_margin() -> None:
    assert judge([1, 9], Answer([1, 2], []), whole=True, tie=1e-3) == "wrong"


def test_questions_are_the_same_for_a_seed_and_share_beginnings() -> None:
    drawn = [[Questions(5).next(hang_ups=0.3) for _ in range(1)][0] for _ in range(2)]
    assert drawn[0] == drawn[1]
    source = Questions(5)
    prompts = [source.next().prompt for _ in range(300)]
    beginnings = {prompt[:32] for prompt in prompts if len(prompt) >= 32}
    assert len(beginnings) < 100
    assert max(map(len, prompts)) > 400


def test_bits_are_flipped_in_the_memory_of_values_alone(tmp_path: Path) -> None:
    with _store(tmp_path) as (endpoint, flip):
        assert endpoint.startswith("ipc://")
        assert flip(Random(1))
    (tmp_path / "values").write_bytes(bytes(1 << 16))
    for seed in range(20):
        _flip_files(tmp_path, Random(seed), last_bytes=1 << 12)
    changed = (tmp_path / "values").read_bytes()
    assert changed[: (1 << 16) - (1 << 12)] == bytes((1 << 16) - (1 << 12))
    assert any(changed)
    assert OBJECT_BYTES > 1 << 20
    assert not _flip_files(tmp_path / "none", Random(1))


def test_planted_keys_are_those_of_a_block_alone() -> None:
    tokens = [*range(64), *range(32, 64)]
    planted, true = (keys(b"r" * 16, tokens, 32).upto(3) for keys in (keys_without_prefix, token_keys))
    assert planted[1] == planted[2]
    assert true[1] != true[2]


def proving(*options: str) -> Result:
    return CliRunner().invoke(command.prove, ["vllm", "--vllm-python", "python", "--connector", "none", *options])


def test_the_command_says_what_is_wrong_in_its_options_and_shows_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CliRunner().invoke(
        command.prove, ["vllm", "--vllm-python", "p", "--connector", "none", "--planted", "trust_all_bytes"]
    )
    assert said.exit_code == 2
    assert "--planted goes with" in said.output

    class NotThere(StandIn):
        def ready(self) -> "StandIn":
            raise click.ClickException("vLLM ended; its log ends with: No module named vllm")

    monkeypatch.setattr(run, "Server", NotThere)
    said = proving()
    assert said.exit_code == 1
    assert "No module named vllm" in said.output
    monkeypatch.setattr(run, "Server", StandIn)
    monkeypatch.setitem(CONNECTORS, "none", no_storage)
    said = proving("--answers", "200")
    assert said.exit_code == 0, said.output
    assert "proved" in said.output
    told = CliRunner().invoke(
        command.prove, ["vllm", "--vllm-python", "p", "--connector", "none", "--answers", "200", "--json"]
    )
    assert json.loads(told.stdout)["clean"]
