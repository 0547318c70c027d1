"""The decodes' batches: what each decode last reported, less the requests expected to have left since, and the placements that
have not reached it yet. PURE.

A request joins the batch when its prefill is done, so that is the time at which its decode is judged. Running requests are
taken to have begun evenly spread, and so leave evenly over the time that a request stays; one that has yet to join leaves that
long after it joined. A request that finds the batch full waits for a place, and that wait is its gap between the first two
tokens.
"""

from bisect import insort
from typing import Final

from mooncake_zmq.conductor.booking import Booking
from mooncake_zmq.conductor.corrections import Accuracy, Correction, factor_of
from mooncake_zmq.conductor.ranking import Ranking
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.holding import Holding, longest_request
from mooncake_zmq.core.messages import MAX_REPORTED, MAX_TOKENS, DecodeLoad, Measured

UNLIMITED: Final = 1 << 40


class DecodeNode:
    """The state of one decode."""

    __slots__ = (
        "borrows",
        "coming",
        "coming_requests",
        "context",
        "candidates",
        "draining",
        "free",
        "held",
        "host",
        "lendable",
        "lends_only",
        "load",
        "load_s",
        "max_batch",
        "name",
        "own_tokens",
        "places",
        "promised",
        "reported_at",
        "scale",
        "spare",
        "step",
        "step_s",
        "tenants",
        "there",
        "vllm",
    )

    def __init__(
        self,
        name: str,
        host: str,
        *,
        half_life_s: float,
        step_s: float,
        vllm: bool,
        spare: bool,
        candidates: "Candidates | None",
    ) -> None:
        self.name = name
        self.host = host
        self.vllm = vllm
        self.spare = spare
        """Whether it is a vLLM that prefills for others; it also decodes what it prefilled while no other vLLM is open for
        prompts."""
        self.candidates = candidates
        """The group in which a search finds it; None if it only takes what it prefilled itself."""
        self.draining = False
        self.load: DecodeLoad | None = None
        self.reported_at = 0.0
        self.step = Correction(half_life_s)
        self.scale = 1.0
        """The ratio of its own step costs, corrected, to the configured costs."""
        self.step_s = step_s
        """The current step time, corrected."""
        self.there = 0
        """The number of requests that run or will at once."""
        self.context = 0
        """The KV tokens of those requests."""
        self.load_s = 0.0
        """The seconds that those requests add to a step, by the cost model."""
        self.max_batch = UNLIMITED
        self.free = UNLIMITED
        """The free KV tokens, less those of requests and loans that have yet to be reserved."""
        self.places = UNLIMITED
        """The free places in the batch, less those of requests that have yet to reserve theirs."""
        self.held = 0
        """The KV tokens in use."""
        self.lends_only = False
        """Whether it has no batch, by its last report, and so takes no request."""
        self.lendable = 0
        """The KV tokens that it lends, less those of such loans."""
        self.promised: dict[Booking, int] = {}
        """The KV tokens that it is to lend to requests elsewhere that have yet to reserve theirs."""
        self.borrows = False
        self.own_tokens = MAX_TOKENS
        self.coming: list[Booking] = []
        self.coming_requests = 0
        """The sequences of the requests in `coming`, with all choices."""
        self.tenants: dict[str, dict[Booking, None]] = {}
        """The placements of each named tenant that have not ended."""

    @property
    def closed(self) -> bool:
        """Whether it takes no new requests."""
        return self.draining or self.lends_only

    def has_room(self, need_tokens: int, choices: int, left_tokens: float = 0.0) -> bool:
        """Return whether it has KV and a place for each choice of a request now, and so many tokens beside them."""
        return self.free - left_tokens >= need_tokens and self.places >= choices

    def will_have_room(
        self, need_tokens: int, choices: int, left_tokens: float, *, wait_s: float, begins: float, stay_tokens: float
    ) -> bool:
        """Return whether it has that when the prefill of a request begins, at `begins` in `wait_s`: some requests have left by
        then, and those placed before that begin later have reserved nothing."""
        gone = min(wait_s / (stay_tokens * self.step_s), 1.0)
        free, places = self.free + self.held * gone - left_tokens, self.places + self.there * gone
        for booking in self.coming:
            if not booking.reserved and booking.begins > begins:
                free += booking.need_tokens
                places += booking.choices
        return free >= need_tokens and places >= choices

    def held_tokens(self, tenant: str, begins: float) -> int:
        """Return the KV tokens that the tenant's requests have reserved by then."""
        return sum([booking.need_tokens for booking in self.tenants.get(tenant, ()) if booking.begins <= begins])

    def held_s(self, tenant: str, at: float) -> float:
        """Return what the tenant's requests that have joined by then add to a step, by the cost model."""
        return self.scale * sum([booking.load_s for booking in self.tenants.get(tenant, ()) if booking.due <= at])


class Candidates:
    """The decodes that can continue what the same prefills begin, by host and in the order in which they are searched."""

    def __init__(self) -> None:
        self.by_host: dict[str, list[DecodeNode]] = {}
        self.idle: Ranking[DecodeNode] = Ranking()
        """The decodes without any request that are not closed, by their step time; the next has the others, by the step time of
        their batch as reported."""
        self.busy: Ranking[DecodeNode] = Ranking()
        self.reported: dict[DecodeNode, None] = {}
        """The decodes that reported, the longest ago first."""
        self.unreported: dict[DecodeNode, None] = {}
        """The decodes that have come up and not reported."""

    def leave(self, node: DecodeNode) -> None:
        """Remove a decode."""
        self.reported.pop(node, None)
        self.unreported.pop(node, None)
        self.idle.remove(node)
        self.busy.remove(node)
        mine = self.by_host[node.host]
        mine.remove(node)
        if not mine:
            del self.by_host[node.host]

    def check(self, members: list[DecodeNode]) -> None:
        """Assert that the orders match the state of `members`, which are all nodes of this group."""
        for ranking, there in ((self.idle, False), (self.busy, True)):
            ranking.check()
            ranked = {node.name for node in members if not node.closed and (node.there > 0) == there}
            assert {entry.name for entry in ranking.entries} == ranked
        times = [node.reported_at for node in self.reported]
        assert times == sorted(times)
        assert set(self.reported) == {node for node in members if node.load is not None}
        assert set(self.unreported) == {node for node in members if node.load is None}
        assert {node for mine in self.by_host.values() for node in mine} == set(members)


class Decodes:
    """All decodes by name, and in two groups those that a search may find: a vLLM cannot read the KV of the project's own
    engine, nor the reverse."""

    def __init__(self, settings: ConductorSettings, costs: Costs, accuracy: Accuracy, *, block_tokens: int) -> None:
        self.nodes: list[DecodeNode] = []
        """All decodes, in name order."""
        self.by_name: dict[str, DecodeNode] = {}
        self.own = Candidates()
        self.vllms = Candidates()
        self.least_scale = 1.0
        """A lower bound of all corrections."""
        self._unchecked = 0
        self._settings = settings
        self._costs = costs
        self._accuracy = accuracy
        self._block_tokens = block_tokens

    def join(self, name: str, host: str, *, vllm: bool = False, stays: bool = False, spare: bool = False) -> None:
        """Add a decode."""
        step_s = self._costs.step_s(1, 0)
        candidates = None if stays or spare else self.vllms if vllm else self.own
        half_life_s = self._settings.correction_half_life_s
        node = DecodeNode(name, host, half_life_s=half_life_s, step_s=step_s, vllm=vllm, spare=spare, candidates=candidates)
        insort(self.nodes, node, key=lambda each: each.name)
        self.by_name[name] = node
        if candidates is not None:
            candidates.by_host.setdefault(host, []).append(node)
            candidates.unreported[node] = None
        self.least_scale = min(self.least_scale, node.scale)
        self._rank(node)

    def leave(self, node: DecodeNode) -> None:
        """Remove a decode."""
        self.nodes.remove(node)
        del self.by_name[node.name]
        if node.candidates is not None:
            node.candidates.leave(node)

    # --- reports

    def report(self, now: float, node: DecodeNode, load: DecodeLoad) -> None:
        """Take in a node's report: requests that it names have KV there, and those that it named before but does not name now
        have left."""
        node.load, node.draining = load, load.draining
        reserved = load.reserved
        if node.coming:
            self._sort_out(now, node, load)
            reserved = max(0, reserved - sum([booking.choices for booking in node.coming if booking.reserved]))
        self._correct(now, node, load)
        node.there = there = load.running + reserved
        node.lends_only = load.max_batch == 0
        node.context, node.max_batch = load.context_tokens, max(1, load.max_batch)
        node.load_s = self._costs.decode_request_s * there + self._costs.decode_context_s * load.context_tokens
        node.borrows, node.own_tokens = load.borrows, load.own_tokens
        node.held = load.capacity_tokens - load.free_tokens
        node.step_s = node.scale * self._costs.step_s(max(1, min(there, load.max_batch)), load.context_tokens)
        node.reported_at = now
        candidates = node.candidates
        if candidates is not None:
            candidates.unreported.pop(node, None)
            candidates.reported.pop(node, None)
            candidates.reported[node] = None
        self._set_room(node)
        self._rank(node)

    def book(self, node: DecodeNode, booking: Booking, *, coming: bool = True) -> None:
        """Add a placed request; not `coming`: one that the node's reports count already."""
        if booking.tenant:
            node.tenants.setdefault(booking.tenant, {})[booking] = None
        if not coming:
            return
        booking.coming = True
        node.coming.append(booking)
        node.coming_requests += booking.choices
        if node.load is not None and not booking.reserved:
            node.free -= booking.need_tokens
            node.places -= booking.choices
        self._rank(node)
        for name, tokens in booking.lent.items():
            lender = self.by_name.get(name)
            if lender is not None and not booking.reserved:
                lender.promised[booking] = tokens
                self._set_room(lender)

    def unbook(self, node: DecodeNode, booking: Booking) -> None:
        """Remove a request that ended or will never arrive."""
        self._settle(booking)
        if booking.tenant:
            mine = node.tenants[booking.tenant]
            del mine[booking]
            if not mine:
                del node.tenants[booking.tenant]
        if booking.coming:
            booking.coming = False
            node.coming.remove(booking)
            node.coming_requests -= booking.choices
            self._set_room(node)
            self._rank(node)

    def close(self, node: DecodeNode) -> None:
        """Close a node for new requests because it was asked to drain."""
        node.draining = True
        self._rank(node)

    def has_other(self, node: DecodeNode, without: tuple[str, ...]) -> bool:
        """Return whether another node of this kind, vLLM or not, is not closed; those in `without` do not count."""
        others = [each for each in self.nodes if each is not node and each.vllm == node.vllm and each.name not in without]
        return any([not each.closed for each in others])

    def left_without(self, name: str) -> int | None:
        """Return the longest request that the open decodes hold without this one, if it is shorter than gateways admit, and
        shorter than they hold with it; None otherwise."""
        held = {
            node.name: Holding(node.load.capacity_tokens, node.load.lends, not node.lends_only, node.borrows)
            for node in self.nodes
            if node.load is not None and not (node.draining or node.vllm)
        }
        now = longest_request(list(held.values()), self._block_tokens)
        held.pop(name, None)
        left = longest_request(list(held.values()), self._block_tokens)
        return left if left < min(now, self._settings.longest_request) else None

    def check(self, now: float) -> None:
        """Assert that the orders match the state of the nodes."""
        assert [node.name for node in self.nodes] == sorted(self.by_name)
        for candidates in (self.own, self.vllms):
            candidates.check([node for node in self.nodes if node.candidates is candidates])
        for node in self.nodes:
            assert self.by_name[node.name] is node
            assert self.least_scale <= node.scale
            assert all(booking.coming for booking in node.coming)
            assert node.coming_requests == sum(booking.choices for booking in node.coming)
            unseen = [booking for booking in node.coming if not booking.reserved]
            assert all(each.coming and not each.reserved for each in node.promised)
            if node.load is not None:
                promised = sum(node.promised.values())
                assert node.free == node.load.free_tokens - promised - sum(booking.need_tokens for booking in unseen)
                assert node.lendable == node.load.lendable - promised
                assert node.places == node.load.room - sum(booking.choices for booking in unseen)

    # --- leaves

    def _sort_out(self, now: float, node: DecodeNode, load: DecodeLoad) -> None:
        named = frozenset(load.bookings)
        complete = len(load.bookings) < MAX_REPORTED
        horizon = now - self._settings.report_grace_s
        kept: list[Booking] = []
        for booking in node.coming:
            if booking.number in named:
                booking.reserved = True
                booking.coming = booking.due > now
            else:
                booking.coming = not (booking.reserved and complete) and booking.due > horizon
            if booking.coming:
                kept.append(booking)
            if booking.reserved or not booking.coming:
                self._settle(booking)
        node.coming = kept
        node.coming_requests = sum([booking.choices for booking in kept])

    def _settle(self, booking: Booking) -> None:
        """Deduct the loans of a request no more: from now on their lenders report them, or there are none."""
        for name in booking.lent:
            lender = self.by_name.get(name)
            if lender is not None and lender.promised.pop(booking, None) is not None:
                self._set_room(lender)

    def _set_room(self, node: DecodeNode) -> None:
        load = node.load
        if load is not None:
            unseen = [booking for booking in node.coming if not booking.reserved]
            promised = sum(node.promised.values())
            node.lendable = load.lendable - promised
            node.free = load.free_tokens - promised - sum([booking.need_tokens for booking in unseen])
            node.places = load.room - sum([booking.choices for booking in unseen])

    def _rank(self, node: DecodeNode) -> None:
        candidates = node.candidates
        if candidates is None:
            return
        if node.closed or node.there:
            candidates.idle.remove(node)
        if node.closed or not node.there:
            candidates.busy.remove(node)
        if node.closed:
            return
        costs = self._costs
        if not node.there:
            candidates.idle.set(node, node.scale * costs.decode_step_s)
        elif node.there + node.coming_requests >= node.max_batch:
            # Requests that wait for a place may leave with their KV, so it must not count in a lower bound.
            candidates.busy.set(node, node.scale * costs.step_s(min(node.there, node.max_batch), 0))
        else:
            candidates.busy.set(node, node.step_s)

    def _correct(self, now: float, node: DecodeNode, load: DecodeLoad) -> None:
        measured = load.step
        if not measured.predicted_s and load.step_s:
            model_s = self._costs.step_s(max(1, min(load.running, load.max_batch)), load.context_tokens)
            measured = Measured(seconds=load.step_s, predicted_s=model_s)
        before = node.step.factor
        if node.step.report(now, measured):
            self._accuracy.add("step", measured.seconds, before * measured.predicted_s)
        node.scale = scale = factor_of(load.fixed_s, self._costs.decode_step_s, node.step.factor)
        self._unchecked += 1
        if scale < self.least_scale or self._unchecked > len(self.nodes):
            self._unchecked = 0
            self.least_scale = min([each.scale for each in self.nodes])
