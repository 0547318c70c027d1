"""`bench client` against a server whose model takes less than the trace has: it says so, or scales the trace."""

import asyncio
import json
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner
from scripted_actor import ScriptedActor, finished, tokens
from structlog.testing import capture_logs

from mooncake_zmq.bench.client import Client, NoServer, Served
from mooncake_zmq.bench.client_fit import fit, misfit, scaled, slowed, too_long
from mooncake_zmq.bench.client_prompts import PromptForm
from mooncake_zmq.bench.load_commands import client as command
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.study import Arrival

TRACE = [Arrival(3.0 * number, 1024 * (number + 1), 20 * (number + 1), tuple(range(2 * (number + 1)))) for number in range(8)]


@pytest.mark.parametrize("max_model_len", [100, 101, 555, 1000, 8351])
@pytest.mark.parametrize("text", [False, True])
def test_a_scaled_trace_fits_and_keeps_its_proportions(max_model_len, text):
    form = PromptForm(text=text)
    assert too_long(TRACE, form, max_model_len)
    fitting, shorter = scaled(TRACE, form, max_model_len)
    assert not too_long(fitting, shorter, max_model_len)
    share = shorter.block_tokens / 512
    longest = shorter.length(fitting[-1]) + fitting[-1].output_tokens
    assert 0.5 * max_model_len < longest <= max_model_len * (0.9 if text else 1)
    for before, after in zip(TRACE, fitting, strict=True):
        assert (after.at_s, after.hash_ids) == (before.at_s, before.hash_ids)
        assert after.output_tokens == max(1, int(before.output_tokens * share))


def test_a_trace_that_fits_is_left_as_it_is():
    form = PromptForm(block_tokens=64)
    assert scaled(TRACE, form, 1184) == (TRACE, form)
    assert misfit(TRACE, form, Served("m", 1184)) == misfit(TRACE, form, Served("m", None)) == ""


def test_a_trace_that_cannot_fit_is_refused():
    with pytest.raises(StudyError, match="does not fit into 8 tokens"):
        scaled(TRACE, PromptForm(), 8)


def test_arrivals_are_slowed_to_what_is_served_one_after_the_other_and_never_hastened():
    assert slowed(1.0, TRACE, 6.0) == 0.5
    assert slowed(1.0, TRACE, 0.1) == slowed(1.0, TRACE[:1], 6.0) == 1.0


def run(actor, *arguments):
    done = []

    async def client(port):
        words = [f"http://127.0.0.1:{port}", *arguments, "--json"]
        done.append(await asyncio.to_thread(CliRunner().invoke, command, words))

    with capture_logs():  # the runner replaces the standard output, to which the server's thread must not write meanwhile
        actor.serve(client)
    return done[0]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 1000 * each.at_s, "input_length": each.input_tokens, "output_length": 2, "hash_ids": each.hash_ids}
        for each in TRACE
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def test_a_trace_that_does_not_fit_is_not_sent(trace):
    actor = ScriptedActor(max_model_len=2110)
    result = run(actor, "--trace", trace)
    assert result.exit_code == 2
    assert "6 of 8 requests are longer than the 2,110 tokens that toy takes: --fit scales" in result.output
    assert not actor.requests


def test_a_trace_is_sent_as_it_is_where_that_is_asked_for(trace):
    actor = ScriptedActor(max_model_len=2110)
    result = run(actor, "--trace", trace, "--as-is", "--speed", "1000")
    assert len(actor.requests) == json.loads(result.stdout.splitlines()[-1])["finished"] == 2


def test_fit_answers_every_request_and_says_what_it_did(trace, tmp_path):
    rows = tmp_path / "rows.csv"
    result = run(ScriptedActor(max_model_len=512), "--trace", trace, "--fit", "--speed", "1000", "--csv", str(rows))
    assert result.exit_code == 0, result.output
    assert "fitted to 512 tokens: a hash id stands for " in result.output
    assert json.loads(result.stdout.splitlines()[-1])["finished"] == 8
    found = np.genfromtxt(rows, delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert set(found["outcome"]) == {"finished"}
    assert (found["prompt_tokens"] == found["input_tokens"]).all()


def fitted(actor, client):
    found = []

    async def ask(port):
        found.append(await fit(client(url=f"http://127.0.0.1:{port}"), TRACE, False, lambda text: None))

    actor.serve(ask)
    return found[0]


def test_the_servers_speed_is_taken_from_a_request_of_mean_length():
    actor = ScriptedActor(lambda request, _number: [[*tokens("a" * request.stop.max_tokens), finished()]], max_model_len=512)
    client, _ = fitted(actor, partial(Client, speed=1e9))
    assert len(actor.only.tokens) // 4 == client.form.length(Arrival(0, 4608, 1, ()))
    assert client.speed < 1e9


def test_a_server_that_states_no_limit_cannot_be_fitted_to():
    with pytest.raises(NoServer, match="states no max_model_len"):
        fitted(ScriptedActor(), partial(Client, model="other"))
