"""What a request's TBT will be: one rule for the conductor that promises it and the decode that holds itself to it. PURE.

TBT is the mean of the longest tenth of a request's gaps, as the Mooncake paper counts it. Its first gap is longer than the
others: the handoff's last layers have to arrive, and the step that runs then has to end. Of a short output the longest tenth
is little else. And the step itself grows while the request runs, by what all in the batch add to their KV.
"""

LONGEST_SHARE = 10
FIRST_GAP_STEPS = 0.4
"""What the first gap is longer than a step where others are in the batch, in steps: the wait for the step that runs, which is
less than half of one on average as it is held back for a request that is nearly there, and the handoff's end."""
GROWTH_TOKENS = 512
"""Nobody's KV is expected to grow by more while a request runs: others leave, and new ones come with less."""


def longest_gaps(gaps: int) -> int:
    """How many the longest tenth of so many gaps are: one at least."""
    return max(1, gaps // LONGEST_SHARE)


def stretch(output_tokens: float, company: float = 1.0) -> float:
    """Return the TBT of a request of `output_tokens` tokens, in steps. `company`: how likely others are in its batch when it
    comes, 0 to 1: an idle decode begins its step at once."""
    return 1 + company * FIRST_GAP_STEPS / longest_gaps(int(output_tokens) - 1)


def longest_step_s(bound_s: float, output_tokens: float) -> float:
    """The longest step at which a request of `output_tokens` tokens keeps a TBT of `bound_s`."""
    return bound_s / stretch(output_tokens)


def growth_tokens(batch: float, output_tokens: float) -> float:
    """KV tokens that a batch, the request among it, has more when half of the request's tokens are out."""
    return batch * min(output_tokens, GROWTH_TOKENS) / 2
