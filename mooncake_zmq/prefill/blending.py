"""Prompts with KV of earlier prompts that is reused behind other tokens: which parts, and whether they are worth it. PURE.

The parts are blocks of prompts that were computed exactly here, found in the own slab by their own keys: nothing is computed or
stored for their sake. What is computed with them is approximate from the first part on, and gets no key anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import Hello, has_field
from mooncake_zmq.core.work import BlockLoad, ReusedPart
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.parts import Part, PartTable, Tokens
from mooncake_zmq.prefill.job import Blend, Job
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.waiting import Waiting

LEAST_SHARE = 0.25
"""The least share of the tokens from the first part on that parts must have: a blended prefill computes some layers of all."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of a prompt from `at` on whose blocks stand in `slots`, computed from position `computed_at` on."""

    at: int
    computed_at: int
    slots: Sequence[int]


class Blending:
    """Remember the prompts that one prefill computed, and find parts of them in others."""

    def __init__(
        self,
        *,
        settings: PrefillSettings,
        layout: BlockLayout,
        slab: Slab,
        peers: Mapping[str, Hello],
        waiting: Waiting,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._peers = peers
        self._waiting = waiting
        self._counts = counts
        self._table = PartTable(layout.block_tokens)

    def learn(self, job: Job) -> None:
        """Remember a prompt that is computed, as far as it is exact."""
        if self._settings.blend and self._settings.own_reuse:
            self._table.add(job.request.root, _tokens_of(job, 0), job.request.keys[: job.exact_blocks])

    def plan(self, job: Job, room: int) -> list[Effect]:
        """Reuse parts for a job whose exact prefix is known, if it may and they are worth it; `room`: slots that may be pinned.
        Those that wait for blocks which get no key now compute these themselves."""
        if not self._may(job):
            return []
        size, first = self._layout.block_tokens, len(job.prefix) * self._layout.block_tokens
        committed = self._slab.slots.committed
        found = self._table.find(job.request.root, _tokens_of(job, first), lambda key: committed(key) is not None)
        runs = self._runs(first, found)
        slots = [slot for run in runs for slot in run.slots]
        exact = runs[0].at // size if runs else 0
        if not runs or len(slots) > room or len(slots) * size < LEAST_SHARE * (job.length - exact * size):
            return []
        self._slab.slots.pin(slots)
        behind = self._layout.blocks_for(job.length)
        loads = [
            BlockLoad(block, ref, 0, self._layout.layers, size) for block, ref in enumerate(self._slab.refs(slots), behind)
        ]
        parts: list[ReusedPart] = []
        for run in runs:
            parts.append(ReusedPart(run.at, run.computed_at, behind, len(run.slots) * size))
            behind += len(run.slots)
        job.blend = Blend(exact, tuple(parts), tuple(loads), slots)
        job.estimate = None
        self._counts.add("jobs_blended")
        return self._waiting.end_vain(job.request.keys[exact:])

    def _may(self, job: Job) -> bool:
        """Return whether a job's KV may be approximate: not where blocks are met, nor where its decode or gateway cannot know
        of it."""
        request, most = job.request, self._settings.blend_most_tokens
        if not self._settings.blend or job.must_be_exact or job.meeting is not None:
            return False
        fields = (request.decode, "HandoffDone.exact_blocks"), (job.gateway, "FirstToken.parts")
        known = all(name in self._peers and has_field(self._peers[name].protocol, field) for name, field in fields)
        return known and job.length - len(job.prefix) * self._layout.block_tokens <= most

    def _runs(self, first: int, found: Sequence[Part]) -> list[_Run]:
        """Return the parts of the tokens from `first` on that are long enough."""
        size, runs = self._layout.block_tokens, list[_Run]()
        for part in found:
            count = part.stop - part.start
            if count >= self._settings.blend_least_tokens:
                keys = part.keys[part.skipped // size : (part.skipped + count) // size]
                slots = [slot for key in keys if (slot := self._slab.slots.committed(key)) is not None]
                runs.append(_Run(first + part.start, part.skipped, slots))
        return runs


def _tokens_of(job: Job, first: int) -> Tokens:
    """Return the tokens of a job from `first` on."""
    tokens: Tokens = np.frombuffer(job.tokens[first * 4 :], "<i4")
    return tokens
