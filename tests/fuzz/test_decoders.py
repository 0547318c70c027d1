"""Every decoder of bytes from outside, with inputs that a seed draws: read or refused, quickly and in little memory."""

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from mooncake_zmq.fuzz import examination
from mooncake_zmq.fuzz.command import fuzz
from mooncake_zmq.fuzz.decoders import DECODERS
from mooncake_zmq.fuzz.examination import MAX_CPU_S, MAX_GROWTH_BYTES, Decoder, examine, mutations

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", DECODERS)
def test_whatever_is_sent_is_read_or_refused(name: str) -> None:
    decoder = DECODERS[name]
    seeds = list(decoder.seeds())
    for raw in seeds:
        decoder.read(raw)  # a seed is a valid one: nothing is learnt from what is refused at its first byte
    for raw in mutations(seeds, Random(name), 2000 if decoder.quick else 100, decoder.max_bytes):
        finding = examine(decoder, raw)
        assert finding is None, f"{finding}: {raw!r}"


def busy(raw: bytes) -> None:
    began_s = time.process_time()
    while time.process_time() < began_s + 1.1 * MAX_CPU_S:
        pass


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda raw: {}[raw], "KeyError"),
        (lambda raw: 1 / 0, "ZeroDivisionError"),
        (lambda raw: bytearray(b"x") * (MAX_GROWTH_BYTES * 4), "more than 64 MiB"),
        (busy, "more than 0.5 s"),
    ],
)
def test_what_an_input_may_not_do_is_found(read, what) -> None:
    finding = examine(Decoder(name="planted", read=read, refusals=(ValueError,)), b"x")
    assert finding is not None
    assert finding.what == what


def test_memory_that_an_earlier_input_took_as_well_is_found() -> None:
    greedy = Decoder(name="planted", read=lambda raw: bytearray(b"x") * (int(raw) << 20))
    for each in (b"300", b"200", b"300"):
        assert examine(greedy, each) is not None
    assert examine(greedy, b"10") is None


def test_where_no_peak_can_be_begun_what_an_input_leaves_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_begin_peak", lambda: False)
    kept: list[bytearray] = []
    examine(Decoder(name="planted", read=lambda raw: len(bytearray(b"x") * (300 << 20))), b"")
    assert examine(Decoder(name="planted", read=lambda raw: None), b"") is None
    assert examine(Decoder(name="planted", read=lambda raw: kept.append(bytearray(b"x") * (100 << 20))), b"") is not None


def test_blind_inputs_reach_what_lies_near_a_valid_one() -> None:
    seeds = DECODERS["message"].seeds()

    def trips(raw: bytes) -> None:
        if len(raw) > 8 and raw[0] == 0xC1:
            raise KeyError

    found = (examine(Decoder(name="planted", read=trips), raw) for raw in mutations(seeds, Random(1), 2000, 4096))
    assert any(found)


def test_an_input_to_replay_that_is_not_there_is_refused(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(fuzz, ["--decoder", "message", "--replay", str(tmp_path / "none")])
    assert outcome.exit_code == 2
    assert "does not exist" in outcome.output


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="the extra fuzz is not installed")
def test_a_guide_finds_what_lies_behind_four_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mooncake_zmq", "fuzz", "--decoder", "planted", "--minutes", "0.2", "--json"]
    done = subprocess.run([*command, "--findings", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (outcome,) = json.loads(done.stdout)
    (finding,) = outcome["findings"]
    assert finding["what"] == "KeyError"
    replay = [sys.executable, "-m", "mooncake_zmq", "fuzz", "--decoder", "planted", "--replay", finding["path"]]
    assert subprocess.run(replay, cwd=ROOT, capture_output=True, check=False).returncode == 1


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="the extra fuzz is not installed")
def test_what_a_guided_process_makes_for_a_while_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(made := tmp_path / "made"))
    for directory in (made, corpus := tmp_path / "corpus"):
        directory.mkdir()
    guided = [sys.executable, "-m", "mooncake_zmq.fuzz.guided", "trace-lines", "1", "1", str(corpus), str(tmp_path)]
    subprocess.run(guided, cwd=ROOT, capture_output=True, check=True)
    (left,) = made.glob("mz-fuzz-*")  # it is ended without a word: nowhere else than where it was told
    shutil.rmtree(left)
    command = [sys.executable, "-m", "mooncake_zmq", "fuzz", "--decoder", "trace-lines", "--minutes", "0.01"]
    subprocess.run([*command, "--findings", str(tmp_path / "found")], cwd=ROOT, capture_output=True, check=True)
    assert list(made.iterdir()) == []
