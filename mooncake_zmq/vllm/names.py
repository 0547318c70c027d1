"""Names of a vLLM engine's KV blocks in the pool. `TABLE` has everything that decides a block's bytes, and which part of its
name covers that: two blocks that differ in any row never share a name. PURE.

    name = PREFIX vllm / DIGEST / RANK[.GROUP] / KEY of the block
           \\----------- prefix -----------/

What changes only the rounding (kernels, compilation, the shape of a batch) is in no name, except for attention backends, as
they also order the bytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from typing import Any, Literal

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key, extend_keys, namespace, pack_tokens, root_of_salt
from mooncake_zmq.kv.codec import CODES_VERSION, Codec
from mooncake_zmq.kv.image_keys import digest_of, keys_with_images, shifted

NAMING = 3
"""Version of what names cover; a higher one makes all stored blocks misses."""
CHAIN = "vllm"
"""Part of the root of chains that no gateway of ours has begun."""
PLACES = frozenset({"_name_or_path", "transformers_version"})
"""Settings of a model that only say where they are from."""
WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods of speculation that guess by text alone."""
CONTENT_DIGITS = frozenset({64, 128})
"""Lengths of vLLM's own digests of images, in hexadecimal."""

Part = Literal["DIGEST", "RANK", "KEY"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that decides a block's bytes. `part`: of the name. `where`: paths in `Engine` for the DIGEST, in `Adapter` for
    an adapter; for the rest, who has it in vLLM."""

    part: Part
    what: str
    why: str
    where: tuple[str, ...]


ADAPTER = Row(
    "KEY",
    "LoRA adapter",
    "it adds to every K and V, and may be trained again under its name and path",
    (
        "content",
        "config.lora_dtype",
        "config.target_modules",
        "config.enable_tower_connector_lora",
        "config.enable_mixed_moe_lora_format",
        "request.is_3d_lora_weight",
    ),
)
TABLE = (
    Row("DIGEST", "naming", "our releases may cover other things", ("naming",)),
    Row("DIGEST", "version of vLLM", "releases change models and the order of bytes", ("version",)),
    Row(
        "DIGEST",
        "weights",
        "K and V are made by them; the other settings choose among the files",
        (
            "weights",
            "config.load_config.load_format",
            "config.load_config.model_loader_extra_config",
            "config.load_config.ignore_patterns",
        ),
    ),
    Row(
        "DIGEST",
        "settings of the model",
        "RoPE and its scaling, windows, norms, as overridden on the command line",
        ("config.model_config.hf_config", "config.model_config.hf_text_config"),
    ),
    Row(
        "DIGEST",
        "longest context",
        "LongRoPE has its long or short factors by it, Llama 4 its attention's temperature",
        ("max_model_len",),
    ),
    Row(
        "DIGEST",
        "implementation of the model",
        "another class, or other windows, compute other values",
        (
            "config.model_config.trust_remote_code",
            "config.model_config.code_revision",
            "config.model_config.model_impl",
            "config.model_config.model_class_overrides",
            "config.model_config.disable_sliding_window",
            "config.additional_config",
        ),
    ),
    Row("DIGEST", "data type of the model", "values are rounded to it", ("config.model_config.dtype",)),
    Row(
        "DIGEST",
        "quantization of the weights",
        "weights may be quantized while they are loaded",
        ("config.model_config.quantization", "config.model_config.quantization_config"),
    ),
    Row(
        "DIGEST",
        "data type of the KV",
        "the bytes are in it, by layer",
        ("config.cache_config.cache_dtype", "config.cache_config.kv_cache_dtype_skip_layers", "kv_dtypes"),
    ),
    Row("DIGEST", "scales of quantized KV", "blocks do not carry them", ("kv_scales",)),
    Row(
        "DIGEST",
        "mode of attention",
        "what attention computes is in the next layer's K and V",
        (
            "config.attention_config.use_non_causal",
            "config.attention_config.use_prefill_query_quantization",
            "config.attention_config.disable_flashinfer_q_quantization",
            "config.attention_config.indexer_kv_dtype",
        ),
    ),
    Row(
        "DIGEST",
        "images and sounds",
        "the same image is cut and encoded in another way",
        (
            "config.model_config.multimodal_config.language_model_only",
            "config.model_config.multimodal_config.media_io_kwargs",
            "config.model_config.multimodal_config.mm_processor_kwargs",
            "config.model_config.multimodal_config.mm_device_do_normalize",
            "config.model_config.multimodal_config.mm_encoder_attn_dtype",
            "config.model_config.multimodal_config.video_pruning_rate",
            "config.model_config.multimodal_config.video_pruning_method",
        ),
    ),
    Row(
        "DIGEST",
        "speculation",
        "the draft's layers have their KV in the same blocks",
        (
            "draft_weights",
            "speculation.method",
            "speculation.parallel_drafting",
            "speculation.kv_cache_dtype",
            "speculation.draft_model_config.hf_config",
            "speculation.draft_model_config.dtype",
            "speculation.draft_model_config.quantization",
            "speculation.draft_model_config.max_model_len",
        ),
    ),
    Row("DIGEST", "device", "it orders the bytes", ("device",)),
    Row("DIGEST", "attention backends", "they order the bytes", ("backends",)),
    Row("DIGEST", "instruction sets", "they order the bytes on CPUs, which no shape shows", ("instruction_sets",)),
    Row("DIGEST", "layout of the KV", "it orders the bytes", ("cache.kv_cache_layout",)),
    Row("DIGEST", "tokens in a block", "a block is of so many", ("block_tokens",)),
    Row(
        "DIGEST",
        "ranks",
        "each has its own layers and heads",
        ("config.parallel_config.pipeline_parallel_size", "config.parallel_config.tensor_parallel_size"),
    ),
    Row("DIGEST", "layers", "a block holds them in this order and form", ("layers",)),
    Row("DIGEST", "KV cache groups", "a block holds the layers of one group", ("kv_groups",)),
    Row("RANK", "rank", "each has its own layers and heads", ("get_pp_group()", "get_tp_group()")),
    Row("RANK", "KV cache group", "each has its own layers", ("kv_cache_groups",)),
    Row("KEY", "tokens", "of the block and all before it", ("request.all_token_ids",)),
    Row("KEY", "salt", "tenants do not share; a gateway's salt is its chain's root", ("request.cache_salt",)),
    Row("KEY", "new weights", "after a reset of the cache the files no longer show the weights", ("reset_cache()",)),
    ADAPTER,
    Row("KEY", "images", "by content and place, as all images are the same tokens", ("request.mm_features",)),
    Row("KEY", "embeddings of a prompt", "vLLM's own hashes cover them", ("request.block_hashes",)),
)


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """One layer's bytes of a block. `shape`: first how many pieces a kernel cuts it into; `axes`: in the order of memory;
    `dtype`: of `stored_form`."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One rank of an engine, as the table reads it. `weights`, `draft_weights`: identities. `cpu`: PyTorch's instruction set
    where the KV is on a CPU. `config`, `cache`: vLLM's `VllmConfig` and `KVCacheConfig`. `attention`: vLLM's layers with KV;
    `layers`: their bytes."""

    version: str
    weights: str
    draft_weights: str
    device: str
    cpu: str
    config: Any
    cache: Any
    attention: Sequence[Any]
    layers: tuple[LayerOrder, ...]
    naming: int = NAMING

    @property
    def max_model_len(self) -> int | str:
        """The longest context by which the model was built. "auto": by its settings; vLLM shortens it after that."""
        model = self.config.model_config
        return "auto" if model.original_max_model_len == -1 else int(model.max_model_len)

    @property
    def block_tokens(self) -> int:
        return int(self.cache.kv_cache_groups[0].kv_cache_spec.block_size)

    @property
    def speculation(self) -> Any:
        return speculation(self.config)

    @property
    def backends(self) -> list[str]:
        return sorted({layer.get_attn_backend().get_name() for layer in self.attention})

    @property
    def instruction_sets(self) -> list[str]:
        return sorted({str(getattr(layer, "isa", "")) for layer in self.attention} | ({self.cpu} if self.cpu else set()))

    @property
    def kv_groups(self) -> list[list[str]]:
        """The kind of each KV cache group and its layers."""
        return [[type(group.kv_cache_spec).__name__, *group.layer_names] for group in self.cache.kv_cache_groups]

    @property
    def kv_dtypes(self) -> list[str]:
        return [str(getattr(layer, "kv_cache_dtype", "")) for layer in self.attention]

    @property
    def kv_scales(self) -> list[list[float | None]]:
        scales = ("_q_scale_float", "_k_scale_float", "_v_scale_float")
        return [[getattr(layer, scale, None) for scale in scales] for layer in self.attention]

    @property
    def digest(self) -> str:
        """128 bits of SHA-256 over the table, in hexadecimal. Raises ValueError where vLLM lacks an attribute."""
        return _hashed({row.what: _values(row, self) for row in TABLE if row.part == "DIGEST"})

    def key_prefix(self, rank: str, prefix: str = "") -> str:
        """Return the prefix of the names of this rank's blocks. `prefix`: a tenant's namespace."""
        return f"{prefix}vllm/{self.digest}/{rank}/"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A request's LoRA adapter. `content`: digest of its files. `config`, `request`: vLLM's `LoRAConfig` and `LoRARequest`."""

    content: str
    config: Any
    request: Any

    @property
    def identity(self) -> str:
        """128 bits of SHA-256 over its row, in hexadecimal."""
        return _hashed(_values(ADAPTER, self))


def stored_form(dtype: str, codec: Codec | None) -> str:
    """Return how a layer's numbers are stored: in the type that they are in, or in a codec."""
    return dtype if codec is None else f"{dtype} as {codec.name} {CODES_VERSION}"


def speculation(config: Any) -> Any:
    """Return vLLM's `SpeculativeConfig` if its drafts may have KV of their own, else None."""
    found = config.speculative_config
    return None if found is None or found.method in WITHOUT_KV else found


def is_of_content(identifier: str) -> bool:
    """Return whether vLLM's identifier of an image, perhaps after an adapter's name, is a digest, not a client's own name."""
    digest = identifier.rpartition(":")[2]
    return len(digest) in CONTENT_DIGITS and set(digest) <= set("0123456789abcdef")


def chain_root(salt: str = "", anew: str = "", adapter: str = "") -> bytes:
    """Return the root of the keys of a request. `salt`: its `cache_salt`, which holds the root where a gateway of ours has
    hashed the prompt: the keys are then the gateway's. `anew`: not empty once earlier KV is invalid. `adapter`: the identity of
    its LoRA adapter."""
    root = root_of_salt(salt) or namespace(model="", layout=CHAIN, salt=salt)
    if adapter:
        root = namespace(model=root.hex(), layout=f"{CHAIN} adapter", salt=adapter)
    return root if not anew else namespace(model=root.hex(), layout=CHAIN, salt=anew)


def group_prefix(prefix: str, group: int) -> str:
    """Return the prefix of the names of a KV cache group's blocks; `prefix` is that of the rank, and of its first group."""
    return f"{prefix.removesuffix('/')}.{group}/" if group else prefix


def object_names(prefixes: Sequence[str], keys: Iterable[Key]) -> list[str]:
    """Return one name per prefix for each block, block after block."""
    return [prefix + key.hex() for key in keys for prefix in prefixes]


class BlockKeys:
    """The keys of one request's complete blocks, computed as its tokens become known."""

    def __init__(self, more: Callable[[bytes, int, int], list[Key]], root: bytes) -> None:
        """`more`: (key before, first block, stop block) -> keys of these blocks, which are complete."""
        self._more = more
        self._root = root
        self._keys: list[Key] = []

    def upto(self, count: int) -> list[Key]:
        """Return the first `count` keys."""
        made = len(self._keys)
        if made < count:
            self._keys += self._more(self._keys[-1] if made else self._root, made, count)
        return self._keys[:count]


def token_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> BlockKeys:
    """Return keys of plain text. `tokens` may grow."""

    def more(parent: bytes, first: int, stop: int) -> list[Key]:
        return extend_keys(parent, pack_tokens(tokens[first * block_tokens : stop * block_tokens]), block_tokens)

    return BlockKeys(more, root)


def image_keys(root: bytes, tokens: Sequence[int], block_tokens: int, images: Iterable[tuple[int, str]]) -> BlockKeys:
    """Return keys of text with images: the first token of each, in order, and vLLM's identifier, which is of its content.
    `tokens` may grow."""
    begins = [(at, digest_of(identifier.rpartition(":")[2])) for at, identifier in images]

    def more(parent: bytes, first: int, stop: int) -> list[Key]:
        own = pack_tokens(tokens[first * block_tokens : stop * block_tokens])
        return keys_with_images(parent, own, block_tokens, shifted(begins, first * block_tokens))

    return BlockKeys(more, root)


def derived_keys(root: bytes, hashes: Sequence[bytes]) -> BlockKeys:
    """Return keys of inputs that are more than text and images, derived from vLLM's own hashes of the blocks, which cover all
    input. `hashes` may grow."""

    def more(_parent: bytes, first: int, stop: int) -> list[Key]:
        return [hashlib.sha256(root + bytes(each)).digest()[:KEY_BYTES] for each in hashes[first:stop]]

    return BlockKeys(more, root)


def _hashed(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[: 2 * KEY_BYTES]


def _values(row: Row, source: object) -> dict[str, Any]:
    return {path: _plain(reduce(_attribute, path.split("."), source)) for path in row.where}


def _attribute(source: Any, name: str) -> Any:
    """Return an attribute, or None of None. A missing one must not pass for an unset one."""
    if source is None:
        return None
    try:
        return getattr(source, name)
    except AttributeError as error:
        raise ValueError(f"names need {name!r} of vLLM's {type(source).__name__}, which this version does not have") from error


def _plain(value: Any) -> Any:
    """Return the value as JSON has it, equal for equal values in any process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(getattr(value, "to_dict", None)):
        return _plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if key not in PLACES}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value)
