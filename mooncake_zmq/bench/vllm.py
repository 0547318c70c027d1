"""`bench vllm`: the time that the pool under vLLM saves, and the cost of saving, against vLLM's own prefix cache and another
connector.

Three engines hold the same model in processes of their own: vLLM alone, with our connector, and with vLLM's own for Mooncake
over our pool by its shim. Each computes only when asked, on one thread, and only one of them ever computes; rounds are
interleaved. Figures are CPU seconds of an engine with all its threads and processes, the store's included in none; on a GPU,
seconds to the first token, in bfloat16, where tokens may differ by how a prompt was cut. What saving takes is metered within
the engine, in all the CPU time of our connector: the difference of two colds varies by more than that.
"""

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

from mooncake_zmq.bench.memory import await_idle, cpu_s
from mooncake_zmq.bench.others.hugging_face import hugging_face_directory
from mooncake_zmq.bench.others.peers import Peer, driver_process
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.store.shim import install

DRIVER = Path(__file__).parent / "others/vllm_driver.py"
PLAIN, OURS, THEIRS = "vLLM", "mooncake_zmq", "MooncakeStoreConnector"
LENGTHS = (2048, 3840)
BEYOND_BLOCKS = 9
"""Tokens of a prompt beyond complete blocks, which are computed even with vLLM's own cache."""
STREAMED = 160
"""Tokens of an answer when its engine is killed: more than a block."""
KILLED_SEED = 1 << 20
OBJECT_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
ANSWER_TIMEOUT_S = 1200.0
QUIET_S, QUIET_CPU_S, QUIET_TIMEOUT_S = 0.2, 0.03, 60.0
"""Idle: an engine that uses less CPU time in this long."""

Start = Callable[[str], Peer]
Took = dict[tuple[str, str, int], list[float]]
"""(side, what, tokens) -> of each round: "cold", "warm", "resumed", "saving" in seconds; "loaded" in tokens; "changed": 1
where the warm token was not the cold one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBench:
    """The parameters of a run."""

    python: str
    model: str = "default"
    rounds: int = 3
    lengths: tuple[int, ...] = LENGTHS
    gpu: bool = False

    @property
    def device(self) -> str:
        """The device that vLLM computes on."""
        return "cuda" if self.gpu else "cpu"


def bench_vllm(bench: VllmBench, *, progress: Progress) -> Report:
    """Run all of it. Raises click.ClickException when a side cannot be started, dies, or generates other tokens than the
    others, and ModelError."""
    with TemporaryDirectory(prefix="mczmq-bench-") as scratch, ExitStack() as stack:
        directory = hugging_face_directory(bench.model, Path(scratch))
        vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        store = _store(Path(scratch), OBJECT_BYTES[bench.device])
        stack.callback(store.close)
        start = _starter(bench, directory, store.endpoint, Path(scratch), stack, progress)
        sides = {name: start(name) for name in (PLAIN, OURS, THEIRS)}
        took: Took = {}
        for number in range(bench.rounds + 1):
            for tokens in bench.lengths:
                _round(bench, sides, number, tokens, vocab_size, took, progress)
        for number in range(bench.rounds):
            _kill_and_resume(bench, sides, start, number, vocab_size, took, progress)
        report = Report("vllm")
        report.rows += [row for tokens in bench.lengths for row in _rows(bench, took, tokens)]
        report.notes += _notes(sides, took, bench)
    return report


def _store(scratch: Path, object_bytes: int) -> StoreServer:
    return StoreServer(
        settings=ObjectSettings(object_bytes=object_bytes, slab_bytes=64 << 20),
        directory="/dev/shm",
        cluster=f"bench-{os.getpid()}",
        node="pool",
        incarnation=1,
        endpoint=f"ipc://{scratch}/store.sock",
        on_crash=lambda _: None,
    )


def _starter(bench: VllmBench, model: Path, stores: str, scratch: Path, stack: ExitStack, progress: Progress) -> Start:
    shim = scratch / "shim"
    shim.mkdir()
    install(shim)
    config = {"metadata_server": "", "master_server_address": stores, "protocol": "tcp", "local_buffer_size": 1 << 20}
    (scratch / "mooncake.json").write_text(json.dumps(config))
    package = str(Path(__file__).parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([package, str(shim), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "MOONCAKE_CONFIG_PATH": str(scratch / "mooncake.json"),
        "PYTHONHASHSEED": "0",
    }

    def start(name: str) -> Peer:
        progress(f"starting {name}")
        order: dict[str, str | int] = {"side": name, "model": str(model), "stores": stores, "device": bench.device}
        order |= {"longest": max(bench.lengths), "kv_tokens": 2 * sum(bench.lengths)}
        return stack.enter_context(
            driver_process(DRIVER, order, python=bench.python, what=name, timeout_s=ANSWER_TIMEOUT_S, environment=environment)
        )

    return start


def _round(
    bench: VllmBench, sides: Mapping[str, Peer], number: int, tokens: int, vocab_size: int, took: Took, progress: Progress
) -> None:
    """Each side computes the same new prompt, then answers it from its cache; on a GPU ours may decide that computing is
    quicker. Round 0 does not count."""
    chosen = []
    length = tokens + BEYOND_BLOCKS
    for name, side in sides.items():
        arguments = {"tokens": length, "vocab_size": vocab_size, "seed": 1000 * number + tokens}
        for what in ("cold", "warm"):
            used, answer = _first(bench, name, side, arguments)
            chosen.append(answer["token"])
            computed = length - answer["cached"]
            own = side.ask("connector")["s"]
            progress(f"round {number}: {tokens:,} {name} {what} {used:.3f} s, {own:.3f} of the connector, {computed} computed")
            if (what == "warm") == (computed > length // 2) and not (bench.gpu and name == OURS):
                raise click.ClickException(f"{name}, {what}: {computed} of {length} tokens were computed")
            if number:
                took.setdefault((name, what, tokens), []).append(used)
                if what == "cold":
                    took.setdefault((name, "saving", tokens), []).append(own)
                else:
                    took.setdefault((name, "loaded", tokens), []).append(answer["cached"])
                    took.setdefault((name, "changed", tokens), []).append(chosen[-1] != chosen[-2])
            if what == "cold" and name != PLAIN:
                side.ask("forget")
    if len(set(chosen)) > 1 and not bench.gpu:
        raise click.ClickException(f"the sides say different tokens: {sorted(set(chosen))}")


def _kill_and_resume(
    bench: VllmBench, sides: dict[str, Peer], start: Start, number: int, vocab_size: int, took: Took, progress: Progress
) -> None:
    """Ours is killed while it answers a prompt of each length. Its next incarnation, which has computed something else before,
    continues them; vLLM alone computes the same tokens cold."""
    prompts = [
        {"tokens": tokens + BEYOND_BLOCKS, "vocab_size": vocab_size, "seed": KILLED_SEED + 1000 * number + tokens}
        for tokens in bench.lengths
    ]
    answers = sides[OURS].ask("stream", prompts=prompts, count=STREAMED)["tokens"]
    os.kill(sides[OURS].pid, signal.SIGKILL)
    sides[OURS] = start(OURS)
    _first(bench, OURS, sides[OURS], prompts[0] | {"seed": -number - 1})
    for tokens, prompt, so_far in zip(bench.lengths, prompts, answers, strict=True):
        chosen = []
        for name, there in ((PLAIN, 0), (OURS, 0 if bench.gpu else tokens)):
            used, answer = _first(bench, name, sides[name], prompt | {"answer": so_far})
            progress(f"kill {number}: {tokens:,} {name} {used:.3f} s, {answer['cached']} tokens were there")
            if answer["cached"] < there:
                raise click.ClickException(f"{name}, resumed: {answer['cached']} of {there} tokens were there")
            took.setdefault((name, "resumed", tokens), []).append(used)
            chosen.append(answer["token"])
        if len(set(chosen)) > 1 and not bench.gpu:
            raise click.ClickException(f"{OURS}, resumed: token {chosen[1]}, {PLAIN} says {chosen[0]}")


def _first(bench: VllmBench, name: str, side: Peer, arguments: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return (seconds until the first token, the answer)."""
    began = cpu_s(side.pid)
    answer = side.ask("first", **{"answer": [], **arguments})
    used = answer["s"] if bench.gpu else cpu_s(side.pid) - began
    await_idle({name: side.pid}, QUIET_S, QUIET_CPU_S, QUIET_TIMEOUT_S)  # it goes on saving after the first token
    return used, answer


def _rows(bench: VllmBench, took: Took, tokens: int) -> list[Row]:
    """Return medians, each beside its reference."""
    unit = "s" if bench.gpu else "CPU s"

    def row(name: str, value: tuple[str, str], reference: tuple[str, str]) -> Row:
        values = [median(took[(*each, tokens)]) for each in (value, reference)]
        return Row(f"{name}, {tokens:,} tokens", unit, values[0], values[1])

    found = [
        row("warm from the pool / cold", (OURS, "warm"), (PLAIN, "cold")),
        row("warm from the pool / own cache", (OURS, "warm"), (PLAIN, "warm")),
        row(f"{THEIRS}, warm / cold", (THEIRS, "warm"), (PLAIN, "cold")),
        row("resumed after kill -9 in mid-stream / cold", (OURS, "resumed"), (PLAIN, "resumed")),
        row("cold while saving / cold", (OURS, "cold"), (PLAIN, "cold")),
    ]
    if not bench.gpu:  # Without saving, a cold prompt on a GPU has no CPU time.
        found.append(row("CPU that saving takes / cold", (OURS, "saving"), (PLAIN, "cold")))
    return found


def _notes(sides: Mapping[str, Peer], took: Took, bench: VllmBench) -> list[str]:
    how = f"bfloat16, {sides[PLAIN].ready['device']}" if bench.gpu else "float32, one thread"
    notes = [f"vLLM {sides[PLAIN].ready['version']}, {how}, eager; medians of {bench.rounds} interleaved rounds"]
    for tokens in bench.lengths:
        cold, own, ours, theirs = (
            median(took[(*each, tokens)]) for each in ((PLAIN, "cold"), (PLAIN, "warm"), (OURS, "warm"), (THEIRS, "warm"))
        )
        changed = sum(took[OURS, "changed", tokens])
        saving = median(took[OURS, "saving", tokens]) / cold
        last = (
            f"after a load another first token than cold in {changed:.0f} of {bench.rounds} rounds"
            if bench.gpu
            else f"saving {100 * saving:.1f} % of cold"
        )
        loaded = median(took[OURS, "loaded", tokens])
        notes.append(
            f"{tokens:,} tokens: ours {ours / cold:.3f} of cold and {ours / own:.2f} of its own cache ({own / cold:.3f}), "
            f"{THEIRS} {theirs / cold:.3f}; ours loaded {loaded:,.0f} of {tokens + BEYOND_BLOCKS:,} tokens; {last}"
        )
    return notes
