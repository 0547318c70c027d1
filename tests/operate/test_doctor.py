"""What the doctor says of a machine: each fault is found, told with what helps, and nothing is changed."""

import errno
import importlib.metadata
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.config.load import Loaded, load
from mooncake_zmq.core.messages import PROTOCOL_VERSION
from mooncake_zmq.operate.doctor import clock, compute, examination, here, limits, memory, packages, peers, places, storage
from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.runtime.listening import listen
from mooncake_zmq.transfer.process_lock import ProcessLock

ROOT = Path(__file__).parent.parent.parent
TOY = ROOT / "configs/toy.toml"
TWO = """
[[nodes]]
name = "here"
role = "decode"
host = "a"
endpoint = "tcp://127.0.0.1:7001"
data_endpoint = "tcp://127.0.0.1:7101"
[[nodes]]
name = "there"
role = "decode"
host = "b"
endpoint = "tcp://192.0.2.7:7001"
data_endpoint = "tcp://192.0.2.7:7101"
"""


def loaded(path: Path = TOY, **overrides: Any) -> Loaded:
    return load(path, {key.replace("__", "."): value for key, value in overrides.items()}, {})


@pytest.fixture
def toy(tmp_path: Path) -> Here:
    return here.find(loaded(cluster__runtime_dir=str(tmp_path / "run"), cluster__shm_dir=str(tmp_path)), None)


def levels(findings: Iterator[Finding] | list[Finding]) -> list[str]:
    return [each.level for each in findings]


def test_the_command_tells_people_and_programs_and_exits_by_the_worst(tmp_path: Path) -> None:
    arguments = ["doctor", "--config", str(TOY), "--set", f"cluster.runtime_dir={tmp_path / 'run'}"]
    shown = CliRunner().invoke(main, arguments)
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert found["exit_code"] == shown.exit_code
    assert {each["area"] for each in found["findings"]} >= {
        "nodes",
        "packages",
        "limits",
        "memory",
        "clock",
        "places",
        "compute",
    }
    assert all(bool(each["advice"]) != (each["level"] == "ok") for each in found["findings"])
    assert "Python 3." in shown.output
    assert list(tmp_path.iterdir()) == []
    elsewhere = CliRunner().invoke(main, ["doctor", "--config", str(TOY), "--host", "nowhere"])
    assert elsewhere.exit_code == 2


@pytest.mark.parametrize(("worst", "code"), [("ok", 0), ("warning", 1), ("problem", 2)])
def test_the_exit_code_is_the_worst_of_all(worst: Any, code: int) -> None:
    advice = "" if worst == "ok" else "help"
    assert examination.exit_code([Finding("a", "ok", "x"), Finding("a", worst, "x", advice)]) == code


def test_nodes_are_here_whose_host_has_an_address_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text(TWO)
    assert [node.name for node in here.find(loaded(file), None).nodes] == ["here"]
    assert [node.name for node in here.find(loaded(file), "b").nodes] == ["there"]
    nobody = here.examine(here.find(loaded(file), "c"))
    assert levels(nobody) == ["problem"]
    assert "there are a, b" in nobody[0].advice


def test_packages_are_those_the_project_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(packages.unmet()) == []
    declared = [
        "click>=8.1",
        "no-such-package>=1",
        "numpy[more]>=1,>=999.1",
        "pytest!=0.1",
        'no-such-extra>=2; extra == "dev"',
        'no-such-server; extra == "server"',
    ]
    declared += ['no-such-system; sys_platform == "none"', 'no-such-python; python_version >= "3"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: declared)
    numpy = importlib.metadata.version("numpy")
    assert list(packages.unmet()) == [
        "no-such-package is missing",
        f"numpy is {numpy}, not >=1,>=999.1",
        "no-such-server is missing",
        "no-such-python is missing",
    ]
    released = {"click": "8.1rc1", "uvicorn": "0.9.10"}
    monkeypatch.setattr(importlib.metadata, "version", released.__getitem__)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: ["click>=8.1", "uvicorn>=0.9.9"])
    assert list(packages.unmet()) == ["click is 8.1rc1, not >=8.1"]


def test_a_project_that_is_not_installed_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "DISTRIBUTION", "no-such-project")
    assert list(packages.unmet()) == ["no-such-project is not installed"]


def test_few_open_files_are_told_of_the_nodes_that_run(toy: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.granted(os.getpid(), "files") == limits.granted(0, "files")
    assert limits.granted(1 << 30, "files") is None
    running = replace(toy, running={"decode-a": os.getpid()})
    monkeypatch.setattr(limits, "FILES", 1 << 40)
    (found,) = limits.examine(running)
    assert (found.level, found.advice) == ("warning", limits.FILES_ADVICE)
    assert f"decode-a (pid {os.getpid()})" in found.found


def test_locked_memory_matters_where_a_gpu_reads_the_pool(toy: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu = replace(toy, nodes=tuple(replace(node, device="cuda") if node.role == "decode" else node for node in toy.nodes))
    monkeypatch.setattr(limits, "granted", lambda pid, what: 65536.0)
    assert [each.advice for each in limits.examine(with_gpu)] == ["", limits.LOCKED_ADVICE]
    assert levels(limits.examine(toy)) == ["ok"]


def test_shared_memory_that_is_too_small_is_told_with_the_size_to_set(tmp_path: Path) -> None:
    big = here.find(loaded(cache_node__pool_bytes=1 << 50, cluster__shm_dir=str(tmp_path)), None)
    room = next(iter(memory.examine(big)))
    assert room.level == "problem"
    assert "mount -o remount,size=" in room.advice
    held = replace(big, running=dict.fromkeys((node.name for node in big.nodes), 1))
    assert next(iter(memory.examine(held))).level == "ok"


def test_shared_memory_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert levels(memory.examine(here.find(loaded(cluster__shm_dir=str(tmp_path / "none")), None)))[0] == "problem"


@pytest.mark.parametrize(
    ("text", "level"),
    [("always within_size [advise] never deny force", "ok"), ("always within_size advise [never] deny force", "warning")],
)
def test_large_pages_that_are_off_are_told(tmp_path: Path, text: str, level: str) -> None:
    (tmp_path / "shmem_enabled").write_text(text)
    assert memory.large_pages(tmp_path / "shmem_enabled").level == level
    assert memory.large_pages(tmp_path / "none").level == "warning"


def test_a_model_that_is_not_there_or_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, file, cache = str(tmp_path / "none.gguf"), tmp_path / "some.gguf", str(tmp_path / "cache")
    (found,) = [each for each in storage.examine(here.find(loaded(model__path=missing), None)) if "none.gguf" in each.found]
    assert (found.level, "does not exist" in found.found) == ("problem", True)
    file.touch()
    assert levels([storage.model(path, cache) for path in ("toy", "default", "dummy:tiny", str(file))]) == ["ok"] * 4
    monkeypatch.setattr(os, "access", lambda path, _mode: path != file)
    found = storage.model(str(file), cache)
    assert (found.level, str(file) in found.found) == ("problem", True)


def test_a_disk_without_room_is_told_with_what_would_fit(tmp_path: Path) -> None:
    assert levels(storage.tier(tmp_path / "kv", "cache-a", 1 << 20))[0] == "ok"
    room = next(iter(storage.tier(tmp_path / "kv", "cache-a", 1 << 60)))
    assert room.level == "warning"
    assert "lower ssd.bytes to" in room.advice
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (found,) = storage.tier(tmp_path, "cache-a", 1)
    assert found.level == "problem"
    assert "install -d -o mooncake" in found.advice


def test_places_that_units_do_not_see_or_may_not_write_to_are_told(tmp_path: Path) -> None:
    def found(model: str, tier: str) -> list[str]:
        settings = {"model__path": model, "cache_node__ssd__directory": tier}
        return [each.found for each in storage.of_units(here.find(loaded(**settings), None), [str(tmp_path)])]

    state = "/var/lib/mooncake-zmq"
    assert found("toy", f"{state}/kv") == found("default", f"{state}/kv") == found("/srv/model", f"{state}/kv") == []
    assert found("/home/a/model", f"{state}/kv")[0].startswith("/home/a/model is not seen by units")
    assert found("toy", "/tmp/kv")[0].startswith("/tmp/kv is not seen by units")
    assert found("toy", "/data/kv") == ["/data/kv may not be written by units"]
    (tmp_path / "mooncake-cache-node@.service.d").mkdir()
    (tmp_path / "mooncake-cache-node@.service.d/a.conf").write_text("[Service]\nReadWritePaths=/data /more\n")
    assert found("toy", "/data/kv") == []


def test_a_disk_that_knows_no_direct_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "allows_direct", lambda _: False)
    assert storage.direct(tmp_path).level == "warning"


def test_a_clock_that_went_back_and_one_that_nothing_sets_are_told(toy: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "is_synchronized", lambda: False)
    directory = Path(toy.config.cluster.runtime_dir)
    directory.mkdir()
    (directory / "decode-a.lock").write_text(f"1 {1 << 47}\n")
    (directory / "decode-b.lock").write_text("damaged")
    found = list(clock.examine(toy))
    assert levels(found) == ["warning", "warning"]
    assert "decode-a" in found[1].found


def test_the_kernel_tells_whether_the_clock_is_set() -> None:
    assert clock.is_synchronized() in (True, False)


@pytest.mark.parametrize(("mode", "level"), [(0o700, "ok"), (0o777, "problem")])
def test_a_runtime_directory_that_others_write_is_told(tmp_path: Path, mode: int, level: str) -> None:
    path = tmp_path / "run"
    assert places.runtime_directory(path, False).level == "ok"
    path.mkdir()
    path.chmod(mode)
    assert places.runtime_directory(path, False).level == level
    link = tmp_path / "link"
    link.symlink_to(path)
    assert places.runtime_directory(link, False).level == "problem"


def test_a_runtime_directory_of_another_user_is_told_with_whom_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = places.runtime_directory(tmp_path, False)
    assert found.level == "problem"
    assert "runuser -u " in found.advice


def test_whose_a_port_is_nobody_says_who_may_not_look(toy: Here) -> None:
    directory = Path(toy.config.cluster.runtime_dir)
    assert len(list(places.examine(toy))) > 1
    directory.mkdir()
    directory.chmod(0o777)
    assert levels(places.examine(toy)) == ["problem"]


def test_a_file_whose_directory_is_not_the_units_is_told(tmp_path: Path) -> None:
    assert places.runtime_directory(tmp_path, True).level == "problem"
    assert "/run/mooncake-zmq" in places.runtime_directory(tmp_path, True).advice


def test_a_port_is_free_ours_or_somebody_elses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert places.listening("g", "http_port", "127.0.0.1", port, None).level == "problem"
        assert places.listening("g", "http_port", "127.0.0.1", port, 7).level == "ok"
    assert places.listening("g", "http_port", "127.0.0.1", port, None).level == "ok"
    assert places.listening("g", "http_port", "127.0.0.1", port, 7).level == "warning"
    assert places.bind_error("192.0.2.7", 80) == errno.EADDRNOTAVAIL
    with listen("127.0.0.1", 0, share=True) as shared:
        port = shared.getsockname()[1]
        assert places.listening("g", "http_port", "127.0.0.1", port, None, shared=True).level == "ok"
        assert places.listening("g", "http_port", "127.0.0.1", port, None).level == "problem"
    assert places.listening("g", "endpoint", "192.0.2.7", 80, None).level == "problem"


def test_every_address_that_a_node_listens_on_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(
        '[cache_node.kv_events]\nendpoint = "tcp://*:5557"\n[[nodes]]\nname = "c"\nrole = "cache-node"\nmetrics_port = 9100\n'
        'endpoint = "tcp://127.0.0.1:1"\ndata_endpoint = "tcp://127.0.0.1:2"\nstore_endpoint = "tcp://127.0.0.1:3"\n'
        "store_stream_port = 4\ndata_stream_port = 5\n"
    )
    found = here.find(loaded(file), None)
    named = [(what, port) for what, _, port in places.addresses(found, found.nodes[0])]
    assert named == [
        ("endpoint", 1),
        ("store_endpoint", 3),
        ("data_endpoint", 2),
        ("kv_events.endpoint", 5557),
        ("data_stream_port", 5),
        ("store_stream_port", 4),
        ("metrics_port", 9100),
    ]


def test_more_threads_than_cores_and_a_missing_compiler_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute.cores(3, 2).level == "warning"
    assert compute.features([]).level == "warning"
    for reason, levels in (("", ("ok", "ok")), ("numba not installed", ("problem", "warning"))):
        monkeypatch.setattr(compute, "lacking", lambda reason=reason: reason)
        assert tuple(compute.machine_code(needed=needed).level for needed in (True, False)) == levels
        assert reason in compute.machine_code(needed=False).found


def test_a_gpu_that_is_wanted_and_not_there_is_told(toy: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_: str) -> None:
        raise ValueError("device 'cuda' needs CuPy and a GPU")

    monkeypatch.setattr(compute, "array_namespace", lacking)
    with_gpu = replace(toy, nodes=tuple(replace(node, device="cuda") for node in toy.of_role("decode")))
    (found,) = compute.examine(with_gpu)
    assert found.level == "problem"
    assert "--extra gpu-cu12" in found.advice


def test_a_gpu_that_is_there_is_told_with_its_driver_and_memory(toy: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        memGetInfo=lambda: (70 << 30, 80 << 30),
        getDeviceProperties=lambda _: {"name": b"NVIDIA H100"},
        driverGetVersion=lambda: 12040,
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), __version__="14.0")
    monkeypatch.setattr(compute, "array_namespace", lambda _: cupy)
    monkeypatch.setattr(compute, "units_installed", lambda: False)
    with_gpu = replace(toy, nodes=tuple(replace(node, device="cuda") for node in toy.of_role("decode")))
    (found,) = compute.examine(with_gpu)
    assert found.level == "ok"
    assert "NVIDIA H100, 71,680 of 81,920 MiB free, driver for CUDA 12.4, CuPy 14.0" in found.found


def test_units_without_the_gpus_devices_are_told(tmp_path: Path) -> None:
    assert compute.gpu_units([tmp_path]).level == "problem"
    (tmp_path / "mooncake-prefill@.service.d").mkdir()
    (tmp_path / "mooncake-prefill@.service.d/50-gpu.conf").touch()
    assert compute.gpu_units([tmp_path]).level == "ok"


def answering(said: bytes) -> tuple[str, int]:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with server, server.accept()[0] as stream:
            stream.sendall(said)
            stream.recv(64)

    threading.Thread(target=answer, daemon=True).start()
    return server.getsockname()


def test_a_peer_answers_as_zeromq_does_or_as_something_else_or_not_at_all() -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        found = peers.reached("p", "127.0.0.1", port)
        assert (found.level, found.found.endswith("(ZMTP 3.1, NULL)")) == ("ok", True)
    assert peers.reached("p", *answering(b"HTTP/1.1 400 Bad Request\r\n\r\n.......")).level == "problem"
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert peers.reached("p", "127.0.0.1", port).level == "warning"


def test_what_running_nodes_refuse_or_do_not_hear_is_told() -> None:
    session = {
        "refusals": {"old": "protocol differs: old has 6, me has 7"},
        "peers": {"old": {"up": False}, "silent": {"up": False}, "up": {"up": True, "protocol": PROTOCOL_VERSION}},
        "counts": {},
    }
    found = list(peers.unreached_peers({"me": session, "also me": session}))
    assert levels(found) == ["problem", "problem", "warning"]
    assert found[-1].found == "silent is not received by me, also me"
    other = {**session, "counts": {"dropped[reason=version]": 3}}
    assert levels(peers.unreached_peers({"me": other})) == ["problem", "problem", "warning"]
    assert levels(peers.unreached_peers({"me": speaking(PROTOCOL_VERSION)})) == ["ok"]


def speaking(protocol: int) -> dict[str, Any]:
    return {"refusals": {}, "peers": {"up": {"up": True, "protocol": protocol}}, "counts": {}}


def test_a_peer_of_the_former_protocol_is_named_until_it_is_upgraded() -> None:
    found = list(peers.unreached_peers({"me": speaking(PROTOCOL_VERSION - 1)}))
    assert levels(found) == ["warning", "ok"]
    assert "with up" in found[0].found
    assert "restart --rolling" in found[0].advice


def test_a_node_that_runs_is_known_by_its_lock(tmp_path: Path) -> None:
    lock = ProcessLock.acquire(tmp_path, "decode-a")
    try:
        found = here.find(loaded(cluster__runtime_dir=str(tmp_path)), None)
        assert found.running == {"decode-a": os.getpid()}
        assert "decode-a (runs)" in here.examine(found)[0].found
    finally:
        lock.release()


def test_what_becomes_of_who_waits_at_a_gateway_that_leaves_is_told(tmp_path: Path) -> None:
    setting = tmp_path / "tcp_migrate_req"
    assert places.migrating(setting).level == "warning"
    for text, level in (("0\n", "warning"), ("1\n", "ok")):
        setting.write_text(text)
        assert places.migrating(setting).level == level
