"""The conductor actor: places requests by where their KV is and who has time for them. Owns soft state only. PURE.

Everything it knows it was told since the conversations began: membership, block announcements, load reports. It remembers
what it placed until reports show it, so that many requests between two reports do not all go to the same idle node.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from mooncake_zmq.conductor import admission, routing
from mooncake_zmq.conductor.estimates import BookingKey, DecodeBatch, DecodeBooking, PrefillQueue
from mooncake_zmq.conductor.membership import Member, Membership
from mooncake_zmq.conductor.pipeline import Candidate, Pipeline, form_pipeline
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.replication import Replication
from mooncake_zmq.conductor.routing import DecodeOption, PrefillChoice, PrefillOption
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import (
    Answered,
    Asked,
    Drained,
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
from mooncake_zmq.core.asks import SetCopies
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    DecodeLoad,
    Message,
    Placed,
    PrefillLoad,
    Rejected,
    RejectReason,
    RequestEnded,
    Schedule,
)
from mooncake_zmq.core.roles import ROLES
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.layout import BlockLayout

EXPIRY = ("bookings",)
REPLICAS = ("replicas",)
EXPIRY_MIN_DELAY_S = 0.01
"""Rounding may wake the timer a hair early; it must not spin."""
MAX_PREDICTION_S = 1e7
"""The most a message may say."""
DUMPED_BOOKINGS = 100
DUMPED_CHAINS = 50


@dataclass(frozen=True, slots=True)
class Booking:
    """One placement: the answer given, kept to answer a repeated `Schedule` alike."""

    at: float
    placed: Placed


class Conductor:
    """Places requests by Algorithm 1, and refuses those that would miss their SLO."""

    def __init__(
        self, *, name: str, host: str, incarnation: int, settings: ConductorSettings, layout: BlockLayout, costs: Costs
    ) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self._settings = settings
        self._costs = costs
        self._block_tokens = layout.block_tokens
        self._members = Membership()
        self._index = PrefixIndex(max_keys=settings.max_keys)
        self._replication = Replication(settings, self._index, self.counts)
        self._replicas_armed = False
        self._asked_at = -math.inf
        """When the last `Schedule` came: gateways ask one conductor at a time, and that one acts."""
        self._queues: dict[str, PrefillQueue] = {}
        self._batches: dict[str, DecodeBatch] = {}
        self._bookings: dict[BookingKey, Booking] = {}
        """In the order they were made, which is the order they expire in."""
        self._expiry_armed = False
        self._turn = 0
        self._last_chosen: dict[str, int] = {}
        """The turn in which a prefill was last chosen, or a cache-node last named first as a source."""

    def handle(self, now: float, event: Event) -> list[Effect]:
        """React to one event."""
        match event:
            case Received(sender, message):
                return self._on_message(now, sender, message)
            case PeerUp(peer, incarnation, hello):
                self._on_peer_up(Member(peer, hello.role, hello.host, incarnation))
            case PeerDown(peer, _):
                self._forget(peer)
            case TimerFired(key) if key == EXPIRY:
                return self._on_expiry(now)
            case TimerFired(key) if key == REPLICAS:
                return self._on_replicas(now)
            case Asked(ask_id, SetCopies(key, copies)):
                return self._on_copies_wanted(now, ask_id, bytes.fromhex(key), copies)
            case DrainWanted():
                return [Drained()]
            case Started():
                pass
            case _:
                raise TypeError(event)
        return []

    def change_replica(self, now: float, keys: tuple[Key, ...], copies: int) -> list[Effect]:
        """Have `copies` hosts hold the chain `keys` (from its first block on, not empty): ask for the missing copies, or name
        those that go first. At least one copy stays; what was asked already is not asked again."""
        readers = {member.host for member in self._members.of_role("prefill") if not member.draining}
        changes = self._replication.change(now, keys, copies, hosts=self._cache_hosts(), readers=readers)
        return [Send(node, message) for node, message in changes]

    def _on_copies_wanted(self, now: float, ask_id: str, key: Key, copies: int) -> list[Effect]:
        chain = self._replication.demand.chain(key)
        if chain is None:
            return [Answered(ask_id, {"error": "that prefix is not followed: see the chains in this conductor's dump"})]
        effects = self.change_replica(now, chain.keys, copies)
        asked = [effect.to for effect in effects if isinstance(effect, Send)]
        holders = self._index.holders(chain.keys)
        return [*effects, Answered(ask_id, {"blocks": len(chain.keys), "holders": holders, "asked": asked})]

    def check(self, now: float) -> None:
        """Assert the invariants."""
        self._index.check()
        self._replication.check(now)
        assert self._replicas_armed or not self._settings.replica_interval_s or not self._is_acting(now)
        for node in self._index.counts:
            assert self._members.role_of(node) == "cache-node", f"the index names {node}"
        assert list(self._queues) == [member.name for member in self._members.of_role("prefill")]
        assert list(self._batches) == [member.name for member in self._members.of_role("decode")]
        for (gateway, request_id), booking in self._bookings.items():
            assert self._members.role_of(gateway) == "gateway", f"booking of {gateway}"
            assert request_id == booking.placed.request_id
            assert booking.placed.prefill in self._queues, f"booking on {booking.placed.prefill}"
            assert booking.placed.decode in self._batches, f"booking on {booking.placed.decode}"
        for name, queue in self._queues.items():
            assert queue.queue_s(now) >= 0
            for key in queue.bookings:
                placed = self._bookings[key].placed
                assert name in (placed.prefill, *placed.stages), f"{key} is not booked on {name}"
        for name, batch in self._batches.items():
            assert batch.batch >= 0
            for key in batch.bookings:
                assert self._bookings[key].placed.decode == name, f"{key} is not booked on {name}"
        assert self._expiry_armed or not self._bookings
        assert len(self._bookings) <= self._settings.max_bookings

    def gauges(self, now: float) -> dict[str, float]:
        """Levels for metrics."""
        return {
            "bookings": len(self._bookings),
            "queued_prefill_s": sum(queue.queue_s(now) for queue in self._queues.values()),
            "decode_requests": sum(batch.batch for batch in self._batches.values()),
            "cached_keys": len(self._index),
            "cached_copies": sum(self._index.counts.values()),
            "cached_chains": len(self._replication.demand),
            "capacity_keys": self._settings.max_keys,
            "capacity_prefills": len(self._queues),
            "capacity_decodes": len(self._batches),
            "capacity_cache_nodes": len(self._members.of_role("cache-node")),
        }

    def dump(self, now: float) -> dict[str, Any]:
        """JSON-able state; the first bookings only."""
        members = [
            {"name": m.name, "role": m.role, "host": m.host, "incarnation": m.incarnation, "draining": m.draining}
            for role in ROLES
            for m in self._members.of_role(role)
        ]
        return {
            "name": self.name,
            "host": self.host,
            "incarnation": self.incarnation,
            "members": members,
            "prefills": {
                name: {"queue_s": queue.queue_s(now), "token_s": queue.token_s, "bookings": len(queue.bookings)}
                for name, queue in self._queues.items()
            },
            "decodes": {
                name: {
                    "batch": batch.batch,
                    "step_s": batch.step_s(batch.batch),
                    "free_tokens": batch.free_tokens if batch.reported else None,
                    "bookings": len(batch.bookings),
                }
                for name, batch in self._batches.items()
            },
            "index": {"keys": len(self._index), "by_node": self._index.counts},
            "replication": {
                "under_way": self._replication.under_way(now),
                "chains": self._replication.dump(now, DUMPED_CHAINS),
            },
            "bookings": [
                {
                    "gateway": gateway,
                    "request_id": request_id,
                    "attempt": booking.placed.attempt,
                    "prefill": booking.placed.prefill,
                    "decode": booking.placed.decode,
                    "age_s": now - booking.at,
                }
                for (gateway, request_id), booking in list(self._bookings.items())[:DUMPED_BOOKINGS]
            ],
        }

    # --- who is there

    def _on_peer_up(self, member: Member) -> None:
        self._forget(member.name)
        if member.role not in ROLES:
            self.counts.add("strangers")
            return
        self._members.join(member)
        if member.role == "prefill":
            self._queues[member.name] = PrefillQueue(self._settings, self._costs)
            self._queues = dict(sorted(self._queues.items()))
        elif member.role == "decode":
            self._batches[member.name] = DecodeBatch(self._settings, self._costs)
            self._batches = dict(sorted(self._batches.items()))

    def _forget(self, peer: str) -> None:
        """Nothing said by or placed on this peer counts any more; a cache-node announces its whole set when it is back."""
        touched = [
            key
            for key, booking in self._bookings.items()
            if peer in (key[0], booking.placed.prefill, booking.placed.decode, *booking.placed.stages)
        ]
        for key in touched:
            self._unbook(key)
        self._members.leave(peer)
        self._queues.pop(peer, None)
        self._batches.pop(peer, None)
        self._index.drop(peer)
        self._replication.forget(peer)
        self._last_chosen.pop(peer, None)

    # --- what they tell

    def _on_message(self, now: float, sender: str, message: Message) -> list[Effect]:
        match self._members.role_of(sender), message:
            case "gateway", Schedule() as schedule:
                return self._on_schedule(now, sender, schedule)
            case "gateway", RequestEnded(request_id=request_id, attempt=attempt):
                booking = self._bookings.get((sender, request_id))
                if booking is not None and booking.placed.attempt <= attempt:
                    self._unbook((sender, request_id))
            case "prefill", PrefillLoad() as load:
                self._queues[sender].report(now, load)
                self._set_draining(sender, load.draining)
            case "decode", DecodeLoad() as load:
                self._batches[sender].report(now, load)
                self._set_draining(sender, load.draining)
            case "cache-node", BlocksAnnounced(stored=stored, removed=removed):
                self._index.removed(sender, removed)
                self.counts.add("keys_dropped", self._index.stored(sender, stored))
            case _:
                self.counts.add(f"unexpected[message={type(message).__name__}]")
        return []

    def _set_draining(self, name: str, draining: bool) -> None:
        member = self._members.get(name)
        assert member is not None
        member.draining = draining

    # --- placement

    def _on_schedule(self, now: float, gateway: str, schedule: Schedule) -> list[Effect]:
        key = (gateway, schedule.request_id)
        effects = self._on_expiry(now) if self._expired(now) else []
        booking = self._bookings.get(key)
        if booking is not None and booking.placed.attempt >= schedule.attempt:
            if booking.placed.attempt > schedule.attempt:
                self.counts.add("stale_schedules")
                return effects
            self.counts.add("repeated_schedules")
            return [*effects, Send(gateway, booking.placed)]
        if booking is not None:
            self._unbook(key)
        matches = self._match(schedule)
        if self._settings.replica_interval_s and schedule.attempt == 1:
            effects += self._count_demand(now, schedule.keys[: max(matches.values(), default=0)])
        answer = self._place(now, key, schedule, matches)
        if isinstance(answer, Placed) and not self._expiry_armed:
            self._expiry_armed = True
            effects.append(SetTimer(EXPIRY, self._settings.booking_ttl_s))
        return [*effects, Send(gateway, answer)]

    def _match(self, schedule: Schedule) -> dict[str, int]:
        """Reusable leading blocks, by cache-node."""
        limit = routing.reusable_blocks(tokens=schedule.tokens, keys=len(schedule.keys), block_tokens=self._block_tokens)
        return self._index.match(schedule.keys[:limit])

    def _place(self, now: float, key: BookingKey, schedule: Schedule, matches: dict[str, int]) -> Placed | Rejected:
        prefill = self._choose_prefill(now, schedule, matches)
        if prefill is None:
            return self._reject(schedule, RejectReason.NO_PREFILL, admission.NO_NODE_RETRY_S)
        pipeline = self._form_pipeline(now, schedule, prefill, matches)
        if pipeline is not None:
            prefill = replace(prefill, queue_s=pipeline.queue_s, work_s=pipeline.work_s)
        need_tokens = self._room_for(schedule)
        preferred, last_resort = (
            self._decode_options(now, members, prefill.queue_s) for members in self._members.usable("decode", schedule.exclude)
        )
        decode = self._choose_decode(preferred, prefill, need_tokens)
        decode = decode or self._choose_decode(last_resort, prefill, need_tokens)
        if decode is None:
            retry_after_s = admission.retry_after_room(self._settings, preferred + last_resort)
            reason = RejectReason.NO_ROOM if preferred or last_resort else RejectReason.NO_DECODE
            return self._reject(schedule, reason, retry_after_s)
        refusal = admission.refusal(self._settings, self._costs, attempt=schedule.attempt, prefill=prefill, decode=decode)
        if refusal is not None:
            return self._reject(schedule, *refusal)
        placed = Placed(
            request_id=schedule.request_id,
            attempt=schedule.attempt,
            prefill=prefill.name,
            decode=decode.name,
            reuse_blocks=prefill.reuse_blocks,
            sources=self._choose_sources(prefill, matches) if prefill.fetch else (),
            ttft_s=min(prefill.ttft_s, MAX_PREDICTION_S),
            tbt_s=min(decode.tbt_s, MAX_PREDICTION_S),
            stages=pipeline.stages if pipeline else (),
        )
        work_s = pipeline.share_s if pipeline else prefill.work_s
        self._book(now, key, placed, work_s=work_s, need_tokens=need_tokens)
        return placed

    def _room_for(self, schedule: Schedule) -> int:
        """KV a decode must have free: whole blocks for prompt and one token, on which it insists, and the expected output."""
        insisted = (schedule.tokens // self._block_tokens + 1) * self._block_tokens
        return max(insisted, schedule.tokens + min(schedule.max_tokens, self._settings.expected_output_tokens))

    def _choose_prefill(self, now: float, schedule: Schedule, matches: dict[str, int]) -> PrefillChoice | None:
        held_by_host: dict[str, int] = {}
        for cache_node in self._members.of_role("cache-node"):
            held = matches.get(cache_node.name, 0)
            held_by_host[cache_node.host] = max(held, held_by_host.get(cache_node.host, 0))
        preferred, last_resort = self._members.usable("prefill", schedule.exclude)
        options = [
            PrefillOption(
                name=member.name,
                host=member.host,
                queue_s=self._queues[member.name].queue_s(now),
                token_s=self._queues[member.name].token_s,
                local_blocks=held_by_host.get(member.host, 0),
                can_fetch=member.host in held_by_host,
                last_chosen=self._last_chosen.get(member.name, 0),
            )
            for member in preferred or last_resort
        ]
        return routing.choose_prefill(
            options,
            settings=self._settings,
            costs=self._costs,
            tokens=schedule.tokens,
            best_blocks=max(matches.values(), default=0),
            block_tokens=self._block_tokens,
        )

    def _form_pipeline(
        self, now: float, schedule: Schedule, prefill: PrefillChoice, matches: dict[str, int]
    ) -> Pipeline | None:
        """Others that compute a long prompt together with `prefill`, if that is sooner."""
        if self._settings.pipeline_stages < 2:
            return None
        hosts = self._cache_hosts()
        usable, _ = self._members.usable("prefill", schedule.exclude)
        candidates = {
            member.name: Candidate(
                name=member.name,
                queue_s=self._queues[member.name].queue_s(now),
                slowness=self._queues[member.name].token_s / self._costs.prefill_token_s or 1.0,
                reuse_blocks=max((held for node, held in matches.items() if hosts[node] == member.host), default=0),
            )
            for member in usable
        }
        if prefill.name not in candidates:
            return None
        return form_pipeline(
            replace(candidates[prefill.name], reuse_blocks=prefill.reuse_blocks),
            candidates.values(),
            ttft_s=prefill.ttft_s,
            tokens=schedule.tokens,
            block_tokens=self._block_tokens,
            settings=self._settings,
            costs=self._costs,
        )

    def _decode_options(self, now: float, members: Collection[Member], wait_s: float) -> list[DecodeOption]:
        options = []
        for member in members:
            node = self._batches[member.name]
            batch, free_tokens = node.after(now, wait_s)
            options.append(DecodeOption(member.name, member.host, node.step_s(batch + 1), free_tokens, batch))
        return options

    def _choose_decode(self, options: list[DecodeOption], prefill: PrefillChoice, need_tokens: int) -> DecodeOption | None:
        return routing.choose_decode(options, settings=self._settings, host=prefill.host, need_tokens=need_tokens)

    def _choose_sources(self, prefill: PrefillChoice, matches: dict[str, int]) -> tuple[str, ...]:
        hosts = self._cache_hosts()
        local = max((blocks for node, blocks in matches.items() if hosts[node] == prefill.host), default=0)
        return routing.choose_sources(
            matches, hosts=hosts, host=prefill.host, local_blocks=local, last_fetched=self._last_chosen
        )

    def _reject(self, schedule: Schedule, reason: RejectReason, retry_after_s: float) -> Rejected:
        self.counts.add(f"rejected[reason={reason.value}]")
        return Rejected(request_id=schedule.request_id, attempt=schedule.attempt, reason=reason, retry_after_s=retry_after_s)

    def _cache_hosts(self) -> dict[str, str]:
        return {member.name: member.host for member in self._members.of_role("cache-node")}

    # --- copies

    def _count_demand(self, now: float, held: tuple[Key, ...]) -> list[Effect]:
        """A request wants `held`, the leading blocks that somebody holds."""
        if now - self._asked_at > self._settings.replica_half_life_s:
            # Another conductor may have been asked all the while: what was counted before would make hot chains look cold.
            self._replication.demand.clear()
        self._asked_at = now
        self.counts.add("chains_forgotten", self._replication.demand.count(now, held))
        if self._replicas_armed or not self._replication.demand:
            return []
        self._replicas_armed = True
        return [SetTimer(REPLICAS, self._settings.replica_interval_s)]

    def _on_replicas(self, now: float) -> list[Effect]:
        """One round, and the next only while requests come."""
        self._replicas_armed = False
        if not self._is_acting(now):
            return []
        effects: list[Effect] = []
        for keys, copies in self._replication.targets(now, self._cache_hosts()):
            effects += self.change_replica(now, keys, copies)
        if self._replication.demand:
            self._replicas_armed = True
            effects.append(SetTimer(REPLICAS, self._settings.replica_interval_s))
        return effects

    def _is_acting(self, now: float) -> bool:
        """Whether this is the conductor that gateways ask, as far as it can tell, and it has demand to act on."""
        return bool(self._replication.demand) and now - self._asked_at < 2 * self._settings.replica_interval_s

    # --- bookings

    def _book(self, now: float, key: BookingKey, placed: Placed, *, work_s: float, need_tokens: int) -> None:
        self.counts.add("placed")
        self.counts.add(f"plans[prefix={_plan_of(placed)}]")
        self._turn += 1
        if placed.stages:
            self.counts.add("pipelines_placed")
        for chosen in (placed.prefill, *placed.stages, *placed.sources[:1]):
            self._last_chosen[chosen] = self._turn
        if len(self._bookings) >= self._settings.max_bookings:
            self.counts.add("bookings_dropped")
            self._unbook(next(iter(self._bookings)))
        self._bookings[key] = Booking(now, placed)
        for name in (placed.prefill, *placed.stages):
            self._queues[name].book(now, key, work_s)
        self._batches[placed.decode].book(key, DecodeBooking(now, now + placed.ttft_s, need_tokens))

    def _unbook(self, key: BookingKey) -> None:
        placed = self._bookings.pop(key).placed
        for name in (placed.prefill, *placed.stages):
            self._queues[name].unbook(key)
        self._batches[placed.decode].unbook(key)

    def _expired(self, now: float) -> list[BookingKey]:
        keys: list[BookingKey] = []
        for key, booking in self._bookings.items():
            if now - booking.at < self._settings.booking_ttl_s:
                break
            keys.append(key)
        return keys

    def _on_expiry(self, now: float) -> list[Effect]:
        """Drop what is too old, and come back when the next one is."""
        for key in self._expired(now):
            self.counts.add("bookings_expired")
            self._unbook(key)
        self._expiry_armed = bool(self._bookings)
        if not self._bookings:
            return []
        oldest = next(iter(self._bookings.values()))
        return [SetTimer(EXPIRY, max(EXPIRY_MIN_DELAY_S, oldest.at + self._settings.booking_ttl_s - now))]


def _plan_of(placed: Placed) -> str:
    if placed.sources:
        return "fetched"
    return "local" if placed.reuse_blocks else "none"
