"""The command line: instant help, threads before NumPy, one line for a mistake."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main

ROOT = Path(__file__).parent.parent
TOY = str(ROOT / "configs/toy.toml")


def call(*arguments: str):
    return CliRunner().invoke(main, arguments)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom mooncake_zmq.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'numpy', 'zmq', 'msgspec', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for command in (
        "conductor",
        "prefill",
        "decode",
        "cache-node",
        "vllm",
        "gateway",
        "up",
        "config",
        "dump",
        "doctor",
        "simtest",
    ):
        assert f"  {command}" in shown


@pytest.mark.parametrize("command", ["conductor", "prefill", "decode", "cache-node", "vllm", "gateway", "up"])
def test_every_command_shows_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"mooncake-zmq {command}" in result.output


def test_blas_has_one_thread_before_numpy_is_loaded() -> None:
    code = (
        "import os, sys\nimport mooncake_zmq.bench.command\nfrom mooncake_zmq.cli import limit_blas\n"
        "limit_blas()\nassert 'numpy' not in sys.modules\n"
        "assert os.environ['OPENBLAS_NUM_THREADS'] == os.environ['OMP_NUM_THREADS'] == '1'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config_check_and_show() -> None:
    checked = call("config", "check", TOY)
    assert checked.exit_code == 0
    assert "prefill-b" in checked.output
    assert checked.output.rstrip().endswith(f"{TOY}: ok")
    shown = call("config", "show", TOY, "--set", "session.heartbeat_s=0.3")
    assert "session.heartbeat_s = 0.3  (command line)" in shown.output
    assert "model.path = 'toy'  (file)" in shown.output
    assert "session.retransmit_s = 0.4  (default)" in shown.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("config", "check", "/nowhere.toml"), "/nowhere.toml: No such file"),
        (("config", "check", TOY, "--set", "x"), "write KEY=VALUE"),
        (("config", "check", TOY, "--set", "a.b=1"), "there is no setting a.b"),
        (("dump", "--config", TOY, "--node", "nobody"), "there is no node 'nobody'"),
        (("bench", "serve", "--config", "/nowhere.toml"), "/nowhere.toml: No such file"),
        (("sim", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("keys", "list", "--in", "/nowhere"), "/nowhere/public_keys: No such file"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = subprocess.run([sys.executable, "-m", "mooncake_zmq", *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_doctor_and_dump_work_without_a_cluster(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    examined = call("doctor", "--config", TOY, "--set", f"cluster.runtime_dir={directory}", "--set", "gateway.http_port=1")
    assert "Python 3." in examined.output
    assert "cores" in examined.output
    dumped = call("dump", "--config", TOY, "--set", f"cluster.runtime_dir={directory}")
    assert dumped.exit_code == 1
    assert "not running" in dumped.output


def test_a_node_that_begins_in_another_role_imports_nothing_from_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_zmq.native.mypyc_code.use", lambda _modules: None)
    monkeypatch.setattr("mooncake_zmq.runtime.process.main", lambda *_, begin_as, **__: begin_as("decode"))
    begun: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _program, command: begun.append(command))
    call("prefill", "--config", TOY, "--node", "prefill-a")
    assert begun[0][1:5] == ["-P", "-m", "mooncake_zmq", "decode"]


def test_launchers_are_thin_and_executable() -> None:
    for name in ("up", "test", "conductor", "prefill", "decode", "cache-node", "vllm", "gateway"):
        path = ROOT / "bin" / name
        assert os.access(path, os.X_OK), name
        assert len(path.read_text().splitlines()) <= (14 if path.name == "test" else 8), name


def helps(*path: str) -> dict[tuple[str, ...], str]:
    """What each command says of itself, by its path."""
    shown = call(*path, "--help").output
    names = re.findall(r"^  ([a-z][a-z-]*)(?:  |$)", shown.partition("\nCommands:")[2], re.MULTILINE)
    return {path: shown, **{each: told for name in names for each, told in helps(*path, name).items()}}


def test_every_help_has_examples_and_those_of_what_is_there() -> None:
    told = helps()
    assert {("bench", "vllm"), ("keys", "api"), ("config", "check")} < told.keys()
    for path, shown in told.items():
        examples = re.findall(r"mooncake-zmq (.+)", shown.partition("Example")[2].partition("\nOptions:")[0])
        assert examples, f"{' '.join(path)} shows none"
        for example in examples:
            words = re.split(r"  | [>|&] |\)", example)[0].split()
            named = max((each for each in told if tuple(words[: len(each)]) == each), key=len)
            options = told[named].partition("\nOptions:")[2]
            wrong = [word for word in words if word.startswith("--") and f"{word} " not in options]
            assert not wrong, f"{example}: {wrong}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-such"], "No such option '--no-such'; '"),
        (["statsu"], "Did you mean one of: 'restart', 'status'?"),
        (["up", "--engine", "zz"], "'zz' is not one of 'own', 'vllm'; 'main up --help' explains it"),
        (["bench", "overload", "--multiple", "0"], "; 'mooncake-zmq bench overload --help' explains it"),
        (["bench", "compare", TOY, TOY], "toy.toml is no file of `mooncake-zmq bench all --json`"),
        (["bench", "client", "http://127.0.0.1:1", "--generate", "zzz"], "'zzz' is none of conversation"),
        (["bench", "all", "--json", "nodir/a.json", "--only", "gateway"], "--json nodir/a.json: No such file or directory"),
        (["config", "ports", TOY, "--host", "zz"], "no node has host 'zz'; hosts are host-a, host-b, localhost"),
        (["config", "check", TOY, "--set", "gatway.http_port=3"], "no setting gatway.http_port; did you mean gateway?"),
        (["config", "check", TOY, "--set", "gateway.http_port=zz"], "cannot read 'zz'; an integer is wanted"),
        (["config", "check", TOY, "--set", "gateway.allow_open=zz"], "cannot read 'zz'; true or false is wanted"),
        (["keys", "api", "alice", "--in", "nodir/keys"], "there is no directory nodir"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_what_to_do(arguments: list[str], said: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    assert line.startswith("mooncake-zmq: ")
    assert said in line


def test_a_group_without_a_command_shows_its_help() -> None:
    for arguments in ((), ("bench",)):
        result = call(*arguments)
        assert result.exit_code == 2
        assert "Examples:" in result.output


def test_the_doctor_folds_no_line_in_a_pipe() -> None:
    lines = call("doctor", "--config", TOY).output.splitlines()
    assert [line for line in lines if line.startswith(" ") and "->" not in line] == []
