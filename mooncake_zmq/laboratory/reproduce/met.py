"""The figure of Cake: TTFT of a prompt whose KV another host has, over six rates of the link, beside the paper's claims."""

from dataclasses import replace

from mooncake_zmq.laboratory.metrics import served
from mooncake_zmq.laboratory.profiles import sources
from mooncake_zmq.laboratory.reproduce.figure import HARDWARE, PAPER, Conclusion, Figure, Row, Setting
from mooncake_zmq.laboratory.runs import run_one
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival, NodeProfile, Setup

CACHED_TOKENS, OTHER_TOKENS = 8192, 16
RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Rates of the link, in those at which fetching takes as long as computing."""
BUSY_TOKENS = 131_072
EVEN_MOST, ANYWHERE_MOST = 0.62, 1.05
"""The largest share of the better way's TTFT: where both take equally long, and anywhere."""
CLAIM_COMPUTING, CLAIM_FETCHING = 68.1, 94.6
"""The paper's largest reductions of TTFT, in percent, against computing alone and against fetching alone."""


def cake(part: float = 1.0) -> Figure:
    """Return the TTFT of computing, fetching and both at once at each rate. `part`: of the prompt's length."""
    tokens = max(TRACE_BLOCK_TOKENS, int(CACHED_TOKENS * part) // TRACE_BLOCK_TOKENS * TRACE_BLOCK_TOKENS)
    took = {(node.name, rate): _ways(node, rate, tokens) for node in HARDWARE for rate in RATES}
    rows = [
        Row(f"rate {rate:g}: TTFT {way}", "s", seconds)
        for rate in RATES
        for way, seconds in zip(("computing", "fetching", "both"), took[PAPER.name, rate], strict=True)
    ]
    own = [took[PAPER.name, rate] for rate in RATES]
    rows.append(Row("largest reduction against computing", "%", 100 * max(1 - both / c for c, _, both in own), CLAIM_COMPUTING))
    rows.append(Row("largest reduction against fetching", "%", 100 * max(1 - both / f for _, f, both in own), CLAIM_FETCHING))
    share = {key: both / min(computing, fetching) for key, (computing, fetching, both) in took.items()}
    slower = tuple(f"rate {rate:g} on {name}" for (name, rate), each in share.items() if each > ANYWHERE_MOST)
    even = tuple(f"on {name}" for (name, rate), each in share.items() if rate == 1.0 and each > EVEN_MOST)
    return Figure(
        name="cake",
        title="Computing the head of a prompt while its tail is fetched",
        settings=[
            Setting(
                "prompt", f"{tokens:,} cached tokens, {OTHER_TOKENS} others", "assumed", "the length of many of its figures"
            ),
            Setting("prefills, decodes", "2, 1", "assumed", "one has the KV and is busy"),
            *(Setting(what, PAPER.name, whence, why) for what, whence, why in sources(PAPER)),
        ],
        rows=rows,
        conclusions=[
            Conclusion(f"no more than {ANYWHERE_MOST:g} of the better way at any rate", len(took), slower),
            Conclusion(f"no more than {EVEN_MOST:g} of it where both take equally long", len(HARDWARE), even),
        ],
        notes=[
            "Rate 1 is that at which fetching takes as long as computing. Fetching alone follows from the rate, as a conductor "
            "fetches nothing that is computed sooner; the other two ways are replayed.",
            "Both reductions are maxima over rates: against computing at the fastest link, against fetching at the slowest. "
            "How large they are is a matter of which rates are tried.",
        ],
        curves={
            way: [(rate, took[PAPER.name, rate][index]) for rate in RATES]
            for index, way in enumerate(("computing", "fetching", "both"))
        },
        axes=("rate of the link", "TTFT, s"),
    )


def _ways(node: NodeProfile, rate: float, tokens: int) -> tuple[float, float, float]:
    """Return the seconds of computing, of fetching and of both at once."""
    costs = node.costs
    kv_bytes = tokens * costs.kv_bytes_per_token
    bytes_per_s = rate * kv_bytes / costs.compute_s(tokens, 0)
    slow = replace(node, network_bytes_per_s=bytes_per_s, costs=replace(costs, transfer_bytes_per_s=bytes_per_s))
    computing, both = (_ttft_s(slow, tokens, policy) for policy in ("local", "coming"))
    whole = tokens + OTHER_TOKENS
    return computing, kv_bytes / bytes_per_s + max(costs.compute_s(whole, tokens), costs.load_s(tokens)), both


def _ttft_s(node: NodeProfile, tokens: int, policy: str) -> float:
    """Return the TTFT of a prompt that a prefill gets while the one that has its KV computes another prompt."""
    size = TRACE_BLOCK_TOKENS
    document = tuple(range(tokens // size))
    others = [1_000_000 + number for number in range((BUSY_TOKENS + BUSY_TOKENS // 8) // size)]
    short = len(others) // 9
    computing_s = node.costs.compute_s(BUSY_TOKENS, 0)
    arrivals = [
        Arrival(0.0, tokens + OTHER_TOKENS, 2, (*document, 900_001)),
        Arrival(10 * computing_s, short * size, 2, tuple(others[:short])),  # the other prefill's turn
        Arrival(10.01 * computing_s, BUSY_TOKENS, 2, tuple(others[short:])),
        Arrival(10.5 * computing_s, tokens + OTHER_TOKENS, 2, (*document, 900_002)),
    ]
    setup = Setup(
        prefill=2, decode=1, hardware=node, policy=policy, ttft_slo_s=1e6, tbt_slo_s=1e3, overrides={"prefill.meet": True}
    )
    last = served(run_one(setup, arrivals, lambda share: None)).requests[-1]
    assert last.ttft_s >= 0, last
    return last.ttft_s
