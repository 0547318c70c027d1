"""`mooncake-zmq bench zoo`: options in, one table or JSON object out."""

import os
from pathlib import Path

import click

from mooncake_zmq.bench.options import config_option, count_option, json_option, show_progress
from mooncake_zmq.config.examples import TOY

EXAMPLES = """\b
Examples:
  mooncake-zmq bench zoo --policy global,local,load
  mooncake-zmq bench zoo --small --only bursts,agents --json
  mooncake-zmq bench zoo --live --config configs/local.toml --only bursts
  mooncake-zmq bench zoo --seed 7 --policy global --set conductor.kvcache_balancing_threshold=1.05
"""


@click.command("zoo", epilog=EXAMPLES, context_settings={"max_content_width": 110})
@click.option("--only", default="", metavar="KIND,..", help="Workloads of these kinds alone; see `mooncake-zmq sim --help`.")
@click.option("--policy", default="", metavar="POLICY,..", help="All of the conductor's by default.")
@count_option("--prefill", 1, 8, "Prefill nodes.")
@count_option("--decode", 1, 8, "Decode nodes.")
@click.option("--hardware", default="a800-llama3-70b", show_default=True, metavar="NAME", help="As in `mooncake-zmq sim`.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="As in `mooncake-zmq sim`.")
@count_option("--seed", 0, 0, "Of the workloads and the runs.")
@click.option("--small", is_flag=True, help="200 requests of each workload: a quick run.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default="cores", help="Processes at a time.")
@click.option("--live", is_flag=True, help="Real processes instead, with prompts of toy size; only --only and --seed apply.")
@config_option(TOY, "With --live.")
@json_option
def zoo(
    only: str,
    policy: str,
    prefill: int,
    decode: int,
    hardware: str,
    assignments: tuple[str, ...],
    seed: int,
    small: bool,
    jobs: int,
    live: bool,
    config: Path,
    as_json: bool,
) -> None:
    """Every workload of the zoo under every policy, each beside the clairvoyant's optimum, in virtual time.

    Tokens computed over the least that a clairvoyant with endless memory would compute (regret), mean TTFT, the gap after the
    first token, the share within the TBT, and the error of predictions. Three minutes of CPU; see --small and --policy.
    """
    from mooncake_zmq.bench.zoo import bench_zoo, names, policies_of
    from mooncake_zmq.laboratory.command import runs_display
    from mooncake_zmq.laboratory.profiles import find_profile
    from mooncake_zmq.laboratory.settings import assigned, split_assignment
    from mooncake_zmq.laboratory.study import Setup
    from mooncake_zmq.laboratory.zoo import KINDS

    kinds, policies = names("--only", only, tuple(KINDS)), policies_of(policy)
    if live:
        from mooncake_zmq.bench.zoo_live import bench_zoo_live

        bench_zoo_live(config, kinds=kinds, seed=seed, progress=show_progress).show(as_json=as_json)
        return
    setup = Setup(prefill=prefill, decode=decode, hardware=find_profile(hardware), seed=seed)
    for text in assignments:
        setup = assigned(setup, *split_assignment("--set", text))
    with runs_display("zoo", len(kinds) * len(policies)) as progress:
        report = bench_zoo(setup, kinds=kinds, policies=policies, seed=seed, small=small, processes=jobs, progress=progress)
    report.show(as_json=as_json)
