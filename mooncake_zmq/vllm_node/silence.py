"""Detection of a vLLM that has stopped to make tokens although some are due. PURE.

Its answers advance together, one step after the other, so no step takes longer than its own time plus that of the prompts
computed beside it, and no prompt longer than it and those before it should take. A wrong detection costs an attempt; each one
makes the next slower.
"""

from typing import Final

PROMPTS: Final = 4.0
"""Factor on the expected time of the prompts under way."""
FORGET_S: Final = 600.0
"""Seconds after a detection until the first timeout applies again."""


class Silence:
    """Detect that nothing arrives. `timeout_s`: the first timeout, beside the prompts; `longest_s`: the longest one."""

    def __init__(self, timeout_s: float, longest_s: float) -> None:
        self._first_s = self._timeout_s = min(timeout_s, longest_s)
        self._longest_s = longest_s
        self._received_at = 0.0
        self._owed_at = 0.0
        """When the latest thing arrived, or the first work began after nothing was due."""
        self._judged_at = 0.0

    def received(self, now: float) -> None:
        """Record that something arrived."""
        self._received_at = self._owed_at = now

    def owed(self, now: float) -> None:
        """Record that vLLM got work while nothing was due."""
        self._owed_at = now

    def nothing_since(self, then: float) -> bool:
        """Return whether nothing arrived since `then`."""
        return self._received_at < then

    def is_over_long(self, now: float, prompts_s: float) -> bool:
        """Return whether nothing arrived for too long, with prompts under way that are expected to take `prompts_s`."""
        return now - self._owed_at > min(self._longest_s, self._timeout_s + PROMPTS * prompts_s)

    def judge(self, now: float) -> None:
        """Record a detection, which doubles the timeout."""
        if now - self._judged_at > FORGET_S:
            self._timeout_s = self._first_s
        self._timeout_s = min(self._longest_s, 2 * self._timeout_s)
        self._judged_at = now
