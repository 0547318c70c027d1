"""Renders a cluster's state, as its gateway's /cluster reports it, for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

STYLES = {
    "ready": "green",
    "ok": "green",
    "degraded": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "starting": "yellow",
}
Cluster = Mapping[str, Any]


def overview(cluster: Cluster) -> RenderableType:
    """Return the verdict, what is degraded or slow and what to do about it, and the nodes."""
    bad = cluster["slow"]
    status = "degraded" if cluster["status"] == "ok" and bad else str(cluster["status"])
    head = Text(str(cluster["verdict"]), style=STYLES.get(status, "red"))
    named = [(each["reason"], each) for each in cluster["degraded"]] + [(each["number"], each) for each in bad]
    more = [Text(f"  {name}: {each['text']}; {each['action']}", style="yellow") for name, each in named]
    return Group(head, *more, nodes(cluster))


def nodes(cluster: Cluster) -> Table:
    """Return a table with one line per node, with its model if there are several; if it is too wide, role and host are folded,
    and figures stay whole."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    models = ["model"] if any(node.get("model") for node in cluster["nodes"]) else []
    for name in ("node", "role", *models, "host", "state"):
        table.add_column(name, no_wrap=name in ("node", "state"), overflow="fold")
    for name in ("up", "wait", "run", "full", "code"):
        table.add_column(name, justify="right", no_wrap=True)
    for node in cluster["nodes"]:
        gauges = node.get("gauges", {})
        table.add_row(
            *(Text(str(node.get(name, ""))) for name in ("name", "role", *models, "host")),
            Text(_state(node), style=STYLES.get(str(node["state"]), "red")),
            _age(node.get("uptime_s")),
            *(_level(gauges, name) for name in ("requests_waiting", "requests_running")),
            _full(node),
            str(node.get("process", {}).get("code", "")),
        )
    return table


def traffic(cluster: Cluster) -> Table:
    """Return where KV came from, how much was moved, which requests were refused, and how accurate predictions were."""
    table = Table.grid(padding=(0, 2))
    hits = cluster["hits"]["tokens"]
    whole = sum(hits.values())
    shares = "  ".join(f"{source} {100 * tokens / whole if whole else 0:.0f}%" for source, tokens in hits.items())
    table.add_row("prompt tokens", f"{whole:,.0f}: {shares}")
    misses = [f"{why} {count:,.0f}" for why, count in cluster["misses"].items() if count]
    table.add_row("misses", "  ".join(misses) or "none")
    flows = sorted(cluster["flows"], key=lambda flow: -flow["bytes"])[:6]
    moved = [f"{flow['from']} > {flow['to']} ({flow['kind']}) {_bytes(flow['bytes'])}" for flow in flows]
    table.add_row("KV moved", "\n".join(moved) or "none")
    requests = cluster["requests"]
    for what in ("finished", "rejected", "failed"):
        counted = [f"{name} {count:,}" for name, count in requests[what].items()]
        table.add_row(what, "  ".join(counted) or "none")
    for of, sums in cluster["predictions"].items():
        error_s, actual_s = sums["absolute_error_s"], sums["actual_s"]
        table.add_row(
            f"{of} predicted", f"{sums['predicted_s']:.3f} s, was {actual_s:.3f} s, off by {error_s:.3f} s on average"
        )
    return table


def _state(node: Mapping[str, Any]) -> str:
    left = node.get("left")
    return f"{node['state']}, {left:.0f} left" if left else str(node["state"])


def _full(node: Mapping[str, Any]) -> str:
    """Return how full each tier is."""
    tiers = {name: (tier["used_blocks"], tier["blocks"]) for name, tier in node.get("tiers", {}).items()}
    gauges = node.get("gauges", {})
    if "reserved_tokens" in gauges:
        tiers["kv"] = gauges["reserved_tokens"], gauges["capacity_tokens"]
    return "  ".join(f"{name} {100 * used / most:.0f}%" for name, (used, most) in tiers.items() if most)


def _level(gauges: Mapping[str, float], name: str) -> str:
    return f"{gauges[name]:.0f}" if name in gauges else ""


def _age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def request(found: Mapping[str, Any]) -> RenderableType:
    """Return one request: its result, its attempts, and where its time went."""
    cached = "/".join(f"{found[f'cached_{source}']:,}" for source in ("own", "local", "remote"))
    head = Text(f"{found['request_id']}: {found['outcome']} after {found['duration_s']:.3f} s")
    reused = f"{found['prompt_tokens']:,} prompt tokens, of them reused {cached} (own/local/remote)"
    attempts = [Text(f"  {_attempt(each)}") for each in found["attempts"]]
    table = Table(box=None, pad_edge=False)
    table.add_column("at s", justify="right")
    table.add_column("took s", justify="right")
    for name in ("what", "node", "attempt"):
        table.add_column(name)
    for span in found["spans"]:
        places = (f"{span['start_s']:.4f}", f"{span['duration_s']:.4f}", span["name"], span["node"], str(span["attempt"]))
        table.add_row(*(Text(place) for place in places))
    return Group(head, Text(f"{reused}; {found['completion_tokens']:,} made"), *attempts, table)


def _attempt(each: Mapping[str, Any]) -> str:
    nodes = f"{each['prefill'] or '-'} > {each['decode'] or '-'}"
    ttft = f"TTFT {_seconds(each['ttft_s'])}, predicted {_seconds(each['predicted_ttft_s'])}"
    tbt = f"TBT {_seconds(each['tbt_s'])}, predicted {_seconds(each['predicted_tbt_s'])}"
    met = (
        f"{each['computed_of_cached']:,} tokens computed while others were fetched; " if each.get("computed_of_cached") else ""
    )
    parts, again = each.get("cached_parts", 0), each.get("recomputed", 0)
    blended = f"{parts:,} tokens over KV of other prompts, {again:,} of them computed again; " if parts else ""
    return f"attempt {each['number']}: {nodes}; {met}{blended}{ttft}; {tbt}; ended: {each['why']}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
