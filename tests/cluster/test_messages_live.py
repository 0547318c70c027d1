"""A running cluster answers Anthropic's Messages API as it answers a chat, and finds its KV by either."""

from typing import Any

import pytest
import web
from toy_cluster import ToyCluster

pytestmark = pytest.mark.timeout(120)
SYSTEM = "You are the toy. " * 8
TURNS = 3


def test_a_conversation_by_messages_says_what_a_chat_says_and_finds_the_kv_of_its_last_turn(cluster: ToyCluster) -> None:
    turns: list[dict[str, Any]] = []
    for number in range(TURNS):
        turns.append({"role": "user", "content": f"and number {number}?"})
        body = {"model": "toy", "max_tokens": 24, "temperature": 0, "system": SYSTEM, "messages": turns}
        message = web.post(f"{cluster.url}/v1/messages", json=body, timeout=60)
        assert message.status_code == 200, message.text
        (block,) = message.json()["content"]
        usage = message.json()["usage"]
        if number:  # the turn before it ended just now
            assert usage["cache_read_input_tokens"] > 0
        chat = [{"role": "system", "content": SYSTEM}, *turns]
        asked = {"model": "toy", "max_tokens": 24, "temperature": 0, "messages": chat}
        answer = web.post(f"{cluster.url}/v1/chat/completions", json=asked, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == block["text"]
        assert answer["usage"]["prompt_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        turns.append({"role": "assistant", "content": block["text"]})
