"""The zoo: generated traces of workloads that are common and that no public trace shows, each seeded. PURE but for the random
numbers.

A prompt is a text that continues another one: the two share the complete blocks of `TRACE_BLOCK_TOKENS` of the first, and
nothing else. An answer is part of the prompt that follows it, as tokens that no other prompt has. Some kinds place a request at
the end of another one: arrivals of a trace are fixed, so that end is an estimate by the costs of `A800`, times `pace`, on a
machine that has nothing else to prefill and finds all KV computed before.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from random import Random

from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.profiles import A800
from mooncake_zmq.laboratory.specs import split_spec
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival
from mooncake_zmq.laboratory.traces import MAX_BLOCKS, MAX_REQUESTS

MAX_TOKENS = 200_000
"""Longest segment of a prompt, in tokens, that may be requested."""
MAX_COUNT = 1_000
MAX_PICKED = 16
"""Documents of one prompt: the ids of every order used are kept."""
BATCH = 8
"""Requests that an estimated decode step serves together."""
UNEVEN = 0.2
"""Share of the time between two bursts by which one may come later."""
REMEMBERED = 200
"""Prompts that a later one may continue, the last ones."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One trace of the zoo: its kind and every parameter of it."""

    kind: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of workload: its description, its parameters' defaults (whole ones are integers), its sessions' generator."""

    what: str
    defaults: Mapping[str, float]
    sessions: "Callable[[_Maker], Iterator[list[Arrival]]]"
    """Yields lists of arrivals without end, in order of their first arrivals; only the first of a list must come first."""


@dataclass(frozen=True, slots=True)
class Text:
    """The begin of a prompt, or a whole one. `ids`: of its complete blocks and of the one that is begun."""

    tokens: int
    ids: tuple[int, ...]

    def cut(self, tokens: int) -> "Text":
        """Return its complete blocks within the first `tokens` tokens."""
        blocks = min(tokens, self.tokens) // TRACE_BLOCK_TOKENS
        return Text(blocks * TRACE_BLOCK_TOKENS, self.ids[:blocks])


EMPTY = Text(0, ())


class _Maker:
    """A generator of texts, times and lengths for one workload, with one seed."""

    def __init__(self, workload: Workload) -> None:
        self.values = workload.values
        self.random = Random(workload.values["seed"])
        self._fresh = count()
        self._blocks = 0

    def whole(self, name: str) -> int:
        """Return a parameter that is a whole number."""
        return int(self.values[name])

    def around(self, name: str) -> int:
        """Return a number around a parameter: from half of it to one and a half."""
        middle = self.whole(name)
        return self.random.randint(div_ceil(middle, 2), middle + middle // 2)

    def log_uniform(self) -> int:
        """Return a length from `shortest` to `longest`; each factor is as likely."""
        low, high = math.log(self.values["shortest"]), math.log(self.values["longest"])
        return round(math.exp(self.random.uniform(low, high)))

    def pause_s(self, name: str) -> float:
        """Return a time with the mean of a parameter; most are shorter."""
        mean_s = self.values[name]
        return self.random.expovariate(1 / mean_s) if mean_s else 0.0

    def times(self, rate: float) -> Iterator[float]:
        """Yield the times of a Poisson process."""
        now_s = 0.0
        while True:
            yield now_s
            now_s += self.random.expovariate(rate)

    def more(self, text: Text, tokens: int) -> Text:
        """Return `text`, and so many tokens behind it that no other text has."""
        total = text.tokens + tokens
        kept = text.ids if not tokens else text.ids[: text.tokens // TRACE_BLOCK_TOKENS]
        return Text(total, kept + tuple(islice(self._fresh, div_ceil(total, TRACE_BLOCK_TOKENS) - len(kept))))

    def took_s(self, text: Text, known: int, output: int) -> float:
        """Return how long a request takes that finds the KV of its first `known` tokens."""
        costs = A800.costs
        first_s = max(costs.load_s(known), costs.compute_s(text.tokens, known))
        return self.values["pace"] * (first_s + (output - 1) * costs.step_s(BATCH, BATCH * text.tokens))

    def ask(self, at_s: float, text: Text) -> Arrival:
        """Return a request with an answer of about `output` tokens. Raises StudyError for one too many."""
        self._blocks += len(text.ids)
        if self._blocks > MAX_BLOCKS:
            raise StudyError(f"the workload has more than {MAX_BLOCKS:,} blocks")
        return Arrival(at_s, text.tokens, self.around("output"), text.ids)


def _bursts(m: _Maker) -> Iterator[list[Arrival]]:
    for number in count():
        prefix = m.more(EMPTY, m.whole("prefix"))
        began_s = (number + UNEVEN * m.random.random()) / m.values["rate"]
        times = [began_s + at * m.values["gap"] for at in range(m.whole("size"))]
        yield [m.ask(at_s, m.more(prefix, m.whole("own"))) for at_s in times]


def _agents(m: _Maker) -> Iterator[list[Arrival]]:
    system = m.more(EMPTY, m.whole("system"))
    for began_s in m.times(m.values["rate"]):
        yield _agent(m, began_s, system)


def _agent(m: _Maker, now_s: float, system: Text) -> list[Arrival]:
    """Generate an agent: every few of its steps it starts subagents that continue its context, and itself continues after the
    last has ended."""
    asked: list[Arrival] = []
    context, known, left = m.more(system, m.around("task")), system.tokens, m.whole("steps")
    while left:
        steps = min(left, m.whole("every"))
        made, context, now_s = _steps(m, now_s, context, known, steps)
        asked, known, left = asked + made, made[-1].input_tokens, left - steps
        began_s = now_s
        for number in range(m.whole("subagents") if left else 0):
            at_s = began_s + number * m.values["gap"]
            made, _, ended_s = _steps(m, at_s, m.more(context, m.around("task")), known, m.whole("substeps"))
            asked, now_s = asked + made, max(now_s, ended_s)
        context = m.more(context, m.around("result"))
    return asked


def _steps(m: _Maker, now_s: float, context: Text, known: int, steps: int) -> tuple[list[Arrival], Text, float]:
    """Return requests one after the other: the answer of each and its tool's result are the end of the next one's prompt. Also
    return the context after them, and when they have ended."""
    asked: list[Arrival] = []
    for _ in range(steps):
        asked.append(m.ask(now_s, context))
        now_s += m.took_s(context, known, asked[-1].output_tokens) + m.pause_s("tool")
        known = context.tokens
        context = m.more(context, asked[-1].output_tokens + m.around("result"))
    return asked, context, now_s


def _system(m: _Maker) -> Iterator[list[Arrival]]:
    system = m.more(EMPTY, m.whole("system"))
    for at_s in m.times(m.values["rate"]):
        yield [m.ask(at_s, m.more(system, m.around("own")))]


def _turns(m: _Maker) -> Iterator[list[Arrival]]:
    system = m.more(EMPTY, m.whole("system"))
    for began_s in m.times(m.values["rate"]):
        now_s, chat, known, turns = began_s, m.more(system, m.around("opening")), system.tokens, []
        for _ in range(m.around("turns")):
            turns.append(m.ask(now_s, chat))
            now_s += m.took_s(chat, known, turns[-1].output_tokens) + m.pause_s("think")
            known = chat.tokens
            chat = m.more(chat, turns[-1].output_tokens + m.around("message"))
        yield turns


def _documents(m: _Maker) -> Iterator[list[Arrival]]:
    """Yield prompts of documents. A document has the same tokens only behind the same documents: its KV depends on all text
    before it."""
    lengths = [m.log_uniform() for _ in range(m.whole("documents"))]
    known: dict[tuple[int, ...], Text] = {(): m.more(EMPTY, m.whole("system"))}
    for at_s in m.times(m.values["rate"]):
        order = tuple(m.random.sample(range(len(lengths)), min(len(lengths), m.whole("picked"))))
        for end in range(1, len(order) + 1):
            if order[:end] not in known:
                known[order[:end]] = m.more(known[order[: end - 1]], lengths[order[end - 1]])
        yield [m.ask(at_s, m.more(known[order], m.around("question")))]


def _lengths(m: _Maker) -> Iterator[list[Arrival]]:
    """Yield prompts of many lengths, of which those that reuse begin with a part of one of the last prompts."""
    before: list[Text] = []
    for number, at_s in enumerate(m.times(m.values["rate"])):
        tokens, begin = m.log_uniform(), EMPTY
        if before and m.random.random() < m.values["reuse"]:
            earlier = m.random.choice(before)
            begin = earlier.cut(min(tokens, round(m.random.random() * earlier.tokens)))
        text = m.more(begin, tokens - begin.tokens)
        before[number % REMEMBERED : number % REMEMBERED + 1] = [text]
        yield [m.ask(at_s, text)]


def _flood(m: _Maker) -> Iterator[list[Arrival]]:
    """Yield a flood: the other tenants' requests come throughout, those of the flooding one come so many times as often, from
    `begin` on."""
    own = m.more(EMPTY, m.whole("prefix"))
    others = [m.more(EMPTY, m.whole("prefix")) for _ in range(m.whole("tenants"))]
    quiet, flood = m.times(m.values["rate"]), m.times(m.values["rate"] * m.values["flood"])
    quiet_s, flood_s = next(quiet), next(flood) + m.values["begin"]
    while True:
        text = m.more(own if flood_s < quiet_s else m.random.choice(others), m.around("own"))
        yield [m.ask(min(flood_s, quiet_s), text)]
        if flood_s < quiet_s:
            flood_s = next(flood) + m.values["begin"]
        else:
            quiet_s = next(quiet)


KINDS: dict[str, Kind] = {
    "bursts": Kind(
        "bursts of requests that share one fresh prefix, the cluster idle between them",
        {"requests": 1_000, "rate": 0.1, "size": 8, "gap": 0.02, "prefix": 8_192, "own": 1_024, "output": 128},
        _bursts,
    ),
    "agents": Kind(
        "agents with growing contexts, which start subagents that share them",
        {
            **{"requests": 1_000, "rate": 0.2, "system": 2_048, "task": 1_024, "result": 1_500, "output": 200, "steps": 12},
            **{"every": 4, "subagents": 4, "substeps": 3, "gap": 0.05, "tool": 1.0, "pace": 1.0},
        },
        _agents,
    ),
    "system": Kind(
        "one system prompt for all, with short parts of their own",
        {"requests": 1_000, "rate": 4.0, "system": 4_096, "own": 256, "output": 128},
        _system,
    ),
    "turns": Kind(
        "chats whose next turn comes as soon as its predecessor has ended",
        {
            **{"requests": 1_000, "rate": 1.0, "system": 512, "opening": 2_048, "turns": 6, "message": 256, "output": 16},
            **{"think": 0.05, "pace": 1.0},
        },
        _turns,
    ),
    "documents": Kind(
        "some of a few long documents in any order",
        {
            **{"requests": 500, "rate": 1.0, "system": 512, "documents": 6, "picked": 3, "shortest": 4_096, "longest": 16_384},
            **{"question": 128, "output": 200},
        },
        _documents,
    ),
    "lengths": Kind(
        "prompts of every length, half of which begin as an earlier one",
        {"requests": 1_000, "rate": 1.5, "shortest": 100, "longest": 100_000, "reuse": 0.5, "output": 200},
        _lengths,
    ),
    "flood": Kind(
        "one tenant that floods beside others that do not",
        {
            **{"requests": 1_000, "rate": 1.0, "flood": 20.0, "begin": 20.0, "tenants": 8, "prefix": 8_192, "own": 512},
            "output": 128,
        },
        _flood,
    ),
    "quiet": Kind(
        "rare requests, half of which begin as an earlier one",
        {"requests": 300, "rate": 0.1, "shortest": 1_024, "longest": 32_768, "reuse": 0.5, "output": 128},
        _lengths,
    ),
}
"""The zoo. Every kind also has `seed`."""

BOUNDS: dict[str, tuple[float, float]] = {
    "requests": (1, MAX_REQUESTS),
    "seed": (0, 1 << 53),
    "rate": (1e-6, 1e6),
    "flood": (1e-3, 1e6),
    "reuse": (0, 1),
    "pace": (0, 1e6),
    **dict.fromkeys(("gap", "tool", "think", "begin"), (0, 1e6)),
    **dict.fromkeys(("size", "steps", "every", "substeps", "turns", "documents", "tenants"), (1, MAX_COUNT)),
    "picked": (1, MAX_PICKED),
    "subagents": (0, MAX_COUNT),
    **dict.fromkeys(("prefix", "task", "opening", "shortest", "longest", "output"), (1, MAX_TOKENS)),
    **dict.fromkeys(("system", "own", "result", "message", "question"), (0, MAX_TOKENS)),
}
"""Least and most of every parameter."""
NEVER_EMPTY = {"system": ("system", "own")}
"""Parameters by kind that make up a prompt and so cannot all be 0."""


def parse_workload(text: str) -> Workload:
    """Parse `KIND:key=value,...` of a kind of the zoo. Raises StudyError."""
    kind, given = split_spec(text)
    defaults = {**KINDS[kind].defaults, "seed": 0}
    for key, value in given.items():
        if key not in defaults:
            raise StudyError(f"--generate {text}: no {key!r}; there are {', '.join(defaults)}")
        least, most = BOUNDS[key]
        if not least <= value <= most:
            raise StudyError(f"--generate {text}: {key} must be from {least:g} to {most:,.14g}, not {value:g}")
        if isinstance(defaults[key], int) and value != int(value):
            raise StudyError(f"--generate {text}: {key} is a whole number, not {value}")
    values = {**defaults, **given}
    if values.get("shortest", 0) > values.get("longest", 0):
        raise StudyError(f"--generate {text}: shortest is more than longest")
    if kind in NEVER_EMPTY and not any(values[key] for key in NEVER_EMPTY[kind]):
        raise StudyError(f"--generate {text}: {' and '.join(NEVER_EMPTY[kind])} are both 0")
    return Workload(kind, values)


def arrivals_of(workload: Workload) -> list[Arrival]:
    """Return its requests in order of time, the first at 0: the same for the same seed. Raises StudyError."""
    arrivals = list(islice(_woven(sessions_of(workload)), int(workload.values["requests"])))
    began_s = arrivals[0].at_s
    return [Arrival(each.at_s - began_s, each.input_tokens, each.output_tokens, each.hash_ids) for each in arrivals]


def sessions_of(workload: Workload) -> Iterator[list[Arrival]]:
    """Yield its bursts, agents, chats or single requests, without end. Raises StudyError."""
    return KINDS[workload.kind].sessions(_Maker(workload))


def _woven(sessions: Iterator[list[Arrival]]) -> Iterator[Arrival]:
    """Merge the arrivals of all sessions in order of time; of those at one time the one that was made first."""
    waiting: list[tuple[float, int, Arrival]] = []
    made = count()
    for session in sessions:
        while waiting and waiting[0][0] < session[0].at_s:
            yield heappop(waiting)[2]
        for each in session:
            heappush(waiting, (each.at_s, next(made), each))
