"""Read a model's files as a node does, and small ones to begin with. Their authors may be hostile."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np

from mooncake_zmq.engine.gguf_vocabulary import byte_level_bpe, sentencepiece_bpe
from mooncake_zmq.engine.sources.gguf_file import GgufSource
from mooncake_zmq.engine.sources.hugging_face import HuggingFaceSource
from mooncake_zmq.engine.tokenizer import library_errors, read_vocabulary

_LAYER = {"attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_norm": (8,)}
_LAYER |= {"ffn_gate": (8, 8), "ffn_up": (8, 8), "ffn_down": (8, 8)}
_GGUF = {"token_embd": (3, 8), "output_norm": (8,), **{f"blk.0.{name}": shape for name, shape in _LAYER.items()}}
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_HUGGING_FACE = ("input_layernorm", *_ATTENTION, "post_attention_layernorm", *_MLP)
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 8,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": [1],
}
_SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED |= {"original_max_position_embeddings": 32}


def read_gguf(path: Path) -> None:
    """Read a file's description, its tokenizer and tensors of each kind. Raises ModelError."""
    source = GgufSource(path)
    source.read_tokenizer()
    for name in ("embed", "0.q", "0.k", "0.gate"):
        source.tensor(name)
        source.quantized(name)
    source.tensor("inv_freq")


def gguf_seeds(directory: Path) -> list[bytes]:
    """Return a file with a vocabulary of each kind."""
    return [_gguf(directory / "seed.gguf", vocabulary) for vocabulary in ("gpt2", "llama")]


def _gguf(path: Path, vocabulary: str) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(vocabulary)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    if vocabulary == "gpt2":
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([0.0, 0.0, -1.0])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, shape in _GGUF.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read_tokenizer(path: Path) -> None:
    """Read a tokenizer.json, and use it. Raises ModelError."""
    vocabulary = read_vocabulary(path)
    with library_errors("it cannot be used"):
        vocabulary.encode("ab é A<s>")
        vocabulary.decode([0, 1, 2, 9999])


def tokenizer_seeds() -> list[bytes]:
    """Return a tokenizer.json of each kind."""
    tokens, kinds = ["a", "b", "ab", "<s>", "<0x41>"], [1, 1, 1, 3, 6]
    bytes_first = byte_level_bpe(tokens=tokens[:4], merges=[("a", "b")], kinds=kinds[:4], pre="llama-bpe")
    pieces = sentencepiece_bpe(tokens=tokens, scores=[0.0, 0.0, -1.0, 0.0, 0.0], kinds=kinds, space_prefix=True)
    return [each.to_str().encode() for each in (bytes_first, pieces)]


def read_config(path: Path) -> HuggingFaceSource:
    """Read a directory with this config.json, and weights that go with the seeds'. Raises ModelError."""
    directory = path.parent / "model"
    if not directory.exists():
        directory.mkdir()
        _write_weights(directory)
    (directory / "config.json").write_bytes(path.read_bytes())
    return HuggingFaceSource(directory)


def config_seeds() -> list[bytes]:
    """Return a config.json of each kind."""
    windowed = {"model_type": "mistral", "sliding_window": 16, "layer_types": ["full_attention"]}
    return [json.dumps(_CONFIG | more).encode() for more in ({"rope_scaling": _SCALED}, windowed)]


def _write_weights(directory: Path) -> None:
    names = ("model.embed_tokens", "model.norm", *(f"model.layers.0.{name}" for name in _HUGGING_FACE))
    header, at = {}, 0
    for name, shape in zip(names, _GGUF.values(), strict=True):
        end = at + 4 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(at))
    (directory / "tokenizer.json").write_text("{}")
