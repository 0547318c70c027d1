"""Bugs planted on purpose, to see each checker fail: a checker never seen failing proves nothing. Simulation only.

Where an actor's own `check` would notice first, it is silenced, since the checker outside is on trial.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from msgspec import structs

from mooncake_zmq.conductor.coming import Coming
from mooncake_zmq.core import session
from mooncake_zmq.core.actor import Drained, Effect, Send, SetTimer, Start
from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.messages import (
    MAX_OVERTAKE,
    PROTOCOL_VERSION,
    AnswerRead,
    FirstToken,
    PrefillLoad,
    StartPrefill,
    TokensDecoded,
)
from mooncake_zmq.core.session import Session
from mooncake_zmq.core.work import Generate
from mooncake_zmq.gateway.requests.answer import Answer
from mooncake_zmq.gateway.requests.client_events import TokenOut
from mooncake_zmq.gateway.requests.readiness import Readiness
from mooncake_zmq.gateway.requests.readings import Readings
from mooncake_zmq.gateway.requests.relocations import Relocations
from mooncake_zmq.gateway.requests.requests import Requests
from mooncake_zmq.prefill.waiting import Waiting
from mooncake_zmq.prefill.workload import Workload
from mooncake_zmq.simulation import engine, planted_inference, planted_stores
from mooncake_zmq.simulation import planted_images as images
from mooncake_zmq.simulation import planted_models as models
from mooncake_zmq.simulation import planted_pools as pools
from mooncake_zmq.simulation.faults import FaultKind
from mooncake_zmq.simulation.planted_stores import Replacements
from mooncake_zmq.vllm_node import vllm_node
from mooncake_zmq.vllm_node.job import Job
from mooncake_zmq.vllm_node.vllm_node import VllmNode


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug: its replacements, the invariants whose checkers notice, and the faults that bring it out."""

    what: str
    invariants: tuple[str, ...]
    stress: tuple[FaultKind, ...]
    replacements: Callable[[], Replacements]
    only: str = ""
    """The part of a seed that shows it, see `SCOPES`."""


@contextmanager
def planting(name: str | None) -> Iterator[None]:
    """Run with the bug `name`, or with none."""
    with ExitStack() as stack:
        for owner, attribute, replacement in PLANTED[name].replacements() if name else ():
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


def _duplicate_token() -> Replacements:
    """The session lets duplicates through, and the gateway passes on whatever comes."""
    accept = Session._accept

    def accept_all(self: Session, now: float, peer: Any, sequence: int, body: bytes) -> Any:
        again = sequence < peer.expected
        return accept(self, now, peer, sequence, body) + (self._deliver(now, peer, body) if again else [])

    def append_any(self: Answer, index: int, token: int, logprob: Any, due: list[TokenOut]) -> None:
        self._append(token, logprob, due)

    return [(Session, "_accept", accept_all), (Answer, "_order", append_any)]


def _stale_attempt() -> Replacements:
    """The gateway takes tokens of any attempt, from any sender."""
    on_first_token, on_tokens = Requests._on_first_token, Requests._on_tokens

    def first_of_any(self: Requests, now: float, sender: str, message: FirstToken) -> list[Effect]:
        request = self._requests.get(message.request_id)
        if request is not None and request.attempt > message.attempt:
            logprobs = () if message.logprob is None else (message.logprob,)
            return self._take_run(now, request, message.index, (message.token,), logprobs)
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
    """A resumed request counts its tokens so far as a part of the prompt."""
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
    """An engine that resumes an answer begins its grammar anew."""
    return [(engine, "place_of", lambda sampling, past: int(sampling.constraint or b"0"))]


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


def _old_incarnation_received() -> Replacements:
    """A session accepts any incarnation or epoch of a peer."""
    refusal = Session._refusal

    def lenient(self: Session, now: float, peer: Any, envelope: Any) -> str | None:
        reason = refusal(self, now, peer, envelope)
        return None if reason in ("other_incarnation", "old_epoch", "former_incarnation") else reason

    return [(Session, "_refusal", lenient)]


def _number_decides() -> Replacements:
    """A session believes a larger incarnation at once, and a smaller one never."""

    def silence_s(self: Session, peer: Any, envelope: Any) -> float:
        return 0.0 if envelope.incarnation > peer.incarnation else math.inf

    return [(Session, "_silence_s", silence_s)]


def _deaf_time_counts() -> Replacements:
    """A session counts as silence the time in which this process could not read its peers' messages."""

    def counted_s(self: Session, now: float, since: Any, excused_s: float = 0.0) -> float:
        return float(now - since.at - excused_s)

    return [(Session, "_counted_s", counted_s)]


def _lateness_not_reported() -> Replacements:
    """Envelopes do not report their sender's lateness."""
    note = Session._note_lateness

    def none_reported(self: Session, now: float) -> float:
        late_s = note(self, now)
        self.recent_late_s = 0.0
        return late_s

    return [(Session, "_note_lateness", none_reported)]


def _newer_sent() -> Replacements:
    """Messages of this protocol are sent to peers of the former one too."""
    return [(session, "speaks", lambda protocol, message: True)]


def _beyond_limits() -> Replacements:
    """A prefill reports more than a message may say."""
    plain = Workload.report

    def report(self: Workload, *arguments: Any, **named: Any) -> PrefillLoad:
        return structs.replace(plain(self, *arguments, **named), overtake=2 * MAX_OVERTAKE)

    return [(Workload, "report", report)]


def _newer_assumed() -> Replacements:
    """The newest protocol is spoken before a peer has greeted."""
    return [(session, "_protocol", lambda peer, oldest: PROTOCOL_VERSION if peer.hello is None else peer.hello.protocol)]


def _keys_not_compared() -> Replacements:
    """A session accepts any sender's name under any key."""
    return [(session, "_is_by", lambda sender, key_of: True)]


def _undrained() -> Replacements:
    """A node that is asked to change its role does so at once, whatever it still has."""

    def at_once(self: Drain, *, idle: bool) -> list[Effect]:
        return [Drained(self._become)] if self._become else []

    return [(Drain, "drained", at_once)]


def _drain_waits() -> Replacements:
    """A draining node waits for the ends of its answers."""
    return [(Drain, "move", lambda self, attempts, **_: [])]


def _place_forgone() -> Replacements:
    """A gateway that asks for another place does not use it."""
    on_placed = Relocations.on_placed

    def stay(self: Relocations, now: float, sender: str, placed: Any) -> list[Effect] | None:
        effects = on_placed(self, now, sender, structs.replace(placed, decode=""))
        return effects if effects is not None else on_placed(self, now, sender, placed)

    return [(Relocations, "on_placed", stay)]


def _cordon_ends_drain() -> Replacements:
    """A node that drains for another role goes on to change when it is cordoned, and at once, whatever it still has."""
    drained = Drain.drained

    def set_cordon(self: Drain, cordoned: bool) -> None:
        self.cordoned = cordoned
        self.draining = self.leaves or cordoned

    def at_once(self: Drain, *, idle: bool) -> list[Effect]:
        return drained(self, idle=idle or (self.cordoned and bool(self._become)))

    return [(Drain, "drained", at_once), (Drain, "set_cordon", set_cordon)]


def _uncordoned() -> Replacements:
    """A cordoned node reports itself cordoned and takes new requests."""

    def set_cordon(self: Drain, cordoned: bool) -> None:
        self.cordoned = cordoned

    return [(Drain, "set_cordon", set_cordon)]


def _uncordoned_conductor() -> Replacements:
    """Gateways ask the first conductor, whether it is cordoned or not."""

    def is_cordoned(self: Readiness, conductor: str) -> bool:
        return False

    return [(Readiness, "_is_cordoned", is_cordoned)]


def _resume_repeats() -> Replacements:
    """A vLLM that resumes an answer is given all but its last token, and makes that once more."""
    handle = VllmNode.handle

    def forgetful(self: VllmNode, now: float, event: Any) -> list[Effect]:
        effects = handle(self, now, event)
        for place, effect in enumerate(effects):
            if isinstance(effect, Start) and isinstance(effect.work, Generate) and effect.work.count:
                effects[place] = structs.replace(effect, work=structs.replace(effect.work, tokens=effect.work.tokens[:-4]))
        return effects

    return [(VllmNode, "handle", forgetful)]


def _versions_from_zero() -> Replacements:
    """A vLLM's node reports the versions of the weights as if each attempt began the answer."""
    report = vllm_node._reported

    def misplaced(job: Job, versions: tuple[tuple[str, int], ...]) -> list[Effect]:
        return report(replace(job, request=structs.replace(job.request, first_index=0)), versions)

    return [(vllm_node, "_reported", misplaced)]


def _read_again() -> Replacements:
    """A gateway lets a vLLM read on from the state before the last one."""
    on_read = Readings._on_read

    def forgetful(self: Readings, now: float, answer: Any, message: AnswerRead) -> list[Effect]:
        return on_read(self, now, answer, structs.replace(message, state=answer.state))

    return [(Readings, "_on_read", forgetful)]


def _passed_on_short() -> Replacements:
    """A vLLM that prefilled hands the request over without the token that it made."""
    handle = VllmNode.handle

    def forgetful(self: VllmNode, now: float, event: Any) -> list[Effect]:
        effects = handle(self, now, event)
        for place, effect in enumerate(effects):
            if isinstance(effect, Send) and isinstance(effect.message, StartPrefill):
                rest = structs.replace(effect.message, tokens=effect.message.tokens[:-4])
                effects[place] = structs.replace(effect, message=rest)
        return effects

    return [(VllmNode, "handle", forgetful)]


def _never_woken() -> Replacements:
    """No wait for coming blocks ends: conductors send nothing, and no timer fires."""

    def unsaid(self: Coming, waiter: Any, sources: tuple[str, ...]) -> None:
        self._drop(waiter)

    def endless(self: Waiting, job: Any) -> SetTimer:
        return structs.replace(begin(self, job), delay_s=1e6)

    begin = Waiting.begin
    return [(Coming, "_release", unsaid), (Waiting, "begin", endless), (Waiting, "found", lambda self: [])]


def _leader_stays() -> Replacements:
    """Blocks that an ended attempt would have computed stay announced as coming."""
    return [(Coming, "remove", lambda self, now, number, lost=False: None), (Coming, "check", lambda self, bookings: None)]


STORES = "store_"
"""The prefix of the names of the bugs in stores."""
K = FaultKind
PLANTED: dict[str, Planted] = {
    "evict_leased": Planted("evict ignoring leases", ("I2", "I1"), (K.SLOW, K.SLOW), pools.evict_leased),
    "no_generation_check": Planted(
        "copies are not verified", ("I1", "I3"), (K.BIT_FLIP, K.COPY_TEAR), pools.no_generation_check
    ),
    "ttl_from_receipt": Planted("ttl counted from receipt", ("I2",), (K.STOP_ASKER,), pools.ttl_from_receipt),
    "late_writer": Planted("quarantine ignored", ("I2",), (K.STOP_WRITER,), pools.late_writer),
    "disk_unverified": Planted("disk reads are not verified", ("I1",), (K.BIT_FLIP, K.CRASH, K.DRAIN), pools.disk_unverified),
    "disk_unpinned": Planted(
        "disk slots written while read", ("I2",), (K.DISK_SLOW, K.DISK_SLOW, K.CRASH), pools.disk_unpinned
    ),
    "tail_early": Planted("a tail accepted before its generation stands", ("I1",), (), pools.tail_early),
    "tail_misplaced": Planted("a tail loaded in another order", ("I3", "I1"), (), planted_inference.tail_misplaced),
    "commit_unverified": Planted("commit without checksum", ("I1",), (K.COPY_TEAR, K.COPY_FAIL), pools.commit_unverified),
    "duplicate_token": Planted("duplicate token", ("I3",), (K.DUPLICATE,), _duplicate_token),
    "stale_attempt": Planted(
        "stale attempt accepted", ("I3",), (K.DELAY, K.DELAY, K.DELAY, K.COPY_TEAR, K.COPY_TEAR, K.COPY_TEAR), _stale_attempt
    ),
    "answer_forgotten": Planted("an answer resumed as prompt", ("I3",), (K.CRASH, K.CRASH), _answer_forgotten),
    "constraint_restarts": Planted("a grammar begun anew", ("I3",), (K.CRASH, K.CRASH), _constraint_restarts),
    "resume_repeats": Planted("a resume repeats a token", ("I3",), (K.CRASH, K.COPY_FAIL), _resume_repeats),
    "versions_from_zero": Planted("a resume claims earlier tokens", ("I3",), (K.CRASH, K.COPY_FAIL), _versions_from_zero),
    "read_again": Planted("an answer is read on from an older state", ("I3",), (), _read_again),
    "passed_on_short": Planted("a handover lacks the first token", ("I3",), (), _passed_on_short),
    "lost_request": Planted("a failed attempt is forgotten", ("I4",), (K.CRASH,), _lost_request),
    "old_incarnation_received": Planted(
        "a message of an old incarnation is received", ("I6",), (K.CRASH, K.GARBAGE), _old_incarnation_received
    ),
    "number_decides": Planted("the larger incarnation is right", ("I4", "I6"), (K.CLOCK, K.IMPOSTOR), _number_decides),
    "keys_not_compared": Planted("the sender is not compared with the key", ("I6",), (K.IMPOSTOR,), _keys_not_compared),
    "newer_sent": Planted("a message that the peer lacks", ("I6",), (K.DRAIN,) * 6, _newer_sent),
    "beyond_limits": Planted("a message that no peer can read", ("I6",), (), _beyond_limits),
    "newer_assumed": Planted("the newest protocol before a Hello", ("I4",), (), _newer_assumed),
    "deaf_time_counts": Planted("silence is judged before it is read", ("I8",), (), _deaf_time_counts),
    "lateness_unreported": Planted("a peer's own lateness is not reported", ("I8",), (), _lateness_not_reported),
    "undrained": Planted("a change of role without a drain", ("I4", "I2"), (K.ROLE, K.ROLE), _undrained),
    "drain_waits": Planted("a drain waits for answers", ("I4",), (), _drain_waits),
    "place_forgone": Planted("a gateway does not use another place", ("I4",), (), _place_forgone),
    "cordon_ends_drain": Planted("a cordon ends a drain", ("I4", "I2"), (K.TANGLE, K.TANGLE, K.ROLE), _cordon_ends_drain),
    "uncordoned": Planted("a cordoned node takes new requests", ("I4",), (), _uncordoned),
    "uncordoned_conductor": Planted("a cordoned conductor is still asked", ("I4",), (K.CORDON,), _uncordoned_conductor),
    "stale_hidden": Planted(
        "hidden states overwritten unread", ("I3",), (K.SLOW, K.SLOW, K.SLOW), planted_inference.stale_hidden
    ),
    "kept_unverified": Planted("a decode keeps what has not come", ("I1", "I3"), (K.CRASH,), planted_inference.kept_unverified),
    "kept_closed": Planted(
        "a decode frees what is being copied", ("I2",), (K.SLOW, K.SLOW, K.SLOW), planted_inference.kept_closed
    ),
    "blend_committed": Planted("blended blocks under exact keys", ("I1",), (), planted_inference.blend_committed),
    "blend_decoded": Planted("what follows blended KV under exact keys", ("I1",), (), planted_inference.blend_decoded),
    "blend_kept": Planted("blended blocks kept under exact keys", ("I1",), (), planted_inference.blend_kept),
    "blend_unreported": Planted("an approximate answer that does not say so", ("I3",), (), planted_inference.blend_unreported),
    "selected_kv_put": Planted("approximate KV put by a decode", ("I1",), (), planted_inference.selected_kv_put),
    "selected_unreported": Planted("a choice of tokens not said", ("I3",), (), planted_inference.selected_unreported),
    "evicted_kv_put": Planted("few of many blocks under exact keys", ("I1",), (), planted_inference.evicted_kv_put),
    "evicted_unreported": Planted("dropped KV not said", ("I3",), (), planted_inference.evicted_unreported),
    "exact_ignored": Planted("an approximate answer where it was refused", ("I3",), (), planted_inference.exact_ignored),
    "never_woken": Planted("a waiter that nothing wakes", ("I4",), (K.CRASH,), _never_woken),
    "coming_believed": Planted("blocks count before they stand", ("I1", "I2", "I3"), (), planted_inference.coming_believed),
    "leader_stays": Planted("a cancelled prompt's blocks stay in the index", ("I5",), (K.CRASH, K.CRASH), _leader_stays),
    "woken_believes": Planted("leases outlast a suspended host", ("I1", "I3"), (K.SUSPEND, K.SUSPEND), pools.woken_believes),
    "stopped_believes": Planted("leases outlast a stop", ("I1", "I3"), (K.STOP_READER, K.STOP_READER), pools.stopped_believes),
    "put_never_ends": Planted("a put never ends", ("I4",), (), pools.put_never_ends),
    "loan_twice": Planted("a loan is merged twice", ("I3",), (), planted_inference.loan_twice, "lending"),
    "late_taken": Planted(
        "a token without late KV is taken", ("I3",), (K.PAUSE, K.PAUSE), planted_inference.late_taken, "lending"
    ),
    "lent_freed": Planted("lent KV is freed while asked for", ("I2",), (), planted_inference.lent_freed, "lending"),
    "any_model": Planted("a gateway ignores which model a node is for", ("I3", "I9"), (), models.any_model, "models"),
    "resume_without_adapter": Planted(
        "a resume forgets the adapter", ("I3", "I9"), (K.CRASH, K.COPY_FAIL), partial(models.resume_bare, adapter=""), "models"
    ),
    "key_without_adapter": Planted("block keys without the adapter", ("I9",), (), models.key_without_adapter, "models"),
    "saved_wrong": Planted("other bytes than were saved", ("I3",), (), pools.saved_wrong, "models"),
    "key_without_image": Planted("block keys without images", ("I9", "I3"), (), images.key_without_image, "models"),
    "resume_without_images": Planted(
        "a resume forgets the images", ("I3", "I9"), (K.CRASH, K.COPY_FAIL), partial(models.resume_bare, images=()), "models"
    ),
    "vectors_of_another": Planted("texts embedded under another root", ("I3",), (), images.vectors_of_another, "models"),
    "key_without_model": Planted("block keys without the model", ("I9",), (), models.key_without_model, "models"),
    **{f"{STORES}{name}": Planted(*bug, "stores") for name, bug in planted_stores.PLANTED.items()},
}
