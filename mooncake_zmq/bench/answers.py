"""`bench answers`: what a gateway's kept answers save, how many of them are wrong, and whether prompts can be answered ahead.

The table is asked as a gateway asks it, for keys by Zipf's law of which some change their answer once, at a time by chance.
What it serves is compared with the truth. Beside it are other caches of as many entries: one that never asks again, one that
asks again after a lifetime, one that also takes the answer of a similar prompt (by the cosine of trigrams), both with the
lifetime at which they need as many inferences; and an ideal one, which holds the likeliest keys and knows of each change.
"""

import time
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil, log
from random import Random
from statistics import median

import msgspec
import numpy as np
from msgspec import structs

from mooncake_zmq.bench.answers_grammar import Grammar, WordModel
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.core.messages import Sampling, StopRule
from mooncake_zmq.gateway.answers.likely import Following, likely
from mooncake_zmq.gateway.answers.table import TENANT_SHARE, Answer, AnswerTable, Asked, Question, Stored
from mooncake_zmq.gateway.openai.answer_keys import asked_of
from mooncake_zmq.gateway.openai.bodies import ChatBody
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Finished
from mooncake_zmq.gateway.settings import AnswersSettings

INFERENCES_TARGET = 35.0
LOOKUP_TARGET_US = 30.0
DIMENSIONS = 256
TOKENS = 100
"""Tokens of an answer."""
MAX_NLL = 30.0
CHANGES = 10
OFTEN = f"{CHANGES} changes each"
"""The same with keys that change more often than the bound permits."""
AT_ONCE = 16
_END = Finished(
    reason="stop",
    prompt_tokens=1,
    completion_tokens=0,
    cached_own=0,
    cached_local=0,
    cached_remote=0,
    prefill="",
    decode="",
    attempts=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersBench:
    """The parameters of a run. `changing`: the share of keys whose answer changes; `entries`: of each cache; `sizes`: numbers
    of prompts that are answered ahead; `read`: prompts of the history; `similarity`: the least cosine of a similar prompt."""

    requests: int = 100_000
    keys: int = 10_000
    changing: float = 0.05
    entries: int = 8000
    seeds: int = 10
    similarity: float = 0.95
    read: int = 20_000
    sizes: tuple[int, ...] = (100, 1000, 4000)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cache did: the share of requests that needed an inference, and that of wrong answers among those it gave."""

    inferences: float
    wrong: float


class Trace:
    """The keys that are asked for one after the other, 0 the likeliest, and the number of the right answer at that time."""

    def __init__(self, wanted: AnswersBench, seed: int, changes: int = 1) -> None:
        """`changes`: of a key that changes its answer."""
        random = np.random.default_rng(seed)
        shares = 1 / np.arange(1, wanted.keys + 1)
        keys = random.choice(wanted.keys, wanted.requests, p=shares / shares.sum())
        times = np.full((wanted.keys, changes), wanted.requests)
        changing = random.choice(wanted.keys, int(wanted.keys * wanted.changing), replace=False)
        times[changing] = random.integers(0, wanted.requests, (len(changing), changes))
        self.keys: list[int] = keys.tolist()
        self.truths: list[int] = (np.arange(wanted.requests)[:, None] >= times[keys]).sum(axis=1).tolist()
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[int, tuple[int, int]]]:
        return enumerate(zip(self.keys, self.truths, strict=True))


def verified(trace: Trace, wanted: AnswersBench, max_error: float) -> Outcome:
    """Run the gateway's table."""
    settings = AnswersSettings(max_error=max_error, max_entries=TENANT_SHARE * wanted.entries, max_bytes=1 << 40)
    table = AnswerTable(settings, Random(trace.seed).random)
    given = wrong = 0
    asked = [Asked("", "", str(key).encode()) for key in range(wanted.keys)]
    for _, (key, truth) in trace:
        found = table.look_up(asked[key])
        if isinstance(found, Stored):
            given += 1
            wrong += found.answer.end.completion_tokens != truth
        else:
            table.settle(found, _answer(truth), 0.0)
    table.check()
    return Outcome(1 - given / len(trace.keys), wrong / max(1, given))


def aged(trace: Trace, wanted: AnswersBench, lifetime: int, similar: Sequence[Sequence[int]] = ()) -> Outcome:
    """Run a cache whose least recently used entry makes room and whose entries live for so many requests. `similar`: the keys
    whose answers are taken as well, the most similar first."""
    held: OrderedDict[int, tuple[int, int]] = OrderedDict()
    given = wrong = 0
    for number, (key, truth) in trace:
        for other in (key, *(similar[key] if similar else ())):
            if other in held and number - held[other][0] < lifetime:
                given += 1
                wrong += other != key or held[other][1] != truth
                held.move_to_end(other)
                break
        else:
            held[key] = number, truth
            held.move_to_end(key)
            if len(held) > wanted.entries:
                held.popitem(last=False)
    return Outcome(1 - given / len(trace.keys), wrong / max(1, given))


def ideal(trace: Trace, wanted: AnswersBench) -> Outcome:
    """Run a cache that holds the likeliest keys and knows of each change."""
    held: dict[int, int] = {}
    given = 0
    for _, (key, truth) in trace:
        given += held.get(key) == truth
        if key < wanted.entries:
            held[key] = truth
    return Outcome(1 - given / len(trace.keys), 0.0)


def lifetime_for(inferences: float, run: Callable[[int], Outcome], longest: int) -> int:
    """Return the longest lifetime with which a cache needs as many inferences, at least."""
    lifetimes = [round(1.05**power) for power in range(ceil(log(longest, 1.05)) + 1)]
    place = bisect_left(lifetimes, -inferences, key=lambda lifetime: -run(lifetime).inferences)
    return lifetimes[max(0, place - 1)]


def similar_keys(wanted: AnswersBench) -> list[list[int]]:
    """Return the similar keys of each key, whose prompts are drawn from the grammar."""
    grammar, chance = Grammar(), Random(0)
    prompts: dict[str, None] = {}
    while len(prompts) < wanted.keys:
        prompts[grammar.draw(chance)] = None
    vectors = np.zeros((wanted.keys, DIMENSIONS), np.float32)
    for vector, prompt in zip(vectors, prompts, strict=True):
        for start in range(len(prompt) - 2):
            vector[zlib.crc32(prompt[start : start + 3].encode()) % DIMENSIONS] += 1
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found: list[list[int]] = []
    for first in range(0, wanted.keys, 1000):
        for offset, row in enumerate(vectors[first : first + 1000] @ vectors.T):
            near = np.nonzero(row >= wanted.similarity)[0]
            found.append([int(key) for key in near[np.argsort(-row[near])] if key != first + offset])
    return found


def _answer(number: int) -> Answer:
    """Return the answer with this number, which its end has too."""
    end = structs.replace(_END, completion_tokens=number)
    return Answer(number.to_bytes(4 * TOKENS, "little"), "stop", end)


def table_rows(wanted: AnswersBench, progress: Progress) -> tuple[list[Row], list[str]]:
    """Return the rows of the table beside the other caches, and notes."""
    max_error = AnswersSettings().max_error
    similar = similar_keys(wanted)
    names = ("verified", "never asks again", "lifetime", "similar", "ideal")
    found: list[dict[str, Outcome]] = []
    for seed in range(wanted.seeds):
        trace, often = Trace(wanted, seed), Trace(wanted, seed, CHANGES)
        ours = verified(trace, wanted, max_error)
        caches = {name: partial(aged, trace, wanted, similar=near) for name, near in (("lifetime", ()), ("similar", similar))}
        lifetimes = {name: lifetime_for(ours.inferences, cache, wanted.requests) for name, cache in caches.items()}
        each = {"verified": ours, "never asks again": aged(trace, wanted, wanted.requests), "ideal": ideal(trace, wanted)}
        each |= {name: cache(lifetimes[name]) for name, cache in caches.items()}
        each |= {OFTEN: verified(often, wanted, max_error), f"{OFTEN}, lifetime": aged(often, wanted, lifetimes["lifetime"])}
        found.append(each)
        latest = (f"{name} {outcome.inferences:.3f} {outcome.wrong:.4f}" for name, outcome in each.items())
        progress(f"seed {seed}, inferences of all and wrong of those given: {', '.join(latest)}; {lifetimes}")
    inferences = {name: 100 * median(each[name].inferences for each in found) for name in found[0]}
    wrong = {name: 1000 * median(each[name].wrong for each in found) for name in found[0]}
    worst = {name: 1000 * max(each[name].wrong for each in found) for name in found[0]}
    most = 100 * max(each["verified"].inferences for each in found)
    asked, given, bound = "of 100 requests", "of 1,000 given", 1000 * max_error
    rows = [Row("inferences, worst seed / target", asked, most, INFERENCES_TARGET)]
    rows += [Row(f"inferences / {name}", asked, inferences["verified"], inferences[name]) for name in names[1:]]
    rows += [Row("wrong, worst seed / max_error", given, worst["verified"], bound)]
    rows += [Row(f"wrong / {name}", given, wrong["verified"], wrong[name]) for name in names[1:] if name != "ideal"]
    rows += [
        Row(f"{OFTEN}: inferences / no cache", asked, inferences[OFTEN], 100.0),
        Row(f"{OFTEN}: wrong, worst seed / max_error", given, worst[OFTEN], bound),
        Row(f"{OFTEN}: wrong / the same lifetime", given, wrong[OFTEN], wrong[f"{OFTEN}, lifetime"]),
    ]
    within, within_often = (sum(each[name].wrong <= max_error for each in found) for name in ("verified", OFTEN))
    notes = [
        f"{wanted.requests:,} requests for {wanted.keys:,} keys, Zipf 1.0; {wanted.changing:.0%} of keys change their answer",
        f"{wanted.entries:,} entries in each cache; wrong answers are within max_error = {max_error:g} in {within} of "
        f"{wanted.seeds} seeds, and with {OFTEN} in {within_often}",
        f"similar: a cosine of trigrams of {wanted.similarity:g} or more; lifetime, similar: at as many inferences as verified",
    ]
    return rows, notes


def lookup_row() -> Row:
    """Return the time that the key of a chat and its lookup take."""
    settings = AnswersSettings(max_error=1.0)
    raw = msgspec.json.encode(
        {
            "messages": [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "x" * 400}],
            "temperature": 0,
        }
    )
    body = msgspec.json.decode(raw, type=ChatBody)
    prompts = [[message.turn() for message in body.messages]]
    request = ClientRequest(tokens=bytes(4), root=bytes(16), keys=(), sampling=Sampling(), stop=StopRule(max_tokens=100))
    table = AnswerTable(settings, lambda: 0.99)
    for number in range(5000):
        table.settle(Question(Asked("", "", number.to_bytes(16, "little"))), _answer(1), 0.0)
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        asked = asked_of(body, prompts, request, settings)
        assert asked is not None
        found = table.look_up(asked)
        if isinstance(found, Stored):
            assert len([*found.outputs()]) == TOKENS + 1
        times.append(time.perf_counter() - began)
        if isinstance(found, Question):
            table.settle(found, _answer(1), 0.0)
    return Row("key of 600 characters, lookup, outputs of 100 tokens / target", "us", 1e6 * median(times), LOOKUP_TARGET_US)


def ahead_rows(wanted: AnswersBench, progress: Progress) -> list[Row]:
    """Return the hits of prompts that were answered ahead, beside those of as many prompts of the history."""
    grammar, chance = Grammar(), Random(1)
    history = [grammar.draw(chance) for _ in range(wanted.read)]
    asked = [grammar.draw(chance) for _ in range(wanted.read)]
    counts: dict[str, int] = {}
    for prompt in history:
        counts[prompt] = counts.get(prompt, 0) + 1
    seen = sorted(counts, key=lambda prompt: -counts[prompt])
    ahead = {
        "read": _enumerated(WordModel(history).expand, max(wanted.sizes)),
        "own": _enumerated(grammar.expand, max(wanted.sizes)),
    }
    rows = []
    for size in wanted.sizes:
        hits = {name: _hits(prompts[:size], asked) for name, prompts in (*ahead.items(), ("seen", seen))}
        progress(f"{size:,} entries: {hits}")
        for name, what in (("read", "predicted by a model of words"), ("own", "by the grammar's own likelihood")):
            rows.append(
                Row(f"hits, {size:,} {what} / most frequent seen", "of 100 prompts", hits[name], hits["seen"], higher=True)
            )
    return rows


def _enumerated(expand: Callable[[list[str]], Sequence[Sequence[Following]]], count: int) -> list[str]:
    found = likely(expand, max_nll=MAX_NLL, at_once=AT_ONCE, most_waiting=8 * count)
    return [text for text, _ in islice(found, count)]


def _hits(kept: Sequence[str], asked: Sequence[str]) -> float:
    held = set(kept)
    return 100 * sum(prompt in held for prompt in asked) / len(asked)


def bench_answers(wanted: AnswersBench, progress: Progress) -> Report:
    """Run all of it."""
    report = Report("answers")
    rows, report.notes = table_rows(wanted, progress)
    report.rows = [*rows, lookup_row(), *ahead_rows(wanted, progress)]
    report.notes.append(
        f"prompts of a synthetic grammar; the model and the history have seen {wanted.read:,}, and as many others are asked"
    )
    return report
