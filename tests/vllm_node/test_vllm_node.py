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
from mooncake_zmq.core.drain import MOVE, MOVE_AGAIN_S
from mooncake_zmq.core.messages import (
    AdaptersListed,
    AttemptFailed,
    CancelRequest,
    DecodeLoad,
    FirstToken,
    PlaceElsewhere,
    PrefillLoad,
    PromptScored,
    Sampling,
    StartPrefill,
    StopRule,
    TokensDecoded,
    WeightsReported,
)
from mooncake_zmq.core.work import (
    EngineProbed,
    Generate,
    Generated,
    ProbeEngine,
    PromptScoresGenerated,
    TokensGenerated,
    WorkFailed,
)
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, unpack_tokens
from mooncake_zmq.vllm_node.admission import unable
from mooncake_zmq.vllm_node.early import EARLY_S
from mooncake_zmq.vllm_node.settings import VllmSettings
from mooncake_zmq.vllm_node.vllm_node import VllmNode

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

    def probed(self, ready=True, adapters=None):
        self.done(self.work(ProbeEngine)[0], EngineProbed(ready, "" if ready else "it is gone", adapters))

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
        if "asker" in changes:
            changes["gateway"] = changes.pop("asker")
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


def test_a_prompts_logprobs_go_to_the_gateway_before_its_first_token_and_nothing_counts_as_reused():
    node, scores = Node(), ((-1.0, ()), (-2.0, ()))
    node.begin(length=3, prompt_logprobs=0)
    work_id, work = node.work(Generate)
    assert work.prompt_likeliest == 0
    node.progress(work_id, PromptScoresGenerated(1, scores))
    scored = node.one(PromptScored)
    assert (scored.request_id, scored.attempt, scored.first, scored.logprobs) == ("r", 1, 1, scores)
    node.gives(1)
    node.done(work_id, Generated((2, 3, 4, 5), 2))
    assert node.one(FirstToken).own == 0
    assert node.one(TokensDecoded).reused == ()


def test_the_versions_of_the_weights_go_to_the_gateway_before_the_last_token_by_their_place_in_the_answer():
    node = Node()
    node.begin(first_index=10, max_tokens=15)
    node.gives(1, 2)
    node.ends(Generated((3, 4, 5), 0, versions=(("one", 0), ("two", 2))))
    *_, reported, last = [message for _, message in node.sent if isinstance(message, WeightsReported | TokensDecoded)]
    assert reported == WeightsReported("r", 1, 15, (("one", 10), ("two", 12)))
    assert last.entries == (("r", 1, 12, (3, 4, 5)),)
    assert not node.busy()


def test_logprobs_go_with_their_tokens_and_those_beyond_the_end_are_dropped():
    node = Node()
    node.begin(max_tokens=3, sampling=Sampling(logprobs=0))
    scores = [(-float(number), ()) for number in range(4)]
    node.progress(node.generating[0], TokensGenerated((1, 2), tuple(scores[:2])))
    node.ends(Generated((3, 4), 4, tuple(scores[2:])))
    assert node.one(FirstToken).logprob == scores[0]
    assert [decoded.logprobs for decoded in node.take(TokensDecoded)] == [((scores[1],),), ((scores[2],),)]
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


def test_a_drained_node_asks_to_place_elsewhere_what_another_vllm_can_take_over():
    node = Node(max_queued=4)
    node.begin("a")
    node.begin("b", sampling=Sampling(presence_penalty=1.0))
    node.begin("c", sampling=Sampling(constraint=b"x"))
    node.begin("d")
    node.gives(1)
    node.set_cordon()
    assert not node.take(PlaceElsewhere)
    node.advance(node.own.drain_grace_s)
    assert node.one(PlaceElsewhere, "g").attempts == (("a", 1), ("d", 1)), "penalties and grammars end where they began"
    node.say("g", CancelRequest(request_id="a", attempt=1))
    node.say("g", CancelRequest(request_id="d", attempt=1))
    node.advance(MOVE_AGAIN_S)
    assert not node.take(PlaceElsewhere)
    assert MOVE not in node.timers


def test_a_resting_node_finishes_what_it_has_stays_and_takes_requests_again():
    node = Node()
    node.begin("a")
    node.set_cordon()
    assert node.take(PrefillLoad)[-1].draining
    assert node.take(DecodeLoad)[-1].draining
    node.begin("b")
    assert node.one(AttemptFailed).full
    node.ends(Generated((9,)))
    assert not node.drained
    node.set_cordon(False)
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


class Prefilling(Node):
    """One that passes on to "w"."""

    def __init__(self, **changed):
        super().__init__(part="prefill", **changed)
        self.up("w", 3, role="vllm")

    def begin(self, *arguments, **changes):
        super().begin(*arguments, **({"decode": "w"} | changes))


class Decoding(Node):
    """One that goes on with what "w" prefilled."""

    def __init__(self, **changed):
        super().__init__(part="decode", **changed)
        self.up("w", 3, role="vllm")

    def take_over(self, *arguments, **changes):
        super().begin(*arguments, gateway="w", **({"asker": "g", "first_index": 1} | changes))


def test_one_that_prefills_has_one_token_made_and_passes_on_the_rest():
    node = Prefilling()
    node.begin(length=10, sources=("s1",), booking=5, max_tokens=5)
    work = node.work(Generate)[1]
    assert (work.stop.max_tokens, work.sources, work.coming_tokens) == (1, ("s1",), 0)
    node.advance(2.0)
    node.ends(Generated((3,), reused=8))
    first, (to, rest) = node.one(FirstToken), next((to, m) for to, m in node.sent if isinstance(m, StartPrefill))
    assert (first.token, first.index, first.own) == (3, 0, 8)
    assert (to, rest.gateway, rest.first_index, rest.booking, rest.sources) == ("w", "g", 1, 5, ("s1",))
    assert unpack_tokens(rest.tokens) == [*range(10), 3]
    assert rest.stop == StopRule(max_tokens=5, eos_ids=(9,)), "of the whole answer"
    assert rest.deadline_s == 58.0
    assert not node.busy()
    node.take(StartPrefill)
    node.begin("b", max_tokens=1)
    node.ends(Generated((3,)))
    node.begin("c")
    node.ends(Generated((9,)))
    assert len(node.take(FirstToken)) == 2
    assert not node.take(StartPrefill), "an answer that has ended goes nowhere"


def test_a_first_token_that_comes_before_the_end_of_its_stream_is_passed_on_once():
    node = Prefilling()
    node.begin()
    node.gives(3, 4)
    assert len(node.take(StartPrefill)) == 1
    assert node.told() == {0: 3}
    assert node.cancelled, "more was not asked for"
    node.ends(WorkFailed("cancelled"))
    assert not node.take(StartPrefill)
    assert not node.busy()


def test_one_that_decodes_goes_on_and_answers_to_the_gateway():
    node = Decoding()
    node.take_over(length=11, max_tokens=4, sources=("s1",))
    work = node.work(Generate)[1]
    assert (work.count, work.stop.max_tokens, work.sources, work.coming_tokens) == (1, 4, ("s1",), 10)
    node.gives(5)
    node.ends(Generated((6, 7), reused=8))
    decoded = [(to, m) for to, m in node.sent if isinstance(m, TokensDecoded)]
    assert {to for to, _ in decoded} == {"g"}
    assert not any(m.reused for _, m in decoded), "what the prompt cost was told by who prefilled it"
    assert node.told() == {1: 5, 2: 6, 3: 7}
    assert not node.take(FirstToken)
    assert (node.actor.counts["taken_over_tokens"], node.actor.counts["taken_over_tokens_reused"]) == (11, 8)
    assert not node.busy()


def test_each_part_reports_both_kinds_of_work_as_it_may_stand_in_for_the_other():
    for node in (Prefilling(), Decoding()):
        node.advance(node.own.report_s)
        assert node.take(PrefillLoad)
        assert node.take(DecodeLoad)
    node = Decoding()
    node.take_over(length=11, booking=7)
    node.advance(1.0)
    before = node.take(DecodeLoad)[-1].step
    node.gives(5)
    node.advance(node.own.report_s)
    load = node.take(DecodeLoad)[-1]
    assert (load.running, load.bookings, load.free_tokens) == (1, (7,), 200 - 12)
    assert load.step == before, "its first token is no step"


def test_each_part_takes_whole_requests():
    for node in (Prefilling(), Decoding()):
        node.begin(decode="me", max_tokens=3)
        work = node.work(Generate)[1]
        assert (work.stop.max_tokens, work.coming_tokens) == (3, 0)
        node.gives(5)
        node.ends(Generated((6, 7)))
        assert node.told() == {0: 5, 1: 6, 2: 7}
        assert not node.take(StartPrefill)
        assert not node.busy()


def test_no_part_takes_what_is_half_of_another():
    for node in (Node(), Decoding()):
        node.up("w", 3, role="vllm")
        node.begin(decode="w")
        assert not node.one(AttemptFailed).full
    for node in (Node(), Prefilling()):
        node.up("w", 3, role="vllm")
        node.begin(gateway="w", asker="g", first_index=1)
        assert not node.generating


def test_what_is_passed_on_by_somebody_else_or_for_nobody_is_dropped():
    node = Decoding()
    node.begin(gateway="g", asker="g2", first_index=1)
    node.take_over(asker="k")
    node.take_over(asker="")
    assert not node.generating
    node.take_over(asker="g8")
    node.advance(EARLY_S - 0.1)
    assert node.actor.counts["unasked_requests"] == 3
    node.advance(0.2)
    node.up("g8", 1)
    assert not node.generating
    assert not node.take(AttemptFailed)
    assert node.actor.counts["unasked_requests"] == 4


def test_what_is_passed_on_before_its_gateway_connected_begins_once_it_has():
    node = Decoding(max_queued=2)
    for name in ("a", "b", "c"):
        node.take_over(name, asker="g9")
    assert node.actor.counts["unasked_requests"] == 1, "so many are held and no more"
    assert not node.generating
    node.up("g9", 5)
    assert len(node.generating) == 2
    node.advance(2 * EARLY_S)
    assert node.actor.counts["unasked_requests"] == 1
    for work_id in node.generating:
        node.ends(Generated((5, 6, 7, 8)), work_id)
    assert {to for to, m in node.sent if isinstance(m, TokensDecoded)} == {"g9"}
    assert not node.busy()


def test_what_is_passed_on_for_one_that_connects_as_no_gateway_is_dropped():
    node = Decoding()
    node.take_over(asker="g9")
    node.up("g9", 5, role="conductor")
    assert not node.generating
    assert node.actor.counts["unasked_requests"] == 1


def test_a_decode_that_is_not_there_is_avoided_before_and_after_the_prefill_and_not_tried_for_ever():
    node = Prefilling()
    node.begin(decode="nobody")
    assert not (failed := node.one(AttemptFailed)).full
    assert failed.avoid == "nobody"
    node.begin("b")
    node.down("w")
    node.ends(Generated((3,)))
    assert node.told() == {0: 3}
    assert not (failed := node.one(AttemptFailed)).full
    assert failed.avoid == "w"
    assert not node.busy()


def test_a_full_decode_sends_the_request_elsewhere():
    node = Decoding(max_running=1, max_queued=1)
    for name in ("a", "b", "c"):
        node.take_over(name)
    ((to, failed),) = [(to, m) for to, m in node.sent if isinstance(m, AttemptFailed)]
    assert (to, failed.request_id, failed.full) == ("g", "c", True)
    node.down("g")
    node.ends(WorkFailed("cancelled"))
    assert not node.busy(), "nor does anything stay when its gateway is gone"


def test_a_decode_goes_on_when_the_prefill_is_gone():
    node = Decoding()
    node.take_over(max_tokens=3)
    node.down("w")
    node.ends(Generated((1, 2)))
    assert node.told() == {1: 1, 2: 2}


def test_what_depends_on_the_answer_s_tokens_cannot_be_apart():
    node = Prefilling()
    node.begin(sampling=Sampling(presence_penalty=1.0))
    assert "penalize" in node.one(AttemptFailed).reason
    node.begin("b", sampling=Sampling(presence_penalty=1.0), max_tokens=1)
    assert node.generating, "an answer of one token is whole"


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


@settings(max_examples=60)
@given(st.sampled_from((Node, Prefilling, Decoding)), steps)
def test_nothing_that_comes_ends_or_spoils_it(kind_of_node, steps):
    node, attempt = kind_of_node(), 1
    for kind, which, what in steps:
        works = node.generating
        match kind:
            case "begin":
                attempt += 1
                getattr(node, "take_over", node.begin)(which, what, attempt=attempt)
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
    assert unable(Sampling(constraint=b"x"), 0) is None
    assert "grammar" in unable(Sampling(constraint=b"x"), 3)


def hang(node, *, ready=True):
    """Let half a minute of questions pass that vLLM answers, or does not; return when its answers were given up."""
    began = node.now
    while node.now - began < 30:
        node.advance(node.own.probe_s)
        if not ready:
            node.advance(node.own.probe_timeout_s)
        node.probed(ready=ready)
        if node.take(AttemptFailed):
            return node.now - began
    return None


def test_an_engine_that_hangs_behind_a_server_that_answers_is_left_within_five_seconds():
    node = Node()
    node.begin("a")
    node.begin("b")
    node.gives(1)
    assert hang(node) <= 5
    node.ends(WorkFailed("cancelled"))
    node.ends(WorkFailed("cancelled"))
    node.advance(node.own.probe_s)
    assert node.work(ProbeEngine)[1].generate, "to be there is not enough"
    node.begin("c")
    assert node.one(AttemptFailed).full
    node.probed()
    node.begin("d")
    assert node.generating


def test_a_server_that_does_not_answer_is_left_within_five_seconds():
    node = Node()
    node.begin("a")
    node.gives(1)
    assert hang(node, ready=False) <= 5


def test_what_begins_amid_a_health_check_without_answer_is_moved_with_it():
    node = Node()
    node.advance(node.own.probe_s)
    node.begin("a")
    node.advance(node.own.probe_timeout_s)
    node.probed(ready=False)
    assert node.one(AttemptFailed).request_id == "a"


def test_a_bad_answer_of_the_server_leaves_what_runs_alone():
    node = Node()
    node.begin("a")
    node.gives(1)
    node.advance(node.own.probe_s)
    node.probed(ready=False)
    assert not node.take(AttemptFailed)
    node.gives(2)
    assert node.told() == {0: 1, 1: 2}


def test_answers_wait_for_a_prompt_beside_them_by_what_it_should_take():
    node = Node(quiet_s=1000.0)
    takes(node, 10.0, length=100)
    node.begin("a")
    node.gives(1)
    node.begin("b", length=100)
    assert not node.take(AttemptFailed)
    assert hang(node) > 8


def takes(node, seconds, **prompt):
    """Let vLLM take so long for a prompt."""
    node.begin("measured", max_tokens=1, **prompt)
    node.advance(seconds)
    node.ends(Generated((3,)))


def test_prompts_that_get_no_first_token_are_left_by_what_they_should_take():
    node = Node()
    takes(node, 0.1, length=6)
    node.begin("a")
    assert hang(node) <= 5
    node = Node(quiet_s=1000.0)
    takes(node, 10.0, length=100)
    node.begin("a", length=100)
    assert hang(node) > 8


def test_before_a_prompt_was_measured_its_first_token_may_take_long():
    node = Node()
    node.begin("a")
    assert hang(node) is None


def test_a_decode_that_hangs_before_it_goes_on_is_left_too():
    node = Decoding()
    node.take_over("a", length=11, max_tokens=4)
    node.advance(0.1)
    node.gives(1)
    node.take_over("b", length=11, max_tokens=4)
    node.ends(Generated((2, 3)))
    assert hang(node) <= 5


def test_a_judgement_that_came_too_early_makes_the_next_one_slower():
    node, waits = Node(max_running=1), []
    for request in "abc":
        node.begin(request)
        node.gives(1)
        waits.append(hang(node))
        node.ends(WorkFailed("cancelled"))
        node.advance(node.own.probe_s)
        node.probed()
    assert waits[0] < waits[1] < waits[2]


def test_conductors_learn_which_adapters_are_listed_once_that_is_known_and_when_it_changes():
    node = Node(well=False)
    node.probed()
    assert node.take(AdaptersListed) == []
    for adapters, sent in ((("sql", "poet"), ("poet", "sql")), (("poet", "sql"), None), (None, None), ((), ())):
        node.advance(node.own.probe_s)
        node.probed(adapters=adapters)
        assert [message.adapters for message in node.take(AdaptersListed)] == ([] if sent is None else [sent])
    node.up("k2", 7)
    assert [message.adapters for message in node.take(AdaptersListed)] == [()], "a conductor that comes later"
    node.up("g3", 7)
    assert node.take(AdaptersListed) == []
