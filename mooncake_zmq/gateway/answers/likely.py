"""The likeliest texts of a source of tokens, the likeliest first, as InstCache (arXiv 2411.13820) predicts prompts. PURE."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import count

Following = tuple[str | None, float]
"""A piece that may follow a text, and its negative log likelihood (NLL) in nats; None: the text ends."""


def likely(
    expand: Callable[[list[str]], Sequence[Sequence[Following]]],
    *,
    max_nll: float,
    at_once: int = 1,
    most_waiting: int = 1 << 16,
    most_expanded: int = 1 << 20,
) -> Iterator[tuple[str, float]]:
    """Yield complete texts and their NLL in order, none above `max_nll`. `expand` returns what may follow each of up to
    `at_once` texts, and is asked for `most_expanded` in all; then the complete texts that are known follow. Of beginnings that
    wait, the likeliest `most_waiting` are kept, at the least."""
    numbers = count()
    waiting: list[tuple[float, int, str, bool]] = [(0.0, next(numbers), "", False)]
    while waiting:
        if waiting[0][3]:
            nll, _, text, _ = heappop(waiting)
            yield text, nll
            continue
        some: list[tuple[float, str]] = []
        at_once = min(at_once, most_expanded)
        while waiting and len(some) < at_once and not waiting[0][3]:  # a complete text may come before what follows the others
            nll, _, text, _ = heappop(waiting)
            some.append((nll, text))
        if not some:
            yield from ((text, nll) for nll, _, text, is_whole in sorted(waiting) if is_whole)
            return
        most_expanded -= len(some)
        for (nll, text), following in zip(some, expand([text for _, text in some]), strict=True):
            for piece, more in following:
                if nll + more <= max_nll:
                    heappush(waiting, (nll + more, next(numbers), text + (piece or ""), piece is None))
        if len(waiting) > 2 * most_waiting:
            waiting = nsmallest(most_waiting, waiting)
