"""What a process learns of the model: from a card or an engine beside it, and never by preparing weights for others."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs
from strange_model import write_model

from mooncake_zmq.cli import main
from mooncake_zmq.config.records import Config, ModelSettings, NodeSettings
from mooncake_zmq.engine import card as cards
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.operate.local_nodes import collect_dumps
from mooncake_zmq.runtime.model import learn

MODEL = "dummy:tiny"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared model."""
    return prepare(MODEL, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def card(made: Path, tmp_path: Path) -> Path:
    """Its card, printed."""
    path = tmp_path / "card.json"
    path.write_bytes(cards.encode(cards.of_prepared(made)))
    return path


def config_of(tmp_path: Path, *roles: str, card: Path | str = "", model: str = MODEL) -> Config:
    nodes = tuple(NodeSettings(name=role, role=role, host="a", backend="numpy") for role in roles)  # type: ignore[arg-type]
    return Config(model=ModelSettings(path=model, cache_dir=str(tmp_path / "cache"), card=str(card)), nodes=nodes)


def no_sleep(_seconds: float) -> None:
    raise AssertionError("it waits")


@pytest.mark.parametrize("role", ["conductor", "cache-node"])
def test_a_card_is_all_that_a_process_without_an_engine_needs(made: Path, card: Path, tmp_path: Path, role: str) -> None:
    config = config_of(tmp_path, role, "prefill", card=card)
    model = learn(config, config.nodes[0], no_sleep)
    assert model.card == cards.of_prepared(made)
    assert model.max_model_len == model.spec.max_positions
    assert not (tmp_path / "cache").exists()


def test_a_model_has_the_name_that_is_given_and_stays_the_same(card: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, "conductor", "prefill", card=card)
    named = replace(config, model=replace(config.model, name="org/name"))
    unnamed, model = (learn(each, each.nodes[0], no_sleep) for each in (config, named))
    assert (unnamed.spec.name, model.spec.name) == ("dummy-tiny", "org/name")
    assert model.identity == unnamed.identity, "its KV is still found"


def test_coded_blocks_of_a_model_with_biases_have_a_layout_of_their_own(card: Path, tmp_path: Path) -> None:
    """Its card is enough to know it by."""
    config = config_of(tmp_path, "conductor", "prefill", card=card)
    for codec, same in (("exact", True), ("int8", False)):
        prints = []
        for family in ("llama", "qwen2"):
            found = cards.read(card)
            card.write_bytes(cards.encode(structs.replace(found, spec=replace(found.spec, family=family))))
            model = learn(replace(config, model=replace(config.model, kv_codec=codec)), config.nodes[0])  # type: ignore[arg-type]
            prints.append(model.layout(32).fingerprint)
        assert (prints[0] == prints[1]) is same


def test_a_vllms_model_is_compared_by_the_name_that_is_given(tmp_path: Path) -> None:
    first, second = (write_model(tmp_path / where) for where in ("snapshot-a", "snapshot-b"))

    def identity(place: Path, name: str) -> str:
        settings = ModelSettings(path=str(place), engine="vllm", cache_dir=str(tmp_path / "cache"), name=name)
        config = Config(model=settings, nodes=(NodeSettings(name="conductor-0", role="conductor"),))
        return learn(config, config.nodes[0], no_sleep).identity

    assert identity(first, "") != identity(second, "")
    assert identity(first, "org/name") == identity(second, "org/name") != identity(second, "org/other")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kv_of_modelled_engines_goes_by_another_name_than_the_models_own(card: Path, tmp_path: Path, role: str) -> None:
    """An SSD outlives a trial of the deployment."""
    config = config_of(tmp_path, "conductor", "prefill", "decode", card=card)
    trial = replace(
        config, nodes=tuple(replace(node, backend="modelled:p") if node.role == role else node for node in config.nodes)
    )
    own, modelled = (learn(each, each.nodes[0], no_sleep) for each in (config, trial))
    assert own.identity == own.spec.fingerprint == modelled.spec.fingerprint
    assert modelled.identity != own.identity
    assert len(modelled.identity) == len(own.identity)
    assert learn(trial, trial.nodes[0], no_sleep) == modelled, "by every node of the deployment the same"


def test_engines_of_other_longest_requests_share_kv(card: Path, tmp_path: Path) -> None:
    """No RoPE that our engine computes follows it."""
    config = config_of(tmp_path, "conductor", "prefill", card=card)
    shorter = replace(config, model=replace(config.model, max_model_len=64))
    assert learn(shorter, shorter.nodes[0], no_sleep).identity == learn(config, config.nodes[0], no_sleep).identity


def test_a_gateway_takes_its_tokenizer_from_beside_the_card(made: Path, card: Path, tmp_path: Path) -> None:
    alone = config_of(tmp_path, "gateway", card=card)
    with pytest.raises(ModelError, match="--to DIR"):
        learn(alone, alone.nodes[0], no_sleep)
    exported = cards.export(made, tmp_path / "exported")
    config = config_of(tmp_path, "gateway", card=exported)
    model = learn(config, config.nodes[0], no_sleep)
    assert (model.path, model.card) == (exported.parent, cards.of_prepared(made))
    assert not list(exported.parent.glob("*.bin"))


@pytest.mark.parametrize("role", ["conductor", "cache-node", "gateway"])
@pytest.mark.parametrize("model", [MODEL, "default", "/nowhere/model.gguf"])
def test_without_card_and_engine_it_says_what_to_do_and_downloads_nothing(tmp_path: Path, role: str, model: str) -> None:
    config = config_of(tmp_path, role, model=model)
    with pytest.raises(ModelError, match="model.card") as told:
        learn(config, config.nodes[0], no_sleep)
    assert "\n" not in told.value.message
    assert not (tmp_path / "cache").exists()


def test_it_waits_for_an_engine_of_its_host_to_have_prepared_the_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cache-node", "prefill")
    waits: list[float] = []

    def prepared_meanwhile(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            learn(config, config.nodes[1], no_sleep)

    model = learn(config, config.nodes[0], prepared_meanwhile)
    assert len(waits) == 3
    assert model == learn(config, config.nodes[1], no_sleep)


def test_an_engine_on_another_machine_is_not_waited_for(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cache-node", "prefill")
    away = replace(config.nodes[1], host="b", endpoint="tcp://10.0.0.2:7000")
    beside = replace(config.nodes[1], host="b")
    for engine, told in ((away, "model.card"), (beside, "was not prepared by an engine")):
        with pytest.raises(ModelError, match=told):
            learn(replace(config, nodes=(config.nodes[0], engine)), config.nodes[0], lambda seconds: None)


def test_the_wait_for_an_engine_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cache-node", "prefill")
    with pytest.raises(ModelError, match="was not prepared by an engine"):
        learn(config, config.nodes[0], lambda seconds: None)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda card: b"{", "is no model card"),
        (lambda card: card.replace(b'"layers"', b'"lairs"'), "is no model card"),
        (lambda card: json.dumps(json.loads(card) | {"format": 2}).encode(), "another version"),
        (lambda card: card.replace(b'"kv_heads": ', b'"kv_heads": 9'), "makes no sense"),
        (lambda card: card + b" " * cards.MAX_BYTES, "larger than"),
        (lambda card: b"\xff" + card, "is no model card"),
    ],
)
def test_a_damaged_card_is_refused_in_one_line(card: Path, damage, told: str) -> None:  # type: ignore[no-untyped-def]
    card.write_bytes(damage(card.read_bytes()))
    with pytest.raises(ModelError, match=told) as refused:
        cards.read(card)
    assert "\n" not in refused.value.message


def test_the_command_prints_the_card(tmp_path: Path, made: Path) -> None:
    outcome = CliRunner().invoke(main, ["model", "card", MODEL, "--cache-dir", str(made.parent)])
    assert outcome.exit_code == 0
    (tmp_path / "card.json").write_text(outcome.output)
    assert cards.read(tmp_path / "card.json") == cards.of_prepared(made)
    written = CliRunner().invoke(main, ["model", "card", MODEL, "--cache-dir", str(made.parent), "--to", str(tmp_path / "to")])
    assert Path(written.output.strip()) == tmp_path / "to" / "card.json"


CLUSTER = """
[model]
path = "{model}"
cache_dir = "{directory}/cache"
card = "{card}"
[cluster]
name = "card-{number}"
runtime_dir = "{directory}/run"
shm_dir = "{directory}"
[cache_node]
pool_bytes = 4194304
[[nodes]]
name = "conductor-0"
role = "conductor"
[[nodes]]
name = "cache-0"
role = "cache-node"
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("same", [True, False], ids=["same model", "another model"])
def test_processes_start_with_a_card_alone_and_compare_its_fingerprints(card: Path, tmp_path: Path, same: bool) -> None:
    other = tmp_path / "other.json"
    known = cards.read(card)
    other.write_bytes(cards.encode(known if same else structs.replace(known, spec=replace(known.spec, fingerprint="another"))))
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(model="default", directory=tmp_path, card=card, number=time.monotonic_ns() % 10**6))
    processes = []
    for role, name, settings in (("conductor", "conductor-0", []), ("cache-node", "cache-0", ["--set", f"model.card={other}"])):
        command = [sys.executable, "-m", "mooncake_zmq", role, "--config", str(file), "--node", name, *settings]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        while True:
            assert all(process.poll() is None for process in processes)
            session = collect_dumps(tmp_path / "run", ["conductor-0"]).get("conductor-0", {}).get("session", {})
            if session and (session["peers"]["cache-0"]["up"] if same else session["refusals"]):
                break
        assert same or session["refusals"]["cache-0"].startswith("model differs")
        assert not (tmp_path / "cache").exists()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            assert process.wait(20) == 0
