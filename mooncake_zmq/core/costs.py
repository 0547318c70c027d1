"""The cost model of all estimates: the conductor's, the nodes' load reports, the modelled engine and the laboratory. PURE.

Prefill is the paper's polynomial: t(n) = a n + b n^2 for n tokens, and t(n) - t(p) behind a prefix of p whose KV is there.
Loading that prefix overlaps with computing, layer by layer, so the longer of the two counts. A decode step is a fixed part
(the weights are read once), a part for each request, and one for each token of KV that all its requests together hold.
"""

import math
from dataclasses import dataclass, fields, replace

POSITIVE = (
    "prefill_token_s",
    "kv_bytes_per_token",
    "load_bytes_per_s",
    "disk_bytes_per_s",
    "transfer_bytes_per_s",
    "decode_step_s",
)
COMPUTING = ("prefill_token_s", "prefill_square_s", "decode_step_s", "decode_request_s", "decode_context_s")
LEAST_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes per second of one node. The defaults are the default model's on one CPU core. Measurements of the nodes
    rescale them, each kind of work separately."""

    prefill_token_s: float = 2.2e-3
    """Seconds per prompt token, the coefficient a. The paper's 70B model on 8 A800: 1.147e-4."""
    prefill_square_s: float = 4.1e-7
    """Seconds per squared token, the coefficient b: attention's share. The paper's: 7.181e-10."""
    decode_step_s: float = 0.0232
    """Fixed part of a decode step."""
    decode_request_s: float = 0.0018
    """Part of a step for each request of the batch."""
    decode_context_s: float = 0.0
    """Part of a step for each token of KV that its requests hold together; 0 if not known."""
    kv_bytes_per_token: int = 46_080
    """KV bytes of one token, all layers. A running process uses its model's value, whatever the file says."""
    load_bytes_per_s: float = 4e9
    """Rate from host pool to engine: one core that copies cold shared memory."""
    disk_bytes_per_s: float = 1e9
    """Rate from SSD to host pool."""
    transfer_bytes_per_s: float = 1e9
    """Rate between hosts: a 10 Gbit link, or loopback TCP with cold buffers."""

    profile: str = ""
    """A file that `mooncake-zmq profile` wrote, or one of `core.hardware`'s names: costs not set otherwise are taken from it.
    Empty: the defaults. A relative path starts at the working directory of the process, as model.path does."""
    profiled_model: str = ""
    """Fingerprint of the model that the profile measured, taken from it. A conductor of another model does not start."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str):
                continue
            positive = each.name in POSITIVE
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                raise ValueError(f"{each.name} must be {'positive' if positive else '0 or more'}, not {value}")

    def check_model(self, fingerprint: str) -> None:
        """Raise ValueError if these costs were measured with another model than this one."""
        if self.profiled_model and self.profiled_model != fingerprint:
            measured = f"{self.profile or 'costs.profiled_model'} measured another model"
            raise ValueError(f"{measured} ({self.profiled_model[:12]}, not {fingerprint[:12]}): run mooncake-zmq profile again")

    @property
    def are_default(self) -> bool:
        """Return whether the computing costs are the defaults, which hold for one model on one core."""
        defaults = Costs()
        return all(getattr(self, name) == getattr(defaults, name) for name in COMPUTING)

    def computing_as(self, other: "Costs") -> "Costs":
        """Return these costs with the computing costs of `other`."""
        return replace(self, **{name: getattr(other, name) for name in COMPUTING})

    def scaled(self, *, prefill: float, decode: float) -> "Costs":
        """Return these costs with the prompt costs and the decode costs multiplied by the factors."""
        factors = dict.fromkeys(COMPUTING[:2], prefill) | dict.fromkeys(COMPUTING[2:], decode)
        scaled = {name: factor * getattr(self, name) for name, factor in factors.items()}
        return replace(self, **{name: max(LEAST_S, value) if name in POSITIVE else value for name, value in scaled.items()})

    def compute_s(self, tokens: int, prefix: int) -> float:
        """Return the time to compute tokens `prefix` to `tokens` if the first `prefix` have KV: t(tokens) - t(prefix)."""
        return self.prefill_token_s * (tokens - prefix) + self.prefill_square_s * (tokens * tokens - prefix * prefix)

    def load_s(self, tokens: float) -> float:
        """Return the time to load the KV of `tokens` tokens from the host's pool into the engine."""
        return tokens * self.kv_bytes_per_token / self.load_bytes_per_s

    def disk_s(self, tokens: float) -> float:
        """Return the time to load the KV of `tokens` tokens from the host's SSD into its pool."""
        return tokens * self.kv_bytes_per_token / self.disk_bytes_per_s

    def transfer_s(self, tokens: float) -> float:
        """Return the time to fetch the KV of `tokens` tokens from another host into this one's pool."""
        return tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Return the time of a decode step of `batch` requests that hold `context_tokens` tokens of KV together."""
        return self.decode_step_s + self.decode_request_s * batch + self.decode_context_s * context_tokens
