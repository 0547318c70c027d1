"""Clients that hold conversations, some about the same documents, and compare every token with what the engine alone gives."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from mooncake_zmq.chaos.checks import Verdict, judge
from mooncake_zmq.chaos.history import History
from mooncake_zmq.chaos.streams import Api, Broken, Failed, Refused
from mooncake_zmq.engine.toy import EOS_ID, TOY_SPEC, ToyEngine

DOCUMENTS, DOCUMENT_TOKENS = 10, 1600
TURNS = (1, 4)
ANSWER_TOKENS = (40, 250)
QUESTION_TOKENS = (5, 60)
GIVE_UP_AFTER_S = 150.0
"""The time after which a request without an answer is lost, over all gateways and however often it was refused."""
REFUSED_PAUSE_S = 0.3
WARM_ANSWERS = 2
"""The answers of each client before the first fault."""
ENOUGH_TO_REUSE = 50
"""The answers after which conversations that go on have found some of their prompts cached."""
POLL_S = 0.1
NOTICED_S = 0.1
"""The silence from which on it counts as a pause."""
WORST_KEPT = 5
DETAILS_KEPT = 20


@dataclass(frozen=True, slots=True, order=True)
class Pause:
    """A silence between two tokens of a stream whose gateway was not disturbed."""

    seconds: float
    ended_at: float
    amid: tuple[str, ...] = ()
    """The outages at that time."""


@dataclass(slots=True)
class Score:
    """The results of all clients together."""

    answered: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resumed: int = 0
    """The number of answers that took more than one attempt of the gateway."""
    refused: int = 0
    away: int = 0
    """The number of calls of a gateway that was not there or ended before its answer; each was repeated at another gateway."""
    cut: int = 0
    """The number of streams that ended with their gateway; each was repeated at another one."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """The number of streams with wrong tokens, by what was wrong."""
    problems: list[str] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    """The longest pauses with at most one outage at a time."""
    pauses_amid_several: list[Pause] = field(default_factory=list)
    worst_by_kind_s: dict[str, float] = field(default_factory=dict)
    """The longest pause during each kind of outage, with or without others at the same time."""
    worst_first_token_s: float = 0.0

    @property
    def reuses(self) -> bool:
        """Whether some of the prompts came from the cache, as far as there were enough of them to say so."""
        return self.cached_tokens > 0 or self.answered < ENOUGH_TO_REUSE

    def complain(self, what: str) -> None:
        """Note a problem; only the first ones are kept in full."""
        if len(self.problems) < DETAILS_KEPT:
            self.problems.append(what)


class Truth:
    """The tokens of an undisturbed greedy run, by the engine alone without a cluster."""

    def __init__(self) -> None:
        self._engine = ToyEngine()

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the next `count` tokens after `prompt`."""
        sequence = self._engine.new_sequence(len(prompt) + count)
        logits = self._engine.prefill(sequence, np.asarray(prompt, np.int32))
        tokens: list[int] = []
        while len(tokens) < count:
            assert logits is not None
            tokens.append(int(np.argmax(logits[-1])))
            logits = self._engine.prefill(sequence, np.asarray(tokens[-1:], np.int32))
        return tokens


@dataclass(slots=True)
class _Stream:
    """One answer in progress, from one gateway."""

    gateway: str
    asked_at: float
    tokens: list[int] = field(default_factory=list)
    received_at: float = 0.0
    finished: bool = False


class Clients:
    """A number of clients at once, until `stopping`; each then finishes its present request."""

    def __init__(self, api: Api, urls: Mapping[str, str], history: History, *, seed: int, count: int) -> None:
        """`urls`: the URL of each gateway, by name."""
        self.score = Score()
        self.stopping = False
        self.open = 0
        self._api = api
        self._urls = dict(urls)
        self._history = history
        self._seed = seed
        self._count = count
        random = Random(f"documents {seed}")
        self._documents = [_words(random, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        self._truth = Truth()

    async def run(self) -> None:
        """Run all clients until `stopping` is set and every answer has ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._converse(Random(f"client {self._seed} {number}")))

    async def warm_up(self) -> None:
        """Have enough answers that everything that is opened at its first use is open."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.run())
            while self.score.answered < WARM_ANSWERS * self._count and not self.score.verdicts:
                await asyncio.sleep(POLL_S)
            self.stopping = True
        self.stopping = False

    async def probe(self) -> None:
        """Ask each gateway a short question: all of them must serve."""
        for name in self._urls:
            random = Random(f"probe {name}")
            await self._ask(random, _words(random, 100), 20, [name])

    async def _converse(self, random: Random) -> None:
        while not self.stopping:
            prompt = random.choice(self._documents)[: random.randint(200, DOCUMENT_TOKENS)]
            for _ in range(random.randint(*TURNS)):
                prompt = prompt + _words(random, random.randint(*QUESTION_TOKENS))
                count = random.randint(*ANSWER_TOKENS)
                names = random.sample(sorted(self._urls), len(self._urls))
                if self.stopping or len(prompt) + count > TOY_SPEC.max_positions:
                    break
                prompt = prompt + await self._ask(random, prompt, count, names)

    async def _ask(self, random: Random, prompt: list[int], count: int, names: Sequence[str]) -> list[int]:
        """Ask until there is an answer, also where a gateway ended amid one; return the expected tokens."""
        expected = await asyncio.to_thread(self._truth.tokens, prompt, count)
        self.open += 1
        give_up_at = time.monotonic() + GIVE_UP_AFTER_S
        tries = 0
        while not await self._try(names[tries % len(names)], prompt, expected):
            tries += 1
            if time.monotonic() > give_up_at:
                self.score.complain(f"a request of {len(prompt)} tokens got no answer in {GIVE_UP_AFTER_S:.0f} s")
                self.score.verdicts["unanswered"] += 1
                break
            await asyncio.sleep(REFUSED_PAUSE_S * (0.5 + random.random()))
        self.open -= 1
        return expected

    async def _try(self, name: str, prompt: list[int], expected: list[int]) -> bool:
        """Call one gateway once. True: there is nothing more to ask for."""
        score, stream = self.score, _Stream(name, time.monotonic())
        try:
            async for piece in self._api.stream(self._urls[name], prompt, len(expected)):
                self._receive(stream, piece.tokens)
                stream.finished = stream.finished or piece.finished
                if piece.usage:
                    self._count_usage(piece.usage, piece.served or {})
        except Refused:
            score.refused += 1
            return False
        except Broken as broken:
            return self._end(stream, expected, f"broke off: {broken}")
        except Failed as failed:
            return self._end(stream, expected, f"got an error: {failed}")
        return self._end(stream, expected, "ended early")

    def _receive(self, stream: _Stream, tokens: tuple[int, ...]) -> None:
        if not tokens:
            return
        now = time.monotonic()
        if not stream.tokens:
            self.score.worst_first_token_s = max(self.score.worst_first_token_s, now - stream.asked_at)
        elif not self._history.disturbed(stream.gateway, stream.received_at, now):
            self._note_pause(stream.received_at, now)
        stream.received_at = now
        stream.tokens += tokens
        self.score.tokens += len(tokens)

    def _note_pause(self, start: float, stop: float) -> None:
        if stop - start < NOTICED_S:
            return
        kept, by_kind = (self.score.pauses, self.score.pauses_amid_several), self.score.worst_by_kind_s
        outages = list(self._history.outages(start, stop))
        for kind in {entry.fault.kind.value for entry in outages}:
            by_kind[kind] = max(by_kind.get(kind, 0.0), stop - start)
        amid = [str(entry.fault) for entry in outages]
        worst = kept[len(amid) > 1]
        worst.append(Pause(stop - start, stop, tuple(amid)))
        worst.sort(reverse=True)
        del worst[WORST_KEPT:]

    def _count_usage(self, usage: dict[str, object], served: dict[str, object]) -> None:
        score = self.score
        score.prompt_tokens += _number(usage.get("prompt_tokens"))
        score.cached_tokens += sum(_number(served.get(f"cached_{where}")) for where in ("own", "local", "remote"))
        score.resumed += _number(served.get("attempts")) > 1

    def _end(self, stream: _Stream, expected: list[int], how: str) -> bool:
        """Judge an answer. Only a disturbed gateway excuses a short one, which is then asked for again."""
        score, verdict = self.score, judge(stream.tokens, expected)
        if verdict is Verdict.SHORT and stream.finished:  # whatever was done to its gateway: it said that this is all
            verdict = Verdict.LOST
        if verdict is Verdict.RIGHT and stream.finished:
            score.answered += 1
            return True
        where = f"{stream.gateway}, {len(stream.tokens)} of {len(expected)} tokens"
        if verdict in (Verdict.RIGHT, Verdict.SHORT):
            if self._history.disturbed(stream.gateway, stream.asked_at, time.monotonic()):
                score.cut += bool(stream.tokens)
                score.away += not stream.tokens
                return False
            score.verdicts["cut for no reason"] += 1
            score.complain(f"{where}: a stream {how}, and nothing had been done to its gateway")
            return False
        score.verdicts[verdict.value] += 1
        score.complain(f"{where}: {verdict.value}: got {stream.tokens!r}, expected {expected!r}"[:4000])
        return True


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _words(random: Random, count: int) -> list[int]:
    return [random.randrange(EOS_ID) for _ in range(count)]
