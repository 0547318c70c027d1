"""The roles that processes have, and who talks to whom: one table for the live mesh and the simulated one. PURE."""

from typing import Literal, get_args

Role = Literal["conductor", "prefill", "decode", "cache-node", "gateway"]
ROLES: tuple[Role, ...] = get_args(Role)
ENGINE_ROLES: tuple[Role, ...] = ("prefill", "decode")
"""Those that hold the model's weights."""
SUMMARIES: dict[Role, str] = {
    "conductor": "Choose prefill and decode for each request; hold the block index.",
    "prefill": "Compute the KV of prompts and the first token.",
    "decode": "Produce the later tokens in a continuous batch.",
    "cache-node": "Own one host's pool of KV blocks.",
    "gateway": "Serve the OpenAI-compatible HTTP API; own the requests.",
}
