"""A replay's figures and plots as one HTML file, static and whole in itself: no script, nothing from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mooncake_zmq.bench.client_report import Result, lines, open_over_time
from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.report import commit, machine

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 260, 56, 36, 10
POINTS = 400
"""Of a line, and at most of a cloud's several."""
CLOUD = 4000
TICKS = 5
STYLE = """body{font:15px/1.4 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse}td{padding:.15rem .8rem;border-bottom:1px solid #8884}td:last-child{text-align:right;
font-variant-numeric:tabular-nums}svg{width:100%;height:auto}svg text{font-size:12px;fill:currentColor}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(22rem,1fr));gap:1.5rem;margin:1.5rem 0}
figure{margin:0}figcaption{font-weight:600}@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}}"""
COLOURS = ("#4477aa", "#ee6677", "#228833")


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a plot, joined or as dots."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def page(result: Result, seen: Sequence[Seen]) -> str:
    """The whole document."""
    rows = "".join(f"<tr><td>{escape(what)}</td><td>{escape(value)}</td></tr>" for what, value in lines(result))
    said = "".join(f"<li>{escape(kind)}: {escape(text)}</li>" for kind, text in result.examples.items())
    title = f"{escape(result.url)}, {escape(result.model)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>bench client: {title}</title><style>{STYLE}</style><h1>bench client: {title}</h1>"
        f"<p>{escape(commit())}, {escape(machine())}</p><table>{rows}</table>{said and f'<ul>{said}</ul>'}"
        f'<div class="plots">{"".join(_plots(seen))}</div></html>'
    )


def _plots(seen: Sequence[Seen]) -> list[str]:
    started = [each for each in seen if each.token_s]
    finished = [each for each in seen if each.outcome == "finished"]
    open_streams = [(at_s, float(count)) for at_s, count in open_over_time(seen)]
    over_time = [(each.due_s, each.ttft_s) for each in started]
    ended = [(each.due_s, each.ended_s) for each in finished]
    gaps = np.concatenate([np.diff(each.token_s) for each in started]) if started else np.zeros(0)
    return [
        _plot("TTFT, s", "share of all requests", [Curve("TTFT", _shares([each.ttft_s for each in started], len(seen)))]),
        _plot(
            "ms",
            "share",
            [
                Curve("gaps between tokens", _shares((1000 * gaps).tolist(), len(gaps))),
                Curve("TPOT", _shares([1000 * each.tpot_s for each in finished if each.tpot_s], len(finished))),
            ],
        ),
        _plot("when it was due, s", "s", [Curve("E2E", ended, dots=True), Curve("TTFT", over_time, dots=True)]),
        _plot("time, s", "streams open", [Curve("open", open_streams)]),
        _plot("time, s", "tokens/s", [Curve("tokens/s", _tokens_over_time(started))]),
    ]


def _shares(values: Sequence[float], of: int) -> list[tuple[float, float]]:
    """How many of `of` are at most so large."""
    if not values:
        return []
    shares = np.linspace(0, 1, min(POINTS, max(2, len(values))))
    return [(float(x), float(y) * len(values) / max(1, of)) for x, y in zip(np.quantile(values, shares), shares, strict=True)]


def _tokens_over_time(started: Sequence[Seen]) -> list[tuple[float, float]]:
    if not started:
        return []
    times = np.concatenate([np.asarray(each.token_s) + each.due_s + each.held_s + each.late_s for each in started])
    counts, edges = np.histogram(times, bins=min(POINTS, 100))
    width_s = float(edges[1] - edges[0])
    return [(float(edge), float(count) / width_s) for edge, count in zip(edges, counts, strict=False)]


def _plot(x_name: str, y_name: str, curves: Sequence[Curve]) -> str:
    drawn = [each for each in curves if each.points]
    points = [point for each in drawn for point in each.points]
    most_x, most_y = (max((point[axis] for point in points), default=1.0) or 1.0 for axis in (0, 1))
    parts = [_axes(x_name, y_name, most_x, most_y)]
    for number, curve in enumerate(drawn):
        parts.append(_curve(curve, COLOURS[number % len(COLOURS)], most_x, most_y))
        parts.append(_text(WIDTH - 8, TOP + 14 * (number + 1), curve.name, "end", COLOURS[number % len(COLOURS)]))
    label = f"{y_name} over {x_name}"
    return (
        f"<figure><figcaption>{escape(label)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></figure>'
    )


def _axes(x_name: str, y_name: str, most_x: float, most_y: float) -> str:
    floor = HEIGHT - BOTTOM
    parts = [f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH}" fill="none" stroke="currentColor"/>']
    for tick in range(TICKS + 1):
        x, y = _place(most_x * tick / TICKS, most_y * tick / TICKS, most_x, most_y)
        parts.append(_text(x, floor + 15, f"{most_x * tick / TICKS:.3g}", "middle" if tick < TICKS else "end"))
        parts.append(_text(LEFT - 5, y + 4, f"{most_y * tick / TICKS:.3g}", "end"))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="#8883"/>')
    return "".join(parts) + _text((LEFT + WIDTH) / 2, HEIGHT - 4, x_name, "middle")


def _curve(curve: Curve, colour: str, most_x: float, most_y: float) -> str:
    step = max(1, len(curve.points) // (CLOUD if curve.dots else POINTS))
    places = [_place(x, y, most_x, most_y) for x, y in curve.points[::step]]
    if curve.dots:
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" fill="{colour}" opacity=".6"/>' for x, y in places)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _place(x: float, y: float, most_x: float, most_y: float) -> tuple[float, float]:
    floor = HEIGHT - BOTTOM
    return LEFT + x / most_x * (WIDTH - LEFT - 8), floor - y / most_y * (floor - TOP)


def _text(x: float, y: float, said: str, anchor: str, colour: str = "") -> str:
    style = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(said)}</text>'
