"""What an operator sets for a node beside a vLLM server."""

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from mooncake_zmq.core.messages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """One node and its server."""

    url: str = "http://127.0.0.1:8001"
    """Where its vLLM serves: `vllm serve MODEL --enable-scale-out --enable-prompt-tokens-details`. Without the latter vLLM does
    not tell what it reused, and answers say that nothing was."""
    part: Part = "both"
    """Of the requests that it gets. "prefill": prompts and first tokens; another node goes on, of part "decode", which takes
    nothing else and whose vLLM loads the KV from the stores: both run with the connector. "both": whole requests."""
    serve_arguments: tuple[str, ...] = ()
    """What `up --vllm-python` adds to the command line of the vLLM that it starts; nobody else looks at it."""
    max_running: int = 32
    """Requests that vLLM has at a time: its `--max-num-seqs`, so that who waits does so here, in order, and can be moved."""
    max_queued: int = 64
    """Requests waiting; a further one is refused and placed elsewhere."""
    capacity_tokens: int = 65_536
    """KV that vLLM has room for, as it says when it starts ("GPU KV cache size", "CPU KV cache size")."""
    overtake: float = 0.0
    priority_s: float = 10.0
    """Which of those that wait goes first, as of a prefill."""
    report_s: float = 0.25
    """How often the load is told to the conductors; a quarter of it after something ended."""
    measured_half_life_s: float = 60.0
    """As of prefill: without work, what was measured of this node's speed loses half of its weight in this time."""
    probe_s: float = 1.0
    """How often vLLM is asked whether it is well. While it is not, the node takes nothing new."""
    probe_timeout_s: float = 3.0
    """An answer to that takes no longer, nor does connecting."""
    hung_s: float = 3.0
    """A vLLM that gives no answer a token for so long, longer by four times what the prompts under way should take, hangs: its
    requests go on elsewhere, and it gets new ones once it made a token. Each time that it is found to hang doubles this for ten
    minutes, up to `quiet_s`."""
    quiet_s: float = 60.0
    """A request of which vLLM says nothing for so long has failed here and goes on elsewhere: above what the longest prompt
    takes to its first token."""
    kv_events: str = ""
    """Where vLLM publishes its KV events, "tcp://127.0.0.1:5557" or an ipc:// path (`--kv-events-config`, publisher "zmq"; over
    TCP vLLM has to be told "tcp://*:5557", or it does not listen): requests then go where its own prefix cache has their
    beginnings. Empty: nobody listens."""
    kv_events_replay: str = ""
    """Its `replay_endpoint`, where what was missed is asked for. Without it, after a gap nothing there is known any more."""
    kv_events_topic: str = ""
    """Its `topic`: what begins so is heard."""
    max_known_blocks: int = 1 << 18
    """Blocks of vLLM's cache that are kept account of, about 400 bytes each; further ones cost a hit."""

    def __post_init__(self) -> None:
        _check_url(self.url)
        if min(self.max_running, self.max_queued, self.capacity_tokens, self.max_known_blocks) < 1:
            raise ValueError("max_running, max_queued, capacity_tokens and max_known_blocks must be at least 1")
        for endpoint in (self.kv_events, self.kv_events_replay):
            if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
                raise ValueError(f"kv_events and kv_events_replay are tcp:// or ipc:// endpoints, not {endpoint!r}")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay goes with kv_events")
        if self.kv_events and self.part == "decode":
            raise ValueError('kv_events: nothing is placed by what the vLLM of a node of part "decode" has in its cache')
        if not (0 <= self.overtake < math.inf and 0 <= self.priority_s < math.inf):
            raise ValueError("overtake and priority_s must be 0 or more, and finite")
        times = (self.report_s, self.measured_half_life_s, self.probe_s, self.probe_timeout_s, self.hung_s, self.quiet_s)
        if min(times) <= 0:
            raise ValueError("report_s, measured_half_life_s, probe_s, probe_timeout_s, hung_s and quiet_s must be positive")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"url must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
