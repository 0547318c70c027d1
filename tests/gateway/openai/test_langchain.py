"""langchain-openai, unmodified: a chat, a stream, tools, structured answers, and an error."""

import asyncio

import pytest
from scripted_actor import CALL, ScriptedActor, failing, saying

from mooncake_zmq.engine.constraint import Compiler, ConstraintError
from mooncake_zmq.engine.tokenizer import byte_tokenizer

langchain = pytest.importorskip("langchain_openai")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class weather(pydantic.BaseModel):  # noqa: N801, a tool's name
    """Of a place."""

    place: str


class Person(pydantic.BaseModel):
    name: str
    age: int


def speak(actor, talk, **more):
    """What `talk(model)` gives, with a chat model of this gateway."""
    found = []

    async def client(port):
        model = langchain.ChatOpenAI(model="toy", base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, **more)
        found.append(await asyncio.wait_for(talk(model), 60))

    actor.serve(client)
    return found[0]


def test_a_chat_has_its_text_and_its_usage():
    answer = speak(saying("hello"), lambda model: model.ainvoke("hi"))
    assert answer.content == "hello"
    assert answer.usage_metadata["output_tokens"] == 5
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 4


def test_a_stream_comes_in_pieces():
    async def talk(model):
        return [chunk async for chunk in model.astream("hi")]

    chunks = speak(saying("hello"), talk, stream_usage=True)
    assert "".join(chunk.content for chunk in chunks) == "hello"
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_bound_called_and_answered(stream):
    async def talk(model):
        bound = model.bind_tools([weather])
        if not stream:
            return await bound.ainvoke("hi")
        whole = None
        async for chunk in bound.astream("hi"):
            whole = chunk if whole is None else whole + chunk
        return whole

    answer = speak(saying(CALL), talk)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"place": "Bern"})]


def test_an_answer_is_parsed_into_the_class_that_was_asked_for():
    answer = speak(saying('{"name":"Ada","age":36}'), lambda model: model.with_structured_output(Person).ainvoke("hi"))
    assert answer == Person(name="Ada", age=36)


def test_a_function_that_must_be_called_has_no_arguments_but_those_of_its_class():
    call = '<tool_call>\n{"name": "Person", "arguments": {"name":"Ada","age":36}}\n</tool_call>'
    actor = saying(call)
    answer = speak(actor, lambda model: model.with_structured_output(Person, method="function_calling").ainvoke("hi"))
    assert answer == Person(name="Ada", age=36)
    compiler, constraint = Compiler(byte_tokenizer, 512), actor.only.sampling.constraint
    compiler.matcher(constraint, call.encode())
    with pytest.raises(ConstraintError):
        compiler.matcher(constraint, call.replace("36", '36,"type":"integer"').encode())


@pytest.mark.parametrize(
    ("actor", "prompt", "kind"),
    [
        (saying("x"), "word " * 5000, "BadRequestError"),
        (ScriptedActor(lambda _request, _number: [[failing(429)]]), "hi", "RateLimitError"),
        (ScriptedActor(lambda _request, _number: [[failing(503)]]), "hi", "InternalServerError"),
    ],
    ids=["too long", "refused", "nobody there"],
)
def test_errors_are_those_of_openais_client(actor, prompt, kind):
    async def talk(model):
        with pytest.raises(getattr(openai, kind)):
            await model.ainvoke(prompt)
        return True

    assert speak(actor, talk)
