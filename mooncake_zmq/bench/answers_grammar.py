"""A synthetic grammar of prompts, and what predicts its prompts: a history of them, and a model of words that has read it."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from mooncake_zmq.gateway.answers.likely import Following

SLOTS = ((12, 1.0), (300, 1.0), (40, 0.5), (25, 0.5), (10, 0.3))
"""The words of each slot, and the share of prompts that have one: what to do, with what, of which kind, for whom, how."""
SMOOTHING = 5.0
"""The weight of what stands at a place in any prompt, in prompts that were read: against what follows the word before it."""
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


@lru_cache(2048)
def _word(slot: int, number: int) -> str:
    whole = slot + len(SLOTS) * number
    parts = [_SYLLABLES[whole % 70], _SYLLABLES[whole * 31 // 70 % 70], _SYLLABLES[whole // 70 % 70]]
    return f" {''.join(parts)}"


@lru_cache(1)
def _places() -> dict[str, tuple[int, int]]:
    """Return the slot of each word, and its number there."""
    return {_word(slot, number).strip(): (slot, number) for slot, (count, _) in enumerate(SLOTS) for number in range(count)}


@lru_cache(16)
def _shares(words: int) -> list[float]:
    """Return the share of each word of a slot, by Zipf's law."""
    whole = sum(1 / rank for rank in range(1, words + 1))
    return [1 / rank / whole for rank in range(1, words + 1)]


class Grammar:
    """Prompts of up to five words. What the second word is depends on the first; the last three are there or not."""

    def draw(self, chance: Random) -> str:
        """Return a prompt."""
        words, first = [], 0
        for slot, (count, present) in enumerate(SLOTS):
            if present == 1.0 or chance.random() < present:
                rank = chance.choices(range(count), _shares(count))[0]
                number = (rank + 7 * first) % count if slot == 1 else rank
                first = number if slot == 0 else first
                words.append(_word(slot, number))
        return "".join(words)

    def expand(self, texts: list[str]) -> list[list[Following]]:
        """Return what may follow each text, as the grammar has it."""
        return [self._following(text.split()) for text in texts]

    def _following(self, words: list[str]) -> list[Following]:
        places = _places()
        last = places[words[-1]][0] if words else -1
        first = places[words[0]][1] if words else 0
        found: list[Following] = []
        skipped = 1.0
        for slot in range(last + 1, len(SLOTS)):
            count, present = SLOTS[slot]
            for rank, share in enumerate(_shares(count)):
                number = (rank + 7 * first) % count if slot == 1 else rank
                found.append((_word(slot, number), -math.log(skipped * present * share)))
            skipped *= 1 - present
            if not skipped:
                return found
        return [*found, (None, -math.log(skipped))]


class WordModel:
    """Predicts the next word by the word before it and by its place, as in the prompts that it has read."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._pairs: dict[str, Counter[str | None]] = defaultdict(Counter)
        self._places: dict[int, Counter[str | None]] = defaultdict(Counter)
        self._known: dict[tuple[str, int], list[Following]] = {}
        for prompt in prompts:
            words = prompt.split()
            for place, (before, word) in enumerate(zip(["", *words], [*words, None], strict=True)):
                self._pairs[before][word] += 1
                self._places[place][word] += 1

    def expand(self, texts: list[str]) -> list[list[Following]]:
        """Return what may follow each text."""
        found = []
        for text in texts:
            words = text.split()
            key = (words[-1] if words else "", len(words))
            if key not in self._known:
                self._known[key] = self._following(*key)
            found.append(self._known[key])
        return found

    def _following(self, before: str, place: int) -> list[Following]:
        pairs, places = self._pairs[before], self._places[place]
        read, all_read = pairs.total(), places.total()
        if not all_read:
            return [(None, 0.0)]
        shares = {
            word: (pairs[word] + SMOOTHING * places[word] / all_read) / (read + SMOOTHING) for word in {**places, **pairs}
        }
        return [(None if word is None else f" {word}", -math.log(share)) for word, share in shares.items() if share]
