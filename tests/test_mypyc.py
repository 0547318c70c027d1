"""Machine code decides what the Python that it was made of decides, and never outlives it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import mooncake_zmq
from mooncake_zmq import mypyc_code
from mooncake_zmq.laboratory import jobs
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.profiles import find_profile
from mooncake_zmq.laboratory.study import Setup
from mooncake_zmq.mypyc_build import SLOTTED
from mooncake_zmq.mypyc_code import LABORATORY, PARTS, WORKER, folder, is_complete

CONFIGS = Path(__file__).parent.parent / "configs"
QUICKLY = {"MYPYC_OPT_LEVEL": "0"}
"""How much the C compiler thinks about it changes no number."""
DECISIONS = """
import hashlib
from mooncake_zmq.bench.schedule import COSTS, LAYOUT, generated
from mooncake_zmq.bench.schedule_load import ClusterLoad
from mooncake_zmq.conductor import conductor, routing
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Send
from mooncake_zmq.core.messages import Placed

load = ClusterLoad(generated(600), hosts=8, costs=COSTS)
settings = ConductorSettings(ttft_slo_s=8.0, tbt_slo_s=0.1)
actor = conductor.Conductor(name="k", host="h", incarnation=1, settings=settings, layout=LAYOUT, costs=COSTS)
for event in load.joins():
    actor.handle(0.0, event)
digest = hashlib.sha256()
for now, event in load.events():
    effects = actor.handle(now, event)
    digest.update(repr(effects).encode())
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Placed):
            load.answer(now, int(effect.message.request_id[1:]), effect.message)
actor.check(now)
print(routing.__file__.rpartition(".")[2], actor.counts["placed"], digest.hexdigest())
"""


SEEDS = """
import hashlib
from mooncake_zmq.core import shell
from mooncake_zmq.simulation.run import run_seed

logs = [run_seed(seed, trace=True).log for seed in range(2)]
print(shell.__file__.rpartition(".")[2], len(logs[0]), hashlib.sha256(repr(logs).encode()).hexdigest())
"""


def compiler() -> str | None:
    return shutil.which(str(sysconfig.get_config_var("CC")).split()[0])


@pytest.mark.timeout(900)
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_machine_code_decides_alike_and_goes_with_its_source(tmp_path):
    package = tmp_path / "mooncake_zmq"
    shutil.copytree(Path(mooncake_zmq.__file__).parent, package, ignore=shutil.ignore_patterns("__mypyc__", "__pycache__"))

    def run(*arguments, switch="1"):
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "MOONCAKE_ZMQ_MYPYC": switch} | QUICKLY
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    as_python = run("-c", DECISIONS)
    assert as_python[0] == "py"
    assert int(as_python[1]) > 300
    run("-m", "mooncake_zmq", "compile")
    assert run("-c", DECISIONS) == ["so", *as_python[1:]]
    checked = run("-m", "mooncake_zmq", "config", "check", str(CONFIGS / "chaos.toml"))
    assert checked[-1] == "ok", "costs set in part have their defaults"
    a_cluster, same = run("-c", SEEDS), run("-c", SEEDS, switch="0")
    assert (a_cluster[0], same[0]) == ("so", "py")
    assert int(same[1]) > 1000
    assert a_cluster[1:] == same[1:]
    assert run("-c", DECISIONS, switch="0") == as_python, "it can be turned off"
    with (package / "conductor" / "settings.py").open("a") as source:
        source.write("# changed\n")
    assert run("-c", DECISIONS) == as_python, "stale machine code is not used"


AS_WORKER = f"""
import sys

sys.orig_argv = [sys.executable, *{WORKER}]
"""
REPLAY = """
import hashlib
import msgspec
from mooncake_zmq.laboratory.generated import generate, parse_spec
from mooncake_zmq.laboratory.profiles import find_profile
from mooncake_zmq.laboratory.replay import run
from mooncake_zmq.laboratory.study import Setup
from mooncake_zmq.prefill import prefill
from mooncake_zmq.simulation import world

arrivals = generate(parse_spec("conversation:requests=150,rate=6,seed=1", None))
setup = Setup(prefill=3, decode=2, hardware=find_profile("a800-llama3-70b"))
result = run(setup, arrivals)
result.wall_s = result.cpu_s = result.peak_mib = 0.0
suffixes = {module.__file__.rpartition(".")[2] for module in (prefill, world)}
print(*suffixes, len(result.requests), hashlib.sha256(msgspec.json.encode(result)).hexdigest())
"""


@pytest.mark.timeout(900)
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_a_replay_of_machine_code_has_the_same_result_to_the_last_digit(tmp_path):
    package = tmp_path / "mooncake_zmq"
    shutil.copytree(Path(mooncake_zmq.__file__).parent, package, ignore=shutil.ignore_patterns("__mypyc__", "__pycache__"))

    def run(*arguments, switch):
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "MOONCAKE_ZMQ_MYPYC": switch} | QUICKLY
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    run("-m", "mooncake_zmq", "compile", "--laboratory", switch="0")
    as_python, elsewhere = (run("-c", REPLAY, switch=switch) for switch in ("0", "laboratory"))
    as_machine_code = run("-c", AS_WORKER + REPLAY, switch="laboratory")
    assert as_python[:2] == ["py", "150"]
    assert elsewhere == as_python, "no other process runs it"
    assert as_machine_code == ["so", *as_python[1:]]


def test_what_is_compiled_is_there_and_no_part_takes_the_others_folder():
    for part in PARTS:
        for name in part.modules:
            assert (Path(mooncake_zmq.__file__).parent / f"{name.replace('.', '/')}.py").exists(), name
            assert name.split(".")[0] in part.rooms, "its changes are seen"
    assert len({folder(Path(mooncake_zmq.__file__).parent, part) for part in PARTS}) == len(PARTS)


TOLD = """
import os
import sys

from mooncake_zmq import mypyc_code

print(*[part.name for part in mypyc_code.parts_for(os.environ[mypyc_code.SWITCH], sys.orig_argv[1:])])
"""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (WORKER, ["laboratory", "decisions"]),
        (["-c", "import mooncake_zmq"], ["decisions"]),
        (["-m", "mooncake_zmq", *WORKER], ["decisions"]),
    ],
)
def test_only_a_worker_of_the_laboratory_runs_its_machine_code(tmp_path, arguments, parts):
    package = tmp_path / "mooncake_zmq"
    (package / "laboratory").mkdir(parents=True)
    for entry in (package / "__main__.py", package / "laboratory" / "__main__.py"):
        entry.touch()
    (package / "__init__.py").write_text(TOLD)
    shutil.copy(mypyc_code.__file__, package)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MOONCAKE_ZMQ_MYPYC": "laboratory"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == parts, done.stderr


def test_the_laboratory_starts_its_workers_as_what_they_are_known_by(monkeypatch):
    started = []

    def start(command, **_own):
        started.append(command)
        raise StudyError("seen enough")

    monkeypatch.setattr(jobs.subprocess, "Popen", start)
    job = jobs.Job(jobs.Source(), Setup(prefill=1, decode=1, hardware=find_profile("a800-llama3-70b")))
    with pytest.raises(StudyError, match="seen enough"):
        jobs.run_jobs([job], 1, lambda result: result, lambda number, share: None)
    assert started == [[sys.executable, *WORKER]]


def test_what_is_compiled_otherwise_is_not_taken_for_this(tmp_path, monkeypatch):
    package = tmp_path / "mooncake_zmq"
    package.mkdir()
    build = package / "mypyc_build.py"
    build.write_text("FLAGS = 1")
    found = [folder(package, LABORATORY), folder(package, LABORATORY._replace(optimize="3"))]
    build.write_text("FLAGS = 2")
    found.append(folder(package, LABORATORY))
    assert b"version" in mypyc_code.compiler_version()
    monkeypatch.setattr(mypyc_code, "compiler_version", lambda: b"another")
    found.append(folder(package, LABORATORY))
    assert len(set(found)) == len(found)
    assert folder(package, LABORATORY) == found[-1]


@pytest.mark.parametrize(
    ("written", "compiled"),
    [
        ("@dataclass(slots=True)", "@dataclass()"),
        ("@dataclass(frozen=True, slots=True)", "@dataclass(frozen=True)"),
        ("@dataclass(frozen=True, slots=True, kw_only=True)", "@dataclass(frozen=True, slots=True, kw_only=True)"),
        ("@dataclass(slots=True, eq=False)", "@dataclass(slots=True, eq=False)"),
    ],
)
def test_what_is_compiled_has_no_slots_where_nothing_else_is_asked_for(written, compiled):
    assert SLOTTED.sub(r"@dataclass(\1)", f"{written}\nclass A:") == f"{compiled}\nclass A:"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_half_of_the_machine_code_is_as_good_as_none(tmp_path, part):
    whole = {f"mooncake_zmq.{name}": tmp_path for name in part.modules}
    assert not is_complete(whole, part)
    assert is_complete(whole | {"0a1b__mypyc": tmp_path}, part)
    del whole["mooncake_zmq.conductor.plans"]
    assert not is_complete(whole | {"0a1b__mypyc": tmp_path}, part)
