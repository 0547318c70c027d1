"""Health, metrics, settings, small answers, the log."""

import json
from itertools import count

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from scripted_actor import ScriptedActor, failing, finished, one_by_one, tokens

from mooncake_zmq.core.messages import MAX_TOKENS
from mooncake_zmq.gateway.requests.client_events import ClientRequest
from mooncake_zmq.gateway.requests.readiness import ClusterView
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.kv.block_hash import unpack_tokens


def scrape(actor):
    response = actor.call("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples[(name, *sorted({"model_name": "toy", "engine": "0", **labels}.items()))]


def test_vllm_metrics():
    def script(request: ClientRequest, _number: int):
        prompt = len(unpack_tokens(request.tokens))
        return one_by_one([*tokens("abc"), finished("length", prompt_tokens=prompt)])

    actor = ScriptedActor(script)
    actor.complete()
    actor.complete(stream=True)
    actor.script = lambda _request, _number: [[failing()]]
    actor.complete()
    actor.script = lambda _request, _number: one_by_one(tokens("a."))
    actor.complete(stop=".")
    samples = scrape(actor)
    assert value(samples, "vllm:prompt_tokens_total") == 15
    assert value(samples, "vllm:generation_tokens_total") == 8
    assert value(samples, "vllm:prefix_cache_queries_total") == 15
    assert value(samples, "vllm:prefix_cache_hits_total") == 12
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 3
    assert value(samples, "vllm:inter_token_latency_seconds_count") == 5
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 4
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 2
    assert value(samples, "vllm:request_success_total", finished_reason="error") == 1
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(samples, "vllm:num_requests_waiting") == 0
    assert value(samples, "vllm:num_requests_running") == 0
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.001") <= 3


def test_a_prompt_counts_once_however_many_choices_it_has():
    actor = ScriptedActor()
    with structlog.testing.capture_logs() as lines:
        usage = actor.complete(prompt=["hello", "you"], n=3).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 12)
    (line,) = (line for line in lines if line["event"] == "http")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (8, 12)
    samples = scrape(actor)
    assert value(samples, "vllm:prompt_tokens_total") == 8
    assert value(samples, "vllm:generation_tokens_total") == 12
    assert value(samples, "vllm:prefix_cache_queries_total") == 10, "two times what the script says"
    assert value(samples, "vllm:prefix_cache_hits_total") == 8


def test_where_the_time_of_a_request_went():
    """Queue and prefill as the actor tells them; decode from the first token to the last, by the edge's clock."""
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("abc"), finished(queue_s=0.7, prefill_s=3.0)]))
    ticks = count()
    actor.edge.clock = lambda: float(next(ticks))
    actor.complete(stream=True)
    samples = scrape(actor)
    assert value(samples, "vllm:request_queue_time_seconds_sum") == 0.7
    assert value(samples, "vllm:request_queue_time_seconds_bucket", le="0.5") == 0
    assert value(samples, "vllm:request_queue_time_seconds_bucket", le="0.8") == 1
    assert value(samples, "vllm:request_prefill_time_seconds_sum") == 3.0
    assert value(samples, "vllm:request_decode_time_seconds_sum") == 2.0
    assert value(samples, "vllm:request_decode_time_seconds_count") == 1


def test_a_failed_request_adds_no_times():
    actor = ScriptedActor(lambda _request, _number: [[*tokens("a"), failing()]])
    actor.complete()
    samples = scrape(actor)
    for part in ("queue", "prefill", "decode"):
        assert value(samples, f"vllm:request_{part}_time_seconds_count") == 0


def test_the_actors_own_metrics():
    actor = ScriptedActor()
    actor.actor_counts = {"misses[reason=evicted]": 3, "misses[reason=timeout]": 1, "placed": 7, "odd-name[a=b,c=d]": 2}
    actor.edge.clock = count().__next__
    samples = scrape(actor)
    assert samples[("mooncake_misses_total", ("reason", "evicted"))] == 3
    assert samples[("mooncake_misses_total", ("reason", "timeout"))] == 1
    assert samples[("mooncake_placed_total",)] == 7
    assert samples[("mooncake_odd_name_total", ("a", "b"), ("c", "d"))] == 2
    assert samples[("mooncake_requests", ("state", "placing"))] == 0
    assert samples[("mooncake_edge_slots_taken",)] == 0
    assert scrape(actor)[("mooncake_edge_http_responses_total", ("status", "200"))] == 1


def test_waiting_and_running_are_levels():
    actor = ScriptedActor(lambda _request, number: one_by_one(tokens("a" * number)))

    async def client(port):
        from test_edge_disconnect import send_request

        writers = [(await send_request(port, {"prompt": "a", "stream": True}))[1] for _ in range(3)]
        await actor.until(lambda: len(actor.requests) == 3 and actor.edge.calls.waiting_and_running("") == (1, 2))
        exposition = actor.edge.metrics.exposition().decode()
        assert 'vllm:num_requests_running{engine="0",model_name="toy"} 2.0' in exposition
        for writer in writers:
            writer.close()
        await actor.until(lambda: actor.edge.calls.waiting_and_running("") == (0, 0))

    actor.serve(client)


def test_a_page_of_metrics_is_made_once_however_many_ask():
    actor = ScriptedActor()
    now = 100.0
    actor.edge.clock = lambda: now
    first = actor.call("GET", "/metrics").text
    actor.edge.count("edge_news")
    assert actor.call("GET", "/metrics").text == first
    now += 1.0
    assert "edge_news" in actor.call("GET", "/metrics").text


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_says_what_is_missing(path):
    actor = ScriptedActor()
    response = actor.call("GET", path)
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "degraded": [],
        "gateway": "gw",
        "missing": [],
        "closed": [],
        "not_connected": [],
        "model": "toy",
        "peers": {
            "conductor": ["conductor"],
            "prefill": ["prefill"],
            "decode": ["decode"],
            "cache-node": ["cache-0", "cache-1"],
        },
        "refused": {"prefill-9": "model differs"},
        "open_requests": 0,
    }
    del actor.up["decode"], actor.up["conductor"]
    response = actor.call("GET", path)
    assert response.status_code == 503
    assert response.json()["missing"] == ["conductor", "decode"]
    assert response.json()["status"] == "unavailable"


def test_health_says_how_blocks_hold_kv():
    health = ScriptedActor(kv_codec="int8").call("GET", "/health").json()
    assert health["kv"] == {"codec": "int8", "bytes_per_token": 90}


def test_health_is_not_ok_before_the_conductor_has_heard_all():
    actor = ScriptedActor(view=ClusterView(ready=False, missing=("cache-1",)))
    response = actor.call("GET", "/health")
    assert (response.status_code, response.json()["status"]) == (503, "starting")
    assert response.json()["not_connected"] == ["cache-1"]
    actor.view = ClusterView(ready=True, missing=("cache-1",))
    assert actor.call("GET", "/health").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_health_is_not_ok_where_nobody_of_a_role_takes_requests(path, role):
    actor = ScriptedActor(view=ClusterView(ready=True, closed=(role, "another")))
    assert actor.edge.may_open, "a gateway that starts meanwhile is there to have it serve again"
    response = actor.call("GET", path)
    assert (response.status_code, response.json()["status"]) == (503, "unavailable")
    assert response.json()["missing"] == [role]
    assert response.json()["closed"] == [role, "another"]
    assert response.json()["peers"][role] == [role], "it is there"
    assert actor.call("GET", "/cluster").json()["status"] == "unavailable"
    actor.up["another one"] = actor.up[role]
    assert actor.call("GET", path).status_code == 200


def test_health_says_nothing_of_cache_nodes_that_nobody_told_it_of():
    actor = ScriptedActor(view=ClusterView(ready=True))
    assert "cache-node" not in actor.call("GET", "/health").json()["peers"]
    actor.view = ClusterView(ready=True, cache_nodes=())
    assert actor.call("GET", "/health").json()["peers"]["cache-node"] == []


def test_draining_is_not_healthy_but_alive():
    actor = ScriptedActor()
    actor.edge.drain()
    assert actor.call("GET", "/health").json()["status"] == "draining"
    assert actor.call("GET", "/ready").status_code == 503
    assert actor.call("GET", "/live").status_code == 200


def test_small_pages():
    actor = ScriptedActor()
    listing = actor.call("GET", "/v1/models").json()
    (card,) = listing["data"]
    assert listing["object"] == "list"
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": "toy",
        "object": "model",
        "owned_by": "mooncake_zmq",
        "root": "toy",
        "parent": None,
        "max_model_len": 64,
    }
    assert actor.call("GET", "/v1/models/toy").json()["id"] == "toy"
    assert actor.call("GET", "/version").json()["version"]


def test_one_line_in_the_log():
    actor = ScriptedActor()
    headers = {"x-request-id": "mine", "traceparent": "00-ab-cd-01"}
    with structlog.testing.capture_logs() as lines:
        actor.call("POST", "/v1/completions", json={"prompt": "hello"}, headers=headers)
    (line,) = lines
    assert (line["status"], line["path"], line["x_request_id"], line["traceparent"]) == (
        200,
        "/v1/completions",
        "mine",
        "00-ab-cd-01",
    )
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (5, 2, ["stop"])
    assert line["id"] in next(iter(actor.requests)).replace("-2", "-1")


def test_a_call_that_was_made_into_requests_is_told_by_their_lines_and_any_other_by_its_own():
    actor = ScriptedActor()
    full = ScriptedActor(lambda _request, _number: [[failing()]])
    with structlog.testing.capture_logs() as lines:
        actor.call("POST", "/v1/completions", json={"prompt": "hello"})
        actor.call("POST", "/v1/completions", json={"prompt": ""})
        full.call("POST", "/v1/completions", json={"prompt": "hello"})
        actor.call("GET", "/v1/models")
        actor.call("GET", "/version")
    told = [(line["path"], line["status"], line["log_level"]) for line in lines]
    assert told == [
        ("/v1/completions", 200, "debug"),
        ("/v1/completions", 400, "info"),
        ("/v1/completions", 503, "debug"),
        ("/v1/models", 200, "info"),
        ("/version", 200, "debug"),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": -1},
        {"max_choices": 0},
        {"keep_alive_s": -1.0},
        {"max_buffered_outputs": 0},
        {"tokenize_threads": 0},
        {"short_body_bytes": -1},
        {"max_echo_chars": -1},
        {"max_reading_bytes": 1000},
        {"body_timeout_s": 0.0},
        {"send_timeout_s": float("nan")},
        {"full_retry_after_s": -1.0},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EdgeSettings(**wrong)


def test_a_body_may_be_as_long_as_the_longest_prompt_as_token_ids_or_as_escaped_text():
    longest = MAX_TOKENS
    for prompt in ([1_000_000] * longest, "\N{CJK UNIFIED IDEOGRAPH-6A21}\N{CJK UNIFIED IDEOGRAPH-578B}" * (longest - 100)):
        assert EdgeSettings().body_bytes(longest) > len(json.dumps({"model": "m", "prompt": prompt}))
    assert EdgeSettings().body_bytes(4096) == 4 << 20
    assert EdgeSettings(max_body_bytes=1000).body_bytes(longest) == 1000
    assert EdgeSettings(max_reading_bytes=10 << 20).body_bytes(longest) == 5 << 20, "a tenant may use half of it"
