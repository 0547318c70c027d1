"""litellm, unmodified: a chat, a stream, calls of tools, and the errors that it tells apart."""

import asyncio
import json

import pytest
from scripted_actor import CALL, ScriptedActor, failing, saying

litellm = pytest.importorskip("litellm")

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
TURNS = [{"role": "user", "content": "hi"}]


def speak(actor, talk):
    """What `talk(ask)` gives; `ask` is litellm's own call, bound to this gateway."""
    found = []

    async def client(port):
        def ask(**more):
            known = {"model": "openai/toy", "api_base": f"http://127.0.0.1:{port}/v1", "api_key": "x", "max_retries": 0}
            return litellm.acompletion(**{**known, "messages": TURNS, **more})

        found.append(await asyncio.wait_for(talk(ask), 60))

    actor.serve(client)
    return found[0]


def test_a_chat_has_its_text_and_its_usage():
    answer = speak(saying("hello"), lambda ask: ask(temperature=0, max_tokens=8))
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_a_stream_comes_in_pieces_and_ends_with_the_usage():
    async def talk(ask):
        stream = await ask(stream=True, stream_options={"include_usage": True})
        return [chunk async for chunk in stream]

    chunks = speak(saying("hello"), talk)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_told_and_put_together(stream):
    pytest.importorskip("mcp")  # litellm itself needs it where there are tools

    async def talk(ask):
        answer = await ask(tools=TOOLS, tool_choice="auto", stream=stream)
        return litellm.stream_chunk_builder([chunk async for chunk in answer]) if stream else answer

    answer = speak(saying(CALL), talk)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"place": "Bern"}
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("actor", "more", "kind"),
    [
        (saying("x"), {"messages": [{"role": "user", "content": "word " * 5000}]}, "ContextWindowExceededError"),
        (saying("x"), {"temperature": -1}, "BadRequestError"),
        (saying("x"), {"model": "openai/other"}, "NotFoundError"),
        (ScriptedActor(lambda _request, _number: [[failing(429)]]), {}, "RateLimitError"),
        (ScriptedActor(lambda _request, _number: [[failing(503)]]), {}, "ServiceUnavailableError"),
    ],
    ids=["too long", "bad", "unknown model", "refused", "nobody there"],
)
def test_errors_are_of_the_kinds_that_it_knows(actor, more, kind):
    async def talk(ask):
        with pytest.raises(getattr(litellm, kind)):
            await ask(**more)
        return True

    assert speak(actor, talk)
