"""The benchmark of the pool under vLLM: its turns and its arithmetic, without vLLM."""

import os
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import memory
from mooncake_zmq.bench import vllm as bench_module
from mooncake_zmq.bench.command import bench as bench_command
from mooncake_zmq.bench.others import vllm_driver
from mooncake_zmq.bench.vllm import OURS, PLAIN, THEIRS, VllmBench, bench_vllm
from mooncake_zmq.vllm import worker
from mooncake_zmq.vllm.ledger import Part, Save
from mooncake_zmq.vllm.mover import Mover

COLD_S, SAVING_S = 10.0, {PLAIN: 0.0, OURS: 0.2, THEIRS: 0.4}
WARM_S = {PLAIN: 0.4, OURS: 0.5, THEIRS: 0.8}


class Side:
    """An engine whose CPU time passes as it is asked."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self.pid = name
        self.ready = {"version": "0", "device": "a GPU"}
        self.used_s = self.after_s = 0.0
        self.known: set[int] = set()
        self.token = self.resumed_token = 7
        self.warm_token: int | None = None
        self.remembers = True
        self._calls = calls

    def ask(self, method, **arguments):
        self._calls.append((self.pid, method))
        if method == "forget":
            return {}
        if method == "connector":
            return {"s": self.after_s}
        if method == "stream":
            self.known |= {prompt["seed"] for prompt in arguments["prompts"]}
            return {"tokens": [[7] * arguments["count"] for _ in arguments["prompts"]]}
        if arguments["answer"]:
            self.token = self.resumed_token
        warm = arguments["seed"] in self.known
        self.known.add(arguments["seed"])
        self.used_s += WARM_S[self.pid] if warm else COLD_S + len(arguments["answer"]) / 80
        self.after_s = 0.0 if warm else SAVING_S[self.pid]
        return {
            "s": 1.0,
            "token": self.warm_token if warm and self.warm_token else self.token,
            "cached": arguments["tokens"] - 9 if warm and self.remembers else 0,
        }


@pytest.fixture
def world(monkeypatch):
    """(sides by name, calls in order)."""
    sides: dict[str, Side] = {}
    calls: list[tuple[str, str]] = []

    @contextmanager
    def start(driver, order, **_):
        sides[order["side"]] = sides.get(order["side"]) or Side(order["side"], calls)
        yield sides[order["side"]]

    monkeypatch.setattr(bench_module, "driver_process", start)
    for module in (bench_module, memory):
        monkeypatch.setattr(module, "cpu_s", lambda name: sides[name].used_s)
    monkeypatch.setattr(
        bench_module, "os", SimpleNamespace(**vars(os) | {"kill": lambda name, _: calls.append((name, "kill"))})
    )
    monkeypatch.setattr(bench_module, "QUIET_S", 0.0)
    monkeypatch.setattr(bench_module, "OBJECT_BYTES", {"cpu": 64 << 20, "cuda": 64 << 20})
    return sides, calls, Side


def run(rounds=2, **wanted):
    bench = VllmBench(python="p", model="dummy:tiny", rounds=rounds, lengths=(2048,), **wanted)
    return bench_vllm(bench, progress=lambda _: None)


def test_each_figure_stands_beside_what_it_is_compared_with(world):
    report = run()
    assert {row.name: (round(row.value, 6), round(row.reference, 6)) for row in report.rows} == {
        "warm from the pool / cold, 2,048 tokens": (0.5, 10.0),
        "warm from the pool / own cache, 2,048 tokens": (0.5, 0.4),
        "MooncakeStoreConnector, warm / cold, 2,048 tokens": (0.8, 10.0),
        "resumed after kill -9 in mid-stream / cold, 2,048 tokens": (0.5, 12.0),
        "cold while saving / cold, 2,048 tokens": (10.0, 10.0),
        "CPU that saving takes / cold, 2,048 tokens": (0.2, 10.0),
    }
    assert "ours 0.050 of cold and 1.25 of its own cache (0.040)" in report.notes[-1]
    assert "ours loaded 2,048 of 2,057 tokens; saving 2.0 % of cold" in report.notes[-1]


def test_on_a_gpu_the_clock_counts_and_tokens_may_differ(world):
    world[0][OURS] = side = world[2](OURS, world[1])
    side.token = 8
    report = run(rounds=1, gpu=True)
    assert {(row.unit, row.value) for row in report.rows[:3]} == {("s", 1.0)}
    assert "bfloat16, a GPU" in report.notes[0]
    assert not any("CPU" in row.name for row in report.rows)
    assert "saving" not in report.notes[-1]
    assert "another first token than cold in 0 of 1 rounds" in report.notes[-1]


def test_on_a_gpu_tokens_that_change_by_a_load_are_counted(world):
    world[0][OURS] = side = world[2](OURS, world[1])
    side.warm_token = 8
    assert "another first token than cold in 2 of 2 rounds" in run(gpu=True).notes[-1]


def test_the_connectors_cpu_time_is_that_of_all_its_threads_once(monkeypatch):
    """By a clock that a block put costs a second of, on the thread that puts it."""
    spent = threading.local()
    monkeypatch.setattr(vllm_driver, "time", SimpleNamespace(thread_time=lambda: getattr(spent, "s", 0.0)))
    metered = {place: names for place, names in vllm_driver.METERED.items() if place in ("mover.Mover", "worker._Share")}
    monkeypatch.setattr(vllm_driver, "METERED", metered)
    for kind, names in ((Mover, ("_load", "_save")), (worker._Share, ("run",))):
        for name in names:
            monkeypatch.setattr(kind, name, getattr(kind, name))  # put back in the end

    class Client:
        counts: Counter[str] = Counter()

        def put(self, names, values, *, replicas, distinct_hosts):
            spent.s = getattr(spent, "s", 0.0) + len(names)
            return [0] * len(names)

        def close(self):
            """Nothing is open."""

    meter = vllm_driver.Meter()
    meter.install()
    memory = SimpleNamespace(most=8, value_bytes=1, sources=lambda blocks: [bytearray(1)] * len(blocks))
    mover = Mover(Client(), "shelf", [memory], [memory], threads=4)
    mover.save(Save(1, (Part(tuple(b"%016d" % number for number in range(16)), tuple(range(16))),)))
    while not mover.take(10.0).saved:
        pass
    mover.close()
    assert meter.take_s() == 16.0


def test_the_sides_take_turns_and_forget_what_their_own_caches_have(world):
    run(rounds=1)
    plain = [(PLAIN, "first"), (PLAIN, "connector")] * 2
    others = [(side, what) for side in (OURS, THEIRS) for what in ("first", "connector", "forget", "first", "connector")]
    killed = [(OURS, "stream"), (OURS, "kill"), (OURS, "first"), (PLAIN, "first"), (OURS, "first")]
    assert world[1] == [*plain, *others] * 2 + killed


def test_figures_of_engines_that_say_something_else_or_kept_nothing_are_no_figures(world):
    sides, calls, side = world
    sides[THEIRS] = side(THEIRS, calls)
    sides[THEIRS].token = 8
    with pytest.raises(click.ClickException, match="different tokens"):
        run()
    sides.clear()
    sides[OURS] = side(OURS, calls)
    sides[OURS].remembers = False
    with pytest.raises(click.ClickException, match="mooncake_zmq, warm: 2057 of 2057 tokens were computed"):
        run()


def test_an_answer_that_goes_on_otherwise_or_anew_is_no_figure(world, monkeypatch):
    sides, calls, side = world
    sides[OURS] = side(OURS, calls)
    sides[OURS].resumed_token = 8
    with pytest.raises(click.ClickException, match="resumed: token 8, vLLM says 7"):
        run()
    sides.clear()
    killed = bench_module.os.kill
    monkeypatch.setattr(bench_module.os, "kill", lambda name, number: (killed(name, number), sides[OURS].known.clear()))
    with pytest.raises(click.ClickException, match="resumed: 0 of 2048 tokens were there"):
        run()


def test_on_a_gpu_what_is_sooner_computed_may_be_left(world):
    world[0][OURS] = side = world[2](OURS, world[1])
    side.remembers = False
    assert "ours loaded 0 of 2,057 tokens" in run(rounds=1, gpu=True).notes[-1]


def test_the_command_says_what_it_lacks():
    result = CliRunner().invoke(bench_command, ["vllm"])
    assert result.exit_code == 2
    assert "--python" in result.output
