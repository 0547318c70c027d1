"""A model's directory in the form that `save_pretrained` writes, without its weights: config, tokenizer, chat template."""

import json
from pathlib import Path
from typing import Any

from mooncake_zmq.engine import tokenizer
from mooncake_zmq.engine.errors import ModelError


class ModelDirectory:
    """Reads the files; the caller checks their content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = self.read_json("config.json")

    def read_json(self, name: str, *, optional: bool = False) -> Any:
        """Return the object in a file; `optional`: an empty one where there is no such file. Raises ModelError."""
        path = self.path / name
        if optional and not path.exists():
            return {}
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise ValueError("it does not hold a JSON object")
            return fields
        except FileNotFoundError as error:
            raise ModelError(f"{self.path} is not a model directory: it has no {name}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    def check_tokenizer(self) -> None:
        """Raise ModelError where there is no tokenizer."""
        if not (self.path / "tokenizer.json").exists():
            raise ModelError(f"{self.path} has no tokenizer.json")

    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer."""
        generation = self.read_json("generation_config.json", optional=True)
        ids: set[int] = set()
        for value in (generation.get("eos_token_id"), self.config.get("eos_token_id")):
            ids |= set(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(sorted(ids))

    def read_tokenizer(self, eos_ids: tuple[int, ...]) -> tokenizer.TokenizerParts:
        """Return vocabulary and conversation; `eos_ids` of the model, beside the tokenizer's own. Raises ModelError."""
        vocabulary = tokenizer.read_vocabulary(self.path / "tokenizer.json")
        settings = self.read_json("tokenizer_config.json", optional=True)
        bos_token, eos_token = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
        with tokenizer.library_errors(f"{self.path}: its special tokens make no sense"):
            bos_id = vocabulary.token_to_id(bos_token) if bos_token else None
            start = vocabulary.encode("a", add_special_tokens=True).ids[:1]
            eos_id = vocabulary.token_to_id(eos_token) if eos_token else None
        conversation = tokenizer.Conversation(
            template=self._chat_template(settings),
            eos_ids=tuple(sorted({*eos_ids} | ({eos_id} if eos_id is not None else set()))),
            bos_id=bos_id,
            bos_token=bos_token,
            eos_token=eos_token,
            add_bos=bos_id is not None and start == [bos_id],
        )
        return tokenizer.TokenizerParts("tokenizer.json", vocabulary, conversation)

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        """Return chat_template.jinja, or else tokenizer_config.json's one template, or the default of its named ones."""
        file = self.path / "chat_template.jinja"
        try:
            template = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        if isinstance(template, list):
            named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{self.path}/tokenizer_config.json: its chat_template is no text")
        return template or None


def _token_text(entry: Any) -> str:
    """Return the text of a special token, which tokenizer_config.json writes as its text or as a record of it."""
    return str(entry.get("content", "")) if isinstance(entry, dict) else str(entry or "")
