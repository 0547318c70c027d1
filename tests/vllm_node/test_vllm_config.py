"""The settings of a cluster beside vLLM: what is wrong is told before anything starts, and `up` starts vLLM as they say."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import load
from mooncake_zmq.config.summary import summary
from mooncake_zmq.config.warnings import warnings
from mooncake_zmq.operate.up import Up
from mooncake_zmq.runtime.mistakes import ServerError
from mooncake_zmq.runtime.vllm_server import CPUS, check_python, cpu_shares, server_command
from mooncake_zmq.vllm_node.settings import VllmSettings

CONFIG = Path(__file__).parents[2] / "configs/vllm.toml"
APART = CONFIG.with_name("vllm-apart.toml")


def written(tmp_path: Path, old: str, new: str) -> Path:
    text = CONFIG.read_text()
    assert old in text
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace(old, new))
    return path


def test_the_example_is_sound() -> None:
    loaded = load(CONFIG, {}, {})
    assert [loaded.section(node).url for node in loaded.config.of_role("vllm")] == [
        "http://127.0.0.1:8001",
        "http://127.0.0.1:8002",
    ]
    assert "vLLM at http://127.0.0.1:8001" in "\n".join(summary(loaded))
    assert not [text for text in warnings(loaded) if "prefill" in text or "decode" in text]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('url = "http://127.0.0.1:8001"', 'url = "127.0.0.1:8001"', "url must be"),
        ("max_running = 32 ", "max_running = 0 ", "at least 1"),
        ('kv_events = "ipc:///tmp/vllm-a.events.ipc"', 'kv_events = "vllm-a.ipc"', "tcp:// or ipc://"),
        ('kv_events = "ipc:///tmp/vllm-a.events.ipc"', 'kv_events_replay = "ipc:///tmp/r.ipc"', "goes with kv_events"),
        ('kv_events = "ipc:///tmp/vllm-a.events.ipc"', 'kv_events = "tcp://127.0.0.1:7301"', "where cache-a listens"),
        ("max_running = 32 ", "max_runing = 32 ", "unknown key"),
        ("max_running = 32 ", 'part = "all"\nmax_running = 32 ', "part"),
        ("max_running = 32 ", 'part = "decode"\nmax_running = 32 ', "kv_events"),
        ('engine = "vllm"', 'engine = "vllm"\ncard = "card.json"', "leave it out"),
        ('role = "vllm"\nhost = "host-a"\nsettings', 'role = "prefill"\nhost = "host-a"\n#', "only vllm nodes compute"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = written(tmp_path, old, new)
    with pytest.raises(ConfigError, match=said) as told:
        load(path, {}, {})
    assert str(path) in str(told.value)


def test_up_starts_each_vllm_as_the_settings_say(tmp_path: Path) -> None:
    settings = {"model.path": str(tmp_path / "my-model"), "vllm.serve_arguments": ["--dtype", "float32"]}
    loaded = load(CONFIG, settings, {})
    section = loaded.section(loaded.config.node("vllm-b"))
    command = server_command("/env/bin/python", loaded.config, section)
    told = dict(zip(command[3::2], command[4::2], strict=False))
    assert command[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert (told["--host"], told["--port"], told["--served-model-name"]) == ("127.0.0.1", "8002", "my-model")
    assert (told["--block-size"], told["--max-model-len"], told["--max-num-seqs"]) == ("32", "4096", "32")
    assert json.loads(told["--kv-events-config"])["endpoint"] == "ipc:///tmp/vllm-b.events.ipc"
    assert {"--enable-scale-out", "--enable-prompt-tokens-details"} <= set(command)
    assert command[-2:] == ["--dtype", "float32"]
    assert "--kv-events-config" not in server_command("python", loaded.config, VllmSettings())


def test_up_counts_servers_among_its_children_only_if_they_are_its_own(tmp_path: Path) -> None:
    loaded = load(CONFIG, {"cluster.runtime_dir": str(tmp_path)}, {})
    assert Up(loaded, str(CONFIG), None, ())._servers(tmp_path) == []
    children = Up(loaded, str(CONFIG), None, (), vllm_python="python")._servers(tmp_path)
    assert [child.name for child in children] == ["vllm-a.server", "vllm-b.server"]
    assert all(child.server for child in children)


@pytest.mark.parametrize(
    ("config", "name", "stores"),
    [
        (APART, "decode-b", "tcp://127.0.0.1:7302,tcp://127.0.0.1:7301"),
        (APART, "prefill-a", "tcp://127.0.0.1:7301,tcp://127.0.0.1:7302"),
        (CONFIG, "vllm-b", "tcp://127.0.0.1:7301"),
    ],
)
def test_a_server_has_the_connector_over_all_stores_its_own_first(config: Path, name: str, stores: str) -> None:
    loaded = load(config, {}, {})
    node = loaded.config.node(name)
    command = server_command("python", loaded.config, loaded.section(node), node.host)
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"stores": stores}
    assert transfer["kv_role"] == "kv_both"


def test_a_server_saves_as_many_copies_as_there_are_stores_for(tmp_path: Path) -> None:
    for config, copies in ((APART, {"copies": 2}), (CONFIG, {})):
        loaded = load(config, {"vllm.copies": "2"}, {})
        command = server_command("python", loaded.config, loaded.section(loaded.config.of_role("vllm")[0]), "host-a")
        extra = json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        assert {name: value for name, value in extra.items() if name != "stores"} == copies
    with pytest.raises(ConfigError, match="copies"):
        load(written(tmp_path, "max_running = 32", "copies = 0"), {}, {})


def test_servers_on_one_machine_share_its_memory_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    option = "--gpu-memory-utilization"
    for config in (CONFIG, APART):
        loaded = load(config, {}, {})
        nodes = loaded.config.of_role("vllm")
        commands = [server_command("python", loaded.config, loaded.section(node), node.host) for node in nodes]
        shares = [float(command[command.index(option) + 1]) for command in commands]
        assert len(shares) > 1
        assert sum(shares) <= 0.91
    alone = replace(loaded.config, nodes=tuple(node for node in loaded.config.nodes if node is nodes[0] or node.role != "vllm"))
    assert option not in server_command("python", alone, VllmSettings())
    own = load(CONFIG, {"vllm.serve_arguments": [option, "0.3"]}, {})
    command = server_command("python", own.config, own.section(own.config.node("vllm-b")))
    assert command[-2:] == [option, "0.3"], "the last one counts"


def test_a_server_without_stores_has_no_connector(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, "store_endpoint", "# store_endpoint"), {}, {})
    assert "--kv-transfer-config" not in server_command("python", loaded.config, VllmSettings())


def test_the_summary_names_the_part_of_a_vllm() -> None:
    assert "decode alone" in "\n".join(summary(load(APART, {}, {})))


def test_a_python_that_cannot_start_servers_is_refused_in_one_line(tmp_path: Path) -> None:
    config = load(CONFIG, {}, {}).config
    with pytest.raises(ServerError, match="does not run"):
        check_python(str(tmp_path / "python"), config)
    python = tmp_path / "python"
    for printed, said in (("", None), ("vllm mooncake_zmq", "has no vllm and no mooncake_zmq")):
        python.write_text(f"#!/bin/sh\necho {printed}\n")
        python.chmod(0o700)
        with pytest.raises(ServerError, match=said) if said else nullcontext():
            check_python(str(python), config)


def test_a_python_has_not_what_lies_in_the_directory_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").touch()
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServerError, match="has no vllm"):
        check_python(str(bare), load(CONFIG, {}, {}).config)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('part = "decode", ', "", 'of part "prefill" get whole requests'),
        ('part = "prefill", ', "", 'of part "decode" get whole requests'),
        ("store_endpoint", "# store_endpoint", "computes again"),
    ],
)
def test_a_part_that_is_missing_is_warned_of(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(APART.read_text().replace(old, new))
    assert [text for text in warnings(load(path, {}, {})) if said in text]
    assert not [text for text in warnings(load(APART, {}, {})) if said in text]


@pytest.mark.parametrize(
    ("cpus", "arguments", "shares"),
    [
        ({0, 1}, [(), ()], ["0", "1"]),
        ({2, 3, 5, 7, 11}, [(), ()], ["2,3", "5,7,11"]),
        ({0, 1}, [()], None),
        ({0, 1}, [(), (), ()], None),
        (set(range(8)), [("--tensor-parallel-size", "2"), ()], None),
        (set(range(8)), [("-tp=2",), ()], None),
    ],
)
def test_servers_of_one_machine_have_cpus_of_their_own_if_there_are_enough(monkeypatch, cpus, arguments, shares):
    monkeypatch.delenv(CPUS, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cpus)
    found = cpu_shares([VllmSettings(serve_arguments=each) for each in arguments])
    assert found == ([{CPUS: each} for each in shares] if shares else [{} for _ in arguments])


def test_cpus_that_the_user_chose_for_vllm_stay(monkeypatch):
    monkeypatch.setenv(CPUS, "nobind")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert cpu_shares([VllmSettings(), VllmSettings()]) == [{}, {}]
