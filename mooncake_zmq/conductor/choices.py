"""What was chosen for a request, within which limits, before it is booked. PURE."""

import math
from typing import Final

from mooncake_zmq.conductor.chain import Found
from mooncake_zmq.conductor.decodes import DecodeNode
from mooncake_zmq.conductor.prefills import PrefillNode
from mooncake_zmq.core.messages import MAX_PRIORITY

NO_LIMIT: Final = math.inf


class Limits:
    """What holds for one request: when its first token is due after it was first asked for, of which it has `waited_s`, and how
    far apart the later ones may be; inf: at any time. `may_refuse`: whether it may be refused for anybody's SLO.

    Others are refused, or wait, for what it was promised: that is never stricter than the deployment's own SLO, `others_ttft_s`
    and `others_tbt_s`, whatever it asks for itself."""

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
        """What the decode holds its step against when the prefill is done; 0: it does not."""
        promised_s = max(self.tbt_s, self.others_tbt_s)
        return promised_s if promised_s < NO_LIMIT else 0.0

    def deadline(self, now: float) -> float:
        """Until when others that come before it may not delay the first token; inf: at any time."""
        return now + max(self.ttft_s, self.others_ttft_s) - self.waited_s


class PrefillChoice:
    """`work_s`: fetch, load and compute. `sources`: the bits of the cache-nodes to fetch from
    what the host misses of `reuse_blocks`, none to fetch nothing; `stores`: names of those whose stores have it for a vLLM;
    `fetch_s`: of `work_s`, what moves between hosts."""

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
        """The node decodes as well what it prefills."""
        self.reuse_blocks = reuse_blocks
        self.sources = sources
        self.stores = stores
        self.queue_s = queue_s
        self.work_s = work_s
        self.fetch_s = fetch_s
        self.stages: tuple[PrefillNode, ...] = ()
        """Those that compute the later layers, see `pipeline`."""
        self.share_s = 0.0
        """What each of them and `node` compute, if there are any."""
        self.coming: Found | None = None
        """What makes the reused blocks up to `coming_blocks`, which `node` waits for, for `coming_s` at most."""
        self.coming_s = 0.0
        self.priority = 0
        """The priority by which the prefill queues it: the request's own, or `least_priority` if that is later."""
        self.least_priority = -MAX_PRIORITY
        """It goes ahead of others as one of this priority at the earliest."""

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token."""
        return self.queue_s + self.work_s

    @property
    def coming_blocks(self) -> int:
        """Leading blocks up to which something is waited for; 0: nothing is."""
        return 0 if self.coming is None else self.coming.blocks


class DecodeChoice:
    """One decode when the request would join it: its `batch` then without the request, and its predicted TBT with it, see
    `core.gaps`. `alone_s`: the same if nobody else were there; `moving_s`: what the link of the prefill's host has to carry."""

    __slots__ = ("alone_s", "batch", "moving_s", "node", "tbt_s")

    def __init__(self, node: DecodeNode, *, tbt_s: float, batch: float, alone_s: float, moving_s: float = 0.0) -> None:
        self.moving_s = moving_s
        self.node = node
        self.tbt_s = tbt_s
        self.batch = batch
        self.alone_s = alone_s


class Decision:
    """Where a request goes, with so many `choices`. `ttft_s`: predicted time to its first token; `expected`: tokens each is
    taken to produce; `need_tokens`: KV that the decode must have for all."""

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
