"""A step waits little for answers whose masks are slow, and they get their turn all the same."""

from collections import defaultdict
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st
from test_decode import Node

from mooncake_zmq.core.messages import Sampling, TokensDecoded
from mooncake_zmq.core.work import DecodeStep, SampleTokens, StepDecoded, TokensSampled
from mooncake_zmq.decode.masks import LEAST_S, SHARE, mask_s

STEP_S = 0.02


@given(st.floats(0, 10), st.booleans(), st.booleans())
def test_a_step_waits_for_a_share_of_its_time_at_most(step_s, constrained, was_late):
    waits_s = mask_s(step_s, constrained=constrained, was_late=was_late)
    assert waits_s <= max(LEAST_S, SHARE * step_s)
    assert (waits_s > 0) == (constrained and not was_late)


class Masks:
    """The one process that makes them, in the order in which they are asked for."""

    def __init__(self, now):
        self.free_at = now
        self.took_s, self.ready_at = {}, {}

    def ask(self, now, sequence):
        if self.took_s[sequence]:
            self.free_at = max(self.free_at, now) + self.took_s[sequence]
        self.ready_at[sequence] = self.free_at if self.took_s[sequence] else now

    def step(self, now, work):
        """When a step ends that begins now, and who sits it out, as `runtime.executor.compute` does it."""
        computed_at = now + STEP_S
        awaited = [entry for entry in work.entries if entry.mask_s and self.ready_at[entry.sequence] > computed_at]
        needed_at = max((self.ready_at[entry.sequence] for entry in awaited), default=computed_at)
        end = min(needed_at, computed_at + max((entry.mask_s for entry in awaited), default=0.0))
        return end, tuple(place for place, entry in enumerate(work.entries) if self.ready_at[entry.sequence] > end)


def gaps_of(slow, plain=8, quick=0, slow_s=0.0245, quick_s=0.0005, until_s=20.0):
    """By request, the times between its tokens: those of `plain` ones need no masks, others one that takes so long."""
    node = Node(max_batch=128, max_requests=128, capacity_tokens=1 << 16)
    masks = Masks(node.now)
    for number, took_s in enumerate((0.0,) * plain + (slow_s,) * slow + (quick_s,) * quick):
        sampling = Sampling(constraint=b"a grammar", prompt_tokens=6) if took_s else Sampling()
        node.run(f"r{number}", max_tokens=1 << 20, sampling=sampling)
        sequence = node.actor.requests.live[f"r{number}"].sequence
        masks.took_s[sequence] = took_s
        masks.ask(node.now, sequence)
    ends, told_at, gaps = {}, {}, defaultdict(list)
    stop_at = node.now + until_s
    while node.now < stop_at:
        for work_id, work in node.works.items():
            if isinstance(work, DecodeStep) and work_id not in ends:
                ends[work_id] = (*masks.step(node.now, work), node.now)
            elif isinstance(work, SampleTokens) and work_id not in ends:
                ends[work_id] = max(node.now, masks.ready_at[work.logits_of]), (), node.now
        work_id = min(ends, key=lambda work_id: (ends[work_id][0], work_id))
        (node.now, sat_out, began), work = ends.pop(work_id), node.works[work_id]
        if isinstance(work, SampleTokens):
            masks.ask(node.now, work.logits_of)
            node.done(work_id, TokensSampled(((6, None),)))
        else:
            for place, entry in enumerate(work.entries):
                if place not in sat_out:
                    masks.ask(node.now, entry.sequence)
            node.done(work_id, StepDecoded(((6,) * len(work.entries),), node.now - began, sat_out=sat_out))
        for told in node.take(TokensDecoded):
            for name, *_ in told.entries:
                gaps[name].append(node.now - told_at.get(name, node.now))
                told_at[name] = node.now
    return gaps


def test_sixty_four_answers_with_slow_masks_cost_the_others_a_small_part_of_a_step():
    gaps = gaps_of(slow=64)
    others = [gap for number in range(8) for gap in gaps[f"r{number}"][1:]]
    assert fmean(others) < 1.02 * STEP_S
    assert max(others) <= STEP_S / (1 - SHARE), "what steps take counts what they waited"


def test_nobody_whose_masks_are_slow_is_left_out_for_good():
    made = [len(gaps) for name, gaps in gaps_of(slow=64).items() if int(name[1:]) >= 8]
    assert len(made) == 64
    assert max(made) <= min(made) + 1
    assert sum(made) > 0.9 * 20.0 / 0.0245, "the process that makes them is never idle"


def test_answers_that_keep_up_are_waited_for_and_step_as_often_as_others():
    gaps = gaps_of(slow=0, quick=16)
    made = [len(each) for each in gaps.values()]
    assert max(made) <= min(made) + 1, "one step began before all others came"
