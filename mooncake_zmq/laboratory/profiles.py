"""The nodes that the laboratory models, each figure with its source; their costs are those of `core.hardware`. It reads a
`mooncake-zmq profile` file and never measures."""

from pathlib import Path
from typing import Literal

from mooncake_zmq.core import profile as measured_profile
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.hardware import HARDWARE
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.study import NodeProfile

Source = Literal["paper", "measured", "assumed"]


def _node(name: str, costs: Costs, *, dram_tokens: int, decode_tokens: int, max_batch: int) -> NodeProfile:
    """Return a node whose links are as fast as its costs say, without an SSD."""
    return NodeProfile(
        name=name,
        costs=costs,
        network_bytes_per_s=costs.transfer_bytes_per_s,
        bus_bytes_per_s=costs.load_bytes_per_s,
        disk_bytes_per_s=costs.disk_bytes_per_s,
        dram_tokens=dram_tokens,
        disk_tokens=0,
        decode_tokens=decode_tokens,
        max_batch=max_batch,
    )


A800, H800 = (
    _node(name, costs, dram_tokens=3_000_000, decode_tokens=1_300_000, max_batch=256) for name, costs in HARDWARE.items()
)
PROFILES = {profile.name: profile for profile in (A800, H800)}

SOURCES: dict[str, tuple[tuple[str, Source, str], ...]] = {
    A800.name: (
        ("prefill", "paper", "fit to its prefill times of 8k to 128k tokens, error under 1.7 %"),
        ("decode step by context", "paper", "26.6 ms at 8k to 30.8 ms at 128k, batch 1"),
        ("decode step by batch", "paper", ".765 + .0149 batch at 8k, taken as relative to batch 1; read off a figure"),
        ("KV of a token", "paper", "320 KB"),
        ("network", "paper", "40 GB at 87 GB/s over 4 x 200 Gbit/s"),
        ("bus", "paper", "128 GB/s"),
        ("pool", "paper", "3 M tokens a node, as said of Fig 10; elsewhere assumed"),
        ("KV memory", "assumed", "8 x 80 GB, nine tenths used, less 141 GB of weights: 1.3 M tokens"),
        ("largest batch", "assumed", "256, vLLM's default"),
        ("SSD", "assumed", "6 GB/s, and none by default"),
    ),
    H800.name: (
        ("prefill", "assumed", "the A800's by the ratio of dense 16-bit FLOPS, 989 to 312"),
        ("decode step", "assumed", "the A800's by the ratio of memory bandwidths, 3.35 to 2.04 TB/s"),
        ("KV of a token", "paper", "320 KB"),
        ("network", "paper", "40 GB at 190 GB/s over 8 x 400 Gbit/s"),
        ("bus", "assumed", "128 GB/s, as the A800's"),
        ("pool", "assumed", "3 M tokens, as the A800's"),
        ("KV memory", "assumed", "1.3 M tokens, as the A800's"),
        ("largest batch", "assumed", "256, vLLM's default"),
        ("SSD", "assumed", "6 GB/s, and none by default"),
    ),
}
"""The value, source and reason of every figure of a profile."""

MEASURED: tuple[tuple[str, Source, str], ...] = (
    ("prefill, decode step", "measured", "fitted to the file"),
    ("KV of a token, bandwidths", "assumed", "the defaults of [costs]: those of the default model"),
    ("pool, KV memory", "assumed", "1 M and 64 k tokens"),
    ("largest batch", "measured", "the largest in the file"),
)


def find_profile(name: str) -> NodeProfile:
    """Return a profile by name, or `measured:FILE`. Raises StudyError."""
    kind, _, path = name.partition(":")
    if kind == "measured" and path:
        return _measured(name, Path(path))
    if name not in PROFILES:
        raise StudyError(f"hardware {name!r} is none of {', '.join(PROFILES)}, measured:FILE")
    return PROFILES[name]


def sources(profile: NodeProfile) -> tuple[tuple[str, Source, str], ...]:
    """Return (figure, "paper", "measured" or "assumed", why) for each of `profile`'s."""
    return SOURCES.get(profile.name, MEASURED)


def _measured(name: str, path: Path) -> NodeProfile:
    try:
        found = measured_profile.decode(path.read_bytes())
        costs = measured_profile.fit(found).costs
    except FileNotFoundError:
        raise StudyError(f"there is no {path}: 'mooncake-zmq profile --out {path}' measures this machine's engine") from None
    except OSError as error:
        raise StudyError(f"cannot read {path}: {error.strerror}") from None
    except measured_profile.ProfileError as error:
        raise StudyError(f"{path}: {error}") from None
    largest = max(step.batch for step in found.decode)
    return _node(name, costs, dram_tokens=1_000_000, decode_tokens=65_536, max_batch=largest)
