"""A deployment's file that names a profile: what it gives, what goes before it, and how a bad one is told."""

import re
import subprocess
import sys

import pytest
from planted_profile import COSTS, planted

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import effective, load
from mooncake_zmq.config.summary import summary
from mooncake_zmq.config.warnings import warnings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.profile import encode
from mooncake_zmq.engine import cpu

NODES = """
[[nodes]]
name = "c"
role = "conductor"

[[nodes]]
name = "d"
role = "decode"
"""


@pytest.fixture
def write(tmp_path):
    def write_file(conductor: str, nodes: str = NODES, **changes):
        (tmp_path / "p.json").write_bytes(encode(planted(**changes)))
        path = tmp_path / "x.toml"
        path.write_text(conductor.replace("PROFILE", str(tmp_path / "p.json")) + nodes)
        return path

    return write_file


def test_the_costs_come_from_the_profile_unless_they_are_set(write):
    loaded = load(write("[costs]\nprofile = 'PROFILE'\ndecode_request_s = 0.5\n"), {"costs.prefill_square_s": "1e-9"}, {})
    costs = loaded.config.costs
    assert costs.prefill_token_s == pytest.approx(COSTS.prefill_token_s)
    assert costs.decode_context_s == pytest.approx(COSTS.decode_context_s)
    assert (costs.decode_request_s, costs.prefill_square_s) == (0.5, 1e-9)
    assert costs.profiled_model == planted().fingerprint
    sources = {dotted: source for dotted, _, source in effective(loaded)}
    assert sources["costs.prefill_token_s"].startswith("profile ")
    assert (sources["costs.decode_request_s"], sources["conductor.tie_ratio"]) == ("file", "default")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        (b"{", "not a profile"),
        (b"\xff\xfe", "not a profile"),
        (encode(planted(prefill=planted().prefill[:2] * 2)), None),
        (encode(planted(prefill=planted().prefill[:1] * 2)), "too few measurements"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named_with_its_setting(write, content, complaint):
    path = write("[costs]\nprofile = 'PROFILE'\n")
    file = path.parent / "p.json"
    file.unlink() if content is None else file.write_bytes(content)
    if complaint is None:
        load(path, {}, {})
        return
    with pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    assert re.fullmatch(rf"{re.escape(str(path))}: costs\.profile: {re.escape(str(file))}: .*{complaint}.*", str(caught.value))


def test_a_profile_setting_of_another_type_is_refused(write):
    with pytest.raises(ConfigError, match=r"costs.profile: expected str, got int"):
        load(write("[costs]\nprofile = 3\n"), {}, {})


@pytest.fixture
def numpy_is_chosen(monkeypatch):
    monkeypatch.setattr(cpu, "lacking", lambda: "nothing is installed")


@pytest.mark.usefixtures("numpy_is_chosen")
def test_config_check_shows_the_costs_and_warns_of_other_models_threads_and_backends(write):
    fits = load(write("[costs]\nprofile = 'PROFILE'\n"), {}, {})
    assert [line for line in summary(fits) if "costs of" in line and "prefill 2 ms per token" in line]
    assert not [text for text in warnings(fits) if "p.json" in text]
    other = load(write("[costs]\nprofile = 'PROFILE'\n", model="toy", threads=2, backend="compiled"), {}, {})
    told = [text for text in warnings(other) if "p.json" in text]
    assert len(told) == 3
    assert "the model toy" in told[0]
    assert "2 threads" in told[1]
    assert told[2].endswith("p.json was measured with backend compiled, and the engines here have numpy")


@pytest.mark.usefixtures("numpy_is_chosen")
def test_a_profile_of_the_backend_that_decodes_is_no_reason_to_warn(write):
    nodes = NODES.replace('role = "decode"', 'role = "decode"\nbackend = "compiled"')
    for backend, warned in (("compiled", False), ("numpy", True)):
        loaded = load(write("[costs]\nprofile = 'PROFILE'\n", nodes, backend=backend), {}, {})
        assert any("backend" in text for text in warnings(loaded)) == warned


def test_a_conductor_of_another_model_does_not_start():
    settings = Costs(profile="p.json", profiled_model="a" * 32)
    settings.check_model("a" * 32)
    Costs().check_model("b" * 32)
    with pytest.raises(ValueError, match=r"p.json measured another model \(aaaaaaaaaaaa, not bbbbbbbbbbbb\)"):
        settings.check_model("b" * 32)


def test_a_conductor_process_of_another_model_says_so_and_ends(write, tmp_path):
    path = write("[costs]\nprofile = 'PROFILE'\n[model]\npath = 'toy'\n")
    setting = f"cluster.runtime_dir={tmp_path}"
    command = [sys.executable, "-m", "mooncake_zmq", "conductor", "--config", str(path), "--node", "c", "--set", setting]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert ran.returncode == 2
    assert re.fullmatch(r"mooncake-zmq: c: costs.profile: .*p.json measured another model .*\n", ran.stderr), ran.stderr
