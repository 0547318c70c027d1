"""A model's card: the shape and fingerprints that every process of a cluster has to know, in a small JSON file."""

import shutil
from pathlib import Path

import msgspec
from msgspec import Struct

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.spec import ModelSpec, check_spec

CARD_FILE = "card.json"
FORMAT = 1
MAX_BYTES = 64 << 10


class ModelCard(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape and fingerprints of a model. `spec`: shape, KV dtype, longest context, and the weights' fingerprint.
    `tokenizer`: the fingerprint of the tokenizer's files."""

    spec: ModelSpec
    tokenizer: str
    format: int = FORMAT


def encode(card: ModelCard) -> bytes:
    """Return the bytes of the card's file."""
    return msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n"


def read(path: Path) -> ModelCard:
    """Read a card. Raises ModelError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ModelError(f"{path} is no model card: it is larger than {MAX_BYTES} bytes")
        card = msgspec.json.decode(raw, type=ModelCard)
    except OSError as error:
        raise ModelError(f"the model card {path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no model card: {error}") from error
    if card.format != FORMAT:
        raise ModelError(f"{path} is a model card of another version: make it again with mooncake-zmq model card")
    check_spec(card.spec)
    return card


def of_prepared(path: Path) -> ModelCard:
    """Return the card of a prepared directory, or of "toy". Raises ModelError."""
    from mooncake_zmq.engine import (  # a process that only reads a card would start slowly with them
        prepared_files,
        tokenizer,
        toy,
    )

    spec = toy.TOY_SPEC if str(path) == "toy" else prepared_files.read_spec(path)
    return ModelCard(spec=spec, tokenizer=tokenizer.fingerprint(path))


def export(prepared: Path, directory: Path) -> Path:
    """Write a prepared model's card and, beside it, the tokenizer that a gateway needs; returns the card. Raises ModelError."""
    from mooncake_zmq.engine import tokenizer

    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (tokenizer.VOCABULARY_FILE, tokenizer.CONVERSATION_FILE):
            if (prepared / name).exists():
                shutil.copyfile(prepared / name, directory / name)
        (directory / CARD_FILE).write_bytes(encode(of_prepared(prepared)))
    except OSError as error:
        raise ModelError(f"{error.filename or directory} cannot be written: {error.strerror or error}") from error
    return directory / CARD_FILE
