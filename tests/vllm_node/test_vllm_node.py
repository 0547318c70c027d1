"""The actor beside vLLM: a queue, tokens in order to their end, and whatever ends a request leaves nothing behind."""

from dataclasses import replace

from actor_harness import LAYOUT as NARROW
from actor_harness import Harness
from adversary import VOCABULARY, anything, of, pauses, senders
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mooncake_zmq.core.actor import Received
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    DecodeLoad,
    FirstToken,
    PrefillLoad,
    Sampling,
    StartPrefill,
    StopRule,
    TokensDecoded,
)
from mooncake_zmq.core.work import EngineProbed, Generate, Generated, ProbeEngine, TokensGenerated, WorkFailed
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, unpack_tokens
from mooncake_zmq.vllm_node.settings import VllmSettings
from mooncake_zmq.vllm_node.vllm_node import VllmNode, unable

LAYOUT = replace(NARROW, vocab_size=VOCABULARY)
ROOT = namespace(model="m", layout="l")
BASE = VllmSettings(max_running=2, max_queued=2, capacity_tokens=200)


class Node(Harness):
    """The node "me" on host h0, with a vLLM that is well."""

    def __init__(self, *, well=True, **changed):
        own = replace(BASE, **changed)
        super().__init__(VllmNode(name="me", host="h0", incarnation=2, settings=own, layout=LAYOUT, costs=Costs()))
        self.own = own
        for name in ("g", "g2", "k"):
            self.up(name, 7)
        if well:
            self.probed()

    def probed(self, ready=True):
        self.done(self.work(ProbeEngine)[0], EngineProbed(ready, "" if ready else "it is gone"))

    def begin(self, request_id="r", length=6, *, max_tokens=5, gateway="g", attempt=1, **changes):
        tokens = pack_tokens([i % 50 for i in range(length)])
        fields = {
            "request_id": request_id,
            "attempt": attempt,
            "tokens": tokens,
            "root": ROOT,
            "keys": tuple(extend_keys(ROOT, tokens, LAYOUT.block_tokens)),
            "first_index": 0,
            "sampling": Sampling(),
            "stop": StopRule(max_tokens=max_tokens, eos_ids=(9,)),
            "decode": "me",
            "reuse_blocks": 0,
            "sources": (),
            "deadline_s": 60.0,
        }
        self.say(gateway, StartPrefill(**(fields | changes)))

    @property
    def generating(self):
        return [work_id for work_id, work in self.works.items() if isinstance(work, Generate)]

    def gives(self, *tokens, work_id=None):
        self.progress(self.generating[0] if work_id is None else work_id, TokensGenerated(tokens))

    def ends(self, result, work_id=None):
        self.done(self.generating[0] if work_id is None else work_id, result)

    def told(self):
        """Output tokens told so far, by index."""
        found = {}
        for first in self.take(FirstToken):
            found[first.index] = first.token
        for decoded in self.take(TokensDecoded):
            for _, _, index, tokens in decoded.entries:
                found |= dict(enumerate(tokens, index))
        return found


def test_a_request_gets_its_tokens_in_order_and_nothing_stays_behind():
    node = Node()
    node.begin()
    node.gives(1)
    node.gives(2, 3)
    node.gives(4)
    node.ends(Generated((5,), reused=4))
    (reused,) = [m.reused for _, m in node.sent if isinstance(m, TokensDecoded) and m.reused]
    assert reused == (("r", 1, 4),)
    assert node.told() == {0: 1, 1: 2, 2: 3, 3: 4, 4: 5}
    assert not node.busy()


def test_an_answer_of_one_token_tells_with_it_what_was_reused():
    node = Node()
    node.begin(max_tokens=1)
    node.ends(Generated((3,), reused=4))
    assert node.one(FirstToken).own == 4
    assert not node.take(TokensDecoded)
    assert not node.busy()


def test_a_resumed_request_goes_on_at_the_index_it_came_with():
    node = Node()
    node.begin(first_index=3, attempt=2)
    assert node.work(Generate)[1].count == 3
    node.gives(7)
    node.ends(Generated((8,)))
    assert node.told() == {3: 7, 4: 8}


def test_an_engine_that_is_lost_in_mid_answer_fails_the_attempt_and_gets_nothing_new_before_it_is_well():
    node = Node()
    node.begin("a")
    node.gives(1)
    node.ends(WorkFailed("hung up"))
    assert not node.one(AttemptFailed).full
    node.begin("b")
    assert not node.generating
    node.probed(ready=False)
    assert node.one(AttemptFailed).full, "who waits goes on elsewhere at once"
    node.begin("c")
    assert node.one(AttemptFailed).full
    node.advance(node.own.report_s)
    assert node.take(PrefillLoad)[-1].draining
    assert node.take(DecodeLoad)[-1].draining
    node.advance(node.own.probe_s)
    node.probed()
    node.begin("d")
    assert node.generating
    node.advance(node.own.report_s)
    assert not node.take(PrefillLoad)[-1].draining


def test_before_vllm_was_asked_requests_wait():
    node = Node(well=False)
    node.begin()
    assert not node.generating
    node.probed()
    assert node.generating


def test_a_cancel_hangs_up_and_the_place_is_free_once_that_is_done():
    node = Node(max_running=1)
    node.begin("a")
    node.begin("b")
    (first,) = node.generating
    node.say("g2", CancelRequest(request_id="a", attempt=1))
    assert not node.cancelled, "it is another gateway's"
    node.say("g", CancelRequest(request_id="a", attempt=1))
    assert node.cancelled == [first]
    node.gives(1, work_id=first)
    assert not node.told(), "what still comes is nobody's"
    assert node.generating == [first]
    node.ends(WorkFailed("cancelled"), first)
    assert node.generating != [first]
    node.say("g", CancelRequest(request_id="b", attempt=1))
    node.ends(WorkFailed("cancelled"))
    assert not node.busy()


def test_the_queue_is_bounded_and_first_come_first_served():
    node = Node(max_running=1, max_queued=2)
    for name in ("a", "b", "c", "d"):
        node.begin(name)
    assert [failed.request_id for failed in node.take(AttemptFailed) if failed.full] == ["d"]
    node.advance(node.own.report_s)
    load = node.take(PrefillLoad)[-1]
    assert len(load.jobs) == 3
    assert load.room == 0
    node.ends(Generated((9,)))
    assert node.one(FirstToken).request_id == "a"
    node.ends(Generated((9,)))
    assert node.one(FirstToken).request_id == "b"


def test_an_engine_that_goes_on_after_the_end_is_cut_off():
    node = Node()
    node.begin(max_tokens=3)
    node.gives(1, 9, 2)
    assert node.told() == {0: 1, 1: 9}, "9 ends an answer"
    assert node.cancelled


def test_an_engine_that_ends_too_early_fails_the_attempt():
    node = Node()
    node.begin(max_tokens=3)
    node.ends(Generated((1,)))
    assert node.told() == {0: 1}
    assert "ended the answer" in node.one(AttemptFailed).reason
    assert not node.busy()


def test_tokens_that_the_model_does_not_have_fail_the_attempt():
    for odd in (VOCABULARY, -1, 1 << 70):
        node = Node()
        node.begin()
        node.gives(1, odd)
        assert "does not have" in node.one(AttemptFailed).reason
        assert node.cancelled


def test_a_request_for_another_decode_is_refused():
    node = Node()
    node.begin(decode="d")
    assert not node.one(AttemptFailed).full


def test_a_drained_node_finishes_what_it_has_and_hands_over_what_takes_too_long():
    node = Node()
    node.begin("a")
    node.begin("b")
    node.drain()
    node.begin("c")
    assert node.one(AttemptFailed).full
    node.ends(Generated((9,)))
    assert not node.drained
    node.run_out_of_drain()
    assert node.one(AttemptFailed).full
    node.ends(WorkFailed("cancelled"))
    assert node.drained


def test_a_resting_node_finishes_what_it_has_stays_and_takes_requests_again():
    node = Node()
    node.begin("a")
    node.rest()
    assert node.take(PrefillLoad)[-1].draining
    assert node.take(DecodeLoad)[-1].draining
    node.begin("b")
    assert node.one(AttemptFailed).full
    node.ends(Generated((9,)))
    assert not node.drained
    node.rest(False)
    assert not node.take(PrefillLoad)[-1].draining
    node.begin("c")
    assert node.generating


def test_reports_name_the_work_left_and_the_kv_held():
    node = Node()
    node.begin("a", length=10, booking=5)
    node.begin("b", length=150, booking=6)
    node.gives(1)
    node.advance(node.own.report_s)
    prefill, decode = node.take(PrefillLoad)[-1], node.take(DecodeLoad)[-1]
    assert [job.booking for job in prefill.jobs] == [6]
    assert prefill.jobs[0].left_s > 0
    assert (decode.running, decode.reserved, decode.free_tokens) == (1, 1, 200 - 161)
    assert set(decode.bookings) == {5, 6}


def test_a_gateway_that_is_gone_wants_nothing_more():
    node = Node()
    node.begin()
    node.down("g")
    assert node.cancelled
    node.ends(WorkFailed("cancelled"))
    assert not node.busy()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(("a", "b", "c", "d")), st.integers(1, 40)),
        st.tuples(st.just("say"), senders, anything),
        st.tuples(st.just("say"), st.just("g"), of(CancelRequest, StartPrefill)),
        st.tuples(st.just("give"), st.integers(0, 9), st.lists(st.integers(-1, VOCABULARY), max_size=4)),
        st.tuples(st.just("end"), st.integers(0, 9), st.lists(st.integers(-1, VOCABULARY), max_size=4)),
        st.tuples(st.just("fail"), st.integers(0, 9), st.none()),
        st.tuples(st.just("probe"), st.booleans(), st.none()),
        st.tuples(st.just("wait"), pauses, st.none()),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_nothing_that_comes_ends_or_spoils_it(steps):
    node, attempt = Node(), 1
    for kind, which, what in steps:
        works = node.generating
        match kind:
            case "begin":
                attempt += 1
                node.begin(which, what, attempt=attempt)
            case "say" if which in node.peers:
                message = what
                if isinstance(message, StartPrefill):
                    message = structs.replace(message, deadline_s=min(message.deadline_s, 60.0))
                node.handle(Received(which, message))
            case "give" if works:
                node.gives(*what, work_id=works[which % len(works)])
            case "end" if works:
                node.ends(Generated(tuple(what)), works[which % len(works)])
            case "fail" if works:
                node.ends(WorkFailed("odd"), works[which % len(works)])
            case "probe" if any(isinstance(work, ProbeEngine) for work in node.works.values()):
                node.probed(which)
            case "wait":
                node.advance(which)
    node.run_out_of_drain()
    for work_id in node.generating:
        node.ends(WorkFailed("cancelled"), work_id)
    assert not node.busy()
    assert node.drained


def test_vllm_gets_prompt_and_output_so_far():
    node = Node()
    node.begin(length=4, first_index=1)
    assert unpack_tokens(node.work(Generate)[1].tokens) == [0, 1, 2, 3]


def test_what_vllm_cannot_go_on_with_is_refused():
    assert unable(Sampling(), 3) is None
    assert "grammar" in unable(Sampling(constraint=b"x"), 0)
