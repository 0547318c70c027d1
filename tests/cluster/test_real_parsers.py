"""Two real vLLMs whose parsers read what a gateway does not know: REQUIRE_VLLM=PYTHON names the Python that has vLLM."""

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import web
from chain_model import write_chain
from test_real_vllm import ENVIRONMENT, PYTHON, RealCluster
from toy_cluster import eventually, until_none

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="REQUIRE_VLLM names no Python with vLLM"),
    pytest.mark.timeout(3600),
]
THOUGHTS, DAYS = 300, 300
REASONING = "".join(f" t{number}" for number in range(THOUGHTS))
TEXT = " I look it up.\n"
ARGUMENTS = {"city": "Paris", "days": list(range(DAYS + 1))}
ANSWER = [
    "<reason>",
    *(f" t{number}" for number in range(THOUGHTS)),
    "</reason>",
    *(" I look", " it", " up.\n", "<longcat_tool_call>", '{"name": ', '"get_', 'weather", ', '"arguments": ', '{"city": "'),
    *("Par", "is", '", "days": ['),
    *(f"{day}, " for day in range(DAYS)),
    *(f"{DAYS}]", "}}", "</longcat_tool_call>"),
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
PARSER = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module("reason")
class Reason(BaseThinkingReasoningParser):
    start_token = "<reason>"
    end_token = "</reason>"
"""
"""A parser of reasoning with marks that no gateway knows."""


class Parsed(RealCluster):
    def more_arguments(self, directory: Path) -> list[str]:
        plugin = directory / "reason.py"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        plugin.write_text(PARSER)
        calls = ["--enable-auto-tool-choice", "--tool-call-parser", "longcat"]
        return [*calls, "--reasoning-parser-plugin", str(plugin), "--reasoning-parser", "reason"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Parsed]:
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory(prefix="mz-") as directory:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        made = Parsed(Path(directory) / "run", write_chain(Path(directory) / "model", ANSWER))
        try:
            made.start()
            eventually(lambda: len(reports(made)) == 2, 60, "both report their parsers")
            yield made
            until_none(made.busy_gauges, 60)
            made.stop()
        finally:
            made.kill()


def reports(cluster: Parsed) -> list[str]:
    """The nodes whose vLLM has been found to have both parsers."""
    dumps = cluster.dumps()
    return [name for name in cluster.VLLMS if "calls=True, reasoning=True" in dumps[name]["actor"]["reads"]["parsers"]]


def body(cluster: Parsed, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "weather?"}]
    return {"model": cluster.model_name, "messages": messages, "tools": TOOLS, "temperature": 0, **more}


def streamed(cluster: Parsed, **more: Any) -> tuple[dict[str, Any], list[float]]:
    """The answer put together from its events, and when they came."""
    said: dict[str, Any] = {"reasoning": "", "content": "", "arguments": "", "names": [], "ids": [], "end": None}
    began, times = time.monotonic(), list[float]()
    asked = body(cluster, stream=True, stream_options={"include_usage": True}, **more)
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=asked, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            said["last"] = event
            for choice in event["choices"]:
                times.append(time.monotonic() - began)
                delta = choice["delta"]
                said["reasoning"] += delta.get("reasoning_content") or ""
                said["content"] += delta.get("content") or ""
                said["end"] = choice["finish_reason"] or said["end"]
                for call in delta.get("tool_calls", ()):
                    said["arguments"] += call["function"].get("arguments") or ""
                    if "name" in call["function"]:
                        said["names"].append(call["function"]["name"])
    return said, times


def check(said: dict[str, Any]) -> None:
    assert said["reasoning"] == REASONING
    assert said["content"].strip() == TEXT.strip()
    assert said["names"] == ["get_weather"]
    assert json.loads(said["arguments"]) == ARGUMENTS
    assert said["end"] == "tool_calls"


def test_calls_and_reasoning_are_read_in_a_whole_answer(cluster: Parsed) -> None:
    answer = web.post(f"{cluster.url}/v1/chat/completions", json=body(cluster), timeout=120).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert "unread" not in answer["mooncake"]
    assert message["reasoning_content"] == REASONING
    assert message["content"].strip() == TEXT.strip()
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS)
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(ANSWER) + 1


def test_calls_and_reasoning_are_read_in_a_stream(cluster: Parsed) -> None:
    said, times = streamed(cluster)
    check(said)
    assert len(times) > 2, "it comes in parts, on a busy machine in few"
    print(f"{len(times)} parts, the first after {times[0]:.3f} s, the last after {times[-1]:.3f} s")


def test_without_tools_the_reasoning_is_read_and_a_stop_string_ends_the_text(cluster: Parsed) -> None:
    said, _ = streamed(cluster, tools=None, stop=[" up."])
    assert (said["reasoning"], said["content"], said["end"]) == (REASONING, " I look it", "stop")


def test_messages_and_responses_have_the_same_parts(cluster: Parsed) -> None:
    tool = TOOLS[0]["function"]
    asked = {"model": cluster.model_name, "temperature": 0}
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]}]
    message = asked | {"messages": [{"role": "user", "content": "weather?"}], "max_tokens": 2000, "tools": tools}
    content = web.post(f"{cluster.url}/v1/messages", json=message, timeout=120).json()["content"]
    assert [part["type"] for part in content] == ["thinking", "text", "tool_use"]
    assert (content[0]["thinking"], content[2]["input"]) == (REASONING, ARGUMENTS)
    response = asked | {"input": "weather?", "tools": [{"type": "function", **tool}]}
    output = web.post(f"{cluster.url}/v1/responses", json=response, timeout=120).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert json.loads(output[2]["arguments"]) == ARGUMENTS


def test_a_required_call_is_held_to_json(cluster: Parsed) -> None:
    """The grammar makes the model write it, whatever form it knows, from the first token on."""
    answer = web.post(
        f"{cluster.url}/v1/chat/completions", json=body(cluster, tool_choice="required", max_tokens=200), timeout=120
    ).json()
    (choice,) = answer["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_several_streams_are_read_at_once(cluster: Parsed) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: streamed(cluster), range(8)))
    for said, _ in answers:
        check(said)
    print(f"8 streams: parts {[len(times) for _, times in answers]}, last after {max(times[-1] for _, times in answers):.2f} s")


def test_an_answer_goes_on_at_the_other_vllm_and_so_does_the_reading(cluster: Parsed) -> None:
    killed = list[str]()

    def kill() -> None:
        eventually(lambda: bool(busy(cluster)), 30, "one of them computes")
        time.sleep(0.5)
        killed.extend(busy(cluster)[:1])
        for pid in cluster.processes(killed[0]):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    said, _ = streamed(cluster)
    killer.join()
    check(said)
    served = said["last"]["mooncake"]
    assert (served["attempts"], served["decode"] == killed[0]) == (2, False)
    assert "unread" not in served


def busy(cluster: Parsed) -> list[str]:
    """The nodes whose vLLM has a request."""
    found = []
    for name, url in cluster.urls.items():
        for line in web.get(f"{url}/metrics").text.splitlines():
            if line.startswith("vllm:num_requests_running{") and float(line.split()[-1]):
                found.append(name)
    return found
