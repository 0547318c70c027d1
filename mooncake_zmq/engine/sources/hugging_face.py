"""A directory in the form that `save_pretrained` writes: config.json, *.safetensors in one or many shards, tokenizer.json."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import tokenizer
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices.quantized import Quantized
from mooncake_zmq.engine.sources.directory import ModelDirectory
from mooncake_zmq.engine.sources.rope import scaled_frequencies
from mooncake_zmq.engine.sources.safetensors_file import READABLE, SafetensorsFile
from mooncake_zmq.engine.sources.source import SUPPORTED, StoredTensor, check_tensors
from mooncake_zmq.engine.spec import FAMILIES, ModelSpec, check_spec

_NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # buffers that old files carry
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class HuggingFaceSource:
    """Opens config.json and the headers of all shards; refuses what the engine would compute differently."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files_beside = ModelDirectory(directory)
        self._config = self._files_beside.config
        self._rope = self._rope_settings()
        self._check_architecture()
        self._files = self._map_tensors()
        self.stored: Mapping[str, StoredTensor] = {name: file.tensors[name] for name, file in self._files.items()}
        self.spec = self._read_spec()
        self._inv_freq = scaled_frequencies(self.spec, self._rope)
        check_tensors(str(directory), self.spec, self.stored, stored_name, READABLE, self._is_redundant)
        self._files_beside.check_tokenizer()

    def _check_architecture(self) -> None:
        config, kind = self._config, self._config.get("model_type")
        architectures = config.get("architectures")
        variants = [
            f"{key} = {config[key]!r}" for key in ("attention_bias", "mlp_bias", "quantization_config") if config.get(key)
        ]
        if config.get("hidden_act", "silu") != "silu":
            variants.append(f"hidden_act = {config['hidden_act']!r}")
        variants += self._unknown_rope()
        if isinstance(architectures, list) and not all(str(name).endswith("ForCausalLM") for name in architectures):
            variants.append(f"architectures = {architectures}")
        layer_types = config.get("layer_types") or ()
        if not isinstance(layer_types, list | tuple) or not {str(each) for each in layer_types} <= _LAYER_TYPES:
            variants.append("layer_types beyond full and sliding attention")
        if not isinstance(kind, str) or kind not in FAMILIES or variants:
            what = f"architecture {kind!r}" + "".join(f" with {variant}" for variant in variants)
            raise ModelError(f"{self._directory}: {what[:300]} is not supported; supported is {SUPPORTED}")

    def _map_tensors(self) -> dict[str, SafetensorsFile]:
        """Return the file of each tensor: those that the index lists, or else model.safetensors, or else all *.safetensors."""
        weight_map = self._files_beside.read_json("model.safetensors.index.json", optional=True).get("weight_map")
        listed = _file_names(self._directory, weight_map)
        names = listed or sorted(path.name for path in self._directory.glob("*.safetensors"))
        if not listed and "model.safetensors" in names:
            names = ["model.safetensors"]
        if not names:
            raise ModelError(f"{self._directory} has a config.json but no *.safetensors: the weights are missing")
        missing = [name for name in names if not (self._directory / name).exists()]
        if missing:
            raise ModelError(f"{self._directory} lacks {len(missing)} of its {len(names)} files of weights: {missing[0]}")
        found: dict[str, SafetensorsFile] = {}
        owner: dict[str, str] = {}
        for name in names:
            file = SafetensorsFile(self._directory / name)
            twice = next((tensor for tensor in file.tensors if tensor in found), None)
            if twice is not None:
                raise ModelError(f"{self._directory}: tensor {twice} is both in {owner[twice]} and in {name}")
            found |= dict.fromkeys(file.tensors, file)
            owner |= dict.fromkeys(file.tensors, name)
        for tensor, name in (weight_map or {}).items():
            if owner.get(tensor) != name:
                raise ModelError(f"{self._directory}: {name} lacks the tensor {tensor}, which the index places there")
        return found

    def _read_spec(self) -> ModelSpec:
        config = self._config
        window = self._sliding_window()
        try:
            heads, hidden, context = (config[key] for key in ("num_attention_heads", "hidden_size", "max_position_embeddings"))
            spec = ModelSpec(
                name=self._directory.resolve().name,
                layers=config["num_hidden_layers"],
                hidden=hidden,
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                ffn=config["intermediate_size"],
                vocab_size=config["vocab_size"],
                max_positions=min(context, window or context),
                rope_theta=float(self._rope.get("rope_theta") or 10000.0),
                norm_eps=float(config["rms_norm_eps"]),
                tied=bool(config.get("tie_word_embeddings", "lm_head.weight" not in self._files)),
                eos_ids=self._files_beside.eos_ids(),
                bos_id=config.get("bos_token_id"),
                fingerprint="",
                family=config["model_type"],
                rope_scaling=self._rope["rope_type"],
                sliding_window=window,
            )
        except KeyError as error:
            raise ModelError(f"{self._directory}/config.json lacks {error}") from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"{self._directory}/config.json makes no sense: {error}") from error
        check_spec(spec)
        return spec

    def _rope_settings(self) -> dict[str, Any]:
        """Return RoPE's settings in one form: newer configs hold all in rope_parameters, older ones some beside
        rope_scaling."""
        config = self._config
        nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise ModelError(f"{self._directory}/config.json makes no sense: its RoPE settings are {nested!r}"[:300])
        kind = nested.get("rope_type") or nested.get("type") or ("without a type" if nested.get("factor") else "default")
        outer = {key: config[key] for key in ("rope_theta", "original_max_position_embeddings") if key in config}
        return outer | nested | {"rope_type": str(kind)}

    def _unknown_rope(self) -> list[str]:
        """Return the RoPE settings that rotate other dimensions, differ from layer to layer or contradict each other."""
        given, scaling = self._config.get("rope_parameters"), self._config.get("rope_scaling")
        unknown = [f"RoPE settings of {key!r} alone" for key, value in self._rope.items() if isinstance(value, dict)]
        if self._rope.get("partial_rotary_factor", 1) != 1 or self._config.get("partial_rotary_factor", 1) != 1:
            unknown.append("partial_rotary_factor")
        stated = scaling if isinstance(scaling, dict) else {"rope_scaling": scaling}
        whole = {"rope_type": "default"} | (given or {})
        if given and scaling and any(whole.get({"type": "rope_type"}.get(key, key)) != stated[key] for key in stated):
            unknown.append("a rope_scaling other than its rope_parameters")
        return unknown

    def _sliding_window(self) -> int | None:
        """Return the window, if used: Qwen's config has one even where it is switched off."""
        config = self._config
        window = config.get("sliding_window")
        if window is None or not config.get("use_sliding_window", config["model_type"] == "mistral"):
            return None
        if type(window) is not int or window < 1:
            raise ModelError(f"{self._directory}/config.json makes no sense: sliding_window is {window!r}"[:300])
        return window

    def _is_redundant(self, name: str) -> bool:
        return bool(_COMPUTED.fullmatch(name)) or (self.spec.tied and name == _NAMES["head"])

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "inv_freq":
            return self._inv_freq
        stored = stored_name(name)
        return self._files[stored].read(stored)

    def quantized(self, name: str) -> Quantized | None:
        return None

    def read_tokenizer(self) -> tokenizer.TokenizerParts:
        return self._files_beside.read_tokenizer(self.spec.eos_ids)


def stored_name(name: str) -> str:
    """Return the name of a canonical tensor in these files."""
    layer, _, part = name.rpartition(".")
    return f"model.layers.{layer}.{_NAMES[part]}" if layer else _NAMES[part]


def _file_names(directory: Path, weight_map: Any) -> list[str]:
    """Return the files that an index lists, each of which must lie in the directory itself."""
    if weight_map is None:
        return []
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{directory}/model.safetensors.index.json makes no sense: its weight_map is no map of names")
    names = sorted(set(weight_map.values()))
    outside = next((name for name in names if Path(name).name != name or not name.endswith(".safetensors")), None)
    if outside is not None:
        raise ModelError(f"{directory}/model.safetensors.index.json names what is no file of weights in it: {outside!r}")
    return names
