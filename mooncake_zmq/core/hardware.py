"""Named hardware: the costs of nodes that are not at hand, each with its source. PURE.

`a800-llama3-70b`: the paper's node, 8 A800 with LLaMA3-70B. Prefill: its polynomial, fitted to its times of 8k to 128k tokens.
Decode: its steps of batch 1 at 8k and at 128k tokens, 26.6 and 30.8 ms, and its growth with the batch, .765 + .0149 batch, read
off a figure and taken as relative to batch 1. KV of a token, host bus and network as the paper says; the SSD is assumed.

`h800-llama3-70b`: assumed from it, prefill by the ratio of dense 16-bit FLOPS, decode by that of memory bandwidths. Its network
is the paper's.
"""

from collections.abc import Mapping
from dataclasses import replace

from mooncake_zmq.core.costs import Costs

_STEP_8K_S, _STEP_128K_S = 26.6e-3, 30.8e-3
_CONTEXT_S = (_STEP_128K_S - _STEP_8K_S) / (120 * 1024)
_REQUEST_S = _STEP_8K_S * 0.0149 / (0.765 + 0.0149) - 8192 * _CONTEXT_S

_A800 = Costs(
    prefill_token_s=1.147e-4,
    prefill_square_s=7.181e-10,
    decode_step_s=_STEP_8K_S - _REQUEST_S - 8192 * _CONTEXT_S,
    decode_request_s=_REQUEST_S,
    decode_context_s=_CONTEXT_S,
    kv_bytes_per_token=327_680,
    load_bytes_per_s=128e9,
    disk_bytes_per_s=6e9,
    transfer_bytes_per_s=87e9,
)
_FLOPS_RATIO = 989 / 312
_MEMORY_RATIO = 3.35 / 2.04
_H800 = replace(
    _A800,
    prefill_token_s=_A800.prefill_token_s / _FLOPS_RATIO,
    prefill_square_s=_A800.prefill_square_s / _FLOPS_RATIO,
    decode_step_s=_A800.decode_step_s / _MEMORY_RATIO,
    decode_request_s=_A800.decode_request_s / _MEMORY_RATIO,
    decode_context_s=_A800.decode_context_s / _MEMORY_RATIO,
    transfer_bytes_per_s=190e9,
)

HARDWARE: Mapping[str, Costs] = {"a800-llama3-70b": _A800, "h800-llama3-70b": _H800}
