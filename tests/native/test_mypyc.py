"""Machine code decides what the Python that it was made of decides, and never outlives it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import mooncake_zmq
from mooncake_zmq.core.roles import SUMMARIES
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.native.mypyc_build import SLOTTED
from mooncake_zmq.native.mypyc_code import LABORATORY, NODES, PARTS, compiled_files, folder, is_complete

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKLY = {"MYPYC_OPT_LEVEL": "0"}
"""How much the C compiler optimizes changes no number. Where this checkout's nodes are compiled, as in CI, their machine code
is taken: what is shipped, and no second build."""
AS_NODE = """
from mooncake_zmq.native import mypyc_code

mypyc_code.use(mypyc_code.NODES)
"""
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
from mooncake_zmq.core import node, session
from mooncake_zmq.decode import decode
from mooncake_zmq.gateway.requests import requests
from mooncake_zmq.simulation.run import run_seed

logs = [run_seed(seed, trace=True).log for seed in range(2)]
suffixes = {module.__file__.rpartition(".")[2] for module in (node, session, decode, requests)}
print(*suffixes, len(logs[0]), hashlib.sha256(repr(logs).encode()).hexdigest())
"""


def copied(target: Path) -> Path:
    """A package of the same sources, with the machine code of their nodes, if there is any."""
    source = Path(mooncake_zmq.__file__).parent
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__mypyc__", "__pycache__"))
    built = folder(source, NODES)
    if is_complete(compiled_files(built), NODES):
        shutil.copytree(built, target / "__mypyc__" / built.name)
    return target


@pytest.fixture
def run(tmp_path):
    """Runs Python with the package in this directory; returns the words that it prints."""

    def words(*arguments, switch="1"):
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "MOONCAKE_ZMQ_MYPYC": switch} | QUICKLY
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return words


def compiler() -> str | None:
    return shutil.which(str(sysconfig.get_config_var("CC")).split()[0])


@pytest.mark.timeout(900)
@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_machine_code_decides_alike_and_goes_with_its_source(tmp_path, run):
    package = copied(tmp_path / "mooncake_zmq")

    as_python = run("-c", AS_NODE + DECISIONS, switch="0")
    assert as_python[0] == "py"
    assert int(as_python[1]) > 300
    run("-m", "mooncake_zmq", "compile")
    assert run("-c", AS_NODE + DECISIONS) == ["so", *as_python[1:]]
    assert run("-c", DECISIONS) == as_python, "who does not say that he is a node runs Python"
    assert run("-c", "from mooncake_zmq.core import actor_parts" + AS_NODE + DECISIONS) == as_python, "never half of it"
    checked = run("-m", "mooncake_zmq", "config", "check", str(CONFIGS / "chaos.toml"))
    assert checked[-1] == "ok", "costs set in part have their defaults"
    a_cluster, same = run("-c", AS_NODE + SEEDS), run("-c", SEEDS)
    assert (a_cluster[0], same[0]) == ("so", "py")
    assert int(same[1]) > 1000
    assert a_cluster[1:] == same[1:]
    lines = run("-m", "mooncake_zmq.simulation", "3", "--compiled"), run("-m", "mooncake_zmq.simulation", "3")
    compiled, sources = (json.loads(" ".join(line)) for line in lines)
    assert (compiled["failure"], compiled["digest"], compiled["events"]) == (None, sources["digest"], sources["events"])
    assert run("-c", AS_NODE + DECISIONS, switch="0") == as_python, "it can be turned off"
    with (package / "conductor" / "settings.py").open("a") as source:
        source.write("# changed\n")
    assert run("-c", AS_NODE + DECISIONS) == as_python, "stale machine code is not used"


AS_WORKER = """
from mooncake_zmq.native import mypyc_code

mypyc_code.use(mypyc_code.LABORATORY)
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
def test_a_replay_of_machine_code_has_the_same_result_to_the_last_digit(tmp_path, run):
    package = tmp_path / "mooncake_zmq"
    shutil.copytree(Path(mooncake_zmq.__file__).parent, package, ignore=shutil.ignore_patterns("__mypyc__", "__pycache__"))

    run("-m", "mooncake_zmq", "compile", "--laboratory", switch="0")
    as_python, as_machine_code = run("-c", REPLAY), run("-c", AS_WORKER + REPLAY)
    assert as_python[:2] == ["py", "150"]
    assert as_machine_code == ["so", *as_python[1:]]


def test_what_is_compiled_is_there_and_no_part_takes_the_others_folder():
    for part in PARTS:
        for name in part.modules:
            assert (Path(mooncake_zmq.__file__).parent / f"{name.replace('.', '/')}.py").exists(), name
            assert name.replace(".", "/").startswith(tuple(f"{room}/" for room in part.rooms)), "its changes are seen"
    assert len({folder(Path(mooncake_zmq.__file__).parent, part) for part in PARTS}) == len(PARTS)


ENTERED = """
import sys

from mooncake_zmq.native import mypyc_code


def use(part):
    early = sys.modules.keys() & {f"mooncake_zmq.{name}" for name in part.modules}
    sys.exit(f"too late: {early}" if early else part.name)


mypyc_code.use = use
"""
ROLE = "from mooncake_zmq.cli import main\nmain({arguments!r})"


@pytest.mark.parametrize(
    ("entering", "part"),
    [
        ("import mooncake_zmq.laboratory.__main__", "laboratory"),
        *((ROLE.format(arguments=[role, "--node", "a"]), "nodes") for role in SUMMARIES),
        (ROLE.format(arguments=["store", "--dry-run"]), "nodes"),
        (ROLE.format(arguments=["bench", "schedule"]), "nodes"),
        ("from mooncake_zmq.simulation.__main__ import worker\nworker(['1', '--compiled'])", "nodes"),
    ],
)
def test_who_runs_machine_code_says_so_before_any_of_it_is_imported(entering, part):
    done = subprocess.run([sys.executable, "-c", ENTERED + entering], capture_output=True, text=True, timeout=60)
    assert done.stderr.split("\n")[0] == part, done.stderr


def test_the_command_line_has_imported_nothing_of_it_by_then():
    command = "import sys\nfrom mooncake_zmq import cli\nfrom mooncake_zmq.bench import command\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    imported = set(done.stdout.split())
    assert "mooncake_zmq.cli" in imported
    assert not imported & {f"mooncake_zmq.{name}" for part in PARTS for name in part.modules}


def test_what_is_compiled_otherwise_is_not_taken_for_this(tmp_path):
    package = tmp_path / "mooncake_zmq"
    (package / "native").mkdir(parents=True)
    build = package / "native/mypyc_build.py"
    build.write_text("FLAGS = 1")
    found = [folder(package, LABORATORY), folder(package, LABORATORY._replace(optimize="3"))]
    build.write_text("FLAGS = 2")
    found.append(folder(package, LABORATORY))
    assert len(set(found)) == len(found)
    assert folder(package, LABORATORY) == found[-1]


def test_a_process_says_what_it_would_run(tmp_path, monkeypatch):
    monkeypatch.setattr(mypyc_code, "HOME", tmp_path)
    assert mypyc_code.code(NODES) == "off"
    monkeypatch.delenv("MOONCAKE_ZMQ_MYPYC")
    assert mypyc_code.code(NODES) == "none"
    for name, found in ((f"{mypyc_code.TAG}-other", "stale"), (folder(mypyc_code.PACKAGE, NODES).name, "machine")):
        (tmp_path / name).mkdir()
        for module in (*(f"mooncake_zmq.{each}" for each in NODES.modules), "0a1b__mypyc"):
            (tmp_path / name / f"{module}{mypyc_code.EXTENSION}").touch()
        assert mypyc_code.code(NODES) == found


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
