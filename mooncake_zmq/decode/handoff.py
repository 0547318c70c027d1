"""The handoff to a decode, from its prefill and from its host's pool: blocks are announced, copied and verified. PURE."""

from collections.abc import Sequence

from msgspec import structs

from mooncake_zmq.core.actor import Effect, Send, SetTimer, Start
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.messages import (
    BlocksLeased,
    DecodeDenied,
    DecodeReserved,
    FillLoan,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    LayersReady,
    ReportCorrupt,
    SlotRef,
)
from mooncake_zmq.core.work import BlockLoad, BlocksPulled, ForkSequence, PullBlocks, SequenceForked, WorkFailed
from mooncake_zmq.decode.ends import HELD, Ends
from mooncake_zmq.decode.flight import Flight
from mooncake_zmq.decode.forks import Forks
from mooncake_zmq.decode.kept import Kept, KeptSequence
from mooncake_zmq.decode.offers import Offers
from mooncake_zmq.decode.request import KEPT, MISSING, Group, Loan, Request, RequestEvent, RequestState, Segment
from mooncake_zmq.decode.requests import Requests
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.decode.steps import Steps
from mooncake_zmq.kv.checksum import block_checksum, block_checksums
from mooncake_zmq.kv.layout import BlockLayout, div_ceil
from mooncake_zmq.pool.node.client import PoolClient

BORDER = "border"
"""Kind of the timers that end a run of steps for a request whose KV is about to arrive."""
HELD_GRACE_S = 0.1
"""How long a request waits for its pool after everything is computed: its client sees that as a gap after the first token,
and the prefill has the missing blocks at hand."""
MOST_SEGMENTS, LEAST_SEGMENT = 8, 4
"""Blocks from the pool are leased one segment after the other, in at most so many segments of at least so many blocks: one
is loaded while the next is fetched."""
LOADING, CLOSING = RequestState.LOADING, RequestState.CLOSING


class Handoff:
    """Carry out the handoffs of one decode's requests, and their copies."""

    def __init__(
        self,
        *,
        settings: DecodeSettings,
        layout: BlockLayout,
        piece_parts: int,
        pool: PoolClient,
        requests: Requests,
        kept: Kept,
        flight: Flight,
        steps: Steps,
        forks: Forks,
        offers: Offers,
        ends: Ends,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._piece_parts = piece_parts
        self._pool = pool
        self._requests = requests
        self._kept = kept
        self._flight = flight
        self._steps = steps
        self._forks = forks
        self._offers = offers
        self._ends = ends
        self._ids = ids
        self._counts = counts
        self._pulls: dict[int, Request] = {}
        """Requests by the works that copy their blocks."""
        self._copies: dict[int, tuple[Request, KeptSequence, int]] = {}
        """By the works that copy kept KV: the request, the source, and how many blocks."""

    # --- from kept sequences and from the pool

    def begin(self, now: float, request: Request) -> list[Effect]:
        """Notify the prefill that there is room, copy the blocks that are kept here, and ask the pool for the others that it is
        expected to have. What other decodes hold a part of is all handed off."""
        if request.lent_tokens:
            return [self._reserved(request), *self._pull(now, request)]
        copied = self._copy_kept(now, request)
        pool = self._pool.node is not None
        request.held_blocks = len(request.request.reuse_keys) if pool else request.leased_blocks
        request.pooled_blocks = request.held_blocks if pool else 0
        return [self._reserved(request), *copied, *self._lease_held(now, request)]

    def _copy_kept(self, now: float, request: Request) -> list[Effect]:
        """Copy the leading blocks that an ended request left here. Other works of the sequence begin after that."""
        message = request.request
        source, blocks = self._kept.find(message.reuse_keys)
        if source is None:
            return []
        self._kept.read(source)
        request.leased_blocks = blocks
        request.pulling = True
        request.in_flight += 1
        work_id = self._ids.new()
        self._copies[work_id] = request, source, blocks
        copy = ForkSequence(source.sequence, (request.sequence,), blocks * self._layout.block_tokens)
        effects: list[Effect] = [Start(work_id, copy, self._settings.pull_deadline_s)]
        if self._pool.node is not None:  # it gets and keeps them as if they were loaded from there, for prompts elsewhere
            request.kept_lease, keys = self._ids.new(), message.reuse_keys[:blocks]
            effects += self._pool.lease(now, request.kept_lease, keys, message.sources, fetch=True)
        return effects

    def on_copied(self, now: float, work_id: int, result: SequenceForked | WorkFailed) -> list[Effect]:
        """Handle the end of a copy from a kept sequence."""
        request, source, blocks = self._copies.pop(work_id)
        effects = self._kept.release(source) + self._end_copy(request)
        if request.state is CLOSING:
            return effects + self._ends.try_end(request)
        if isinstance(result, WorkFailed):
            return effects + self._ends.fail(now, request, f"copy of kept KV failed: {result.reason}")
        if result.without_memory:
            return effects + self._ends.fail(now, request, "no memory for the sequence", full=True)
        request.parts[: blocks * self._layout.layers] = [KEPT] * (blocks * self._layout.layers)
        self._counts.add("handoff_blocks_kept", blocks)
        return effects + self._pull(now, request) + self._verify(now, request)

    def _lease_held(self, now: float, request: Request) -> list[Effect]:
        """Ask the pool for the next segment."""
        keys, message = request.request.reuse_keys, request.request
        size = max(LEAST_SEGMENT, div_ceil(len(keys), MOST_SEGMENTS))
        some = keys[request.leased_blocks : min(request.leased_blocks + size, request.held_blocks)]
        if not some:
            return []
        request.segment = Segment(self._ids.new(), request.leased_blocks, len(some))
        request.leased_blocks += len(some)
        return self._pool.lease(now, request.segment.lease_id, some, message.sources, fetch=True)

    def on_leased(self, now: float, _sender: str, message: BlocksLeased) -> list[Effect]:
        """Handle the pool's answer to the lease of a segment."""
        sources = self._pool.on_leased(message)
        if sources is None:
            return []
        for request in self._requests.live.values():
            if request.kept_lease == message.lease_id:
                request.pooled_blocks = min(request.pooled_blocks, len(sources))
                break
            segment = request.segment
            if segment is not None and segment.lease_id == message.lease_id:
                return self._take_segment(now, request, segment, sources[: segment.blocks])  # no more than requested
        return self._pool.release(message.lease_id)

    def _take_segment(self, now: float, request: Request, segment: Segment, sources: Sequence[SlotRef]) -> list[Effect]:
        """Load what the pool has of a segment. From the first block that it lacks on, blocks are handed off."""
        request.segment = None
        request.want_held(segment, sources, self._layout.layers, self._layout.block_tokens)
        if len(sources) == segment.blocks:
            return self._lease_held(now, request) + self._pull(now, request)
        held = segment.first + len(sources)
        self._counts.add("handoff_blocks_missed", request.held_blocks - held)
        request.hold_fewer(held)
        return [self._reserved(request), *self._pull(now, request), *self._verify(now, request)]

    def _reserved(self, request: Request) -> Effect:
        """Notify the prefill of what the pool has or will have. Where both hosts' pools get the prompt, every second one is to
        be kept here, so that not everything takes the room of two copies for as long as it is remembered."""
        message = request.request
        pool = self._pool.node
        offers = self._settings.store_prompts and not request.lent_tokens and bool(message.block_tokens)
        both = offers and pool is not None and pool not in message.sources
        keeps = both and message.booking % 2 == 1
        reserved = DecodeReserved(
            request_id=message.request_id, attempt=message.attempt, held_blocks=request.held_blocks, keeps=keeps
        )
        return Send(request.prefill, reserved)

    # --- from the prefill

    def on_blocks(self, now: float, sender: str, message: HandoffBlocks) -> list[Effect]:
        """Take note of blocks announced by the prefill, which can be copied now or layer by layer."""
        request = self._loading(sender, message.request_id, message.attempt)
        if request is None:
            return []
        stop = message.first_block + len(message.sources)
        if stop > self._layout.blocks_for(request.prompt_tokens):
            return self._ends.fail(now, request, "more blocks than the prompt has")
        first_layer, stop_layer = message.first_layer, message.stop_layer or self._layout.layers
        if not first_layer < stop_layer <= self._layout.layers:
            return self._ends.fail(now, request, "layers that the model does not have")
        if not message.ready:
            request.groups[message.first_block] = Group(stop, now)
        request.sources.update(enumerate(message.sources, message.first_block))
        if message.ready:
            request.want(range(message.first_block, stop), first_layer, stop_layer, self._layout.block_tokens)
        if request.wants_twice:
            return self._ends.fail(now, request, "blocks handed off twice")
        if stop == self._layout.blocks_for(request.prompt_tokens) and not request.promised:
            request.promised = True
            refused = self._refuse(now, request)
            if refused is not None:
                return refused
        return self._pull(now, request)

    def _refuse(self, now: float, request: Request) -> list[Effect] | None:
        """Refuse a request whose prefill is nearly done, if steps would be too long with it in the batch; return None if it
        may join. Neither a resumed request is refused, nor one that will not take a step here."""
        message = request.request
        if message.tbt_slo_s <= 0 or message.first_index or request.left <= 1:
            return None
        wait_s = self._steps.retry_after_s(now, request)
        if wait_s is None:
            return None
        self._counts.add("requests_refused")
        denied = DecodeDenied(
            request_id=message.request_id,
            attempt=message.attempt,
            reason="the step would be too long",
            full=True,
            refused=True,
            retry_after_s=wait_s,
        )
        return [Send(request.prefill, denied), *self._ends.close(now, request, prefill_fails=True)]

    def on_layers(self, now: float, sender: str, message: LayersReady) -> list[Effect]:
        """Take note that some layers of announced blocks can be copied."""
        request = self._loading(sender, message.request_id, message.attempt)
        group = None if request is None else request.groups.get(message.first_block)
        if request is None or group is None or not group.wanted_layers < message.stop_layer <= self._layout.layers:
            return []
        blocks = range(message.first_block, group.stop_block)
        request.want(blocks, group.wanted_layers, message.stop_layer, self._layout.block_tokens)
        group.wanted_layers = message.stop_layer
        if request.wants_twice:
            return self._ends.fail(now, request, "blocks handed off twice")
        return self._pull(now, request) + self._expect(now, request, group)

    def _expect(self, now: float, request: Request, group: Group) -> list[Effect]:
        """Predict when the last layers of the last chunk arrive, from the times of the others; a run of steps ends before
        that."""
        if group.stop_block < self._layout.blocks_for(request.prompt_tokens):
            return []
        layers_s = (now - group.announced_at) / group.wanted_layers
        request.due_at = now + layers_s * (self._layout.layers - group.wanted_layers)
        if self._settings.max_steps == 1:
            return []
        return [SetTimer((BORDER, request.sequence), max(0.0, request.due_at - now - self._flight.step_s))]

    def _pull(self, now: float, request: Request) -> list[Effect]:
        """Copy what is ready, one piece at a time, so that no last layers wait for the whole prompt of another request. Each
        request has one copy at a time: what becomes ready meanwhile goes into the next one."""
        if request.pulling or not request.wanted:
            return []
        reading_s = [self._pool.reading_time_s(now, lease_id) for lease_id in request.reading]
        deadline_s = min([self._settings.pull_deadline_s, *reading_s])
        if deadline_s <= 0:
            return self._ends.fail(now, request, "lease ended before the held blocks were loaded")
        piece = request.piece(self._piece_parts)
        loads = tuple(request.wanted[:piece])
        del request.wanted[:piece]
        request.pulling = True
        loan = request.loan_of(loads[0].block)
        if loan is not None:
            return [_fill(loan, loads)]
        request.in_flight += 1
        work_id = self._ids.new()
        self._pulls[work_id] = request
        if first := request.lent_blocks:
            loads = tuple([structs.replace(load, block=load.block - first) for load in loads])
        return [Start(work_id, PullBlocks(request.sequence, loads), deadline_s)]

    def on_pulled(self, now: float, work_id: int, result: BlocksPulled | WorkFailed) -> list[Effect]:
        """Handle the end of a copy: its blocks are verified one by one, and all together once everything arrived."""
        request = self._pulls.pop(work_id)
        effects = self._end_copy(request)
        if request.state is CLOSING:
            return effects + self._ends.try_end(request)
        if isinstance(result, WorkFailed):
            return effects + self._ends.fail(now, request, f"handoff copy failed: {result.reason}")
        return effects + self.take(now, request, result, request.lent_blocks)

    def take(self, now: float, request: Request, result: BlocksPulled, first: int) -> list[Effect]:
        """Take note of copied blocks, which are numbered from block `first` of the prompt on."""
        effects: list[Effect] = []
        if result.failed:
            self._counts.add("handoff_blocks_failed", len(result.failed))
            refs = [ref for block in result.corrupt if (ref := request.read_from(first + block)).checksum]
            self._counts.add("handoff_blocks_corrupt", len(refs))
            effects += self._pool.report_corrupt(refs)
            theirs = tuple(ref for ref in refs if ref.node != self._pool.node)
            if theirs:  # otherwise the prefill would reuse them in the next attempt, and fail again
                effects.append(Send(request.prefill, ReportCorrupt(slots=theirs)))
            return effects + self._ends.fail(
                now, request, f"a handed-off block {'did not verify' if result.corrupt else 'was not reached'}"
            )
        parts, layers = request.parts, self._layout.layers
        for block, layer, checksum in result.parts:
            parts[(first + block) * layers + layer] = checksum
        return effects + self._pull(now, request) + self._verify(now, request)

    def _end_copy(self, request: Request) -> list[Effect]:
        """End a request's copy, and the leases under which nothing more is to be read."""
        request.in_flight -= 1
        request.pulling = False
        if any([load.block < request.held_blocks for load in request.wanted]):
            return []
        leases, request.reading = request.reading, []
        return [effect for lease_id in leases for effect in self._pool.release(lease_id)]

    def on_done(self, now: float, sender: str, message: HandoffDone) -> list[Effect]:
        """Take the prefill's checksum of everything that it computed."""
        request = self._loading(sender, message.request_id, message.attempt)
        if request is None or request.done is not None and message.blocks <= request.done.blocks:
            return []
        if not self._layout.has_token(message.token):
            return self._ends.fail(now, request, "a token that the model does not have")
        request.done = message
        if message.exact_blocks is not None:
            for each in (request, *request.siblings):
                each.keep_exact(message.exact_blocks)
        effects: list[Effect] = [SetTimer((HELD, message.request_id, message.attempt), HELD_GRACE_S)] if request.segment else []
        effects += self._verify(now, request)
        return effects + self._flight.interrupt() if request.is_arriving(self._piece_parts) else effects

    def on_held_late(self, now: float, request_id: str, attempt: int) -> list[Effect]:
        """Stop waiting for blocks from the pool once the grace period after the computation is over; the prefill has them."""
        request = self._requests.attempt(request_id, attempt)
        return [] if request is None else self.forgo_segment(now, request)

    def forgo_segment(self, now: float, request: Request) -> list[Effect]:
        """Stop waiting for the blocks of a segment that the pool has not confirmed."""
        segment = request.segment
        if segment is None:
            return []
        return self._pool.release(segment.lease_id) + self._take_segment(now, request, segment, ())

    def _verify(self, now: float, request: Request) -> list[Effect]:
        """Accept the handoff once every layer of every block is here and folds to the announced checksum."""
        done, layers = request.done, self._layout.layers
        if done is None or request.pulling or request.wanted or request.segment or request.state is not LOADING:
            return []
        handed = self._layout.blocks_for(request.prompt_tokens) - request.held_blocks
        if done.layers == layers and done.blocks < handed:
            return []  # the message that the pool had fewer blocks is still on its way to the prefill
        if done.layers != layers or done.blocks != handed:
            return self._ends.fail(now, request, "handoff is incomplete")
        parts = request.parts
        if MISSING in parts:
            return self._ends.fail(now, request, "handoff is incomplete")
        if block_checksum(block_checksums(parts[request.held_blocks * layers :], layers)) != done.checksum:
            self._counts.add("handoffs_corrupt")
            return self._ends.fail(now, request, "handoff checksum differs")
        self._requests.move(request, RequestEvent.VERIFIED)
        request.verified_at = now
        request.parts.clear()
        request.sources.clear()
        request.passed_over.clear()
        self._counts.add("handoff_blocks_held", request.held_blocks)
        message = request.request
        received = HandoffReceived(request_id=message.request_id, attempt=message.attempt)
        effects: list[Effect] = [Send(request.prefill, received), *self._offers.prompt(now, request, done)]
        effects += self._forks.begin(now, request, done)
        wanted = done.wanted and not request.unwanted
        return effects + (self._steps.join(now, request, done.token) if wanted else self._ends.close(now, request))

    def on_failed(self, now: float, sender: str, message: HandoffFailed) -> list[Effect]:
        """End a request whose prefill gave up; the prefill itself notifies the gateway."""
        request = self._requests.live.get(message.request_id)
        current = request is not None and (request.request.attempt, request.prefill) == (message.attempt, sender)
        if request is None or not current or request.forked or request.state is not LOADING:
            return []
        return self._ends.close(now, request, prefill_fails=True)

    def _loading(self, prefill: str, request_id: str, attempt: int) -> Request | None:
        request = self._requests.live.get(request_id)
        if request is None or request.request.attempt != attempt or request.prefill != prefill:
            self._counts.add("stale_handoff_messages")
            return None
        return request if request.state is LOADING and not request.forked else None

    def is_copying(self, work_id: int) -> bool:
        """Return whether this work copies from a kept sequence."""
        return work_id in self._copies

    def is_pulling(self, work_id: int) -> bool:
        """Return whether this work copies blocks here."""
        return work_id in self._pulls


def _fill(loan: Loan, loads: Sequence[BlockLoad]) -> Effect:
    """Let a lender copy a piece."""
    first = loan.blocks.start
    loan.asked = frozenset([load.block - first for load in loads])
    named = tuple([(load.block - first, load.source, load.first_layer, load.stop_layer) for load in loads])
    return Send(loan.lender, FillLoan(loan=loan.number, loads=named))
