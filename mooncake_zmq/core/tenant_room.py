"""The rule by which tenants leave room for each other in what they share: the KV, places and step time of a decode. PURE.

A tenant gets no more where it would hold more than a multiple of what is left free. So alone it gets seven eighths for new
requests, and tenants that all want more end with equal parts. Without tenants nothing limits.
"""

from typing import Final

NEW_OF_FREE: Final = 7
GROWN_OF_FREE: Final = 15
"""The multiples for a new request, and for the growth of those that are here: they need not be preempted soon."""
SMALL_PART: Final = 16
"""A tenant may always hold a sixteenth of the whole, if it is free."""


def left_free(held: float, whole: float, multiple: int = NEW_OF_FREE) -> float:
    """Return how much of the whole must be free beside a tenant that holds `held` of it."""
    return held / multiple if held * SMALL_PART > whole else 0.0


def leaves_room(held: float, more: float, *, free: float, whole: float, multiple: int = NEW_OF_FREE) -> bool:
    """Return whether a tenant that holds `held` of the whole may take more of it."""
    return free - more >= left_free(held + more, whole, multiple)
