"""Whether a vLLM that owes tokens has stopped to give any. PURE.

Its answers go on together, one step after the other, so while any of them runs no step is longer than its own time and that of
the prompts that are computed beside it. A judgement that comes too early costs an attempt; each makes the next one slower.
"""

from typing import Final

PROMPTS: Final = 4.0
"""Prompts under way may take so many times what they are expected to."""
FORGET_S: Final = 600.0
"""So long after a judgement the first patience holds again."""


class Silence:
    """`patience_s`: how long nothing may come at first, beside the prompts; `longest_s`: at most, at any time."""

    def __init__(self, patience_s: float, longest_s: float) -> None:
        self._first_s = self._patience_s = min(patience_s, longest_s)
        self._longest_s = longest_s
        self._heard_at = 0.0
        self._judged_at = 0.0

    def heard(self, now: float) -> None:
        """Note that something came, or that it was given something after it owed nothing."""
        self._heard_at = now

    def nothing_since(self, then: float) -> bool:
        """Return whether nothing came since `then`."""
        return self._heard_at < then

    def is_over_long(self, now: float, prompts_s: float) -> bool:
        """Return whether nothing came for too long, with prompts under way that should take so many seconds."""
        return now - self._heard_at > min(self._longest_s, self._patience_s + PROMPTS * prompts_s)

    def judge(self, now: float) -> None:
        """Be more patient from now on."""
        if now - self._judged_at > FORGET_S:
            self._patience_s = self._first_s
        self._patience_s = min(self._longest_s, 2 * self._patience_s)
        self._judged_at = now
