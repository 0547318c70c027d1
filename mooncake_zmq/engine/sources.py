"""Where weights come from: a GGUF file, a Hugging Face directory, or random numbers of a shape. Reads, never writes.

Every source gives the same: the shape, tensors as float32 [out, in] under canonical names, and a tokenizer.
Canonical names: embed, head (untied only), final_norm, inv_freq, and for each layer N
N.attn_norm, N.q, N.k, N.v, N.out, N.ffn_norm, N.gate, N.up, N.down.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import tokenizer
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.spec import ModelSpec

SUPPORTED = "the Llama architecture: RMSNorm, RoPE, grouped-query attention, SwiGLU, without biases or experts"


class Source(Protocol):
    """One model to convert. `spec` has no fingerprint yet."""

    spec: ModelSpec

    def tensor(self, name: str) -> NDArray[np.float32]: ...
    def write_tokenizer(self, directory: Path) -> None: ...


# ---------------------------------------------------------------------------------------------------------------- GGUF

_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "out": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_GGUF_CONTROL = 3  # token types that are special: control, user defined
_GGUF_USER_DEFINED = 4


class GgufSource:
    """A GGUF file, of any quantization that the `gguf` package can undo."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = self._open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        try:
            self.spec = self._read_spec()
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"{path}: its metadata make no sense: {error}") from error

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            with path.open("rb") as file:
                magic = file.read(4)
            if magic != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}")
            reader = gguf.GGUFReader(path)
            end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, MemoryError) as error:
            raise ModelError(f"{path} is truncated or damaged; obtain it again ({error})") from error
        if end == 0 or end > path.stat().st_size:
            raise ModelError(f"{path} is truncated: {path.stat().st_size} bytes of at least {end}; obtain it again")
        return reader

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self._path} lacks the metadata field {key}")
            return default
        try:
            return field.contents()
        except (ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
            raise ModelError(f"{self._path}: the metadata field {key} is damaged: {error}") from error

    def _read_spec(self) -> ModelSpec:
        architecture = self._field("general.architecture")
        if architecture != "llama" or self._field("llama.expert_count", 0):
            raise ModelError(f"{self._path}: architecture {architecture!r} is not supported; supported is {SUPPORTED}")
        heads, hidden = self._field("llama.attention.head_count"), self._field("llama.embedding_length")
        vocab_size = len(self._field("tokenizer.ggml.tokens"))
        stop_ids = [self._field("tokenizer.ggml.eos_token_id", -1), self._field("tokenizer.ggml.eot_token_id", -1)]
        bos_id = self._field("tokenizer.ggml.bos_token_id", -1)
        if max(bos_id, *stop_ids) >= vocab_size:
            raise ModelError(f"{self._path}: a special token lies outside its vocabulary of {vocab_size}")
        return ModelSpec(
            name=str(self._field("general.name", self._path.stem)),
            layers=self._field("llama.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._field("llama.attention.head_count_kv", heads),
            head_dim=self._field("llama.attention.key_length", hidden // heads),
            ffn=self._field("llama.feed_forward_length"),
            vocab_size=vocab_size,
            max_positions=self._field("llama.context_length"),
            rope_theta=float(self._field("llama.rope.freq_base", 10000.0)),
            norm_eps=float(self._field("llama.attention.layer_norm_rms_epsilon")),
            tied="output.weight" not in self._tensors,
            eos_ids=tuple(sorted({token for token in stop_ids if token >= 0})),
            bos_id=bos_id if bos_id >= 0 else None,
            fingerprint="",
        )

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "inv_freq":
            return self._inv_freq()
        layer, _, part = name.rpartition(".")
        stored_name = f"blk.{layer}.{_GGUF_NAMES[part]}" if layer else _GGUF_NAMES[part]
        tensor = self._tensors.get(stored_name)
        if tensor is None:
            raise ModelError(f"{self._path} lacks the tensor {stored_name}")
        try:
            weights: NDArray[np.float32] = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except (NotImplementedError, ValueError) as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self._path}: {stored_name} is of type {kind}, which cannot be read: {error}") from error
        heads = {"q": self.spec.heads, "k": self.spec.kv_heads}.get(part, 0)
        if heads and weights.shape == (heads * self.spec.head_dim, self.spec.hidden):  # any other shape is refused later
            return _unpermute(weights, heads)
        return weights

    def _inv_freq(self) -> NDArray[np.float32]:
        base = rope_frequencies(self.spec)
        factors = self._tensors.get("rope_freqs.weight")
        if factors is not None:
            return np.asarray(base / factors.data.astype(np.float32), dtype=np.float32)
        scaling = self._field("llama.rope.scaling.type", "none")
        if scaling == "linear":
            return np.asarray(base / self._field("llama.rope.scaling.factor"), dtype=np.float32)
        if scaling != "none":
            raise ModelError(f"{self._path}: RoPE scaling {scaling!r} is not supported (none, linear, llama3)")
        return base

    def write_tokenizer(self, directory: Path) -> None:
        kind = self._field("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelError(
                f"{self._path}: its tokenizer is {kind!r}; from GGUF only byte-level BPE ('gpt2') is supported: "
                "use the model's Hugging Face directory"
            )
        tokens = self._field("tokenizer.ggml.tokens")
        special = [kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED) for kind in self._field("tokenizer.ggml.token_type")]
        merges = [tuple(merge.split(" ", 1)) for merge in self._field("tokenizer.ggml.merges")]
        built = tokenizer.byte_level_bpe(
            tokens=tokens, merges=merges, special=special, pre=self._field("tokenizer.ggml.pre", "default")
        )
        built.save(str(directory / tokenizer.VOCABULARY_FILE))
        bos_id, eos_ids = self.spec.bos_id, self.spec.eos_ids
        conversation = tokenizer.Conversation(
            template=self._field("tokenizer.chat_template", "") or None,
            eos_ids=eos_ids,
            bos_id=bos_id,
            bos_token=tokens[bos_id] if bos_id is not None else "",
            eos_token=tokens[eos_ids[0]] if eos_ids else "",
            add_bos=bool(self._field("tokenizer.ggml.add_bos_token", False)),
        )
        tokenizer.write_conversation(directory, conversation)


def _unpermute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF stores the rows of Q and K as interleaved rotation pairs (0, d/2, 1, d/2+1, ..); back to halves."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


# -------------------------------------------------------------------------------------------------------- Hugging Face

_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


class HuggingFaceSource:
    """A directory as `save_pretrained` writes it: config.json, *.safetensors, tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = self._read_json("config.json")
        self._check_architecture()
        self._files = self._map_tensors()
        self.spec = self._read_spec()

    def _read_json(self, name: str, *, optional: bool = False) -> Any:
        path = self._directory / name
        if optional and not path.exists():
            return {}
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(fields, dict):
                raise ValueError("it does not hold a JSON object")
            return fields
        except FileNotFoundError as error:
            raise ModelError(f"{self._directory} is not a model directory: it has no {name}") from error
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    def _check_architecture(self) -> None:
        config = self._config
        kind = config.get("model_type")
        variant = next((key for key in ("attention_bias", "mlp_bias") if config.get(key)), None)
        if kind != "llama" or variant or config.get("hidden_act", "silu") != "silu":
            what = f"architecture {kind!r}" + (f" with {variant}" if variant else "")
            raise ModelError(f"{self._directory}: {what} is not supported; supported is {SUPPORTED}")

    def _map_tensors(self) -> dict[str, "SafetensorsFile"]:
        index = self._read_json("model.safetensors.index.json", optional=True)
        names = sorted(set(index.get("weight_map", {}).values())) or sorted(
            path.name for path in self._directory.glob("*.safetensors")
        )
        if not names:
            raise ModelError(f"{self._directory} has a config.json but no *.safetensors: the weights are missing")
        files = [SafetensorsFile(self._directory / name) for name in names]
        return {tensor: file for file in files for tensor in file.tensors}

    def _read_spec(self) -> ModelSpec:
        config = self._config
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            spec = ModelSpec(
                name=self._directory.resolve().name,
                layers=config["num_hidden_layers"],
                hidden=hidden,
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                ffn=config["intermediate_size"],
                vocab_size=config["vocab_size"],
                max_positions=config["max_position_embeddings"],
                rope_theta=float(self._rope("rope_theta", 10000.0)),
                norm_eps=float(config["rms_norm_eps"]),
                tied=bool(config.get("tie_word_embeddings", False)) or "lm_head.weight" not in self._files,
                eos_ids=self._eos_ids(),
                bos_id=config.get("bos_token_id"),
                fingerprint="",
            )
        except KeyError as error:
            raise ModelError(f"{self._directory}/config.json lacks {error}") from error
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ModelError(f"{self._directory}/config.json makes no sense: {error}") from error
        return spec

    def _rope(self, key: str, default: Any) -> Any:
        """A RoPE setting: newer configs nest it in rope_parameters, older ones do not."""
        return (self._config.get("rope_parameters") or {}).get(key) or self._config.get(key) or default

    def _eos_ids(self) -> tuple[int, ...]:
        generation = self._read_json("generation_config.json", optional=True)
        ids: set[int] = set()
        for value in (generation.get("eos_token_id"), self._config.get("eos_token_id")):
            ids |= set(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(sorted(ids))

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "inv_freq":
            return self._inv_freq()
        layer, _, part = name.rpartition(".")
        stored_name = f"model.layers.{layer}.{_HF_NAMES[part]}" if layer else _HF_NAMES[part]
        if stored_name not in self._files:
            raise ModelError(f"{self._directory} lacks the tensor {stored_name}")
        return self._files[stored_name].read(stored_name)

    def _inv_freq(self) -> NDArray[np.float32]:
        scaling = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        base = rope_frequencies(self.spec)
        match kind:
            case "default":
                return base
            case "linear":
                return np.asarray(base / scaling["factor"], dtype=np.float32)
            case "llama3":
                return _llama3_frequencies(base, scaling)
        raise ModelError(f"{self._directory}: RoPE scaling {kind!r} is not supported (default, linear, llama3)")

    def write_tokenizer(self, directory: Path) -> None:
        path = self._directory / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{self._directory} has no tokenizer.json")
        vocabulary = tokenizer.read_vocabulary(path)
        vocabulary.save(str(directory / tokenizer.VOCABULARY_FILE))
        settings = self._read_json("tokenizer_config.json", optional=True)
        bos_token, eos_token = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
        bos_id = vocabulary.token_to_id(bos_token) if bos_token else None
        start = vocabulary.encode("a", add_special_tokens=True).ids[:1]
        eos_ids = set(self.spec.eos_ids)
        eos_id = vocabulary.token_to_id(eos_token) if eos_token else None
        if eos_id is not None:
            eos_ids.add(eos_id)
        conversation = tokenizer.Conversation(
            template=self._chat_template(settings),
            eos_ids=tuple(sorted(eos_ids)),
            bos_id=bos_id,
            bos_token=bos_token,
            eos_token=eos_token,
            add_bos=bos_id is not None and start == [bos_id],
        )
        tokenizer.write_conversation(directory, conversation)

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        file = self._directory / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8")
        template = settings.get("chat_template")
        if isinstance(template, list):
            return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), None)
        return template


def _token_text(entry: Any) -> str:
    """tokenizer_config.json writes a special token as its text or as a record of it."""
    return str(entry.get("content", "")) if isinstance(entry, dict) else str(entry or "")


class SafetensorsFile:
    """Reads one file: 8 bytes of header length, a JSON header, then the tensors. NumPy has no bfloat16, hence by hand."""

    _READERS: dict[str, tuple[str, Callable[[NDArray[Any]], NDArray[Any]]]] = {
        "F32": ("<f4", lambda raw: raw),
        "F16": ("<f2", lambda raw: raw.astype(np.float32)),
        "BF16": ("<u2", lambda raw: (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)),
        "F64": ("<f8", lambda raw: raw.astype(np.float32)),
    }

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                if header_size > size - 8:
                    raise ModelError(f"{path} is truncated or not a safetensors file; obtain it again")
                header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
        self._start = 8 + header_size
        self.tensors: dict[str, Any] = header
        if self._start + end > size:
            raise ModelError(f"{path} is truncated: {size} bytes of {self._start + end}; obtain it again")

    def read(self, name: str) -> NDArray[np.float32]:
        entry = self.tensors[name]
        if entry["dtype"] not in self._READERS:
            raise ModelError(f"{self._path}: {name} has type {entry['dtype']}; supported are {', '.join(self._READERS)}")
        dtype, to_float32 = self._READERS[entry["dtype"]]
        begin, end = entry["data_offsets"]
        raw: NDArray[Any] = np.memmap(self._path, dtype=np.uint8, mode="r", offset=self._start + begin, shape=(end - begin,))
        try:
            return to_float32(raw.view(dtype).reshape(entry["shape"]))
        except ValueError as error:
            raise ModelError(f"{self._path}: the size of {name} does not fit its shape {entry['shape']}") from error


# --------------------------------------------------------------------------------------------------------------- dummy

_TINY = ModelSpec(
    name="dummy-tiny",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab_size=512,
    max_positions=4096,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied=False,
    eos_ids=(tokenizer.ByteVocabulary.END_ID,),
    bos_id=None,
    fingerprint="",
)
DUMMY_SHAPES = {
    "tiny": _TINY,
    "135m": replace(
        _TINY,
        name="dummy-135m",
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab_size=49152,
        max_positions=8192,
        rope_theta=100000.0,
        tied=True,
    ),
}
_DUMMY_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_size", "max_positions")


class DummySource:
    """Random weights of a named shape, or of a JSON object that changes the tiny one. Same shape, same weights."""

    def __init__(self, config: str) -> None:
        self.spec = DUMMY_SHAPES[config] if config in DUMMY_SHAPES else self._parse(config)
        spec = self.spec
        self._shapes = expected_shapes(spec)

    @staticmethod
    def _parse(config: str) -> ModelSpec:
        names = ", ".join(DUMMY_SHAPES)
        try:
            fields = json.loads(config)
        except ValueError as error:
            raise ModelError(f"dummy:{config}: give one of {names}, or a JSON object of sizes") from error
        allowed = (*_DUMMY_SIZES, "rope_theta", "norm_eps", "tied")
        unknown = sorted(set(fields) - set(allowed)) if isinstance(fields, dict) else [config]
        if unknown:
            raise ModelError(f"dummy: unknown {', '.join(unknown)}; known are {', '.join(allowed)}")
        spec = replace(_TINY, name="dummy", **fields)
        sizes = [getattr(spec, key) for key in _DUMMY_SIZES]
        numbers = [spec.rope_theta, spec.norm_eps]
        if not all(type(size) is int and size > 0 for size in sizes) or spec.vocab_size < 512:
            raise ModelError("dummy: sizes must be positive whole numbers and vocab_size at least 512")
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ModelError("dummy: rope_theta and norm_eps must be positive numbers")
        if spec.heads % spec.kv_heads or spec.head_dim % 2:
            raise ModelError("dummy: heads must be a multiple of kv_heads, and head_dim even")
        return spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "inv_freq":
            return rope_frequencies(self.spec)
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, dtype=np.float32)
        seed = int.from_bytes(name.encode(), "little") % 2**64
        values = np.random.Generator(np.random.Philox(key=seed)).standard_normal(shape, dtype=np.float32)
        return values / np.float32(math.sqrt(shape[1]))

    def write_tokenizer(self, directory: Path) -> None:
        tokenizer.write_byte_conversation(directory, self.spec.vocab_size)


# -------------------------------------------------------------------------------------------------------------- common


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a model of this spec has, by canonical name, in file order."""
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"inv_freq": (spec.head_dim // 2,)}
    shapes["embed"] = (spec.vocab_size, spec.hidden)
    for layer in range(spec.layers):
        shapes |= {
            f"{layer}.attn_norm": (spec.hidden,),
            f"{layer}.q": (query, spec.hidden),
            f"{layer}.k": (kv, spec.hidden),
            f"{layer}.v": (kv, spec.hidden),
            f"{layer}.out": (spec.hidden, query),
            f"{layer}.ffn_norm": (spec.hidden,),
            f"{layer}.gate": (spec.ffn, spec.hidden),
            f"{layer}.up": (spec.ffn, spec.hidden),
            f"{layer}.down": (spec.hidden, spec.ffn),
        }
    shapes["final_norm"] = (spec.hidden,)
    if not spec.tied:
        shapes["head"] = (spec.vocab_size, spec.hidden)
    return shapes


def rope_frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    """theta ** (-2i/d) in float32 steps, as the reference computes it: at position 3,000 one ulp is 2e-4 radians."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    return np.asarray(np.float32(1.0) / np.power(np.float32(spec.rope_theta), exponents), dtype=np.float32)


def _llama3_frequencies(base: NDArray[np.float32], scaling: dict[str, Any]) -> NDArray[np.float32]:
    """Llama 3.1's rule: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - smooth) * base / factor + smooth * base, dtype=np.float32)
