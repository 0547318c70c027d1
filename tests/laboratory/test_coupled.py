"""The coupled baselines: cases computed by hand, and what must hold of any."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.gateway.requests.token_gaps import Gaps
from mooncake_zmq.laboratory.coupled import run
from mooncake_zmq.laboratory.coupled_instance import TOO_LONG, CoupledSettings, GapLog, Instance, Job
from mooncake_zmq.laboratory.coupled_memory import KvMemory
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.gaps import longest_tenth_s
from mooncake_zmq.laboratory.generated import generate, parse_spec
from mooncake_zmq.laboratory.profiles import A800
from mooncake_zmq.laboratory.runs import COUPLED
from mooncake_zmq.laboratory.study import Arrival, RequestRecord, Setup

# A prompt token takes 1 ms; a decode step 10 ms, 1 ms for each request, nothing for context.
COSTS = Costs(prefill_token_s=1e-3, prefill_square_s=0.0, decode_step_s=0.010, decode_request_s=0.001, decode_context_s=0.0)
NODE = replace(A800, name="hand", costs=COSTS, decode_tokens=100_000)


def arrivals(*requests, unique=True):
    """(at_s, input, output) each; their prompts begin alike unless unique."""
    made = []
    for number, (at_s, asked, output) in enumerate(requests):
        blocks = -(-asked // 512)
        made.append(
            Arrival(at_s, asked, output, tuple(range(blocks) if not unique else range(number * 1000, number * 1000 + blocks)))
        )
    return made


def replay(requests, policy="vllm", nodes=1, node=NODE, **overrides):
    dotted = {f"coupled.{name}": value for name, value in overrides.items()}
    setup = Setup(prefill=nodes, decode=0, hardware=node, policy=policy, overrides=dotted)
    return run(setup, requests, lambda share: None)


def test_a_prefill_stalls_what_decodes():
    # A: prefill 0 to .100, then steps of 11 ms. B comes at .105: A's step ends at .111, B's prefill takes until .311.
    result = replay(arrivals((0.0, 100, 12), (0.105, 200, 3)))
    a, b = result.requests
    assert a.ttft_s == pytest.approx(0.100)
    assert b.ttft_s == pytest.approx(0.311 - 0.105)
    assert b.queue_s == pytest.approx(0.006)
    # A has 11 gaps: 11 ms; 200 + 12 (batch of two); then 12, then 8 of 11 ms. The longest tenth is the longest.
    assert a.tbt_s == pytest.approx(0.212)
    assert b.tbt_s == pytest.approx(0.012)
    assert b.at_s + b.end_s == pytest.approx(0.335)
    assert a.end_s == pytest.approx(0.335 + 8 * 0.011)
    assert result.prefill_busy_s["vllm-0"] == pytest.approx(0.300)
    assert result.decode_busy_s["vllm-0"] == pytest.approx(0.011 * 9 + 0.024)


def test_prompts_that_wait_together_are_one_step_up_to_its_limit():
    result = replay(arrivals((0.0, 100, 1), (0.01, 100, 1), (0.02, 100, 1)), prefill_tokens=200)
    assert [each.ttft_s for each in result.requests] == pytest.approx([0.1, 0.29, 0.28])
    result = replay(arrivals((0.0, 100, 1), (0.01, 100, 1), (0.02, 100, 1)), prefill_tokens=150)
    assert [each.ttft_s for each in result.requests] == pytest.approx([0.1, 0.19, 0.28])


def test_context_makes_each_step_longer_than_the_last():
    costs = replace(COSTS, decode_context_s=1e-5)
    result = replay(arrivals((0.0, 100, 4)), node=replace(NODE, costs=costs))
    steps = [0.011 + 1e-5 * context for context in (100, 101, 102)]
    assert result.requests[0].end_s == pytest.approx(0.1 + sum(steps))
    assert result.requests[0].tbt_s == pytest.approx(steps[-1])


def test_steps_after_an_end_are_of_those_that_are_left():
    costs = replace(COSTS, decode_context_s=1e-5)
    a, b = replay(arrivals((0.0, 100, 2), (0.0, 200, 4)), node=replace(NODE, costs=costs), prefill_tokens=300).requests
    # A alone until .1; B's prefill until .3; one step of both, then two of B with 201 and 202 tokens.
    both_s = 0.010 + 2 * 0.001 + 1e-5 * 300
    assert a.end_s == pytest.approx(0.3 + both_s)
    assert b.end_s == pytest.approx(0.3 + both_s + 2 * 0.011 + 1e-5 * (201 + 202))


def test_a_prefix_found_is_not_computed():
    requests = arrivals((0.0, 1100, 1), (5.0, 1100, 1), unique=False)
    assert [each.hit_own for each in replay(requests).requests] == [0, 0]
    result = replay(requests, "vllm-prefix")
    assert [each.hit_own for each in result.requests] == [0, 1024]
    assert [each.ttft_s for each in result.requests] == pytest.approx([1.1, 0.076])
    # All of a prompt is there: its last block is computed, for the answer starts from it.
    assert replay(arrivals((0.0, 1024, 1), (5.0, 1024, 1), unique=False), "vllm-prefix").requests[1].hit_own == 512


def test_prompts_go_to_the_fewest_requests_or_to_their_match():
    requests = arrivals((0.0, 1100, 1), (5.0, 1100, 1), unique=False)
    assert [each.prefill for each in replay(requests, "vllm-prefix", nodes=2, routing="least").requests] == ["vllm-0", "vllm-1"]
    assert [each.prefill for each in replay(requests, "vllm-prefix", nodes=2).requests] == ["vllm-0", "vllm-0"]
    # Three at once: the match may have two more than the fewest, no more.
    burst = arrivals((0.0, 1100, 1), *[(5.0, 1100, 1)] * 4, unique=False)
    assert [each.prefill for each in replay(burst, "vllm-prefix", nodes=2).requests][1:] == ["vllm-0"] * 3 + ["vllm-1"]


def test_chunks_share_steps_with_decodes():
    # A: 100 tokens in one step, decodes. B of 150 at .105, waits for A's border at .111; budget 101: chunks of 100 and of 50.
    requests = arrivals((0.0, 100, 12), (0.105, 150, 2))
    a, b = replay(requests, "vllm-chunked", token_budget=101).requests
    # Overlapped: .100 and .050 of compute, each longer than the 10 ms of reading weights, and 1 ms for A.
    assert b.ttft_s == pytest.approx(0.111 + 0.101 + 0.051 - 0.105)
    assert a.tbt_s == pytest.approx(0.101)
    a, b = replay(requests, "vllm-chunked", token_budget=101, mixed="add").requests
    assert b.ttft_s == pytest.approx(0.111 + 0.111 + 0.061 - 0.105)
    assert b.tbt_s == pytest.approx(0.012)


@pytest.mark.parametrize(("policy", "prefill_tokens"), [("vllm", 90_000), ("vllm", 50_000), ("vllm-chunked", 1)])
def test_the_load_of_prefills_counts_prompts_that_have_begun(policy, prefill_tokens):
    # A: 50 s of compute, B: 40 s; at 30 s 60 are left, at 60 s 30. At 90 s all is done.
    requests = arrivals((0.0, 50_000, 1), (0.0, 40_000, 1), (91.0, 10, 1))
    result = replay(requests, policy, prefill_tokens=prefill_tokens)
    ahead_s = [share * result.setup.ttft_slo_s for _, share, _ in result.loads]
    assert ahead_s == pytest.approx([60, 30, 0], abs=1e-6)


def test_out_of_memory_the_youngest_is_computed_again():
    node = replace(NODE, decode_tokens=220)
    result = replay(arrivals((0.0, 100, 30), (0.0, 100, 30)), node=node)
    a, b = result.requests
    assert (a.attempts, b.attempts) == (1, 2)
    # Both grew to 110 after ten steps of B; all of B's 111 tokens, the last without KV yet, are computed again.
    assert b.wasted_prefill_s == pytest.approx(0.111)
    assert b.tbt_s > 0.111 / 3
    assert a.wasted_prefill_s == 0
    assert {a.outcome, b.outcome} == {"finished"}


def test_what_never_fits_fails_and_delays_nobody():
    result = replay(arrivals((0.0, 100_001, 2), (0.0, 100, 2), (0.0, 60, 99_990)))
    assert [each.outcome for each in result.requests] == ["failed", "finished", "failed"]
    assert {each.reason for each in result.requests if each.outcome == "failed"} == {TOO_LONG}
    assert result.requests[1].ttft_s < 0.3


@pytest.mark.parametrize("policy", COUPLED)
@pytest.mark.parametrize("memory", [40_000, 1_000_000])
def test_every_request_ends_once_and_time_is_conserved(policy, memory):
    trace = generate(parse_spec("conversation:requests=300,rate=4,input=3000,input_max=30000"))
    node = replace(A800, decode_tokens=memory)
    setup = Setup(prefill=2, decode=1, hardware=node, policy=policy, speed=2.0)
    seen = []
    result = run(setup, trace, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert all(each.outcome == "finished" for each in result.requests)
    for each, asked in zip(result.requests, trace, strict=True):
        assert each.at_s == asked.at_s / 2
        assert 0 <= each.queue_s <= each.ttft_s <= each.end_s
        assert each.hit_own < each.input_tokens
        own_s = node.costs.compute_s(asked.input_tokens, each.hit_own)
        assert each.prefill_s == pytest.approx(own_s)
        assert each.ttft_s >= own_s * 0.999999
    spent_s = sum(result.prefill_busy_s.values())
    assert spent_s == pytest.approx(sum(each.prefill_s + each.wasted_prefill_s for each in result.requests))
    assert all(
        result.prefill_busy_s[name] + result.decode_busy_s[name] <= result.virtual_s * (1 + 1e-9)
        for name in result.prefill_busy_s
    )
    again = run(setup, trace, lambda share: None)
    assert again.requests == result.requests


@pytest.mark.parametrize("caching", [True, False])
def test_the_memory_holds_what_it_says(caching):
    random = Random(7)
    memory = KvMemory(60, 4, caching=caching)
    held = []
    for _ in range(3_000):
        tokens = random.randint(1, 20)
        family = random.randrange(3) * 100
        ids = memory.shared(tuple(range(family, family + 6)), tokens)
        if memory.fits(ids, tokens) and random.random() < 0.6:
            hit = memory.hit(ids, tokens)
            assert hit % 4 == 0
            assert hit < tokens
            memory.take(ids, tokens)
            memory.mark_computed(ids)
            held.append((ids, tokens))
        elif held:
            memory.release(*held.pop(random.randrange(len(held))))
        memory.check()
    for each in held:
        memory.release(*each)
    assert memory.used == 0


def test_a_run_of_steps_is_the_same_as_its_steps():
    """Arrivals cut runs at borders, and gaps come out as if each step were an event: with and without interruptions."""
    costs = replace(COSTS, decode_context_s=1e-6)
    ends = {}
    for poke_s in (None, 0.0137):
        memory = KvMemory(100_000, 512, caching=False)
        instance = Instance("one", costs, memory, CoupledSettings(max_requests=1), chunked=False)
        record = RequestRecord(0.0, 50, 200)
        instance.add(0.0, Job(Arrival(0.0, 50, 200, ()), record, 0, kv=50))
        poked = 0
        while instance.unfinished > poked:
            now = instance.ends_s
            if poke_s is not None and poked < 40 and poke_s * (poked + 5) < now:
                # It cannot run beside the first, so all it does is to end the run at a border.
                poked += 1
                instance.add(poke_s * (poked + 4), Job(Arrival(0.0, 10, 1, ()), RequestRecord(0.0, 10, 1), poked, kv=10))
                continue
            instance.end(now)
        ends[poke_s] = (record.end_s, record.tbt_s)
    assert ends[None] == pytest.approx(ends[0.0137])


def test_the_log_of_gaps_forgets_only_what_none_asks_for():
    log = GapLog()
    rows = []
    for at in range(3_000):
        log.extend(7, at, 0.5, 0.25, max(0, 7 * at - 21))
        rows += [float(at), *(0.5 + 0.25 * k for k in range(1, 7))]
        since = max(0, 7 * at - 14)
        assert log.since(since).tolist() == rows[since:]


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 19, 20, 345])
def test_tbt_is_counted_as_the_gateway_counts_it(count):
    gaps, live = np.random.default_rng(count).random(count), Gaps()
    for each in gaps:
        live.add(each)
    assert longest_tenth_s(gaps) == pytest.approx(live.tbt_s)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"coupled.nothing": 1}, "no setting"),
        ({"coupled.mixed": "maybe"}, "overlap or add"),
        ({"coupled.token_budget": 0}, "1 or more"),
        ({"coupled.token_budget": "x"}, "cannot be"),
    ],
)
def test_a_setting_that_is_none_is_refused(overrides, said):
    setup = Setup(prefill=1, decode=1, hardware=NODE, policy="vllm", overrides=overrides)
    with pytest.raises(StudyError, match=said):
        run(setup, arrivals((0.0, 10, 1)), lambda share: None)
