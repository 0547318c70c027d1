"""`bench eviction`: the hit ratio of each policy and capacity, by replaying a trace of requests through the pool's own slots.

A request pins the leading run of its blocks that is there, which are its hits, and what else is there of it; writes the
others; and lets go of all of them, leaf first. The reference is a pool that never evicts: no policy can do better.
A trace is a JSON object a line, whose `hash_ids` name the prompt's blocks from the root on (Mooncake's format).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import click
import msgspec

from mooncake_zmq.bench.report import Report, Row, commit
from mooncake_zmq.kv.block_hash import KEY_BYTES, Key
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.laboratory.drawing import new_figure
from mooncake_zmq.laboratory.hit_ratio import Trace, hit_ratio, infinite_hit_ratio

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)
"""Blocks; of 512 tokens, these are half a million to 50 million tokens."""
GENERATED_REQUESTS = 6_000
MAX_TRACE_BLOCKS = 10_000_000
"""Longest trace read; its keys take about 60 bytes each."""

Progress = Callable[[str], None]


class _Line(msgspec.Struct, frozen=True):
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...]


@dataclass(slots=True)
class EvictionReport(Report):
    """Also keeps the points of each policy's curve: (blocks, hit ratio)."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    ceiling: float = 0.0

    def _draw(self, path: Path) -> None:
        figure = new_figure(8, 5)
        axes = figure.add_subplot()
        for policy, points in self.curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=policy)
        axes.axhline(self.ceiling, color="black", linewidth=1, label="never evicting")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("capacity, blocks")
        axes.set_ylabel("hit ratio, by block")
        axes.legend()
        axes.set_title(f"bench {self.bench}, {commit()}")
        figure.savefig(path)


def bench_eviction(
    trace: Path | None, capacities: Sequence[int], policies: Sequence[str], progress: Progress
) -> EvictionReport:
    """Replay `trace`, or a generated one, for each policy at each capacity (in blocks). Raises click.ClickException for a
    trace that cannot be read."""
    requests = read_trace(trace) if trace is not None else generated_trace(Random(0), GENERATED_REQUESTS)
    ceiling = infinite_hit_ratio(requests)
    report = EvictionReport("eviction", ceiling=ceiling)
    for policy in policies:
        for capacity in sorted(capacities):
            progress(f"{policy}, {capacity:,} blocks")
            ratio = hit_ratio(requests, Slots(capacity, policy))
            report.curves.setdefault(policy, []).append((capacity, ratio))
            name = f"{policy}, {capacity:,} blocks"
            report.rows.append(Row(name=name, unit="hit ratio", value=ratio, reference=ceiling, higher_is_better=True))
    return report


def read_trace(path: Path) -> Trace:
    """The requests of a JSONL file. Raises click.ClickException naming the line that is not one, or for none, or too many."""
    decoder = msgspec.json.Decoder(_Line)
    trace: list[tuple[Key, ...]] = []
    blocks = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    ids = decoder.decode(line).hash_ids
                except msgspec.MsgspecError as error:
                    raise click.ClickException(f"{path}, line {number}: {error}") from None
                blocks += len(ids)
                if blocks > MAX_TRACE_BLOCKS:
                    raise click.ClickException(f"{path} has more than {MAX_TRACE_BLOCKS:,} blocks")
                trace.append(_keys(ids))
    except OSError as error:
        raise click.ClickException(f"cannot read the trace: {error}") from None
    if not blocks:
        raise click.ClickException(f"{path} asks for no block")
    return trace


def generated_trace(random: Random, requests: int) -> Trace:
    """Chats whose next turn extends the last one, mostly soon after it; most of them share one of a few system prompts."""
    fresh = iter(range(1 << 62))
    systems = [_take(fresh, random.randint(1, 6)) for _ in range(8)]
    chats: list[tuple[int, ...]] = []
    trace: list[tuple[Key, ...]] = []
    for _ in range(requests):
        if chats and random.random() < 0.5:
            back = min(int(random.expovariate(1 / 100)), len(chats) - 1)
            prompt = chats.pop(-1 - back)
        else:
            prompt = systems[min(int(random.expovariate(1.0)), len(systems) - 1)] if random.random() < 0.8 else ()
        prompt += _take(fresh, 1 + min(int(random.expovariate(1 / 15)), 200))
        chats.append(prompt)
        trace.append(_keys(prompt))
    return trace


def _keys(ids: Iterable[int]) -> tuple[Key, ...]:
    return tuple(number.to_bytes(KEY_BYTES, "little") for number in ids)


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))
