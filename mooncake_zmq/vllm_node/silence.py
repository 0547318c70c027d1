"""Detection of a vLLM that has stopped to make tokens although some are due. PURE.

Its answers advance together, one step after the other, so while any of them runs no step takes longer than its own time plus
that of the prompts computed beside it. A wrong detection costs an attempt; each one makes the next slower.
"""

from typing import Final

PROMPTS: Final = 4.0
"""Factor on the expected time of the prompts under way."""
FORGET_S: Final = 600.0
"""Seconds after a detection until the first timeout applies again."""


class Silence:
    """Detect that nothing arrives. `patience_s`: the first timeout, beside the prompts; `longest_s`: the longest one."""

    def __init__(self, patience_s: float, longest_s: float) -> None:
        self._first_s = self._timeout_s = min(patience_s, longest_s)
        self._longest_s = longest_s
        self._received_at = 0.0
        self._judged_at = 0.0

    def heard(self, now: float) -> None:
        """Record that something arrived, or that vLLM got work while it owed nothing."""
        self._received_at = now

    def nothing_since(self, then: float) -> bool:
        """Return whether nothing arrived since `then`."""
        return self._received_at < then

    def is_over_long(self, now: float, prompts_s: float) -> bool:
        """Return whether nothing arrived for too long, with prompts under way that are expected to take `prompts_s`."""
        return now - self._received_at > min(self._longest_s, self._timeout_s + PROMPTS * prompts_s)

    def judge(self, now: float) -> None:
        """Record a detection, which doubles the timeout."""
        if now - self._judged_at > FORGET_S:
            self._timeout_s = self._first_s
        self._timeout_s = min(self._longest_s, 2 * self._timeout_s)
        self._judged_at = now
