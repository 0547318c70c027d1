"""The roles that processes have, and who talks to whom: one table for the live mesh and the simulated one. PURE."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

Role = Literal["conductor", "prefill", "decode", "cache-node", "gateway"]
ROLES: tuple[Role, ...] = get_args(Role)
ENGINE_ROLES: tuple[Role, ...] = ("prefill", "decode")
"""Those that hold the model's weights."""
BECOMES: Mapping[str, Role] = {"prefill": "decode", "decode": "prefill"}
"""What a node of a role may become where its settings allow it."""
SUMMARIES: dict[Role, str] = {
    "conductor": "Choose prefill and decode for each request; hold the block index.",
    "prefill": "Compute the KV of prompts and the first token.",
    "decode": "Produce the later tokens in a continuous batch.",
    "cache-node": "Own one host's pool of KV blocks.",
    "gateway": "Serve the OpenAI-compatible HTTP API; own the requests.",
}


_ANYWHERE: tuple[tuple[Role, Role], ...] = (
    ("gateway", "conductor"),
    ("gateway", "prefill"),
    ("gateway", "decode"),
    ("conductor", "prefill"),
    ("conductor", "decode"),
    ("conductor", "cache-node"),
    ("prefill", "decode"),
    ("cache-node", "cache-node"),
    # They say nothing to each other across hosts, but a handoff may name blocks in the pool of the prefill's host, and one can
    # read only where a peer's Hello told one to.
    ("decode", "cache-node"),
)
_ON_ONE_HOST: tuple[tuple[Role, Role], ...] = (("prefill", "cache-node"),)


def talks(role: Role, host: str, other_role: Role, other_host: str, *, pipelines: bool = False) -> bool:
    """Do two processes of these roles and hosts keep a conversation? Each pair that does costs both a heartbeat, so prefills do
    among themselves only in a deployment with `pipelines`."""
    if role == other_role == "prefill":
        return pipelines
    table = _ANYWHERE + _ON_ONE_HOST if host == other_host else _ANYWHERE
    return (role, other_role) in table or (other_role, role) in table


def may_talk(
    roles: Sequence[Role], host: str, other_roles: Sequence[Role], other_host: str, *, pipelines: bool = False
) -> bool:
    """The same of processes that may have any of these roles in turn: a link stands through a change of either's role."""
    return any(talks(role, host, other, other_host, pipelines=pipelines) for role in roles for other in other_roles)
