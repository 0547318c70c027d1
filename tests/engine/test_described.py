"""A model that vLLM computes: any architecture, from config, tokenizer and template alone."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from model_files import small_vocabulary

from mooncake_zmq.engine import tokenizer as tokenizer_module
from mooncake_zmq.engine.described import SCRATCH, describe
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.tokenizer import open_tokenizer

CONFIG = {
    "model_type": "mixture_of_whatever",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 98,
    "max_position_embeddings": 163_840,
    "eos_token_id": [97],
    "quantization_config": {"quant_method": "fp8"},
}


def write(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    small_vocabulary().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return directory


def test_no_weight_is_needed_and_no_architecture_unknown(tmp_path: Path) -> None:
    path, card = describe(str(write(tmp_path / "model")), tmp_path / "cache")
    assert (card.spec.name, card.spec.vocab_size, card.spec.max_positions) == ("model", 98, 163_840)
    assert card.spec.kv_bytes_per_token == 61 * 2 * 8 * 56 * 4
    tokenizer = open_tokenizer(path)
    assert tokenizer.eos_ids == (97,)
    assert tokenizer.chat([{"role": "user", "content": "th"}]) == tokenizer.encode("th", special=False)


def test_the_same_model_is_the_same_everywhere_and_another_is_another(tmp_path: Path) -> None:
    first = describe(str(write(tmp_path / "a" / "model")), tmp_path / "cache")
    again = describe(str(write(tmp_path / "b" / "model")), tmp_path / "other cache")
    assert first[1] == again[1]
    assert describe(str(tmp_path / "a" / "model"), tmp_path / "cache")[0] == first[0]
    assert list((tmp_path / "cache").glob(f"{SCRATCH}*")) == []
    deeper = describe(str(write(tmp_path / "c" / "model", num_hidden_layers=62)), tmp_path / "cache")
    renamed = describe(str(write(tmp_path / "c" / "trained-further")), tmp_path / "cache")
    assert len({card.spec.fingerprint for _, card in (first, deeper, renamed)}) == 3


def test_a_process_that_prepares_a_model_meanwhile_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = tokenizer_module.fingerprint

    def meanwhile(path: Path) -> str:
        prepare("dummy:tiny", tmp_path / "cache", kernels=False)
        return fingerprint(path)

    monkeypatch.setattr(tokenizer_module, "fingerprint", meanwhile)
    path, _ = describe(str(write(tmp_path / "model")), tmp_path / "cache")
    assert open_tokenizer(path).eos_ids == (97,)


def test_scratch_files_of_a_process_that_was_killed_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    model, cache = str(write(tmp_path / "model")), tmp_path / "cache"
    left = cache / f"{SCRATCH}left"
    left.mkdir(parents=True)
    (left / "tokenizer.json").write_text("{")
    with (cache / ".described.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        describe(model, cache)
        assert left.exists(), "its process may be alive"
    describe(model, cache)
    assert list(cache.glob(f"{SCRATCH}*")) == []


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_model(tmp_path: Path) -> None:
    parts = tokenizer_module.TokenizerParts("", small_vocabulary(), tokenizer_module.Conversation(template=None, eos_ids=()))
    with pytest.raises(ModelError, match="cannot be written"):
        tokenizer_module.write_parts(tmp_path / "gone", parts, 98)


def test_a_model_that_sees_has_its_text_beside(tmp_path: Path) -> None:
    nested = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 98, "max_position_embeddings": 512}
    _, card = describe(str(write(tmp_path / "model", hidden_size=None, text_config=nested)), tmp_path / "cache")
    assert (card.spec.layers, card.spec.hidden) == (3, 64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"vocab_size": "many"}, "makes no sense"),
        ({"num_hidden_layers": 1 << 40}, "makes no sense"),
        ({"eos_token_id": [[1]]}, "makes no sense"),
        ({"hidden_size": -1}, "makes no sense"),
    ],
)
def test_a_config_that_makes_no_sense_is_told_in_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe(str(write(tmp_path / "model", **changes)), tmp_path / "cache")


def test_what_is_no_directory_is_told(tmp_path: Path) -> None:
    for model in ("default", "toy", str(tmp_path / "nowhere")):
        with pytest.raises(ModelError, match="Hugging Face directory"):
            describe(model, tmp_path / "cache")
    (write(tmp_path / "model") / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        describe(str(tmp_path / "model"), tmp_path / "cache")
