"""Admission of requests to a decode, and the KV reserved for them. PURE."""

from collections.abc import Mapping

from mooncake_zmq.core.actor import Effect, Send, SetTimer
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.links import MissingLinks
from mooncake_zmq.core.messages import AttemptFailed, DecodeDenied, Hello, ReserveDecode, Sibling, for_sibling, has_field
from mooncake_zmq.core.tenant_room import leaves_room
from mooncake_zmq.decode.borrowing import Borrowing
from mooncake_zmq.decode.budget import Budget
from mooncake_zmq.decode.ends import DEADLINE, Ends
from mooncake_zmq.decode.handoff import Handoff
from mooncake_zmq.decode.kept import Kept
from mooncake_zmq.decode.request import MISSING, Request
from mooncake_zmq.decode.requests import Requests
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.kv.layout import BlockLayout

NEWER = "a newer attempt is here"
TOO_LONG = "prompt is longer than the KV budget"


class Admission:
    """Decide which requests one decode accepts."""

    def __init__(
        self,
        *,
        name: str,
        settings: DecodeSettings,
        layout: BlockLayout,
        peers: Mapping[str, Hello],
        requests: Requests,
        budget: Budget,
        kept: Kept,
        borrowing: Borrowing,
        handoff: Handoff,
        ends: Ends,
        drain: Drain,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._name = name
        self._settings = settings
        self._layout = layout
        self._peers = peers
        self._requests = requests
        self._budget = budget
        self._kept = kept
        self._borrowing = borrowing
        self._handoff = handoff
        self._ends = ends
        self._drain = drain
        self._ids = ids
        self._counts = counts
        self.links = MissingLinks()

    def on_reserve(self, now: float, sender: str, message: ReserveDecode) -> list[Effect]:
        """Reserve KV for a request and its further choices, or deny it."""
        current = self._requests.live.get(message.request_id)
        if current is not None and current.request.attempt >= message.attempt:
            if current.request.attempt == message.attempt and current.prefill == sender:
                return []
            return [_denied(sender, message, NEWER, full=False)]
        effects = self._replace(now, current)
        budget = self._layout.blocks_for(message.handed_tokens + 1) * self._layout.block_tokens
        lent = self._borrowing.lacking(message, budget)
        lack = self._lack(budget - lent, message.tenant, borrows=self._settings.borrow and bool(message.lenders))
        reason = lack or self._refusal(sender, message, budget - lent)
        if reason is not None:
            self._counts.add("reservations_denied")
            passing = lack is not None or self._passes(now, sender, message, reason)
            return [*effects, _denied(sender, message, reason, full=passing)]
        request = self._admit(now, sender, message, budget, effects, lent)
        for sibling in message.siblings:
            effects += self._reserve_sibling(now, request, sibling, budget)
        return effects + (self._borrowing if lent else self._handoff).begin(now, request)

    def _reserve_sibling(self, now: float, leader: Request, sibling: Sibling, budget: int) -> list[Effect]:
        """Reserve KV for a further choice, which waits for the handoff of the first one. Without room it is placed by
        itself."""
        current, message = self._requests.live.get(sibling.request_id), leader.request
        if current is not None and (current is leader or current.request.attempt >= sibling.attempt):
            return []
        effects = self._replace(now, current)
        lack = "other decodes hold the prompt" if leader.lent_tokens else self._lack(budget, message.tenant)
        if lack is not None:
            self._counts.add("reservations_denied")
            failed = AttemptFailed(request_id=sibling.request_id, attempt=sibling.attempt, reason=lack, full=True)
            return [*effects, Send(message.gateway, failed)]
        request = self._admit(now, leader.prefill, for_sibling(message, sibling), budget, effects)
        request.forked, request.leader = True, leader
        leader.siblings.append(request)
        return effects

    def _replace(self, now: float, current: Request | None) -> list[Effect]:
        """End the current attempt of a request for which a newer one arrived."""
        return [] if current is None else self._ends.drop(now, current, NEWER)

    def _admit(
        self, now: float, prefill: str, message: ReserveDecode, budget: int, effects: list[Effect], lent: int = 0
    ) -> Request:
        """Reserve the KV of a request for which there is room; `lent` tokens of it are to be at other decodes."""
        self._budget.take(message.tenant, budget - lent)
        full = message.tokens // self._layout.block_tokens
        remaining = message.stop.max_tokens - message.first_index
        # A request that asks for many tokens must not get more than the budget can ever give it.
        capacity = min(message.handed_tokens + max(1, remaining) - lent, self._budget.capacity_tokens)
        request = Request(
            request=message,
            prefill=prefill,
            order=self._ids.new(),
            sequence=self._ids.new(),
            budget_tokens=budget,
            capacity_tokens=capacity,
            lent_tokens=lent,
            selection=self._settings.choice if message.approximate and self._can_say(message.gateway) else None,
            keys=[] if lent else [*message.reuse_keys, *message.new_keys],
            parts=[MISSING] * (self._layout.blocks_for(message.handed_tokens) * self._layout.layers),
            tail=message.tail,
            is_exact=not message.kept_tokens,
            parent=message.last_key,
            keyed_blocks=full,
            reserved_at=now,
        )
        self._requests.add(request)
        effects += self._kept.begin(request)
        effects.append(request.opened)
        effects.append(SetTimer((DEADLINE, message.request_id, message.attempt), message.deadline_s))
        return request

    def _can_say(self, gateway: str) -> bool:
        """Return whether a gateway can say that an answer is approximate."""
        return has_field(self._peers[gateway].protocol, "TokensDecoded.approximate")

    def _lack(self, budget: int, tenant: str, *, borrows: bool = False) -> str | None:
        """Return what is missing for now, or None. An attempt denied for this counts as one that found no room. `borrows`: the
        request may have more KV than there is here."""
        if self._drain.draining:
            return "decode is draining"
        most = self._settings.most_taken
        free = most - len(self._requests)
        if free < 1:
            return "too many requests"
        held = sum(request.tenant == tenant for request in self._requests) if tenant else 0
        if held and not leaves_room(held, 1, free=free, whole=most):
            return f"{tenant} has {held} requests in the decode"
        fits = borrows or budget <= self._budget.capacity_tokens
        return "no KV left" if fits and self._budget.lacks(tenant, budget) else None

    def _refusal(self, sender: str, message: ReserveDecode, budget: int) -> str | None:
        """Return why this decode can never take the request, or None. Such an attempt is repeated a few times at most."""
        missing = self._missing(sender, message)
        if missing:
            return f"{missing} is not reachable from {self._name}"
        size = self._layout.block_tokens
        if (
            message.tokens < 1
            or len(message.tail) != message.tokens % size * 4
            or (len(message.reuse_keys) + len(message.new_keys)) * size > message.tokens
        ):
            return "tail or keys do not match tokens"
        if message.kept_tokens and (
            message.kept_tokens > message.tokens or message.reuse_keys or message.new_keys or message.lenders
        ):
            return "a prompt that cannot be evicted so"
        if message.block_tokens and len(message.block_tokens) != (len(message.reuse_keys) + len(message.new_keys)) * size * 4:
            return "tokens do not match keys"
        if not self._layout.has_tokens(message.tail) or not self._layout.has_tokens(message.past):
            return "tokens that the model does not have"
        sampling = message.sampling
        if not self._layout.has_token(sampling.largest_token) or not sampling.fits(message.past, message.tokens):
            return "sampling does not match tokens"
        return None if budget <= self._budget.capacity_tokens else TOO_LONG

    def _passes(self, now: float, prefill: str, message: ReserveDecode, reason: str) -> bool:
        """Return whether a refusal is of no fault of the request: a link has yet to come up; or the conductor did not know yet
        what this decode holds, which may take with lenders what was sent without."""
        missing = self._missing(prefill, message)
        if missing:
            return self.links.is_passing(now, missing)
        return reason == TOO_LONG and self._settings.borrow and not message.kept_tokens

    def _missing(self, prefill: str, message: ReserveDecode) -> str:
        """Return a node that the request needs and that is down; empty if there is none."""
        return next((peer for peer in (message.gateway, prefill) if peer not in self._peers), "")


def _denied(prefill: str, message: ReserveDecode, reason: str, *, full: bool) -> Send:
    denied = DecodeDenied(request_id=message.request_id, attempt=message.attempt, reason=reason, full=full)
    return Send(prefill, denied)
