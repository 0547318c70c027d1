"""Predicts how much later than the first token a decode has the blocks that a prompt reuses, which is a wait between the first
two tokens. PURE.

A decode loads reused blocks from its own host's pool while the prefill runs. Blocks that this pool lacks come from the pool of
the prefill's host, after that has fetched them if it has to. What the prefill computes arrives layer by layer and is not
counted here.
"""

from typing import Final

from mooncake_zmq.conductor.choices import PrefillChoice
from mooncake_zmq.conductor.decodes import DecodeNode
from mooncake_zmq.conductor.plans import Group, Plan
from mooncake_zmq.conductor.prefix_index import lowest_bit
from mooncake_zmq.conductor.sources import Sources
from mooncake_zmq.conductor.transfers import Transfers
from mooncake_zmq.core.costs import Costs

HOLDERS: Final = 4
"""The most decodes that are evaluated first because their host's pool holds a run of the prompt, the longest run first."""


class Handover:
    """The handover of one request whose prefill is chosen and reuses some blocks."""

    def __init__(
        self, plan: Plan, prefill: PrefillChoice, sources: Sources, transfers: Transfers, costs: Costs, block_tokens: int
    ) -> None:
        home = prefill.node.home
        self.host = prefill.node.host
        self.reused = prefill.reuse_blocks
        self._sources = sources
        self._groups: list[Group] = plan.groups
        self._there = min(self.reused, self._run(prefill.node.homes)) if prefill.fetch_s else self.reused
        """The blocks that the prefill's host need not fetch."""
        self._fetch_s = prefill.fetch_s
        self._work_s = prefill.work_s
        self._load_s = costs.load_s(self.reused * block_tokens)
        self._block_s = transfers.rates(home).least_s if home >= 0 else transfers.model_s
        self._behind_s = max(0.0, transfers.out_at(home) - plan.now) if home >= 0 else 0.0
        self.latest_s = self.late_s(0)
        """The delay of a decode whose host holds none of the blocks, which is the largest."""

    def holders(self, by_host: dict[str, list[DecodeNode]]) -> tuple[list[DecodeNode], float]:
        """Return the decodes to evaluate first, and the least delay of all others."""
        home = by_host.get(self.host)
        if home is not None and not self.latest_s:
            return home, 0.0
        found = [] if home is None else home.copy()
        for group in self._groups:
            mask = group.mask
            while mask:  # mostly left early, so no list of all bits is made
                bit = lowest_bit(mask)
                mask &= mask - 1
                if (host := self._sources.host_of(bit)) != self.host:
                    found += by_host.get(host, ())
                    if len(found) > HOLDERS:
                        return found[:HOLDERS], self.late_s(group.blocks) if self.latest_s else 0.0
            if not self.latest_s:
                break  # where none is late, the nearest suffices
        return found, self.latest_s

    def held(self, node: DecodeNode) -> int:
        """Return how many of the reused blocks a decode has on its own host."""
        return self.reused if node.host == self.host else min(self.reused, self._run(self._sources.pools(node.host)))

    def late_s(self, held: int) -> float:
        """Return the seconds from the first token until a decode has all blocks, if its host's pool holds `held` of them."""
        lacking = self.reused - held
        if lacking <= 0:
            return 0.0
        moved_s = self._behind_s + lacking * self._block_s
        if self._fetch_s and self.reused > self._there:
            moved_s = max(moved_s, self._fetch_s + (self.reused - max(held, self._there)) * self._block_s)
        return max(0.0, max(moved_s, self._load_s) - self._work_s)

    def moving_s(self, node: DecodeNode) -> float:
        """Return the seconds for which the link of the prefill's host carries blocks to a decode."""
        return (self.reused - self.held(node)) * self._block_s

    def _run(self, homes: int) -> int:
        if homes:
            for group in self._groups:
                if group.mask & homes:
                    return group.blocks
        return 0
