"""`bench overload`: the load it makes, and what it makes of what its clients saw."""

from array import array

import click
import numpy as np
import pytest

from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.overload import (
    Load,
    as_report,
    draw_arrivals,
    draw_lengths,
    modelled_costs,
    predictions_of,
    requests,
)
from mooncake_zmq.config.examples import MODELLED, TOY, located
from mooncake_zmq.config.load import load
from mooncake_zmq.core.hardware import HARDWARE

WANTED = Load(multiple=3, duration_s=1000, prompt_tokens=8192, output_tokens=3, seed=1)
CONFIG = load(located(MODELLED)).config


def test_it_takes_the_costs_of_the_clusters_own_engines() -> None:
    hardware = HARDWARE["a800-llama3-70b"]
    assert modelled_costs(CONFIG).compute_s(8192, 0) == hardware.compute_s(8192, 0)
    with pytest.raises(click.ClickException, match="modelled:PROFILE"):
        modelled_costs(load(located(TOY)).config)


def test_the_load_is_the_multiple_that_was_asked_for() -> None:
    arrivals = draw_arrivals(WANTED, 2.0)
    assert len(arrivals) == pytest.approx(6000, rel=0.05)
    assert arrivals == sorted(arrivals)
    assert arrivals == draw_arrivals(WANTED, 2.0)
    lengths = draw_lengths(WANTED, 32_000)
    assert lengths.mean() == pytest.approx(8192, rel=0.1)
    assert np.quantile(lengths, 0.99) > 4 * np.median(lengths)
    asked = requests(arrivals, lengths, WANTED)
    assert [(each.at_s, each.input_tokens) for each in asked[:4096]] == list(zip(arrivals, lengths.tolist(), strict=False))
    assert all(512 * (len(each.hash_ids) - 1) < each.input_tokens <= 512 * len(each.hash_ids) for each in asked)
    assert len({hash_id for each in asked for hash_id in each.hash_ids}) == sum(len(each.hash_ids) for each in asked)


def seen(ttft_s: float, gap_s: float, *, tokens: int = 3) -> Seen:
    times = array("d", [ttft_s + index * gap_s for index in range(tokens)])
    return Seen(status=200, answered_s=ttft_s, token_s=times, input_tokens=8192, output_tokens=3, finished=True)


def rows(clients: list[Seen], predictions: dict[str, float] | None = None) -> dict[str, float]:
    report = as_report(clients, CONFIG, WANTED, modelled_costs(CONFIG), 2.0, predictions or {})
    return {row.name: row.value for row in report.rows}


def test_who_came_late_or_slowly_or_not_to_the_end_was_not_served_in_its_slo() -> None:
    good, late, slow, cut = seen(1, 0.1), seen(5.1, 0.1), seen(1, 0.3), seen(1, 0.1, tokens=2)
    refused = [Seen(status=429, answered_s=0.01, retry_after="2"), Seen(status=429, answered_s=0.03)]
    found = rows([good, late, slow, cut, *refused])
    assert found["admitted"] == pytest.approx(4 / 6)
    assert found["of these, to their end"] == 0.75
    assert found["of these, in both SLOs"] == 0.25
    assert found["prefill time for these"] == pytest.approx(modelled_costs(CONFIG).compute_s(8192, 0) / (4 * 1005))
    assert found["refused after, p50"] == pytest.approx(20)
    assert found["refused with Retry-After"] == 0.5
    assert "TTFT predicted off by" not in found


def test_the_gateways_books_give_the_prediction_error() -> None:
    found = rows([seen(1, 0.1)], {"count": 4, "actual_s": 2.0, "error_s": 0.5})
    assert found["TTFT predicted off by"] == 0.25
    assert "refused after, p50" not in found


def test_a_refusal_is_no_error_and_what_broke_is_told() -> None:
    clients = [Seen(status=429, error="HTTP 429 slo", said="full"), Seen(error="connection", said="it was closed")]
    notes = as_report(clients, CONFIG, WANTED, modelled_costs(CONFIG), 2.0, {}).notes
    assert [note for note in notes if note.startswith("error: ")] == ["error: connection it was closed"]


@pytest.mark.parametrize(("late_s", "told"), [(0.001, False), (0.5, True)])
def test_it_says_when_the_machine_had_no_core_left(late_s: float, told: bool) -> None:
    client = seen(1, 0.1)
    client.late_s = late_s
    notes = as_report([client], CONFIG, WANTED, modelled_costs(CONFIG), 2.0, {}).notes
    assert any("cores were all taken" in note for note in notes) == told


class _Dumped:
    """A cluster of which only the dumps are known."""

    def __init__(self, *actors: dict[str, object]) -> None:
        self._actors = actors

    def dumps(self, nodes: list[str]) -> dict[str, dict[str, object]]:
        return {f"gateway-{number}": {"actor": actor} for number, actor in enumerate(self._actors)}


def test_errors_of_several_gateways_count_by_their_requests() -> None:
    books = [{"count": 3, "actual_s": 2.0, "absolute_error_s": 0.2}, {"count": 1, "actual_s": 4.0, "absolute_error_s": 1.0}]
    cluster = _Dumped(*({"predictions": {"ttft": book}} for book in books), {"gauges": {}})
    assert predictions_of(cluster, CONFIG) == {"count": 4, "actual_s": 2.5, "error_s": pytest.approx(0.4)}  # type: ignore[arg-type]
    assert predictions_of(_Dumped({"gauges": {}}), CONFIG) == {}  # type: ignore[arg-type]
