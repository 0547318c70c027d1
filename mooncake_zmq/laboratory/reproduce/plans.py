"""The figures that are replayed: their arms, the papers' figures and conclusions, and the assumptions. No setting is fitted to
a figure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from mooncake_zmq.laboratory.metrics import share_within, summarize
from mooncake_zmq.laboratory.reproduce.figure import PAPER, Arms, Assumption, Holds, Plan, Setting
from mooncake_zmq.laboratory.runs import COUPLED
from mooncake_zmq.laboratory.study import RunResult, Setup

BASE = Setup(prefill=8, decode=8, hardware=PAPER, ttft_slo_s=30.0, tbt_slo_s=0.1)
LIMITS_MS = (100, 200, 300)
TRACE = Setting("trace", "conversation, at its own rate", "paper", "one hour, 12,031 requests")
BOUND = Setting("TTFT bound", "30 s", "paper")
NODES = Setting("nodes", "16 on each side", "paper")

SPLIT = Assumption("prefill", "8", "10", "how the 16 nodes are split is not said; decode takes the rest", ("Mooncake",))
THRESHOLD = Assumption(
    "conductor.kvcache_balancing_threshold",
    "",
    "4",
    "adjusted by hand, they say; ours by default",
    ("Mooncake", "global", "local"),
)
KV_MEMORY = Assumption("hardware.decode_tokens", "1300000", "650000", "what is left of 8 x 80 GB is not said")
COUPLED_ASSUMED = (
    Assumption("coupled.token_budget", "512", "2048", "chunk length is not said; the default of vLLM", ("vllm-chunked",)),
    Assumption("coupled.mixed", "overlap", "add", "what a chunk adds to a decode step is not said", ("vllm-chunked",)),
    Assumption("coupled.routing", "match", "least", "how requests get to the vLLM nodes is not said", ("vllm-prefix",)),
    Assumption(
        "coupled.prefill_tokens",
        "131072",
        "8192",
        "prompt tokens of a step: by default the longest sequence",
        ("vllm", "vllm-prefix"),
    ),
)
ARMS = {"Mooncake": (("policy", "global"),), **{name: (("policy", name),) for name in COUPLED[:3]}}


def _shares(result: RunResult) -> dict[str, float]:
    return {f"{limit} ms": 100 * share_within(result, 30.0, limit / 1000) for limit in LIMITS_MS}


def _best(limit: int) -> Holds:
    def holds(arms: Arms) -> bool:
        return all(arms["Mooncake"][f"{limit} ms"] > arms[name][f"{limit} ms"] for name in COUPLED[:3])

    return holds


def _rising(measure: str, arms: Sequence[str]) -> Holds:
    """Return whether each arm's measure is above the one's before it."""
    return lambda found: all(found[a][measure] < found[b][measure] for a, b in zip(arms, arms[1:], strict=False))


FIG1 = Plan(
    name="fig1",
    title="FAST'25 Fig 1: share of the requests within TTFT 30 s and a bound on TBT",
    base=BASE,
    arms=ARMS,
    measure=_shares,
    settings=(TRACE, BOUND, NODES, Setting("TBT", "mean of the longest tenth of the gaps", "paper")),
    assumptions=(SPLIT, THRESHOLD, KV_MEMORY, *COUPLED_ASSUMED),
    claims=(
        *((f"Mooncake keeps more requests within {limit} ms than each vLLM", _best(limit)) for limit in LIMITS_MS),
        ("a prefix cache does not help vLLM, at 100 ms", _rising("100 ms", ("vllm-prefix", "vllm"))),
        ("chunked prefill does not help vLLM, at 100 ms", _rising("100 ms", ("vllm-chunked", "vllm"))),
    ),
    units={f"{limit} ms": "%" for limit in LIMITS_MS},
    paper={
        (arm, f"{limit} ms"): value
        for arm, values in {
            "Mooncake": (96.6, 100, 100),
            "vllm": (16.1, 38.8, 62.8),
            "vllm-prefix": (15.1, 34.4, 56.0),
            "vllm-chunked": (9.4, 28.8, 55.3),
        }.items()
        for limit, value in zip(LIMITS_MS, values, strict=True)
    },
    notes=(
        "The vLLM arms are a model of v0.5.1 at the cost model's speed: no host work between steps, no slow kernel, memory by"
        " tokens. The paper ran vLLM itself.",
    ),
)

SCHEDULERS = {name: (("policy", name),) for name in ("global", "local", "load", "random")}
FIG5 = Plan(
    name="fig5",
    title="FAST'25 Fig 5: mean TTFT by scheduler",
    base=BASE,
    arms=SCHEDULERS,
    measure=lambda result: {"mean TTFT": summarize(result).ttft_s.mean, "p90 TTFT": summarize(result).ttft_s.p90},
    settings=(TRACE, NODES),
    assumptions=(
        Assumption("prefill", "8", "10", "how the 16 nodes are split is not said; decode takes the rest"),
        THRESHOLD,
        Assumption("speed", "1", "2", "the rate is not said to be the trace's own"),
        Assumption("order", "fcfs", "shortest", "the order of a prefill's queue is not said"),
    ),
    claims=(
        ("global < local < load < random in mean TTFT", _rising("mean TTFT", ("global", "local", "load", "random"))),
        ("global < local in mean TTFT", _rising("mean TTFT", ("global", "local"))),
        ("local < load in mean TTFT", _rising("mean TTFT", ("local", "load"))),
        ("load < random in mean TTFT", _rising("mean TTFT", ("load", "random"))),
    ),
    units={"mean TTFT": "s", "p90 TTFT": "s"},
    paper={
        ("global", "mean TTFT"): 3.07,
        ("local", "mean TTFT"): 3.58,
        ("load", "mean TTFT"): 5.27,
        ("random", "mean TTFT"): 19.65,
    },
    notes=("The arXiv version has 6.26, 14.36, 60.41 and 92.07 s for the same four at 8P+8D (its Fig 8), on another trace.",),
)


def _less(than: str, arm: str) -> Holds:
    return lambda found: found[arm]["prefill GPU time"] < found[than]["prefill GPU time"]


FIG8 = Plan(
    name="fig8",
    title="FAST'25 Fig 8: engine time of prefill, a request",
    base=BASE,
    arms=ARMS,
    measure=lambda result: {"prefill GPU time": summarize(result).prefill_gpu_s},
    settings=(TRACE, NODES),
    assumptions=(SPLIT, THRESHOLD, KV_MEMORY, COUPLED_ASSUMED[2]),
    claims=tuple((f"Mooncake's prefills take less than those of {name}", _less(name, "Mooncake")) for name in COUPLED[:3]),
    units={"prefill GPU time": "s"},
    notes=(
        "Paper: Mooncake takes 1.56, 1.43 and 1.90 times less than vLLM, with a prefix cache, with chunked prefill.",
        "In the model chunks cost what the whole prompt costs, so vllm and vllm-chunked are the same here.",
    ),
)

FIG10 = Plan(
    name="fig10",
    title="FAST'25 Fig 10: a global cache against local ones",
    base=Setup(prefill=10, decode=1, hardware=PAPER),
    arms={"global": (("policy", "global"),), "local": (("policy", "match"), ("conductor.kvcache_balancing_threshold", "1e9"))},
    measure=lambda result: {
        "hit ratio": 100 * summarize(result).hit_ratio,
        "prefill GPU time": summarize(result).prefill_gpu_s,
    },
    settings=(
        TRACE,
        Setting("prefill nodes", "10", "paper"),
        Setting("outputs", "1 token", "paper"),
        Setting("pool", "3 M tokens a node", "paper"),
        Setting("local arm", "routed to the longest match", "paper"),
        Setting("decode nodes", "1", "assumed", "with one token an answer there is nothing to decode"),
    ),
    assumptions=(
        replace(THRESHOLD, arms=("global",)),
        Assumption("policy", "match", "local", "how ties and load weigh in the local arm is not said", ("local",)),
    ),
    claims=(
        ("the global cache hits more", _rising("hit ratio", ("local", "global"))),
        ("the global cache computes less", _rising("prefill GPU time", ("global", "local"))),
    ),
    units={"hit ratio": "%", "prefill GPU time": "s"},
    paper={("global", "hit ratio"): 37.5, ("local", "hit ratio"): 16.9},
    notes=("With ids of 512 tokens no cache can hit more than 37.4 % of this trace's tokens; the paper's blocks are of 256.",),
    output_tokens=1,
)


def _copies(result: RunResult) -> dict[str, float]:
    last = result.copies[-1][1] if result.copies else {}
    return {f"rank {rank}": float(last.get(rank, math.nan)) for rank in ("10", "100", "1000", "10000")}


FIG11 = Plan(
    name="fig11",
    title="FAST'25 Fig 11: hosts that hold the keys ranked 10th, 100th, 1,000th and 10,000th, at the end",
    base=BASE,
    arms={"global": (("policy", "global"),)},
    measure=_copies,
    settings=(TRACE, Setting("prefill nodes", "8", "paper", "the axis ends there")),
    assumptions=(THRESHOLD, Assumption("speed", "1", "2", "the rate is not said")),
    claims=(
        ("the 10th hottest key is on seven of eight hosts or more", lambda found: found["global"]["rank 10"] >= 7),
        ("the 100th hottest key is on seven of eight hosts or more", lambda found: found["global"]["rank 100"] >= 7),
        (
            "the 10,000th is on fewer hosts than the 10th",
            lambda found: found["global"]["rank 10000"] < found["global"]["rank 10"],
        ),
    ),
    units={f"rank {rank}": "hosts" for rank in ("10", "100", "1000", "10000")},
    notes=(
        "Paper: the hottest 100 keys end up on nearly every prefill node; other numbers: shape only.",
        "With ids of 512 tokens the 100th key of this trace is asked for 21 times in all: it cannot get there.",
    ),
)

GBIT = 1e9 / 8
BANDWIDTHS = (24, 50, 100, 200, 400)


def _falling(found: Arms) -> bool:
    """Return whether the values fall, within 2 %: a seed's routing moves the mean by as much."""
    means = [found[str(each)]["mean TTFT"] for each in BANDWIDTHS]
    return all(b <= 1.02 * a for a, b in zip(means, means[1:], strict=False))


def _bandwidth(gbit: int) -> tuple[tuple[str, str], ...]:
    rate = f"{gbit * GBIT:g}"
    return ("hardware.network_bytes_per_s", rate), ("costs.transfer_bytes_per_s", rate)


FIG13 = Plan(
    name="fig13",
    title="FAST'25 Fig 13: mean TTFT by network bandwidth",
    base=BASE,
    arms={str(each): _bandwidth(each) for each in BANDWIDTHS},
    measure=lambda result: {"mean TTFT": summarize(result).ttft_s.mean},
    settings=(
        Setting(
            "trace", "synthetic; without --trace a generated look-alike", "assumed", "its statistics are published, it is not"
        ),
        Setting("bandwidth", "24 to 400 Gbit/s a node", "paper"),
    ),
    assumptions=(
        Assumption("prefill", "8", "10", "how the 16 nodes are split is not said; decode takes the rest"),
        replace(THRESHOLD, arms=()),
    ),
    claims=(("more bandwidth never makes the mean TTFT worse, within 2 %", _falling),),
    units={"mean TTFT": "s"},
    notes=("Paper: shape only. TTFT falls with bandwidth and gains little past a point.",),
    x="Gbit/s of each node",
)

ADMISSIONS = ("baseline", "early", "prediction")


def _rejected(result: RunResult) -> dict[str, float]:
    found = summarize(result)
    return {
        "rejected": 100 * found.rejected / found.requests,
        "prefills wasted": 100 * found.wasted_prefills / found.requests,
        "goodput": found.goodput_per_s,
    }


def _no_more(measure: str, arms: Sequence[str]) -> Holds:
    return lambda found: all(found[a][measure] >= found[b][measure] for a, b in zip(arms, arms[1:], strict=False))


def _most(measure: str, arm: str) -> Callable[[Arms], bool]:
    return lambda found: found[arm][measure] >= max(each[measure] for each in found.values())


REJECTIONS = Plan(
    name="rejections",
    title="arXiv, section 7: requests rejected at twice the rate",
    base=Setup(prefill=8, decode=8, hardware=PAPER, ttft_slo_s=30.0, tbt_slo_s=0.1, speed=2.0),
    arms={name: (("admission", name),) for name in ADMISSIONS},
    measure=_rejected,
    settings=(
        Setting("nodes", "8P+8D", "paper"),
        Setting("speed", "2x", "paper"),
        Setting("trace", "conversation, 12,031 requests", "assumed", "theirs has 23,000 and is another: shares are compared"),
        Setting("TTFT bound", "30 s", "assumed", "not said for this experiment"),
    ),
    assumptions=(
        Assumption("tbt_slo_s", "0.1", "0.06", "the bound on TBT is not said for this experiment"),
        Assumption("speed", "2", "3", "theirs overloads 8P+8D at 2x; this trace's prompts are shorter"),
        Assumption("prefill", "8", "12", "so that the decodes are the ones short; decode takes the rest"),
    ),
    claims=(
        ("this trace overloads the cluster: baseline rejects some", lambda found: found["baseline"]["rejected"] > 0),
        ("early rejects no more than baseline, prediction no more than early", _no_more("rejected", ADMISSIONS)),
        ("prediction has the highest goodput", _most("goodput", "prediction")),
    ),
    units={"rejected": "%", "prefills wasted": "%", "goodput": "1/s"},
    paper={(name, "rejected"): 100 * count / 23_000 for name, count in zip(ADMISSIONS, (4183, 3771, 3589), strict=True)},
)

PLANS = {plan.name: plan for plan in (FIG1, FIG5, FIG8, FIG10, FIG11, FIG13, REJECTIONS)}
