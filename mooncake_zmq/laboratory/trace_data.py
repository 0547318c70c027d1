"""`mooncake-zmq trace-data`: where the public trace is, and whether a file is that trace."""

import hashlib
from pathlib import Path

import click
import numpy as np

from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.traces import read_trace

NAME = "conversation_trace.jsonl"
URL = f"https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/{NAME}"
SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
HOW = f"""\
Mooncake's public conversation trace: 12,031 requests of one hour, Apache-2.0, 3.0 MB, of the repository kvcache-ai/Mooncake.
  curl -LO {URL}
  mooncake-zmq trace-data {NAME}
  SHA-256 {SHA256}"""


@click.command("trace-data", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("trace", required=False, type=click.Path(path_type=Path), metavar="[FILE]")
def trace_data(trace: Path | None) -> None:
    """Say where the public trace is and how to get it; or, of FILE, whether it is that trace, and what is in it.

    FILE may be any trace that `mooncake-zmq sim` reads. The exit code is 0 if it can be read, whatever its checksum is.

    \b
    Examples:
      mooncake-zmq trace-data
      mooncake-zmq trace-data conversation_trace.jsonl
    """
    if trace is None:
        click.echo(HOW)
        return
    tables.show([tables.pairs(str(trace), lines(trace))])


def lines(trace: Path) -> list[tuple[str, str]]:
    """Return (name, value) of what a trace contains. Raises StudyError."""
    arrivals = read_trace(trace)
    same = hashlib.sha256(trace.read_bytes()).hexdigest() == SHA256
    inputs = np.array([each.input_tokens for each in arrivals])
    outputs = np.array([each.output_tokens for each in arrivals])
    blocks = [hash_id for each in arrivals for hash_id in each.hash_ids]
    return [
        ("checksum", "that of the public conversation trace" if same else "not that of the public conversation trace"),
        ("requests", f"{len(arrivals):,}"),
        ("time from the first to the last, s", f"{arrivals[-1].at_s:,.0f}"),
        ("tokens of a prompt: mean, longest", f"{inputs.mean():,.0f}, {inputs.max():,}"),
        ("tokens of an answer: mean, longest", f"{outputs.mean():,.0f}, {outputs.max():,}"),
        ("blocks that an earlier request has", f"{1 - len(set(blocks)) / len(blocks):.1%}"),
    ]
