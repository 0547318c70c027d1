"""Answers that vLLMs read: each token goes to the client with its text, once and in order, whichever vLLM fails."""

import pytest
from actor_harness import LAYOUT, Harness

from mooncake_zmq.core.messages import (
    AnswerRead,
    AnswerUnread,
    FirstToken,
    Parsers,
    ParsersReported,
    Placed,
    ReadAnswer,
    Sampling,
    Schedule,
    StopRule,
    TokensDecoded,
)
from mooncake_zmq.gateway.requests.client_events import (
    ClientGone,
    ClientRequest,
    Failed,
    Finished,
    Reading,
    StopFound,
    TextRead,
    TextUnread,
    TokenOut,
)
from mooncake_zmq.gateway.requests.readings import AGAIN_S, READ_S, TRIES
from mooncake_zmq.gateway.requests.requests import Requests, RequestsSettings
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, unpack_tokens

ROOT = namespace(model="m", layout="l")
BOTH = Parsers(calls=True, reasoning=True)
EOS = 99


class Node(Harness):
    """A gateway whose request is placed on `v0`, while `v1` is there too."""

    def __init__(self, *, parsers=BOTH, max_tokens=8, **reading):
        settings = RequestsSettings(conductors=("k0",), max_open=8, deadline_s=100.0)
        super().__init__(Requests(name="me", host="h0", incarnation=1, settings=settings, layout=LAYOUT))
        for name in ("k0", "v0", "v1"):
            self.up(name)
        for name in ("v0", "v1"):
            if parsers is not None:
                self.say(name, ParsersReported(parsers=parsers))
        packed = pack_tokens(range(6))
        self.client(
            "r",
            ClientRequest(
                tokens=packed,
                root=ROOT,
                keys=tuple(extend_keys(ROOT, packed, LAYOUT.block_tokens)),
                sampling=Sampling(),
                stop=StopRule(max_tokens=max_tokens, eos_ids=(EOS,)),
                reading=Reading(parsers=BOTH, chat=b"{}", textless=frozenset((EOS,)), **reading),
            ),
        )
        self.place()

    def place(self, to="v0"):
        asked = self.one(Schedule)
        plan = {"reuse_blocks": 0, "sources": (), "ttft_s": 0.0, "tbt_s": 0.0}
        self.say("k0", Placed(request_id="r", attempt=asked.attempt, prefill=to, decode=to, **plan))

    def makes(self, first, *tokens, attempt=1, by="v0"):
        if not first:
            fields = {"own": 0, "local": 0, "remote": 0, "queue_s": 0.0, "prefill_s": 0.0}
            self.say(by, FirstToken(request_id="r", attempt=attempt, index=0, token=tokens[0], **fields))
            first, tokens = 1, tokens[1:]
        if tokens:
            self.say(by, TokensDecoded(entries=(("r", attempt, first, tokens),)))

    def asked(self):
        """The node that has the one call not looked at yet, the call, and its tokens."""
        ((node, message),) = [(to, each) for to, each in self.sent if isinstance(each, ReadAnswer)]
        self.sent = [each for each in self.sent if not isinstance(each[1], ReadAnswer)]
        return node, message, list(unpack_tokens(message.tokens))

    def reads(self, node, message, text="", **more):
        self.say(node, AnswerRead(request_id="r", call=message.call, text=text, **more))

    def fails(self, node, message, reason="no"):
        self.say(node, AnswerUnread(request_id="r", call=message.call, reason=reason))

    def got(self):
        """The client's outputs since the last look: a token as its number, a text as itself."""
        found, self.clients = [output for _, output in self.clients], []
        return [
            each.token if isinstance(each, TokenOut) else each.text if isinstance(each, TextRead) else type(each)
            for each in found
        ]

    @property
    def is_idle(self):
        return not self.busy() and not [key for key in self.timers if key[0] == "read"]


def test_tokens_wait_for_their_text_and_one_call_has_what_came_during_the_last():
    node = Node()
    node.makes(0, 10)
    to, first, tokens = node.asked()
    assert (tokens, first.state, first.end, node.got()) == ([10], b"", "", [])
    node.makes(1, 11, 12)
    assert not node.take(ReadAnswer), "one call at a time"
    node.now += 0.5
    node.reads(to, first, "a", state=b"1")
    assert node.got() == [10, "a"]
    assert not node.take(ReadAnswer), "a pause as long as the call took"
    node.advance(0.4)
    node.makes(3, 13)
    node.advance(0.2)
    to, second, tokens = node.asked()
    assert (tokens, second.state) == ([11, 12, 13], b"1")
    node.makes(4, EOS)
    node.reads(to, second, "bcd", state=b"2")
    assert node.got() == [11, 12, 13, "bcd"]
    to, last, tokens = node.asked()
    assert (tokens, last.end, last.state) == ([], "stop", b"2"), "the end waits for no pause, and has no text"
    node.reads(to, last, "!")
    assert node.got() == [EOS, "!", Finished]
    assert node.is_idle


def test_an_answer_that_does_not_stream_is_read_once():
    node = Node(whole=True)
    node.makes(0, 10, 11)
    assert not node.take(ReadAnswer)
    assert node.got() == [10, 11], "its tokens come meanwhile: thousands at once would be more than a reader may have waiting"
    node.makes(2, 12, EOS)
    to, call, tokens = node.asked()
    assert (tokens, call.whole, call.end) == ([10, 11, 12], True, "stop")
    node.fails(to, call)
    node.advance(AGAIN_S)
    to, call, tokens = node.asked()
    assert tokens == [10, 11, 12]
    node.reads(to, call, "abc")
    assert node.got() == [12, EOS, "abc", Finished]
    assert node.is_idle


def test_an_answer_without_text_is_not_read():
    node = Node(whole=True)
    node.makes(0, EOS)
    assert node.got() == [EOS, Finished]
    assert node.is_idle


def test_a_call_that_fails_is_made_again_at_another_vllm_with_the_same_state():
    node = Node()
    node.makes(0, 10)
    to, call, _ = node.asked()
    node.reads(to, call, "a", state=b"1")
    node.advance(1)
    node.makes(1, 11)
    to, call, _ = node.asked()
    node.fails(to, call)
    node.makes(2, 12)
    assert not node.take(ReadAnswer)
    node.advance(AGAIN_S)
    other, again, tokens = node.asked()
    assert (other != to, tokens, again.state) == (True, [11, 12], b"1")
    node.reads(to, call, "late")
    assert node.got() == [10, "a"], "the answer to a call that failed is dropped"
    node.reads(other, again, "bc", state=b"2")
    assert node.got() == [11, 12, "bc"]


def test_a_vllm_that_dies_while_it_reads_is_followed_by_another_at_once():
    node = Node()
    node.makes(0, 10)
    to, _, _ = node.asked()
    node.down(to)
    other, _, tokens = node.asked()
    assert (other != to, tokens, node.got()) == (True, [10], [])


def test_an_answer_that_goes_on_elsewhere_goes_on_from_the_state():
    node = Node()
    node.makes(0, 10)
    to, call, _ = node.asked()
    node.reads(to, call, "a", state=b"1")
    node.down("v0")
    node.advance(1)
    node.place("v1")
    node.makes(1, 11, attempt=2, by="v1")
    to, call, tokens = node.asked()
    assert (to, tokens, call.state) == ("v1", [11], b"1")


@pytest.mark.parametrize("how", ["fails", "silent"])
def test_after_calls_in_vain_the_rest_is_passed_on_unread(how):
    node = Node()
    node.makes(0, 10)
    for _ in range(TRIES):
        if how == "fails":
            node.fails(*node.asked()[:2])
        else:
            node.asked()
            node.advance(READ_S)
        assert node.got() in ([], [10, TextUnread])
        node.advance(AGAIN_S)
    node.makes(1, 11, EOS)
    assert node.got() == [11, EOS, Finished]
    assert node.actor.counts["answers_unread"] == 1
    assert node.is_idle


def test_without_a_vllm_that_has_the_parsers_an_answer_waits_for_one_and_not_forever():
    node = Node(parsers=None)
    node.makes(0, 10)
    node.makes(1, 11)
    assert not node.take(ReadAnswer)
    node.say("v1", ParsersReported(parsers=Parsers(calls=True)))
    assert not node.take(ReadAnswer), "it would read something else"
    node.say("v1", ParsersReported(parsers=BOTH))
    assert node.asked()[2] == [10, 11]
    alone = Node(parsers=None)
    alone.makes(0, 10)
    alone.advance(READ_S)
    assert alone.got() == [10, TextUnread]


def test_a_client_that_hangs_up_leaves_nothing():
    node = Node()
    node.makes(0, 10)
    node.asked()
    node.client("r", ClientGone())
    assert node.got() == []
    assert node.is_idle


@pytest.mark.parametrize("ended", [False, True])
def test_a_stop_string_ends_an_answer_whose_last_tokens_are_not_read_yet(ended):
    node = Node()
    node.makes(0, 10)
    to, call, _ = node.asked()
    node.makes(1, 11, *([EOS] if ended else []))
    node.reads(to, call, "stop", state=b"1")
    node.got()
    node.client("r", StopFound())
    assert node.got() == [Finished]
    assert node.is_idle


def test_a_request_that_fails_says_so_at_once():
    node = Node(whole=True)
    node.makes(0, 10)
    node.advance(101)
    assert node.got() == [10, Failed]


def test_a_drain_waits_for_what_is_being_read_and_ends_it_when_its_time_is_over():
    node = Node()
    node.makes(0, 10, EOS)
    node.drain()
    assert not node.drained
    node.run_out_of_drain()
    assert node.got() == [10, EOS, TextUnread, Finished]
    assert node.drained


def test_the_most_that_a_vllm_has_is_offered():
    node = Node(parsers=None)
    assert node.actor.readings.offered("") == Parsers()
    node.say("v0", ParsersReported(parsers=Parsers(reasoning=True)))
    assert node.actor.readings.offered("") == Parsers(reasoning=True)
    node.say("v1", ParsersReported(parsers=BOTH))
    assert node.actor.readings.offered("") == BOTH
    node.down("v1")
    assert node.actor.readings.offered("") == Parsers(reasoning=True)
