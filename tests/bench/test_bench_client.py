"""`bench client` against a gateway on loopback: what it sends, what it makes of every kind of answer, and its own lag."""

import asyncio
import json
import re
import time

import pytest
from click.testing import CliRunner
from scripted_actor import ScriptedActor, finished, tokens
from structlog.testing import capture_logs

from mooncake_zmq.bench import client_report
from mooncake_zmq.bench.client import NOT_SENT, Client, NoServer, replay
from mooncake_zmq.bench.client_prompts import PromptForm, pieces
from mooncake_zmq.bench.client_report import Bounds, as_dict, lines, result_of
from mooncake_zmq.bench.client_stream import MAX_BEYOND, Listener, Seen
from mooncake_zmq.bench.client_stream import ask as ask_once
from mooncake_zmq.bench.load_commands import client as command
from mooncake_zmq.gateway.requests.client_events import Failed
from mooncake_zmq.laboratory.study import Arrival
from mooncake_zmq.runtime import http_connections
from mooncake_zmq.runtime.http_connections import BadUrl, Connections, Target

FORM = PromptForm(block_tokens=16)


def arrival(at_s=0.0, blocks=(1,), tokens=512, made=2):
    return Arrival(at_s, tokens, made, blocks)


def prompt(each, form=FORM):
    return json.loads(b"".join(pieces(each, form)))


def ask(actor, arrivals, **how):
    """A replay against a gateway that plays `actor`'s script."""
    found = []

    async def client(port):
        asked = Client(url=f"http://127.0.0.1:{port}/v1", **{"form": FORM, **how})
        found.append(await asyncio.wait_for(replay(asked, arrivals, lambda text: None), 30))

    actor.serve(client)
    return found[0]


# --- prompts


def test_equal_ids_give_equal_tokens_and_others_do_not():
    one, longer = prompt(arrival(blocks=(7, 8), tokens=1000)), prompt(arrival(blocks=(7, 9), tokens=1024))
    other = prompt(arrival())
    assert len(one) == 32
    assert len(longer) == 32
    assert one[:16] == longer[:16]
    assert one[16:] != longer[16:]
    assert other != one[:16]
    assert set(one) <= set(range(256))


def test_a_begun_block_begins_as_the_whole_one_and_lengths_are_the_traces():
    whole, begun = (prompt(arrival(blocks=(1, 5), tokens=count), PromptForm(first_id=10, last_id=20)) for count in (1024, 700))
    assert (len(whole), len(begun)) == (1024, 700)
    assert begun == whole[:700]
    assert set(whole) == set(range(10, 21))


def test_as_text_equal_ids_give_equal_words():
    form = PromptForm(text=True, block_tokens=16)
    one, other = (prompt(arrival(blocks=(7, last), tokens=1024), form).split() for last in (8, 9))
    assert len(one) == 32
    assert one[:16] == other[:16]
    assert one[16:] != other[16:]


@pytest.mark.parametrize("wrong", [{"first_id": 5, "last_id": 4}, {"last_id": 1 << 31}, {"block_tokens": 0}])
def test_forms_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="token"):
        PromptForm(**wrong)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_addresses_that_cannot_be_called_are_refused(url):
    with pytest.raises(BadUrl):
        Target.of(url)


def test_an_address_may_end_in_v1_or_have_a_path():
    assert Target.of("host:8000") == Target("host", 8000, False, "", b"host:8000")
    assert Target.of("https://host/api/v1/") == Target("host", 443, True, "/api", b"host")


# --- answers


def test_tokens_and_the_servers_own_account_are_seen():
    actor = ScriptedActor(lambda _request, _number: [*([each] for each in tokens("hey")), [finished("length")]])
    replayed = ask(actor, [arrival(), arrival(0.01)], api_key="secret")
    assert replayed.model == "toy"
    for seen in replayed.seen:
        assert seen.outcome == "finished"
        assert len(seen.token_s) == 3
        assert sorted(seen.token_s) == list(seen.token_s)
        assert 0 < seen.ttft_s <= seen.ended_s
        assert (seen.completion_tokens, seen.prompt_tokens, seen.cached_tokens) == (3, 16, 4)
    sent = list(actor.requests.values())
    assert [each.stop.max_tokens for each in sent] == [2, 2]
    assert not sent[0].stop.eos_ids
    assert sent[0].tokens == sent[1].tokens


def test_plain_and_chat_ask_for_what_every_server_knows():
    actor = ScriptedActor(max_model_len=4096)
    replayed = ask(actor, [arrival()], chat=True, plain=True, form=PromptForm(text=True, block_tokens=16))
    assert [each.outcome for each in replayed.seen] == ["finished"]
    assert actor.only.stop.eos_ids


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        ([[Failed(status=429, code="ttft", message="too late", retry_after_s=2)]], "rejected", "HTTP 429 ttft"),
        ([[Failed(status=503, code="no_decode", message="none")]], "failed", "HTTP 503 no_decode"),
        ([tokens("a"), [Failed(status=503, code="lost", message="gone")]], "failed", "in the stream: lost"),
    ],
)
def test_refusals_and_errors_are_told_by_their_kind(script, outcome, error):
    replayed = ask(ScriptedActor(lambda _request, _number: script), [arrival()])
    result = result_of(replayed, "url", Bounds())
    assert replayed.seen[0].outcome == outcome
    assert result.errors == {error: 1}
    assert result.goodput_per_s == 0
    assert (result.rejected, result.failed) == ((1, 0) if outcome == "rejected" else (0, 1))


def test_what_ends_without_saying_so_has_failed():
    listener = Listener(Seen())
    listener.answered(listener.began_at, 200, {})
    listener.body(listener.began_at + 1, b'data: {"choices":[{"text":"a"}]}\r\n\r\ndata: {"cho')
    listener.body(listener.began_at + 3, b'ices":[{"text":"b"}]}\n\n: keep-alive\n\ndata: [DONE]\n\n')
    listener.end(listener.began_at + 4)
    assert listener.seen.error == "ended early"
    assert list(listener.seen.token_s) == [pytest.approx(1), pytest.approx(3)]
    assert listener.seen.ended_s == pytest.approx(4)


def listened(*events, **wanted):
    """What becomes of a request whose answer is a stream of these events."""
    listener = Listener(Seen(**wanted))
    listener.answered(listener.began_at, 200, {})
    for event in events:
        listener.body(listener.began_at + 1, b"data: %b\n\n" % event)
    listener.end(listener.began_at + 2)
    return listener.seen


DEEP = b"[" * 100_000
LAST = b'{"choices":[{"text":"a","token_ids":[1],"finish_reason":"length"}]}'


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"delta":{"tool_calls":' + DEEP,
        b'{"choices":[],"usage":{"completion_tokens":1' + 400 * b"0" + b"}}",
        b'{"choices":[],"usage":{"prompt_tokens":-2}}',
        b'{"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":1e99}}}',
    ],
)
def test_events_that_make_no_sense_are_an_error_of_their_request_and_the_report_is_whole(event):
    bad = listened(LAST, event, output_tokens=1)
    assert (bad.outcome, bad.error) == ("failed", "nonsense")
    result = result_of(heard_of(bad, seen()), "url", Bounds())
    assert result.errors == {"nonsense": 1}
    assert lines(result)


def test_a_refusal_that_is_no_json_in_any_depth_is_one_requests_error():
    refused = Listener(Seen())
    refused.answered(refused.began_at, 500, {})
    refused.body(refused.began_at, b'{"x":' + DEEP)
    refused.end(refused.began_at)
    assert refused.seen.error == "HTTP 500"


def test_tokens_without_end_are_an_error_and_are_not_kept():
    many = b'{"choices":[{"token_ids":[' + b"1," * 5000 + b"1]}]}"
    whole = listened(many, many, LAST, output_tokens=2)
    assert whole.error == "too many tokens"
    assert len(whole.token_s) <= 2 + MAX_BEYOND
    pieces = listened(*[b'{"choices":[{"text":"a"}]}'] * 500, output_tokens=2)
    assert pieces.error == "too many tokens"
    assert len(pieces.token_s) == 2 + MAX_BEYOND


def test_nothing_counts_after_an_error_in_the_same_piece():
    listener = Listener(Seen(output_tokens=1))
    listener.answered(listener.began_at, 200, {})
    listener.body(listener.began_at, b"data: {nonsense\n\ndata: %b\n\n" % LAST)
    listener.end(listener.began_at)
    assert listener.seen.error == "nonsense"
    assert not listener.seen.token_s


def test_who_ends_short_is_told_and_is_no_goodput_unless_it_may():
    exact, plain = listened(LAST, output_tokens=5, exact=True), listened(LAST, output_tokens=5)
    result = result_of(heard_of(exact, plain), "url", Bounds())
    assert (result.finished, result.short, result.within_slo) == (2, 1, 0.5)
    assert any("fewer tokens than asked" in what for what, _ in lines(result))


def test_who_finishes_without_a_token_is_told_and_is_within_no_bound():
    empty = listened(b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', output_tokens=5)
    assert empty.error == "finished without a token"
    assert not Bounds(ttft_s=1.0).met(Seen(status=200, finished=True, ended_s=1.0))


@pytest.mark.parametrize("name", [b"content", b"reasoning_content", b"reasoning"])
def test_thoughts_are_tokens_too(name):
    thinking = listened(b'{"choices":[{"delta":{"%b":"x"},"finish_reason":"length"}]}' % name, output_tokens=1)
    assert (thinking.outcome, len(thinking.token_s)) == ("finished", 1)


# --- connections


OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(LAST) + 8, b"data: %b\n\n" % LAST)


def served(answer, client):
    """What `await client(url)` says of a server that does `await answer(reader, writer, number)` for each call; number: on its
    connection. Also how many calls it was sent, and on how many connections."""
    counted = [0, 0]

    async def serve(reader, writer):
        counted[1] += 1
        number = 0
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
                counted[0] += 1
                await answer(reader, writer, number)
                number += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        found = await asyncio.wait_for(client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 30)
        server.close()
        await asyncio.sleep(0)
        return found

    return asyncio.run(main()), *counted


def answered_by(answer, arrivals, **how):
    """A replay; the rest as `served` has it."""
    return served(answer, lambda url: replay(Client(url=url, model="m", form=FORM, **how), arrivals, lambda text: None))


def one_by_one(count):
    return {"arrivals": [arrival(made=1) for _ in range(count)], "max_open": 1}


async def closes_when_asked_again(_reader, writer, number):
    if number:
        writer.close()
    else:
        writer.write(OK)


def test_a_call_on_a_kept_connection_that_is_closed_is_made_once_more_and_that_is_told(monkeypatch):
    monkeypatch.setattr(http_connections, "AT_ONCE_S", 30.0)
    replayed, calls, connections = answered_by(closes_when_asked_again, **one_by_one(2))
    result = result_of(replayed, "url", Bounds())
    assert (result.finished, result.repeated, calls, connections) == (2, 1, 3, 2)
    assert ("sent again: a kept connection was closed", "1") in lines(result)


def test_a_call_that_the_server_held_before_it_closed_is_not_made_again(monkeypatch):
    monkeypatch.setattr(http_connections, "AT_ONCE_S", 0.0)
    replayed, calls, _ = answered_by(closes_when_asked_again, **one_by_one(2))
    assert [each.error for each in replayed.seen] == ["", "connection"]
    assert calls == 2


def test_however_many_connections_are_kept_a_call_is_made_again_once(monkeypatch):
    monkeypatch.setattr(http_connections, "AT_ONCE_S", 30.0)
    asked, together = [], asyncio.Event()

    async def answer(_reader, writer, number):
        asked.append(number)
        if len(asked) > 3:
            writer.close()
            return
        if len(asked) == 3:
            together.set()
        await together.wait()
        writer.write(OK)

    async def client(url):
        connections = Connections(Target.of(url))
        seen = [Seen(output_tokens=1) for _ in range(4)]
        await asyncio.gather(*(ask_once(connections, "/", {}, b"", each, 10.0) for each in seen[:3]))
        await ask_once(connections, "/", {}, b"", seen[3], 10.0)
        await connections.close()
        return seen

    seen, calls, _ = served(answer, client)
    assert [each.error for each in seen] == ["", "", "", "connection"]
    assert (calls, seen[-1].repeats) == (5, 1)


def test_interim_answers_are_no_answers():
    async def answer(_reader, writer, _number):
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.03)  # so that it comes by itself
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" + OK)

    replayed, calls, connections = answered_by(answer, **one_by_one(3))
    assert [(each.outcome, each.status) for each in replayed.seen] == [("finished", 200)] * 3
    assert (calls, connections) == (3, 1)


def test_a_connection_that_says_more_than_it_was_asked_is_not_used_again():
    async def answer(_reader, writer, _number):
        writer.write(OK + b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n")

    replayed, calls, connections = answered_by(answer, **one_by_one(3))
    assert [(each.outcome, each.status) for each in replayed.seen] == [("finished", 200)] * 3
    assert (calls, connections) == (3, 3)


def test_an_idle_connection_that_speaks_is_closed():
    async def answer(_reader, writer, _number):
        writer.write(OK)
        await ended.wait()
        writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    async def client(url):
        connections = Connections(Target.of(url))
        first, second = Seen(output_tokens=1), Seen(output_tokens=1)
        await ask_once(connections, "/", {}, b"", first, 10.0)
        (kept,) = connections._idle
        ended.set()
        while kept.usable:
            await asyncio.sleep(0)
        await ask_once(connections, "/", {}, b"", second, 10.0)
        await connections.close()
        return first, second

    ended = asyncio.Event()
    seen, calls, connections = served(answer, client)
    assert [each.outcome for each in seen] == ["finished"] * 2
    assert (calls, connections) == (2, 2)


def test_a_replay_whose_bodies_cannot_be_made_ends():
    async def replayed():
        asked = Client(url="http://127.0.0.1:1", model="m\udcff", form=FORM)
        await asyncio.wait_for(replay(asked, [arrival()], lambda text: None), 10)

    with pytest.raises(UnicodeEncodeError):
        asyncio.run(replayed())


def test_who_is_not_there_is_told_as_an_error_of_the_connection():
    target = Client(url="http://127.0.0.1:1", model="m", form=FORM)
    replayed = asyncio.run(replay(target, [arrival()], lambda text: None))
    assert replayed.seen[0].error == "connection"
    with pytest.raises(NoServer, match="no connection"):
        asyncio.run(replay(Client(url="http://127.0.0.1:1", form=FORM), [arrival()], lambda text: None))


# --- many of them


def test_beyond_the_most_open_streams_requests_wait_or_are_dropped():
    slow = [*([each] for each in tokens("abcdefgh")), [finished()]]
    waiting = ask(ScriptedActor(lambda _request, _number: slow), [arrival() for _ in range(4)], max_open=1)
    result = result_of(waiting, "url", Bounds())
    assert (result.finished, result.held, result.most_open) == (4, 3, 1)
    dropping = ask(ScriptedActor(lambda _request, _number: slow), [arrival() for _ in range(4)], max_open=1, beyond="drop")
    assert [each.error for each in dropping.seen] == ["", NOT_SENT, NOT_SENT, NOT_SENT]


def test_to_wait_for_a_stream_is_no_lag_of_the_clients(monkeypatch):
    async def answer(_reader, writer, _number):
        await asyncio.sleep(0.05)
        writer.write(OK)

    replayed, *_ = answered_by(answer, **one_by_one(10))
    for before, each in zip(replayed.seen, replayed.seen[1:], strict=False):
        assert each.held_s + each.late_s >= before.held_s + before.ended_s
        assert each.held_s > before.held_s
    monkeypatch.setattr(client_report, "LATE_S", replayed.seen[-1].held_s / 2)
    assert not result_of(replayed, "url", Bounds()).doubtful


def test_a_client_that_is_late_itself_says_so():
    def script(_request, _number):
        time.sleep(0.1)  # the client's loop is this one
        return [[*tokens("ok"), finished()]]

    result = result_of(ask(ScriptedActor(script), [arrival(0.001 * each) for each in range(4)]), "url", Bounds())
    assert result.doubtful
    assert any("the client itself was late" in what for what, _ in lines(result))


def seen(ttft_s=1.0, gap_s=0.1, count=3, **more):
    each = Seen(status=200, finished=True, ended_s=ttft_s + count * gap_s, **more)
    each.token_s.extend(ttft_s + number * gap_s for number in range(count))
    return each


def heard_of(*each):
    class Told:
        model, loop_lag_s, wall_s, cpu_s = "toy", [0.0], 1.0, 0.1

    Told.seen = list(each)
    return Told


def test_goodput_counts_who_finished_within_both_bounds():
    late, slow, refused = seen(ttft_s=3), seen(gap_s=0.3), Seen(status=429, error="HTTP 429", ended_s=0.1)
    result = result_of(
        heard_of(seen(cached_tokens=4, prompt_tokens=8), late, slow, refused), "url", Bounds(ttft_s=2, tbt_s=0.2)
    )
    assert result.within_slo == 0.25
    assert (result.requests, result.finished, result.rejected) == (4, 3, 1)
    assert result.cached_tokens == 4
    assert result.ttft_s.p50 == 1
    assert result.tbt_s.p99 == pytest.approx(0.3, rel=0.05)
    assert as_dict(result)["bench"] == "client"


def test_of_what_never_came_there_are_no_figures():
    told = heard_of(Seen(status=404, error="HTTP 404", ended_s=0.1), Seen(error=NOT_SENT))
    result = result_of(told, "url", Bounds())
    found = dict(lines(result))
    for what in ("TTFT mean", "TBT (longest", "gaps between", "TPOT mean", "E2E mean"):
        assert [value for name, value in found.items() if name.startswith(what)] == ["-"]
    whole = json.loads(json.dumps(as_dict(result)))
    assert [whole[name] for name in ("ttft_s", "tbt_s", "gap_s", "tpot_s", "e2e_s", "held_s")] == [None] * 6
    assert whole["late_s"]["p99"] == 0, "it was sent in time"


@pytest.mark.parametrize(("model", "code"), [("toy", 0), ("nope", 1)])
def test_the_exit_code_says_whether_anybody_was_answered(model, code):
    done = []

    async def client(port):
        arguments = [f"http://127.0.0.1:{port}", "--generate", "uniform:requests=2,rate=100,input=16,output=2", "--json"]
        arguments += ["--model", model, "--block-tokens", "16", "--last-id", "255"]
        done.append(await asyncio.to_thread(CliRunner().invoke, command, arguments))

    with capture_logs():  # the runner replaces the standard output, to which the server's thread must not write meanwhile
        ScriptedActor(max_model_len=4096).serve(client)
    (result,) = done
    assert result.exit_code == code, result.output
    assert json.loads(result.stdout.splitlines()[-1])["finished"] == (0 if code else 2)
