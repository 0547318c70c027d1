"""What a vLLM's answers say, whatever else is in them."""

import json
from typing import Any

import pytest

from mooncake_zmq.runtime.vllm_answers import Model, models_in


@pytest.mark.parametrize("odd", [{"max_model_len": "4096"}, {"root": ["a"]}, {"parent": {}}, {"max_model_len": None}])
def test_an_odd_field_of_a_listed_model_hides_neither_it_nor_the_others(odd: dict[str, Any]) -> None:
    listed = [{"id": "m", "max_model_len": 8}, {"id": "a", "root": "/a", "parent": "m"} | odd, {"id": 7}]
    found = models_in(200, json.dumps({"data": listed}).encode())
    expected = Model("a", **{"root": "/a", "parent": "m"} | {name: None for name in odd})  # type: ignore[arg-type]
    assert found == [Model("m", max_model_len=8), expected]


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"data": 7}', b'{"data": ["m"]}', b'{"data": [{}]}'])
def test_an_answer_that_is_no_list_of_models_says_so(raw: bytes) -> None:
    assert models_in(200, raw) is None
