"""Tiny models of every supported family: their configs, and weights that NumPy alone makes again from a seed.

Knows nothing of mooncake_zmq or transformers: make_families.py and the tests write the same weights from it.
"""

import hashlib

import numpy as np

PROMPT_TOKENS = 160
GREEDY_TOKENS = 16
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 80,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32}
# name -> (number format of the stored weights, config)
MODELS = {
    "llama2": ("F32", {"model_type": "llama", "num_key_value_heads": 4}),
    "llama2-linear": ("F32", {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama3": ("F16", {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}),
    "smollm2": ("BF16", {"model_type": "llama", "rope_theta": 100000.0, "tie_word_embeddings": True}),
    "mistral": ("BF16", {"model_type": "mistral", "sliding_window": None}),
    "mistral-window": ("F32", {"model_type": "mistral", "sliding_window": PROMPT_TOKENS + GREEDY_TOKENS}),
    "qwen2": ("F32", {"model_type": "qwen2", "tie_word_embeddings": True} | QWEN),
    "qwen2.5": ("BF16", {"model_type": "qwen2"} | QWEN),
    "qwen3": ("F32", {"model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True} | QWEN),
    "qwen3-untied": ("F16", {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 8} | QWEN),
}


def config(name: str) -> dict:
    """As a config.json of the time before transformers 5 writes it."""
    fields = SIZES | MODELS[name][1]
    if fields["model_type"] == "qwen2":  # whose configs have no head_dim
        del fields["head_dim"]
    return fields


def shapes(fields: dict) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocabulary = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    head = fields.get("head_dim") or hidden // fields["num_attention_heads"]
    query, kv = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
    found = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(fields["num_hidden_layers"]):
        parts = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if fields["model_type"] == "qwen2":
            parts |= {f"self_attn.{part}_proj.bias": (query if part == "q" else kv,) for part in "qkv"}
        if fields["model_type"] == "qwen3":
            parts |= {f"self_attn.{part}_norm.weight": (head,) for part in "qk"}
        found |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    if not fields["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def weights(name: str) -> dict[str, np.ndarray]:
    """float32, by Hugging Face's names, rounded to the model's number format; norms and biases far from trivial."""
    random = np.random.RandomState(sum(name.encode()))  # its stream is frozen, unlike a Generator's
    result = {}
    for tensor, shape in shapes(config(name)).items():
        values = random.standard_normal(shape)
        if tensor.endswith(".bias"):
            values *= 0.5
        elif len(shape) == 1:
            values = 1 + 0.3 * values
        else:
            values *= (2.0 if "q_proj" in tensor or "k_proj" in tensor else 1.0) / np.sqrt(shape[1])
        result[tensor] = rounded(values.astype(np.float32), MODELS[name][0])
    return result


def rounded(values: np.ndarray, number_format: str) -> np.ndarray:
    """To the nearest number of the format, as float32."""
    if number_format == "F16":
        return values.astype(np.float16).astype(np.float32)
    if number_format == "BF16":
        return ((values.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)
    return values


def tokens(name: str) -> np.ndarray:
    return np.random.RandomState(len(name)).randint(3, SIZES["vocab_size"], PROMPT_TOKENS).astype(np.int32)


def digest(name: str) -> str:
    """Tells whether a golden file belongs to these weights."""
    return hashlib.sha256(b"".join(values.tobytes() for values in weights(name).values())).hexdigest()[:16]
