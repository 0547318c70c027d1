"""The results of a run, as a table and as JSON."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mooncake_zmq.chaos.checks import JUDGED_S, growing
from mooncake_zmq.chaos.plan import Kind
from mooncake_zmq.chaos.run import Outcome, Wanted

EVENTS = 12
"""The number of kinds of warnings that the table names."""


def _rows(outcome: Outcome) -> Iterator[tuple[str, str, bool]]:
    """Return (what, how much, whether it may be so) for each row."""
    score = outcome.score
    kinds = Counter(entry.fault.kind.value for entry in outcome.done)
    yield "faults", f"{len(outcome.done)} of {len(kinds)} kinds", True
    yield "answers, every token compared", f"{score.answered:,}", score.answered > 0
    yield "tokens", f"{score.tokens:,}", True
    share = score.cached_tokens / score.prompt_tokens if score.prompt_tokens else 0.0
    yield "prompt tokens from the cache", f"{score.cached_tokens:,} of {score.prompt_tokens:,} ({share:.0%})", score.reuses
    yield "answers resumed by their gateway", f"{score.resumed:,}", True
    yield "streams cut by their gateway's end", f"{score.cut:,}", True
    yield "calls of a gateway that was away", f"{score.away:,}", True
    yield "refused (429, 503), asked again", f"{score.refused:,}", True
    for what in ("wrong", "lost", "duplicated"):
        yield f"{what} tokens", str(score.verdicts[what]), not score.verdicts[what]
    unsaid = score.verdicts["cut for no reason"] + score.verdicts["unanswered"]
    yield "cut for no reason, or never answered", str(unsaid), not unsaid
    yield "longest wait for a first token", f"{score.worst_first_token_s:.1f} s", True
    yield "longest pause, one outage at a time", _longest(outcome, several=False), True
    yield "longest pause, several at once", _longest(outcome, several=True), True
    if outcome.inputs:
        yield "spoilt inputs", f"{sum(outcome.inputs.values()):,} to {len(outcome.inputs)} sockets", True
    grew = {
        name: peak.rss_bytes - outcome.before[name].rss_bytes for name, peak in outcome.peaks.items() if name in outcome.before
    }
    if grew:
        most = max(grew, key=lambda name: grew[name])
        yield "MiB that a process grew by at its worst", f"{grew[most] / (1 << 20):.1f}, {most}", True
    if outcome.upgraded:
        yield "nodes replaced by the other release", str(outcome.upgraded.replaced), True
        half, whole = outcome.upgraded.spoken
        yield "conversations by protocol, half way and upgraded", f"{half} {whole}", True
    if outcome.strangers_refused:
        yield "strangers with keys, refused", f"{outcome.strangers_refused:,}", True
    before, after = (
        (sum(each.descriptors for each in found.values()), sum(each.rss_bytes for each in found.values()) / (1 << 20))
        for found in (outcome.before, outcome.after)
    )
    yield "open descriptors, before and after", f"{before[0]} {after[0]}", True
    yield "resident MiB, before and after", f"{before[1]:.0f} {after[1]:.0f}", True

    if growth := max(outcome.growths.items(), key=lambda each: each[1].bytes_per_h, default=None):
        name, seen = growth
        minutes, least = seen.observed_s / 60, JUDGED_S / 60
        worst = f"{seen.bytes_per_h / (1 << 20):+.1f}, {name}, over {minutes:.0f} minutes"
        if seen.observed_s < JUDGED_S:
            worst = f"{minutes:.0f} minutes are too short to judge: {least:.0f} are needed"
        yield "MiB an hour, of the node that grew most", worst, bool(outcome.inputs) or not list(growing(outcome.growths))


def _longest(outcome: Outcome, *, several: bool) -> str:
    score = outcome.score
    worst = (score.pauses_amid_several if several else score.pauses)[:1]
    return f"{worst[0].seconds:.2f} s" + (f", amid {'; '.join(worst[0].amid)}" if worst[0].amid else "") if worst else "-"


def print_report(outcome: Outcome, wanted: Wanted, console: Console) -> None:
    """Print the table, and what was wrong."""
    table = Table(title=f"chaos, seed {wanted.seed}, {outcome.took_s:.0f} s, {outcome.network}", title_justify="left", box=None)
    table.add_column("")
    table.add_column("", overflow="fold")
    for what, amount, good in _rows(outcome):
        table.add_row(what, f"[{'default' if good else 'red'}]{escape(amount)}[/]")
    score, counts = outcome.score, Counter(entry.fault.kind for entry in outcome.done)
    table.add_row("done", ", ".join(f"{kind.value} {counts[kind]}" for kind in Kind if counts[kind]))
    worst = sorted(score.worst_by_kind_s.items(), key=lambda each: -each[1])
    table.add_row("longest pause amid", ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in worst))
    table.add_row("warnings in logs", ", ".join(f"{event} {count}" for event, count in outcome.warnings.most_common(EVENTS)))
    if outcome.not_reached:
        table.add_row("not reached in time", str(outcome.not_reached))
    for kind, why in outcome.impossible.items():
        table.add_row(f"left out: {kind.value}", why)
    console.print(table)
    if outcome.problems:
        for entry in outcome.done:
            ended = f"{entry.ended_at - outcome.began_at:6.1f} s" if entry.ended_at < float("inf") else "never"
            console.out(f"  {entry.began_at - outcome.began_at:6.1f} s to {ended}  {entry.fault}  {entry.what}")
        for problem in outcome.problems:
            console.print(f"[red]{escape(problem)}[/]", soft_wrap=True)
        console.out(
            f"not clean: seed={wanted.seed} minutes={wanted.duration_s / 60:g} logs={outcome.directory}", highlight=False
        )
    else:
        console.print("[green]clean[/]: everything was answered, returned, closed and removed")


def as_json(outcome: Outcome, wanted: Wanted) -> dict[str, Any]:
    """Return the same as one JSON object."""
    score = outcome.score
    return {
        "seed": wanted.seed,
        "seconds": round(outcome.took_s, 1),
        "clean": not outcome.problems,
        "network": outcome.network,
        "client": outcome.api,
        "answered": score.answered,
        "tokens": score.tokens,
        "prompt_tokens": score.prompt_tokens,
        "cached_tokens": score.cached_tokens,
        "resumed": score.resumed,
        "refused": score.refused,
        "cut": score.cut,
        "away": score.away,
        "verdicts": dict(score.verdicts),
        "worst_first_token_s": round(score.worst_first_token_s, 3),
        "worst_pause_amid_s": {kind: round(seconds, 3) for kind, seconds in score.worst_by_kind_s.items()},
        "inputs": outcome.inputs,
        "upgraded": dataclasses.asdict(outcome.upgraded) if outcome.upgraded else None,
        "strangers_refused": outcome.strangers_refused,
        "pauses": [dataclasses.asdict(pause) | {"ended_at": pause.ended_at - outcome.began_at} for pause in score.pauses],
        "pauses_amid_several": [
            dataclasses.asdict(pause) | {"ended_at": pause.ended_at - outcome.began_at} for pause in score.pauses_amid_several
        ],
        "faults": [
            {
                "kind": entry.fault.kind.value,
                "targets": entry.fault.targets,
                "amount": entry.fault.amount,
                "began_s": round(entry.began_at - outcome.began_at, 2),
                "ended_s": round(entry.ended_at - outcome.began_at, 2) if entry.ended_at < float("inf") else None,
                "what": entry.what,
            }
            for entry in outcome.done
        ],
        "not_reached": outcome.not_reached,
        "warnings": dict(outcome.warnings),
        "impossible": {kind.value: why for kind, why in outcome.impossible.items()},
        "processes": {
            name: {
                "descriptors": [outcome.before[name].descriptors, peak.descriptors, outcome.after[name].descriptors],
                "rss_bytes": [outcome.before[name].rss_bytes, peak.rss_bytes, outcome.after[name].rss_bytes],
                "growth_bytes_per_h": round(outcome.growths[name].bytes_per_h),
                "growth_observed_s": round(outcome.growths[name].observed_s),
            }
            for name, peak in outcome.peaks.items()
            if name in outcome.before and name in outcome.after
        },
        "problems": outcome.problems,
        "directory": str(outcome.directory),
    }
