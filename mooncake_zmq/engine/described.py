"""A model that another program computes: its shape and identity from its config, and its tokenizer, without any weight.

Any architecture is accepted. Where a config does not describe its KV, one head is assumed: only estimates depend on it.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mooncake_zmq.engine import tokenizer
from mooncake_zmq.engine.card import ModelCard
from mooncake_zmq.engine.disk import sync
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import default_cache_dir
from mooncake_zmq.engine.sources.directory import ModelDirectory
from mooncake_zmq.engine.spec import ModelSpec, check_spec

SCRATCH = ".described-"
"""The beginning of a directory's name while it is written."""


def describe(model: str, cache_dir: Path | str, name: str = "") -> tuple[Path, ModelCard]:
    """Return the directory of the tokenizer's files, and the card. Raises ModelError. `name`: that of the model; empty: its
    directory's. The fingerprint is that of name and config: weights are not read, so two trainings of one architecture must
    have different names."""
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"model.path {model[:200]} is no directory: with model.engine 'vllm' it is the Hugging Face directory that vLLM "
            "serves; config.json, tokenizer.json and the chat template are enough"
        )
    directory = ModelDirectory(path)
    directory.check_tokenizer()
    spec = _spec(directory, name or path.resolve().name)
    texts = _write_texts(directory, spec, Path(cache_dir) if cache_dir else default_cache_dir())
    return texts, ModelCard(spec=spec, tokenizer=tokenizer.fingerprint(texts))


def _spec(directory: ModelDirectory, name: str) -> ModelSpec:
    whole = json.dumps([name, directory.config], sort_keys=True).encode()
    nested = directory.config.get("text_config")  # of a model with image or audio input
    config: dict[str, Any] = directory.config | (nested if isinstance(nested, dict) else {})
    try:
        hidden, heads = config["hidden_size"], config.get("num_attention_heads") or 1
        spec = ModelSpec(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or max(2, hidden // heads),
            ffn=1,
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            rope_theta=1.0,
            norm_eps=1.0,
            tied=False,
            eos_ids=directory.eos_ids(),
            bos_id=config.get("bos_token_id"),
            fingerprint=hashlib.sha256(b"described" + whole).hexdigest(),
        )
    except KeyError as error:
        raise ModelError(f"{directory.path}/config.json lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{directory.path}/config.json makes no sense: {error}") from error
    check_spec(spec)
    return spec


def _write_texts(directory: ModelDirectory, spec: ModelSpec, cache_dir: Path) -> Path:
    """Write the tokenizer in our own form, under a name derived from its content: a process that finds it need not write it."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _scratch(cache_dir) as scratch:
            tokenizer.write_parts(scratch, directory.read_tokenizer(spec.eos_ids), spec.vocab_size)
            target = cache_dir / f"described-{tokenizer.fingerprint(scratch)}"
            if not target.exists():
                scratch.chmod(0o755)
                for written in (*scratch.iterdir(), scratch):
                    sync(written)
                _move(scratch, target)
    except OSError as error:
        raise ModelError(f"{error.filename or cache_dir} cannot be written: {error.strerror or error}") from error
    return target


@contextlib.contextmanager
def _scratch(cache_dir: Path) -> Iterator[Path]:
    """Make a directory for the time of writing. Processes that write share a lock; if none does, dead ones left the others."""
    with (cache_dir / ".described.lock").open("a+") as lock:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in cache_dir.glob(f"{SCRATCH}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=cache_dir))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _move(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not target.exists():  # else another process was quicker, with the same files
            raise
