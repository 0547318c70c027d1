"""`mooncake-zmq answers fill`: the likeliest prompts of the served model, answered ahead by a gateway that keeps answers."""

import json
import re
from functools import partial
from math import log
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from scripted_actor import ScriptedActor, failing, finished, tokens

from mooncake_zmq.cli import main
from mooncake_zmq.gateway.requests.client_events import TokenOut
from mooncake_zmq.gateway.settings import AnswersSettings
from mooncake_zmq.kv.block_hash import unpack_tokens
from mooncake_zmq.operate import answers

LINE = re.compile(r'\d+\.\d\d "')
USER, END = 258, 256
PROMPTS = {"hi": 0.5, "ho": 0.25, "Hi": 0.15, "é": 0.1}
"""What users ask, and its share."""


def users(request, _number):
    """A model that knows what users ask, and has one answer."""
    if request.sampling.logprobs is None:
        return [[*tokens("ok"[: request.stop.max_tokens]), finished()]]
    prompt = unpack_tokens(request.tokens)
    said = bytes(prompt[len(prompt) - prompt[::-1].index(USER) :])
    shares: dict[int, float] = {}
    for text, share in PROMPTS.items():
        whole = [*text.encode(), END]
        if len(said) < len(whole) and bytes(whole[: len(said)]) == said:
            shares[whole[len(said)]] = shares.get(whole[len(said)], 0.0) + share
    whole_share = sum(shares.values())
    best = tuple((token, log(share / whole_share)) for token, share in shares.items())
    return [[TokenOut(0, best[0][0], (best[0][1], best)), finished("length")]]


class Through(httpx.BaseTransport):
    """Calls a gateway's application in this process."""

    def __init__(self, actor: ScriptedActor) -> None:
        self.actor = actor

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.actor.call(
            request.method,
            request.url.path,
            content=request.read(),
            headers={"authorization": request.headers.get("authorization", "")},
        )
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> ScriptedActor:
    return calling(monkeypatch, AnswersSettings(enabled=True, max_error=1.0, max_interval=1e9, approximate=True))


waited: list[float] = []
"""The times for which the command has waited."""


def calling(monkeypatch: pytest.MonkeyPatch, settings: AnswersSettings) -> ScriptedActor:
    """Return a gateway that the command calls."""
    found = ScriptedActor(users, answers=settings)
    if found.edge.answers is not None:
        found.edge.answers._draw = lambda: 0.99
    waited.clear()
    monkeypatch.setattr(answers, "Api", partial(answers.Api, transport=Through(found), wait=waited.append))
    return found


def fill(*options: str) -> Result:
    return CliRunner().invoke(main, ["answers", "fill", "--at-once", "1", "--approximate", *options])


def lines(result: Result) -> list[str]:
    """Return what the command printed, without the gateway's log."""
    return [line for line in result.stdout.splitlines() if LINE.match(line)]


def test_the_likeliest_prompts_come_first_without_those_that_differ_in_form_alone(actor: ScriptedActor) -> None:
    result = fill("--dry-run")
    assert result.exit_code == 0, result.output
    found = [line.split(" ", 1) for line in lines(result)]
    assert [(json.loads(prompt), float(nll)) for nll, prompt in found] == [("hi", 0.69), ("ho", 1.39)]
    assert actor.edge.answers.counts == {}, "nothing was answered"


def test_a_prompt_that_was_answered_ahead_is_a_hit(actor: ScriptedActor) -> None:
    assert "2 prompts answered, 0 of them" in fill().stderr
    asked = {"messages": [{"role": "user", "content": "HO?"}], "temperature": 0}
    answer = actor.call("POST", "/v1/chat/completions", json=asked).json()
    assert answer["mooncake"]["answered_from"] == "cache"
    assert "2 prompts answered, 2 of them" in fill().stderr


def test_the_address_may_end_as_openais_clients_are_given_it(actor: ScriptedActor) -> None:
    assert "2 prompts answered" in fill("http://127.0.0.1:8000/v1/").stderr


def test_the_limit_and_the_bound_hold(actor: ScriptedActor) -> None:
    assert len(lines(fill("--dry-run", "--limit", "1"))) == 1
    assert len(lines(fill("--dry-run", "--nll", "1"))) == 1
    assert len(lines(fill("--dry-run", "--nll", "0.5"))) == 0
    assert len(lines(fill("--dry-run", "--beginnings", "3"))) == 1


def test_a_template_has_what_applications_send(actor: ScriptedActor, tmp_path: Path) -> None:
    template = tmp_path / "chat.json"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{prompt}"}]
    template.write_text(json.dumps({"max_tokens": 9, "messages": messages}))
    assert "2 prompts answered" in fill("--template", str(template)).stderr
    asked = {"messages": [messages[0], {"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 9}
    answered = [
        actor.call("POST", "/v1/chat/completions", json=asked | more).json()["mooncake"] for more in ({}, {"max_tokens": 8})
    ]
    assert ["answered_from" in each for each in answered] == [True, False]


@pytest.mark.parametrize("written", ["no JSON", "{}", '{"messages": []}', '{"messages": [{"role": "user", "content": "x"}]}'])
def test_what_is_no_template_is_one_line(actor: ScriptedActor, tmp_path: Path, written: str) -> None:
    template = tmp_path / "chat.json"
    template.write_text(written)
    result = fill("--template", str(template))
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--template" in result.stderr


def test_a_gateway_that_keeps_nothing_is_one_line_before_anything_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = calling(monkeypatch, AnswersSettings())
    result = fill()
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "[gateway.answers]" in result.stderr
    assert [request.stop.max_tokens for request in actor.requests.values()] == [1]


def test_it_says_how_far_it_is(actor: ScriptedActor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SAY_EVERY_S", 0.0)
    assert "looked at 2 beginnings of prompts" in fill("--dry-run").stderr


def test_prompts_that_such_a_gateway_takes_for_two_are_both_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    calling(monkeypatch, AnswersSettings(enabled=True))
    result = CliRunner().invoke(main, ["answers", "fill", "--at-once", "1"])
    assert "3 prompts answered, 0 of them" in result.stderr


def test_a_refusal_for_now_is_waited_for(actor: ScriptedActor, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request, number):
        return (
            [[failing(retry_after_s=3.0)]] if request.sampling.logprobs is None and len(waited) < 2 else users(request, number)
        )

    actor.script = script
    assert "2 prompts answered, 0 of them" in fill().stderr
    assert waited == [3.0, 3.0]


def test_an_error_of_the_gateway_is_one_line(actor: ScriptedActor) -> None:
    actor.up.clear()
    actor.edge.draining = True
    result = fill()
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "503" in result.stderr
    assert len(waited) == answers.TRIES - 1
