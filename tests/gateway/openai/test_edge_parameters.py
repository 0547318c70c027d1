"""What is asked is done or refused: parameters without effect, tokens' probabilities, biases."""

import threading
from dataclasses import replace

import pytest
from scripted_actor import EOS, ScriptedActor, events, finished

from mooncake_zmq.engine.tokenizer import ByteVocabulary, Conversation, Tokenizer
from mooncake_zmq.gateway.openai import rejected_params, responses
from mooncake_zmq.gateway.requests.client_events import PromptLogprobs, TokenOut

ASKING = {
    "functions": [{"name": "f"}],
    "best_of": 3,
    "suffix": "end",
    "store": True,
    "use_beam_search": True,
    "service_tier": "priority",
    "modalities": ["audio"],
    "chat_template": "{{ messages }}",
}


@pytest.mark.parametrize("name", sorted(ASKING))
def test_what_is_not_done_is_refused_by_its_name(name):
    for call in (ScriptedActor().complete, ScriptedActor().chat):
        response = call(**{name: ASKING[name]})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error.pop("message").startswith(f"{name} is not supported")
        assert error == {
            "type": "invalid_request_error",
            "param": name,
            "code": "unsupported_parameter",
        }


def test_what_asks_for_nothing_is_taken():
    asked = {name: values[0] for name, values in rejected_params.NEUTRAL.items() if name in rejected_params.NAMES}
    nothing = dict.fromkeys(rejected_params.NAMES)
    for call in (ScriptedActor().complete, ScriptedActor().chat):
        assert call(**asked).status_code == call(**nothing).status_code == 200
        assert call(user="me", metadata={"a": "b"}, safety_identifier="x", prompt_cache_key="y").status_code == 200


@pytest.mark.parametrize(("name", "value", "hint"), [("best_of", 2, "ask for n answers"), ("suffix", "end", "into the prompt")])
def test_a_refusal_says_what_does_as_much(name, value, hint):
    error = ScriptedActor().complete(**{name: value}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert hint in error["message"]


def test_an_unknown_parameter_is_refused():
    response = ScriptedActor().complete(temprature=0.5)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "temprature" in error["message"]
    assert error["param"] == "temprature"
    assert ScriptedActor().chat(messages=[{"role": "user", "contents": "a"}]).json()["error"]["param"] == "messages"


def test_a_truth_is_no_number_and_a_long_value_is_not_read():
    assert ScriptedActor().complete(best_of=True).status_code == 400
    assert ScriptedActor().complete(suffix=" " * 1000).status_code == 400


def test_a_turn_as_clients_send_it_back_is_taken_and_one_with_a_call_is_refused():
    answer = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    turns = [{"role": "user", "content": "hi", "name": "me"}, answer, {"role": "user", "content": "go on"}]
    assert ScriptedActor().chat(messages=turns).status_code == 200
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    response = ScriptedActor().chat(messages=[turns[0], called])
    assert response.status_code == 400
    assert "function_call" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("min_p", 1.1),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(token): 0 for token in range(1025)}),
        ("logit_bias", {"1" * 100_000: 0}),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    response = ScriptedActor().complete(**{name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


def test_probabilities_out_of_range():
    for asked in ({"logprobs": 21}, {"logprobs": "banana"}, {"logprobs": True}):
        assert ScriptedActor().complete(**asked).status_code == 400
    for asked in ({"logprobs": 2}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        assert ScriptedActor().chat(**asked).status_code == 400


def told(_request, _number):
    """The two bytes of an e with an accent, a letter, the end."""
    accent = (TokenOut(0, 0xC3, (-0.5, ((0xC3, -0.5), (ord("x"), -1.0)))), TokenOut(1, 0xA9, (-0.25, ((ord("y"), -0.125),))))
    return [[each] for each in (*accent, TokenOut(2, ord("!"), (-1.0, ())), TokenOut(3, EOS, (0.0, ())), finished())]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_tell_probabilities_in_parallel_lists(stream):
    actor = ScriptedActor(told)
    response = actor.complete(logprobs=2, stream=stream)
    assert actor.only.sampling.logprobs == 2
    bodies = events(response)[:-1] if stream else [response.json()]
    parts = [part for body in bodies if (part := body["choices"][0]["logprobs"])]
    assert {name: sum((part[name] for part in parts), []) for name in parts[0]} == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "!", "<|end|>"],
        "token_logprobs": [-0.5, -0.25, -1.0, 0.0],
        "top_logprobs": [
            {"bytes:\\xc3": -0.5, "x": -1.0},
            {"y": -0.125, "bytes:\\xa9": -0.25},
            {"!": -1.0},
            {"<|end|>": 0.0},
        ],
        "text_offset": [0, 0, 1, 2],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_chats_tell_probabilities_token_by_token(stream):
    actor = ScriptedActor(told)
    response = actor.chat(logprobs=True, top_logprobs=2, stream=stream)
    assert actor.only.sampling.logprobs == 2
    bodies = events(response)[:-1] if stream else [response.json()]
    content = [entry for body in bodies if (part := body["choices"][0]["logprobs"]) for entry in part["content"]]
    assert [entry["logprob"] for entry in content] == [-0.5, -0.25, -1.0, 0.0]
    assert bytes(byte for entry in content[:3] for byte in entry["bytes"]).decode() == "\u00e9!"
    assert content[1]["top_logprobs"] == [{"token": "y", "logprob": -0.125, "bytes": [ord("y")]}]
    assert ScriptedActor(told).chat().json()["choices"][0]["logprobs"] is None


def scoring(request, _number):
    """Of the prompt "hey", then one token."""
    assert request.prompt_logprobs == 1
    told = ((-0.5, ((ord("e"), -0.5),)), (-2.0, ((ord("x"), -0.125),)))
    return [
        [PromptLogprobs(1, told[:1])],
        [PromptLogprobs(2, told[1:])],
        [TokenOut(0, ord("!"), (-1.0, ((ord("!"), -1.0),)))],
        [finished("length")],
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hey", list(b"hey")])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_probabilities_tells_those_of_the_prompt_first(stream, prompt, max_tokens):
    actor = ScriptedActor(scoring)
    response = actor.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, stream=stream)
    assert actor.only.stop.max_tokens == 1
    bodies = events(response)[:-1] if stream else [response.json()]
    assert "".join(body["choices"][0]["text"] for body in bodies) == "hey" + "!" * max_tokens
    parts = [part for body in bodies if (part := body["choices"][0]["logprobs"])]
    whole = {name: sum((part[name] for part in parts), []) for name in parts[0]}
    likeliest = [None, {"e": -0.5}, {"x": -0.125, "y": -2.0}, {"!": -1.0}]
    expected = {
        "tokens": ["h", "e", "y", "!"],
        "token_logprobs": [None, -0.5, -2.0, -1.0],
        "top_logprobs": likeliest,
        "text_offset": [0, 1, 2, 3],
    }
    assert whole == {name: each[: 3 + max_tokens] for name, each in expected.items()}
    assert bodies[-1]["choices"][0]["finish_reason"] == "length"


def test_where_tokens_begin_counts_the_special_ones_that_a_text_names():
    def scored(request, _number):
        told = (-0.5, ((ord("e"), -0.5),))
        return [[PromptLogprobs(1, (told,) * (len(request.tokens) // 4 - 1))], [TokenOut(0, ord("!"), told)], [finished()]]

    asked = {"echo": True, "logprobs": 1}
    whole = ScriptedActor(scored).complete(prompt="<|user|>hi<|end|>", **asked).json()["choices"][0]
    assert whole["text"] == "<|user|>hi<|end|>!"
    assert whole["logprobs"]["text_offset"] == [0, 8, 9, 10, 17]
    ids = ScriptedActor(scored).complete(prompt=[258, *b"hi", 256], **asked).json()["choices"][0]
    assert (ids["text"], ids["logprobs"]["text_offset"]) == ("hi!", [0, 0, 1, 2, 2])


@pytest.mark.parametrize(
    "asked",
    [
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"banana": 1}},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"stream": False, "stream_options": {}},
    ],
)
def test_stream_options_that_ask_for_what_is_not_told_are_refused(asked):
    response = ScriptedActor().complete(**asked)
    assert response.status_code == 400
    assert "stream_options" in response.text
    harmless = {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert ScriptedActor().complete(stream=True, **harmless).status_code == 200
    assert ScriptedActor().complete(stream_options=None).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_whole_prompts_probabilities_are_written_by_another_thread(stream, monkeypatch):
    """They are so many that to write them stops every stream."""
    threads, real = [], responses.of_completion

    def spy(ids, *arguments):
        threads.append((len(ids), threading.current_thread().name.rpartition("_")[0]))
        return real(ids, *arguments)

    monkeypatch.setattr(responses, "of_completion", spy)
    asked = {"prompt": "hey", "logprobs": 1, "max_tokens": 1, "stream": stream}
    ScriptedActor(scoring).complete(echo=True, **asked)
    assert threads[0] == (4, "prepare-long")
    assert all(name == "" for _, name in threads[1:])
    del threads[:]
    ScriptedActor(told).complete(**asked)
    assert {name for _, name in threads} == {""}


def test_what_lm_eval_asks_for_is_answered_as_it_reads_it():
    """The sum over the continuation, and whether each of its tokens was the likeliest."""
    asked = {"prompt": [list(b"hey")], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234, "temperature": 0}
    (choice,) = ScriptedActor(scoring).complete(**asked).json()["choices"]
    context = 1
    told, likeliest = (choice["logprobs"][name][context:-1] for name in ("token_logprobs", "top_logprobs"))
    assert sum(told) == -2.5
    assert [own == max(top.values()) for own, top in zip(told, likeliest, strict=True)] == [True, False]


def test_no_answer_is_for_echo_alone_and_counts_nothing():
    usage = ScriptedActor(scoring).complete(prompt="hey", echo=True, logprobs=1, max_tokens=0).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
    actor = ScriptedActor()
    assert actor.complete(echo=True, max_tokens=0).json()["choices"][0]["text"] == "hello"
    assert actor.only.prompt_logprobs is None
    for response in (ScriptedActor().complete(max_tokens=0), ScriptedActor().chat(max_tokens=0)):
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_is_silent_where_the_wish_that_counts_is_for_none(echo, stream):
    actor = ScriptedActor()
    response = actor.complete(max_tokens=0, max_completion_tokens=2, echo=echo, stream=stream)
    bodies = events(response)[:-1] if stream else [response.json()]
    assert actor.only.stop.max_tokens == 2
    assert "".join(body["choices"][0]["text"] for body in bodies) == "hello" * echo + "ok"


def test_probabilities_of_prompts_are_of_one_choice_and_not_too_many():
    assert ScriptedActor().complete(echo=True, logprobs=1, n=2).json()["error"]["param"] == "n"
    actor = ScriptedActor(max_model_len=5000)
    response = actor.complete(prompt=["x" * 1600] * 2, echo=True, logprobs=20)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    assert not actor.requests


def saying(*ids):
    """An answer of these tokens, which the engine ends as the request's rule says."""

    def answer(request, _number):
        made = []
        for index, token in enumerate(ids):
            made.append(TokenOut(index, token))
            if request.stop.reason(token, index + 1):
                break
        return [[*made, finished()]]

    return ScriptedActor(answer)


def text_of(actor, **asked):
    return actor.complete(max_tokens=16, **asked).json()["choices"][0]["text"]


def test_tokens_end_an_answer_beside_the_models_own():
    assert text_of(saying(*b"a.b", EOS)) == "a.b"
    actor = saying(*b"a.b", EOS)
    assert text_of(actor, stop_token_ids=[ord("."), EOS]) == "a"
    assert actor.only.stop.eos_ids == (EOS, ord("."))
    assert text_of(saying(*b"a.b", EOS), stop_token_ids=[ord(".")], include_stop_str_in_output=True) == "a."
    ignoring = saying(*b"a.b", EOS)
    assert text_of(ignoring, stop_token_ids=[ord("b")], ignore_eos=True) == "a."
    assert ignoring.only.stop.eos_ids == (ord("b"),)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_part_of_the_text_where_that_is_asked_for(stream):
    response = saying(*b"one STOP two", EOS).complete(
        stop=["STOP", "OP"], max_tokens=16, include_stop_str_in_output=True, stream=stream
    )
    bodies = events(response)[:-1] if stream else [response.json()]
    assert "".join(body["choices"][0]["text"] for body in bodies) == "one STOP"
    assert bodies[-1]["choices"][0]["finish_reason"] == "stop"


def test_special_tokens_have_their_names_where_that_is_asked_for():
    assert text_of(saying(257, *b"a", EOS)) == "a"
    assert text_of(saying(257, *b"a", EOS), skip_special_tokens=False) == "<|system|>a"
    assert text_of(saying(*b"a", EOS), skip_special_tokens=False, include_stop_str_in_output=True) == "a<|end|>"
    assert text_of(saying(*b"a", EOS, *b"b"), skip_special_tokens=False, ignore_eos=True) == "a<|end|>b"


def prompt_of(actor):
    return list(actor.only.tokens[::4])


def test_the_last_tokens_of_a_prompt_are_used_where_that_is_asked_for():
    actor = ScriptedActor()
    assert actor.complete(prompt="abcdef", truncate_prompt_tokens=2).json()["usage"]["prompt_tokens"] == 2
    assert bytes(prompt_of(actor)) == b"ef"
    actor = ScriptedActor(max_model_len=8)
    assert actor.complete(prompt="abcdefghijkl", max_tokens=3, truncate_prompt_tokens=-1).status_code == 200
    assert bytes(prompt_of(actor)) == b"hijkl"


@pytest.mark.parametrize("prompt", [list(b"abcdefghijkl"), [list(b"abcdefghijkl")]])
def test_so_are_those_of_token_ids_that_are_more_than_fit(prompt):
    actor = ScriptedActor(max_model_len=8)
    assert actor.complete(prompt=prompt, max_tokens=3, truncate_prompt_tokens=-1).status_code == 200
    assert bytes(prompt_of(actor)) == b"hijkl"
    asked = {"prompt": [1] * 9 * ByteVocabulary.longest_token, "max_tokens": 3, "truncate_prompt_tokens": 2}
    assert actor.complete(**asked).json()["error"]["code"] == "context_length_exceeded"


def template_given(template="{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}", **asked):
    actor = ScriptedActor(max_model_len=4096)
    tokenizer = Tokenizer(ByteVocabulary(), Conversation(template=template, eos_ids=(EOS,)))
    actor.model = replace(actor.model, tokenizer=tokenizer)
    response = actor.chat(**asked)
    assert response.status_code == 200, response.text
    return bytes(prompt_of(actor)).decode()


def test_a_chat_template_receives_variables_and_the_effort():
    assert template_given(chat_template_kwargs={"enable_thinking": False}) == "hiFalse"
    assert template_given(reasoning_effort="high") == "hiTruehigh"
    assert template_given(reasoning_effort="none") == "hiFalsenone"
    assert template_given(
        reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "max", "enable_thinking": None}
    ) == ("hiNonemax")


def test_a_conversation_may_end_inside_its_final_message():
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    assert template_given(template, messages=turns) == "user:hi;assistant:It is ;>"
    assert template_given(template, messages=turns, add_generation_prompt=False) == "user:hi;assistant:It is ;"
    assert template_given(template, messages=turns, continue_final_message=True) == "user:hi;assistant:It is "
    trimming = template.replace("m.content", "m.content | trim")
    assert template_given(trimming, messages=turns, continue_final_message=True) == "user:hi;assistant:It is"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(33))}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 10_000}, "stop_token_ids"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "b" * 1025}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{number}": "b" * 500 for number in range(10)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_bad_values_of_vllms_parameters_are_refused_by_name(asked, param):
    response = ScriptedActor().chat(**asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_template_that_leaves_out_the_final_message_cannot_continue_it():
    actor = ScriptedActor()
    tokenizer = Tokenizer(ByteVocabulary(), Conversation(template="{{ messages | length }}", eos_ids=(EOS,)))
    actor.model = replace(actor.model, tokenizer=tokenizer)
    error = actor.chat(continue_final_message=True).json()["error"]
    assert "cannot be continued" in error["message"]


def test_a_truncated_prompt_is_not_echoed():
    error = ScriptedActor().complete(truncate_prompt_tokens=1, echo=True).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"
