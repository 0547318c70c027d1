"""`bench gateway` and `bench client` as commands: their clusters, what they count by, and what a user can mend."""

import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import chats
from mooncake_zmq.bench.client import Replayed
from mooncake_zmq.bench.client_report import Bounds, result_of
from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.gateway import BACKEND, MODELLED, NODES, OPEN_STREAMS, OPEN_TOKENS, PROMPT_TOKENS, TOY, _expect_open
from mooncake_zmq.bench.memory import threads_cpu_s
from mooncake_zmq.bench.relay_floor import floor_s
from mooncake_zmq.bench.report import Report
from mooncake_zmq.config.load import load


@pytest.mark.parametrize(("model", "backend"), [(TOY, ""), (MODELLED, BACKEND)])
def test_its_clusters_have_room_for_all_streams_at_every_node(tmp_path: Path, model: str, backend: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(model + NODES.format(backend=backend))
    config = load(path).config
    gateway = config.gateway
    most = (
        gateway.requests.max_open,
        gateway.connections.max_per_address,
        config.decode.max_requests,
        config.prefill.max_queued,
    )
    assert min(most) > OPEN_STREAMS
    assert config.decode.capacity_tokens > OPEN_STREAMS * (PROMPT_TOKENS + OPEN_TOKENS)
    assert {node.role for node in config.nodes} == {"conductor", "gateway", "cache-node", "prefill", "decode"}
    assert [bool(node.modelled) for node in config.of_role("prefill", "decode")] == [bool(backend)] * 2


@pytest.mark.parametrize(("open_at_once", "is_told"), [(OPEN_STREAMS // 2, True), (OPEN_STREAMS, False)])
def test_streams_that_were_not_open_at_once_make_no_row(open_at_once: int, is_told: bool) -> None:
    half = OPEN_STREAMS // 2
    late_s = 0.0 if open_at_once == OPEN_STREAMS else 2.0
    seen = [
        Seen(status=200, finished=True, ended_s=1.0, due_s=late_s if number < half else 0.0) for number in range(OPEN_STREAMS)
    ]
    result = result_of(Replayed("toy", seen, [0.0]), "url", Bounds())
    with pytest.raises(click.ClickException, match=f"no more than {open_at_once}") if is_told else nullcontext():
        _expect_open(result)


def test_calls_that_were_refused_are_no_open_streams() -> None:
    seen = [Seen(status=429, error="HTTP 429", ended_s=1.0) for _ in range(OPEN_STREAMS)]
    with pytest.raises(click.ClickException, match="no more than 0"):
        _expect_open(result_of(Replayed("toy", seen, [0.0]), "url", Bounds()))


def test_cpu_time_counts_every_thread_that_is_there() -> None:
    done, over = threading.Event(), threading.Event()

    def work() -> None:
        ends_at = time.thread_time() + 0.02
        while time.thread_time() < ends_at:
            pass
        done.set()
        over.wait(10)

    before = threads_cpu_s(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(20)
    assert threads_cpu_s(os.getpid()) - before >= 0.015
    over.set()
    thread.join()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ftp://host", "--generate", "uniform:rate=1"), "no http:// or https:// address"),
        (("http://127.0.0.1:1", "--model", "m"), "give a TRACE"),
        (("http://127.0.0.1:1", "--model", "m", "--generate", "nonsense"), "'nonsense' is none of"),
        (("http://127.0.0.1:1", "--generate", "uniform:requests=1"), "no connection"),
        (("http://h", "--generate", "uniform:rate=1", "--first-id", "9", "--last-id", "3"), "token ids from 9 to 3"),
    ],
)
def test_what_a_user_can_mend_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(bench, ["client", *arguments])
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["client", "gateway"])
def test_help_shows_how_it_is_used(command: str) -> None:
    result = CliRunner().invoke(bench, [command, "--help"])
    assert result.exit_code == 0
    assert f"mooncake-zmq bench {command}" in result.output


def test_a_further_turn_of_a_chat_is_beside_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "TOKENS", 30_000)
    report = Report("gateway")
    chats.chats(report, 1, lambda _text: None)
    (row,) = report.rows
    assert row.value > 0
    assert row.reference > 0


def test_the_floor_of_a_relayed_token_is_the_cpu_time_of_a_process_that_does_nothing_else() -> None:
    """More than no work at all, less than the whole time."""
    assert 1e-6 < floor_s(tokens=32, gap_s=0.01) < 0.01
