"""The interface of every source of weights: a shape, tensors under canonical names, a tokenizer; and checks that they agree.

Canonical names: embed, head (untied only), final_norm, inv_freq, and for each layer N
N.attn_norm, N.q, N.k, N.v, N.out, N.ffn_norm, N.gate, N.up, N.down; in families that have them
N.q_bias, N.k_bias, N.v_bias and N.q_norm, N.k_norm. Rows of Q and K are in Hugging Face's order: halves, not pairs.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices.quantized import Quantized
from mooncake_zmq.engine.spec import FAMILIES, ModelSpec
from mooncake_zmq.engine.tokenizer import TokenizerParts

SUPPORTED = f"{', '.join(FAMILIES)}: RMSNorm, RoPE, grouped-query attention, SwiGLU, without experts"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file describes it: `shape` in elements, `kind` the file's name of its number format."""

    shape: tuple[int, ...]
    kind: str
    size_bytes: int


class Source(Protocol):
    """One model to convert. Opening it checks everything but the numbers; `spec` has no fingerprint yet.

    `stored` is empty where nothing is stored: random weights.
    """

    spec: ModelSpec

    @property
    def stored(self) -> Mapping[str, StoredTensor]: ...
    def tensor(self, name: str) -> NDArray[np.float32]: ...
    def quantized(self, name: str) -> Quantized | None:
        """Return `tensor` in the file's own integers; None where it has none, or they do not give exactly the same."""
        ...

    def read_tokenizer(self) -> TokenizerParts: ...


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a model of this spec has, by canonical name, in file order."""
    query, kv, family = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, FAMILIES[spec.family]
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
        if family.qkv_bias:
            shapes |= {f"{layer}.q_bias": (query,), f"{layer}.k_bias": (kv,), f"{layer}.v_bias": (kv,)}
        if family.qk_norm:
            shapes |= {f"{layer}.q_norm": (spec.head_dim,), f"{layer}.k_norm": (spec.head_dim,)}
    shapes["final_norm"] = (spec.hidden,)
    if not spec.tied:
        shapes["head"] = (spec.vocab_size, spec.hidden)
    return shapes


def check_tensors(
    where: str,
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor],
    stored_name: Callable[[str], str],
    readable: Container[str],
    ignored: Callable[[str], bool],
) -> None:
    """Raise ModelError unless the file holds exactly the tensors of `spec`, in formats that can be read.

    A tensor too many is a part of the model that this engine would leave out: refused as much as one too few.
    """
    expected = {stored_name(name): shape for name, shape in expected_shapes(spec).items() if name != "inv_freq"}
    for name, shape in expected.items():
        tensor = stored.get(name)
        if tensor is None:
            raise ModelError(f"{where} lacks the tensor {name}")
        if tensor.kind not in readable:
            raise ModelError(f"{where}: {name} is of type {tensor.kind}, which cannot be read")
        if tensor.shape != shape:
            raise ModelError(f"{where}: tensor {name} has shape {tensor.shape}, expected {shape}")
    unknown = [name for name in stored if name not in expected and not ignored(name)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelError(
            f"{where}: tensor {unknown[0]}{more} is not supported in family {spec.family!r}; supported is {SUPPORTED}"
        )
