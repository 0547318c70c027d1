"""Seeded prompts that share beginnings in every way: documents, turns, repetitions, the same blocks in another text."""

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Literal

from mooncake_zmq.prove.tiny_llama import VOCAB

FIRST_ID = 3
"""Ids below are special."""
DOCUMENTS, DOCUMENT_TOKENS = 30, 480
MAX_PROMPT = 700
ANSWER_TOKENS = (1, 24)
LONG_ANSWER, LONG_ANSWERS = 200, 0.03
"""Tokens of a long answer, which makes others lose their place, and the share of them."""
KEPT = 400
"""The number of earlier prompts that may come again."""

Leaves = Literal["never", "waiting", "reading"]


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `leaves`: when its client hangs up."""

    prompt: tuple[int, ...]
    count: int
    leaves: Leaves = "never"
    leaves_after: float = 0.0
    """Seconds of waiting, or tokens that were read."""


class Questions:
    """An endless source of questions, the same for the same seed and the same answers."""

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        self._documents = [self._text(random.randrange(40, DOCUMENT_TOKENS)) for _ in range(DOCUMENTS)]
        self._earlier: deque[tuple[int, ...]] = deque(maxlen=KEPT)

    def next(self, *, hang_ups: float = 0.0) -> Question:
        """Draw a question. `hang_ups`: the share of clients that do not stay."""
        random = self._random
        prompt = self._prompt()
        self._earlier.append(prompt)
        count = LONG_ANSWER if random.random() < LONG_ANSWERS else random.randint(*ANSWER_TOKENS)
        if random.random() >= hang_ups:
            return Question(prompt, count)
        if random.random() < 0.5:
            return Question(prompt, count, "waiting", random.uniform(0.001, 0.2))
        return Question(prompt, count, "reading", random.randint(1, max(1, count - 1)))

    def answered(self, question: Question, tokens: list[int]) -> None:
        """Note an answer: a later question may be the next turn."""
        self._earlier.append((*question.prompt, *tokens))

    def _prompt(self) -> tuple[int, ...]:
        random = self._random
        way = random.random()
        if way < 0.35 and self._earlier:
            prompt = random.choice(self._earlier)
        elif way < 0.65:
            document = random.choice(self._documents)
            prompt = document[: random.randint(1, len(document))]
        else:  # the same blocks behind others
            first, second = random.choice(self._documents), random.choice(self._documents)
            prompt = first[: 32 * random.randint(0, 6)] + second
        if random.random() < 0.7:
            prompt += self._text(random.randint(1, 40))
        return (prompt or self._text(1))[:MAX_PROMPT]

    def _text(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(FIRST_ID, VOCAB) for _ in range(tokens))
