"""One side of `bench engine`: a process that holds one engine and times it when asked. Ours and the others run this very file.

Run by path, in the Python of the engine's own environment, so it imports nothing but the standard library before it knows
which engine. Its argument is a JSON object: `engine` (one of SIDES), `model` (a path), `threads`, `clock` (one of CLOCKS) and
what else the side takes.
It answers one line when ready, then one for each request `{"do": method, **arguments}`; all lines are JSON, on standard input
and output. All other output of an engine goes to standard error. The end of the input ends the process.
"""

import ctypes
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

FIRST_ID = 100
"""Ids below are special in many vocabularies, and stand for no text."""
WARM_UP_STEPS = 2
GEMM_SIZE = 2048
GEMM_TRIES = 5
GEMV_TRIES = 3
GEMV_COLUMNS = (1024, 2048, 4096, 8192)
OPENBLAS_CORE_NAMES = [f"{first}openblas_get_corename{last}" for first in ("scipy_", "") for last in ("64_", "")]
"""NumPy's own build of OpenBLAS and a distribution's name the same function differently."""
VLLM_BLOCK_TOKENS = 32
VLLM_SPARE_TOKENS = 128
"""Output beyond the counted steps: while the last prompts of a batch are prefilled in chunks, the first already decode."""


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Side(Protocol):
    """One engine. Prompts are token ids; decoding is greedy and never ends early."""

    version: str

    def prefill_s(self, prompt: list[int]) -> float:
        """Return the time until the first token."""

    def decode_step_s(self, prompts: list[list[int]], steps: int) -> float:
        """Return the mean time of a step of all the prompts together, sampling included; prefill and the first steps do not
        count."""

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the first `count` tokens."""


class Mooncake:
    """Our engine, called through its protocol."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._clock = CLOCKS[order["clock"]]
        sys.path.insert(0, str(Path(__file__).parents[3]))
        numpy = importlib.import_module("numpy")
        backend = importlib.import_module("mooncake_zmq.engine.cpu").chosen(order["backend"])
        self.version = f"{importlib.import_module('mooncake_zmq').__version__} on numpy {numpy.__version__}, backend {backend}"
        self._timing = importlib.import_module("mooncake_zmq.bench.engine_timing")
        self._engine = importlib.import_module("mooncake_zmq.engine.weights").load_engine(
            order["model"], threads=order["threads"], backend=order["backend"]
        )
        self._array: Callable[[list[int]], Any] = lambda tokens: numpy.array(tokens, numpy.int32)

    def prefill_s(self, prompt: list[int]) -> float:
        sequence = self._engine.new_sequence(len(prompt))
        sequence.expect(len(prompt))
        tokens = self._array(prompt)
        began = self._clock()
        self._timing.prefill(self._engine, sequence, tokens)
        took_s = self._clock() - began
        sequence.close()
        return took_s

    def decode_step_s(self, prompts: list[list[int]], steps: int) -> float:
        took_s: float = self._timing.decode_step_s(
            self._engine, list(map(self._array, prompts)), steps=steps, clock=self._clock
        )
        return took_s

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens: list[int] = self._timing.greedy(self._engine, self._array(prompt), count)
        return tokens


class Vllm:
    """vLLM's engine in this process, driven step by step: no server, no tokenizer, no text."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._clock = CLOCKS[order["clock"]]
        cores = sorted(os.sched_getaffinity(0))[: order["threads"]]
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        vllm = importlib.import_module("vllm")
        self.version = f"{vllm.__version__}, {order['dtype']}, {'eager' if order['eager'] else 'compiled'}"
        self._sampling_params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=order["model"],
            dtype=order["dtype"],
            block_size=VLLM_BLOCK_TOKENS,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            max_model_len=order["max_context"] + order["steps"] + VLLM_SPARE_TOKENS,
            max_num_seqs=order["max_batch"],
            enforce_eager=order["eager"],
        ).llm_engine
        self._requests = 0
        self._running: list[str] = []

    def prefill_s(self, prompt: list[int]) -> float:
        self._add([prompt], 1)
        began = self._clock()
        while not self._step():
            pass
        took_s = self._clock() - began
        self._finish()
        return took_s

    def decode_step_s(self, prompts: list[list[int]], steps: int) -> float:
        self._add(prompts, steps + VLLM_SPARE_TOKENS)
        made: dict[str, int] = {}
        while len(made) < len(prompts):
            made |= self._step()
        for _ in range(WARM_UP_STEPS):
            made = self._step()
        began = self._clock()
        for _ in range(steps):
            last = self._step()
        took_s = self._clock() - began
        each = {last.get(name, 0) - tokens for name, tokens in made.items()}
        assert each == {steps}, f"vLLM made {each} tokens for each prompt in {steps} steps"
        self._finish()
        return took_s / steps

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        self._add([prompt], count)
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
        return tokens

    def _add(self, prompts: list[list[int]], max_tokens: int) -> None:
        wanted = self._sampling_params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._running = [f"{self._requests + number}" for number in range(len(prompts))]
        self._requests += len(prompts)
        for name, prompt in zip(self._running, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, wanted)

    def _step(self) -> dict[str, int]:
        """Return request -> tokens so far, of the requests that got one in this step."""
        return {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}

    def _finish(self) -> None:
        self._engine.abort_request(self._running)
        while self._engine.has_unfinished_requests():
            self._engine.step()


class Machine:
    """No engine: the speed at which NumPy multiplies, and reads memory by multiplying."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._clock = CLOCKS[order["clock"]]
        self._numpy: Any = importlib.import_module("numpy")
        self.version = f"numpy {self._numpy.__version__} on {_blas(self._numpy)}"
        rng = self._numpy.random.default_rng(0)
        self._left, self._right = (rng.standard_normal((GEMM_SIZE, GEMM_SIZE), dtype="float32") for _ in range(2))
        self._out = self._numpy.empty_like(self._left)
        self._weights = rng.standard_normal(order["weight_bytes"] // 4, dtype="float32")
        self._shapes = [(columns, transposed) for columns in GEMV_COLUMNS for transposed in (False, True)]

    def gemm_flops(self) -> float:
        """Return FLOP/s of the best product of two matrices of GEMM_SIZE^2."""
        took_s = []
        for _ in range(GEMM_TRIES):
            began = self._clock()
            self._numpy.matmul(self._left, self._right, out=self._out)
            took_s.append(self._clock() - began)
        return float(2 * GEMM_SIZE**3 / min(took_s))

    def gemv_s(self) -> float:
        """Return the shortest time of a product of vectors with matrices that have `weight_bytes` together. Four matrices, A x
        or x A, of the columns that the first call found to be the fastest."""
        if len(self._shapes) > 1:
            self._shapes = [min(self._shapes, key=lambda shape: min(self._pass_s(*shape) for _ in range(2)))]
        return min(self._pass_s(*self._shapes[0]) for _ in range(GEMV_TRIES))

    def gemv_shape(self) -> str:
        ((columns, transposed),) = self._shapes
        rows = len(self._weights) // 4 // columns
        return f"4 matrices of {rows} x {columns}, " + ("vector times matrix" if transposed else "matrix times vector")

    def _pass_s(self, columns: int, transposed: bool) -> float:
        rows = len(self._weights) // 4 // columns
        pieces = self._weights[: 4 * rows * columns].reshape(4, rows, columns)
        vector = self._numpy.ones(rows if transposed else columns, "float32")
        outs = self._numpy.empty((4, columns if transposed else rows), "float32")
        began = self._clock()
        for piece, out in zip(pieces, outs, strict=True):
            self._numpy.matmul(vector, piece, out=out) if transposed else self._numpy.matmul(piece, vector, out=out)
        took_s = self._clock() - began
        return float(took_s * len(self._weights) / pieces.size)  # rows are whole; at most a row of each is left out


def _blas(numpy: Any) -> str:
    """Return the library behind NumPy's products, and the kernel that OpenBLAS has chosen for this CPU."""
    built = numpy.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    shown = f"{built.get('name', 'an unknown BLAS')} {built.get('version', '')}".strip()
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in OPENBLAS_CORE_NAMES:
            if asked := getattr(library, name, None):
                asked.restype = ctypes.c_char_p
                return f"{shown}, its kernel for {asked().decode()}"
    return shown


SIDES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mooncake_zmq": Mooncake,
    "vLLM": Vllm,
    "vLLM bfloat16": Vllm,
    "machine": Machine,
}


def _answer(side: Any, request: dict[str, Any]) -> dict[str, Any]:
    match request:
        case {"do": "prefill", "tokens": tokens, "vocab_size": vocab_size, "seed": seed}:
            return {"s": side.prefill_s(_prompts(1, tokens, vocab_size, seed)[0])}
        case {"do": "decode", "batch": batch, "tokens": context, "steps": steps, "vocab_size": vocab_size, "seed": seed}:
            return {"s": side.decode_step_s(_prompts(batch, context, vocab_size, seed), steps)}
        case {"do": "greedy", "prompt": prompt, "count": count}:
            return {"tokens": side.greedy(prompt, count)}
        case {"do": "machine"}:
            return {"gemm_flops": side.gemm_flops(), "gemv_s": side.gemv_s(), "gemv_shape": side.gemv_shape()}
    raise ValueError(f"there is no request {request}")


def _prompts(batch: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return the same prompts in every process; no two begin alike."""
    source = random.Random(seed)
    return [[source.randrange(min(FIRST_ID, vocab_size // 2), vocab_size) for _ in range(tokens)] for _ in range(batch)]


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # engines print on standard output
    side = SIDES[order["engine"]](order)
    answers.write(json.dumps({"version": side.version}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(side, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would hide others of their names
    main(sys.argv[1:])
