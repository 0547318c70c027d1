"""Run by path in a Python that has vLLM and Transformers: writes a small model of random weights with several kinds of layers.

argv: the kind, and the directory, in which `tiny_llama.write_model` has written a tokenizer.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def states_and_full(words: dict[str, int]) -> PreTrainedModel:
    """Return a Qwen3-Next; its states have about as many bytes as the keys and values of 32 tokens."""
    layers = ["linear_attention", "full_attention"] * 2
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    states = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    kinds = {"num_hidden_layers": len(layers), "layer_types": layers, "head_dim": 128}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**words, **SIZES, **kinds, **experts, **states)).to(torch.bfloat16)


def windows_and_full(words: dict[str, int]) -> PreTrainedModel:
    """Return a Gemma 3, whose five layers with a window are as many groups as its one with full attention."""
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    kinds = {"num_hidden_layers": len(layers), "layer_types": layers, "head_dim": 32, "sliding_window": 64}
    return Gemma3ForCausalLM(Gemma3TextConfig(**words, **SIZES, **kinds, query_pre_attn_scalar=32))


def latents(words: dict[str, int]) -> PreTrainedModel:
    """Return a DeepSeek-V2 without experts; its keys and values are latents of the sizes that vLLM's kernels for CPUs have."""
    heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "kv_lora_rank": 512, "q_lora_rank": None}
    config = DeepseekV2Config(
        **words, **SIZES | {"num_key_value_heads": 4}, num_hidden_layers=2, first_k_dense_replace=2, **heads
    )
    return DeepseekV2ForCausalLM(config).to(torch.bfloat16)


KINDS = {"latents": (latents, 1.0), "states and full": (states_and_full, 0.6), "windows and full": (windows_and_full, 1.5)}
"""Each with how large its weights are: with larger ones the roundings of 16 bits grow from layer to layer."""


def main(kind: str, directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    torch.manual_seed(0)
    build, scale = KINDS[kind]
    model = build({name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() in (2, 3):
                parameter.normal_(std=scale / parameter.shape[-1] ** 0.5)
        if model.config.tie_word_embeddings:  # or each token is the one before it
            model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
