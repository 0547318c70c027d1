"""What was chosen for a request, before it is booked."""

from msgspec import Struct

from mooncake_zmq.conductor.decodes import DecodeNode
from mooncake_zmq.conductor.prefills import PrefillNode


class PrefillChoice(Struct, frozen=True, gc=False):
    """`work_s`: fetch, load and compute. `sources`: the bits of the cache-nodes to fetch from
    what the host misses of `reuse_blocks`, none to fetch nothing; `fetch_s`: of `work_s`, what moves between hosts."""

    node: PrefillNode
    reuse_blocks: int
    sources: tuple[int, ...]
    queue_s: float
    work_s: float
    fetch_s: float
    stages: tuple[PrefillNode, ...] = ()
    """Those that compute the later layers, see `pipeline`."""
    share_s: float = 0.0
    """What each of them and `node` compute, if there are any."""

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token."""
        return self.queue_s + self.work_s


class DecodeChoice(Struct, frozen=True, gc=False):
    """One decode when the request would join it: its `batch` then without the request, and its predicted TBT with it, see
    `core.gaps`. `alone_s`: the same if nobody else were there."""

    node: DecodeNode
    tbt_s: float
    batch: float
    alone_s: float


class Decision(Struct, frozen=True, gc=False):
    """Where a request goes. `ttft_s`: predicted time to its first token; `expected`: tokens it is taken to produce;
    `need_tokens`: KV that the decode must have for it."""

    prefill: PrefillChoice
    decode: DecodeChoice
    ttft_s: float
    expected: float
    need_tokens: int
