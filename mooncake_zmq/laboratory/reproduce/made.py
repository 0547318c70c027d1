"""Figures on generated loads: pipelines of prefills for long prompts, roles that change with a load that shifts."""

from collections.abc import Sequence
from dataclasses import replace

from mooncake_zmq.laboratory.generated import generate, parse_spec
from mooncake_zmq.laboratory.metrics import served, summarize
from mooncake_zmq.laboratory.profiles import sources
from mooncake_zmq.laboratory.reproduce.figure import HARDWARE, PAPER, Conclusion, Figure, Row, Setting
from mooncake_zmq.laboratory.reproduce.met import cake
from mooncake_zmq.laboratory.runs import run_one
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival, NodeProfile, RunResult, Setup

LENGTHS = (32, 64, 128)
"""Lengths of a prompt alone, in units of 1,024 tokens."""
STAGES = (1, 2, 4)
ALONE = 8
"""Prompts of a run that has one at a time."""
OTHERS_PER_S = (2.0, 5.0)
LOADED_S = 600
PREFILLS = 4
CHUNK_TOKENS = 2048
REQUESTS = 3000
"""About as many as the largest load of `cpp` has."""
SHIFT_S = 1200
AFTER_S = (0.0, 60.0)
OVERLOAD = 1.4
"""Load of the nodes of one role in each half, as a share of their capacity."""


def cpp(part: float = 1.0) -> Figure:
    """Return the TTFT of long prompts over one, two and four prefills, and others' TTFT beside them. `part`: of the load."""
    alone = {(node.name, k, n): _alone(node, 1024 * k, n, part) for node in HARDWARE for k in LENGTHS for n in STAGES}
    loaded = {(node.name, rate, n): _loaded(node, rate, n, part) for node in HARDWARE for rate in OTHERS_PER_S for n in STAGES}
    rows = [Row(f"{k}k tokens alone, {_of(n)}: TTFT", "s", alone[PAPER.name, k, n]) for k in LENGTHS for n in STAGES]
    for rate in OTHERS_PER_S:
        for n in STAGES:
            long_s, mean_s, p90_s = loaded[PAPER.name, rate, n]
            where = f"{rate:g} others/s, {_of(n)}"
            rows.append(Row(f"{where}: TTFT of 64k tokens", "s", long_s))
            rows.append(Row(f"{where}: TTFT of the others, mean", "s", mean_s))
            rows.append(Row(f"{where}: TTFT of the others, p90", "s", p90_s))
    sooner = [
        f"{k}k tokens, {_of(n)}, on {node.name}"
        for node in HARDWARE
        for k in LENGTHS
        for before, n in zip(STAGES, STAGES[1:], strict=False)
        if alone[node.name, k, n] >= alone[node.name, k, before]
    ]
    dearer = [
        f"{rate:g} others/s, {_of(n)}, on {node.name}"
        for node in HARDWARE
        for rate in OTHERS_PER_S
        for n in STAGES[1:]
        if loaded[node.name, rate, n][1] > loaded[node.name, rate, 1][1]
    ]
    return Figure(
        name="cpp",
        title="Chunked pipeline parallelism: TTFT of long prompts over several prefills, and of the others beside them",
        settings=[
            Setting("prefills, decodes", f"{PREFILLS}, {PREFILLS}", "assumed", "as many as the longest pipeline"),
            Setting("conductor.pipeline_stages", ", ".join(map(str, STAGES)), "assumed", "at most so many for a prompt"),
            Setting("chunk", f"{CHUNK_TOKENS} tokens", "assumed", "the laboratory's"),
            Setting("the others", "4,096 tokens each; 5/s are 60 % of the prefills' time", "assumed"),
            Setting("long prompts beside them", "65,536 tokens, one in 10 s", "assumed", "a quarter of the prefills' time"),
            *(Setting(what, PAPER.name, whence, why) for what, whence, why in sources(PAPER)),
        ],
        rows=rows,
        conclusions=[
            Conclusion("a long prompt alone is sooner with each stage", len(HARDWARE) * len(LENGTHS) * 2, tuple(sooner)),
            Conclusion("the others wait no longer for it", len(HARDWARE) * len(OTHERS_PER_S) * 2, tuple(dearer)),
        ],
    )


def roles(part: float = 1.0) -> Figure:
    """Return the goodput of nodes that change their role beside fixed ones, on a load that shifts from prompts to answers."""
    found = {(node.name, after_s): _shifted(node, after_s, part) for node in HARDWARE for after_s in AFTER_S}
    rows = []
    for after_s in AFTER_S:
        summary = summarize(found[PAPER.name, after_s])
        name = f"roles change after {after_s:g} s" if after_s else "fixed roles"
        rows.append(Row(f"{name}: goodput", "requests/s", summary.goodput_per_s))
        rows.append(Row(f"{name}: within both bounds", "%", 100 * summary.within_slo))
        rows.append(Row(f"{name}: failed", "requests", float(summary.failed)))
    fixed, changing = AFTER_S
    goodput = {key: summarize(run if key[1] else served(run)).goodput_per_s for key, run in found.items()}
    gains = {node.name: goodput[node.name, changing] / goodput[node.name, fixed] for node in HARDWARE}
    rows += [Row(f"gain on {name}", "times", gain) for name, gain in gains.items()]
    lost = tuple(name for name in gains if summarize(found[name, changing]).failed)
    return Figure(
        name="roles",
        title="Nodes that change their role, on a load that shifts from long prompts to long answers",
        settings=[
            Setting("prefills, decodes", f"{PREFILLS}, {PREFILLS}", "assumed"),
            Setting("first half", f"{SHIFT_S} s of 8,192 tokens and 10 of answer", "assumed", "1.4 times what 4 prefills can"),
            Setting("second half", f"{SHIFT_S} s of 512 tokens and 800 of answer", "assumed", "1.4 times what 4 decodes can"),
            Setting("admission", "prediction; TTFT 10 s, TBT 0.1 s", "assumed"),
            Setting("a node is away for", "20 s, and what drains before", "assumed", "most of it to load the weights"),
            *(Setting(what, PAPER.name, whence, why) for what, whence, why in sources(PAPER)),
        ],
        rows=rows,
        conclusions=[
            Conclusion(
                "changing roles serves more within the bounds",
                len(HARDWARE),
                tuple(name for name, gain in gains.items() if gain <= 1),
            ),
            Conclusion("no change of role fails a request", len(HARDWARE), lost),
        ],
    )


MADE = {"cpp": cpp, "roles": roles, "cake": cake}


def joined(*loads: Sequence[Arrival]) -> list[Arrival]:
    """Return loads beside each other, whose prompts have nothing in common."""
    found: list[Arrival] = []
    fresh = 0
    for load in loads:
        found += [replace(each, hash_ids=tuple(fresh + number for number in each.hash_ids)) for each in load]
        fresh = 1 + max((number for each in found for number in each.hash_ids), default=0)
    return sorted(found, key=lambda each: each.at_s)


def _of(stages: int) -> str:
    return "1 prefill" if stages == 1 else f"{stages} prefills"


def _setup(node: NodeProfile, stages: int) -> Setup:
    overrides: dict[str, float | int | str | bool] = {
        "conductor.pipeline_stages": stages,
        "conductor.pipeline_chunk_tokens": CHUNK_TOKENS,
    }
    return Setup(prefill=PREFILLS, decode=PREFILLS, hardware=node, ttft_slo_s=120.0, overrides=overrides)


def _run(setup: Setup, arrivals: Sequence[Arrival]) -> RunResult:
    return run_one(setup, arrivals, lambda share: None)


def _alone(node: NodeProfile, tokens: int, stages: int, part: float) -> float:
    blocks = tokens // TRACE_BLOCK_TOKENS
    prompts = [[Arrival(100.0 * n, tokens, 16, tuple(range(blocks)))] for n in range(max(1, int(ALONE * part)))]
    return summarize(served(_run(_setup(node, stages), joined(*prompts)))).ttft_s.mean


def _loaded(node: NodeProfile, per_s: float, stages: int, part: float) -> tuple[float, float, float]:
    """Return the mean TTFT of the long prompts; mean and p90 of the others. A node that is twice as fast gets twice the
    load."""
    speed = PAPER.costs.compute_s(65_536, 0) / node.costs.compute_s(65_536, 0)
    others, long = (int(LOADED_S * part * rate) for rate in (per_s, 0.1))
    arrivals = joined(
        generate(parse_spec(f"uniform:input=4096,output=16,rate={per_s},requests={max(1, others)}")),
        generate(parse_spec(f"uniform:input=65536,output=16,rate=0.1,requests={max(1, long)},seed=1")),
    )
    result = served(_run(replace(_setup(node, stages), speed=speed), arrivals))
    by_length = {
        length: summarize(replace(result, requests=[each for each in result.requests if each.input_tokens == length]))
        for length in (4096, 65_536)
    }
    other = by_length[4096].ttft_s
    return by_length[65_536].ttft_s.mean, other.mean, other.p90


def _shifted(node: NodeProfile, after_s: float, part: float) -> RunResult:
    costs = node.costs
    half_s = SHIFT_S * part
    prompts_per_s = OVERLOAD * PREFILLS / costs.compute_s(8192, 0)
    batch = max(n for n in range(1, node.max_batch + 1) if costs.step_s(n, 900 * n) <= 0.1)
    answers_per_s = OVERLOAD * PREFILLS * batch / costs.step_s(batch, 900 * batch) / 800
    first, second = (
        generate(parse_spec(f"uniform:input={tokens},output={output},rate={rate},requests={int(rate * half_s)},seed={tokens}"))
        for tokens, output, rate in ((8192, 10, prompts_per_s), (512, 800, answers_per_s))
    )
    arrivals = joined(first, [replace(each, at_s=half_s + each.at_s) for each in second])
    overrides: dict[str, float | int | str | bool] = {
        "laboratory.change_roles": True,
        "conductor.role_change_after_s": after_s,
    }
    setup = Setup(prefill=PREFILLS, decode=PREFILLS, hardware=node, admission="prediction", ttft_slo_s=10.0)
    return _run(replace(setup, overrides=overrides), arrivals)
