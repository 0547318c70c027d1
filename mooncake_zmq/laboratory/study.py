"""The input and output of a run of the laboratory: plain data, so that runs travel between processes as JSON."""

from dataclasses import dataclass, field

from mooncake_zmq.core.costs import Costs

TRACE_BLOCK_TOKENS = 512
"""Tokens that one hash id of a trace stands for, as in Mooncake's public traces."""
COUPLED_SECTION = "coupled."
"""Begins the names of the settings of coupled instances, which compute prompts and answers in one batch."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `hash_ids`: one for each complete or begun block of `TRACE_BLOCK_TOKENS` of its prompt; equal ids
    at equal places after equal ids are the same tokens. `tenant`: its client's; traces have none."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """One node of the modelled hardware. Bandwidths in bytes per second, shared by all that use them at a time."""

    name: str
    costs: Costs
    network_bytes_per_s: float
    """Bandwidth of each direction of the node's NIC."""
    bus_bytes_per_s: float
    """Bandwidth between host memory and the engine."""
    disk_bytes_per_s: float
    dram_tokens: int
    """Tokens of KV that the host's pool holds."""
    disk_tokens: int
    """Tokens of KV that its SSD holds; 0: none."""
    decode_tokens: int
    """Tokens of KV that a decode instance holds."""
    max_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run: a cluster, its rules and the bounds that its requests must meet."""

    prefill: int
    decode: int
    hardware: NodeProfile
    policy: str = "coming"
    admission: str = "none"
    order: str = "fcfs"
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    speed: float = 1.0
    """Factor by which arrivals come faster."""
    seed: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    overrides: dict[str, float | int | str | bool] = field(default_factory=dict)
    """Settings of the actors by dotted name, as in a deployment's file: `conductor.kvcache_balancing_threshold`."""


@dataclass(slots=True)
class RequestRecord:
    """The record of one request. Times in virtual seconds, counted from its arrival; -1: it did not get that far."""

    at_s: float
    input_tokens: int
    output_tokens: int
    outcome: str = ""
    """"finished", "rejected", or "failed"."""
    reason: str = ""
    ttft_s: float = -1.0
    tbt_s: float = -1.0
    """Mean of the longest tenth of the gaps between its tokens, as the paper counts; 0 with fewer than two tokens."""
    first_gap_s: float = -1.0
    """Time between its first token and its second."""
    end_s: float = -1.0
    predicted_ttft_s: float = -1.0
    predicted_tbt_s: float = -1.0
    queue_s: float = -1.0
    prefill_s: float = -1.0
    hit_own: int = 0
    """Prompt tokens whose KV was found, by place: the prefill's own memory, its host's pool in DRAM, its SSD, another host."""
    hit_dram: int = 0
    hit_disk: int = 0
    hit_remote: int = 0
    possible: int = -1
    """Prompt tokens whose KV a clairvoyant with endless memory would have found; -1: no prefill received the request."""
    prefill: str = ""
    decode: str = ""
    attempts: int = 0
    wasted_prefill_s: float = 0.0
    """Engine time spent on prefills whose results were not used."""


@dataclass(slots=True)
class RunResult:
    """The result of a whole run."""

    setup: Setup
    requests: list[RequestRecord]
    prefill_busy_s: dict[str, float] = field(default_factory=dict)
    """Virtual seconds that each prefill's engine computed; likewise each decode's."""
    decode_busy_s: dict[str, float] = field(default_factory=dict)
    copies: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    """Samples over virtual time: how many hosts hold the keys ranked 10th, 100th, ... by how many requests have them."""
    loads: list[tuple[float, float, float]] = field(default_factory=list)
    """Samples over virtual time: mean load of the prefills and of the decodes, each as a share of its SLO."""
    errors: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Predictions by kind: how many, mean absolute error, mean of the actual values; in seconds or tokens."""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mib: float = 0.0
    events: int = 0
