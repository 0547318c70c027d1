"""Generation of traces that have the statistics of others: arrivals, lengths, and how prompts extend earlier ones. Seeded.

A request either opens a chat, behind a system prompt that it shares, or goes on from a recent chat of about the length that
such a turn reuses. Lengths are drawn stratified, so that a trace's mean is the one asked for.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, islice
from random import Random
from statistics import NormalDist

from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.laboratory import zoo
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.specs import split_spec
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival

OPEN_CHATS = 1_000
"""Chats that a turn may extend, the last ones: older ones have ended."""
MAX_REQUESTS = 2_000_000
POINTS = 201
SHARED_BY = 0.02
"""Share of all prompts from which on a block that they have in common belongs to a system prompt, not to a chat."""

Quantiles = tuple[float, ...]
"""A distribution by its quantiles, at equal distances from the least to the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parameters of a generated trace."""

    requests: int = 12_031
    rate: float = 3.3
    """Arrivals a second: a Poisson process."""
    seed: int = 0
    quantum_s: float = 0.0
    """Seconds to whose multiples arrival times are rounded down; 0: not rounded."""
    input: Quantiles
    output: Quantiles
    follow: float = 0.0
    """Share of the requests that extend an earlier one, weighed by their lengths."""
    share: Quantiles = (0.0,)
    """Share of such a prompt that is in the earlier one, weighed likewise."""
    systems: int = 1
    system_blocks: int = 0
    """Blocks that every chat begins with, one of `systems` such prompts."""

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise ValueError(f"requests must be from 1 to {MAX_REQUESTS:,}, not {self.requests}")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"rate must be positive, not {self.rate}")
        if not 0 <= self.follow <= 1:
            raise ValueError(f"follow must be from 0 to 1, not {self.follow}")
        if self.systems < 1 or self.system_blocks < 0 or self.quantum_s < 0:
            raise ValueError("systems must be 1 or more, system_blocks and quantum_s 0 or more")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The defaults of a spec: lengths as lognormal by mean and sigma within bounds, sigma 0: all alike."""

    input: float
    output: float
    input_sigma: float = 0.0
    output_sigma: float = 0.0
    input_max: int = 126_195
    output_max: int = 2_000
    shape: tuple[tuple[str, float | int | Quantiles], ...] = ()


CHAT_SHARE = (0.02, 0.23, 0.47, 0.68, 0.86, 0.92, 0.94, 0.96, 0.98, 0.99, 1.0)
KINDS = {
    "conversation": _Kind(
        *(12_035, 343, 1.2, 1.1),
        shape=(("quantum_s", 3.0), ("follow", 0.451), ("share", CHAT_SHARE), ("system_blocks", 1)),
    ),
    "toolagent": _Kind(
        *(8_596, 182, 0.9, 1.1),
        shape=(
            ("requests", 23_608),
            ("rate", 6.6),
            ("follow", 0.47),
            ("share", (0.5, 0.9)),
            ("systems", 8),
            ("system_blocks", 8),
        ),
    ),
    "synthetic": _Kind(
        *(15_325, 149, 0.9, 1.0),
        shape=(("requests", 3_993), ("rate", 1.1), ("follow", 0.75), ("share", (0.7, 0.9, 1.0)), ("systems", 50)),
    ),
    "uniform": _Kind(8_192, 256, shape=(("requests", 1_000), ("rate", 2.0))),
}
"""conversation: measured on the public trace. toolagent, synthetic: mean lengths as published; their reuse is assumed, to come
to hit ratios near the published .59 and .66."""
LIKE = "like"
LENGTHS = ("input", "output", "input_sigma", "output_sigma", "input_max", "output_max")
NUMBERS = ("requests", "rate", "seed", "quantum_s", "follow", "systems", "system_blocks")


def parse_spec(text: str, like: Shape | None = None) -> Shape:
    """Parse `KIND:key=value,...`; KIND `like` changes the shape `like`. Raises StudyError."""
    name, values = split_spec(text)
    if name == LIKE and like is not None:
        return _shaped(text, like, values, LENGTHS[:0])
    if name not in KINDS:
        raise StudyError(f"--generate {text}: {name!r} is none of {', '.join((*KINDS, *zoo.KINDS))}, {LIKE} (with --like FILE)")
    kind = replace(KINDS[name], **{key: values.pop(key) for key in LENGTHS if key in values})  # type: ignore[arg-type]
    try:
        made = Shape(
            input=lognormal(kind.input, kind.input_sigma, int(kind.input_max)),
            output=lognormal(kind.output, kind.output_sigma, int(kind.output_max)),
            **dict(kind.shape),  # type: ignore[arg-type]  # a table of ours
        )
    except ValueError as error:
        raise StudyError(f"--generate {text}: {error}") from None
    return _shaped(text, made, values, LENGTHS)


def _shaped(text: str, shape: Shape, values: dict[str, float], also: Sequence[str]) -> Shape:
    whole = {each.name for each in fields(Shape) if each.type is int}
    for key, value in values.items():
        if key not in NUMBERS:
            raise StudyError(f"--generate {text}: no {key!r}; there are {', '.join((*also, *NUMBERS))}")
        if key in whole and value != int(value):
            raise StudyError(f"--generate {text}: {key} is a whole number, not {value}")
    try:
        return replace(shape, **{key: int(value) if key in whole else value for key, value in values.items()})  # type: ignore[arg-type]
    except ValueError as error:
        raise StudyError(f"--generate {text}: {error}") from None


def lognormal(mean: float, sigma: float, most: int) -> Quantiles:
    """Return the quantiles of a lognormal distribution cut to 1 .. most, its median such that the mean after the cut is
    `mean`."""
    if not 1 <= mean <= most or sigma < 0:
        raise ValueError(f"lengths of mean {mean:g} and sigma {sigma:g} do not fit 1 to {most}")
    if sigma == 0 or mean == most:
        return (mean,)
    normal = NormalDist()
    steps = [math.exp(sigma * normal.inv_cdf((at + 0.5) / POINTS)) for at in range(POINTS)]
    low, high = 0.0, float(most)
    for _ in range(60):
        median = (low + high) / 2
        low, high = (median, high) if _mean(_cut(steps, median, most)) < mean else (low, median)
    return _cut(steps, low, most)


def _cut(steps: Sequence[float], median: float, most: int) -> Quantiles:
    return tuple(min(max(median * each, 1.0), float(most)) for each in steps)


def _mean(quantiles: Quantiles) -> float:
    """Return the mean of values drawn from these quantiles: between two, all values are as likely."""
    return (sum(quantiles) - (quantiles[0] + quantiles[-1]) / 2) / (len(quantiles) - 1)


def fit(arrivals: Sequence[Arrival]) -> Shape:
    """Return the shape of a trace: rate, quantiles of lengths, the reuse of earlier prompts, shared beginnings."""
    times = sorted({each.at_s for each in arrivals})
    span_s = times[-1] - times[0]
    first_seen: dict[int, int] = {}
    used: dict[int, int] = {}
    shares: list[float] = []
    for number, arrival in enumerate(arrivals):
        found = next((at for at, each in enumerate(arrival.hash_ids) if each not in first_seen), len(arrival.hash_ids))
        shares.append(found / max(1, len(arrival.hash_ids)))
        for each in arrival.hash_ids:
            first_seen.setdefault(each, number)
            used[each] = used.get(each, 0) + 1
    common = max(2.0, SHARED_BY * len(arrivals))
    shared = [next((at for at, each in enumerate(a.hash_ids) if used[each] < common), len(a.hash_ids)) for a in arrivals]
    with_system = [each for each in shared if each]
    system_blocks = round(sum(with_system) / len(with_system)) if 2 * len(with_system) > len(arrivals) else 0
    # Longer prompts reuse more: weighed by blocks, the hit ratio comes out although generated lengths do not depend on shares.
    turns = [(s, len(a.hash_ids)) for s, a in zip(shares, arrivals, strict=True) if s * len(a.hash_ids) > system_blocks + 0.5]
    turn_blocks = sum(blocks for _, blocks in turns)
    quantum_s = span_s / (len(times) - 1) if len(times) > 1 and len(times) < len(arrivals) / 2 else 0.0
    return Shape(
        requests=len(arrivals),
        rate=len(arrivals) / span_s if span_s else 1.0,
        quantum_s=quantum_s,
        input=_quantiles([each.input_tokens for each in arrivals]),
        output=_quantiles([each.output_tokens for each in arrivals]),
        follow=turn_blocks / max(1, sum(used.values())),
        share=_weighed_quantiles(turns) if turns else (0.0,),
        systems=max(1, len({a.hash_ids[0] for a, s in zip(arrivals, shared, strict=True) if s})),
        system_blocks=system_blocks,
    )


def _quantiles(values: Sequence[float]) -> Quantiles:
    ordered = sorted(values)
    return tuple(float(ordered[at * (len(ordered) - 1) // (POINTS - 1)]) for at in range(POINTS))


def _weighed_quantiles(weighed: Sequence[tuple[float, int]]) -> Quantiles:
    ordered = sorted(weighed)
    total = sum(weight for _, weight in ordered)
    found: list[float] = []
    passed, at = 0, 0
    for point in range(POINTS):
        while at < len(ordered) - 1 and passed + ordered[at][1] < total * point / (POINTS - 1):
            passed, at = passed + ordered[at][1], at + 1
        found.append(ordered[at][0])
    return tuple(found)


def generate(shape: Shape) -> list[Arrival]:
    """Return the arrivals of a shape: the same for the same seed."""
    random = Random(shape.seed)
    inputs = _draw(random, shape.input, shape.requests)
    outputs = _draw(random, shape.output, shape.requests)
    shares = _draw(random, shape.share, shape.requests)
    chats = _Chats(random, shape)
    now_s = 0.0
    arrivals: list[Arrival] = []
    for asked, made, share in zip(inputs, outputs, shares, strict=True):
        at_s = now_s // shape.quantum_s * shape.quantum_s if shape.quantum_s else now_s
        tokens = max(1, round(asked))
        arrivals.append(Arrival(at_s, tokens, max(1, round(made)), chats.prompt(tokens, share)))
        now_s += random.expovariate(shape.rate)
    return arrivals


def _draw(random: Random, quantiles: Quantiles, number: int) -> list[float]:
    """Return one value from each of `number` equal parts of the distribution, in random order."""
    last = len(quantiles) - 1
    drawn: list[float] = []
    for part in range(number):
        at = (part + random.random()) / number * last
        below = min(int(at), max(0, last - 1))
        above = min(below + 1, last)
        drawn.append(quantiles[below] + (quantiles[above] - quantiles[below]) * (at - below))
    random.shuffle(drawn)
    return drawn


class _Chats:
    """The chats that may continue, by the length of their last prompt in blocks."""

    def __init__(self, random: Random, shape: Shape) -> None:
        self._random = random
        self._follow = shape.follow
        self._fresh = count()
        self._systems = [tuple(islice(self._fresh, shape.system_blocks)) for _ in range(shape.systems)]
        self._sizes: list[tuple[int, int]] = []
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._order: deque[int] = deque()
        self._names = count()

    def prompt(self, tokens: int, share: float) -> tuple[int, ...]:
        """Return the blocks of the next prompt, of which `share` are an earlier one's if it continues one."""
        blocks = div_ceil(tokens, TRACE_BLOCK_TOKENS)
        if self._sizes and self._random.random() < self._follow:
            known = self._take(share * blocks)[:blocks]
        else:
            known = self._systems[self._random.randrange(len(self._systems))][:blocks]
        made = known + tuple(islice(self._fresh, blocks - len(known)))
        # The next prompt does not share the begun block of this one: it puts more tokens into it.
        self._keep(made[: tokens // TRACE_BLOCK_TOKENS])
        return made

    def _take(self, wanted: float) -> tuple[int, ...]:
        """Take so many blocks of a chat: of the shortest that has them, which may thereby continue twice, else of the
        longest."""
        at = min(bisect_left(self._sizes, (round(wanted), -1)), len(self._sizes) - 1)
        return self._prompts[self._sizes[at][1]][: round(wanted)]

    def _keep(self, prompt: tuple[int, ...]) -> None:
        name = next(self._names)
        self._prompts[name] = prompt
        self._order.append(name)
        insort(self._sizes, (len(prompt), name))
        if len(self._order) > OPEN_CHATS:
            old = self._order.popleft()
            del self._sizes[bisect_left(self._sizes, (len(self._prompts.pop(old)), old))]
