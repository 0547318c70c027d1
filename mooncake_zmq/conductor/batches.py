"""Chooses the decode that a request joins: of those with room the one with the smallest predicted gap between tokens. PURE.

Not every decode is evaluated. Decodes are visited in the order of their reported step time, the idle ones first, until no
unvisited one can be better, even if as many requests as possible have left its batch. The choice is the same as if all were
evaluated.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

from mooncake_zmq.conductor.choices import DecodeChoice
from mooncake_zmq.conductor.decodes import Candidates, DecodeNode, Decodes
from mooncake_zmq.conductor.handovers import Handover
from mooncake_zmq.conductor.lending import borrowing
from mooncake_zmq.conductor.ranking import Ranked
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core import gaps
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.tenant_room import left_free

STALE_S: Final = 1.0
"""The age from which a report says little about a batch; such decodes are all evaluated."""

ROUNDING: Final = 1 + 1e-9
"""The tolerance in comparing a bound with a gap: the two are summed in a different order."""
MOST_TIES: Final = 2
"""The number of tied decodes of which the one with the most free KV is taken: two suffice to keep decodes about even."""
NO_ROOM: Final = math.inf
"""The gap of a decode that cannot take the request."""

Entries = list[Ranked[DecodeNode]]
"""Decodes in the order of their step times."""


class Joining:
    """One request that will join a batch at time `at`, as `choices` sequences, with `own_tokens` of KV, and that needs
    `need_tokens` in all. `wait_s` is the time until its prefill begins and `stay_tokens` how long a request stays in a batch.
    `borrower_tokens`: what it needs in all where it borrows; 0: it must not. `handover_s` is the time that any decode needs to
    get its KV between the first and second token; `handover` gives it per decode for reused blocks, if there are any. `tenant`:
    a named tenant leaves room for others; `begins`: when its prefill begins."""

    slack: float = 0.0
    """The most seconds of step time that a batch may have lost since its report, for reports younger than `STALE_S`."""
    alone_s: float = 0.0
    """The step time of this request alone, by the cost model."""
    base_s: float = 0.0
    """The lower bound of any step time; `own_s` is the least that the request adds to one."""
    own_s: float = 0.0
    late_s: float = 0.0
    """The least delay that its KV adds to the gap of decodes not yet evaluated for the blocks on their hosts."""

    def __init__(
        self,
        at: float,
        *,
        wait_s: float,
        own_tokens: float,
        need_tokens: int,
        expected_tokens: float,
        stay_tokens: float,
        choices: int = 1,
        borrower_tokens: int = 0,
        handover_s: float = 0.0,
        handover: Handover | None = None,
        tenant: str = "",
        begins: float = 0.0,
    ) -> None:
        self.at = at
        self.tenant = tenant
        self.begins = begins
        self.handover = handover
        self.choices = choices
        self.borrower_tokens = borrower_tokens
        self.may_borrow = choices == 1 and borrower_tokens > 0
        self.handover_s = handover_s
        self.wait_s = wait_s
        self.own_tokens = own_tokens
        self.need_tokens = need_tokens
        self.expected_tokens = expected_tokens
        self.stay_tokens = stay_tokens
        self.longest = gaps.longest_gaps(int(expected_tokens) - 1)
        """The number of gaps over which TBT spreads a wait between the first two tokens."""
        self.wait_share = gaps.FIRST_GAP_STEPS / self.longest
        """The share of a step that the wait for a running step of other requests adds to TBT."""
        self.takes_unreported = False
        """Whether decodes that have not reported count as if they had room."""
        self.looked_at: dict[DecodeNode, float] = {}
        """The gap with each evaluated decode, inf where it has no room."""


class Batches:
    """Predicts gaps between tokens and chooses a decode by them."""

    def __init__(self, settings: ConductorSettings, costs: Costs, decodes: Decodes) -> None:
        self._tie = 1 + settings.tie_ratio
        self._decodes = decodes
        self._step_s = costs.decode_step_s
        self._request_s = costs.decode_request_s
        self._context_s = costs.decode_context_s

    def choose(
        self,
        now: float,
        joining: Joining,
        candidates: Candidates,
        host: str,
        exclude: tuple[str, ...],
        without: frozenset[str] = frozenset(),
    ) -> DecodeChoice | None:
        """Return the choice among the candidates. Of tied decodes one on `host` is preferred, where the handoff is a read of
        shared memory; otherwise, among the `MOST_TIES` (or a few more) with the lightest load, the one with the most free
        tokens, then by name. Decodes in `exclude` are taken only if no other has room, and those in `without` never. A decode
        that has just come up, of whose room nothing is known, is taken only if no other is."""
        self._look_at_stale(now, joining, candidates)
        self._look_at_holders(joining, candidates)
        barred = (without.union(exclude), without) if exclude else (without,)
        choice = self._with_room(joining, candidates, host, barred)
        if choice is None and joining.may_borrow:
            choice = self._borrowing(joining, candidates, barred)
        if choice is None and candidates.unreported:
            joining.takes_unreported = True
            for node in candidates.unreported:
                joining.looked_at.pop(node, None)
            choice = self._with_room(joining, candidates, host, barred)
        return choice

    def _with_room(
        self, joining: Joining, candidates: Candidates, host: str, barred: Sequence[frozenset[str]]
    ) -> DecodeChoice | None:
        """Return the choice of a decode with room outside the first set of names in `barred`, or else outside the next one."""
        for names in barred:
            node = self._least(joining, candidates, host, names)
            if node is not None:
                return self.promise(joining, node)
        return None

    def _borrowing(self, joining: Joining, candidates: Candidates, barred: Sequence[frozenset[str]]) -> DecodeChoice | None:
        """Return the choice of a decode that borrows what it has no room for, by the same rule; None if there is none."""
        for names in barred:
            nodes = [node for node in candidates.reported if not node.draining and node.name not in names]
            found = borrowing(nodes, joining.borrower_tokens, int(joining.own_tokens), joining.tenant)
            if found is not None:
                joining.need_tokens = joining.borrower_tokens
                choice = self.stay(joining, found[0])
                choice.lent = found[1]
                return choice
        return None

    def stay(self, joining: Joining, node: DecodeNode) -> DecodeChoice:
        """Return the choice of a node whether it has room or not: it also prefills the request, and what does not fit there at
        once waits in its engine; or it borrows."""
        self.weigh(joining)
        joining.looked_at[node] = self.gap_s(joining, node)
        return self.promise(joining, node)

    def promise(self, joining: Joining, node: DecodeNode) -> DecodeChoice:
        """Return the choice of `node` with the predicted TBT: from the gap when the request joins, and its growth while the
        request runs."""
        batch, expected = self.batch(joining, node), joining.expected_tokens
        late_s = self._late_s(joining, node)
        load_s = late_s
        if joining.handover_s:
            load_s += joining.handover_s / joining.longest
        grown_s = self._grown_s(node, batch + joining.choices, expected)
        alone_s = self._alone_s(joining, node) + self._grown_s(node, joining.choices, expected)
        tbt_s = self._look_at(joining, node) - late_s + (1.0 + joining.wait_share * min(1.0, batch)) * grown_s + load_s
        moving_s = 0.0 if joining.handover is None else joining.handover.moving_s(node)
        tenant_s = self._tenant_s(joining, node) if joining.tenant in node.tenants else 0.0
        return DecodeChoice(node, tbt_s=tbt_s, batch=batch, alone_s=alone_s + load_s, moving_s=moving_s, tenant_s=tenant_s)

    def weigh(self, joining: Joining) -> None:
        """Set what the request adds to any step; must precede `gap_s`."""
        joining.alone_s = self._step_s + joining.choices * self._request_s + self._context_s * joining.own_tokens

    def gap_s(self, joining: Joining, node: DecodeNode) -> float:
        """Return the predicted gap between tokens when the request joins. Waits for the running step of others and for a place
        in the batch are spread over the longest tenth of the gaps, as TBT counts them."""
        at = joining.at
        stay_s = joining.stay_tokens * node.step_s
        step_s = joining.alone_s
        batch = 0.0
        if node.there:
            gone = (at - node.reported_at) / stay_s
            if gone < 1.0:
                batch = node.there * (1.0 - gone)
                step_s += node.load_s * (1.0 - gone)
        if node.coming:
            since = at - stay_s
            for booking in node.coming:
                if since < booking.due <= at:
                    batch += booking.choices
                    step_s += booking.load_s
        gap_s = node.scale * step_s * (1.0 + joining.wait_share * min(1.0, batch))
        if node.there + node.coming_requests + joining.choices <= node.max_batch:
            return gap_s
        over = batch - node.max_batch + joining.choices
        return self._waiting_s(joining, node, gap_s, over) if over > 0 else gap_s

    def batch(self, joining: Joining, node: DecodeNode) -> float:
        """Return how many requests are expected in the batch when the request joins."""
        at, stay_s = joining.at, joining.stay_tokens * node.step_s
        staying = max(0.0, 1.0 - (at - node.reported_at) / stay_s)
        come = 0
        for booking in node.coming:
            if at - stay_s < booking.due <= at:
                come += booking.choices
        return node.there * staying + come

    # --- leaves

    def _tenant_s(self, joining: Joining, node: DecodeNode) -> float:
        """Return what the tenant's requests, with this one, add to a step; 0 if it is the only one then."""
        held_s = node.held_s(joining.tenant, joining.at)
        return held_s + node.scale * (joining.alone_s - self._step_s) if held_s else 0.0

    def _grown_s(self, node: DecodeNode, batch: float, expected_tokens: float) -> float:
        return node.scale * self._context_s * gaps.growth_tokens(batch, expected_tokens)

    def _alone_s(self, joining: Joining, node: DecodeNode) -> float:
        """Return the gap without other requests; even then the request's choices beyond the batch size wait for each other."""
        gap_s, over = node.scale * joining.alone_s, joining.choices - node.max_batch
        return self._waiting_s(joining, node, gap_s, over) if over > 0 else gap_s

    def _waiting_s(self, joining: Joining, node: DecodeNode, gap_s: float, over: float) -> float:
        """Return the gap where the batch is full: the step of a full batch, and the wait until `over` requests have left one
        after another."""
        base_s = node.scale * self._step_s
        full_s = base_s + (gap_s - base_s) * node.max_batch / (node.max_batch + over)
        stay_s = joining.stay_tokens * node.step_s / joining.longest
        return full_s + over * stay_s / node.max_batch

    def _look_at(self, joining: Joining, node: DecodeNode) -> float:
        """Return the gap with a decode, inf if it has no room, and remember it."""
        gap_s = joining.looked_at.get(node)
        if gap_s is None:
            left_tokens = _left_tokens(joining, node) if joining.tenant in node.tenants else 0.0
            is_whole = not (node.borrows and joining.may_borrow) or joining.tenant in node.tenants
            fits = is_whole or joining.own_tokens <= node.own_tokens
            if node.load is None:
                fits = joining.takes_unreported
            roomy = fits and node.has_room(joining.need_tokens, joining.choices, left_tokens)
            if fits and not roomy and (joining.wait_s > 0 or node.coming):
                roomy = node.will_have_room(
                    joining.need_tokens,
                    joining.choices,
                    left_tokens,
                    wait_s=joining.wait_s,
                    begins=joining.begins,
                    stay_tokens=joining.stay_tokens,
                )
            gap_s = self.gap_s(joining, node) + self._late_s(joining, node) if roomy else NO_ROOM
            joining.looked_at[node] = gap_s
        return gap_s

    def _late_s(self, joining: Joining, node: DecodeNode) -> float:
        """Return what waiting for reused blocks adds to the gap with a decode, as TBT counts it."""
        handover = joining.handover
        if handover is None or not handover.latest_s:
            return 0.0
        late_s = handover.late_s(handover.held(node))
        return late_s / joining.longest if late_s else 0.0

    def _look_at_holders(self, joining: Joining, candidates: Candidates) -> None:
        """Evaluate the decodes whose hosts hold the most reused blocks, and set the least delay of all others."""
        if joining.handover is None:
            return
        holders, late_s = joining.handover.holders(candidates.by_host)
        for node in holders:
            if not node.closed:
                self._look_at(joining, node)
        if late_s:
            joining.late_s = late_s / joining.longest

    def _look_at_stale(self, now: float, joining: Joining, candidates: Candidates) -> None:
        """Evaluate the decodes whose reports are old, and set the bounds that hold for all others."""
        least = self._decodes.least_scale
        self.weigh(joining)
        joining.base_s, joining.own_s = least * self._step_s, least * (joining.alone_s - self._step_s)
        for node in candidates.reported:
            if now - node.reported_at <= STALE_S:
                joining.slack = (joining.at - node.reported_at) / joining.stay_tokens
                break
            if not node.closed:
                self._look_at(joining, node)

    def _least(self, joining: Joining, candidates: Candidates, host: str, exclude: Collection[str]) -> DecodeNode | None:
        idle, busy = candidates.idle.entries, candidates.busy.entries
        share = joining.wait_share
        least = NO_ROOM
        for node, gap_s in joining.looked_at.items():
            if gap_s < least and node.name not in exclude:
                least = gap_s
        least, idle_place = self._search(joining, idle, 0.0, exclude, least)
        least, busy_place = self._search(joining, busy, share, exclude, least)
        if least == NO_ROOM:
            return None
        limit = least * self._tie
        at_home = self._at_home(joining, candidates.by_host.get(host, ()), exclude, limit)
        if at_home is not None:
            return at_home
        ties = [node for node, gap_s in joining.looked_at.items() if gap_s <= limit and node.name not in exclude]
        if len(ties) < MOST_TIES:
            self._add_ties(joining, idle, idle_place, 0.0, exclude, limit, ties)
            self._add_ties(joining, busy, busy_place, share, exclude, limit, ties)
        return _nearest(joining, ties) or _roomiest(ties)

    def _search(
        self, joining: Joining, entries: Entries, share: float, exclude: Collection[str], least: float
    ) -> tuple[float, int]:
        """Return the smallest gap, at most `least`, and how many of the entries were visited to find it. All of them wait for
        `share` of a step with the others."""
        place = 0
        for entry in entries:
            if self._bound_s(joining, entry.figure, share) * ROUNDING >= least:
                break
            place += 1
            gap_s = self._look_at(joining, entry.node)
            if gap_s < least and entry.name not in exclude:
                least = gap_s
        return least, place

    def _add_ties(
        self,
        joining: Joining,
        entries: Entries,
        place: int,
        share: float,
        exclude: Collection[str],
        limit: float,
        ties: list[DecodeNode],
    ) -> None:
        """Add decodes from `place` on, of which none was visited, to `ties` until there are enough."""
        while len(ties) < MOST_TIES and place < len(entries) and self._bound_s(joining, entries[place].figure, share) <= limit:
            node = entries[place].node
            place += 1
            if node not in joining.looked_at and self._look_at(joining, node) <= limit and node.name not in exclude:
                ties.append(node)

    def _bound_s(self, joining: Joining, step_s: float, share: float) -> float:
        """Return a lower bound of the gap with any decode of this step time or longer whose requests, if it has any, make the
        new one wait for `share` of a step; except for those whose reports are old."""
        slack, base_s = joining.slack, joining.base_s
        if slack >= step_s:
            return joining.late_s + joining.own_s + base_s
        staying = 1.0 - slack / step_s
        least_s = joining.own_s + base_s + (step_s - base_s) * staying
        return joining.late_s + least_s * (1.0 + share * staying)

    def _at_home(
        self, joining: Joining, there: Sequence[DecodeNode], exclude: Collection[str], limit: float
    ) -> DecodeNode | None:
        tied: list[DecodeNode] = []
        for node in there:
            if not node.closed and node.name not in exclude and self._look_at(joining, node) <= limit:
                tied.append(node)
        return _roomiest(tied) if tied else None


def _left_tokens(joining: Joining, node: DecodeNode) -> float:
    """Return the KV tokens that the tenant of a request leaves to others beside it; none beside its only one."""
    if node.load is None:
        return 0.0
    held = node.held_tokens(joining.tenant, joining.begins)
    return left_free(held + joining.need_tokens, node.load.capacity_tokens) if held else 0.0


def _nearest(joining: Joining, nodes: list[DecodeNode]) -> DecodeNode | None:
    """Return the decode whose host holds the most reused blocks, if any."""
    handover = joining.handover
    if handover is None or len(nodes) < 2:
        return None
    most = 0
    nearest: list[DecodeNode] = []
    for node in nodes:
        held = handover.held(node)
        if held > most:
            most, nearest = held, [node]
        elif held and held == most:
            nearest.append(node)
    return _roomiest(nearest) if nearest else None


def _roomiest(nodes: list[DecodeNode]) -> DecodeNode:
    best = nodes[0]
    for node in nodes:
        if node.free > best.free or (node.free == best.free and node.name < best.name):
            best = node
    return best
