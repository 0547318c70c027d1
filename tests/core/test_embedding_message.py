"""Vectors of texts fit a request for them if there is one of equal length for each, of the dimensions asked for."""

import struct

import pytest

from mooncake_zmq.core.messages import Embedding


@pytest.mark.parametrize(("dimensions", "floats", "has"), [(0, 4, True), (0, 3, False), (2, 4, True), (3, 4, False)])
def test_vectors_are_as_many_as_the_texts(dimensions: int, floats: int, has: bool) -> None:
    vectors = struct.pack(f"<{floats}f", *range(floats))
    assert Embedding((1, 5), dimensions).has(vectors) is has
    assert not Embedding((), dimensions).has(b"")
