"""`bench engine`: our engine against other engines on the same CPU, and against the machine's own rates.

Every side is a process of its own that holds the same weights and computes only when asked, so the sides of a row take turns,
round by round, and only one of them ever computes. All hold them in float32, and vLLM once more in bfloat16, which rounds them;
our compiled backend decodes from fewer bits wherever those give the very same numbers. `engine_driver` has the exact work of
each.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from mooncake_zmq.bench.memory import await_idle, footprint
from mooncake_zmq.bench.others.engine_peers import MACHINE, OURS, VLLM, VLLM_BFLOAT16, engine_process
from mooncake_zmq.bench.others.hugging_face import hugging_face_directory
from mooncake_zmq.bench.others.peers import Peer
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.engine.cpu import Backend
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.prepared_files import read_spec
from mooncake_zmq.engine.spec import ModelSpec
from mooncake_zmq.engine.tokenizer import open_tokenizer

STEPS = 32
GREEDY_TOKENS = 32
GREEDY_TEXT = "The steam engine changed the world because it"
QUIET_S, QUIET_CPU_S, QUIET_TIMEOUT_S = 0.1, 0.015, 20.0
"""Idle: a peer that uses at most a tick of CPU time in this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One figure: a prefill of `tokens`, or a decode step of `batch` sequences of that many."""

    tokens: int
    batch: int = 0

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch}, context {self.tokens:,}" if self.batch else f"prefill, {self.tokens:,} tokens"

    @property
    def per_call(self) -> int:
        """Tokens that one timed call computes or generates."""
        return self.batch or self.tokens


CASES = {
    "prefill": (Case(tokens=512), Case(tokens=2048)),
    "decode": tuple(Case(tokens=context, batch=batch) for batch in (1, 8) for context in (128, 1024)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """The parameters of a run; `cases`: by the name of the figure's group."""

    model: str = "default"
    cache_dir: str = ""
    rounds: int = 5
    threads: int = 2
    cpu_time: bool = False
    backend: Backend = "auto"
    steps: int = STEPS
    vllm_python: str | None = None
    vllm_eager: bool = False
    cases: Mapping[str, Sequence[Case]] | None = None


def bench_engine(bench: EngineBench, *, parts: Sequence[str], progress: Progress) -> Report:
    """Run all of it. Raises click.ClickException when a side cannot be started, dies or does not become idle, and
    ModelError."""
    cases = [case for part in parts for case in (bench.cases or CASES)[part]]
    with TemporaryDirectory(prefix="mczmq-bench-") as scratch, ExitStack() as stack:
        progress(f"preparing the model {bench.model}")
        path = prepare(bench.model, bench.cache_dir, backend=bench.backend)
        if str(path) == "toy":
            raise ModelError("the toy engine has no weights: give another model")
        spec = read_spec(path)
        _check_length(spec, cases, bench.steps)
        directory = hugging_face_directory(bench.model, Path(scratch)) if bench.vllm_python else None
        sides = _start(bench, spec, path, directory, cases, stack, progress)
        report = Report("engine")
        report.notes += [f"{name} {side.ready['version']}" for name, side in sides.items()]
        report.notes += _compare_greedy(sides, open_tokenizer(path).encode(GREEDY_TEXT).tolist(), progress)
        took = _rounds(bench, sides, cases, spec, progress)
        report.rows += [
            row for case in cases for row in _rows(case, took, spec, "tokens/CPU s" if bench.cpu_time else "tokens/s")
        ]
        report.notes += _machine_notes(took, spec, cases)
        report.memory += [footprint(name, side.pid) for name, side in sides.items() if name != MACHINE]
    return report


def layer_weights(spec: ModelSpec) -> int:
    """Return the number of parameters in all layers' matrices: every token is multiplied with each of them once."""
    attention = (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim * spec.hidden
    return spec.layers * (attention + 3 * spec.hidden * spec.ffn)


def head_weights(spec: ModelSpec) -> int:
    """Return the number of parameters of the head."""
    return spec.vocab_size * spec.hidden


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    """Return 2 x layer weights x n + 4 x d x layers x n^2 / 2, d the width of all query heads; the head for the last token
    only."""
    width = spec.heads * spec.head_dim
    return 2.0 * layer_weights(spec) * tokens + 2.0 * width * spec.layers * tokens**2 + 2.0 * head_weights(spec)


def step_bytes(spec: ModelSpec) -> int:
    """Return the bytes of weights that a decode step reads, as float32."""
    return 4 * (layer_weights(spec) + head_weights(spec))


def _check_length(spec: ModelSpec, cases: Sequence[Case], steps: int) -> None:
    longest = max(case.tokens + (2 * steps if case.batch else 0) for case in cases)
    if longest > spec.max_positions:
        raise ModelError(f"{spec.name} has {spec.max_positions} positions, and these rows need {longest}")


def _start(
    bench: EngineBench,
    spec: ModelSpec,
    path: Path,
    directory: Path | None,
    cases: Sequence[Case],
    stack: ExitStack,
    progress: Progress,
) -> dict[str, Peer]:
    """Start a process for each available side."""
    longest, batch = max(case.tokens for case in cases), max(case.batch for case in cases)
    vllm = {"model": str(directory), "max_context": longest, "eager": bench.vllm_eager}
    orders: dict[str, tuple[str | None, dict[str, Any]]] = {
        OURS: (None, {"model": str(path), "backend": bench.backend}),
        VLLM: (bench.vllm_python, vllm | {"dtype": "float32"}),
        VLLM_BFLOAT16: (bench.vllm_python, vllm | {"dtype": "bfloat16"}),
        MACHINE: (None, {"weight_bytes": step_bytes(spec)}),
    }
    sides = {}
    for name, (python, order) in orders.items():
        if python is not None or name in (OURS, MACHINE):
            progress(f"starting {name}")
            order |= {
                "engine": name,
                "threads": bench.threads,
                "clock": "cpu" if bench.cpu_time else "wall",
                "max_batch": max(1, batch),
                "steps": bench.steps,
            }
            sides[name] = stack.enter_context(engine_process(order, python=python))
    return sides


def _rounds(
    bench: EngineBench, sides: Mapping[str, Peer], cases: Sequence[Case], spec: ModelSpec, progress: Progress
) -> dict[tuple[str, str], list[float]]:
    """Return (side, case or figure) -> its value in each counted round; seconds, or FLOP/s."""
    took: dict[tuple[str, str], list[float]] = {}
    for number in range(bench.rounds + 1):
        shown = f"round {number} of {bench.rounds}" if number else "warming up"
        for seed, case in enumerate(cases):
            for name, side in sides.items():
                if name == MACHINE:
                    continue
                _rest(sides)
                arguments = {"tokens": case.tokens, "vocab_size": spec.vocab_size, "seed": 1000 * number + seed}
                if case.batch:
                    took_s = side.ask("decode", batch=case.batch, steps=bench.steps, **arguments)["s"]
                else:
                    took_s = side.ask("prefill", **arguments)["s"]
                progress(f"{shown}: {case.name}: {name} {case.per_call / took_s:,.1f} tokens/s")
                if number:
                    took.setdefault((name, case.name), []).append(took_s)
        _rest(sides)
        for figure, value in sides[MACHINE].ask("machine").items():
            if number:
                took.setdefault((MACHINE, figure), []).append(value)
    return took


def _rest(sides: Mapping[str, Peer]) -> None:
    """Wait until all sides are idle: BLAS and OpenMP threads spin for a while when they are done."""
    await_idle({name: side.pid for name, side in sides.items()}, QUIET_S, QUIET_CPU_S, QUIET_TIMEOUT_S)


def _rows(case: Case, took: Mapping[tuple[str, str], Sequence[float]], spec: ModelSpec, unit: str) -> list[Row]:
    """Return the rows of tokens per second against each engine, and against the machine's own rate."""
    if case.batch:
        bound, bound_s = "sgemv of the weights", median(took[MACHINE, "gemv_s"])
    else:
        bound, bound_s = "GEMM rate", prefill_flops(spec, case.tokens) / median(took[MACHINE, "gemm_flops"])
    others = {name: median(took[name, case.name]) for name in (VLLM, VLLM_BFLOAT16) if (name, case.name) in took}
    ours_s = median(took[OURS, case.name])
    return [
        Row(f"{case.name} / {name}", unit, case.per_call / ours_s, case.per_call / reference_s, higher=True)
        for name, reference_s in {**others, bound: bound_s}.items()
    ]


def _compare_greedy(sides: Mapping[str, Peer], prompt: list[int], progress: Progress) -> list[str]:
    """Note whether the others continue a text as ours does. They may differ where two tokens are nearly equal, so it is only a
    note."""
    progress("comparing greedy tokens")
    answers = {
        name: side.ask("greedy", prompt=prompt, count=GREEDY_TOKENS)["tokens"]
        for name, side in sides.items()
        if name != MACHINE
    }
    notes = []
    for name in answers.keys() - {OURS}:
        pairs = zip(answers[OURS], answers[name], strict=True)
        parted = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if parted is None:
            notes.append(f"{name}: the same {GREEDY_TOKENS} greedy tokens as ours")
        else:
            ours, theirs = answers[OURS][parted], answers[name][parted]
            notes.append(f"{name}: greedy tokens part at token {parted + 1} of {GREEDY_TOKENS}: {theirs}, ours {ours}")
    return sorted(notes)


def _machine_notes(took: Mapping[tuple[str, str], Sequence[Any]], spec: ModelSpec, cases: Sequence[Case]) -> list[str]:
    gemm, gemv_s = median(took[MACHINE, "gemm_flops"]), median(took[MACHINE, "gemv_s"])
    size = step_bytes(spec)
    notes = [
        f"GEMM rate: {gemm / 1e9:,.1f} GFLOP/s, the best of several 2048^3 float32 products of NumPy",
        f"sgemv of the weights: {size / 1e6:,.0f} MB in {1e3 * gemv_s:.1f} ms, {size / gemv_s / 1e9:.1f} GB/s, "
        f"{took[MACHINE, 'gemv_shape'][-1]}",
    ]
    for case in cases:
        if not case.batch:
            notes.append(f"{case.tokens:,} tokens are {prefill_flops(spec, case.tokens) / 1e9:,.1f} GFLOP")
    return notes
