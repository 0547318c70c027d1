"""Settings of a node beside a vLLM server."""

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from mooncake_zmq.core.drain import GRACE_S
from mooncake_zmq.core.messages import MAX_OVERTAKE, MAX_SECONDS, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of one node and its server."""

    url: str = "http://127.0.0.1:8001"
    """Address of its vLLM: `vllm serve MODEL --enable-scale-out --enable-prompt-tokens-details`. Without the latter option
    vLLM does not report what it reused, and answers show none."""
    part: Part = "both"
    """The part of each request that the node serves. "prefill": prompts and first tokens; a node with "decode" continues,
    serves nothing else, and its vLLM loads the KV from the stores: both run with the connector. "both": whole requests."""
    serve_arguments: tuple[str, ...] = ()
    """Further arguments on the command line of the vLLM that `up --vllm-python` starts; they have no other use."""
    copies: int = 1
    """Stores in which the vLLM that `up --vllm-python` starts saves each block, at most all: `copies` of the connector. With 2,
    the KV of an answer outlives its host."""
    max_running: int = 32
    """Most requests sent to vLLM at a time: its `--max-num-seqs`, so that requests wait here, in order, and can be moved."""
    max_queued: int = 64
    """Most waiting requests; a further one is refused and placed elsewhere."""
    capacity_tokens: int = 65_536
    """Tokens of KV that vLLM has room for, as it logs at its start ("GPU KV cache size", "CPU KV cache size")."""
    overtake: float = 0.0
    priority_s: float = 10.0
    """Seconds of later arrival that one step of a request's priority is worth, as for a prefill."""
    report_s: float = 0.25
    """Interval of the load reports to the conductors; a quarter of it after something ended."""
    measured_half_life_s: float = 60.0
    """Time in which the measured speed of an idle node loses half of its weight, as for a prefill."""
    probe_s: float = 1.0
    """Interval of the health checks of vLLM. While it is not healthy, the node accepts nothing new."""
    probe_timeout_s: float = 3.0
    """Longest wait for the answer to a health check, or for a connection."""
    hung_s: float = 3.0
    """A vLLM that sends no token to any request for so long, plus four times the expected time of the prompts under way, is
    hung: its requests continue on other nodes, and it gets new ones after it has made a token. Each time that it is found
    hung doubles this for ten minutes, up to `quiet_s`. Until it has computed a prompt, prompts may take up to `quiet_s`."""
    quiet_s: float = 60.0
    """A request for which vLLM sends nothing for so long has failed here and continues on another node. It must be above the
    time that the longest prompt takes to its first token."""
    drain_grace_s: float = GRACE_S
    """When the node drains, answers that do not end within so long go on at another vLLM, as for a decode. Those with penalties
    or a grammar end here: vLLM cannot take them over."""
    kv_events: str = ""
    """Endpoint of vLLM's KV events, "tcp://127.0.0.1:5557" or an ipc:// path (`--kv-events-config`, publisher "zmq"; for TCP
    vLLM itself needs "tcp://*:5557", or it does not listen). Requests are then placed where its own prefix cache holds their
    prefixes. Empty: no events are received."""
    kv_events_replay: str = ""
    """Its `replay_endpoint`, where missed events are requested. Without it, all blocks are forgotten after a gap."""
    kv_events_topic: str = ""
    """Its `topic`: messages whose topic begins so are received."""
    max_known_blocks: int = 1 << 18
    """Most recorded blocks of vLLM's cache, of about 400 bytes each; further ones cost a hit."""

    def __post_init__(self) -> None:
        _check_url(self.url)
        if min(self.copies, self.max_running, self.max_queued, self.capacity_tokens, self.max_known_blocks) < 1:
            raise ValueError("copies, max_running, max_queued, capacity_tokens and max_known_blocks must be at least 1")
        for endpoint in (self.kv_events, self.kv_events_replay):
            if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
                raise ValueError(f"kv_events and kv_events_replay are tcp:// or ipc:// endpoints, not {endpoint!r}")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay goes with kv_events")
        if self.kv_events and self.part == "decode":
            raise ValueError('kv_events: nothing is placed by what the vLLM of a node of part "decode" has in its cache')
        if not (0 <= self.overtake <= MAX_OVERTAKE and 0 <= self.priority_s <= MAX_SECONDS):
            raise ValueError(f"overtake must be in 0..{MAX_OVERTAKE:g}, and priority_s in 0..{MAX_SECONDS:g}")
        if not 0 <= self.drain_grace_s < math.inf:
            raise ValueError("drain_grace_s must be 0 or more, and finite")
        times = (self.report_s, self.measured_half_life_s, self.probe_s, self.probe_timeout_s, self.hung_s, self.quiet_s)
        if min(times) <= 0:
            raise ValueError("report_s, measured_half_life_s, probe_s, probe_timeout_s, hung_s and quiet_s must be positive")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        sound = parts.scheme in ("http", "https") and parts.port != 0 and bool((parts.hostname or "").encode("idna"))
    except ValueError:  # UnicodeError among them: a name with an empty part, say
        sound = False
    has_v1 = parts.path.rstrip("/").endswith("/v1")  # added to each path
    if not sound or has_v1 or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"url must be http://HOST:PORT or https://HOST:PORT, without /v1, not {url!r}")
