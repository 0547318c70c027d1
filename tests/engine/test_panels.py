"""Products with panels: the matrix product, for any sizes, by one thread or by a team."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.engine.matrices import panels
from mooncake_zmq.engine.matrices.panels import (
    PANEL_COLUMNS,
    column,
    linear,
    panel_count,
    rows_needed,
    shared_linear,
    to_panels,
)
from mooncake_zmq.engine.team import Team

TEAMS = {size: Team(size) for size in (1, 2, 3, 7)}


def product(multiply, weights, x, *, into):
    """x @ weights.T by panels; what chunks need beyond its rows is not a number."""
    rows = rows_needed(np, len(x), x.shape[1])
    padded = np.full((rows, x.shape[1]), np.nan, dtype=np.float32)
    padded[: len(x)] = x
    out = np.full((into, panel_count(len(weights)) * PANEL_COLUMNS), np.nan, dtype=np.float32)
    multiply(np, padded, to_panels(weights), out, len(x))
    return out[: len(x), : len(weights)]


@given(count=st.integers(1, 70), depth=st.integers(1, 300), outputs=st.integers(1, 700), team=st.sampled_from(sorted(TEAMS)))
def test_a_product_is_the_matrix_product_however_it_is_shared_out(count, depth, outputs, team):
    rng = np.random.default_rng(count + depth + outputs)
    weights, x = rng.standard_normal((outputs, depth), np.float32), rng.standard_normal((count, depth), np.float32)
    into = rows_needed(np, count, depth)
    np.testing.assert_allclose(product(linear, weights, x, into=into), x @ weights.T, rtol=1e-4, atol=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "SHARED_BYTES", 0)
        shared = product(lambda *rest: shared_linear(TEAMS[team], *rest), weights, x, into=into)
    np.testing.assert_array_equal(shared, product(linear, weights, x, into=into))


class Weight:
    """A number that notes in which thread it is multiplied with, and of which panel it is."""

    def __init__(self, panel, read):
        self.panel, self.read = panel, read

    def __rmul__(self, other):
        self.read.setdefault(threading.get_ident(), []).append(self.panel)
        return 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_panel_is_finished_before_the_next(monkeypatch, size):
    """It comes from memory once, and all further chunks of rows find it in the cache."""
    monkeypatch.setattr(panels, "SMALL_PRODUCT", 2 * PANEL_COLUMNS)
    monkeypatch.setattr(panels, "SHARED_BYTES", 0)
    count, total, read = 10, 6, {}
    assert panels.row_chunks(np, count, 1) == (5, 2)
    weights = np.array([[[Weight(panel, read)] * PANEL_COLUMNS] for panel in range(total)], dtype=object)
    out = np.zeros((count, total * PANEL_COLUMNS), dtype=object)
    shared_linear(TEAMS[size], np, np.ones((count, 1), dtype=object), weights, out, count)
    assert len(read) == size
    assert sum(map(len, read.values())) == count * total * PANEL_COLUMNS
    for order in read.values():
        met = [panel for panel, _ in itertools.groupby(order)]
        assert met == sorted(set(met)), "a panel was left and read again"


def test_only_a_product_worth_waking_a_thread_is_shared_out():
    ran = []

    class Watched(Team):
        def run(self, share):
            ran.append(True)
            super().run(share)

    team = Watched(2)
    for panel_total, expected in ((1, 0), (panels.SHARED_BYTES // (4 * PANEL_COLUMNS * 100) + 1, 1)):
        weights = np.zeros((panel_total * PANEL_COLUMNS, 100), np.float32)
        product(lambda *rest: shared_linear(team, *rest), weights, np.ones((1, 100), np.float32), into=2)
        assert len(ran) == expected


@given(rows=st.integers(1, 300), depth=st.integers(1, 40))
def test_a_column_of_the_panels_is_a_row_of_the_matrix(rows, depth):
    weights = np.arange(rows * depth, dtype=np.float32).reshape(rows, depth)
    np.testing.assert_array_equal(column(to_panels(weights), np.arange(rows)), weights)
