"""The choice of nodes for a request and its limits, before it is booked. PURE."""

import math
from typing import Final

from mooncake_zmq.conductor.chain import Found
from mooncake_zmq.conductor.decodes import DecodeNode
from mooncake_zmq.conductor.prefills import PrefillNode
from mooncake_zmq.core.messages import MAX_PRIORITY

NO_LIMIT: Final = math.inf


class Limits:
    """The limits of one request. `ttft_s`: when its first token is due after it was first asked for, of which it has waited
    `waited_s`; `tbt_s`: the longest gap between later tokens; inf means no limit. `may_refuse`: whether it may be refused for
    an SLO, its own or that of another request.

    Other requests may be refused or delayed to keep what this one was promised. That promise is never stricter than the
    deployment's own SLO, `others_ttft_s` and `others_tbt_s`, whatever the request asks for.
    """

    __slots__ = ("may_refuse", "others_tbt_s", "others_ttft_s", "tbt_s", "ttft_s", "waited_s")

    def __init__(
        self,
        *,
        may_refuse: bool,
        ttft_s: float,
        tbt_s: float,
        waited_s: float,
        others_ttft_s: float = NO_LIMIT,
        others_tbt_s: float = NO_LIMIT,
    ) -> None:
        self.may_refuse = may_refuse
        self.ttft_s = ttft_s
        self.tbt_s = tbt_s
        self.waited_s = waited_s
        self.others_ttft_s = others_ttft_s
        self.others_tbt_s = others_tbt_s

    @property
    def promised_tbt_s(self) -> float:
        """The gap that the decode compares its step with once the prefill is done; 0 for no check."""
        promised_s = max(self.tbt_s, self.others_tbt_s)
        return promised_s if promised_s < NO_LIMIT else 0.0

    def deadline(self, now: float) -> float:
        """Return the time until which the first token must come if other requests go ahead of this one; inf for no limit."""
        return now + max(self.ttft_s, self.others_ttft_s) - self.waited_s


class PrefillChoice:
    """The prefill chosen for a request. `work_s`: seconds to fetch, load and compute; `fetch_s`: the part of it that moves
    between hosts. `sources`: bits of the cache-nodes that provide what the host lacks of `reuse_blocks`, empty to fetch
    nothing; `stores`: names of those whose stores provide it to a vLLM."""

    __slots__ = (
        "coming",
        "coming_s",
        "fetch_s",
        "least_priority",
        "node",
        "priority",
        "queue_s",
        "reuse_blocks",
        "share_s",
        "sources",
        "stages",
        "stores",
        "whole",
        "work_s",
    )

    def __init__(
        self,
        node: PrefillNode,
        *,
        reuse_blocks: int,
        sources: tuple[int, ...],
        stores: tuple[str, ...] = (),
        queue_s: float,
        work_s: float,
        fetch_s: float,
    ) -> None:
        self.node = node
        self.whole = node.stays
        """Whether the node also decodes what it prefills."""
        self.reuse_blocks = reuse_blocks
        self.sources = sources
        self.stores = stores
        self.queue_s = queue_s
        self.work_s = work_s
        self.fetch_s = fetch_s
        self.stages: tuple[PrefillNode, ...] = ()
        """The prefills that compute the later layers, see `pipeline`."""
        self.share_s = 0.0
        """The seconds that each stage computes, `node` included, if there are stages."""
        self.coming: Found | None = None
        """The chains that compute the reused blocks up to `coming_blocks`; `node` waits for them for at most `coming_s`."""
        self.coming_s = 0.0
        self.priority = 0
        """The priority by which the prefill queues it: the request's own, or `least_priority` if that is later."""
        self.least_priority = -MAX_PRIORITY
        """The lowest priority at which it may go ahead of other jobs."""

    @property
    def ttft_s(self) -> float:
        """The predicted time to the first token."""
        return self.queue_s + self.work_s

    @property
    def coming_blocks(self) -> int:
        """The number of leading blocks up to which it waits for others to compute them; 0 if it waits for none."""
        return 0 if self.coming is None else self.coming.blocks


class DecodeChoice:
    """The decode chosen for a request: its expected `batch` without the request when that joins, and the predicted TBT with
    it, see `core.gaps`. `alone_s`: the TBT without other requests; `moving_s`: the seconds that the link of the prefill's host
    carries its KV; `tenant_s`: what the named tenant's requests there, with this one, add to a step, 0 if there are none.
    `lent`: the KV tokens of other decodes that hold what it has no room for."""

    __slots__ = ("alone_s", "batch", "lent", "moving_s", "node", "tbt_s", "tenant_s")

    def __init__(
        self,
        node: DecodeNode,
        *,
        tbt_s: float,
        batch: float,
        alone_s: float,
        moving_s: float = 0.0,
        tenant_s: float = 0.0,
    ) -> None:
        self.lent: dict[str, int] = {}
        self.tenant_s = tenant_s
        self.moving_s = moving_s
        self.node = node
        self.tbt_s = tbt_s
        self.batch = batch
        self.alone_s = alone_s


class Decision:
    """The nodes that a request goes to, with its number of `choices`. `ttft_s`: predicted time to its first token; `expected`:
    tokens that each choice is expected to produce; `need_tokens`: KV that the decode must have for all."""

    __slots__ = ("choices", "decode", "expected", "limits", "need_tokens", "prefill", "ttft_s")

    def __init__(
        self,
        prefill: PrefillChoice,
        decode: DecodeChoice,
        limits: Limits,
        *,
        ttft_s: float,
        expected: float,
        need_tokens: int,
        choices: int,
    ) -> None:
        self.prefill = prefill
        self.choices = choices
        self.decode = decode
        self.limits = limits
        self.ttft_s = ttft_s
        self.expected = expected
        self.need_tokens = need_tokens
