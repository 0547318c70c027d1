"""Admission of requests to a prefill's queue. PURE."""

from collections.abc import Mapping

from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.links import MissingLinks
from mooncake_zmq.core.messages import Hello, StartPrefill
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.prefill.job import Job, are_known, tokens_of
from mooncake_zmq.prefill.pipeline import Group, refusal
from mooncake_zmq.prefill.queue import JobQueue
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.waiting import Waiting

TENANT_PART = 2
"""Divisor of `max_queued` for the jobs of one tenant."""


class Admission:
    """Decide which requests one prefill accepts."""

    def __init__(
        self,
        *,
        settings: PrefillSettings,
        layout: BlockLayout,
        slab: Slab,
        peers: Mapping[str, Hello],
        queue: JobQueue[Job],
        waiting: Waiting,
        drain: Drain,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._peers = peers
        self._queue = queue
        self._waiting = waiting
        self._drain = drain
        self.links = MissingLinks()

    @property
    def room(self) -> int:
        """Return how many more requests the queue takes; below 0 while jobs whose wait ended exceed its limit."""
        return self._settings.max_queued - self._queue.waiting - len(self._waiting)

    def lack(self, tenant: str) -> str | None:
        """Return what is missing for now for a job of this tenant, or None. An attempt denied for this counts as one that found
        no room. A tenant gets half of the queue, so that another one finds room beside it."""
        if self._drain.draining:
            return "prefill is draining"
        if self.room <= 0:
            return "prefill queue is full"
        most = max(1, self._settings.max_queued // TENANT_PART)
        waiting = self._queue.waiting_of(tenant) + sum(job.tenant == tenant for job in self._waiting) if tenant else 0
        return f"{tenant} has {waiting} requests in the prefill queue" if waiting >= most else None

    def refusal(self, message: StartPrefill) -> str | None:
        """Return why this prefill can never take the request, or None. Such an attempt is repeated a few times at most."""
        length = len(tokens_of(message)) // 4
        if length == 0 or len(tokens_of(message)) % 4:
            return "no tokens"
        if not are_known(message, self._layout):
            return "tokens that the model does not have"
        if not self._layout.has_token(message.sampling.largest_token) or message.sampling.prompt_tokens > length:
            return "sampling does not match tokens"
        eviction = message.eviction
        if len(message.keys) != (0 if eviction is not None else length // self._layout.block_tokens):
            return "keys do not match tokens"
        if eviction is not None and (
            not eviction.fits(length) or message.stages or message.lenders or message.prompt_logprobs is not None
        ):
            return "a prompt that cannot be evicted so"
        handed = length if eviction is None else eviction.kept
        if self._layout.blocks_for(handed) > self._slab.slots.capacity:
            return "prompt is longer than the slab"
        chunk_tokens = self._settings.chunk_tokens
        if message.stages and (reason := refusal(message, self._slab.name, self._layout, chunk_tokens)) is not None:
            return reason
        if message.stages and Group(message, self._layout, chunk_tokens).room > self._slab.slots.capacity:
            return "prompt is longer than the slab"
        if message.stages and message.prompt_logprobs is not None:
            return "a pipeline returns no probabilities of a prompt"
        return None

    def missing(self, message: StartPrefill) -> str:
        """Return a node that the request needs and that is down or has another role by now; empty if there is none."""
        needed = ((message.decode, "decode"), *((name, "prefill") for name in message.stages))
        return next((name for name, role in needed if name not in self._peers or self._peers[name].role != role), "")
