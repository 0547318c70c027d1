"""The index's future: what placed prompts will compute counts, is waited for where that costs less, and goes with them."""

import pytest
from conductor_harness import BLOCK, COSTS, Cluster, keys
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.conductor.coming import _common
from mooncake_zmq.core.actor import Send
from mooncake_zmq.core.messages import BlocksAnnounced, ChangeReplica, Placed, QueuedJob, Rejected, RequestEnded, WaitEnded

CHUNK = 2 * BLOCK
DOC = keys("doc", 16)


class Burst(Cluster):
    """Prefills that compute in chunks of two blocks, and what the conductor sends to them about waits."""

    def __init__(self, hosts=3, **settings):
        self.waits = []
        super().__init__(hosts, **settings)
        for place in range(hosts):
            self.prefill_load(f"p{place}", chunk_tokens=CHUNK)

    def handle(self, event):
        effects = super().handle(event)
        self.waits += [
            (effect.to, effect.message.booking, effect.message.sources)
            for effect in effects
            if isinstance(effect, Send) and isinstance(effect.message, WaitEnded)
        ]
        return effects

    def ask(self, own, **more):
        """A prompt of the document and two blocks of its own."""
        answer = self.schedule((*DOC, *keys(own, 2)), **more)
        assert isinstance(answer, Placed)
        return answer


def work_s(tokens, prefix=0):
    return COSTS.compute_s(tokens, prefix)


def test_a_prompt_waits_for_what_another_computes_and_is_promised_that_time():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    assert (first.reuse_blocks, first.coming_blocks, first.coming_s) == (0, 0, 0.0)
    assert (second.reuse_blocks, second.coming_blocks) == (16, 16)
    tokens = 18 * BLOCK + 10
    ready_s = first.ttft_s - work_s(tokens, 16 * BLOCK)
    assert ready_s + work_s(tokens, 16 * BLOCK) <= second.ttft_s < 1.02 * first.ttft_s
    assert second.coming_s > ready_s, "it outlasts what is predicted"
    assert second.prefill != first.prefill
    assert second.sources == (f"c{first.prefill[1]}",)


def test_what_a_queued_prompt_will_compute_is_coming_from_its_placement_on():
    cluster = Burst()
    for place in range(3):
        cluster.prefill_load(f"p{place}", queued_s=50.0, chunk_tokens=CHUNK)
    first, second = cluster.ask("a"), cluster.ask("b")
    assert first.ttft_s > 50.0, "no prefill has begun it, or named it in a report"
    assert second.coming_blocks == 16


def test_under_the_paper_s_policy_nothing_is_coming():
    cluster = Burst(policy="global")
    assert [cluster.ask(own).reuse_blocks for own in "abc"] == [0, 0, 0]


def test_a_short_common_beginning_is_not_waited_for():
    cluster = Burst()
    cluster.ask("a")
    answer = cluster.schedule((*DOC[:1], *keys("else", 20)))
    assert (answer.reuse_blocks, answer.coming_blocks) == (0, 0)


def test_with_other_prefills_busy_it_joins_the_one_that_computes():
    cluster = Burst(hosts=2)
    cluster.prefill_load("p1", queued_s=500.0, chunk_tokens=CHUNK)
    first, second = cluster.ask("a"), cluster.ask("b")
    assert first.prefill == second.prefill == "p0"
    assert second.coming_blocks == 16
    assert second.ttft_s == pytest.approx(first.ttft_s + work_s(18 * BLOCK + 10, 16 * BLOCK))


def test_engine_time_has_a_price():
    """At none waiting is chosen only where it is sooner: never for what another begins to compute at the same moment."""
    assert Burst(engine_price=0).ask("a").coming_blocks == 0
    free = Burst(engine_price=0)
    free.ask("a")
    assert free.ask("b").coming_blocks == 0
    dear = Burst(engine_price=10)
    dear.ask("a")
    assert dear.ask("b").coming_blocks == 16


def test_a_wait_ends_when_a_pool_has_the_last_block_and_is_fetched_ahead_chunk_by_chunk():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    maker, home = f"c{first.prefill[1]}", f"c{second.prefill[1]}"
    cluster.announce(maker, DOC[:2])
    cluster.announce(maker, DOC[2:4])
    assert cluster.copy_requests == [
        (home, ChangeReplica(keys=DOC[:2], sources=(maker,))),
        (home, ChangeReplica(keys=DOC[2:4], sources=(maker,))),
    ]
    assert cluster.waits == []
    cluster.announce(maker, DOC[4:])
    assert cluster.waits == [(second.prefill, second.booking, (maker,))]
    cluster.announce(maker, keys("a", 2))
    assert len(cluster.waits) == 1


@pytest.mark.parametrize("how", ["ended", "replaced", "gone", "expired"])
def test_waits_end_at_once_with_the_attempt_that_would_have_computed(how):
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    third = cluster.ask("c")
    match how:
        case "ended":
            cluster.end(first)
        case "replaced":
            cluster.say("g", RequestEnded(request_id=first.request_id, attempt=1))
        case "gone":
            cluster.down(first.prefill)
        case "expired":
            cluster.advance(cluster.settings.booking_ttl_s + 1)
    ended = {(prefill, booking, ()) for prefill, booking, _ in cluster.waits}
    alive = {(each.prefill, each.booking, ()) for each in (second, third) if each.prefill != first.prefill or how != "gone"}
    assert alive <= ended
    assert all(not sources for _, _, sources in cluster.waits)


def test_a_prompt_that_ended_before_its_blocks_were_put_is_waited_for_a_little_longer():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    cluster.say(first.prefill, BlocksAnnounced(stored=DOC))
    cluster.end(first)
    assert cluster.waits == []
    cluster.announce(f"c{first.prefill[1]}", DOC)
    assert cluster.waits == [(second.prefill, second.booking, (f"c{first.prefill[1]}",))]


def test_but_not_for_ever():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    cluster.say(first.prefill, BlocksAnnounced(stored=DOC))
    cluster.end(first)
    cluster.advance(3)
    cluster.prefill_load(first.prefill, chunk_tokens=CHUNK)
    assert cluster.waits == [(second.prefill, second.booking, ())]


def test_a_waiter_that_finds_no_other_place_waits_on():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b", request_id="r")
    for place in range(3):
        cluster.decode_load(f"d{place}", draining=True)
    assert isinstance(cluster.schedule((*DOC, *keys("b", 2)), request_id="r", attempt=2), Rejected)
    assert cluster.waits == []
    cluster.announce(f"c{first.prefill[1]}", DOC)
    assert cluster.waits == [(second.prefill, second.booking, (f"c{first.prefill[1]}",))]


def test_a_prompt_does_not_wait_for_the_attempt_that_it_replaces():
    cluster = Burst()
    first = cluster.ask("a", request_id="r")
    second = cluster.ask("a", request_id="r", attempt=2, exclude=(first.prefill,))
    assert (second.coming_blocks, len(cluster.conductor._coming)) == (0, 1)
    assert cluster.ask("b").coming_blocks == 16, "that of the new attempt is found in its place"


def test_a_waiter_that_ends_is_not_sent_for():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    cluster.end(second)
    cluster.announce(f"c{first.prefill[1]}", DOC)
    assert cluster.waits == []


def test_what_a_waiter_will_compute_is_coming_too():
    cluster = Burst()
    cluster.ask("a")
    second = cluster.ask("b")
    answer = cluster.schedule((*DOC, *keys("b", 2), *keys("more", 8)))
    assert answer.coming_blocks in (16, 18)
    if answer.coming_blocks == 18:
        cluster.end(second)
        assert cluster.waits[-1] == (answer.prefill, answer.booking, ())


def test_what_was_noted_goes_though_chunks_became_others_meanwhile():
    cluster = Burst()
    first = cluster.ask("a")
    cluster.prefill_load(first.prefill, jobs=[(first.booking, 0.0, 20.0)], chunk_tokens=3 * BLOCK)
    cluster.ask("b")
    cluster.end(first)
    assert cluster.ask("c", request_id="again").coming_blocks in (0, 16)
    for booking in cluster.conductor._bookings.all():
        cluster.say("g", RequestEnded(request_id=booking.key[1], attempt=1))
    assert cluster.schedule((*DOC, *keys("d", 2))).coming_blocks == 0


def test_what_should_have_come_long_ago_is_not_counted_on():
    cluster = Burst()
    first = cluster.ask("a")
    cluster.advance(first.ttft_s + 3)
    assert cluster.ask("b").coming_blocks == 0


def test_reports_move_what_is_coming():
    cluster = Burst()
    first = cluster.ask("a")
    left_s = 3 * first.ttft_s
    job = QueuedJob(booking=first.booking, rank_s=0.0, left_s=left_s)
    cluster.prefill_load(first.prefill, jobs=[(job.booking, 0.0, left_s)], chunk_tokens=CHUNK)
    assert cluster.ask("b").coming_blocks == 0, "three times as long as computing it"


def test_a_prefill_that_became_slow_is_not_waited_for_any_longer():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    slower = 1.5 * first.ttft_s
    cluster.prefill_load(first.prefill, jobs=[(first.booking, 0.0, slower)], chunk_tokens=CHUNK)
    assert cluster.waits == []
    cluster.prefill_load(first.prefill, jobs=[(first.booking, 0.0, 3 * first.ttft_s)], chunk_tokens=CHUNK)
    assert cluster.waits == [(second.prefill, second.booking, ())]


def test_what_stands_in_a_slab_counts_there_and_is_coming_elsewhere():
    cluster = Burst()
    first = cluster.ask("a")
    cluster.say(first.prefill, BlocksAnnounced(stored=DOC))
    second = cluster.ask("b")
    assert second.reuse_blocks == second.coming_blocks == 16
    assert second.prefill != first.prefill, "that one computes the rest of its prompt first"
    cluster.say(first.prefill, BlocksAnnounced(removed=DOC))
    cluster.end(first)
    assert cluster.waits == [(second.prefill, second.booking, ())]
    third = cluster.ask("c")
    assert third.coming_blocks == 16, "the second computes them now"
    cluster.end(second)
    assert cluster.waits[1:] == [(third.prefill, third.booking, ())]


def test_a_prompt_is_not_refused_for_a_wait_that_it_need_not_make():
    alone_s = Burst().ask("a").ttft_s
    cluster = Burst(ttft_slo_s=alone_s * 1.0001, admission="prediction")
    first = cluster.ask("a")
    answer = cluster.ask("b")
    assert answer.prefill != first.prefill


def test_a_wait_on_two_prompts_outlasts_the_first_once_its_blocks_stand():
    cluster = Burst()
    first = cluster.ask("a")
    second = cluster.schedule((*DOC, *keys("b", 16)))
    third = cluster.schedule((*DOC, *keys("b", 16), *keys("c", 2)))
    assert (second.coming_blocks, third.coming_blocks) == (16, 32)
    cluster.say(first.prefill, BlocksAnnounced(stored=DOC))
    cluster.announce(f"c{first.prefill[1]}", DOC)
    assert [booking for _, booking, _ in cluster.waits] == [second.booking]
    cluster.end(first)
    assert len(cluster.waits) == 1
    cluster.end(second)
    assert cluster.waits[1:] == [(third.prefill, third.booking, ())]


def test_keys_named_twice_end_a_wait_once():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    cluster.announce(f"c{first.prefill[1]}", (DOC[-1], DOC[-1]))
    assert cluster.waits == [(second.prefill, second.booking, (f"c{first.prefill[1]}",))]


def test_keys_that_are_no_chain_do_no_harm():
    cluster = Burst(engine_price=1000)
    chain = keys("x", 12)
    answers = [
        cluster.schedule(each) for each in (chain, (chain[0], *keys("y", 1), *chain[2:]), (*chain[:1], *keys("y", 1), chain[2]))
    ]
    for answer in answers:
        cluster.end(answer)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 0


def test_what_is_dropped_at_the_limit_is_not_waited_for():
    cluster = Burst(max_bookings=1)
    cluster.ask("a")
    assert cluster.ask("b").coming_blocks == 0


@pytest.mark.parametrize("whose", ["maker", "waiter"])
def test_a_wait_ends_with_the_pool_that_it_needs(whose):
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    cluster.down(f"c{(first if whose == 'maker' else second).prefill[1]}")
    assert cluster.waits == [(second.prefill, second.booking, ())]


def test_a_put_that_never_comes_is_not_waited_for():
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    cluster.prefill_load(first.prefill, jobs=[(first.booking, 0.0, 0.1)], chunk_tokens=CHUNK)
    cluster.prefill_load(first.prefill, chunk_tokens=CHUNK)
    assert cluster.waits == []
    cluster.advance(2.5)
    cluster.prefill_load(first.prefill, chunk_tokens=CHUNK)
    assert cluster.waits == [(second.prefill, second.booking, ())]


def test_what_was_computed_is_not_kept_while_the_answer_lasts():
    """A long prompt's keys take megabytes, and an answer minutes."""
    cluster = Burst()
    first, second = cluster.ask("a"), cluster.ask("b")
    cluster.prefill_load(first.prefill, jobs=[(first.booking, 0.0, 0.1)], chunk_tokens=CHUNK)
    cluster.prefill_load(first.prefill, chunk_tokens=CHUNK)
    cluster.announce(f"c{first.prefill[1]}", DOC)
    assert cluster.waits == [(second.prefill, second.booking, (f"c{first.prefill[1]}",))]
    assert len(cluster.conductor._coming) == 2, "its blocks may still reach a pool"
    cluster.advance(2.5)
    cluster.prefill_load(second.prefill, jobs=[(second.booking, 0.0, 0.1)], chunk_tokens=CHUNK)
    cluster.prefill_load(first.prefill, chunk_tokens=CHUNK)
    assert len(cluster.conductor._coming) == 1
    assert len(cluster.conductor._bookings.all()) == 2


def test_a_bound_that_no_message_could_say_is_cut():
    cluster = Burst(hosts=1)
    cluster.prefill_load("p0", queued_s=9e6, chunk_tokens=CHUNK)
    cluster.ask("a")
    assert cluster.ask("b").coming_s <= 1e7


def test_whoever_computes_what_is_overdue_is_found():
    cluster = Burst()
    first = cluster.ask("a")
    cluster.advance(first.ttft_s + 3)
    assert cluster.ask("b").coming_blocks == 0
    assert cluster.ask("c").coming_blocks == 16


def test_a_slab_s_blocks_are_no_source_for_other_hosts():
    cluster = Cluster(policy="global")
    cluster.announce("c1", DOC[:8])
    cluster.say("p0", BlocksAnnounced(stored=DOC))
    cluster.prefill_load("p0", queued_s=500.0)
    answer = cluster.schedule(DOC)
    assert (answer.prefill, answer.reuse_blocks, answer.sources) == ("p1", 8, ())


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_the_common_beginning_is_found(held, same, one, other):
    shared = keys("s", held + same)
    assert _common((*shared, *keys("x", one)), (*shared, *keys("y", other)), held) == held + same
