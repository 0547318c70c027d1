"""The engine's benchmark: its arithmetic, its turns, its processes; and the model it hands to others."""

import json
import re
from contextlib import contextmanager
from types import SimpleNamespace

import click
import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import engine as bench_module
from mooncake_zmq.bench.command import bench as bench_command
from mooncake_zmq.bench.engine import Case, EngineBench, bench_engine, layer_weights, prefill_flops, step_bytes
from mooncake_zmq.bench.memory import Footprint
from mooncake_zmq.bench.others import engine_driver
from mooncake_zmq.bench.others.engine_peers import MACHINE, OURS, VLLM, VLLM_BFLOAT16, engine_process
from mooncake_zmq.bench.others.hugging_face import hugging_face_directory
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.sources.dummy import DUMMY_SHAPES, DummySource
from mooncake_zmq.engine.sources.hugging_face import HuggingFaceSource
from mooncake_zmq.engine.sources.source import expected_shapes

SMALL = {"prefill": (Case(tokens=32),), "decode": (Case(tokens=16, batch=1), Case(tokens=16, batch=2))}
PARTS = ("prefill", "decode")


def test_the_operations_are_those_of_the_models_shape():
    spec = DUMMY_SHAPES["135m"]
    assert layer_weights(spec) == 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536)
    assert step_bytes(spec) == 4 * (layer_weights(spec) + 49152 * 576)
    whole = 2 * layer_weights(spec) * 512 + 4 * 576 * 30 * 512**2 / 2 + 2 * 49152 * 576
    assert prefill_flops(spec, 512) == whole


class Answers:
    """A side whose calls take a time of its own."""

    def __init__(self, name: str) -> None:
        self.pid = 0
        self.ready = {"version": f"{name} 1"}
        self._name = name
        self._took_s = {OURS: 0.5, VLLM: 1.0, VLLM_BFLOAT16: 0.25, MACHINE: 0.0}[name]

    def ask(self, method, **arguments):
        if method == "machine":
            return {"gemm_flops": 1e9, "gemv_s": 0.25, "gemv_shape": "square"}
        if method == "greedy":
            return {"tokens": [7] * 20 + [self._name == VLLM_BFLOAT16] * 12}
        return {"s": self._took_s}


@pytest.fixture
def asked(monkeypatch):
    """(side, method) in the order of asking."""
    calls = []

    @contextmanager
    def answer(order, *, python):
        side = Answers(order["engine"])
        ask = side.ask
        side.ask = lambda method, **arguments: calls.append((order["engine"], method)) or ask(method, **arguments)
        yield side

    monkeypatch.setattr(bench_module, "engine_process", answer)
    monkeypatch.setattr(
        bench_module,
        "footprint",
        lambda name, pid: Footprint(name=name, peak_bytes=1, private_bytes=1, file_bytes=0, shared_bytes=0),
    )
    monkeypatch.setattr(bench_module, "QUIET_S", 0.0)
    return calls


def run(tmp_path, **settings):
    settings = {"backend": "numpy", "cases": SMALL, "steps": 2, "threads": 1} | settings
    bench = EngineBench(model="dummy:tiny", cache_dir=str(tmp_path), **settings)
    return bench_engine(bench, parts=PARTS, progress=lambda _: None)


def test_every_engine_gets_its_rows_and_the_machine_its_own(asked, tmp_path):
    report = run(tmp_path, rounds=2, vllm_python="a")
    ratios = {row.name: row.ratio for row in report.rows}
    assert ratios["prefill, 32 tokens / vLLM"] == ratios["decode, batch 2, context 16 / vLLM"] == 2.0
    assert ratios["prefill, 32 tokens / vLLM bfloat16"] == 0.5
    assert ratios["decode, batch 1, context 16 / sgemv of the weights"] == 0.5, "a step takes twice as long as the sgemv"
    flops = prefill_flops(DUMMY_SHAPES["tiny"], 32)
    assert ratios["prefill, 32 tokens / GEMM rate"] == pytest.approx(flops / 0.5 / 1e9)
    assert [each.name for each in report.memory] == [OURS, VLLM, VLLM_BFLOAT16]
    assert "vLLM: the same 32 greedy tokens as ours" in report.notes
    assert any("vLLM bfloat16: greedy tokens part at token 21" in note for note in report.notes)


def test_the_sides_take_turns(asked, tmp_path):
    run(tmp_path, rounds=2, vllm_python="a")
    timed = [side for side, method in asked if method in PARTS]
    assert timed == [OURS, VLLM, VLLM_BFLOAT16] * 9, "three cases, in two rounds and the one that warms up"
    assert [side for side, method in asked if method == "machine"] == [MACHINE] * 3


def test_without_other_engines_the_rows_are_those_against_the_machine(asked, tmp_path):
    assert len(run(tmp_path, rounds=1).rows) == 3


@pytest.mark.parametrize(("cpu_time", "unit"), [(False, "tokens/s"), (True, "tokens/CPU s")])
def test_real_processes_measure_a_tiny_model(tmp_path, cpu_time, unit):
    report = run(tmp_path, rounds=1, cpu_time=cpu_time)
    assert [row.unit for row in report.rows] == [unit] * 3
    assert any(re.match(r"machine numpy [0-9.]+\S* on \S", note) for note in report.notes), "the BLAS is named"
    assert all(row.value > 0 and row.reference > 0 for row in report.rows)
    (ours,) = report.memory
    assert 0 < ours.private_bytes <= ours.peak_bytes


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_a_side_goes_by_the_clock_it_is_told(tmp_path, monkeypatch, clock):
    ticks = {"wall": iter(range(0, 1000, 2)), "cpu": iter(range(0, 1000, 7))}
    monkeypatch.setattr(engine_driver, "CLOCKS", {name: each.__next__ for name, each in ticks.items()})
    monkeypatch.setattr(engine_driver, "sys", SimpleNamespace(path=[]))
    path = prepare("dummy:tiny", str(tmp_path), backend="numpy")
    side = engine_driver.Mooncake({"model": str(path), "threads": 1, "backend": "numpy", "clock": clock})
    tick = {"wall": 2, "cpu": 7}[clock]
    assert side.prefill_s([5] * 8) == tick
    assert side.decode_step_s([[5] * 8], 2) == tick / 2


def test_a_side_that_dies_is_told_with_its_last_words():
    with pytest.raises(click.ClickException, match="no such"), engine_process({"engine": "no such", "threads": 1}, python=None):
        pass
    order = {"engine": OURS, "model": "/no/model", "threads": 1, "backend": "numpy", "clock": "wall"}
    with pytest.raises(click.ClickException, match="not a prepared model"), engine_process(order, python=None):
        pass


def test_a_python_that_is_not_there_is_told():
    order = {"engine": VLLM, "threads": 1}
    with pytest.raises(click.ClickException, match="/no/python"), engine_process(order, python="/no/python"):
        pass


@pytest.mark.parametrize("model", ["toy", "/no/model", "dummy:no"])
def test_a_model_that_cannot_be_measured_is_refused_in_one_line(tmp_path, model):
    ran = CliRunner().invoke(bench_command, ["engine", "--model", model, "--cache-dir", str(tmp_path)])
    assert ran.exit_code == 2
    assert len([line for line in ran.output.splitlines() if line.startswith("Error: ")]) == 1


def test_a_model_with_too_few_positions_is_refused(tmp_path):
    bench = EngineBench(model='dummy:{"max_positions": 1024}', cache_dir=str(tmp_path), backend="numpy")
    with pytest.raises(click.ClickException, match="1024 positions, and these rows need 2048"):
        bench_engine(bench, parts=PARTS, progress=lambda _: None)


@pytest.mark.parametrize(
    "shape", ["tiny", '{"tied": true, "layers": 1}', '{"family": "qwen2"}', '{"family": "qwen3"}', '{"family": "mistral"}']
)
def test_other_engines_are_given_the_same_weights(tmp_path, shape):
    ours = DummySource(shape)
    directory = hugging_face_directory(f"dummy:{shape}", tmp_path)
    (directory / "tokenizer.json").touch()  # our source insists on one, engines that are given token ids do not
    theirs = HuggingFaceSource(directory)
    assert theirs.spec.family == ours.spec.family
    assert (theirs.spec.tied, theirs.spec.eos_ids) == (ours.spec.tied, ours.spec.eos_ids)
    for name in expected_shapes(ours.spec):
        assert np.array_equal(theirs.tensor(name), ours.tensor(name)), name


def test_a_hugging_face_directory_is_given_as_it_is(tmp_path):
    assert hugging_face_directory(str(tmp_path), tmp_path / "scratch") == tmp_path
    assert not (tmp_path / "scratch").exists()


def test_what_cannot_be_written_for_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(DummySource, "tensor", lambda self, name: np.ones(8, np.float32))
    with pytest.raises(ModelError, match="scaled RoPE"):
        hugging_face_directory("dummy:tiny", tmp_path)


def test_json_holds_every_row(asked, tmp_path):
    arguments = [
        "engine",
        "--model",
        "dummy:135m",
        "--cache-dir",
        str(tmp_path),
        "--rounds",
        "1",
        "--json",
        "--backend",
        "numpy",
    ]
    ran = CliRunner().invoke(bench_command, arguments)
    assert ran.exit_code == 0, ran.output
    shown = json.loads(ran.stdout)
    assert len(shown["rows"]) == 6
    assert len(shown["memory"]) == 1
