"""The roles that processes have. PURE."""

from collections.abc import Mapping
from typing import Literal, get_args

Role = Literal["conductor", "prefill", "decode", "cache-node", "vllm", "gateway"]
ROLES: tuple[Role, ...] = get_args(Role)
ENGINE_ROLES: tuple[Role, ...] = ("prefill", "decode")
"""Roles whose processes hold the model's weights."""
BECOMES: Mapping[str, Role] = {"prefill": "decode", "decode": "prefill"}
"""Role that a node of a role may change to where its settings allow it."""
SUMMARIES: dict[Role, str] = {
    "conductor": "Choose prefill and decode for each request; hold the block index.",
    "prefill": "Compute the KV of prompts and the first token.",
    "decode": "Produce the later tokens in a continuous batch.",
    "cache-node": "Own one host's pool of KV blocks.",
    "vllm": "Have a vLLM server beside it compute prompts and answers.",
    "gateway": "Serve the OpenAI-compatible HTTP API; own the requests.",
}
