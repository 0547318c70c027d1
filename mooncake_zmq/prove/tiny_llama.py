"""A Llama of two layers with random normal weights, as a Hugging Face directory: its tokens depend on all of its KV."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

VOCAB = 512
HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 128, 4, 2, 32, 256, 2
BLOCK_TOKENS = 32


def llama_config(vocabulary: int = VOCAB, positions: int = 4096, rope_theta: float = 10_000.0) -> dict[str, Any]:
    """Return the part of config.json that says its kind and sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def write_weights(directory: Path, vocabulary: int = VOCAB, seed: int = 0) -> None:
    """Write weights; those of different seeds differ in files of the same size."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(3 / np.sqrt(shape[-1]))

    tensors = {"model.embed_tokens.weight": normal(vocabulary, HIDDEN), "lm_head.weight": normal(vocabulary, HIDDEN)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        for name, shape in {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            tensors[f"{layer}{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_model(directory: Path, seed: int = 0, positions: int = 4096, rope_theta: float = 10_000.0) -> Path:
    """Write a model with a tokenizer of words, in the place of one that is there; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, seed=seed)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(llama_config(positions=positions, rope_theta=rope_theta) | ends))
    words = {"<bos>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
        )
    )
    return directory
