"""The printed form of `model inspect`: one table, then the problems."""

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from mooncake_zmq.engine.inspect import Inspection


def print_inspection(found: Inspection, console: Console) -> None:
    table = Table(title=Text(found.spec.name), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(found):
        table.add_row(label, Text(value))
    console.print(table)
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    for problem in found.problems:
        console.print(Text(f"does not run here: {problem}", style="red"))
    if found.runs:
        console.print(Text("runs here", style="green"))


def _rows(found: Inspection) -> list[tuple[str, str]]:
    spec, kv_bytes = found.spec, found.spec.kv_bytes_per_token
    size = f"{found.parameters / 1e6:,.1f} million parameters"
    groups = f"{spec.heads} heads over {spec.kv_heads} of KV, each {spec.head_dim} wide"
    formats = ", ".join(f"{kind} {decimal(size)}" for kind, size in found.formats.items())
    window = f", sliding window {spec.sliding_window:,}" if spec.sliding_window else ""
    fitting = found.context_that_fits
    free = found.host.memory_available_bytes
    where = f"already at {found.prepared}" if found.prepared else "not prepared yet"
    rows = [
        ("from", found.origin),
        (
            "family",
            f"{spec.family}, {size}, {'tied' if spec.tied else 'untied'} head",
        ),
        (
            "shape",
            f"{spec.layers} layers of {spec.hidden}, {groups}; feed-forward {spec.ffn:,}; vocabulary {spec.vocab_size:,}",
        ),
        ("weights in the file", formats or "none"),
        ("tokenizer", f"{found.tokenizer}, {'with' if found.chat_template else 'without'} a chat template"),
        ("context", f"{spec.max_positions:,} tokens; RoPE theta {spec.rope_theta:,.0f}, scaling {spec.rope_scaling}{window}"),
        ("prepared weights", f"{decimal(found.prepared_bytes)} on disk and once in shared page cache; {where}"),
        ("KV of one token", f"{kv_bytes:,} bytes; of 1,000: {decimal(1000 * kv_bytes)}"),
        ("KV of a full context", decimal(kv_bytes * spec.max_positions)),
        ("memory available", f"{decimal(free)}: weights and {fitting:,} tokens of KV"),
    ]
    return [row for row in rows if row != ("weights in the file", "none")]
