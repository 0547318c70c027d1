"""The conductor actor: places requests by where their KV is and which nodes have capacity. It owns soft state only. PURE.

All it knows was sent to it since its connections began: membership, block announcements, load reports. It remembers its
placements until reports include them, so that many requests between two reports do not all go to the same idle node.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from mooncake_zmq.conductor.adapters import Adapters
from mooncake_zmq.conductor.balance import BALANCE, Balance
from mooncake_zmq.conductor.booking import Booking, BookingKey
from mooncake_zmq.conductor.bookings import Bookings
from mooncake_zmq.conductor.choices import PrefillChoice
from mooncake_zmq.conductor.coming import Coming
from mooncake_zmq.conductor.copies import Copies
from mooncake_zmq.conductor.corrections import Accuracy, OutputLengths
from mooncake_zmq.conductor.decodes import Decodes
from mooncake_zmq.conductor.inventory import SWEEP, Inventory
from mooncake_zmq.conductor.membership import Member, Membership
from mooncake_zmq.conductor.placement import Placement, rejected
from mooncake_zmq.conductor.plans import Plan
from mooncake_zmq.conductor.prefills import Prefills
from mooncake_zmq.conductor.roll_call import ROLL_CALL, RollCall
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.snapshot import Snapshot
from mooncake_zmq.conductor.sources import STORE
from mooncake_zmq.conductor.suspects import Suspects
from mooncake_zmq.conductor.transfers import Transfers
from mooncake_zmq.core.actor import (
    Answered,
    Asked,
    CordonWanted,
    Drained,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.commands import SetCopies, SetRole
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    AdaptersListed,
    BlocksAnnounced,
    CacheLoad,
    ChangeReplica,
    DecodeLoad,
    Message,
    Placed,
    PrefillLoad,
    Rejected,
    RejectReason,
    RequestEnded,
    Schedule,
    WaitEnded,
)
from mooncake_zmq.core.roles import ROLES
from mooncake_zmq.kv.layout import BlockLayout

EXPIRY = ("bookings",)
EXPIRY_MIN_DELAY_S: Final = 0.01
"""The shortest delay of the timer: rounding may fire it slightly early, and it must not spin."""


class Conductor:
    """Places requests by Algorithm 1, and refuses those that would miss their SLO."""

    def __init__(
        self, *, name: str, host: str, incarnation: int, settings: ConductorSettings, layout: BlockLayout, costs: Costs
    ) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self._booking_ttl_s = settings.booking_ttl_s
        self._members = Membership()
        self._roll_call = RollCall(settings.members, self._members)
        self._accuracy = Accuracy(self.counts)
        self._outputs = OutputLengths(settings.expected_output_tokens)
        self._prefills = Prefills(settings, costs, self._accuracy)
        self._decodes = Decodes(settings, costs, self._accuracy)
        self._transfers = Transfers(
            block_s=costs.transfer_s(layout.block_tokens),
            disk_block_s=costs.disk_s(layout.block_tokens),
            half_life_s=settings.correction_half_life_s,
            accuracy=self._accuracy,
        )
        self._inventory = Inventory(settings.max_keys, self._prefills, self.counts)
        self._copies = Copies(self._inventory, self._prefills, self.counts)
        self._bookings = Bookings(name, incarnation, limit=settings.max_bookings)
        self._coming = Coming(costs, layout.block_tokens, self._inventory.index)
        self._suspects = Suspects()
        self._adapters = Adapters()
        self._expiry_armed = False
        self._placement = Placement(
            settings,
            costs,
            block_tokens=layout.block_tokens,
            prefills=self._prefills,
            decodes=self._decodes,
            index=self._inventory.index,
            transfers=self._transfers,
            sources=self._inventory.sources,
            outputs=self._outputs,
            bookings=self._bookings,
            coming=self._coming,
        )
        self._balance = Balance(
            settings,
            self.counts,
            members=self._members,
            prefills=self._prefills,
            decodes=self._decodes,
            batches=self._placement.batches,
            outputs=self._outputs,
        )
        self._snapshot = Snapshot(
            settings,
            self._members,
            self._prefills,
            self._decodes,
            self._inventory,
            self._bookings,
            self._copies,
            self._balance,
        )
        self._handlers = self._handlers_by_sender()

    def _handlers_by_sender(self) -> dict[tuple[str | None, type], Callable[[float, str, Any], list[Effect]]]:
        """Return the handler of each message, by the sender's role."""
        return {
            ("gateway", Schedule): self._on_schedule,
            ("gateway", RequestEnded): self._on_ended,
            ("prefill", PrefillLoad): self._on_prefill_load,
            ("decode", DecodeLoad): self._on_decode_load,
            ("prefill", BlocksAnnounced): self._on_own_blocks,
            ("cache-node", CacheLoad): self._on_cache_load,
            ("cache-node", BlocksAnnounced): self._on_blocks,
            ("vllm", PrefillLoad): self._on_prefill_load,
            ("vllm", DecodeLoad): self._on_decode_load,
            ("vllm", BlocksAnnounced): self._on_own_blocks,
            ("vllm", AdaptersListed): self._on_adapters,
        }

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Handle one event."""
        effects = self._dispatch(now, event)
        if self._coming.ended or self._coming.ahead:
            effects += self._end_waits()
        return effects

    def _end_waits(self) -> list[Effect]:
        """Send to prefills which of their waits ended, and to pools which blocks to fetch for the others."""
        effects: list[Effect] = [
            Send(self._inventory.index.name_of(each.pool), ChangeReplica(keys=each.keys, sources=(each.source,)))
            for each in self._coming.ahead
        ]
        effects += [
            Send(each.prefill, WaitEnded(booking=each.booking, sources=each.sources))
            for each in self._coming.ended
            if each.prefill in self._prefills.by_name
        ]
        self._coming.ahead.clear()
        self._coming.ended.clear()
        return effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        if type(event) is Received:  # far the most
            return self._on_message(now, event.sender, event.message)
        match event:
            case PeerUp(peer, incarnation, hello):
                role, host, protocol = hello.role, hello.host, hello.protocol
                member = Member(peer, role, host, incarnation, hello.may_become, hello.part, protocol)
                return self._on_peer_up(now, member)
            case PeerDown(peer, _):
                return self._forget(now, peer)
            case TimerFired(key) if key == EXPIRY:
                return self._on_expiry(now)
            case TimerFired(key) if key == SWEEP:
                return self._inventory.on_timer()
            case TimerFired(key) if key == ROLL_CALL:
                return self._roll_call.report()
            case TimerFired(key) if key == BALANCE:
                return self._balance.on_timer(now)
            case Asked(ask_id, SetCopies(key, copies)):
                return self._copies.on_wanted(now, ask_id, bytes.fromhex(key), copies)
            case Asked(ask_id, SetRole(node, role)):
                answer, effects = self._balance.request_role(now, node, role)
                return [*effects, Answered(ask_id, answer)]
            case CordonWanted(cordoned):
                return self._roll_call.set_cordon(cordoned)
            case DrainWanted():
                return [Drained()]
            case Started() | DrainTimedOut():
                return []
            case _:
                raise TypeError(event)

    def check(self, now: float) -> None:
        """Assert the invariants."""
        self._inventory.check()
        self._copies.check(now)
        for node in self._inventory.index.counts:
            role = self._members.role_of(node.removesuffix(STORE))
            assert role in ("cache-node", "prefill", "vllm"), f"the index names {node}"
        vllms = [member.name for member in self._members.of_role("vllm")]
        for role, names in (("prefill", self._prefills.by_name), ("decode", self._decodes.by_name)):
            assert sorted(names) == sorted([*(member.name for member in self._members.of_role(role)), *vllms])
        self._prefills.check(now)
        self._decodes.check(now)
        self._coming.check(self._bookings)
        self._balance.check(now)
        self._check_bookings()

    def gauges(self, now: float) -> dict[str, float]:
        """Return gauges for metrics."""
        return self._snapshot.gauges(now)

    def dump(self, now: float) -> dict[str, object]:
        """Return the state, ready for JSON, with the first bookings only."""
        about = {"name": self.name, "host": self.host, "incarnation": self.incarnation}
        return about | self._snapshot.dump(now) | {"predictions": self._accuracy.table(), "adapters": self._adapters.dump()}

    # --- membership

    def _on_peer_up(self, now: float, member: Member) -> list[Effect]:
        effects = self._forget(now, member.name)
        if member.role not in ROLES:
            self.counts.add("strangers")
            return effects
        self._members.join(member)
        match member.role:
            case "prefill":
                self._inventory.join_reader(self._prefills.join(member.name, member.host))
            case "decode":
                self._decodes.join(member.name, member.host)
            case "vllm":
                self._join_vllm(member)
            case "cache-node":
                self._inventory.join_pool(member.name, member.host)
        return effects + self._roll_call.changed() + self._balance.joined(now, member)

    def _join_vllm(self, member: Member) -> None:
        """Add a vLLM as both a prefill and a decode; one that has only one of these parts is a spare for the other."""
        name, host, whole = member.name, member.host, member.part == "both"
        self._adapters.join(name)
        vllm = self._prefills.join(name, host, vllm=True, stays=whole, spare=member.part == "decode")
        self._inventory.join_reader(vllm)
        self._decodes.join(name, host, vllm=True, stays=whole, spare=member.part == "prefill")

    def _forget(self, now: float, peer: str) -> list[Effect]:
        """Forget what this peer reported and all bookings on it; a cache-node announces its whole set again when it is
        back."""
        role = self._members.role_of(peer)
        if role is None:
            return []
        if role in ("gateway", "prefill", "decode", "vllm"):
            for booking in self._bookings.all():
                placed = booking.placed
                if peer in (booking.key[0], placed.prefill, placed.decode) or peer in placed.stages:
                    self._unbook(now, booking, gone=peer)
        self._members.leave(peer)
        self._suspects.forget(peer)
        self._adapters.forget(peer)
        match role:
            case "prefill":
                self._inventory.leave_reader(peer)
                self._prefills.leave(self._prefills.by_name[peer])
            case "decode":
                self._decodes.leave(self._decodes.by_name[peer])
            case "vllm":
                self._inventory.leave_reader(peer)
                self._prefills.leave(self._prefills.by_name[peer])
                self._decodes.leave(self._decodes.by_name[peer])
            case "cache-node":
                self._transfers.forget(self._inventory.leave_pool(peer))
                self._copies.replication.forget(peer)
                self._coming.pool_left()
        return self._roll_call.left(peer) + self._inventory.arm_sweep()

    # --- messages

    def _on_message(self, now: float, sender: str, message: Message) -> list[Effect]:
        react = self._handlers.get((self._members.role_of(sender), type(message)))
        if react is None:
            return self._unexpected(message)
        return react(now, sender, message)

    def _unexpected(self, message: Message) -> list[Effect]:
        """Count a message that no sender with this role should send."""
        self.counts.add(f"unexpected[message={type(message).__name__}]")
        return []

    def _on_prefill_load(self, now: float, sender: str, load: PrefillLoad) -> list[Effect]:
        node = self._prefills.by_name.get(sender)
        if node is None:
            return self._unexpected(load)
        if self._is_closed(now, sender, drains=load.draining, has_other=partial(self._prefills.has_other, node)):
            load = replace(load, draining=True)
        for number, due in self._prefills.report(now, node, load):
            booking = self._bookings.numbered(number)
            if booking is not None and booking.placed.prefill == sender:
                booking.due = max(due, booking.earliest) if due > now else due
        self._coming.review(now, node)
        return self._roll_call.takes(sender, closed=load.draining)

    def _on_decode_load(self, now: float, sender: str, load: DecodeLoad) -> list[Effect]:
        node = self._decodes.by_name.get(sender)
        if node is None:
            return self._unexpected(load)
        if self._is_closed(now, sender, drains=load.draining, has_other=partial(self._decodes.has_other, node)):
            load = replace(load, draining=True)
        if load.borrows and not self._members.know("ReserveDecode.lenders"):
            load = replace(load, borrows=False)
        self._decodes.report(now, node, load)
        return self._roll_call.takes(sender, closed=load.draining)

    def _is_closed(self, now: float, node: str, *, drains: bool, has_other: Callable[[tuple[str, ...]], bool]) -> bool:
        """Return whether a node that reported whether it `drains` takes no requests: it leaves, or requests on it end without
        an answer. Then it is closed as if it drained, unless it is the last one of its kind: closing that would refuse all
        requests. `has_other`: whether there is another of its kind, those of the given names apart."""
        if self._balance.leaves(now, node, drains=drains):
            return True
        return bool(self._suspects) and self._suspects.shuts(now, node) and has_other(self._adapters.with_less(node))

    def _on_cache_load(self, now: float, sender: str, load: CacheLoad) -> list[Effect]:
        index = self._inventory.index
        destination = index.join(sender)
        self._inventory.sources.set_cordon(destination, load.cordoned)
        pending_s = 0.0
        for rate in load.sources:
            if rate.source and self._members.role_of(rate.source) != "cache-node":
                continue
            source = index.join(rate.source) if rate.source else None
            pending_s += self._transfers.report(now, destination, source, rate)
        self._transfers.arriving(now, destination, pending_s)
        return []

    def _on_blocks(self, _now: float, sender: str, blocks: BlocksAnnounced) -> list[Effect]:
        self._inventory.announced_by_pool(sender, blocks)
        if blocks.stored and not blocks.engine_blocks:
            self._coming.stored(sender, blocks.stored)
        return self._roll_call.announced(sender) if blocks.complete else []

    def _on_own_blocks(self, _now: float, sender: str, blocks: BlocksAnnounced) -> list[Effect]:
        """Take in the keys that a prefill's slab or a vLLM's prefix cache holds."""
        if sender not in self._prefills.by_name:
            return self._unexpected(blocks)
        self._inventory.announced(sender, blocks)
        return []

    def _on_adapters(self, _now: float, sender: str, message: AdaptersListed) -> list[Effect]:
        self._adapters.listed(sender, message.adapters)
        return []

    # --- placement

    def _on_schedule(self, now: float, gateway: str, schedule: Schedule) -> list[Effect]:
        key = (gateway, schedule.request_id)
        attempt = schedule.attempt
        effects = self._balance.asked(now)
        if self._bookings.is_due(now, self._booking_ttl_s):
            effects += self._on_expiry(now)
        booking = self._bookings.get(key)
        if booking is not None and booking.placed.attempt >= attempt:
            if booking.placed.attempt > attempt:
                self.counts.add("stale_schedules")
                return effects
            self.counts.add("repeated_schedules")
            return [*effects, Send(gateway, booking.placed)]
        was_coming = booking is not None and booking.coming
        if booking is not None:
            self._lift(now, booking)
        plan = self._placement.planner.plan(now, schedule)
        plan.replaces = booking
        if schedule.adapter:
            plan.without = self._adapters.lacking(schedule.adapter)
        if attempt == 1:
            self._copies.note(plan.keys, plan.best)
        answer = self._place(now, key, schedule, plan)
        if booking is not None and isinstance(answer, Rejected):  # the attempt may go on where it is
            booking.at = now
            self._bookings.add(booking)
            self._decodes.book(self._decodes.by_name[booking.placed.decode], booking, coming=was_coming)
        if not self._expiry_armed and self._bookings:
            self._expiry_armed = True
            effects.append(SetTimer(EXPIRY, self._booking_ttl_s))
        effects.append(Send(gateway, answer))
        return effects

    def _place(self, now: float, key: BookingKey, schedule: Schedule, plan: Plan) -> Placed | Rejected:
        if self._bookings.is_full and (oldest := self._bookings.oldest) is not None:
            self.counts.add("bookings_dropped")
            self._unbook(now, oldest)  # before another request is made to wait for it
        decided = self._placement.decide(now, schedule, plan)
        if isinstance(decided, tuple):
            self.counts.add(_REJECTED[decided[0]])
            return rejected(schedule, decided)
        if plan.replaces is not None:
            self._coming.remove(now, plan.replaces.number)
        booking = self._placement.commit(now, key, schedule, plan, decided)
        self._bookings.add(booking)
        prefill = decided.prefill
        self._balance.placed(prefill.work_s, plan.kv_tokens)
        self.counts.add("placed")
        if prefill.stages:
            self.counts.add("pipelines_placed")
        if prefill.node.spare or decided.decode.node.spare:
            self.counts.add("stand_ins_placed")
        self.counts.add(_way(prefill))
        held = max(plan.longest, prefill.reuse_blocks)
        if held > prefill.reuse_blocks:
            self.counts.add("recomputed_blocks[reason=held]", held - prefill.reuse_blocks)
        if plan.coming > held:
            self.counts.add("recomputed_blocks[reason=coming]", plan.coming - held)
        return booking.placed

    def _on_ended(self, now: float, gateway: str, ended: RequestEnded) -> list[Effect]:
        booking = self._bookings.get((gateway, ended.request_id))
        if booking is not None and booking.placed.attempt > ended.attempt:
            booking = None  # its request was placed elsewhere while this attempt was under way
        outcome = ended.outcome
        if outcome is not None:
            self._accuracy.outcome(outcome, None if booking is None else booking.expected_tokens)
            self._placement.hindsight.outcome(outcome, booking)
            if outcome.ended:
                self._outputs.ended(outcome.max_tokens, outcome.output_tokens)
        if booking is not None:
            if self._suspects or ended.stalled:
                self._judge(now, booking.placed, ended)
            self._unbook(now, booking)
        return []

    def _judge(self, now: float, placed: Placed, ended: RequestEnded) -> None:
        """Suspect the nodes of an attempt that ended without an answer, and clear those that produced tokens."""
        if ended.outcome is not None:
            self._suspects.answered(placed, ended.outcome.output_tokens)
        if ended.stalled:
            self.counts.add("attempts_silent")
            self._suspects.stalled(now, placed, had_token=ended.outcome is not None)

    # --- bookings

    def _unbook(self, now: float, booking: Booking, gone: str = "") -> None:
        """Forget a booking; `gone` names the node of it that is down."""
        self._lift(now, booking)
        self._coming.remove(now, booking.number, lost=gone == booking.placed.prefill)

    def _lift(self, now: float, booking: Booking) -> None:
        """Remove a booking from the loads, but not what it computes and waits for."""
        self._bookings.remove(booking)
        placed = booking.placed
        for name in (placed.prefill, *placed.stages):
            self._prefills.unbook(now, self._prefills.by_name[name], booking.number)
        self._decodes.unbook(self._decodes.by_name[placed.decode], booking)

    def _on_expiry(self, now: float) -> list[Effect]:
        """Drop expired bookings, and set the timer for the next one."""
        while self._bookings.is_due(now, self._booking_ttl_s) and (oldest := self._bookings.oldest) is not None:
            self.counts.add("bookings_expired")
            self._unbook(now, oldest)
        oldest = self._bookings.oldest
        self._expiry_armed = oldest is not None
        if oldest is None:
            return []
        return [SetTimer(EXPIRY, max(EXPIRY_MIN_DELAY_S, oldest.at + self._booking_ttl_s - now))]

    def _check_bookings(self) -> None:
        self._bookings.check()
        assert self._expiry_armed or not self._bookings
        for booking in self._bookings.all():
            placed = booking.placed
            assert self._members.role_of(booking.key[0]) == "gateway", f"booking of {booking.key[0]}"
            assert placed.prefill in self._prefills.by_name, f"booking on {placed.prefill}"
            assert placed.decode in self._decodes.by_name, f"booking on {placed.decode}"
        for prefill in self._prefills.nodes:
            for number in prefill.unseen:
                known = self._bookings.numbered(number)
                assert known is not None, f"{number} is not booked"
                named = prefill.name == known.placed.prefill or prefill.name in known.placed.stages
                assert named, f"{number} is not booked on {prefill.name}"
        for decode in self._decodes.nodes:
            for booking in decode.coming:
                assert self._bookings.numbered(booking.number) is booking, f"{booking.key} is not booked"
                assert booking.placed.decode == decode.name
            for tenant, mine in decode.tenants.items():
                assert mine, "a tenant without placements is forgotten"
                for booking in mine:
                    assert self._bookings.numbered(booking.number) is booking, f"{booking.key} is not booked"
                    assert (booking.placed.decode, booking.tenant) == (decode.name, tenant)


_FETCHED: Final = "plans[prefix=fetched]"
_LOCAL: Final = "plans[prefix=local]"
_NOTHING: Final = "plans[prefix=none]"
_COMING: Final = "plans[prefix=coming]"
_REJECTED = {reason: f"rejected[reason={reason.value}]" for reason in RejectReason}


def _way(prefill: PrefillChoice) -> str:
    """Return the counter for the way in which a placement gets its prefix."""
    if prefill.coming:
        return _COMING
    return _FETCHED if prefill.sources or prefill.stores else _LOCAL if prefill.reuse_blocks else _NOTHING
