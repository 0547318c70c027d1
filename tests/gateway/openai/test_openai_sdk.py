"""OpenAI's own client, unmodified: forms and tools, as a whole, streamed, and parsed by it."""

import asyncio
import json

import pytest
from scripted_actor import CALL, saying

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):
    name: str
    age: int


class weather(pydantic.BaseModel):  # noqa: N801, a tool's name
    """Of a place."""

    place: str


TOOLS = [openai.pydantic_function_tool(weather)]
ASKED = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def speak(text, talk, reason="stop"):
    """What `talk(client)` gives, with a gateway whose every answer is this."""
    actor = saying(text, reason)
    found = []

    async def client(port):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as sdk:
            found.append(await asyncio.wait_for(talk(sdk), 30))

    actor.serve(client)
    return found[0], actor


def test_an_answer_is_parsed_into_the_class_that_was_asked_for():
    answer, actor = speak('{"name":"Ada","age":36}', lambda sdk: sdk.chat.completions.parse(**ASKED, response_format=Person))
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    assert actor.only.sampling.constraint


def test_calls_are_parsed_into_the_class_of_their_tool():
    answer, _ = speak(CALL, lambda sdk: sdk.chat.completions.parse(**ASKED, tools=TOOLS, tool_choice="required"))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == weather(place="Bern")
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_calls_are_put_together_and_can_be_sent_back():
    async def talk(sdk):
        async with sdk.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            first = (await stream.get_final_completion()).choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        turns = [
            *ASKED["messages"],
            first,
            {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "fair"},
        ]
        await sdk.chat.completions.create(model="toy", messages=turns, tools=TOOLS)
        return first

    message, actor = speak(CALL, talk)
    assert json.loads(message.tool_calls[0].function.arguments) == {"place": "Bern"}
    assert len(actor.requests) == 2


def test_what_is_no_schema_is_a_bad_request():
    async def talk(sdk):
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(**ASKED, extra_body={"guided_json": {"type": "strin"}})
        return caught.value

    error, _ = speak("x", talk)
    assert error.param == "guided_json"
    assert "strin" in error.message
