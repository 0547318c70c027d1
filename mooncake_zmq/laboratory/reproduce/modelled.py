"""The figures that need no replay: an LRU cache over the trace's ids, and the cost model itself."""

from collections.abc import Callable, Sequence

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.kv.block_hash import KEY_BYTES
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.laboratory.hit_ratio import hit_ratio, infinite_hit_ratio
from mooncake_zmq.laboratory.profiles import sources
from mooncake_zmq.laboratory.reproduce.figure import HARDWARE, PAPER, Conclusion, Figure, Row, Setting
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival

CAPACITIES = (1_000, 3_000_000 // TRACE_BLOCK_TOKENS, 10_000, 30_000, 50_000, 100_000)
"""Blocks of 512 tokens; the second is the paper's 3 M tokens."""
LENGTHS = (8, 16, 32, 64, 128)
"""Lengths in thousands, of 1,024 tokens."""
PREFILL_S = (1.00, 2.05, 4.48, 10.58, 27.52)
CACHED_S = (0.134, 0.227, 0.406, 0.882, 2.33)
CACHED_SHARE = 0.95
STEP_MS = (26.6, 26.9, 27.5, 28.6, 30.8)
ANSWER_TOKENS = 128
FIT_ERROR = 0.017


def fig9(arrivals: Sequence[Arrival]) -> Figure:
    """Return the hit ratio of an LRU cache by its capacity."""
    trace = [tuple(each.to_bytes(KEY_BYTES, "little") for each in arrival.hash_ids) for arrival in arrivals]
    most = infinite_hit_ratio(trace)
    points = [(float(capacity), hit_ratio(trace, Slots(capacity))) for capacity in CAPACITIES]
    rows = [Row(f"{capacity:,.0f} blocks", "hit ratio", ratio) for capacity, ratio in points]
    share = 100 * points[1][1] / most if most else 0.0
    rising = all(a[1] <= b[1] for a, b in zip(points, points[1:], strict=False)) and points[0][1] < points[-1][1]
    return Figure(
        name="fig9",
        title="FAST'25 Fig 9: hit ratio by the capacity of an LRU cache",
        settings=[
            Setting("block", "512 tokens", "measured", "the public trace's ids; the paper's are of 256"),
            Setting("cache", "one, shared by all", "assumed", "a node's own would hit less"),
        ],
        rows=[*rows, Row("never evicting", "hit ratio", most, 0.40), Row("3 M tokens, of the most", "%", share, 41.0)],
        conclusions=[
            Conclusion("more capacity hits more", 1, () if rising else ("on this trace",)),
            Conclusion("3 M tokens hit less than half of what is there", 1, () if 0 < share < 50 else ("on this trace",)),
        ],
        notes=["The paper's most is .40: it hashes finer than 512 tokens, so that a prompt's last tokens hit too."],
        curves={"LRU": points},
        axes=("blocks of 512 tokens", "hit ratio"),
    )


def fig14() -> Figure:
    """Return prefill times, without a prefix and with most of the prompt cached."""
    costs = PAPER.costs
    rows = []
    for length, paper_s in zip(LENGTHS, PREFILL_S, strict=True):
        rows.append(Row(f"{length}k tokens", "s", costs.compute_s(1024 * length, 0), paper_s))
    for length, paper_s in zip(LENGTHS, CACHED_S, strict=True):
        rows.append(Row(f"{length}k tokens, 95 % cached", "s", cached_s(costs, 1024 * length), paper_s))
    worst = max(abs(row.ours / row.paper - 1) for row in rows[: len(LENGTHS)] if row.paper)
    fitted = f"prefill without a prefix is within {100 * FIT_ERROR:.1f} % of the measured times"
    return Figure(
        name="fig14",
        title="FAST'25 Fig 14: prefill time by length, and with 95 % of the prompt cached",
        settings=_cost_settings(),
        rows=rows,
        conclusions=[
            Conclusion(fitted, 1, () if worst <= FIT_ERROR + 0.001 else (f"the worst is {100 * worst:.1f} %",)),
            _everywhere("a cached prefix makes prefill faster at every length", _cached_is_faster),
        ],
        notes=["With a cached prefix the model is 16 to 61 % below the measured times: the load is not free."],
        curves={
            "ours": [(float(length), row.ours) for length, row in zip(LENGTHS, rows, strict=False)],
            "ours, 95 % cached": [(float(n), row.ours) for n, row in zip(LENGTHS, rows[len(LENGTHS) :], strict=True)],
            "paper": [(float(length), paper_s) for length, paper_s in zip(LENGTHS, PREFILL_S, strict=True)],
            "paper, 95 % cached": [(float(length), paper_s) for length, paper_s in zip(LENGTHS, CACHED_S, strict=True)],
        },
        axes=("thousand tokens", "s"),
    )


def fig15() -> Figure:
    """Return the times that one request spends in prefill, in the transfer to the decode, and in 128 tokens of answer."""
    costs = PAPER.costs
    rows = []
    for length, full_s, most_s, paper_ms in zip(LENGTHS, PREFILL_S, CACHED_S, STEP_MS, strict=True):
        tokens = 1024 * length
        rows.append(Row(f"{length}k: prefill", "s", costs.compute_s(tokens, 0), full_s))
        rows.append(Row(f"{length}k: prefill, 95 % cached", "s", cached_s(costs, tokens), most_s))
        rows.append(Row(f"{length}k: transfer, if nothing hid it", "s", costs.transfer_s(tokens)))
        rows.append(Row(f"{length}k: a token of the answer", "ms", 1000 * costs.step_s(1, tokens), paper_ms))
    return Figure(
        name="fig15",
        title=f"FAST'25 Fig 15: where a request's time goes, {ANSWER_TOKENS} tokens of answer, batch 1",
        settings=_cost_settings(),
        rows=rows,
        conclusions=[
            _everywhere("transfer is shorter than prefill at every length, so that layers hide it", _transfer_is_hidden),
            _everywhere("from 64k tokens on prefill is longer than the answer's 128 tokens", _prefill_dominates, LENGTHS[3:]),
        ],
        notes=["Steps at 8k and 128k are what the model was fitted to; those between test it."],
    )


FITTED = {"fig14": fig14, "fig15": fig15}


def cached_s(costs: Costs, tokens: int) -> float:
    """Return the prefill time of a prompt most of which is in the host's pool: loading overlaps computing, so the longer
    counts."""
    prefix = int(CACHED_SHARE * tokens)
    return max(costs.compute_s(tokens, prefix), costs.load_s(prefix))


def _everywhere(text: str, holds: Callable[[Costs, int], bool], lengths: Sequence[int] = LENGTHS) -> Conclusion:
    """Judge a conclusion at every length on every hardware."""
    tried = [(hardware, length) for hardware in HARDWARE for length in lengths]
    breaks = tuple(f"{length}k tokens on {node.name}" for node, length in tried if not holds(node.costs, 1024 * length))
    return Conclusion(text, len(tried), breaks)


def _cached_is_faster(costs: Costs, tokens: int) -> bool:
    return cached_s(costs, tokens) < costs.compute_s(tokens, 0)


def _transfer_is_hidden(costs: Costs, tokens: int) -> bool:
    return costs.transfer_s(tokens) < costs.compute_s(tokens, 0)


def _prefill_dominates(costs: Costs, tokens: int) -> bool:
    return costs.compute_s(tokens, 0) > ANSWER_TOKENS * costs.step_s(1, tokens)


def _cost_settings() -> list[Setting]:
    return [Setting(what, PAPER.name, whence, why) for what, whence, why in sources(PAPER)]
