"""A model directory without weights, of a kind that our own engine does not know; for vLLMs and their stand-ins."""

import json
from pathlib import Path
from typing import Any

from mooncake_zmq.engine.gguf_vocabulary import byte_level_bpe

VOCABULARY = 99


def write_model(directory: Path, **config: Any) -> Path:
    """A model directory without weights, of a kind that our own engine does not know."""
    directory.mkdir(parents=True)
    letters = sorted(chr(code) for code in range(33, 127))
    tokens = [*letters, "Ġ", "th", "tt", "<s>", "</s>"]
    byte_level_bpe(tokens=tokens, merges=[("t", "h"), ("t", "t")], kinds=[1] * 97 + [3] * 2, pre="gpt-2").save(
        str(directory / "tokenizer.json")
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    whole = {
        "model_type": "strange",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "eos_token_id": VOCABULARY - 1,
    }
    (directory / "config.json").write_text(json.dumps(whole | config))
    return directory
