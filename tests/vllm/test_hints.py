"""What a request says of its KV: whatever came, it names stores and a count of tokens, or nothing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.vllm.hints import (
    COMING_TOKENS,
    MAX_NAME,
    MAX_SOURCES,
    MAX_TOKENS,
    NO_HINTS,
    SOURCES,
    Hints,
    as_parameters,
    read,
)


def test_what_is_told_is_read_on_the_other_side_of_http():
    for sources, coming in (((), 0), (("cache-a",), 0), ((), 300), (("cache-b", "cache-a"), 4096)):
        assert read(json.loads(json.dumps(as_parameters(sources, coming)))) == Hints(sources, coming)
    assert as_parameters((), 0) == {}


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        "mooncake_zmq.sources",
        {SOURCES: "cache-a"},
        {SOURCES: [1]},
        {SOURCES: [""]},
        {SOURCES: ["a" * (MAX_NAME + 1)]},
        {SOURCES: ["a"] * (MAX_SOURCES + 1)},
        {COMING_TOKENS: -1},
        {COMING_TOKENS: True},
        {COMING_TOKENS: 1.5},
        {COMING_TOKENS: MAX_TOKENS + 1},
        {COMING_TOKENS: "300"},
    ],
)
def test_what_is_not_as_it_should_be_says_nothing(odd: Any):
    assert read(odd) == NO_HINTS


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from((SOURCES, COMING_TOKENS)), inner),
    max_leaves=8,
)


@given(anything)
def test_nothing_that_comes_ends_it(odd: Any):
    hints = read(odd)
    assert len(hints.sources) <= MAX_SOURCES
    assert 0 <= hints.coming_tokens <= MAX_TOKENS
