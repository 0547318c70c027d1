"""Bugs planted on purpose, to see each checker fail: a checker never seen failing proves nothing. Simulation only.

An actor's own `check` would often notice first, so where it would, it is silenced: what is on trial is the checker outside.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from msgspec import structs

from mooncake_zmq.conductor.coming import Coming
from mooncake_zmq.core import session
from mooncake_zmq.core.actor import Drained, Effect, Received, Send, SetTimer, Start
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    BlocksLeased,
    CommitSlots,
    FirstToken,
    LeaseRenewed,
    ReleaseLease,
    SlotsReserved,
    StartPrefill,
    TokensDecoded,
)
from mooncake_zmq.core.session import Session
from mooncake_zmq.core.work import DiskBlock, Generate
from mooncake_zmq.decode.decode import Decode
from mooncake_zmq.gateway.requests.readiness import Readiness
from mooncake_zmq.gateway.requests.requests import Requests
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.eviction import Lru
from mooncake_zmq.kv.lease import HolderId
from mooncake_zmq.kv.shares import Shares
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node import cache_node, client, disk_tier
from mooncake_zmq.pool.node.cache_node import CacheNode
from mooncake_zmq.pool.node.client import PoolClient, PutEnded
from mooncake_zmq.pool.node.contents import Content, Contents
from mooncake_zmq.pool.node.gathering import Gatherer
from mooncake_zmq.prefill.job import JobState
from mooncake_zmq.prefill.pipeline import BUFFERS, Group, HiddenSlots
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.prefill.stages import Stages
from mooncake_zmq.prefill.waiting import Waiting
from mooncake_zmq.simulation import engine, hardware, planted_stores, shelf
from mooncake_zmq.simulation.faults import FaultKind
from mooncake_zmq.simulation.planted_stores import Replacements, silent
from mooncake_zmq.vllm_node.vllm_node import VllmNode


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug: what to replace, which invariants' checkers notice, and the faults that bring it out."""

    what: str
    invariants: tuple[str, ...]
    stress: tuple[FaultKind, ...]
    replacements: Callable[[], Replacements]


@contextmanager
def planting(name: str | None) -> Iterator[None]:
    """Run with the bug `name`, or with none."""
    with ExitStack() as stack:
        for owner, attribute, replacement in PLANTED[name].replacements() if name else ():
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


class _PinlessSlots(Slots):
    """A lease pins nothing: its slots stay among those to evict."""

    def pin(self, slots: Sequence[int]) -> None:
        pass

    def unpin(self, slots: Sequence[int]) -> None:
        self.touch(slots)

    def check(self) -> None:
        pass


def _evict_leased() -> Replacements:
    return [(cache_node, "Slots", _PinlessSlots), (CacheNode, "check", silent)]


def _no_generation_check() -> Replacements:
    """In the rule that live reads follow too."""

    def always(*_: object, **__: object) -> bool:
        return True

    return [(reading, rule, always) for rule in ("generation_stands", "row_stands", "part_stands")]


def _disk_unverified() -> Replacements:
    """What is read from disk is taken for what the index says, and its checksum for the one that was asked for."""
    copy = hardware.Machine._finish_copy

    def trusting(self: Any, running: Any, copied: Any) -> Any:
        checksum = copy(self, running, copied)
        source = next((source for source, grant in running.work.copies if grant is copied.grant), None)
        return source.checksum if checksum is not None and isinstance(source, DiskBlock) else checksum

    def always(*_: object) -> bool:
        return True

    return [
        (reading, "header_stands", always),
        (reading, "payload_stands", always),
        (hardware.Machine, "_finish_copy", trusting),
    ]


class _ExclusiveSlots(_PinlessSlots):
    """What is being promoted is the next to go, as DRAM will have it."""

    def pin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.demote(slot)


def _disk_unpinned() -> Replacements:
    """Disk slots are not kept for the copies that read them."""
    return [(disk_tier, "Slots", _ExclusiveSlots), (CacheNode, "check", silent)]


def _ttl_from_receipt() -> Replacements:
    """Every holder's clock begins when the answer arrives."""

    def from_receipt(handle: Callable[[Any, float, Any], list[Effect]]) -> Callable[[Any, float, Any], list[Effect]]:
        def handled(self: Any, now: float, event: Any) -> list[Effect]:
            pool: PoolClient = self._pool
            if isinstance(event, Received):
                match event.message:
                    case BlocksLeased(lease_id=lease_id) | LeaseRenewed(lease_id=lease_id):
                        lease = pool._leases.get(lease_id)
                        if lease is not None:
                            lease.expires_at = now + pool.settings.lease_ttl_s
                            lease.renewal_sent_at = now if lease.renewal_sent_at is not None else None
                    case SlotsReserved(put_id=put_id):
                        put = pool._puts.get(put_id)
                        if put is not None:
                            put.sent_at = now
            return handle(self, now, event)

        return handled

    return [
        (Prefill, "handle", from_receipt(Prefill.handle)),
        (Decode, "handle", from_receipt(Decode.handle)),
        (client, "COPY_MARGIN", 0.0),
    ]


def _late_writer() -> Replacements:
    """A put past its time is simply given back: no quarantine, nobody asks whether its writer still writes."""

    def on_put_expired(self: CacheNode, writer: HolderId) -> list[Effect]:
        put = self._puts.pop(writer, None)
        for slot in put.slots.values() if put else ():
            self.slots.free(slot)
        return []

    return [(CacheNode, "_on_put_expired", on_put_expired)]


def _commit_unverified() -> Replacements:
    """A put's blocks are all committed, those whose copy failed too."""
    on_commit = CacheNode._on_commit

    def commit_all(self: CacheNode, now: float, sender: str, message: CommitSlots) -> list[Effect]:
        put = self._puts.get(self._holder(sender, message.put_id))
        checksums = dict(message.checksums)
        everything = tuple((index, checksums.get(index, 1)) for index in put.slots) if put else ()
        return on_commit(self, now, sender, CommitSlots(put_id=message.put_id, checksums=everything))

    return [(CacheNode, "_on_commit", commit_all)]


def _duplicate_token() -> Replacements:
    """The session lets duplicates through, and the gateway passes on whatever comes."""
    accept = Session._accept

    def accept_all(self: Session, now: float, peer: Any, sequence: int, body: bytes) -> Any:
        again = sequence < peer.expected
        return accept(self, now, peer, sequence, body) + (self._deliver(now, peer, body) if again else [])

    def take(self: Requests, request: Any, index: int, token: int, logprob: Any, effects: list[Effect]) -> None:
        self._emit(request, token, logprob, effects)

    return [(Session, "_accept", accept_all), (Requests, "_take", take)]


def _stale_attempt() -> Replacements:
    """The gateway takes tokens of whatever attempt, from whomever."""
    on_first_token, on_tokens = Requests._on_first_token, Requests._on_tokens

    def first_of_any(self: Requests, now: float, sender: str, message: FirstToken) -> list[Effect]:
        request = self._requests.get(message.request_id)
        if request is not None and request.attempt > message.attempt:
            effects: list[Effect] = []
            self._take(request, message.index, message.token, message.logprob, effects)
            return effects
        return on_first_token(self, now, sender, message)

    def tokens_of_any(self: Requests, now: float, sender: str, message: TokensDecoded) -> list[Effect]:
        effects: list[Effect] = []
        for request_id, attempt, first, tokens in message.entries:
            request = self._requests.get(request_id)
            if request is not None and request.attempt > attempt:
                effects += self._take_run(now, request, first, tokens, ())
        return effects + on_tokens(self, now, sender, message)

    return [(Requests, "_on_first_token", first_of_any), (Requests, "_on_tokens", tokens_of_any)]


def _answer_forgotten() -> Replacements:
    """A resumed request takes its tokens so far for a part of the prompt."""
    on_placed = Requests._on_placed

    def as_prompt(self: Requests, now: float, sender: str, message: Any) -> list[Effect]:
        effects = on_placed(self, now, sender, message)
        for index, effect in enumerate(effects):
            if isinstance(effect, Send) and isinstance(effect.message, StartPrefill):
                start = effect.message
                sampling = structs.replace(start.sampling, prompt_tokens=len(start.tokens) // 4)
                effects[index] = Send(effect.to, structs.replace(start, sampling=sampling))
        return effects

    return [(Requests, "_on_placed", as_prompt)]


def _constraint_restarts() -> Replacements:
    """Whoever goes on with an answer begins its grammar anew."""
    return [(engine, "place_of", lambda sampling, past: int(sampling.constraint or b"0"))]


def _index_lies() -> Replacements:
    """Evicted blocks are never taken back from the conductors."""
    announce = CacheNode._announce

    def stored_only(self: CacheNode) -> list[Effect]:
        effects = []
        for effect in announce(self):
            if isinstance(effect, Send) and isinstance(effect.message, BlocksAnnounced):
                told = effect.message
                if told.stored or told.on_disk:
                    effects.append(Send(effect.to, BlocksAnnounced(stored=told.stored, on_disk=told.on_disk)))
        return list(effects)

    return [(CacheNode, "_announce", stored_only)]


def _announce_early() -> Replacements:
    """Blocks are announced when their slots are granted, before anything is in them."""
    on_reserve = CacheNode._on_reserve

    def announcing(self: CacheNode, now: float, sender: str, message: Any) -> list[Effect]:
        effects = on_reserve(self, now, sender, message)
        granted = tuple(key for key in message.keys if self.slots.held(key) and self.slots.committed(key) is None)
        conductors = [name for name, peer in self._peers.items() if peer.role == "conductor"]
        return effects + [Send(name, BlocksAnnounced(stored=granted)) for name in conductors if granted]

    return [(CacheNode, "_on_reserve", announcing)]


def _contents_stale() -> Replacements:
    """What was known of a slot's first block is told of all that follow it there."""
    put = Contents.put

    def once(self: Contents, slot: int, parent: Key | None, tokens: bytes = b"") -> None:
        if not self.of(slot).tokens:
            put(self, slot, parent, tokens)

    return [(Contents, "put", once)]


def _contents_lost() -> Replacements:
    """What a source tells of its blocks is not kept."""

    def silent(self: Gatherer, *_: object) -> dict[Key, Content]:
        return {}

    return [(Gatherer, "_fitting_contents", silent)]


def _lease_leak() -> Replacements:
    """Leases end neither by release nor by expiry."""

    def ignore(self: CacheNode, now: float, message: ReleaseLease | HolderId, *_: object) -> list[Effect]:
        return []

    return [(CacheNode, "_on_release", ignore), (CacheNode, "_on_lease_expired", ignore)]


def _closed_under_copy() -> Replacements:
    """A request that ends frees its KV although a work still uses it."""
    try_end = Decode._try_end

    def end_now(self: Decode, request: Any) -> list[Effect]:
        request.in_flight = 0
        return try_end(self, request)

    return [(Decode, "_try_end", end_now)]


def _lost_request() -> Replacements:
    """The gateway forgets that a failed attempt needs another, and every timer that would remind it."""

    def ignore(self: Requests, *_: object) -> list[Effect]:
        return []

    def stay(self: Requests, now: float, event: Any) -> list[Effect]:
        return []

    handle = Requests.handle

    def deaf(self: Requests, now: float, event: Any) -> list[Effect]:
        reminder = type(event).__name__ == "TimerFired" and event.key[0] in ("stall", "deadline")
        return stay(self, now, event) if reminder else handle(self, now, event)

    return [(Requests, "_on_failed", ignore), (Requests, "handle", deaf)]


def _old_life_heard() -> Replacements:
    """A session follows whatever life or epoch speaks."""
    refusal = Session._refusal

    def lenient(self: Session, now: float, peer: Any, envelope: Any) -> str | None:
        reason = refusal(self, now, peer, envelope)
        return None if reason in ("other_life", "old_epoch", "former_life") else reason

    return [(Session, "_refusal", lenient)]


def _number_decides() -> Replacements:
    """A life with a larger incarnation is believed at once, one with a smaller never."""

    def silence_s(self: Session, peer: Any, envelope: Any) -> float:
        return 0.0 if envelope.incarnation > peer.incarnation else math.inf

    return [(Session, "_silence_s", silence_s)]


def _deaf_time_counts() -> Replacements:
    """The time counts as silence in which this process could not read what its peers sent."""

    def counted_s(self: Session, now: float, since: Any, excused_s: float = 0.0) -> float:
        return float(now - since.at - excused_s)

    return [(Session, "_counted_s", counted_s)]


def _lateness_untold() -> Replacements:
    """Nobody says in his envelopes how late he was."""
    note = Session._note_lateness

    def untold(self: Session, now: float) -> float:
        late_s = note(self, now)
        self.recent_late_s = 0.0
        return late_s

    return [(Session, "_note_lateness", untold)]


def _keys_not_compared() -> Replacements:
    """Who has any key speaks as whom he likes."""
    return [(session, "_is_by", lambda sender, key_of: True)]


def _put_never_ends() -> Replacements:
    """The writer never tells that its copy is done."""
    on_copied = PoolClient.on_copied

    def silent(self: PoolClient, work_id: int, result: Any) -> PutEnded:
        return PutEnded([], on_copied(self, work_id, result).tokens)

    return [(PoolClient, "on_copied", silent), (PoolClient, "on_reclaim", lambda self, now, sender, message: [])]


def _undrained() -> Replacements:
    """A node that is asked to change its role does so at once, whatever it still has."""

    def at_once(self: Leaving, *, idle: bool) -> list[Effect]:
        return [Drained(self._become)] if self._become else []

    return [(Leaving, "drained", at_once)]


def _restless() -> Replacements:
    """Who is to rest says so and takes what comes."""

    def rest(self: Leaving, resting: bool) -> None:
        self.resting = resting

    return [(Leaving, "rest", rest)]


def _restless_conductor() -> Replacements:
    """Gateways ask the first conductor, whether it rests or not."""

    def rests(self: Readiness, conductor: str) -> bool:
        return False

    return [(Readiness, "_rests", rests)]


def _stale_hidden() -> Replacements:
    """A stage writes a chunk's hidden states over those that the next stage has still to read, under the same generation."""

    def hurried(self: Any, stage: int) -> bool:
        chunk = self._begun[stage]
        return chunk < len(self._chunks) and (stage == 0 or self._done[stage - 1] > chunk)

    def taken(self: Any, slots: Slots, chunk: int, count: int) -> list[int]:
        first = chunk % BUFFERS * (len(self.slots) // BUFFERS)
        return list(self.slots[first : first + count])

    def always(*_: object) -> bool:
        return True

    return [
        (Group, "may_begin", hurried),
        (HiddenSlots, "take", taken),
        (Stages, "_follows", always),
        (Stages, "check", silent),
    ]


def _resume_repeats() -> Replacements:
    """A vLLM that goes on with an answer is given all but the last token of it, and makes that once more."""
    handle = VllmNode.handle

    def forgetful(self: VllmNode, now: float, event: Any) -> list[Effect]:
        effects = handle(self, now, event)
        for place, effect in enumerate(effects):
            if isinstance(effect, Start) and isinstance(effect.work, Generate) and effect.work.count:
                effects[place] = structs.replace(effect, work=structs.replace(effect.work, tokens=effect.work.tokens[:-4]))
        return effects

    return [(VllmNode, "handle", forgetful)]


def _passed_on_short() -> Replacements:
    """A vLLM that prefilled passes the request on without the token that it made."""
    handle = VllmNode.handle

    def forgetful(self: VllmNode, now: float, event: Any) -> list[Effect]:
        effects = handle(self, now, event)
        for place, effect in enumerate(effects):
            if isinstance(effect, Send) and isinstance(effect.message, StartPrefill):
                rest = structs.replace(effect.message, tokens=effect.message.tokens[:-4])
                effects[place] = structs.replace(effect, message=rest)
        return effects

    return [(VllmNode, "handle", forgetful)]


def _shelved_wrong() -> Replacements:
    """What vLLMs save in the stores is not what they load."""
    put = shelf.Shelf.put

    def spoilt(self: shelf.Shelf, key: Key, block: bytes) -> None:
        put(self, key, block[4:] + block[:4])

    return [(shelf.Shelf, "put", spoilt)]


def _copied_short() -> Replacements:
    """A choice begins with all but the last token of its prompt's KV."""
    fork = hardware.Machine._fork

    def short(self: Any, running: Any, work: Any) -> Any:
        return fork(self, running, structs.replace(work, tokens=work.tokens - 1))

    return [(hardware.Machine, "_fork", short)]


def _one_seed() -> Replacements:
    """All choices are given the first one's token."""
    finish = Prefill._finish

    def alike(self: Prefill, now: float, job: Any, sampled: Any, layers: Any = ()) -> list[Effect]:
        return finish(self, now, job, sampled[:1] * len(sampled), layers)

    return [(Prefill, "_finish", alike)]


def _disk_stays_off() -> Replacements:
    """An SSD that was full or failed is never tried again."""

    def ignore(self: disk_tier.DiskTier, now: float) -> None:
        pass

    return [(disk_tier.DiskTier, "retry", ignore)]


def _share_ignored() -> Replacements:
    """Who is below its share takes from whoever has most."""
    victims = Shares.victims

    def of_anybody(self: Shares, owner: int, *, free: bool) -> Lru | None:
        order = victims(self, owner, free=free)
        return order if order is None or self.held[owner] >= self.most[owner] > 0 else max(self._orders, key=len)

    return [(Shares, "victims", of_anybody), (CacheNode, "check", silent)]


def _copies_are_nobodys() -> Replacements:
    """Whose the blocks are that another host fetches is not told."""

    def untold(self: CacheNode, *_: object) -> tuple[str, ...]:
        return ()

    return [(CacheNode, "_owners", untold)]


def _never_woken() -> Replacements:
    """No wait for coming blocks ends: conductors say nothing, and no timer does."""

    def unsaid(self: Coming, waiter: Any, sources: tuple[str, ...]) -> None:
        self._drop(waiter)

    def endless(self: Waiting, job: Any) -> SetTimer:
        return structs.replace(begin(self, job), delay_s=1e6)

    begin = Waiting.begin
    return [(Coming, "_release", unsaid), (Waiting, "begin", endless), (Waiting, "found", lambda self: [])]


def _coming_believed() -> Replacements:
    """A chunk's blocks count as computed when it begins."""
    compute = Prefill._compute

    def early(self: Prefill, now: float, job: Any) -> list[Effect]:
        effects = compute(self, now, job)
        if job.state is JobState.COMPUTING and job.group is None:
            blocks = job.chunk_stop // self._layout.block_tokens - job.chunk_first_block
            written = job.checksums
            job.checksums = [*written, *[1] * blocks]
            effects += self._keep_chunk(now, job)
            job.checksums = written
        return effects

    return [(Prefill, "_compute", early), (Prefill, "_keep_chunk", _once(Prefill._keep_chunk)), (Prefill, "check", silent)]


def _once(keep: Any) -> Any:
    """Keep a chunk's blocks, unless they are kept."""

    def unless_kept(self: Prefill, now: float, job: Any) -> list[Effect]:
        first, base = job.chunk_first_block, len(job.prefix)
        slots = job.new_slots[first - base : job.chunk_stop // self._layout.block_tokens - base]
        writing = self.slots.being_written(slots) == slots
        effects: list[Effect] = keep(self, now, job) if writing else []
        return effects

    return unless_kept


def _leader_stays() -> Replacements:
    """What an attempt would have computed goes on coming when the attempt has ended."""
    return [(Coming, "remove", lambda self, now, number, lost=False: None), (Coming, "check", lambda self, bookings: None)]


def _held_unread() -> Replacements:
    """A decode whose pool got fewer blocks than it was to have takes the others as read, and nobody hands them off."""

    def trusting(self: Decode, now: float, request: Any, segment: Any, sources: Any) -> list[Effect]:
        request.segment = None
        layers = self._layout.layers
        request.want_held(segment, sources, layers, self._layout.block_tokens)
        for block in range(segment.first + len(sources), segment.first + segment.blocks):
            request.parts[block * layers : (block + 1) * layers] = [0] * layers
        return self._lease_held(now, request) + self._pull(now, request) + self._verify(now, request)

    return [(Decode, "_take_segment", trusting)]


def _takes_what_is_gone(late: Callable[[Any, Any], bool]) -> Replacements:
    """Who reads `late` takes what lies there for good, although the copy that was leased has gone."""

    def trusting(machine: Any, ref: Any, segment: Any) -> bool:
        there = segment is not None and hardware.readable(machine, segment, attached=True)
        return there and not hardware.generation_stands(segment, ref)

    def first_half(self: Any) -> bytes | None:
        half = first(self)
        segment = self._machine.find(self._ref.node, self._ref.incarnation)
        if half is None and late(self._machine, self._running) and trusting(self._machine, self._ref, segment):
            part = segment.part(self._ref.slot, self._layer)
            self._segment, self._half = segment, bytes(part[: len(part) // 2])
            return bytes(self._half)
        return half

    def second_half(self: Any) -> bytes | None:
        part = second(self)
        believes = part is None and self._half and late(self._machine, self._running)
        if believes and trusting(self._machine, self._ref, self._segment):
            part = self._half + bytes(self._segment.part(self._ref.slot, self._layer)[len(self._half) :])
            self._machine.world.watcher.verified(self._segment, self._ref, self._layer, part)
        return part

    first, second = hardware._Read.first_half, hardware._Read.second_half
    return [(hardware._Read, "first_half", first_half), (hardware._Read, "second_half", second_half)]


def _woken_believes() -> Replacements:
    """A host that was suspended believes in the leases that it had."""
    return _takes_what_is_gone(lambda machine, running: machine.woke_at >= 0)


def _stopped_believes() -> Replacements:
    """A reader that was stopped amid a read believes in the lease that it had."""
    return _takes_what_is_gone(lambda machine, running: machine.stopped_at >= running.started_at)


STORES = "store_"
"""What the names of the bugs in stores begin with."""
K = FaultKind
PLANTED: dict[str, Planted] = {
    "evict_leased": Planted("evict ignoring leases", ("I2", "I1"), (K.SLOW, K.SLOW), _evict_leased),
    "no_generation_check": Planted("copies are not verified", ("I1", "I3"), (K.BIT_FLIP, K.COPY_TEAR), _no_generation_check),
    "ttl_from_receipt": Planted("ttl counted from receipt", ("I2",), (K.STOP_ASKER,), _ttl_from_receipt),
    "late_writer": Planted("quarantine ignored", ("I2",), (K.STOP_WRITER,), _late_writer),
    "disk_unverified": Planted("disk reads are not verified", ("I1",), (K.BIT_FLIP, K.CRASH, K.DRAIN), _disk_unverified),
    "disk_unpinned": Planted("disk slots written while read", ("I2",), (K.DISK_SLOW, K.DISK_SLOW, K.CRASH), _disk_unpinned),
    "commit_unverified": Planted("commit without checksum", ("I1",), (K.COPY_TEAR, K.COPY_FAIL), _commit_unverified),
    "duplicate_token": Planted("duplicate token", ("I3",), (K.DUPLICATE,), _duplicate_token),
    "stale_attempt": Planted(
        "stale attempt accepted", ("I3",), (K.DELAY, K.DELAY, K.DELAY, K.COPY_TEAR, K.COPY_TEAR, K.COPY_TEAR), _stale_attempt
    ),
    "answer_forgotten": Planted("an answer resumed as prompt", ("I3",), (K.CRASH, K.CRASH), _answer_forgotten),
    "constraint_restarts": Planted("a grammar begun anew", ("I3",), (K.CRASH, K.CRASH), _constraint_restarts),
    "resume_repeats": Planted("a resume repeats a token", ("I3",), (K.CRASH, K.COPY_FAIL), _resume_repeats),
    "passed_on_short": Planted("a handover lacks the first token", ("I3",), (), _passed_on_short),
    "shelved_wrong": Planted("vLLMs load other KV than they saved", ("I3",), (), _shelved_wrong),
    "index_lies": Planted("index keeps what is gone", ("I5",), (), _index_lies),
    "announce_early": Planted("announced before it is held", ("I5",), (), _announce_early),
    "contents_stale": Planted("events tell what a slot held before", ("I5",), (), _contents_stale),
    "contents_lost": Planted("events of fetched blocks tell nothing", ("I5",), (), _contents_lost),
    "copied_short": Planted("a copy of a prompt's KV lacks its end", ("I3",), (), _copied_short),
    "one_seed": Planted("choices share a seed", ("I3",), (), _one_seed),
    "held_unread": Planted("held blocks that the decode never got", ("I3",), (), _held_unread),
    "disk_stays_off": Planted("a disk that was full stays off", ("I4",), (K.DISK_FULL, K.DISK_FAIL), _disk_stays_off),
    "share_ignored": Planted("room is made at whoever's cost", ("I7",), (), _share_ignored),
    "copies_are_nobodys": Planted("fetched blocks count for nobody", ("I7",), (), _copies_are_nobodys),
    "lease_leak": Planted("lease leak", ("I2", "I4"), (), _lease_leak),
    "closed_under_copy": Planted("sequence closed under a copy", ("I2",), (), _closed_under_copy),
    "lost_request": Planted("a failed attempt is forgotten", ("I4",), (K.CRASH,), _lost_request),
    "old_life_heard": Planted("an old life is heard", ("I6",), (K.CRASH, K.GARBAGE), _old_life_heard),
    "number_decides": Planted("the larger incarnation is right", ("I4", "I6"), (K.CLOCK, K.IMPOSTOR), _number_decides),
    "keys_not_compared": Planted("the sender is not compared with the key", ("I6",), (K.IMPOSTOR,), _keys_not_compared),
    "deaf_time_counts": Planted("silence is judged before it is read", ("I8",), (), _deaf_time_counts),
    "lateness_untold": Planted("a peer's own lateness is not told", ("I8",), (), _lateness_untold),
    "undrained": Planted("a change of role without a drain", ("I4", "I2"), (K.ROLE, K.ROLE), _undrained),
    "restless": Planted("who rests takes new requests", ("I4",), (), _restless),
    "restless_conductor": Planted("a conductor that rests is asked on", ("I4",), (K.REST,), _restless_conductor),
    "stale_hidden": Planted("hidden states overwritten unread", ("I3",), (K.SLOW, K.SLOW, K.SLOW), _stale_hidden),
    "never_woken": Planted("a waiter that nothing wakes", ("I4",), (K.CRASH,), _never_woken),
    "coming_believed": Planted("blocks count before they stand", ("I1", "I2", "I3"), (), _coming_believed),
    "leader_stays": Planted("a cancelled prompt's blocks stay in the index", ("I5",), (K.CRASH, K.CRASH), _leader_stays),
    "woken_believes": Planted("leases outlast a suspended host", ("I1", "I3"), (K.SUSPEND, K.SUSPEND), _woken_believes),
    "stopped_believes": Planted("leases outlast a stop", ("I1", "I3"), (K.STOP_READER, K.STOP_READER), _stopped_believes),
    "put_never_ends": Planted("a put never ends", ("I4",), (), _put_never_ends),
    **{f"{STORES}{name}": Planted(*bug) for name, bug in planted_stores.PLANTED.items()},
}
