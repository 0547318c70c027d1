"""Says which flags servers lack, and with which line they are started. PURE."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_zmq.operate.attach.server import Server
from mooncake_zmq.runtime.vllm_server import REUSE_REPORTED, SCALE_OUT, connector_option, events_option


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """A flag of vLLM that a server was started without. `needed`: it cannot be attached without it."""

    flag: str
    value: str = ""
    why: str
    needed: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The flag as arguments of a command."""
        return (self.flag, self.value) if self.value else (self.flag,)


def flags(events: str, store: str) -> list[str]:
    """Return the arguments of a server that lacks nothing. `events`: where it publishes KV events, in vLLM's form."""
    options = {**events_option(events), **connector_option([store])}
    return [SCALE_OUT, REUSE_REPORTED, *(part for option in options.items() for part in option)]


def lacks(server: Server, servers: Sequence[Server], events: str, store: str) -> list[Lack]:
    """Return what a server lacks beside the others, the first of which sets the size of blocks."""
    found: list[Lack] = []
    if not server.takes_tokens:
        found.append(Lack(flag=SCALE_OUT, why="it takes no token ids, as nodes send them", needed=True))
    if server.block_tokens != (wanted := servers[0].block_tokens):
        why = f"its blocks have {server.block_tokens} tokens, those of {servers[0].url} have {wanted}"
        found.append(Lack(flag="--block-size", value=str(wanted), why=why, needed=True))
    if not server.caches_prefixes:
        found.append(Lack(flag="--enable-prefix-caching", why="it computes every prompt from its first token"))
    elif server.takes_tokens and not server.reports_reuse:
        found.append(Lack(flag=REUSE_REPORTED, why="answers do not say how much was reused"))
    if not server.connector:
        ((flag, value),) = connector_option([store]).items()
        found.append(Lack(flag=flag, value=value, why="its KV is in no pool and is lost with it"))
    if server.takes_tokens and server.caches_prefixes and not server.kv_events:
        ((flag, value),) = events_option(events).items()
        found.append(Lack(flag=flag, value=value, why="what its own cache holds is not known"))
    if server.max_model_len != (least := min(each.max_model_len for each in servers)):
        why = "servers share KV only with the same longest context"
        found.append(Lack(flag="--max-model-len", value=str(least), why=why))
    return found


def line(server: Server, found: Sequence[Lack]) -> str:
    """Return what a server lacks in one line, which ends with the text to paste."""
    what = "; ".join(f"{lack.flag}{' (required)' if lack.needed else ''}: {lack.why}" for lack in found)
    return f"{server.url} lacks {what}. Add to its command line: {pasted(found)}"


def pasted(found: Sequence[Lack]) -> str:
    """Return the missing flags as one line for a shell."""
    return shlex.join(part for lack in found for part in lack.arguments)
