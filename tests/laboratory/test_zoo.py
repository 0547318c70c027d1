"""The zoo of workloads: what every kind keeps, and the reuse that each one promises."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.laboratory import zoo
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.jobs import Source, load
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival


def made(text: str) -> list[Arrival]:
    return zoo.arrivals_of(zoo.parse_workload(text))


def shared(one: Arrival, other: Arrival) -> int:
    """Leading tokens that both have as complete blocks."""
    complete = min(one.input_tokens, other.input_tokens) // TRACE_BLOCK_TOKENS
    pairs = zip(one.hash_ids[:complete], other.hash_ids[:complete], strict=True)
    return TRACE_BLOCK_TOKENS * next((at for at, (a, b) in enumerate(pairs) if a != b), complete)


def possible(arrivals: list[Arrival]) -> float:
    """Share of the prompts' tokens that an earlier one has, by looking at every pair."""
    best = [max((shared(each, before) for before in arrivals[:at]), default=0) for at, each in enumerate(arrivals)]
    return sum(best) / sum(each.input_tokens for each in arrivals)


@pytest.mark.parametrize("kind", zoo.KINDS)
@given(seed=st.integers(0, 1_000), requests=st.integers(1, 120))
def test_every_request_has_an_id_for_each_block_and_comes_in_order(kind: str, seed: int, requests: int) -> None:
    arrivals = made(f"{kind}:requests={requests},seed={seed}")
    assert len(arrivals) == requests
    assert arrivals[0].at_s == 0
    assert all(one.at_s <= other.at_s for one, other in pairwise(arrivals))
    for each in arrivals:
        assert len(each.hash_ids) == -(-each.input_tokens // TRACE_BLOCK_TOKENS)
        assert len(set(each.hash_ids)) == len(each.hash_ids)
        assert each.output_tokens >= 1


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_an_id_stands_behind_the_same_ids_wherever_it_stands(kind: str) -> None:
    before: dict[int, int] = {}
    for each in made(f"{kind}:requests=200"):
        for parent, block in pairwise((-1, *each.hash_ids)):
            assert before.setdefault(block, parent) == parent


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_the_same_seed_makes_the_same_workload(kind: str) -> None:
    assert made(f"{kind}:requests=60") == made(f"{kind}:requests=60")
    assert made(f"{kind}:requests=60") != made(f"{kind}:requests=60,seed=1")


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_the_first_requests_do_not_depend_on_how_many_follow(kind: str) -> None:
    assert made(f"{kind}:requests=30") == made(f"{kind}:requests=90")[:30]


@pytest.mark.parametrize(
    ("spec", "least", "most"),
    [
        ("bursts:requests=80", 0.777, 0.779),  # 7 of 8 times 8,192 of 9,216
        ("bursts:requests=80,size=1", 0.0, 0.0),
        ("agents:requests=200", 0.8, 0.95),
        ("system:requests=200", 0.9, 0.95),
        ("system:requests=50,system=0", 0.0, 0.0),
        ("turns:requests=200", 0.5, 0.85),
        ("documents:requests=200", 0.6, 0.9),
        ("lengths:requests=300", 0.03, 0.4),
        ("lengths:requests=100,reuse=0", 0.0, 0.0),
        ("flood:requests=200", 0.8, 0.95),
        ("quiet:requests=200", 0.05, 0.4),
        ("quiet:requests=60,reuse=0", 0.0, 0.0),
    ],
)
def test_the_reuse_that_a_kind_promises_is_there(spec: str, least: float, most: float) -> None:
    assert least <= possible(made(spec)) <= most


def test_a_burst_shares_one_prefix_and_nothing_with_another_burst() -> None:
    arrivals = made("bursts:requests=24,gap=0.1,rate=0.05,prefix=1024,own=20")
    bursts = [arrivals[at : at + 8] for at in range(0, 24, 8)]
    for burst in bursts:
        assert {each.input_tokens for each in burst} == {1_044}
        assert {shared(burst[0], each) for each in burst[1:]} == {1_024}
        assert [b.at_s - a.at_s for a, b in pairwise(burst)] == pytest.approx([0.1] * 7)
    assert all(shared(one[0], other[0]) == 0 for one, other in pairwise(bursts))
    assert all(other[0].at_s - one[-1].at_s > 10 for one, other in pairwise(bursts))


def test_a_begun_block_is_not_shared() -> None:
    first, second = made("bursts:requests=2,prefix=1000,own=1000")
    assert shared(first, second) == 512
    assert not set(first.hash_ids[1:]) & set(second.hash_ids[1:])


def test_subagents_run_beside_each_other_on_their_agents_context() -> None:
    arrivals = made("agents:requests=36,rate=1e-6,steps=8,every=4,subagents=5,substeps=2,gap=0.05,system=512,task=2048")
    forks = [group for group in zip(*(arrivals[at:] for at in range(5)), strict=False) if group[-1].at_s - group[0].at_s < 0.3]
    assert forks
    context = shared(forks[0][0], forks[0][1])
    assert context > arrivals[3].input_tokens
    assert {shared(one, other) for one, other in pairwise(forks[0])} == {context}
    after = arrivals[arrivals.index(forks[0][-1]) + 1 :]
    agent = next(each for each in after if {shared(each, fork) for fork in forks[0]} == {context})
    substeps = [each for each in after if max(shared(each, fork) for fork in forks[0]) > context]
    assert len(substeps) == 5
    assert all(each.at_s < agent.at_s for each in substeps)


def test_a_turn_comes_after_the_estimated_end_of_the_one_that_it_extends() -> None:
    chat = made("turns:requests=3,rate=1e-6,turns=3,think=0")
    for one, other in pairwise(chat):
        assert shared(one, other) == one.input_tokens // TRACE_BLOCK_TOKENS * TRACE_BLOCK_TOKENS
        assert other.at_s - one.at_s > 0.02 * one.output_tokens
    assert {each.at_s for each in made("turns:requests=3,rate=1e-6,turns=3,think=0,pace=0")} == {0.0}


def test_documents_in_another_order_share_what_stands_before_the_first_that_differs() -> None:
    arrivals = made("documents:requests=300,documents=2,picked=2,system=512")
    orders = {each.hash_ids[1]: each for each in arrivals}
    one, other = orders.values()
    assert shared(one, other) == 512
    assert len({each.hash_ids[1] for each in arrivals}) == 2


def test_lengths_are_spread_over_the_orders_of_magnitude() -> None:
    lengths = [each.input_tokens for each in made("lengths:requests=600")]
    assert 100 <= min(lengths) < 200
    assert 80_000 < max(lengths) <= 100_000
    thirds = Counter(len(str(length - 1)) for length in lengths)
    assert all(abs(thirds[digits] / 600 - 1 / 3) < 0.08 for digits in (3, 4, 5))


def test_a_flood_has_one_prefix_and_leaves_the_others_theirs() -> None:
    arrivals = made("flood:requests=400,flood=10,begin=30")
    tenants = Counter(each.hash_ids[0] for each in arrivals)
    (first, most), *others = tenants.most_common()
    assert most > 0.75 * 400
    assert len(others) == 8
    assert min(each.at_s for each in arrivals if each.hash_ids[0] == first) > 25


def test_a_source_gives_the_workload_and_cuts_it() -> None:
    workload = zoo.parse_workload("system:requests=20")
    assert load(Source(workload=workload)) == zoo.arrivals_of(workload)
    assert load(Source(workload=workload, first=5)) == zoo.arrivals_of(workload)[:5]


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_parameter_has_bounds_that_its_default_keeps(kind: str) -> None:
    for key, value in zoo.KINDS[kind].defaults.items():
        least, most = zoo.BOUNDS[key]
        assert least <= value <= most


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("bursts:turns=3", "no 'turns'; there are requests, rate, size"),
        ("bursts:size=0", "size must be from 1 to 1,000, not 0"),
        ("bursts:size=1.5", "size is a whole number"),
        ("bursts:gap=-1", "gap must be from 0"),
        ("bursts:rate=fast", "is not key=number"),
        ("system:system=0,own=0", "are both 0"),
        ("lengths:shortest=10,longest=9", "shortest is more than longest"),
        ("documents:picked=17", "picked must be from 1 to 16"),
    ],
)
def test_what_no_workload_can_be_made_of_is_refused_in_one_line(spec: str, said: str) -> None:
    with pytest.raises(StudyError) as caught:
        zoo.parse_workload(spec)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_workload_that_takes_all_memory_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "MAX_BLOCKS", 1_000)
    with pytest.raises(StudyError, match="more than 1,000 blocks"):
        made("system:requests=200,own=4096")
