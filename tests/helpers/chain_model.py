"""A Llama whose next token depends on the last one alone: a greedy answer is the text that its maker wants, token by token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mooncake_zmq.engine.gguf_vocabulary import byte_level_bpe

HEAD = 64
LETTERS = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ"]
START = "^"
"""The character with which a prompt ends whose answer is the first of the texts."""
TEMPLATE = "{% for m in messages %}{{ m.content or '' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}^"


def write_chain(directory: Path, answer: Sequence[str], *, template: str = TEMPLATE, positions: int = 8192) -> Path:
    """A model directory with weights. `answer`: the texts of its tokens, of which none may come twice; after a prompt that ends
    with `START` they follow each other, and then the end."""
    words = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in answer]
    tokens = [*LETTERS, *words, "<s>", "</s>"]
    assert len(set(tokens)) == len(tokens), "a text comes twice, or is a letter"
    directory.mkdir(parents=True)
    kinds = [1] * (len(tokens) - 2) + [3] * 2
    byte_level_bpe(tokens=tokens, merges=[], kinds=kinds, pre="gpt-2").save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    size = -(-len(tokens) // HEAD) * HEAD
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": HEAD,
        "num_hidden_layers": 1,
        "num_attention_heads": size // HEAD,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "vocab_size": len(tokens),
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(tokens, words, size), directory / "model.safetensors")
    return directory


def _weights(tokens: list[str], words: list[str], size: int) -> dict[str, NDArray[np.float32]]:
    """A token's embedding is a direction of its own, which only the head reads: it makes it the following token's."""
    following = {START: words[0], **dict(zip(words, [*words[1:], "</s>"], strict=True))}
    ids = {token: index for index, token in enumerate(tokens)}
    head = np.zeros((len(tokens), size), np.float32)
    for token, after in following.items():
        head[ids[after], ids[token]] = 1.0

    def still(*shape: int) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": np.eye(len(tokens), size, dtype=np.float32),
        "lm_head.weight": head,
        "model.norm.weight": np.ones(size, np.float32),
        f"{layer}input_layernorm.weight": np.ones(size, np.float32),
        f"{layer}post_attention_layernorm.weight": np.ones(size, np.float32),
        f"{layer}self_attn.q_proj.weight": still(size, size),
        f"{layer}self_attn.k_proj.weight": still(HEAD, size),
        f"{layer}self_attn.v_proj.weight": still(HEAD, size),
        f"{layer}self_attn.o_proj.weight": still(size, size),
        f"{layer}mlp.gate_proj.weight": still(HEAD, size),
        f"{layer}mlp.up_proj.weight": still(HEAD, size),
        f"{layer}mlp.down_proj.weight": still(size, HEAD),
    }
