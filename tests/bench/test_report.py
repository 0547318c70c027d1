"""The one shape of every benchmark's result."""

import json

import pytest

from mooncake_zmq.bench.memory import Footprint
from mooncake_zmq.bench.report import Report, Row


def report() -> Report:
    faster = Row(name="latency", unit="ms", value=50.0, reference=100.0, higher=False)
    slower = Row(name="rate", unit="tokens/s", value=9.0, reference=10.0, higher=True)
    taken = Footprint(name="engine", peak_bytes=3 << 30, private_bytes=1 << 30, file_bytes=2 << 20, shared_bytes=0)
    return Report("test", [faster, slower], memory=[taken], notes=["both [sides] rested"])


def test_a_ratio_above_one_is_better_whichever_way_the_unit_points():
    assert [row.ratio for row in report().rows] == pytest.approx([2.0, 0.9])


@pytest.mark.parametrize(
    ("value", "reference", "ratio"),
    [(-2.0, -0.5, float("inf")), (-2.0, 2.0, float("inf")), (2.0, -0.5, 0.0), (0.0, 2.0, float("inf"))],
)
def test_a_difference_below_nothing_is_never_worse_than_one_above(value: float, reference: float, ratio: float):
    assert Row(name="added", unit="ms", value=value, reference=reference, higher=False).ratio == ratio


def test_json_is_one_object_of_the_stated_shape(capsys):
    report().show(as_json=True, plot=None)
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["bench", "commit", "machine", "rows", "memory", "notes"]
    assert [list(row) for row in shown["rows"]] == [["name", "unit", "value", "reference", "ratio"]] * 2
    assert [(each["name"], each["peak_bytes"]) for each in shown["memory"]] == [("engine", 3 << 30)]
    assert shown["notes"] == ["both [sides] rested"]


def test_the_table_shows_every_row_in_full(capsys):
    report().show(as_json=False, plot=None)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("latency", "rate", "2.000", "0.900", "3,072", "both [sides] rested"))


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    report().show(as_json=True, plot=tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")
