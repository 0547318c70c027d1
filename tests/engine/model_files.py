"""Writes model files as the world does: Hugging Face directories in every number format, and GGUF."""

import json

import gguf
import numpy as np
import safetensors.numpy

from mooncake_zmq.engine.gguf_vocabulary import byte_level_bpe
from mooncake_zmq.engine.sources.hugging_face import stored_name
from mooncake_zmq.engine.sources.source import expected_shapes

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def stored(source):
    """(config, tensors) of a source, by Hugging Face's names."""
    spec = source.spec
    tensors = {}
    for name in expected_shapes(spec):
        if name != "inv_freq":
            tensors[stored_name(name)] = source.tensor(name)
    config = {
        "model_type": spec.family,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": 96,
        "eos_token_id": 97,
    }
    return config, tensors


def small_vocabulary():
    letters = sorted(chr(code) for code in range(33, 127))
    tokens = [*letters, "Ġ", "th", "<s>", "</s>"]
    return byte_level_bpe(tokens=tokens, merges=[("t", "h")], kinds=[1] * 96 + [3] * 2, pre="gpt-2")


def save_tensors(path, tensors, kind="F32"):
    """A safetensors file of float32 arrays cut to `kind`; bfloat16 by hand, since NumPy has none."""
    if kind != "BF16":
        dtype = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8}[kind]
        safetensors.numpy.save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, path)
        return
    header, body = {}, b""
    for name, tensor in tensors.items():
        cut = (np.ascontiguousarray(tensor).view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [len(body), len(body) + len(cut)]}
        body += cut
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def save_model_directory(directory, config, tensors, *, kind="F32", shards=1):
    directory.mkdir()
    names = sorted(tensors)
    files = {f"m-{shard}.safetensors": names[shard::shards] for shard in range(shards)}
    for file, part in files.items():
        save_tensors(directory / file, {name: tensors[name] for name in part}, kind)
    if shards > 1:
        weight_map = {name: file for file, part in files.items() for name in part}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    small_vocabulary().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0].content }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def add_byte_level_tokenizer(writer, vocab_size, *, pre="gpt-2", merge="t 1", ends=()):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    texts = ["t", "1", *(f"t{index}" for index in range(1, vocab_size - 2)), "</s>"]
    writer.add_token_list([dict(ends).get(token, text) for token, text in enumerate(texts)])
    writer.add_token_types([1] * (vocab_size - 1) + [3])
    writer.add_token_merges([merge])
    writer.add_eos_token_id(vocab_size - 1)


def save_gguf(
    path,
    config,
    tensors,
    *,
    architecture="",
    quantization=None,
    add_tokenizer=add_byte_level_tokenizer,
    fields=(),
    raw=({}, None),
):
    """`config` and `tensors` as in a Hugging Face directory.

    `fields` are further metadata, (key, value, type); `raw` further tensors as they are stored, and their type.
    """
    architecture = architecture or {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value, kind in fields:
        writer.add_key_value(key, value, kind)
    add_tokenizer(writer, config["vocab_size"])
    for name, tensor in tensors.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # as llama.cpp's converter does
            count = heads if "q_proj" in name else kv_heads
            tensor = tensor.reshape(count, 2, len(tensor) // count // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        stored = gguf_name(name)
        if quantization and tensor.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(tensor, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(stored, tensor)
    for name, tensor in raw[0].items():
        writer.add_tensor(gguf_name(name), tensor, raw_dtype=raw[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name):
    """Of a Hugging Face name; a name it does not know stays as it is."""
    parts = name.split(".")
    if name == "model.norm.weight":
        return "output_norm.weight"
    known = GGUF_NAMES.get(parts[-2]) if len(parts) > 1 else None
    if known is None:
        return name
    return f"blk.{parts[2]}.{known}.{parts[-1]}" if "layers" in parts else f"{known}.{parts[-1]}"
