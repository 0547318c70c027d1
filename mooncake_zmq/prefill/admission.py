"""Admission of requests to a prefill's queue. PURE."""

from collections.abc import Mapping

from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import Hello, StartPrefill
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.prefill.job import Job, are_known, tokens_of
from mooncake_zmq.prefill.pipeline import Group, refusal
from mooncake_zmq.prefill.queue import JobQueue
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.waiting import Waiting


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
        drain: Leaving,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._peers = peers
        self._queue = queue
        self._waiting = waiting
        self._drain = drain

    @property
    def room(self) -> int:
        """Return how many more requests the queue takes; below 0 while jobs whose wait ended exceed its limit."""
        return self._settings.max_queued - self._queue.waiting - len(self._waiting)

    def lack(self) -> str | None:
        """Return what is missing for now, or None. An attempt denied for this counts as one that found no room."""
        if self._drain.draining:
            return "prefill is draining"
        return "prefill queue is full" if self.room <= 0 else None

    def refusal(self, message: StartPrefill) -> str | None:
        """Return why this prefill can never take the request, or None. Such an attempt is repeated a few times at most."""
        length = len(tokens_of(message)) // 4
        if length == 0 or len(tokens_of(message)) % 4:
            return "no tokens"
        if not are_known(message, self._layout):
            return "tokens that the model does not have"
        if not self._layout.has_token(message.sampling.largest_token) or message.sampling.prompt_tokens > length:
            return "sampling does not match tokens"
        if len(message.keys) != length // self._layout.block_tokens:
            return "keys do not match tokens"
        if self._layout.blocks_for(length) > self._slab.slots.capacity:
            return "prompt is longer than the slab"
        if message.stages and (reason := refusal(message, self._slab.name, self._layout)) is not None:
            return reason
        if message.stages and Group(message, self._layout, self._settings.chunk_tokens).room > self._slab.slots.capacity:
            return "prompt is longer than the slab"
        if message.stages and message.prompt_logprobs is not None:
            return "a pipeline tells no probabilities of a prompt"
        missing = self.missing(message)
        return f"{missing} is not reachable from {self._slab.name}" if missing else None

    def missing(self, message: StartPrefill) -> str:
        """Return a node that the request needs and that is down or has another role by now; empty if there is none."""
        needed = ((message.decode, "decode"), *((name, "prefill") for name in message.stages))
        return next((name for name, role in needed if name not in self._peers or self._peers[name].role != role), "")
