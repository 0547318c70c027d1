"""What one tenant's floods cost another tenant, by the live conductor, prefills and decodes in virtual time: no machine's load
takes part in it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random

import numpy as np
import pytest

from mooncake_zmq.laboratory.profiles import A800
from mooncake_zmq.laboratory.replay import run
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival, RequestRecord, Setup

BOB, ALICE = "bob", "alice"
SETUP = Setup(prefill=1, decode=1, hardware=A800)
LAST_S = 40.0
FLOODS = {
    "long prompts": (2.0, 24_000, 20),
    "many short requests": (80.0, 400, 20),
    "long answers": (8.0, 400, 600),
}
"""Requests a second, and the tokens of prompt and answer."""


def requests(tenant: str, rate: float, prompt: int, answer: int, seed: int, numbers: Iterator[int]) -> Iterator[Arrival]:
    random, at_s = Random(seed), 5.0
    while (at_s := at_s + random.expovariate(rate)) < LAST_S:
        tokens = random.randint(prompt // 2, prompt + prompt // 2)
        blocks = tuple(next(numbers) for _ in range(-(-tokens // TRACE_BLOCK_TOKENS)))
        yield Arrival(at_s, tokens, random.randint(answer // 2, answer + answer // 2), blocks, tenant)


def bobs(flood: str = "", *, named: bool = True, **setup: str) -> list[RequestRecord]:
    """The records of bob's requests, beside a flood of alice's or alone; unless `named`, neither tells its tenant."""
    numbers = count()
    arrivals = list(requests(BOB, 1.0, 1_000, 60, 1, numbers))
    if flood:
        arrivals += requests(ALICE, *FLOODS[flood], 2, numbers)
    arrivals.sort(key=lambda arrival: arrival.at_s)
    sent = arrivals if named else [replace(arrival, tenant="") for arrival in arrivals]
    records = run(replace(SETUP, **setup), sent).requests
    return [record for arrival, record in zip(arrivals, records, strict=True) if arrival.tenant == BOB]


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


def first_token_s(records: list[RequestRecord]) -> float:
    return p99([record.ttft_s for record in records if record.outcome == "finished"])


def refused(records: list[RequestRecord]) -> float:
    return sum(record.outcome != "finished" for record in records) / len(records)


LONGEST_CHUNK_S = A800.costs.compute_s(36_000, 36_000 - 2_048)
"""The chunk that no turn interrupts."""


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_refuses_no_request_of_another_tenant_and_delays_it_by_turns_alone(flood: str) -> None:
    alone, beside = bobs(), bobs(flood)
    assert refused(beside) == 0.0
    assert first_token_s(beside) <= 2 * first_token_s(alone) + 2 * LONGEST_CHUNK_S


@pytest.mark.parametrize("flood", ["long prompts", "many short requests"])
def test_first_come_first_served_would_make_the_other_tenant_wait_for_the_whole_flood(flood: str) -> None:
    beside = bobs(flood, named=False)
    assert refused(beside) > 0.1 or first_token_s(beside) > 2 * first_token_s(bobs()) + 2 * LONGEST_CHUNK_S


def test_a_flood_that_meets_the_slos_leaves_another_tenant_within_them() -> None:
    for flood in FLOODS:
        beside = bobs(flood, admission="prediction")
        assert refused(beside) <= 0.05, flood
        assert p99([record.tbt_s for record in beside if record.outcome == "finished"]) <= 1.1 * SETUP.tbt_slo_s, flood
