"""The handoff from a prefill to the decodes of its jobs: reservation, blocks, layers, and a proof of completeness. PURE."""

from collections.abc import Mapping, Sequence

from msgspec import structs

from mooncake_zmq.core.actor import CloseSequence, Effect, Send
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.chunking import chunk_stop
from mooncake_zmq.core.messages import (
    MAX_RESERVE_BYTES,
    DecodeDenied,
    DecodeReserved,
    FirstToken,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    Hello,
    LayersReady,
    ReserveDecode,
    Sampled,
    SlotRef,
)
from mooncake_zmq.core.reports import Reports
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClient
from mooncake_zmq.prefill.ends import Ends, handoff_failed
from mooncake_zmq.prefill.job import Job, JobEvent, JobState, choices_of
from mooncake_zmq.prefill.jobs import Jobs
from mooncake_zmq.prefill.offers import Offers
from mooncake_zmq.prefill.queue import JobQueue
from mooncake_zmq.prefill.reuse import Reuse
from mooncake_zmq.prefill.settings import PrefillSettings


class Handoff:
    """Carry out the handoffs of one prefill's jobs."""

    def __init__(
        self,
        *,
        host: str,
        settings: PrefillSettings,
        layout: BlockLayout,
        peers: Mapping[str, Hello],
        pool: PoolClient,
        jobs: Jobs,
        queue: JobQueue[Job],
        reuse: Reuse,
        offers: Offers,
        ends: Ends,
        reports: Reports,
        counts: Tally,
    ) -> None:
        self._host = host
        self._settings = settings
        self._layout = layout
        self._peers = peers
        self._pool = pool
        self._jobs = jobs
        self._queue = queue
        self._reuse = reuse
        self._offers = offers
        self._ends = ends
        self._reports = reports
        self._counts = counts

    # --- the reservation

    def reserve(self, now: float, job: Job) -> Send:
        """Ask the decode for KV. The engine need not wait for the answer of a decode that is sure to have the same reused
        blocks."""
        request, size = job.request, self._layout.block_tokens
        elsewhere = self._peers[request.decode].host != self._host
        may_hold = self._may_hold(job) if elsewhere else ()
        alone = not (request.prompt_logprobs is not None or job.group or request.siblings)
        if alone and not may_hold and self._is_one_chunk(job):
            job.held_blocks = 0  # for any answer: the engine need not wait for it
        full = job.length // size
        offered = elsewhere and request.eviction is None and len(job.past) + full * size * 4 <= MAX_RESERVE_BYTES
        reserve = ReserveDecode(
            request_id=request.request_id,
            attempt=request.attempt,
            gateway=job.gateway,
            tokens=job.length,
            reuse_keys=may_hold,
            last_key=request.keys[-1] if request.keys else request.root,
            tail=job.tokens[full * size * 4 :],
            first_index=request.first_index,
            sampling=request.sampling,
            stop=request.stop,
            deadline_s=max(0.0, job.arrived_at + request.deadline_s - now),
            booking=request.booking,
            tbt_slo_s=request.tbt_slo_s,
            past=job.past,
            tenant=request.tenant,
            siblings=tuple([each for each in request.siblings if each.request_id in job.choices]),
            sources=() if self._pool.node is None else (self._pool.node,),
            new_keys=request.keys[len(may_hold) :] if elsewhere else (),
            block_tokens=job.tokens[: full * size * 4] if offered else b"",
            lenders=request.lenders,
            approximate=not request.exact and request.eviction is None,
            kept_tokens=0 if request.eviction is None else request.eviction.kept,
        )
        return Send(request.decode, reserve)

    def _may_hold(self, job: Job) -> tuple[bytes, ...]:
        """Return the keys of the reused blocks that a decode with another pool may find on its own host. With the same pool it
        reads them where this prefill does.

        Its pool fetches from this host's pool alone, including what that fetches itself: each block crosses its source's link
        once.
        """
        request = job.request
        return () if job.computes_anew else request.keys[: max(request.reuse_blocks, len(job.prefix))]

    def _is_one_chunk(self, job: Job) -> bool:
        """Return whether one chunk computes everything but the own hits."""
        own = len(job.prefix) * self._layout.block_tokens
        return chunk_stop(own, job.length, self._settings.chunk_tokens) == job.length

    def on_reserved(self, now: float, sender: str, message: DecodeReserved) -> list[Effect]:
        """Take note that the decode made room, or that its pool did not get everything that it was to load."""
        job = self._jobs.handed_to(sender, message.request_id, message.attempt)
        if job is None:
            return [handoff_failed(sender, message.request_id, message.attempt, "unknown job")]
        if job.reserved:
            return self._on_fewer_held(job, message.held_blocks)
        if not job.is_begun:
            return []
        job.reserved, job.spare = True, message.keeps
        if job.held_blocks is None:
            job.held_blocks = message.held_blocks
        return []

    def _on_fewer_held(self, job: Job, held_blocks: int) -> list[Effect]:
        """Hand off the reused blocks that the decode's pool did not get, although it had undertaken to load them. They are
        held until the handoff ends. Computed blocks are announced in any case."""
        if job.held_blocks is None or held_blocks >= job.held_blocks:
            return []
        before, job.held_blocks = job.held_blocks, held_blocks
        if job.state in (JobState.PREPARING, JobState.GATHERING):
            return []
        effects: list[Effect] = []
        if lacking := job.prefix[held_blocks:before]:
            effects.append(self.blocks(job, held_blocks, lacking, ready=True))
        if job.done is not None:
            job.done = self._covering(job, job.done)
            effects.append(Send(job.request.decode, job.done))
        return effects

    def on_denied(self, now: float, sender: str, message: DecodeDenied) -> list[Effect]:
        """Handle a denial: the decode has no room, or its steps would be too long now that the prefill is done. After the
        first token was sent a denial counts as a failed handoff, and the request is placed again."""
        job = self._jobs.handed_to(sender, message.request_id, message.attempt)
        if job is None:
            return []
        refused = message.refused and job.state is not JobState.HANDING_OFF
        return self._ends.fail(
            now,
            job,
            f"{sender} denied: {message.reason}",
            full=message.full,
            avoid=sender,
            notify_decode=False,
            refused_for_s=message.retry_after_s if refused else None,
        )

    # --- blocks and layers

    def prefix(self, job: Job) -> list[Effect]:
        """Announce the reused blocks that the decode does not load itself."""
        assert job.held_blocks is not None
        first = min(job.held_blocks, len(job.prefix))
        return [self.blocks(job, first, job.prefix[first:], ready=True)] if first < len(job.prefix) else []

    def blocks(self, job: Job, first_block: int, sources: Sequence[SlotRef], *, ready: bool) -> Send:
        """Announce blocks of which all layers are `ready`, or will be reported one by one."""
        request = job.request
        message = HandoffBlocks(
            request_id=request.request_id,
            attempt=request.attempt,
            first_block=first_block,
            sources=tuple(sources),
            ready=ready,
        )
        return Send(request.decode, message)

    def layers(self, job: Job, stop_layer: int) -> list[Effect]:
        """Announce these layers of the current chunk to the decode, unless it knows of them."""
        if stop_layer <= job.chunk_reported_layers:
            return []
        job.chunk_reported_layers = stop_layer
        request, first_block = job.request, job.chunk_first_block
        ready = LayersReady(
            request_id=request.request_id, attempt=request.attempt, first_block=first_block, stop_layer=stop_layer
        )
        return [Send(request.decode, ready)]

    # --- the end of the computation

    def finish(self, now: float, job: Job, sampled: Sequence[Sampled], layers: Sequence[Effect] = ()) -> list[Effect]:
        """Send the tokens to the gateway and the proof of completeness to the decode, and offer own hits to the pool.
        `sampled`: for the request and each of its siblings. `layers`: sent to the decode first, since the client need not
        wait for them."""
        self._jobs.move(job, JobEvent.ALL_DONE)
        self._queue.leave(job)
        firsts = self._first_tokens(now, job, sampled)
        request = job.request
        done = HandoffDone(
            request_id=request.request_id,
            attempt=request.attempt,
            layers=self._layout.layers,
            blocks=0,
            checksum=0,
            token=firsts[0].token,
            index=request.first_index,
            siblings=tuple([(first.request_id, first.token) for first in firsts[1:] if first.request_id in job.choices]),
            wanted=request.request_id in job.choices,
            exact_blocks=job.blend.exact_blocks if job.blend is not None else None,
            **(job.group.offer(len(job.prefix)) if job.group else {}),
        )
        job.done = done = self._covering(job, done)
        effects: list[Effect] = [Send(job.gateway, first) for first in firsts if first.request_id in job.choices]
        effects += [*layers, Send(request.decode, done)]
        if job.sequence is not None:
            effects.append(CloseSequence(job.sequence))
            job.sequence = None
        return effects + self._offers.own_hits(now, job) + self._reports.hurry(now)

    def _first_tokens(self, now: float, job: Job, sampled: Sequence[Sampled]) -> list[FirstToken]:
        request, size = job.request, self._layout.block_tokens
        own = (len(job.own_slots) + job.found_blocks) * size
        local, remote = job.local_blocks * size, job.remote_blocks * size
        met = job.meeting.computed if job.meeting is not None else 0
        self._counts.add("meets", met > 0)
        self._counts.add("blocks_met", met)
        self._counts.add("prompt_tokens_cached[source=own]", own)
        self._counts.add("prompt_tokens_cached[source=local]", local)
        self._counts.add("prompt_tokens_cached[source=remote]", remote)
        parts = job.blend.tokens if job.blend is not None else 0
        self._counts.add("prompt_tokens_blended", parts)
        self._counts.add("prompt_tokens_recomputed", job.recomputed)
        self._counts.add("prompt_tokens_dropped", job.length - job.handed_tokens)
        return [
            FirstToken(
                request_id=choice.request_id,
                attempt=choice.attempt,
                index=request.first_index,
                token=token,
                own=own,
                local=local,
                remote=remote,
                queue_s=max(0.0, job.started_at - job.arrived_at),
                prefill_s=max(0.0, now - job.started_at),
                logprob=logprob,
                prepare_s=max(0.0, job.computing_at - job.started_at),
                load_s=max(0.0, job.load_s),
                met=met * size,
                parts=parts,
                recomputed=job.recomputed,
                dropped=job.length - job.handed_tokens,
            )
            for choice, (token, logprob) in zip(choices_of(request), sampled, strict=True)
        ]

    def _covering(self, job: Job, done: HandoffDone) -> HandoffDone:
        """Return the same proof for everything that the decode does not load itself."""
        assert job.held_blocks is not None
        handed = ([ref.checksum for ref in job.prefix] + job.checksums)[job.held_blocks :]
        return structs.replace(done, blocks=len(handed), checksum=block_checksum(handed))

    # --- the end of the handoff

    def on_received(self, now: float, sender: str, message: HandoffReceived) -> list[Effect]:
        """End a job whose decode has read and verified everything."""
        return self._on_over(now, sender, message.request_id, message.attempt)

    def on_failed(self, now: float, sender: str, message: HandoffFailed) -> list[Effect]:
        """Handle a handoff that the decode could not read or verify."""
        self._counts.add("handoffs_failed")
        job = self._jobs.handed_to(sender, message.request_id, message.attempt)
        if job is not None and (job.prefix or job.held_blocks):
            self._reuse.forgo(job)
        return self._on_over(now, sender, message.request_id, message.attempt)

    def _on_over(self, now: float, sender: str, request_id: str, attempt: int) -> list[Effect]:
        job = self._jobs.handed_to(sender, request_id, attempt)
        if job is None:
            return []
        if job.state is JobState.HANDING_OFF:
            return self._ends.end(now, job)
        return self._ends.fail(now, job, f"{sender} gave up the handoff", notify_decode=False)
