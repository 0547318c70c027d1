"""A GGUF file, of any quantization that the `gguf` package can undo. Mistral's files call themselves llama."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import gguf_vocabulary, tokenizer
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices.quantized import Quantized
from mooncake_zmq.engine.sources.gguf_blocks import split
from mooncake_zmq.engine.sources.rope import divided_frequencies, scaled_frequencies
from mooncake_zmq.engine.sources.source import SUPPORTED, StoredTensor, check_tensors
from mooncake_zmq.engine.spec import ModelSpec, check_spec

_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
_SCALINGS = {"none": "default", "linear": "linear"}  # GGUF's names; llama3's is carried as factors

_END_NAMES = ("endoftext", "end_of_text", "im_end", "eot_id", "eom_id", "end", "fim_pad", "repo_name", "file_sep")
_END_TEXTS = {"<end_of_turn>", *(f"<|{name}|>" for name in _END_NAMES)}
"""Tokens that end an answer by their texts, as in llama.cpp: the metadata names one of a model's several."""

_Item = TypeVar("_Item", bound=np.generic)
T = TypeVar("T", int, float, bool, str, list[Any])


class GgufSource:
    """Maps the file and reads its metadata; refuses what the engine would compute differently."""

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = _open(path)
        self._fields: dict[str, Any] = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.stored: Mapping[str, StoredTensor] = {
            name: StoredTensor(tuple(map(int, reversed(tensor.shape))), tensor.tensor_type.name, int(tensor.n_bytes))
            for name, tensor in self._tensors.items()
        }
        self._architecture = self._field("general.architecture", str)
        if self._architecture not in _ARCHITECTURES or self._hyper("expert_count", int, 0):
            experts = " with experts" if self._architecture in _ARCHITECTURES else ""
            raise ModelError(f"{path}: architecture {self._architecture!r}{experts} is not supported; supported is {SUPPORTED}")
        parts = self._field("split.count", int, 1)
        if parts > 1:
            raise ModelError(f"{path} is one of {parts} parts of a model, which are not supported: merge them into one file")
        self.spec = self._read_spec()
        self._inv_freq = self._read_frequencies()
        check_tensors(str(path), self.spec, self.stored, _stored_name, _readable_kinds(), self._is_redundant)
        self._vocabulary = self._field("tokenizer.ggml.model", str), self._field("tokenizer.ggml.pre", str, "default")
        gguf_vocabulary.check(*self._vocabulary)

    def _field(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return one metadata value of the wanted type; without a default it must be there."""
        field = self._fields.get(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self._path} lacks the metadata field {key}")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError, TypeError) as error:  # UnicodeDecodeError is a ValueError
            raise ModelError(f"{self._path}: the metadata field {key} is damaged: {error}") from error
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind and not isinstance(value, kind):
            raise ModelError(f"{self._path}: the metadata field {key} makes no sense: {value!r}"[:300])
        return value

    def _hyper(self, key: str, kind: type[T], default: T | None = None) -> T:
        return self._field(f"{self._architecture}.{key}", kind, default)

    def _texts(self, key: str) -> list[str]:
        texts = self._field(key, list)
        if not all(isinstance(text, str) for text in texts):
            raise ModelError(f"{self._path}: the metadata field {key} is no list of texts")
        return texts

    def _read_spec(self) -> ModelSpec:
        heads, hidden = self._hyper("attention.head_count", int), self._hyper("embedding_length", int)
        context, window = self._hyper("context_length", int), self._hyper("attention.sliding_window", int, 0)
        head_dim = self._hyper("attention.key_length", int, hidden // heads if heads else 0)
        rotated = self._hyper("rope.dimension_count", int, head_dim)
        if rotated != head_dim or self._hyper("attention.value_length", int, head_dim) != head_dim:
            raise ModelError(f"{self._path}: RoPE or values of other than {head_dim} dimensions a head are not supported")
        tokens = self._texts("tokenizer.ggml.tokens")
        stop_ids = {self._field(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot", "eom")}
        stop_ids |= {token for token, text in enumerate(tokens) if text in _END_TEXTS}
        bos_id = self._field("tokenizer.ggml.bos_token_id", int, -1)
        # As in llama.cpp: a factor without a type is linear, and 0 is none.
        scaling = self._hyper("rope.scaling.type", str, "none" if self._rope_factor() in (0.0, 1.0) else "linear")
        if _ROPE_FACTORS in self.stored and scaling not in ("none", "llama3"):
            raise ModelError(f"{self._path}: RoPE scaling {scaling!r} with {_ROPE_FACTORS} is not supported")
        vocab_size = len(tokens)
        if max(bos_id, *stop_ids) >= vocab_size:
            raise ModelError(f"{self._path}: a special token lies outside its vocabulary of {vocab_size}")
        spec = ModelSpec(
            name=_printable(self._field("general.name", str, self._path.stem)),
            layers=self._hyper("block_count", int),
            hidden=hidden,
            heads=heads,
            kv_heads=self._hyper("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            ffn=self._hyper("feed_forward_length", int),
            vocab_size=vocab_size,
            max_positions=min(context, window or context),
            rope_theta=self._hyper("rope.freq_base", float, 10000.0),
            norm_eps=self._hyper("attention.layer_norm_rms_epsilon", float),
            tied=_NAMES["head"] not in self.stored,
            eos_ids=tuple(sorted(token for token in stop_ids if token >= 0)),
            bos_id=bos_id if bos_id >= 0 else None,
            fingerprint="",
            family=self._architecture,
            rope_scaling="llama3" if _ROPE_FACTORS in self.stored else _SCALINGS.get(scaling, scaling),
            sliding_window=window or None,
        )
        check_spec(spec)
        return spec

    def _read_frequencies(self) -> NDArray[np.float32]:
        if _ROPE_FACTORS in self.stored:
            return divided_frequencies(self.spec, self._read(_ROPE_FACTORS))
        return scaled_frequencies(self.spec, {"factor": self._rope_factor()})

    def _rope_factor(self) -> float:
        return self._hyper("rope.scaling.factor", float, self._hyper("rope.scale_linear", float, 0.0))

    def _is_redundant(self, name: str) -> bool:
        return name == _ROPE_FACTORS

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "inv_freq":
            return self._inv_freq
        return self._in_order(name, self._read(_stored_name(name)))

    def quantized(self, name: str) -> Quantized | None:
        tensor = self._tensors[_stored_name(name)]
        found = split(tensor.data, tensor.tensor_type)
        return found and found.map_rows(functools.partial(self._in_order, name))

    def _in_order(self, name: str, rows: NDArray[_Item]) -> NDArray[_Item]:
        part = name.rpartition(".")[2]
        if self._architecture == "llama" and part in ("q", "k"):
            return _unpermute(rows, self.spec.heads if part == "q" else self.spec.kv_heads)
        return rows

    def _read(self, stored_name: str) -> NDArray[np.float32]:
        tensor = self._tensors[stored_name]
        try:
            return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except (NotImplementedError, ValueError) as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self._path}: {stored_name} is of type {kind}, which cannot be read: {error}") from error

    def read_tokenizer(self) -> tokenizer.TokenizerParts:
        model, pre = self._vocabulary
        tokens = self._texts("tokenizer.ggml.tokens")
        kinds = self._field("tokenizer.ggml.token_type", list)
        if len(kinds) != len(tokens):
            raise ModelError(f"{self._path}: its {len(tokens)} tokens have {len(kinds)} types")
        if not all(isinstance(kind, int) for kind in kinds):
            raise ModelError(f"{self._path}: its tokens' types are no numbers")
        if model == "llama":
            vocabulary = gguf_vocabulary.sentencepiece_bpe(
                tokens=tokens,
                scores=self._field("tokenizer.ggml.scores", list),
                kinds=kinds,
                space_prefix=self._field("tokenizer.ggml.add_space_prefix", bool, True),
            )
        else:
            merges = [merge.partition(" ")[::2] for merge in self._texts("tokenizer.ggml.merges")]
            vocabulary = gguf_vocabulary.byte_level_bpe(tokens=tokens, merges=merges, kinds=kinds, pre=pre)
        bos_id, eos_id = self.spec.bos_id, self._field("tokenizer.ggml.eos_token_id", int, -1)
        conversation = tokenizer.Conversation(
            template=self._field("tokenizer.chat_template", str, "") or None,
            eos_ids=self.spec.eos_ids,
            bos_id=bos_id,
            bos_token=tokens[bos_id] if bos_id is not None else "",
            eos_token=tokens[eos_id] if eos_id >= 0 else "",
            add_bos=self._field("tokenizer.ggml.add_bos_token", bool, gguf_vocabulary.adds_bos(model, pre)),
        )
        kind = "GGUF, SentencePiece BPE" if model == "llama" else f"GGUF, byte-level BPE ({pre})"
        return tokenizer.TokenizerParts(kind, vocabulary, conversation)


class _BoundedReader(gguf.GGUFReader):  # type: ignore[misc]  # the package is untyped
    """The package's reader with checked lengths: a damaged length can make the original loop for ever at the end of the
    file."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"{len(self.data)} bytes of at least {end}")
        return super()._get(offset, dtype, count, override_order)


def _open(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}")
        with np.errstate(all="raise"):
            reader = _BoundedReader(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, ArithmeticError, TypeError, MemoryError, RecursionError) as error:
        raise ModelError(f"{path} is truncated or damaged; obtain it again ({error})") from error
    if reader.endianess == gguf.GGUFEndian.BIG:
        raise ModelError(f"{path} is big-endian, which is not supported: obtain a little-endian file")
    _check_places(path, reader)
    if not reader.tensors:
        raise ModelError(f"{path} is truncated or damaged; obtain it again (it holds no tensors)")
    return reader


def _check_places(path: Path, reader: Any) -> None:
    """Check the places of tensors: a damaged table may still name bytes of the file that belong to another tensor or begin
    elsewhere."""
    places = sorted((int(tensor.data_offset), int(tensor.n_bytes), tensor.name) for tensor in reader.tensors)
    end = before = 0
    for place, size, name in places:
        if (place - reader.data_offset) % reader.alignment:
            problem = f"its tensor {_printable(name)} begins at no multiple of {reader.alignment} bytes"
        elif place < end:
            problem = f"its tensors {_printable(str(before))} and {_printable(name)} overlap"
        else:
            end, before = place + size, name
            continue
        raise ModelError(f"{path} is truncated or damaged; obtain it again ({problem})")


@functools.cache
def _readable_kinds() -> frozenset[str]:
    """Return the names of the types that the package can turn into float32, found by trying one block of each."""
    kinds = set()
    for kind, (_, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
        try:
            with np.errstate(all="ignore"):
                gguf.quants.dequantize(np.zeros((1, block_bytes), dtype=dtype), kind)
        except (NotImplementedError, ValueError):
            continue
        kinds.add(kind.name)
    return frozenset(kinds)


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name[:200])


def _stored_name(name: str) -> str:
    layer, _, part = name.rpartition(".")
    return f"blk.{layer}.{_NAMES[part]}" if layer else _NAMES[part]


def _unpermute(weights: NDArray[_Item], heads: int) -> NDArray[_Item]:
    """Return the rows of Q and K, which Llama's files store as interleaved rotation pairs (0, d/2, 1, d/2+1, ..), back in
    halves."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
