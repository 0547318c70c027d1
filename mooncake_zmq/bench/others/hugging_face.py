"""A model as a Hugging Face directory of float32 tensors, so that other engines run exactly our weights."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mooncake_zmq.engine.building import open_source
from mooncake_zmq.engine.download import obtain_default
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.sources.gguf_file import GgufSource
from mooncake_zmq.engine.sources.hugging_face import stored_name
from mooncake_zmq.engine.sources.rope import rope_frequencies
from mooncake_zmq.engine.sources.source import Source, expected_shapes

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hugging_face_directory(model: str, scratch: Path) -> Path:
    """Return `model`'s own directory if it is one, else one written below `scratch`, without a tokenizer. Raises ModelError."""
    own = Path(model).expanduser()
    if own.is_dir():
        return own
    scratch.mkdir(parents=True, exist_ok=True)
    if model == "default":
        source: Source = GgufSource(obtain_default(scratch))
    else:
        source = open_source(model)[0]
    directory = scratch / "model"
    directory.mkdir()
    _write(source, directory)
    return directory


def _write(source: Source, directory: Path) -> None:
    spec = source.spec
    if spec.family not in _ARCHITECTURES or not np.array_equal(source.tensor("inv_freq"), rope_frequencies(spec)):
        what = "scaled RoPE" if spec.family in _ARCHITECTURES else f"family {spec.family!r}"
        raise ModelError(f"{spec.name} has {what}, which is not written for other engines: give its Hugging Face directory")
    tensors = {}
    for name in expected_shapes(spec):
        if name != "inv_freq":
            tensors[stored_name(name)] = np.ascontiguousarray(source.tensor(name), dtype=np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "sliding_window": spec.sliding_window,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
