"""Decides when prefills or decodes are overloaded and which node changes its role; it never decides where a request goes.
PURE.

A role's load is how close it is to its bound: for prefills the predicted time to a first token, for decodes the gap between
tokens, or the batch places and KV in use (while requests are refused, the gap alone hides the shortage). A node changes only
after the load was unbalanced for long, one node at a time, with a longer pause afterwards: each change costs a drain, a start
and the contents of the node's memory.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from mooncake_zmq.conductor.batches import Batches, Joining
from mooncake_zmq.conductor.corrections import OutputLengths
from mooncake_zmq.conductor.decodes import DecodeNode, Decodes
from mooncake_zmq.conductor.membership import Member, Membership
from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Effect, Send, SetTimer
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.commands import Answer
from mooncake_zmq.core.messages import ChangeRole, DecodeLoad
from mooncake_zmq.core.roles import BECOMES, Role

BALANCE = ("balance",)
SAMPLES: Final = 10
"""Samples of the loads taken in `role_change_after_s`; a new sample has `WEIGHT` in their running mean."""
WEIGHT: Final = 0.3
ACTING: Final = 3
"""Samples without any request, after which another conductor is assumed to receive the requests."""
BUSY: Final = 0.8
"""The load below which a role needs no further node, however idle the other role is."""
QUIET: Final = 2
"""The pause after a change, as a multiple of `role_change_after_s`."""
CHANGE_TIMEOUT: Final = 10
"""The time limit of a change, as a multiple of `role_change_after_s`; after it the change is forgotten."""
OPERATORS_LIMIT_S: Final = 600.0
"""The time limit of a change when only operators ask for changes."""
TYPICAL_WEIGHT: Final = 0.02
"""The weight of one request in the typical request: about the last fifty count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Holds the load of each role, 1 being its bound, and its number of nodes. `busy` is the share of prefills that compute:
    prefills that compute without a break need no further node, but none of them is taken away either."""

    prefill: float
    busy: float = 0.0
    decode: float
    prefills: int
    decodes: int

    def short(self, ratio: float) -> Role | None:
        """Return the role that needs a node more than the other role would with one fewer, if any."""
        sides: tuple[tuple[Role, float, float, int], ...] = (
            ("prefill", self.prefill, self.decode, self.decodes),
            ("decode", self.decode, max(self.prefill, self.busy), self.prefills),
        )
        for role, own, others, givers in sides:
            if givers > 1 and own >= BUSY and own > ratio * others * givers / (givers - 1):
                return role
        return None


class Lopsided:
    """Tracks which role has been short of nodes, and since when."""

    def __init__(self, after_s: float, ratio: float) -> None:
        self._after_s = after_s
        self._ratio = ratio
        self._role: Role | None = None
        self._since = 0.0

    def see(self, now: float, loads: Loads) -> Role | None:
        """Record the loads and return the role that is short, once it has been for long enough."""
        role = loads.short(self._ratio)
        if role != self._role:
            self._role, self._since = role, now
        return role if role is not None and now - self._since >= self._after_s else None

    def reset(self) -> None:
        """Forget what was recorded."""
        self._role = None

    def dump(self, now: float) -> dict[str, object]:
        """Return the state, ready for JSON."""
        return {"short": self._role, "for_s": now - self._since if self._role else 0.0}


@dataclass(slots=True)
class _Change:
    """Holds a role change under way; `incarnation` is that of the node when the change was requested, `drains` whether its last
    report said that it drains."""

    node: str
    role: Role
    incarnation: int
    begun_at: float
    drains: bool = False


class Balance:
    """Samples the loads while requests arrive at this conductor, and tracks the change under way."""

    def __init__(
        self,
        settings: ConductorSettings,
        counts: Tally,
        *,
        members: Membership,
        prefills: Prefills,
        decodes: Decodes,
        batches: Batches,
        outputs: OutputLengths,
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._members = members
        self._prefills = prefills
        self._decodes = decodes
        self._batches = batches
        self._outputs = outputs
        self._after_s = after_s = settings.role_change_after_s
        self._every_s = after_s / SAMPLES if after_s else OPERATORS_LIMIT_S / SAMPLES
        self._limit_s = CHANGE_TIMEOUT * after_s if after_s else OPERATORS_LIMIT_S
        self._lopsided = Lopsided(after_s, settings.role_change_ratio)
        self._change: _Change | None = None
        self._quiet_until = -math.inf
        self._asked_at = -math.inf
        self._armed = False
        self._typical: tuple[float, float] = (0.0, 0.0)
        """The prefill seconds and KV tokens of a typical request."""
        self._mean: list[float] = []
        """Running means of the prefills' wait and busy share and of the decodes' gap and KV in use; empty while nothing is
        sampled."""

    # --- what happens

    def asked(self, now: float) -> list[Effect]:
        """Note that this conductor was asked to place a request: the conductor that receives requests is the one that acts."""
        self._asked_at = now
        return self._arm() if self._after_s else []

    def placed(self, work_s: float, tokens: int) -> None:
        """Take the work and KV of a placed request into the typical request."""
        before_s, before = self._typical
        weight = TYPICAL_WEIGHT if before else 1.0
        self._typical = before_s + weight * (work_s - before_s), before + weight * (tokens - before)

    def on_timer(self, now: float) -> list[Effect]:
        """Sample the loads, and forget a change that exceeded its time limit."""
        self._armed = False
        change, effects = self._change, list[Effect]()
        if change is not None and now - change.begun_at > self._limit_s:
            self._end(now, "forgotten")
        if self._is_acting(now):
            effects += self._look(now)
        else:
            self._mean.clear()
            self._lopsided.reset()
        return effects + self._arm() if self._change is not None or self._mean else effects

    def joined(self, now: float, member: Member) -> list[Effect]:
        """Finish, abandon or repeat the pending change if it is the node of that change that connected."""
        change = self._change
        if change is None or member.name != change.node:
            return []
        if member.role == change.role:
            self._end(now, "done")
        elif member.incarnation == change.incarnation:  # the request may have been lost
            return self._request_change(change)
        else:
            self._end(now, "undone")
        return []

    def leaves(self, now: float, node: str, *, drains: bool) -> bool:
        """Return whether a node that reports whether it `drains` does so, or has been asked to change its role and will. One
        that drained and takes requests again changes no more: an operator undid it."""
        change = self._change
        if change is None or node != change.node:
            return drains
        if change.drains and not drains:
            self._end(now, "undone")
            return False
        change.drains = drains
        return True

    def request_role(self, now: float, node: str, role: Role) -> tuple[Answer, list[Effect]]:
        """Handle an operator's request that `node` changes its role; return the answer to the operator and the effects."""
        member, change = self._members.get(node), self._change
        if member is None:
            return {"error": f"{node} is not there"}, []
        if change is not None and (change.node, change.role) != (node, role):
            return {"error": f"{change.node} is about to become a {change.role}: one after the other"}, []
        if member.role == role:
            return {"node": node, "role": role, "happens": "nothing: that is its role"}, []
        if member.may_become != role:
            return {"error": f"{node} is a {member.role} and may not become a {role}: see may_become of nodes"}, []
        takes = [each.name for each in (self._open_prefills() if member.role == "prefill" else self._open_decodes())]
        lends = [each.name for each in self._decodes.nodes if each.lends_only and not each.draining]
        if change is None and node not in takes + lends:
            return {"error": f"{node} drains or is cordoned: it changes its role when it takes requests again"}, []
        if not [each for each in takes if each != node]:
            return {"error": f"{node} is the only {member.role} that takes requests"}, []
        if change is None and member.role == "decode" and (left := self._decodes.left_without(node)) is not None:
            needed = f"{node} is needed: without it decodes hold requests of {left:,} tokens at most"
            return {"error": f"{needed}, and gateways admit longer ones"}, []
        effects = [] if change is not None else self._begin(now, member, role)
        happens = f"finishes {self._left(member)} requests, takes no new ones, then becomes a {role}"
        return {"node": node, "role": member.role, "happens": happens}, effects + self._arm()

    # --- state

    def check(self, now: float) -> None:
        """Assert the invariants."""
        change = self._change
        assert self._armed or change is None, "a change is forgotten in time"
        for name in [*(each.name for each in self._open_prefills()), *(each.name for each in self._open_decodes())]:
            assert change is None or name != change.node, f"{name} leaves and takes requests"

    def gauges(self, now: float) -> dict[str, float]:
        """Return gauges for metrics; loads are 0 while nothing is sampled."""
        loads = self._loads()
        bounded = [min(load, 1e9) for load in (loads.prefill, loads.decode)] if self._mean else [0.0, 0.0]
        return {"prefill_load": bounded[0], "decode_load": bounded[1], "role_changes": float(self._change is not None)}

    def dump(self, now: float) -> dict[str, object]:
        """Return the state, ready for JSON."""
        change = self._change
        under_way = change and {"node": change.node, "role": change.role, "for_s": now - change.begun_at}
        quiet_s = max(0.0, self._quiet_until - now)
        return self.gauges(now) | self._lopsided.dump(now) | {"under_way": under_way, "quiet_s": quiet_s}

    # --- looking

    def _is_acting(self, now: float) -> bool:
        return self._after_s > 0 and now - self._asked_at <= ACTING * self._every_s

    def _look(self, now: float) -> list[Effect]:
        sample = self._sample(now)
        before = self._mean or sample
        self._mean = [old + WEIGHT * (new - old) for old, new in zip(before, sample, strict=True)]
        drains = any([node.draining and not node.vllm for node in self._prefills.nodes])
        drains = drains or any([node.draining and not (node.vllm or node.lends_only) for node in self._decodes.nodes])
        if self._change is not None or drains or now < self._quiet_until:
            self._lopsided.reset()
            return []
        role = self._lopsided.see(now, self._loads())
        giver = self._idlest(now, role) if role is not None else None
        return self._begin(now, giver, role) if role is not None and giver is not None else []

    def _sample(self, now: float) -> list[float]:
        """Return wait, busy share, gap and KV in use as a typical request would find them now."""
        settings, (work_s, tokens) = self._settings, self._typical
        queued_s = [node.queued_s(now) for node in self._open_prefills()]
        waits = [(fmean(queued_s) + work_s) / settings.ttft_slo_s, fmean(map(bool, queued_s))] if queued_s else []
        decodes = self._open_decodes()
        if not decodes:
            return [*(waits or [0.0, 0.0]), 0.0, 0.0]
        typical = max(1.0, self._outputs.typical)
        joining = Joining(now, wait_s=0.0, own_tokens=tokens, need_tokens=0, expected_tokens=typical, stay_tokens=typical)
        self._batches.weigh(joining)
        gap = fmean([self._batches.gap_s(joining, node) for node in decodes]) / settings.tbt_slo_s
        known = [node.load for node in decodes if node.load is not None]
        used = sum(map(_in_use, known)) / max(1, len(known))
        return [*(waits or [0.0, 0.0]), gap, used]

    def _loads(self) -> Loads:
        """Return the loads; a role without any node has an infinite one."""
        wait, busy, gap, used = self._mean or [0.0] * 4
        prefills, decodes = len(self._open_prefills()), len(self._open_decodes())
        return Loads(
            prefill=wait if prefills else math.inf,
            busy=busy,
            decode=max(gap, used) if decodes else math.inf,
            prefills=prefills,
            decodes=decodes,
        )

    def _idlest(self, now: float, role: Role) -> Member | None:
        """Return the node with the least work to finish among those that may become `role`."""
        able = [member for member in self._members.of_role(BECOMES[role]) if member.may_become == role]
        if role == "decode":
            able.sort(key=lambda member: self._prefills.by_name[member.name].queued_s(now))
        else:
            able = [member for member in able if not self._decodes.by_name[member.name].lends_only]
            able.sort(key=self._left)
            return next((member for member in able if self._decodes.left_without(member.name) is None), None)
        return able[0] if able else None

    def _left(self, member: Member) -> int:
        """Return how many requests a node has to finish, as far as is known."""
        if member.role == "prefill":
            return len(self._prefills.by_name[member.name].ends)
        decode = self._decodes.by_name[member.name]
        return decode.there + decode.coming_requests

    def _open_prefills(self) -> list[PrefillNode]:
        return [node for node in self._prefills.nodes if not (node.draining or node.vllm)]

    def _open_decodes(self) -> list[DecodeNode]:
        return [node for node in self._decodes.nodes if not (node.closed or node.vllm)]

    # --- changing

    def _begin(self, now: float, member: Member, role: Role) -> list[Effect]:
        self._counts.add(f"role_changes[to={role}]")
        self._change = _Change(member.name, role, member.incarnation, now)
        return self._request_change(self._change)

    def _request_change(self, change: _Change) -> list[Effect]:
        """Close the node for new requests and send it the request to change."""
        if change.role == "decode":
            self._prefills.close(self._prefills.by_name[change.node])
        else:
            self._decodes.close(self._decodes.by_name[change.node])
        return [Send(change.node, ChangeRole(role=change.role))]

    def _end(self, now: float, how: str) -> None:
        self._counts.add(f"role_changes_ended[how={how}]")
        self._change = None
        self._quiet_until = now + QUIET * self._after_s
        self._lopsided.reset()

    def _arm(self) -> list[Effect]:
        if self._armed:
            return []
        self._armed = True
        return [SetTimer(BALANCE, self._every_s)]


def _in_use(load: DecodeLoad) -> float:
    """Return the share of the batch's places or of the KV in use, whichever is larger. Reservations for requests whose prefill
    is slow are no load of the decode."""
    return max(load.running / max(1, load.max_batch), load.context_tokens / max(1, load.capacity_tokens))
