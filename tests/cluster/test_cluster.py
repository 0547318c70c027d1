"""Requests through real processes, and through their deaths: the client's tokens equal an undisturbed run's."""

import json
import signal
import threading
import time
from itertools import count
from typing import Any

import httpx
import pytest
import web
from toy_cluster import ToyCluster, eventually, expected_tokens, greedy, until_none

pytestmark = pytest.mark.timeout(120)

_seed = count(1)


def fresh_prompt(length: int) -> list[int]:
    """Tokens that no earlier request shared a block with."""
    first = next(_seed)
    return [first % 250, *((first * 31 + position * 7) % 250 for position in range(length - 1))]


def answer(cluster: ToyCluster, prompt: list[int], tokens: int) -> dict[str, Any]:
    """A completion that must be right; returns the whole answer."""
    whole = cluster.complete_text(prompt=prompt, max_tokens=tokens)
    assert whole["choices"][0]["token_ids"] == expected_tokens(prompt, tokens)
    return whole


def test_streaming_and_whole_answers_agree(cluster: ToyCluster) -> None:
    prompt = fresh_prompt(300)
    whole = answer(cluster, prompt, 40)
    assert whole["usage"]["completion_tokens"] == 40
    with cluster.stream(prompt=prompt, max_tokens=40) as stream:
        assert stream.read() == expected_tokens(prompt, 40)
        assert stream.done
        assert stream.errors == []
        assert stream.usage["prompt_tokens"] == 300


def test_the_next_turn_hits_what_prefill_and_decode_stored(cluster: ToyCluster) -> None:
    prompt = fresh_prompt(200)
    first = answer(cluster, prompt, 100)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    turn = prompt + first["choices"][0]["token_ids"] + [7] * 20

    def hits_blocks_of_the_answer() -> bool:
        again = answer(cluster, turn, 4)
        return again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256  # 8 blocks: 56 tokens more than the prompt

    eventually(hits_blocks_of_the_answer, 10)


def test_many_requests_at_once_are_all_right(cluster: ToyCluster) -> None:
    prompts = [fresh_prompt(50 + 37 * turn) for turn in range(16)]
    failures: list[BaseException] = []

    def ask(prompt: list[int]) -> None:
        try:
            answer(cluster, prompt, 60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("role", ["decode", "cache", "conductor"])
def test_a_death_in_mid_answer_is_a_pause_at_most(cluster: ToyCluster, role: str) -> None:
    prompt, tokens = fresh_prompt(500), 1200
    victims = {"decode": ["decode-a", "decode-b"], "cache": ["cache-a", "cache-b"], "conductor": ["conductor-0"]}[role]
    with cluster.stream(prompt=prompt, max_tokens=tokens) as stream:
        stream.read(50)
        for victim in victims:
            cluster.signal(victim, signal.SIGKILL)
        assert stream.read() == expected_tokens(prompt, tokens)
        assert stream.errors == []
        assert stream.done
        if role == "decode":
            assert stream.served["attempts"] > 1


def test_an_answer_with_a_constraint_is_whole_although_both_decodes_died_in_it(cluster: ToyCluster) -> None:
    asked = {
        "prompt": fresh_prompt(100),
        "max_tokens": 2000,
        "ignore_eos": False,
        "temperature": 1.0,
        "seed": 5,
        "guided_regex": r'\{"numbers": \[([1-9]\d\d, ){200}[1-9]\d\d\]\}',
    }
    with cluster.stream(**asked) as stream:
        stream.read(50)
        for victim in ("decode-a", "decode-b"):
            cluster.signal(victim, signal.SIGKILL)
        tokens = stream.read()
        assert (stream.errors, stream.done) == ([], True)
        assert stream.served["attempts"] > 1
    whole = cluster.complete_text(**asked)["choices"][0]
    assert (whole["token_ids"], whole["finish_reason"]) == (tokens, "stop")
    assert len(json.loads(whole["text"])["numbers"]) == 201


@pytest.mark.parametrize("role", ["prefill", "cache"])
def test_a_death_before_the_first_token_is_a_pause_at_most(cluster: ToyCluster, role: str) -> None:
    """Stopped before the request comes, so that it waits at the victims when they die."""
    prompt = fresh_prompt(700)
    answer(cluster, prompt[:640], 1)  # so that there is something to load
    victims = [f"{role}-a", f"{role}-b"]
    for victim in victims:
        cluster.signal(victim, signal.SIGSTOP)
    results: list[Any] = []
    asking = threading.Thread(target=lambda: results.append(answer(cluster, prompt, 30)))
    asking.start()
    eventually(lambda: web.get(f"{cluster.url}/health", timeout=5).json()["open_requests"] == 1)
    for victim in victims:
        cluster.signal(victim, signal.SIGKILL)
    asking.join(60)
    assert len(results) == 1


def test_new_requests_are_served_again_after_the_conductor_died(cluster: ToyCluster) -> None:
    """They wait for it to come back, or, when it is back before the nodes have greeted it, are told when to come again."""
    cluster.signal("conductor-0", signal.SIGKILL)
    prompt = fresh_prompt(100)
    body = greedy(prompt=prompt, max_tokens=10)
    deadline = time.monotonic() + 20
    while (answered := web.post(f"{cluster.url}/v1/completions", json=body, timeout=60)).status_code != 200:
        assert answered.status_code == 503, answered.text
        assert "retry-after" in answered.headers
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answered.json()["choices"][0]["token_ids"] == expected_tokens(prompt, 10)


def test_a_killed_gateway_leaves_nothing_running(cluster: ToyCluster) -> None:
    prompt = fresh_prompt(300)
    with cluster.stream(prompt=prompt, max_tokens=3000) as stream:
        stream.read(20)
        cluster.signal("gateway-0", signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            stream.read()
    eventually(cluster.complete, 30)
    until_none(cluster.busy_gauges, 20)
    answer(cluster, prompt, 200)


def test_a_client_that_hangs_up_frees_everything(cluster: ToyCluster) -> None:
    for read in (0, 1, 100):
        with cluster.stream(prompt=fresh_prompt(400), max_tokens=3000) as stream:
            if read:
                stream.read(read)
        until_none(cluster.busy_gauges, 10)


def test_choices_share_one_prefill_and_each_is_what_its_seed_gives_alone(cluster: ToyCluster) -> None:
    prompt = fresh_prompt(300)

    def computed() -> int:
        return sum(dump["counts"].get("prompt_tokens_computed", 0) for dump in cluster.dumps().values())

    before = computed()
    asked = {"model": "toy", "prompt": prompt, "max_tokens": 8, "temperature": 1.0, "seed": 40, "return_token_ids": True}
    choices = web.post(f"{cluster.url}/v1/completions", json={**asked, "n": 16}, timeout=60).json()["choices"]
    assert computed() - before == len(prompt)
    assert [choice["index"] for choice in choices] == list(range(16))
    for number in (0, 1, 15):
        alone = web.post(f"{cluster.url}/v1/completions", json={**asked, "seed": 40 + number}, timeout=60).json()["choices"][0]
        assert alone["token_ids"] == choices[number]["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 8


def test_a_prompts_probabilities_are_those_of_the_tokens_if_they_had_been_generated(cluster: ToyCluster) -> None:
    prompt = fresh_prompt(600)
    answered = cluster.complete_text(prompt=prompt, max_tokens=6, logprobs=2)["choices"][0]
    whole = prompt + answered["token_ids"]
    scored = cluster.complete_text(prompt=whole, max_tokens=0, logprobs=2, echo=True)
    told = scored["choices"][0]["logprobs"]
    assert [len(each) for each in told.values()] == [len(whole)] * 4
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][len(prompt) :] == answered["logprobs"]["token_logprobs"]
    assert told["top_logprobs"][len(prompt) :] == answered["logprobs"]["top_logprobs"]
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_bad_requests_are_refused_with_a_reason(cluster: ToyCluster) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"prompt": "", "max_tokens": 4}, 400),
        ({"prompt": [], "max_tokens": 4}, 400),
        ({"prompt": [100_000], "max_tokens": 4}, 400),
        ({"prompt": [5] * 5000, "max_tokens": 4}, 400),
        ({"prompt": "x", "max_tokens": -1}, 400),
        ({"prompt": "x", "temperature": "hot"}, 400),
        ({"prompt": "x", "model": "another"}, 404),
    ]
    for body, status in cases:
        answered = web.post(f"{cluster.url}/v1/completions", json={"model": "toy", **body}, timeout=10)
        assert answered.status_code == status, (body, answered.text)
        assert answered.json()["error"]["message"]
    broken = web.post(f"{cluster.url}/v1/completions", content=b"{not json", timeout=10)
    assert broken.status_code == 400
    assert broken.json()["error"]["message"]


def test_metrics_tell_what_was_served(cluster: ToyCluster) -> None:
    answer(cluster, fresh_prompt(64), 4)
    text = web.get(f"{cluster.url}/metrics", timeout=5).text
    assert "vllm:generation_tokens_total" in text
    assert "mooncake_zmq_frames_sent_total" in text
