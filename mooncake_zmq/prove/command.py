"""`mooncake-zmq prove vllm`: options in, a table or one JSON object out."""

import json
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from mooncake_zmq.laboratory import tables
from mooncake_zmq.prove.connectors import CONNECTORS, OURS, PLANTED
from mooncake_zmq.prove.run import Outcome, Proof
from mooncake_zmq.telemetry.log import logs_from
from mooncake_zmq.telemetry.progress import elapsed_lines

EXAMPLES = """\b
Examples:
  mooncake-zmq prove vllm --vllm-python ~/vllm/bin/python
  mooncake-zmq prove vllm --vllm-python ~/vllm/bin/python --connector LMCacheConnectorV1 --answers 2000
  mooncake-zmq prove vllm --vllm-python ~/vllm/bin/python --answers 1000 --planted trust_all_bytes
"""
HEADS = ("chapter", "answers", "right", "tied", "wrong", "failed", "left, cut", "tokens loaded", "preempted", "s")


@click.group()
def prove() -> None:
    """Prove that tokens with restored KV are those with computed KV.

    \b
    Example:
      mooncake-zmq prove vllm --vllm-python ~/vllm/bin/python --connector MooncakeStoreConnector
    """


@prove.command(epilog=EXAMPLES)
@click.option("--vllm-python", "python", required=True, metavar="PYTHON", help="Python of an environment with vLLM.")
@click.option("--connector", type=click.Choice([*CONNECTORS]), default=OURS, show_default=True, help="none: no connector.")
@click.option("--answers", type=click.IntRange(100), default=10_000, show_default=True, help="The number of answers in all.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="What is asked, and where bits are flipped.")
@click.option("--planted", type=click.Choice(PLANTED), help="Plant a bug in our connector, and stop once it is found.")
@click.option("--vllm-argument", "arguments", multiple=True, metavar="ARG", help="Given to both servers; may be repeated.")
@click.option("--keep", is_flag=True, help="Keep the directory with model and logs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def vllm(connector: str, planted: str | None, keep: bool, as_json: bool, **parameters: Any) -> None:
    """Compare the greedy answers of a vLLM with a connector with those of one without, on a small random model.

    The server with the connector evicts and preempts all the time, is killed amid answers, left by its clients at every stage,
    given flipped bits in what it stored, and restarted with another RoPE, other weights and another type at the same path. The
    one without has no prefix cache either. The exit code is 1 if a token is wrong, an answer failed, or nothing was loaded,
    or no bit flipped, where KV was stored. A run of 10,000 answers takes about half an hour on two cores.
    """
    if planted and connector != OURS:
        raise click.UsageError(f"--planted goes with --connector {OURS}")
    # The store's log lines on killed clients and flipped bits are not part of the report.
    click.get_current_context().with_resource(logs_from(logging.CRITICAL))
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its servers end with it
    scratch = Path(tempfile.mkdtemp(prefix="mz-prove-"))
    clean = False
    try:
        proof = Proof(connector=connector, planted=planted or "", scratch=scratch, say=elapsed_lines(), **parameters)
        outcomes = proof.run()
        clean = not any(_problems(connector, outcome) for outcome in outcomes)
        (_print_json if as_json else _print_table)(connector, outcomes)
    finally:
        signal.signal(signal.SIGTERM, former)
        if clean and not keep:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            click.echo(f"logs are in {scratch}", err=True)
    sys.exit(0 if clean else 1)


def _problems(connector: str, outcome: Outcome) -> list[str]:
    """Return what is wrong; without a connector nothing can be loaded."""
    return [each for each in outcome.problems if connector != "none" or not each.startswith("no KV")]


def _print_table(connector: str, outcomes: Sequence[Outcome]) -> None:
    console = tables.console()
    table = Table(title=f"{connector}: restored against computed", title_justify="left", box=None)
    for head in HEADS:
        table.add_column(head, justify="left" if head == HEADS[0] else "right", no_wrap=True)
    for outcome in outcomes:
        verdicts = outcome.verdicts
        counts = [sum(verdicts.values()), *(verdicts[kind] for kind in ("right", "tied", "wrong", "failed"))]
        counts += [verdicts["left"] + verdicts["cut"], round(outcome.loaded_tokens), round(outcome.preemptions)]
        counts.append(round(outcome.seconds))
        table.add_row(outcome.chapter.name, *(f"{count:,}" for count in counts))
    console.print(table)
    for outcome in outcomes:
        for problem in _problems(connector, outcome):
            console.print(f"[red]{escape(outcome.chapter.name)}: {problem}[/]", soft_wrap=True)
        for detail in outcome.details:
            console.print(escape(f"  {detail}"), soft_wrap=True)
    if not any(_problems(connector, outcome) for outcome in outcomes):
        console.print("[green]proved[/]: every token is the one that is computed without stored KV")


def _print_json(connector: str, outcomes: Sequence[Outcome]) -> None:
    chapters = [
        {
            **asdict(outcome.chapter),
            "verdicts": dict(outcome.verdicts),
            "loaded_tokens": outcome.loaded_tokens,
            "preemptions": outcome.preemptions,
            "flipped": outcome.flipped,
            "seconds": round(outcome.seconds, 1),
            "problems": _problems(connector, outcome),
            "details": outcome.details,
        }
        for outcome in outcomes
    ]
    clean = not any(chapter["problems"] for chapter in chapters)
    click.echo(json.dumps({"connector": connector, "clean": clean, "chapters": chapters}, indent=1))
