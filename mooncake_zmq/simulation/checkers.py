"""Checks the invariants I1 to I6 from outside: at the actors' edge, in the memory, at the clients. Trusts no actor.

The checkers keep a copy of every lease and put, made from the messages alone, and compare the memory with it. I7 is checked
by `share_checker`. I8: lateness within its bounds ends no conversation. I9, by `cross_hits`: no prompt is served KV of another
model or adapter.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mooncake_zmq.core.actor import (
    Effect,
    Event,
    Fence,
    FromClient,
    PeerDown,
    PeerUp,
    Publish,
    Received,
    Send,
    Start,
    ToClient,
)
from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    BlocksArrived,
    BlocksLeased,
    CommitSlots,
    FirstToken,
    LeaseBlocks,
    LeaseRenewed,
    PlaceElsewhere,
    PromptScored,
    ReleaseLease,
    RenewLease,
    ReserveDecode,
    ReserveSlots,
    Schedule,
    SlotRef,
    SlotsReserved,
    StartPrefill,
    TextsEmbedded,
    TokensDecoded,
)
from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.core.work import CopyBlocks, ForkSequence, ProbeEngine, PullBlocks, SequenceBlock, SlotGrant
from mooncake_zmq.gateway.requests.client_events import ClientGone, ClientRequest, Finished, TokenOut
from mooncake_zmq.kv.block_hash import Key, extend_keys
from mooncake_zmq.kv.checksum import block_checksum, part_checksums
from mooncake_zmq.kv.events import BlocksStored
from mooncake_zmq.simulation.approximations import Approximations
from mooncake_zmq.simulation.cordon_checker import CordonChecker
from mooncake_zmq.simulation.cross_hits import CrossHits
from mooncake_zmq.simulation.machine import Machine, Running
from mooncake_zmq.simulation.memory import Segment
from mooncake_zmq.simulation.share_checker import ShareChecker
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.simulation.weight_versions import WeightVersions
from mooncake_zmq.simulation.world import Incarnation, Process, ProcessSpec

EPSILON_S = 1e-6
LATE_S = 0.1
"""The most by which a timer of a running process may be late."""
IDLE_GAUGES = ("cached_", "capacity_")
"""The prefixes of gauges that may be above zero in an idle cluster."""

IncarnationId = tuple[str, int]


class Watched(Protocol):
    """The processes of a simulated cluster and their memory, which the checkers look into."""

    now: float
    segments: dict[IncarnationId, Segment]
    processes: "dict[str, Process[Machine]]"

    def clock(self, process: "Process[Machine]") -> float: ...
    def alive(self, node: str, incarnation: int) -> bool: ...


@dataclass(slots=True)
class _Lease:
    """A lease granted by a cache-node and not ended yet, as far as its messages show."""

    holder: IncarnationId
    slots: dict[int, int]
    """Slot -> generation."""
    expires_at: float


@dataclass(slots=True)
class _Put:
    """The slots granted to a writer. It stops in time by itself; a copy under way when it was stopped may end late."""

    writer: IncarnationId
    keys: tuple[Key, ...]
    slots: dict[int, int]
    expires_at: float


@dataclass(slots=True)
class _Pool:
    """The leases and puts that one incarnation of a cache-node has granted."""

    name: str
    asked: dict[tuple[IncarnationId, int], LeaseBlocks] = field(default_factory=dict)
    leases: dict[tuple[IncarnationId, int], _Lease] = field(default_factory=dict)
    puts: dict[tuple[IncarnationId, int], _Put] = field(default_factory=dict)
    peers: dict[str, int] = field(default_factory=dict)
    had: dict[tuple[IncarnationId, int], int] = field(default_factory=dict)
    """(holder, slot) -> the generation that it was last granted and has not released."""
    fences: dict[int, int] = field(default_factory=dict)
    """The generations set by effects that are not carried out yet: a frame may hold several messages."""


class Checkers:
    """All checkers of one run. `blocks`: the right contents of every key's block; `roots`: the keys that prompts follow;
    `max_lease_s`: the longest lease granted; `shares`: the checker of tenants' shares of every pool; `all_live`: no process
    ends, nor stands still for long."""

    def __init__(
        self,
        *,
        blocks: Mapping[Key, bytes],
        roots: Sequence[bytes],
        block_tokens: int,
        max_lease_s: float,
        shares: "ShareChecker",
        all_live: bool = False,
    ) -> None:
        self._all_live = all_live
        self.messages: Counter[str] = Counter()
        self.works: Counter[str] = Counter()
        self.transitions: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.known_gone: set[str] = set()
        """The requests whose gateway knows that the client hung up: nothing more may be sent."""
        self._blocks = blocks
        self._roots = roots
        self._block_tokens = block_tokens
        self._max_lease_s = max_lease_s
        self._shares = shares
        self._cordons = CordonChecker()
        self.cross_hits = CrossHits()
        self._attempts: dict[str, int] = {}
        """The latest attempt of each request."""
        self._versions = WeightVersions()
        self._approximations = Approximations()
        self._pools: dict[IncarnationId, _Pool] = {}
        self._committed: dict[tuple[str, int, int], tuple[int, bytes]] = {}
        """(node, incarnation, slot) -> the generation and bytes that a cache-node committed there."""
        self._actors: dict[str, Any] = {}
        self._watched: Watched

    def attach(self, watched: Watched) -> None:
        """Keep the world that is checked."""
        self._watched = watched

    def _now(self, name: str) -> float:
        """Return the monotonic clock of a process."""
        return self._watched.clock(self._watched.processes[name])

    # --- at the actors' edge

    def observed(self, spec: "ProcessSpec", incarnation: int, actor: Any, event: Event, effects: Sequence[Effect]) -> None:
        """Check an event that an actor handled, before its effects are carried out."""
        self._actors[spec.name] = actor
        for effect in effects:
            if isinstance(effect, Send):
                self.messages[type(effect.message).__name__] += 1
                if effect.to not in spec.peers:
                    raise Violation("I4", f"{spec.name} sends {effect.to} a {type(effect.message).__name__} without a link")
            elif isinstance(effect, Start):
                self.works[type(effect.work).__name__] += 1
        wrong = self._cordons.observed(self._now(spec.name), (spec.name, incarnation), spec.role, actor, event, effects)
        if wrong is not None:
            raise Violation("I4", wrong)
        if self._all_live and isinstance(event, PeerDown):
            raise Violation("I8", f"{spec.name} ends its conversation with {event.peer}, which runs: {event.reason}")
        if spec.role == "gateway":
            self._gateway_did(event, effects)
        if spec.role == "cache-node":
            pool = self._pools.setdefault((spec.name, incarnation), _Pool(spec.name))
            self._note_request(pool, event)
            self._pool_said((spec.name, incarnation), pool, event, effects)
            self._shares.observed(spec.name, incarnation, actor, event, effects)
        if spec.role == "decode":
            forks = isinstance(event, Received) and isinstance(event.message, ReserveDecode)
            self._copies_exact(spec.name, effects, forks=forks)
            self._approximations.decodes(actor, effects)
        if spec.role == "prefill":
            self._slab_announced((spec.name, incarnation), actor, effects)
            self._waits_end(spec.name, actor)
            self._approximations.computes(actor, effects)

    def _copies_exact(self, name: str, effects: Sequence[Effect], *, forks: bool) -> None:
        """Check I1: what a decode kept under keys and copies for a new request (`forks`), or puts into a pool, is exact."""
        current, size = self._watched.processes[name].current, self._block_tokens
        assert current is not None
        for work in [effect.work for effect in effects if isinstance(effect, Start)]:
            ends: list[tuple[int, int]] = []
            if forks and isinstance(work, ForkSequence):
                ends = [(work.source, work.tokens)]
            elif isinstance(work, CopyBlocks):
                sources = [source for source, _ in work.copies if isinstance(source, SequenceBlock)]
                ends = [(source.sequence, (source.block + 1) * size) for source in sources]
            for sequence, stop in ends:
                begin = current.machine.sequences[sequence].approximate_from
                if begin < stop:
                    raise Violation("I1", f"{name} copies KV as exact that is approximate from {begin} on")

    def _waits_end(self, name: str, actor: Any) -> None:
        """Check I4: no job waits for blocks of another past its bound, unless its process was stopped meanwhile."""
        current, now = self._watched.processes[name].current, self._now(name)
        for job in getattr(actor, "_waiting", ()):
            if now - job.arrived_at > job.request.coming_s + LATE_S and current and current.machine.stopped_at < job.arrived_at:
                raise Violation(
                    "I4", f"{name}: {job.request.request_id} waits for {now - job.arrived_at:.1f} s, past its bound"
                )

    def _slab_announced(self, me: IncarnationId, actor: Any, effects: Sequence[Effect]) -> None:
        """Check I1 and I5: the blocks that a prefill announces stand in its slab, and have the contents of their keys."""
        segment = self._watched.segments[me]
        for key in self._announced(me[0], effects):
            slot = actor.slots.committed(key)
            if slot not in segment.flipped and segment.block(slot) != self._blocks.get(key):
                raise Violation("I1", f"{me[0]} announces {key.hex()} in slot {slot}, which holds something else")

    def _gateway_did(self, event: Event, effects: Sequence[Effect]) -> None:
        """Check I3: what an attempt that was given up still sends reaches no client."""
        match event:
            case FromClient(request_id, ClientGone()):
                self.known_gone.add(request_id)
            case FromClient(request_id, ClientRequest() as asked):
                self._approximations.asked(request_id, asked)
            case Received(sender, TokensDecoded(entries=entries) as said):
                self._versions.received(sender, said, self._attempts)
                self._only_current({(request_id, attempt) for request_id, attempt, _, _ in entries}, effects)
            case Received(sender, FirstToken() | PromptScored() | TextsEmbedded() as said):
                if isinstance(said, FirstToken):
                    self._versions.received(sender, said, self._attempts)
                    if any(isinstance(effect, ToClient) and effect.request_id == said.request_id for effect in effects):
                        self._approximations.received(said)
                request_id, attempt = said.request_id, said.attempt
                self._only_current({(request_id, attempt)}, effects)
        for effect in effects:
            if isinstance(effect, ToClient) and isinstance(effect.output, TokenOut):
                attempt = self._attempts.get(effect.request_id, 0)
                self._approximations.sent(effect.request_id, attempt, effect.output.index)
            if isinstance(effect, ToClient) and isinstance(effect.output, Finished):
                self._versions.finished(effect.request_id, effect.output)
                self._approximations.finished(effect.request_id, effect.output)
            if isinstance(effect, Send) and isinstance(effect.message, Schedule):
                if not _is_relocating(event):  # the attempt under way goes on meanwhile
                    self._attempts[effect.message.request_id] = effect.message.attempt
            elif isinstance(effect, Send) and isinstance(effect.message, StartPrefill):
                self._versions.started(effect.message)
                self._attempts[effect.message.request_id] = effect.message.attempt
                self._attempts |= {sibling.request_id: sibling.attempt for sibling in effect.message.siblings}

    def _only_current(self, named: set[tuple[str, int]], effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToClient):
                latest = (effect.request_id, self._attempts.get(effect.request_id, 0))
                if latest not in named:
                    raise Violation("I3", f"{effect.request_id} is sent {effect.output} of an older attempt than {latest[1]}")

    def leaves(self, process: "Process[Machine]") -> None:
        """Check I4: an engine that reports itself drained has no work left."""
        assert process.current is not None
        if process.spec.role in (*ENGINE_ROLES, "vllm"):
            problem = self._idle(process.name, process.current)
            if problem is not None:
                raise Violation(problem.invariant, f"drained, as it says, but {problem}")

    def died(self, name: str, incarnation: int) -> None:
        """Void what an ended incarnation granted, and free what it held."""
        self._pools.pop((name, incarnation), None)
        self._collect(self._actors.pop(name, None))

    def _collect(self, actor: Any) -> None:
        self.transitions.update(getattr(actor, "transitions", {}))
        self.counts.update(getattr(actor, "counts", {}))

    def _note_request(self, pool: _Pool, event: Event) -> None:
        match event:
            case PeerUp(peer, incarnation, _):
                pool.peers[peer] = incarnation
            case PeerDown(peer, _):  # the holder forgets its leases too, and does not report it
                pool.had = {had: generation for had, generation in pool.had.items() if had[0][0] != peer}
            case Received(sender, LeaseBlocks() as ask):
                pool.asked.setdefault((self._incarnation_of(pool, sender), ask.lease_id), ask)
            case Received(sender, ReleaseLease(lease_id=lease_id)):
                self._released(pool, self._incarnation_of(pool, sender), lease_id)
            case Received(sender, CommitSlots() as commit):
                self._commit(pool, self._incarnation_of(pool, sender), commit)

    def _pool_said(self, me: IncarnationId, pool: _Pool, event: Event, effects: Sequence[Effect]) -> None:
        segment = self._watched.segments[me]
        self._announced(me[0], effects)
        for effect in effects:
            match effect:
                case Fence(changes):
                    pool.fences.update(changes)
                case Send(to, (BlocksLeased() | BlocksArrived()) as leased):
                    self._granted(pool, segment, self._incarnation_of(pool, to), leased)
                case Send(to, LeaseRenewed(lease_id=lease_id)):
                    self._renewed(pool, self._incarnation_of(pool, to), lease_id, event)
                case Send(to, SlotsReserved() as reserved):
                    self._reserved(pool, self._incarnation_of(pool, to), event, reserved)
                case Publish(events):
                    self._published(me[0], [each for each in events if isinstance(each, BlocksStored)])

    def _incarnation_of(self, pool: _Pool, peer: str) -> IncarnationId:
        return peer, pool.peers.get(peer, 0)

    def _granted(self, pool: _Pool, segment: Segment, holder: IncarnationId, leased: BlocksLeased | BlocksArrived) -> None:
        """Check I1: a leased block is committed, stands, and has the contents of its key."""
        ask = pool.asked.get((holder, leased.lease_id))
        if ask is None or not (leased.slots or isinstance(leased, BlocksLeased) and leased.more):
            return
        slots: dict[int, int] = {}
        keys = [ask.keys[block] for block in leased.blocks] if isinstance(leased, BlocksArrived) else ask.keys
        for key, ref in zip(keys, leased.sources, strict=False):
            generation = pool.fences.get(ref.slot, segment.generations[ref.slot])
            where = f"{segment.node} slot {ref.slot} generation {ref.generation}"
            if generation != ref.generation or generation % 2:
                raise Violation("I1", f"leased before its commit or after its end: {where}, but it stands at {generation}")
            if ref.slot not in segment.flipped:
                standing = segment.block(ref.slot)
                if self._blocks.get(key) != standing:
                    raise Violation("I1", f"{where} is leased as {key.hex()} but holds something else")
                if ref.checksum != _checksum(segment, standing):
                    raise Violation("I1", f"{where} is leased with a checksum that is not its bytes'")
            slots[ref.slot] = ref.generation
            pool.had[holder, ref.slot] = ref.generation
        if isinstance(leased, BlocksArrived):
            if (holder, leased.lease_id) not in pool.leases:
                raise Violation("I2", f"{holder} was sent further blocks of lease {leased.lease_id}, but it has ended")
            pool.leases[holder, leased.lease_id].slots.update(slots)
            return
        ttl_s = min(ask.ttl_s, self._max_lease_s)
        pool.leases[holder, leased.lease_id] = _Lease(holder, slots, self._now(pool.name) + ttl_s)

    def _renewed(self, pool: _Pool, holder: IncarnationId, lease_id: int, event: Event) -> None:
        lease = pool.leases.get((holder, lease_id))
        if lease is None:
            raise Violation("I2", f"{holder} was sent that lease {lease_id} lasts, but it has ended")
        assert isinstance(event, Received)
        assert isinstance(event.message, RenewLease)
        lease.expires_at = self._now(pool.name) + min(event.message.ttl_s, self._max_lease_s)

    def _reserved(self, pool: _Pool, writer: IncarnationId, event: Event, reserved: SlotsReserved) -> None:
        if isinstance(event, Received) and isinstance(event.message, ReserveSlots) and reserved.grants:
            slots = {grant.slot: grant.generation for grant in reserved.grants}
            ttl_s = min(event.message.ttl_s, self._max_lease_s)
            put = _Put(writer, event.message.keys, slots, self._now(pool.name) + ttl_s)
            pool.puts[writer, reserved.put_id] = put

    def _released(self, pool: _Pool, holder: IncarnationId, lease_id: int) -> None:
        lease = pool.leases.pop((holder, lease_id), None)
        for slot in lease.slots if lease else ():
            pool.had.pop((holder, slot), None)

    def _commit(self, pool: _Pool, writer: IncarnationId, commit: CommitSlots) -> None:
        pool.puts.pop((writer, commit.put_id), None)

    def _announced(self, name: str, effects: Sequence[Effect]) -> list[Key]:
        """Check I5: a cache-node or prefill announces only blocks that it holds, or that leave it in the same turn and are
        announced to the same conductor as gone thereafter. Return those that it holds."""
        held, gone = list[Key](), set[tuple[str, Key]]()
        for effect in reversed(effects):
            if isinstance(effect, Send) and isinstance(effect.message, BlocksAnnounced):
                stays = [key for key in effect.message.stored if (effect.to, key) not in gone]
                gone.update((effect.to, key) for key in effect.message.removed)
                for key in stays:
                    if not self._actors[name].holds(key):
                        raise Violation("I5", f"{name} announces {key.hex()}, which it does not hold")
                held += stays
        return held

    def _published(self, name: str, events: Sequence[BlocksStored]) -> None:
        """Check I5: the key of a block in a KV event is the hash of the tokens there, wherever the copy came from."""
        for event in events:
            after = [event.parent] if event.parent else self._roots
            if not any(extend_keys(parent, event.tokens, self._block_tokens) == list(event.keys) for parent in after):
                raise Violation("I5", f"{name} announces {len(event.keys)} blocks on {event.medium.value} what is not in them")

    # --- in the memory

    def fenced(self, segment: Segment, slot: int, generation: int) -> None:
        """Check I2: no slot changes hands while leased; I1: generations only grow, and committed bytes are remembered."""
        was = segment.generations[slot]
        if generation <= was:
            raise Violation("I1", f"{segment.node} slot {slot}: generation goes from {was} back to {generation}")
        pool = self._pools.get((segment.node, segment.incarnation))
        if pool is None:
            return
        pool.fences.pop(slot, None)
        lease = self._covering(pool, slot, was)
        if lease is not None:
            raise Violation("I2", f"{segment.node} slot {slot} is taken away while {lease.holder} leases it")
        place = (segment.node, segment.incarnation, slot)
        self._check_unchanged(place, segment)
        self._committed.pop(place, None)
        if generation % 2 == 0:
            self._committed[place] = generation, segment.block(slot)

    def writing(self, machine: Machine, work: Running, segment: Segment, grant: SlotGrant) -> None:
        """Check I2: a write goes to the slot that was granted, in time; a stopped writer may be late, but overwrites no other's
        block."""
        if not segment.linked or not self._watched.alive(segment.node, segment.incarnation):
            return
        standing = segment.generations[grant.slot]
        where = f"{machine.name} writes {segment.node} slot {grant.slot}"
        if standing != grant.generation:
            raise Violation("I2", f"{where} granted at generation {grant.generation}, which stands at {standing}")
        if machine.name == segment.node or machine.stopped_at > work.started_at:
            return
        now = self._now(segment.node)
        for put in self._pools[segment.node, segment.incarnation].puts.values():
            mine = put.writer == (machine.name, machine.incarnation) and put.slots.get(grant.slot) == grant.generation
            if mine and now <= put.expires_at + EPSILON_S:
                return
        raise Violation("I2", f"{where} at {now:.3f} under no put of its own that still lasts")

    def reading(self, machine: Machine, work: Running, segment: Segment, ref: SlotRef) -> None:
        """Check I2: a pool's slot is read under a lease that lasts. A stopped reader may be late, and will notice; one whose
        host was suspended believes in a lease that is over, and finds out by the generation.

        A decode may also read what its prefill has leased, and cannot know when that ends: generations guard it there.
        """
        pool = self._pools.get((segment.node, segment.incarnation))
        if pool is None or machine.name == segment.node or machine.stopped_at > work.started_at:
            return
        if self._watched.now - machine.woke_at <= self._max_lease_s:
            return
        own = pool.had.get(((machine.name, machine.incarnation), ref.slot)) == ref.generation
        if (own or not isinstance(work.work, PullBlocks)) and self._covering(pool, ref.slot, ref.generation) is None:
            raise Violation("I2", f"{machine.name} reads {segment.node} slot {ref.slot} under no lease that lasts")

    def verified(self, segment: Segment, ref: SlotRef, layer: int, part: bytes) -> None:
        """Check I1: a block that was read and found good stands, and is what was committed."""
        stands = segment.generations[ref.slot]
        if stands != ref.generation and (ref.checksum or stands != ref.generation + 1):  # 0: announced before it was committed
            where = f"{segment.node} slot {ref.slot} generation {ref.generation}"
            raise Violation("I1", f"{where} is taken for good, but it stands at {stands}")
        generation, stored = self._committed.get((segment.node, segment.incarnation, ref.slot), (-1, b""))
        if generation == ref.generation:
            size = segment.layout.part_bytes
            if stored[layer * size : (layer + 1) * size] != part:
                raise Violation("I1", f"{segment.node} slot {ref.slot} layer {layer}: read back other bytes than committed")
        elif ref.checksum and (segment.node, segment.incarnation) in self._pools:
            raise Violation("I1", f"{segment.node} slot {ref.slot}: generation {ref.generation} was read, but never stood")

    def closing(self, machine: Machine, sequence: int, works: Sequence[Running]) -> None:
        """Check I2: no memory is freed under a work."""
        if works:
            names = [type(work.work).__name__ for work in works]
            raise Violation("I2", f"{machine.name} closes sequence {sequence} under {names}")

    def broken(self, machine: Machine, text: str) -> None:
        """Report an effect that makes no sense: a bug of the actor."""
        raise Violation("I2", f"{machine.name} {text}")

    def _covering(self, pool: _Pool, slot: int, generation: int) -> _Lease | None:
        now = self._now(pool.name)
        for lease in pool.leases.values():
            covers = lease.slots.get(slot) == generation and lease.expires_at > now + EPSILON_S
            if covers and self._watched.alive(*lease.holder):
                return lease
        return None

    def _check_unchanged(self, place: tuple[str, int, int], segment: Segment) -> None:
        """Check I1: a copy's bytes never change while its generation stands."""
        generation, stored = self._committed.get(place, (-1, b""))
        slot = place[2]
        stands = generation == segment.generations[slot] and slot not in segment.flipped
        if stands and segment.block(slot) != stored:
            raise Violation("I1", f"{segment.node} slot {slot} changed while generation {generation} stood")

    # --- at the end

    def busy(self) -> Violation | None:
        """Return what is not over yet, by I4 (I2 for leases); None when all is quiet."""
        for name, process in self._watched.processes.items():
            current = process.current
            if current is None:
                return Violation("I4", f"{name} is down")
            problem = self._idle(name, current)
            if problem is not None:
                return problem
        return None

    def _idle(self, name: str, current: "Incarnation[Machine]") -> Violation | None:
        levels = current.actor.gauges(self._now(name)).items()
        above = {gauge: level for gauge, level in levels if level and not gauge.startswith(IDLE_GAUGES)}
        if above:
            leases_only = all("lease" in gauge for gauge in above)
            return Violation("I2" if leases_only else "I4", f"{name} has {above}")
        works = [type(running.work).__name__ for running in current.machine.works.values()]
        if set(works) - {ProbeEngine.__name__}:  # which is sent all the time
            return Violation("I4", f"{name} has works {works}")
        kept = getattr(current.actor, "kept_sequences", ())
        if set(current.machine.sequences) != set(kept):
            return Violation("I4", f"{name} has sequences {list(current.machine.sequences)} open, and keeps {list(kept)}")
        return None

    def stale_index(self) -> Violation | None:
        """Check I5: return where a conductor's index differs from what a cache-node or a slab holds; None when it is true."""
        runs = {name: p.current for name, p in self._watched.processes.items() if p.current is not None}
        roles = {name: self._watched.processes[name].spec.role for name in runs}
        pools = {name: current.actor for name, current in runs.items() if roles[name] in ("cache-node", "prefill")}
        for name, current in runs.items():
            if roles[name] != "conductor":
                continue
            index = getattr(current.actor, "_inventory").index  # noqa: B009 (the checkers may look inside; types may not)
            coming = getattr(current.actor, "_coming")  # noqa: B009
            if len(coming) > len(getattr(current.actor, "_bookings")):  # noqa: B009
                return Violation("I5", f"{name} counts on blocks of {len(coming)} placements, and not as many are booked")
            for key in self._blocks:
                known = index.match((key,))
                for pool_name, pool in pools.items():
                    holds = getattr(pool, "holds")(key)  # noqa: B009
                    if holds != (pool_name in known):
                        says = "misses" if holds else "holds"
                        return Violation("I5", f"{name} thinks that {pool_name} {says} {key.hex()}")
        return None

    def finish(self) -> None:
        """Add the counters of the running actors to the coverage."""
        for actor in self._actors.values():
            self._collect(actor)
        self._actors.clear()

    def at_end(self) -> None:
        """Check I1, I2 and every actor's own invariants once nothing is in progress."""
        for place in list(self._committed):
            segment = self._watched.segments[place[:2]]
            if segment.linked:
                self._check_unchanged(place, segment)
        for name, process in self._watched.processes.items():
            if process.current is not None:
                process.current.actor.check(self._now(name))
            pool = self._pools.get((name, process.current.incarnation if process.current else 0), _Pool(name))
            for holder, lease in pool.leases.items():
                if lease.expires_at > self._now(name) and self._watched.alive(*lease.holder):
                    raise Violation("I2", f"{name}: lease {holder} lasts although no lease covers it")


def _is_relocating(event: Event) -> bool:
    """Return whether the gateway asks for other places because a node drains."""
    return isinstance(event, Received) and isinstance(event.message, PlaceElsewhere)


def _checksum(segment: Segment, block: bytes) -> int:
    return block_checksum(part_checksums(block, segment.layout.part_bytes))
