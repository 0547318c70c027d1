"""`mooncake-zmq chaos`: plans, runs, reports; its exit code says whether all was clean."""

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import structlog
from rich.console import Console

from mooncake_zmq.chaos.floods import KINDS
from mooncake_zmq.chaos.node import PLANTED
from mooncake_zmq.chaos.plan import Kind
from mooncake_zmq.config.examples import CHAOS, located
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.telemetry.progress import elapsed_lines

if TYPE_CHECKING:
    from mooncake_zmq.chaos.run import Wanted
    from mooncake_zmq.config.load import Loaded


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="How long faults go on."
)
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="What is broken, when, and what clients ask."
)
@click.option("--clients", type=click.IntRange(1, 256), default=8, show_default=True, help="Streams at once.")
@click.option("--config", "path", default=CHAOS, show_default=True, metavar="FILE", help="A deployment of the toy model.")
@click.option("--plan", "plan_only", is_flag=True, help="Print what would be broken, and when; start nothing.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    type=click.Choice([kind.value for kind in Kind]),
    metavar="KIND",
    help=f"Only this kind; may be given again. There are {', '.join(kind.value for kind in Kind)}.",
)
@click.option("--lasting", is_flag=True, help="Only what no process ends of, so that its memory is seen over the whole time.")
@click.option("--planted", type=click.Choice(tuple(PLANTED)), default=None, help="Plant a bug, which must be found.")
@click.option("--loopback", is_flag=True, help="Make no namespaces, as where none are permitted.")
@click.option("--plain", is_flag=True, help="No keys: everything that goes over TCP goes in clear.")
@click.option(
    "--hostile",
    type=click.IntRange(1000),
    default=None,
    metavar="N",
    help="Instead of faults: N spoilt inputs to every socket, a 20th of that to streams, a 50th to HTTP.",
)
@click.option(
    "--bursts",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Instead of faults: N times, 40 connections to a socket of every kind, which send and close at any stage.",
)
@click.option(
    "--upgrade",
    "upgrade_from",
    default="",
    metavar="FROM",
    help="Instead of faults: replace each node of the release FROM, a directory or a git commit, by this one, and back.",
)
@click.option(
    "--tenants", is_flag=True, help="Instead of faults: one tenant floods, and how long another's answers take is measured."
)
@click.option(
    "--flood",
    "kinds",
    multiple=True,
    type=click.Choice([*KINDS]),
    metavar="KIND",
    help=f"With --tenants, only this kind; may be given again. There are {', '.join(KINDS)}.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, max=600, min_open=True),
    default=5.0,
    show_default=True,
    help="With --tenants, of each flood, and of the time before it.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0, max=1000),
    default=5.0,
    show_default=True,
    help="With --tenants, the time of a decode's step; a large model's on real hardware is some 28.",
)
@click.option("--keep", is_flag=True, help="Keep the directory with the logs of a clean run as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def chaos(
    minutes: float,
    seed: int,
    clients: int,
    path: str,
    plan_only: bool,
    faults: tuple[str, ...],
    lasting: bool,
    planted: str | None,
    loopback: bool,
    plain: bool,
    hostile: int | None,
    bursts: int | None,
    upgrade_from: str,
    tenants: bool,
    kinds: tuple[str, ...],
    seconds: float,
    step_ms: float,
    keep: bool,
    as_json: bool,
) -> None:
    """Start a real cluster, break it in every way that a seed draws, and compare every token that clients get.

    All TCP is CURVE, by keys made for the run. Each host is a network namespace of its own where that is permitted (root, or
    user namespaces), so that links can be cut; else all run on loopback, and partitions are left out. Nothing outlives the
    command. The exit code is 1 if anything was wrong, lost or duplicated, leaked or logged an error; the logs are then kept.

    \b
    Examples:
      mooncake-zmq chaos                            a minute of it
      mooncake-zmq chaos --minutes 60 --lasting     does memory grow?
      mooncake-zmq chaos --bursts 10000             does a process end of clients that come and go?
      mooncake-zmq chaos --upgrade c21443f0         replace each node by this release, and back
      mooncake-zmq chaos --tenants                  what one tenant's floods cost another
      mooncake-zmq chaos --fault flip_memory --planted trust_all_bytes
    """
    _refuse_several(hostile, bursts, upgrade_from, tenants, plan_only)
    _refuse_beside(tenants, kinds, hostile or bursts or upgrade_from or tenants, faults or lasting or planted)
    _enter(alone=plan_only or loopback)
    loaded = _load(path)
    if tenants:
        _run_tenants(loaded, kinds, seconds, step_ms / 1000, keep=keep, as_json=as_json)
    if plan_only:
        _print_plan(loaded, seed, minutes, _kinds(faults, lasting=lasting))
        return
    from mooncake_zmq.chaos.run import Wanted

    wanted = Wanted(
        loaded=loaded,
        seed=seed,
        duration_s=60 * minutes,
        clients=clients,
        kinds=_kinds(faults, lasting=lasting),
        planted=planted or "",
        with_keys=not plain,
        hostile=hostile or 0,
        bursts=bursts or 0,
        upgrade_from=upgrade_from,
    )
    _run_faults(wanted, keep=keep, as_json=as_json)


def _kinds(faults: Sequence[str], *, lasting: bool) -> list[Kind]:
    kinds = [kind for kind in ([Kind(kind) for kind in faults] or Kind) if not (lasting and kind.ends_processes)]
    if not kinds:
        raise click.UsageError(f"--lasting leaves out what a process ends of, as {', '.join(faults)}: nothing would be broken")
    return kinds


def _refuse_beside(tenants: object, floods: object, other_run: object, of_faults: object) -> None:
    if floods and not tenants:
        raise click.UsageError("--flood goes with --tenants")
    if of_faults and other_run:
        raise click.UsageError("--fault, --lasting and --planted are of faults, which that run has none of")


def _refuse_several(*runs: int | str | bool | None) -> None:
    if sum(map(bool, runs)) > 1:
        raise click.UsageError("--hostile, --bursts, --upgrade, --tenants and --plan are separate runs")


def _enter(*, alone: bool) -> None:
    """Enter namespaces where links can be cut, unless `alone`, before anything of the run is imported."""
    from mooncake_zmq.chaos.network import enter

    if not alone:
        enter()
    limit_blas()
    # Log lines that hostile inputs cause in this process are not part of the report.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _load(path: str) -> "Loaded":
    from mooncake_zmq.config.load import load

    return load(located(path), {})


def _print_plan(loaded: "Loaded", seed: int, minutes: float, kinds: Sequence[Kind]) -> None:
    from mooncake_zmq.chaos.plan import draw_plan

    for fault in draw_plan(seed, 60 * minutes, {node.name: node.role for node in loaded.config.nodes}, kinds):
        click.echo(f"{fault.at_s:6.1f} s  {fault}")


def _run_faults(wanted: "Wanted", *, keep: bool, as_json: bool) -> NoReturn:
    from mooncake_zmq.chaos import report as reports
    from mooncake_zmq.chaos.run import NotStarted, Run
    from mooncake_zmq.refused import Refused

    run = Run(wanted, elapsed_lines())
    try:
        outcome = asyncio.run(run.run())
    except asyncio.CancelledError:
        sys.exit(130)
    except (NotStarted, Refused) as error:
        click.echo(f"mooncake-zmq chaos: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(reports.as_json(outcome, wanted), indent=1))
    else:
        reports.print_report(outcome, wanted, Console())
    _end(outcome.problems, outcome.directory, keep=keep)


def _run_tenants(
    loaded: "Loaded", kinds: Sequence[str], seconds: float, step_s: float, *, keep: bool, as_json: bool
) -> NoReturn:
    from mooncake_zmq.chaos import tenants

    try:
        outcome = asyncio.run(tenants.TenantsRun(loaded, kinds or [*KINDS], seconds, step_s, elapsed_lines()).run())
    except KeyboardInterrupt:
        sys.exit(130)
    if as_json:
        click.echo(json.dumps(tenants.as_json(outcome), indent=1))
    else:
        tenants.print_report(outcome, Console())
    _end(outcome.problems, outcome.directory, keep=keep)


def _end(problems: Sequence[str], directory: Path, *, keep: bool) -> NoReturn:
    if not problems and not keep:
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(1 if problems else 0)
