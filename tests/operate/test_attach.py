"""What `attach` finds out about running vLLM servers, what it says they lack, and the deployment that it writes."""

import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attachable_vllm import AttachableVllm
from click.testing import CliRunner, Result
from ports import free_port
from strange_model import write_model

from mooncake_zmq.cli import main
from mooncake_zmq.config.load import load
from mooncake_zmq.operate.attach import command, place
from mooncake_zmq.operate.attach.server import TESTED_TEXT
from mooncake_zmq.operate.up import Up
from mooncake_zmq.runtime import vllm_server
from mooncake_zmq.transfer.process_lock import ProcessLock

STORE = "tcp://127.0.0.1:7301"
Make = Callable[..., AttachableVllm]
Run = Callable[..., Result]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "strange")


@pytest.fixture
def make(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Stand-ins, whose events are looked for at sockets of this test's own."""
    made: list[AttachableVllm] = []

    def endpoints(url: str) -> tuple[str, ...]:
        return (f"ipc://{tmp_path}/other.ipc", f"ipc://{tmp_path}/{[each.url for each in made].index(url)}.ipc")

    def start(*, events: bool = True, **more: Any) -> AttachableVllm:
        where = f"ipc://{tmp_path}/{len(made)}.ipc" if events else ""
        made.append(AttachableVllm(**{"root": str(model), "events": where} | more))
        return made[-1]

    monkeypatch.setattr(place, "events_endpoints", endpoints)
    yield start
    for stub in made:
        stub.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def invoke(*words: Any) -> Result:
        return CliRunner().invoke(main, ["attach", "--wait", "0", *(getattr(word, "url", word) for word in words)])

    return invoke


def found(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)


def test_what_servers_say_is_found_and_nothing_is_lacking(make: Make, run: Run, model: Path) -> None:
    first, second = make(names=("alias", "m"), capacity="7000", max_model_len=2048), make(max_model_len=2048)
    result = run(first, second, "--json")
    assert result.exit_code == 0, result.output
    one, two = found(result)["servers"]
    assert one["lacks"] == two["lacks"] == []
    assert one["add"] == result.stderr == ""
    assert (one["url"], one["version"], one["names"], one["root"]) == (first.url, "0.32.0", ["alias", "m"], str(model))
    assert (one["max_model_len"], one["block_tokens"], one["capacity_tokens"]) == (2048, 32, 7000)
    assert two["capacity_tokens"] == 3200, "blocks of vLLM that counts no tokens"
    assert one["kv_events"].endswith("/0.ipc")
    assert two["kv_events"].endswith("/1.ipc")
    assert one["stores"] == [STORE]
    of_both = {"name": "m", "servers": [first.url, second.url], "directory": str(model.resolve()), "problem": ""}
    assert found(result)["models"] == [of_both]


FLAGS = [
    ({"scale_out": False}, ["--enable-scale-out"], 2),
    ({"details": False}, ["--enable-prompt-tokens-details"], 1),
    ({"caching": False}, ["--enable-prefix-caching"], 1),
    ({"stores": None}, ["--kv-transfer-config"], 1),
    ({"events": False}, ["--kv-events-config"], 1),
    ({"max_model_len": 8192}, ["--max-model-len", "4096"], 1),
    ({"block_tokens": 16}, ["--block-size", "32"], 2),
]


@pytest.mark.parametrize(("missing", "added", "code"), FLAGS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_each_missing_flag_has_a_line_with_the_text_to_paste(
    make: Make, run: Run, missing: dict[str, Any], added: list[str], code: int
) -> None:
    whole, lacking = make(), make(**missing)
    result = run(whole, lacking, "--json")
    assert result.exit_code == code, result.output
    good, bad = found(result)["servers"]
    assert good["lacks"] == []
    (lack,) = bad["lacks"]
    assert lack["needed"] == (code == 2)
    words = shlex.split(bad["add"])
    assert words[: len(added)] == added
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"{lacking.url} lacks {added[0]}")
    assert said.endswith(f"Add to its command line: {bad['add']}")
    if len(words) > 1 and words[1].startswith("{"):
        value = json.loads(words[1])
        if added == ["--kv-transfer-config"]:
            assert value["kv_connector_extra_config"] == {"stores": "127.0.0.1:7301"}
        else:
            assert value["endpoint"] == place.events_endpoint(lacking.url)


def test_all_missing_flags_are_in_one_line_and_nothing_starts_without_a_required_one(make: Make, run: Run) -> None:
    bare = make(scale_out=False, stores=None, events=False)
    result = run(bare)
    assert result.exit_code == 2
    said, last = result.stderr.splitlines()
    assert "--enable-scale-out (required)" in said
    assert "--kv-transfer-config:" in said
    assert last == "mooncake-zmq: a required flag is missing: start that server with it, and attach again"
    assert result.stdout == ""


def test_the_flags_of_a_server_are_words_for_a_command_line(run: Run) -> None:
    result = run("--flags", "http://127.0.0.1:8001/v1/")
    words = result.output.split()
    assert words[:2] == ["--enable-scale-out", "--enable-prompt-tokens-details"]
    options = dict(zip(words[2::2], map(json.loads, words[3::2]), strict=True))
    assert options["--kv-events-config"]["endpoint"] == "ipc:///tmp/vllm-8001.events.ipc"
    assert options["--kv-transfer-config"]["kv_connector_extra_config"]["stores"] == "127.0.0.1:7301"
    echoed = subprocess.run(["sh", "-c", f"printf '%s\\n' $(cat <<'X'\n{result.output}X\n)"], capture_output=True, text=True)
    assert echoed.stdout.split("\n")[:-1] == words, "a shell splits them at spaces only"


def test_a_dry_run_prints_a_deployment_that_loads(make: Make, run: Run, tmp_path: Path, model: Path) -> None:
    first, second = make(max_model_len=1 << 20), make(max_model_len=1 << 20, events=False, stores="ipc:///run/x.ipc")
    result = run(first, second, "--dry-run")
    assert result.exit_code == 1
    assert "--kv-events-config" in result.stderr
    file = tmp_path / "x.toml"
    file.write_text(result.stdout)
    loaded = load(file, {}, {})
    config = loaded.config
    assert (config.model.name, config.model.path, config.model.engine) == ("m", str(model.resolve()), "vllm")
    assert (config.model.block_tokens, config.model.max_model_len) == (32, 1_048_576)
    assert config.model.adapters == ("tuned",)
    nodes = [(node.name, node.role) for node in config.nodes]
    roles = [("conductor-0", "conductor"), ("cache-0", "cache-node"), ("vllm-0", "vllm"), ("vllm-1", "vllm")]
    assert nodes == [*roles, ("gateway-0", "gateway")]
    assert config.node("cache-0").store_endpoint == STORE
    one, two = (loaded.section(node) for node in config.of_role("vllm"))
    assert (one.url, one.capacity_tokens, one.max_running) == (first.url, 3200, 128)
    assert (two.url, two.kv_events) == (second.url, "")
    assert one.kv_events.endswith("0.ipc")
    assert not list(tmp_path.glob("data/**/*.toml"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"/v1/models": (401, b"")}, "wants an API key"),
        ({"/v1/models": (404, b"no")}, "is no vLLM server"),
        ({"/v1/models": (200, b'{"data": []}')}, "is no vLLM server"),
        ({"/v1/models": (200, b"[[")}, "is no vLLM server"),
        ({"/metrics": (404, b"")}, "start it without --disable-log-stats"),
        ({"/metrics": (200, b"a{\n")}, "cannot be read"),
        ({"/metrics": (200, b'vllm:cache_config_info{block_size="None"} 1.0\n')}, "has no block_size, but 'None'"),
        ({"/metrics": (200, b'vllm:cache_config_info{block_size="32"} 1.0\n')}, "has no num_gpu_blocks, but ''"),
    ],
)
def test_a_server_that_does_not_say_what_is_needed_is_refused_in_one_line(
    make: Make, run: Run, change: dict[str, tuple[int, bytes]], words: str
) -> None:
    stub = make()
    stub.pages |= change
    result = run(stub, "--dry-run")
    assert result.exit_code == 2
    (said,) = result.stderr.splitlines()
    assert words in said
    assert stub.url in said


def test_an_answer_without_end_is_cut(make: Make, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "MAX_ANSWER_BYTES", 1 << 20)
    stub = make()
    stub.pages["/metrics"] = (200, b"#\n" * (1 << 20))
    assert "answers more than 1 MiB" in run(stub, "--dry-run").stderr


def test_servers_of_two_models_are_attached_with_a_conductor_for_each(
    make: Make, run: Run, tmp_path: Path, model: Path
) -> None:
    other = write_model(tmp_path / "models" / "Other-7B")
    servers = (
        make(names=("org/Big",)),
        make(names=("Other-7B",), root=str(other), adapters=(), max_model_len=2048, block_tokens=16),
    )
    third = make(names=("Other-7B", "org/Big-2"), root=str(other), adapters=(), max_model_len=2048, block_tokens=16)
    result = run(*servers, third, "--dry-run")
    assert result.exit_code == 0, result.output
    file = tmp_path / "x.toml"
    file.write_text(result.stdout)
    loaded = load(file, {}, {})
    big, small = loaded.models["org-big"], loaded.models["other-7b"]
    assert (big.config.model.name, big.config.model.path) == ("org/Big", str(model.resolve()))
    assert (small.config.model.name, small.config.model.path) == ("Other-7B", str(other.resolve()))
    assert [(each.config.model.block_tokens, each.config.model.max_model_len) for each in (big, small)] == [
        (32, 4096),
        (16, 2048),
    ]
    nodes = ["conductor-0", "cache-0", "vllm-0", "gateway-0"], ["conductor-1", "cache-0", "vllm-1", "vllm-2", "gateway-0"]
    assert tuple([node.name for node in each.config.nodes] for each in (big, small)) == nodes
    assert [small.section(node).url for node in small.config.of_role("vllm")] == [servers[1].url, third.url]

    models = found(run(*servers, third, "--json"))["models"]
    assert [(each["name"], each["servers"]) for each in models] == [
        ("org/Big", [servers[0].url]),
        ("Other-7B", [servers[1].url, third.url]),
    ]


def test_the_directory_of_one_of_several_models_is_given_with_its_name(make: Make, run: Run, model: Path) -> None:
    servers = make(root="/a"), make(names=("n",), root="/b", adapters=())
    for words, said in (
        ((), "the model /a is neither"),
        (("--model", str(model)), "so give each NAME=DIR once: m, n"),
        (("--model", f"m={model}", "--model", f"m={model}"), "so give each NAME=DIR once: m, n"),
        (("--model", f"m={model}"), "the model /b is neither"),
    ):
        result = run(*servers, "--dry-run", *words)
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
        assert len(result.stderr.splitlines()) == 1
    both = ("--model", f"m={model}", "--model", f"n={model}")
    assert run(*servers, "--dry-run", *both).stdout.count(f'path = "{model.resolve()}"') == 2
    assert found(run(*servers, "--json", "--model", str(model)))["problem"]


def test_a_server_with_a_name_of_each_of_two_models_is_refused(make: Make, run: Run) -> None:
    result = run(make(names=("a",)), make(names=("b",)), make(names=("a", "b")), "--dry-run")
    assert result.exit_code == 2
    assert "give each model names of its own by --served-model-name" in result.stderr


def test_a_server_that_is_not_there_is_named(make: Make, run: Run) -> None:
    gone = make()
    gone.close()
    result = run(make(), gone)
    assert result.exit_code == 2
    (only,) = result.stderr.splitlines()
    assert re.match(rf"mooncake-zmq: {gone.url} does not serve after \d+ s: ", only)
    assert "Connection refused" in only


def test_a_server_that_is_starting_is_waited_for(make: Make, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = make()
    stub.well = 503
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        stub.well = 200

    monkeypatch.setattr(command.time, "sleep", sleep)
    result = run(stub, "--json", "--wait", "60")
    assert result.exit_code == 0
    (only,) = result.stderr.splitlines()
    assert only.startswith(f"waiting for {stub.url}, for ")
    assert only.endswith("s more at most; Ctrl-C or --wait gives up earlier: its /health answers 503")
    assert slept == [command.POLL_S]


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        (["localhost:8000"], "url must be http://HOST:PORT"),
        (["http://a:1", "http://a:1/"], "http://a:1 is given twice"),
        ([f"http://a:{port}" for port in range(1, 66)], "65 servers are too many: at most 64"),
    ],
)
def test_urls_that_are_none_are_refused(run: Run, urls: list[str], words: str) -> None:
    result = run(*urls)
    assert result.exit_code == 2
    assert words in result.stderr


# --- the model's files


def test_a_model_that_is_not_here_is_asked_for_by_its_option(make: Make, run: Run, model: Path) -> None:
    stub = make(root="/elsewhere/model")
    result = run(stub, "--dry-run")
    assert result.exit_code == 2
    (said,) = result.stderr.splitlines()
    assert "the model /elsewhere/model is neither a directory of this machine nor a name in its Hugging Face cache" in said
    assert "--model DIR" in said
    assert f'path = "{model.resolve()}"' in run(stub, "--dry-run", "--model", str(model)).stdout


def test_a_name_at_hugging_face_is_found_in_its_cache(make: Make, run: Run, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = write_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = "import os, sys; os.environ['HF_HUB_CACHE'] = sys.argv[1]; from mooncake_zmq.cli import main; main(sys.argv[2:])"
    stub = make(root="org/tiny", names=("org/tiny",), events=False)
    words = [sys.executable, "-c", code, str(tmp_path / "hub"), "attach", "--dry-run", "--wait", "0", stub.url]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    written = tomllib.loads(done.stdout)["model"]
    assert (written["name"], written["path"]) == ("org/tiny", str(snapshot.resolve())), done.stderr


def test_another_models_tokenizer_is_refused(make: Make, run: Run, model: Path) -> None:
    right = make(tokens=own_tokens(model))
    assert run(right, "--dry-run").exit_code == 0
    wrong = make(tokens=[1, 2, 3])
    result = run(right, wrong, "--dry-run")
    assert result.exit_code == 2
    assert f"is not that of {wrong.url}: give its directory by --model DIR" in result.stderr


def own_tokens(model: Path) -> list[int]:
    from mooncake_zmq.engine.sources.directory import ModelDirectory

    vocabulary = ModelDirectory(model).read_tokenizer(()).vocabulary
    return vocabulary.encode(TESTED_TEXT, add_special_tokens=False).ids


# --- the file, and places


def test_a_file_of_another_origin_is_left_alone(make: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Path] = []
    monkeypatch.setattr(Up, "run", lambda self: ran.append(Path(self._arguments[1])) or 0)
    stub = make()
    assert run(stub).exit_code == 0
    assert ran == [tmp_path / "data/mooncake_zmq/attach.toml"]
    assert run(stub).exit_code == 0, "its own is written anew"
    mine = tmp_path / "mine.toml"
    mine.write_text("[model]\n")
    result = run(stub, "--to", str(mine))
    assert result.exit_code == 2
    assert "attach did not write it" in result.stderr
    assert mine.read_text() == "[model]\n"


def test_a_store_elsewhere_is_not_started_here(make: Make, run: Run) -> None:
    result = run(make(stores="tcp://198.51.100.7:7301"), "--dry-run")
    assert "no store is started here: the servers' connectors use tcp://198.51.100.7:7301" in result.stderr
    assert "cache-node" not in result.stdout


def test_places_of_servers_elsewhere() -> None:
    urls = ["http://127.0.0.1:8001", "http://198.51.100.7:8000", "http://198.51.100.7:8001"]
    assert [place.is_here(url) for url in urls] == [True, False, False]
    assert [place.events_endpoint(url) for url in urls[1:]] == ["tcp://198.51.100.7:5557", "tcp://198.51.100.7:5558"]
    assert place.published_at("tcp://198.51.100.7:5558") == "tcp://*:5558"
    assert place.own_store(["tcp://198.51.100.7:7300", "tcp://localhost:7301"]) == STORE


def test_the_gateway_has_a_port_that_no_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        servers, free = free_port(), free_port()
        monkeypatch.setattr(place, "GATEWAY_PORTS", (taken.getsockname()[1], servers, free))
        assert place.gateway_port([f"http://127.0.0.1:{servers}"]) == free


def test_the_file_of_one_that_runs_is_left_alone(make: Make, run: Run, tmp_path: Path) -> None:
    server, path = make(), tmp_path / "attach.toml"
    path.write_text("# Written by `mooncake-zmq attach`: for other servers")
    with tempfile.TemporaryDirectory(prefix="mz-") as directory:  # a short path, as sockets need
        lock = ProcessLock.acquire(directory, "up")
        refused = run(server, "--to", str(path), "--set", f"cluster.runtime_dir={directory}")
        lock.release()
    assert (refused.exit_code, "already running" in refused.output) == (2, True), refused.output
    assert path.read_text().endswith("for other servers")


def test_what_the_file_would_lack_is_refused(make: Make, run: Run) -> None:
    refused = run(make(), "--dry-run", "--set", "gateway.http_port=9000")
    assert (refused.exit_code, "--set is not part of the file" in refused.output) == (2, True)
