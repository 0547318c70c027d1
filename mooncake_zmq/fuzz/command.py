"""`mooncake-zmq fuzz`: runs a process for each decoder, one after the other, and reports the results."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from mooncake_zmq.fuzz.examination import IN_MEMORY

_DONE = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)")
"""The last line of libFuzzer's progress."""
BEGIN_S = 60
"""The time for a process to import and instrument everything, and to end."""


@dataclass(slots=True)
class Outcome:
    """The result of fuzzing one decoder."""

    decoder: str
    seconds: float
    executions: int = 0
    edges: int = 0
    """The edges of Python's code that were reached; C code is not seen."""
    inputs: int = 0
    """The inputs that were kept, each of which reaches something that none before did."""
    findings: list[dict[str, str]] = field(default_factory=list)
    ended: str = ""
    """The way the process ended, if not at its time."""


@click.command()
@click.option("--decoder", "names", multiple=True, metavar="NAME", help="Only this one; may be given again. See --list.")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="For each decoder."
)
@click.option("--seed", type=click.IntRange(1), default=1, show_default=True)
@click.option("--corpus", metavar="DIR", help="Keep inputs there, and go on with those of former runs.")
@click.option("--findings", metavar="DIR", default="findings", show_default=True, help="Where inputs with findings go.")
@click.option(
    "--replay",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Give one input to the one --decoder, and say what comes of it.",
)
@click.option("--list", "only_list", is_flag=True, help="Print the decoders' names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def fuzz(
    names: tuple[str, ...],
    minutes: float,
    seed: int,
    corpus: str | None,
    findings: str,
    replay: Path | None,
    only_list: bool,
    as_json: bool,
) -> None:
    """Give every decoder of bytes from outside what it does not expect, guided by the code that is reached.

    An input must be read or refused by the decoder's stated error, within half a second and 64 MiB. What does anything else is
    kept, and the exit code is 1. Needs the extra `fuzz`.

    \b
    Examples:
      mooncake-zmq fuzz --minutes 5
      mooncake-zmq fuzz --decoder message --decoder session --corpus corpus
      mooncake-zmq fuzz --decoder message --replay findings/message-0123456789ab
    """
    from mooncake_zmq.fuzz.decoders import DECODERS, PLANTED

    known = {**DECODERS, PLANTED.name: PLANTED}
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"no decoder {unknown[0]!r}; there are {', '.join(DECODERS)}")
    if only_list:
        click.echo("\n".join(DECODERS))
        return
    if replay is not None:
        if len(names) != 1:
            raise click.UsageError("--replay goes with one --decoder")
        sys.exit(_replay(names[0], replay))
    if importlib.util.find_spec("atheris") is None:
        raise click.UsageError("fuzzing is guided by atheris: install the extra fuzz")
    outcomes = []
    for name in names or tuple(DECODERS):
        outcome = _fuzz_one(name, 60 * minutes, seed, Path(corpus) if corpus else None, Path(findings))
        outcomes.append(outcome)
        _report(outcome)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in outcomes], indent=1))
    else:
        Console().print(_table(outcomes))
    sys.exit(1 if any(each.findings or each.ended for each in outcomes) else 0)


def _replay(name: str, path: Path) -> int:
    from mooncake_zmq.fuzz.decoders import DECODERS, PLANTED
    from mooncake_zmq.fuzz.examination import examine

    decoder = PLANTED if name == PLANTED.name else DECODERS[name]
    for seed in decoder.seeds():
        examine(decoder, seed)
    finding = examine(decoder, path.read_bytes())
    click.echo(str(finding) if finding else f"{name}: {path} is read, or refused as it should be")
    return int(finding is not None)


def _fuzz_one(name: str, seconds: float, seed: int, corpus: Path | None, findings: Path) -> Outcome:
    outcome = Outcome(name, seconds)
    findings.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="mz-corpus-") as temporary,
        # libFuzzer ends its process at once, so that its temporary files are removed here.
        tempfile.TemporaryDirectory(prefix="mz-fuzz-", dir=None if "TMPDIR" in os.environ else IN_MEMORY) as files,
    ):
        inputs = corpus / name if corpus else Path(temporary)
        inputs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "mooncake_zmq.fuzz.guided", name, str(max(1, round(seconds))), str(seed)]
        try:
            done = subprocess.run(
                [*command, str(inputs), str(findings)],
                capture_output=True,
                timeout=seconds + BEGIN_S,
                check=False,
                env={**os.environ, "TMPDIR": files},
            )
            progress = done.stderr.decode(errors="replace")
            outcome.findings = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        except subprocess.TimeoutExpired:
            progress, outcome.ended = "", "did not end"
    if found := _DONE.findall(progress):
        outcome.executions, outcome.edges, _, outcome.inputs = map(int, found[-1])
    elif not outcome.ended:
        outcome.ended = (progress.strip().splitlines() or ["said nothing"])[-1]
    return outcome


def _report(outcome: Outcome) -> None:
    for each in outcome.findings:
        click.echo(f"{outcome.decoder}: {each['what']} at {each['where']}", err=True)
        click.echo(f"  mooncake-zmq fuzz --decoder {outcome.decoder} --replay {each['path']}", err=True)
    if outcome.ended:
        click.echo(f"{outcome.decoder}: {outcome.ended}", err=True)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(box=None)
    for column in ("decoder", "inputs", "a second", "edges reached", "kept", "findings"):
        table.add_column(column, justify="left" if column == "decoder" else "right")
    for each in outcomes:
        rate = f"{each.executions / each.seconds:,.0f}"
        table.add_row(
            each.decoder,
            f"{each.executions:,}",
            rate,
            f"{each.edges:,}",
            f"{each.inputs:,}",
            each.ended or str(len(each.findings)),
        )
    return table
