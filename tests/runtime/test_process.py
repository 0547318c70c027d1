"""The shell around a role: what it died of is told, however early that was."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ports import free_port
from waiting import eventually

from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.own_files import replace_own

TOY = Path(__file__).parent.parent.parent / "configs/toy.toml"
CRASHES_EARLY = """
import sys
from mooncake_zmq.config.load import load
from mooncake_zmq.runtime import parts, process

class AnEarlyBug(Exception):
    pass

def crashing_server(*arguments, on_crash, **settings):
    server = real(*arguments, on_crash=on_crash, **settings)
    on_crash(AnEarlyBug())
    return server

real, parts.DataServer = parts.DataServer, crashing_server
loaded = load(sys.argv[1], {"cluster.runtime_dir": sys.argv[2], "cluster.shm_dir": sys.argv[2]})
sys.exit(process.main(loaded, "cache-a"))
"""


def test_a_data_server_that_dies_before_the_loop_exists_ends_the_process_with_its_reason() -> None:
    with tempfile.TemporaryDirectory(prefix="mz-") as directory:
        ended = subprocess.run(
            [sys.executable, "-c", CRASHES_EARLY, str(TOY), directory], capture_output=True, text=True, timeout=30
        )
        assert ended.returncode == 1, ended.stderr
        assert "AnEarlyBug" in ended.stderr
        assert "AttributeError" not in ended.stderr
        assert [path.name for path in Path(directory).iterdir()] == ["cache-a.lock"]


LOSES_ITS_PORT = """
import sys
from mooncake_zmq.config.load import load
from mooncake_zmq.runtime import gateway_process, process
from mooncake_zmq.runtime.listening import claim, listen

def claim_what_another_takes(host, port, share):
    global other
    claimed = claim(host, port, share=share)
    other = listen(host, port)
    return claimed

gateway_process.claim = claim_what_another_takes
gateway_process.GatewayProcess._may_open = lambda self: True
ours = {"cluster.runtime_dir": sys.argv[2], "cluster.shm_dir": sys.argv[2]}
loaded = load(sys.argv[1], {**ours, "gateway.reuse_port": True, "gateway.http_port": int(sys.argv[3])})
sys.exit(process.main(loaded, "gateway-0"))
"""


def test_a_gateway_whose_shared_address_another_took_before_it_listened_ends_and_is_never_ready() -> None:
    with tempfile.TemporaryDirectory(prefix="mz-") as directory:
        ended = subprocess.run(
            [sys.executable, "-c", LOSES_ITS_PORT, str(TOY), directory, str(free_port())],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 2, ended.stderr
    assert "mooncake-zmq: gateway-0: cannot listen on 127.0.0.1:" in ended.stderr
    assert '"ready"' not in ended.stderr


WITHOUT_CUPY = """
import sys
sys.modules["cupy"] = None
from mooncake_zmq.cli import main
main(sys.argv[1:])
"""
DEVICE = """
[model]
path = "dummy:tiny"
cache_dir = "{directory}"
max_model_len = 64
[cluster]
runtime_dir = "{directory}/run"
shm_dir = "{directory}"
[[nodes]]
name = "d"
role = "decode"
device = "cuda"
"""


def test_a_device_that_is_missing_is_told_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(DEVICE.format(directory=tmp_path))
    arguments = ["decode", "--config", str(file), "--node", "d"]
    ended = subprocess.run([sys.executable, "-c", WITHOUT_CUPY, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    (told,) = ended.stderr.splitlines()
    assert told.startswith("mooncake-zmq: d: device 'cuda' needs CuPy and a GPU")


@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_cupys_kernels_are_kept_beside_the_model_or_where_the_operator_says(tmp_path: Path, chosen: str | None) -> None:
    file = tmp_path / "x.toml"
    file.write_text(DEVICE.format(directory=tmp_path))
    (tmp_path / "cupy.py").write_text("import os\nraise OSError('kernels in ' + os.environ.get('CUPY_CACHE_DIR', 'the home'))")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"CUPY_CACHE_DIR": chosen} if chosen else {}
    main = "from mooncake_zmq.cli import main; main()"
    arguments = [sys.executable, "-c", main, "decode", "--config", str(file), "--node", "d"]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith(f"kernels in {chosen or tmp_path / 'cupy'}")


def run_until_crash(runtime_dir: Path, shm_dir: Path) -> "subprocess.CompletedProcess[str]":
    """Start a cache-node that gets as far as its data server, where a planted bug ends it."""
    code = CRASHES_EARLY.replace('"cluster.shm_dir": sys.argv[2]', '"cluster.shm_dir": sys.argv[3]')
    arguments = [sys.executable, "-c", code, str(TOY), str(runtime_dir), str(shm_dir)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=30)


def test_what_others_put_beside_the_segments_stops_no_start(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mz-") as directory:
        os.mkfifo(tmp_path / "mooncake=local=x=1")
        for name in ("mooncake=local==1", "mooncake=toy=%2E%2E%2Fx=1"):
            (tmp_path / name).mkdir()
        ended = run_until_crash(Path(directory), tmp_path)
        assert ended.returncode == 1, ended.stderr
        assert "AnEarlyBug" in ended.stderr, "it came that far"
        assert len(list(tmp_path.iterdir())) == 3


def test_a_runtime_directory_that_leads_elsewhere_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "theirs")
    ended = run_until_crash(tmp_path / "run", tmp_path)
    assert ended.returncode == 2, ended.stderr
    (told,) = ended.stderr.splitlines()
    assert "run: it is a symbolic link: name the directory itself" in told
    assert not list((tmp_path / "theirs").iterdir())


SHOWS_SOCKET = CRASHES_EARLY.replace(
    "    on_crash(", "    import os\n    print(oct(os.stat(sys.argv[2] + '/cache-a.data.ipc').st_mode))\n    on_crash("
)


def test_sockets_are_for_us_alone_whatever_the_umask() -> None:
    with tempfile.TemporaryDirectory(prefix="mz-") as directory:
        arguments = [sys.executable, "-c", SHOWS_SOCKET, str(TOY), directory]
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=30, umask=0)
        assert ended.stdout == "0o140700\n", ended.stderr


LEAVES_SOON = """
import sys
from mooncake_zmq.config.load import load
from mooncake_zmq.runtime import process
from mooncake_zmq.transfer import key_files

key_files.DROPPED_S = 0.5
process.main(load(sys.argv[1]), "conductor-0")
"""
KEYED = """
[model]
path = "toy"
[cluster]
runtime_dir = "{directory}/run"
shm_dir = "{directory}"
[security]
keys = "{directory}/keys"
[[nodes]]
name = "conductor-0"
role = "conductor"
endpoint = "tcp://127.0.0.1:{port}"
[[nodes]]
name = "gateway-0"
role = "gateway"
endpoint = "tcp://127.0.0.1:{other_port}"
"""


def test_a_node_whose_own_key_is_dropped_leaves_and_one_of_whom_another_is_dropped_serves(tmp_path: Path) -> None:
    file, book = tmp_path / "keyed.toml", tmp_path / "keys" / key_files.PUBLIC_KEYS
    file.write_text(KEYED.format(directory=tmp_path, port=free_port(), other_port=free_port()))
    key_files.make(tmp_path / "keys", [("conductor-0", ("node",)), ("gateway-0", ("node",))])
    own = "".join(line for line in book.read_text().splitlines(keepends=True) if not line.startswith("gateway-0"))
    with (tmp_path / "log").open("w") as log:
        node = subprocess.Popen([sys.executable, "-c", LEAVES_SOON, str(file)], stdout=log, stderr=log)
    try:
        eventually(lambda: "ready" in (tmp_path / "log").read_text(), 30)
        replace_own(book, own.encode(), mode=key_files.WORLD_READABLE)
        eventually(lambda: "public_keys_read" in (tmp_path / "log").read_text(), 30)
        assert node.poll() is None
        replace_own(book, b"", mode=key_files.WORLD_READABLE)
        assert node.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        node.kill()
        node.wait()
    told = (tmp_path / "log").read_text()
    assert "own_key_dropped" in told
    assert told.index("own_key_dropped") < told.index("draining") < told.index("stopped")
