"""The tokens that a clairvoyant with endless memory would compute of a trace, as a reference of a run. PURE.

It computes a complete block once, for the first request that has it, and of every prompt at least the last token, from which
the answer starts. A prompt that no prefill received, such as a refused one, adds no blocks.
"""

from collections.abc import Sequence

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.laboratory.keys import block_keys
from mooncake_zmq.laboratory.study import Arrival, RequestRecord


def foresee(arrivals: Sequence[Arrival], records: Sequence[RequestRecord], block_tokens: int) -> None:
    """Write the clairvoyant's hits into each record. `records` are of the first of `arrivals`, in the same order."""
    computed: set[Key] = set()
    for arrival, record in zip(arrivals, records, strict=False):
        if not record.prefill:
            continue
        keys = block_keys(arrival.hash_ids, arrival.input_tokens, block_tokens)
        known = next((at for at, key in enumerate(keys) if key not in computed), len(keys))
        record.possible = min(known * block_tokens, arrival.input_tokens - 1)
        computed.update(keys[known:])


def least_ttft_s(record: RequestRecord, costs: Costs) -> float:
    """Return the time to the first token on an idle machine whose host's pool has all blocks that the clairvoyant has."""
    return max(costs.load_s(record.possible), costs.compute_s(record.input_tokens, record.possible))


def computed_tokens(record: RequestRecord) -> int:
    """Return the tokens that were computed for a prefilled request. An attempt may find blocks that an earlier one of the same
    request had computed, so for a request with several attempts the hits are limited to the clairvoyant's."""
    found = record.hit_own + record.hit_dram + record.hit_disk + record.hit_remote
    return record.input_tokens - (min(found, record.possible) if record.attempts > 1 else found)
