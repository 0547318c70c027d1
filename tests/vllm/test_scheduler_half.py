"""The connector's scheduler half over stand-ins of vLLM's modules: which requests it names, looks up and saves."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import mooncake_zmq.vllm
from mooncake_zmq.kv.block_hash import salt_of
from mooncake_zmq.vllm.groups import ATTENTION
from mooncake_zmq.vllm.settings import read_settings

FILE = Path(mooncake_zmq.vllm.__file__).with_name("connector.py")
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
MODULES = (
    "torch",
    f"{V1}.base",
    f"{V1}.metrics",
    "vllm.distributed.parallel_state",
    "vllm.logger",
    "vllm.v1.kv_cache_interface",
)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The connector's module where vLLM has classes without attributes, and no store is there."""
    parts = [each.split(".") for each in MODULES]
    for name in {".".join(each[:count]) for each in parts for count in range(1, len(each) + 1)}:
        stub = ModuleType(name)
        monkeypatch.setattr(stub, "__path__", [], raising=False)
        monkeypatch.setattr(stub, "__getattr__", lambda attribute: type(attribute, (), {}), raising=False)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(sys.modules["vllm.logger"], "init_logger", MagicMock(), raising=False)
    spec = spec_from_file_location("mooncake_zmq.vllm.connector_over_stubs", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_connected", MagicMock())
    monkeypatch.setattr(module, "_groups", lambda _config: (ATTENTION,))
    monkeypatch.setattr(module, "Lookups", MagicMock())
    return module


def half_of(connector: ModuleType, **settings: Any) -> Any:
    config = MagicMock(lora_config=None)
    config.scheduler_config = SimpleNamespace(max_num_scheduled_tokens=None, max_num_batched_tokens=8192)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))], num_blocks=100)
    half = connector._SchedulerHalf(config, cache, read_settings({"stores": "127.0.0.1:7301"} | settings))
    half.meet(["vllm/digest/0.0/"])
    half.block_pool = MagicMock(blocks=range(100))
    return half


def request(name: str, **more: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {"resumable": False, "kv_transfer_params": None, "lora_request": None, "cache_salt": ""}
    plain |= {"mm_features": [], "prompt_embeds": None, "all_token_ids": list(range(100)), "num_computed_tokens": 0}
    return SimpleNamespace(request_id=name, num_tokens=100, **plain | more)


def saved_by(half: Any, name: str) -> list[Any]:
    """The saves of a step that computes 96 tokens of a request."""
    output = SimpleNamespace(num_scheduled_tokens={name: 96}, total_num_scheduled_tokens=96)
    output.kv_connector_block_state = SimpleNamespace(get_block_ids=lambda _: [[*range(1, 8)]], boundary_state_offloads={})
    return list(half.plan(output).orders.saves)


def test_requests_from_before_a_reset_are_neither_looked_up_nor_saved_after_it(connector: ModuleType) -> None:
    half = half_of(connector)
    half._lookups.ask.return_value.answer.return_value = None
    kept, later = request("kept"), request("later")
    half.add(kept)
    assert half.matched(kept, 0) is None
    half.start_anew()  # their keys are those of the weights before
    half._lookups.ask.reset_mock()
    assert half.matched(kept, 0) == 0
    assert not half._lookups.ask.called
    assert not saved_by(half, "kept")
    half.add(later)
    assert saved_by(half, "later")


def test_images_of_other_clients_than_a_gateway_have_no_names(connector: ModuleType) -> None:
    """Of an identifier of the client's own, vLLM makes a digest, where it has options for images."""
    image = SimpleNamespace(identifier="ab" * 32, mm_position=SimpleNamespace(offset=3))
    for settings, salt, named in (({}, "", 0), ({}, "own", 0), ({}, salt_of(bytes(16)), 1), ({"images": "all"}, "", 1)):
        half = half_of(connector, **settings)
        half.add(request("r", mm_features=[image], cache_salt=salt))
        assert len(saved_by(half, "r")) == named
        assert half.ledger.counts["unnamed_requests"] == 1 - named
