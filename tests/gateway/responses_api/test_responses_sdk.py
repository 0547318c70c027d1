"""OpenAI's own client, unmodified, by its Responses API: whole, streamed, parsed, and in several turns with calls."""

import asyncio

import pytest
from scripted_actor import saying

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

CALL = 'So: <tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "name": "clock",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
        "strict": False,
    }
]


class Person(pydantic.BaseModel):
    name: str
    age: int


def speak(text, talk):
    """Return what `talk(client)` returns, with a gateway whose every answer is this text."""
    actor = saying(text)
    found = []

    async def client(port):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as sdk:
            found.append(await asyncio.wait_for(talk(sdk), 30))

    actor.serve(client)
    return found[0], actor


def test_a_response_is_read_whole() -> None:
    answer, _ = speak("hello", lambda sdk: sdk.responses.create(model="toy", input="hi", instructions="be brief"))
    assert (answer.output_text, answer.status, answer.error, answer.tools) == ("hello", "completed", None, [])
    assert answer.usage.input_tokens_details.cached_tokens == 4


def test_an_answer_is_parsed_into_the_class_that_was_asked_for() -> None:
    def talk(sdk):
        return sdk.responses.parse(model="toy", input="hi", text_format=Person)

    answer, actor = speak('{"name":"Ada","age":36}', talk)
    assert answer.output_parsed == Person(name="Ada", age=36)
    assert actor.only.sampling.constraint


def test_a_stream_is_put_together_and_its_calls_can_be_sent_back() -> None:
    async def talk(sdk):
        async with sdk.responses.stream(model="toy", input="time?", tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
            first = await stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
        text, call = first.output
        assert (text.content[0].text, call.name, call.arguments) == ("So: ", "clock", '{"zone": "UTC"}')
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        turns = [{"role": "user", "content": "time?"}, *first.output, output]
        return await sdk.responses.create(model="toy", input=turns, tools=TOOLS)

    answer, actor = speak(CALL, talk)
    assert answer.status == "completed"
    assert len(actor.requests) == 2


def test_what_is_refused_is_the_clients_own_error() -> None:
    async def talk(sdk):
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.responses.create(model="toy", input="hi", previous_response_id="resp_1")
        return caught.value

    error, _ = speak("", talk)
    assert error.param == "previous_response_id"
