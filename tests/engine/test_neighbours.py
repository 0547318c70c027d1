"""Neighbours of tokens: those whose embeddings are alike, about where they are expected, and none where nothing is."""

import numpy as np
import pytest

from mooncake_zmq.engine.neighbours import WITHIN, Neighbours


class Planted:
    """An engine of 300 tokens, of which 2n and 2n + 1 are nearly the same."""

    class spec:  # noqa: N801
        vocab_size, hidden = 300, 64

    def __init__(self):
        rng = np.random.default_rng(2)
        pairs = rng.standard_normal((150, 64)).repeat(2, axis=0)
        self.table = (pairs + 0.2 * rng.standard_normal((300, 64))).astype(np.float32)

    def embed(self, tokens):
        return self.table[tokens]


@pytest.fixture(scope="module")
def neighbours():
    return Neighbours(Planted())


REFERENCE = np.arange(0, 200, 2, dtype=np.int32)
NONE = np.full(100, -1, np.int64)


def test_a_replaced_token_has_its_neighbour(neighbours):
    tokens, source = REFERENCE.copy(), np.arange(100)
    tokens[40] += 1
    tokens[41] = 281
    source[40:42] = -1
    expected = np.arange(100)
    expected[41] = -1
    assert neighbours.paired(REFERENCE, tokens, source).tolist() == expected.tolist()


@pytest.mark.parametrize(("away", "is_found"), [(WITHIN, True), (-WITHIN, True), (WITHIN + 1, False), (-WITHIN - 1, False)])
def test_a_neighbour_is_searched_about_its_place(neighbours, away, is_found):
    tokens, source = REFERENCE.copy(), np.arange(100)
    tokens[40], source[40] = REFERENCE[40 + away] + 1, -1
    assert neighbours.paired(REFERENCE, tokens, source)[40] == (40 + away if is_found else -1)


def test_without_an_equal_token_nothing_is_paired(neighbours):
    assert neighbours.paired(REFERENCE, REFERENCE + 1, NONE).tolist() == NONE.tolist()
