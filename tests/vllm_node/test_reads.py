"""The node's queue of answers to read: one at a time, half of the time at most, and an answer to every call."""

import json

import pytest
from stub_vllm import StubVllm
from test_generation import Bench
from test_vllm_node import BASE, Node

from mooncake_zmq.core.messages import AnswerRead, AnswerUnread, CallRead, Parsers, ParsersReported, ReadAnswer
from mooncake_zmq.core.work import EngineProbed, ProbeEngine, ReadTokens, TokensRead, WorkFailed
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.runtime.derender import DERENDER, RENDER

READ = TokensRead("why", "what", (CallRead(index=0, name="f", arguments="{}"),), b'{"x":1}')


class Reader(Node):
    def asks(self, request_id="r", call=1, *, gateway="g", **more):
        fields = {"chat": b"{}", "prompt": pack_tokens([1]), "tokens": pack_tokens([2]), "deadline_s": 10.0}
        self.say(gateway, ReadAnswer(request_id=request_id, call=call, **(fields | more)))

    @property
    def reading(self):
        return [work for work in self.works.values() if isinstance(work, ReadTokens)]

    def ends(self, result):
        self.done(self.work(ReadTokens)[0], result)


def test_what_is_read_goes_to_the_gateway_that_asked():
    node = Reader()
    node.asks(state=b"s", end="stop")
    (work,) = node.reading
    assert work == ReadTokens(b"{}", pack_tokens([1]), pack_tokens([2]), b"s", "stop")
    node.ends(READ)
    answer = node.one(AnswerRead, "g")
    assert (answer.request_id, answer.call, answer.reasoning, answer.text) == ("r", 1, "why", "what")
    assert (answer.calls, answer.state) == (READ.calls, READ.state)
    assert not node.busy()


def test_one_is_read_at_a_time_with_a_pause_as_long_and_new_answers_first():
    node = Reader()
    node.asks("a")
    node.asks("b", state=b"s")
    node.asks("c", gateway="g2")
    node.asks("b", 2, state=b"t")
    assert len(node.reading) == 1
    node.now += 0.5
    node.ends(READ)
    assert not node.reading
    node.advance(0.5)
    node.ends(READ)
    assert node.one(AnswerRead, "g2").request_id == "c"
    node.advance(0)
    assert [work.state for work in node.reading] == [b"t"], "a later call replaces the one before it"


def test_a_failure_is_reported_and_what_waited_too_long_is_not_read():
    node = Reader()
    node.asks("a")
    node.asks("b", deadline_s=1.0)
    node.now += 2.0
    node.ends(WorkFailed("why not"))
    assert node.one(AnswerUnread).reason == "why not"
    node.advance(2.0)
    assert not node.reading
    assert not node.busy()


def test_more_than_may_wait_are_refused():
    node = Reader()
    most = BASE.max_running + BASE.max_queued
    for number in range(most + 2):
        node.asks(f"r{number}")
    assert node.one(AnswerUnread).request_id == f"r{most + 1}"


def test_a_gateway_that_leaves_is_read_nothing_more():
    node = Reader()
    node.asks("a")
    node.asks("b")
    node.down("g")
    node.ends(READ)
    node.advance(1)
    assert not node.reading


def test_a_drain_whose_time_is_over_ends_what_is_read_and_what_waits():
    node = Reader()
    node.asks("a")
    node.asks("b")
    node.drain()
    assert not node.drained
    node.run_out_of_drain()
    assert node.one(AnswerUnread).request_id == "b"
    assert node.cancelled == [node.work(ReadTokens)[0]]
    node.ends(WorkFailed("cancelled"))
    assert node.one(AnswerUnread).request_id == "a"
    assert node.drained


def test_the_parsers_are_reported_to_gateways_and_asked_for_after_vllm_was_gone():
    node = Node(well=False)
    work_id, probe = node.work(ProbeEngine)
    assert probe.parsers
    node.done(work_id, EngineProbed(True))
    node.advance(1)
    work_id, probe = node.work(ProbeEngine)
    assert probe.parsers, "it has not said"
    node.done(work_id, EngineProbed(True, parsers=Parsers(calls=True)))
    assert [report.parsers.calls for report in node.take(ParsersReported, "g")] == [True]
    node.up("g3")
    assert node.one(ParsersReported, "g3").parsers == Parsers(calls=True)
    node.take(ParsersReported)
    node.advance(1)
    work_id, probe = node.work(ProbeEngine)
    assert not probe.parsers, "it has not been gone"
    node.done(work_id, EngineProbed(True))
    assert not node.take(ParsersReported)


# --- over HTTP


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def serving(stub: StubVllm, content: object, status: int = 200) -> None:
    stub.posts[DERENDER] = status, json.dumps(content).encode()


CALLS = [{"index": 1, "id": "x", "type": "function", "function": {"name": "f", "arguments": None}}]
CALLS += [{"index": 1, "id": None, "type": None, "function": {"name": None, "arguments": "{}"}}]
DELTA = {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": CALLS}


def test_a_part_is_read_with_its_state(bench):
    chunk = {"id": "r", "choices": [{"index": 0, "delta": DELTA, "finish_reason": None}]}
    serving(bench.stub, {"chunk": chunk, "stream_state": {"output_token_ids": [2]}})
    read = bench.result(ReadTokens(b'{"messages":[]}', pack_tokens([1]), pack_tokens([2])))
    calls = (CallRead(index=1, name="f"), CallRead(index=1, arguments="{}"))
    assert read == TokensRead("so", "", calls, b'{"output_token_ids": [2]}')


def test_a_whole_answer_is_read(bench):
    calls = [{"id": "x", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    serving(bench.stub, {"id": "r", "choices": [{"message": {"content": "a", "reasoning": None, "tool_calls": calls}}]})
    read = bench.result(ReadTokens(b"{}", pack_tokens([1]), pack_tokens([2]), whole=True))
    each = (CallRead(index=0, name="f", arguments="{}"), CallRead(index=1, name="g", arguments="{}"))
    assert read == TokensRead("", "a", each)


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        ({"error": {"message": "chat_request is required"}}, 400, 'vLLM\'s parsers answer 400: {"error"'),
        ({"detail": "x"}, 422, "vLLM's parsers answer 422"),
        ({"choices": 1}, 200, "vLLM's parsers answer what is not theirs"),
        ({"choices": []}, 200, "vLLM's parsers answer 0 choices"),
        ({"choices": [{"message": {"tool_calls": [{"function": {"name": "f" * 5000}}]}}]}, 200, "read an invalid call"),
    ],
)
def test_what_is_not_read_is_named(bench, content, status, why):
    serving(bench.stub, content, status)
    failed = bench.result(ReadTokens(b"{}", pack_tokens([1]), pack_tokens([2])))
    assert isinstance(failed, WorkFailed)
    assert why in failed.reason


@pytest.mark.parametrize(
    ("status", "kwargs", "parsers"),
    [
        (200, {"chat_template_kwargs": {}}, Parsers(calls=True, reasoning=True)),
        (200, None, Parsers(calls=True)),
        (400, None, Parsers()),
        (404, None, Parsers()),
    ],
)
def test_a_health_check_finds_out_which_parsers_vllm_has(bench, status, kwargs, parsers):
    bench.stub.posts[RENDER] = status, json.dumps({"token_ids": [1], "reasoning_parser_kwargs": kwargs}).encode()
    assert bench.result(ProbeEngine(parsers=True)).parsers == parsers
