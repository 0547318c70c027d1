"""Prediction of a request's TBT: one rule for the conductor that promises it and the decode that checks it. PURE.

TBT is the mean of the longest tenth of a request's gaps, as the Mooncake paper counts it. Its first gap is longer than the
others: the handoff's last layers have to arrive, and the step that runs then has to end. Of a short output the longest tenth
is mostly that gap. And the step itself grows while the request runs, as all requests of the batch add to their KV.
"""

from typing import Final

LONGEST_SHARE: Final = 10
FIRST_GAP_STEPS: Final = 0.4
"""Steps by which the first gap is longer than a step if others are in the batch: the handoff's end, and the wait for the
running step, on average less than half of one as a step is delayed for a request that is nearly ready."""
GROWTH_TOKENS: Final = 512
"""Upper limit of the expected growth of a sequence's KV while a request runs: others end, and new ones come with less."""


def longest_gaps(gaps: int) -> int:
    """Return how many gaps the longest tenth holds: at least one."""
    return max(1, gaps // LONGEST_SHARE)


def stretch(output_tokens: float, company: float = 1.0) -> float:
    """Return the TBT of a request of `output_tokens` tokens, in steps. `company`: the probability that others are in its batch
    when it comes: an idle decode begins its step at once."""
    return 1 + company * FIRST_GAP_STEPS / longest_gaps(int(output_tokens) - 1)


def longest_step_s(bound_s: float, output_tokens: float) -> float:
    """Return the longest step with which a request of `output_tokens` tokens keeps a TBT of `bound_s`."""
    return bound_s / stretch(output_tokens)


def growth_tokens(batch: float, output_tokens: float) -> float:
    """Return by how many KV tokens a batch with the request has grown when half of the request's tokens are out."""
    return batch * min(output_tokens, GROWTH_TOKENS) / 2
