"""Pipelines in virtual time: what a long prompt gains by them, and that a short one neither gains nor pays."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from mooncake_zmq.core.messages import Sampling, StopRule
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Finished, TokenOut
from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens
from mooncake_zmq.simulation.checkers import Checkers
from mooncake_zmq.simulation.cluster import ClusterSettings, processes
from mooncake_zmq.simulation.machine import Hardware
from mooncake_zmq.simulation.run import run_seed
from mooncake_zmq.simulation.share_checker import ShareChecker
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.traces import Workload, reference

LONG, SHORT = 240, 20


def first_token_s(length: int, stages: int) -> tuple[float, int]:
    """Virtual seconds to the first token of one prompt in an idle cluster, and how many pipelines were formed for it."""
    plain = ClusterSettings()
    conductor = replace(plain.conductor, pipeline_stages=stages, pipeline_min_tokens=64, pipeline_chunk_tokens=16)
    settings = replace(plain, conductor=conductor, prefill=replace(plain.prefill, chunk_tokens=16))
    blocks: dict[bytes, bytes] = {}
    root, stop, prompt = Workload().root(settings.layout, ""), StopRule(max_tokens=4), list(range(3, 3 + length))
    answer, _ = reference(root, prompt, Sampling(), stop, settings.layout, blocks)
    checkers = Checkers(
        blocks=blocks,
        roots=(root,),
        block_tokens=settings.layout.block_tokens,
        max_lease_s=8.0,
        shares=ShareChecker({}, {}),
    )
    simulator = Simulator(
        random=Random(1),
        specs=processes(settings),
        layout=settings.layout,
        hardware=Hardware(jitter=0.0, compute_token_s=0.01),  # next to it a chunk's hidden states take little, as they do live
        session=settings.session,
        checkers=checkers,
    )
    heard: list[tuple[float, Any]] = []
    simulator.to_client = lambda gateway, request_id, output: heard.append((simulator.now, output))
    simulator.run_until(2.0)
    tokens = pack_tokens(prompt)
    keys = tuple(extend_keys(root, tokens, settings.layout.block_tokens))
    request = ClientRequest(tokens=tokens, root=root, keys=keys, sampling=Sampling(), stop=stop)
    simulator.from_client("gateway-1", "r", request)
    simulator.run_until(9.0)
    assert checkers.busy() is None
    assert checkers.stale_index() is None
    assert [output.token for _, output in heard if isinstance(output, TokenOut)] == list(answer)
    assert isinstance(heard[-1][1], Finished)
    checkers.finish()
    return heard[0][0] - 2.0, checkers.counts["pipelines"]


def test_a_long_prompt_is_quicker_in_a_pipeline() -> None:
    """Two stages of three layers are uneven: the longer one has two thirds of the work. Three have a third each."""
    alone, none = first_token_s(LONG, 1)
    two, three = first_token_s(LONG, 2), first_token_s(LONG, 3)
    assert (none, two[1], three[1]) == (0, 1, 1)
    assert two[0] < 0.8 * alone
    assert three[0] < 0.45 * alone


def test_a_short_prompt_costs_what_it_cost_without_pipelines() -> None:
    assert first_token_s(SHORT, 3) == first_token_s(SHORT, 1)


@pytest.mark.parametrize("seed", [1, 7, 10])
def test_seeds_with_pipelines_hold_and_use_them(seed: int) -> None:
    result = run_seed(seed)
    assert result.failure is None
    assert result.coverage["counts"]["pipelines"] > 5
    assert result.coverage["counts"]["stage_tokens_computed"] > 100
