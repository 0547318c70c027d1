"""The cluster as one gateway sees it: the reports of its nodes in one snapshot, and everything that is degraded. PURE.

The module keeps no state: functions take the reports and return JSON-able records.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Hello, Report
from mooncake_zmq.core.watch import STALE_S, PeerReport
from mooncake_zmq.gateway.requests.history import Step, failures, numbers, of, refusals
from mooncake_zmq.gateway.requests.slowness import Slow, lasts, sentence, slow

MAX_REASONS = 256
"""Limit on the degradations in a snapshot; of more, the first are shown."""
TIERS = {
    "prefill": {"slab": ("cached_blocks", "capacity_blocks")},
    "cache-node": {"dram": ("cached_blocks", "capacity_blocks"), "ssd": ("cached_disk_blocks", "capacity_disk_blocks")},
}
"""Tiers of blocks by role, each with the gauges of its used and its total blocks."""
LEFT = {
    "gateway": ("edge_slots_taken",),
    "conductor": ("bookings",),
    "prefill": ("requests_waiting", "requests_running", "stages"),
    "decode": ("requests_waiting", "requests_running", "requests_closing"),
    "vllm": ("requests_waiting", "requests_running", "requests_closing"),
    "cache-node": ("leases", "pending_leases", "writing_blocks", "demoting_blocks"),
}
"""Gauges, by role, of the work that a draining node has left."""
REASONS = (
    *("conductor_down", "prefill_down", "decode_down", "cache_node_down", "vllm_down", "gateway_down"),
    *("disk_not_written", "disk_not_read", "engine_gone", "keys_not_followed", "model_differs", "other_differs"),
)
"""All reasons of a degradation: metrics show each of them, at zero if it does not apply."""
ACTIONS = {
    "disk": "df and dmesg on {host}; the SSD is tried again by itself",
    "engine": "the log of the vLLM server on {host}",
    "keys": "copy public_keys to {host} again",
    "model": "install the same release, model and settings on both hosts, then restart {node}",
    "other": "install the same release, model and settings on both hosts, then restart {node}",
}
"""Actions against a degradation, by the first word of its reason; against a node that is down: `START`."""
START = "on {host}: systemctl start mooncake-{role}@{node}; its log says why it ended"
MISS_REASONS = (
    *("never_stored", "evicted", "behind_another", "source_lacks", "slower_than_computing", "no_room", "too_late"),
    *("fetch_failed", "corrupt", "disk_failed", "denied", "computed_meanwhile"),
)
MISSES = {
    **{why: (f"lookup_misses[reason={why}]",) for why in MISS_REASONS},
    "not_read": ("prefix_blocks_unreached",),
    "damaged_when_read": ("prefix_blocks_corrupt",),
    "held_elsewhere": ("recomputed_blocks[reason=held]",),
    "was_coming": ("recomputed_blocks[reason=coming]",),
}
"""Reasons why reusable blocks were computed again, with their counters: blocks missing from a lease, blocks leased and then not
read, and, at the end, blocks that a conductor chose not to move."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A node of the configuration. `model`: the one of several models that it is for; empty: all."""

    name: str
    role: str
    host: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Degraded:
    """A degradation: something is wrong with a node, but requests are served."""

    reason: str
    node: str
    text: str
    since_s: float | None = None
    """Seconds since it was first noted."""
    action: str = ""
    """Action of the operator, with the row of the alarms in docs/operating.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that a gateway knows. `last_reports`: the last reports of its peers and its own, by name."""

    now: float
    gateway: str
    status: str
    """Status that /health shows."""
    model: str
    listed: Sequence[Listed]
    peers: Mapping[str, Hello]
    refusals: Mapping[str, str] = field(default_factory=dict)
    departed: Sequence[str] = ()
    """Nodes that ended in order and have not come back."""
    last_reports: Mapping[str, PeerReport] = field(default_factory=dict)
    since: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Times at which degradations were first noted, by reason and node."""
    steps: Sequence[Step] = ()
    """The last five minutes of all gateways, the oldest step first."""

    def report(self, name: str) -> Report | None:
        """Return the recent report of a node; None if the node is down or has not reported."""
        received = self.last_reports.get(name)
        there = name in self.peers or name == self.gateway
        return received.report if received is not None and there and self.now - received.at <= STALE_S else None

    def reports(self, *roles: str) -> list[Report]:
        """Return the reports of the nodes that have one of these roles now."""
        of_role = [node.name for node in self.listed if self.role_of(node) in roles]
        return [report for name in of_role if (report := self.report(name)) is not None]

    def role_of(self, node: Listed) -> str:
        """Return the present role of a node, or the configured one if it is down."""
        return self.peers[node.name].role if node.name in self.peers else node.role


def degraded(seen: Seen) -> list[Degraded]:
    """Return everything that is degraded, in the order of the configuration."""
    found = [_explained(seen, node, each) for node in seen.listed for each in _degraded(seen, node)]
    return found[:MAX_REASONS]


def _explained(seen: Seen, node: Listed, each: Degraded) -> Degraded:
    """Return the degradation with what to do, and since when it has been known."""
    first_at = seen.since.get((each.reason, each.node))
    action = ACTIONS.get(each.reason.partition("_")[0], START).format(host=node.host, node=node.name, role=seen.role_of(node))
    where = f"{action} (docs/operating.md, Alarms: {each.reason})"
    return replace(each, since_s=None if first_at is None else round(seen.now - first_at, 1), action=where)


def by_reason(found: Sequence[Degraded]) -> dict[str, float]:
    """Return a gauge for each reason, the number of nodes that it applies to, and one for each of these nodes."""
    counted = Counter(each.reason for each in found)
    nodes = {f"degraded_nodes[node={each.node},reason={each.reason}]": 1.0 for each in found}
    return {f"degraded[reason={reason}]": counted[reason] for reason in REASONS} | nodes


def _degraded(seen: Seen, node: Listed) -> Iterator[Degraded]:
    name = node.name
    if name != seen.gateway and name not in seen.peers:
        refusal = seen.refusals.get(name)
        yield _down(seen, node) if refusal is None else Degraded(_kind_of(refusal), name, refusal)
        return
    report = seen.report(name)
    if report is None:
        return
    gauges = dict(report.gauges)
    if gauges.get("disk_degraded[what=reads]"):
        yield Degraded("disk_not_read", name, f"the SSD of {name} fails: it is left alone")
    elif gauges.get("disk_degraded[what=writes]"):
        yield Degraded("disk_not_written", name, f"the SSD of {name} is full or fails: it is read, and not written")
    if not gauges.get("store_ssd_writable", 1):
        yield Degraded("disk_not_written", name, f"the SSD of {name}'s store is full or fails: it is not written")
    if gauges.get("keys_not_followed"):
        yield Degraded("keys_not_followed", name, f"{name} cannot follow its file public_keys: it accepts no new connections")
    if seen.role_of(node) == "vllm" and not gauges.get("capacity_engines", 1):
        yield Degraded("engine_gone", name, f"the vLLM beside {name} does not answer")
    for peer, refusal in report.refused:
        yield Degraded(_kind_of(refusal), name, f"{name} refuses {peer}: {refusal}")


def _down(seen: Seen, node: Listed) -> Degraded:
    reason = f"{node.role.replace('-', '_')}_down"
    same = [each for each in seen.listed if (each.role, each.model) == (node.role, node.model)]
    others = [each.name for each in same if each.name in seen.peers]
    alone = f": {others[0]} is alone" if node.role == "conductor" and len(others) == 1 else ""
    if node.model and not others:
        alone = f": {node.model} is not served"
    gone = "was stopped and is not back" if node.name in seen.departed else "does not answer"
    return Degraded(reason, node.name, f"{node.name} ({node.role} on {node.host}) {gone}{alone}")


def _kind_of(refusal: str) -> str:
    what = refusal.partition(" ")[0]
    return "model_differs" if what == "model" else "other_differs"


def verdict(status: str, found: Sequence[Degraded], cordoned: Sequence[str] = (), bad: Sequence[Slow] = ()) -> str:
    """Return the state of the cluster in one sentence. `cordoned`: texts on the nodes that an operator cordoned; `bad`: the
    numbers that are worse than they should be."""
    if status == "draining":
        return "This gateway takes no new calls: it is draining."
    also = f"; {_first(cordoned)}" if cordoned else ""
    if status != "ok":
        return f"The cluster does not serve: it is {status}{also}."
    worse = [*(f"{each.text}{_since(each)}" for each in found), *map(sentence, bad)]
    return f"It serves, but {_first(worse)}{also}." if worse else f"All is well{also}."


def _since(each: Degraded) -> str:
    return "" if each.since_s is None else f", {lasts(each.since_s)}"


def _first(texts: Sequence[str]) -> str:
    return f"{texts[0]}, and {len(texts) - 1} more" if len(texts) > 1 else texts[0]


def snapshot(seen: Seen) -> dict[str, Any]:
    """Return the snapshot for operators: nodes, tiers, transfers of KV, hits and misses, rejections, errors of predictions."""
    found, bad = degraded(seen), slow(seen.steps)
    gateways = _sum(seen.reports("gateway"))
    engines = _sum(seen.reports("prefill", "vllm"))
    pools = _sum(seen.reports("cache-node"))
    counted = engines + pools + _sum(seen.reports("conductor"))
    nodes = [node_record(seen, node, found) for node in seen.listed]
    cordoned = [f"{node['name']} is {node['state']}" for node in nodes if node["state"] in ("draining", "drained")]
    return {
        "gateway": seen.gateway,
        "model": seen.model,
        "status": "degraded" if seen.status == "ok" and found else seen.status,
        "verdict": verdict(seen.status, found, cordoned, bad),
        "degraded": [asdict(each) for each in found],
        "slow": [asdict(each) for each in bad],
        "numbers": numbers(seen.steps),
        "nodes": nodes,
        "tiers": _tiers(seen),
        "flows": _flows(seen),
        "hits": {
            "tokens": {
                **{source: engines[f"prompt_tokens_cached[source={source}]"] for source in ("own", "local", "remote")},
                "computed": engines["prompt_tokens_computed"] + engines["stage_tokens_computed"],
            },
            "blocks": {result: pools[f"lookup_blocks[result={result}]"] for result in ("local", "disk", "remote", "miss")},
        },
        "misses": {why: sum(counted[name] for name in names) for why, names in MISSES.items()},
        "requests": {
            "finished": of(gateways, "requests_finished"),
            "failed": failures(gateways),
            "rejected": refusals(gateways),
            "cancelled": gateways["requests_cancelled"],
            "attempts_retried": gateways["attempts_retried"],
        },
        "predictions": {what: prediction(gateways, what) for what in ("ttft", "tbt")},
    }


def node_record(seen: Seen, node: Listed, found: Sequence[Degraded] = ()) -> dict[str, Any]:
    """Return the state of one node, with the reasons of `found` that apply to it."""
    report, received = seen.report(node.name), seen.last_reports.get(node.name)
    there = node.name in seen.peers or node.name == seen.gateway
    mine = [each.reason for each in found if each.node == node.name]
    role, draining = seen.role_of(node), report is not None and report.draining
    gauges = dict(report.gauges) if report is not None else {}
    left = sum(gauges.get(name, 0) for name in LEFT.get(role, ()))
    done = draining and report is not None and report.cordoned and not left
    refused = node.name in seen.refusals
    state = (
        "refused"
        if refused
        else "down"
        if not there
        else "drained"
        if done
        else "draining"
        if draining
        else "degraded"
        if mine
        else "ready"
    )
    known: dict[str, Any] = {
        "name": node.name,
        "role": role,
        "host": node.host,
        "model": node.model,
        "protocol": seen.peers[node.name].protocol if node.name in seen.peers else PROTOCOL_VERSION if there else None,
        "state": state,
        "degraded": mine,
    }
    if report is None or received is None:
        return known
    return known | {
        "incarnation": received.incarnation,
        "uptime_s": report.uptime_s,
        "age_s": round(seen.now - received.at, 3),
        "cordoned": report.cordoned,
        "left": left if draining else None,
        "gauges": gauges,
        "process": _process(dict(report.counts), gauges),
        "moved": [{"kind": moved.kind, "peer": moved.peer, "bytes": moved.bytes} for moved in report.moved],
        "tiers": _tiers_of(role, gauges),
    }


def _process(counts: Mapping[str, float], gauges: Mapping[str, float]) -> dict[str, Any]:
    """Return what a node's process uses and runs, as far as it reports that."""
    labels = next((name.partition("[")[2][:-1] for name in gauges if name.startswith("release[")), "")
    about = dict(pair.split("=", 1) for pair in labels.split(",") if pair)
    return {
        "cpu_s": counts.get("process_cpu_seconds"),
        "resident_bytes": gauges.get("process_resident_bytes"),
        "release": about.get("version", ""),
        "code": about.get("code", ""),
    }


def _tiers_of(role: str, gauges: Mapping[str, float]) -> dict[str, dict[str, float]]:
    of_role = TIERS.get(role, {}).items()
    return {tier: {"used_blocks": gauges.get(used, 0), "blocks": gauges.get(most, 0)} for tier, (used, most) in of_role}


def _tiers(seen: Seen) -> dict[str, dict[str, float]]:
    whole: dict[str, dict[str, float]] = {}
    for role in TIERS:
        for report in seen.reports(role):
            for tier, levels in _tiers_of(role, dict(report.gauges)).items():
                total = whole.setdefault(tier, {"used_blocks": 0, "blocks": 0})
                whole[tier] = {name: total[name] + level for name, level in levels.items()}
    return whole


def _flows(seen: Seen) -> list[dict[str, Any]]:
    """Return the bytes of KV moved between nodes since the moving node started, without its own SSD and slab."""
    flows: list[dict[str, Any]] = []
    for node in seen.listed:
        report = seen.report(node.name)
        for moved in report.moved if report is not None else ():
            if moved.peer and moved.peer != node.name:
                ends = (node.name, moved.peer) if moved.kind == "put" else (moved.peer, node.name)
                flows.append({"from": ends[0], "to": ends[1], "kind": moved.kind, "bytes": moved.bytes})
    return flows


def _sum(reports: Sequence[Report]) -> Counter[str]:
    total: Counter[str] = Counter()
    for report in reports:
        for name, value in report.counts:
            total[name] += int(value)
    return total


def count_prediction(counts: Tally, of: str, actual_s: float, predicted_s: float) -> None:
    """Count a prediction and the actual value, in whole microseconds."""
    counts.add(f"predictions[of={of}]")
    counts.add(f"predicted_microseconds[of={of}]", round(predicted_s * 1e6))
    counts.add(f"actual_microseconds[of={of}]", round(actual_s * 1e6))
    counts.add(f"prediction_error_microseconds[of={of}]", round(abs(predicted_s - actual_s) * 1e6))


def prediction(counts: Mapping[str, int], of: str) -> dict[str, float]:
    """Return the means of prediction, actual value and absolute error, in seconds."""
    made = counts.get(f"predictions[of={of}]", 0)
    each = 1e-6 / max(1, made)
    return {
        "count": made,
        "actual_s": each * counts.get(f"actual_microseconds[of={of}]", 0),
        "predicted_s": each * counts.get(f"predicted_microseconds[of={of}]", 0),
        "absolute_error_s": each * counts.get(f"prediction_error_microseconds[of={of}]", 0),
    }
