"""Text as it grows: stop strings and characters across tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_actor import ScriptedActor, events, finished, one_by_one, tokens

from mooncake_zmq.gateway.openai import responses
from mooncake_zmq.gateway.openai.detokenizer import StopScanner, stop_tables


def text_of(chunks):
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk != "[DONE]")


def cut(text, stops):
    """The reference: where the first stop string is complete, the longest of them is cut off."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_scanner_agrees_with_the_reference(pieces, stops):
    scanner, out, stopped = StopScanner(stop_tables(stops)), "", False
    seen = ""
    for piece in pieces:
        seen += piece
        free, stopped = scanner.push(piece)
        out += free
        if stopped:
            break
        held = seen[len(out) :]
        # Held back is exactly what may still become a stop string.
        suffixes = [seen[len(seen) - size :] for size in range(1, len(seen) + 1)]
        assert held == max((end for end in suffixes if any(stop.startswith(end) for stop in stops)), key=len, default="")
    if not stopped:
        out += scanner.flush()
    assert (out, stopped) == cut("".join(pieces), stops)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_cuts_and_cancels(stream):
    actor = ScriptedActor(lambda _request, _number: one_by_one(tokens("one STOP two")))  # never ends by itself
    response = actor.complete(stop=["STOP", "xyz"], stream=stream)
    if stream:
        chunks = events(response)
        assert chunks[-1] == "[DONE]"
        assert text_of(chunks) == "one "
        assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["o", "n", "e", " ", ""]
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        body = response.json()
        assert body["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
        assert body["usage"]["completion_tokens"] == 8
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}  # the entry of the stopped request
        assert body["mooncake"]["attempts"] == 1
    assert list(actor.requests) == actor.cancelled


def test_text_held_back_in_vain_is_told_in_the_end():
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("a ST"), finished()]))
    assert text_of(events(actor.complete(stop="STOP", stream=True))) == "a ST"


def test_tokens_after_a_stop_string_in_one_batch_are_dropped():
    actor = ScriptedActor(lambda _request, _number: [[*tokens("a.b"), finished()]])
    response = actor.complete(stop=".")
    assert response.json()["choices"][0]["text"] == "a"
    assert response.json()["choices"][0]["finish_reason"] == "stop"


def test_one_choice_stops_and_the_others_go_on():
    def script(_request, number):
        return one_by_one([*tokens("a.b" if number == 0 else "cde"), *([] if number == 0 else [finished("length")])])

    actor = ScriptedActor(script)
    choices = actor.complete(stop=".", n=2).json()["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("a", "stop"), ("cde", "length")]
    assert actor.cancelled == [next(iter(actor.requests))]


def test_stop_strings_do_not_count_before_min_tokens():
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("a.b.c"), finished("length")]))
    assert actor.complete(stop=".", min_tokens=2).json()["choices"][0]["text"] == "a.b"


@pytest.mark.parametrize("batches", [1, 2, 3, 5])
def test_a_character_is_never_split(batches):
    text = "é€😀 日本語"
    raw = text.encode()

    def script(_request, _number):
        outputs = [*tokens(raw), finished()]
        return [outputs[start : start + batches] for start in range(0, len(outputs), batches)]

    chunks = events(ScriptedActor(script).complete(stream=True))
    assert text_of(chunks) == text
    assert "\ufffd" not in "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])


def test_an_incomplete_character_at_the_end_is_replaced_not_broken():
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("a" + "é")[:2], finished("length")]))
    assert actor.complete().json()["choices"][0]["text"] == "a\ufffd"


def test_a_stop_string_of_many_bytes():
    actor = ScriptedActor(lambda _request, _number: one_by_one(tokens("ab日本!")))
    assert actor.complete(stop="日本").json()["choices"][0]["text"] == "ab"


def test_an_end_of_sequence_that_has_text_is_not_shown():
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("hi!"), finished()]))
    actor.model.tokenizer.eos_ids = (ord("!"),)
    assert actor.complete().json()["choices"][0]["text"] == "hi"


def test_an_event_is_one_line_for_every_client():
    """Of those that cut text into lines, some take more than newlines for ends."""
    text = "a\u2028b\u2029c\x85d"
    sent = responses.server_sent({"text": text}).decode()
    assert sent.splitlines()[:1] == [sent.removesuffix("\n\n")]
    assert json.loads(sent.removeprefix("data: ")) == {"text": text}
