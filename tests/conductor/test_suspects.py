"""A node that takes requests and reports, and gives nothing back, is sent nothing for a while."""

from conductor_harness import Cluster, keys

from mooncake_zmq.core.messages import NodesReported, Outcome, RequestEnded

REPORT_S = 0.25


def outcome(tokens):
    return Outcome(
        ttft_s=1.0, predicted_ttft_s=1.0, tbt_s=0.01, predicted_tbt_s=0.01, max_tokens=100, output_tokens=tokens, ended=False
    )


class Grey(Cluster):
    """Two hosts whose nodes all report that they are idle."""

    def __init__(self):
        self.news = []
        super().__init__(2)

    def handle(self, event):
        effects = super().handle(event)
        self.news += [e.message for e in effects if hasattr(e, "message") and isinstance(e.message, NodesReported)]
        return effects

    def report(self, seconds=REPORT_S):
        """Let time pass, and every node say that it is idle."""
        for _ in range(round(seconds / REPORT_S)):
            self.advance(REPORT_S)
            for host in "01":
                self.prefill_load(f"p{host}")
                self.decode_load(f"d{host}")

    def place_on(self, decode):
        """Place a request on this decode."""
        other = {"d0": "d1", "d1": "d0"}[decode]
        placed = self.schedule(keys(f"s{self.serial}", 3), exclude=(other,))
        assert placed.decode == decode
        return placed

    def stall(self, placed, tokens=0):
        told = outcome(tokens) if tokens else None
        self.say("g", RequestEnded(request_id=placed.request_id, attempt=placed.attempt, outcome=told, stalled=True))


def test_two_silences_in_a_row_close_a_decode_and_gateways_hear_of_it():
    cluster = Grey()
    cluster.stall(cluster.place_on("d0"), tokens=1)
    cluster.report()
    assert not cluster.conductor._suspects.shuts(cluster.now, "d0"), "once may be chance"
    cluster.stall(cluster.place_on("d0"), tokens=1)
    cluster.report()
    assert {cluster.schedule(keys(f"n{i}", 3)).decode for i in range(6)} == {"d1"}
    assert cluster.news[-1].closed == ("d0",)
    cluster.report(2.25)
    assert cluster.news[-1].closed == ()


def test_the_time_doubles_up_to_a_minute_until_a_token_came():
    cluster, closed = Grey(), []
    for _ in range(9):
        cluster.report(0.5)
        before = cluster.now
        cluster.stall(cluster.place_on("d0"), tokens=1)
        while cluster.conductor._suspects.shuts(cluster.now, "d0"):
            cluster.report()
        closed.append(round(cluster.now - before))
    assert closed == [0, 2, 4, 8, 16, 32, 60, 60, 60]
    cluster.end(cluster.place_on("d0"), outcome(2))
    cluster.stall(cluster.place_on("d0"), tokens=1)
    assert not cluster.conductor._suspects.shuts(cluster.now, "d0")


def test_without_a_first_token_both_are_suspected_and_whoever_answers_others_is_cleared():
    cluster = Grey()
    for _ in range(3):
        placed = cluster.place_on("d0")
        cluster.stall(placed)
        other = cluster.schedule(keys(f"o{cluster.serial}", 3), exclude=("d0", *({"p0", "p1"} - {placed.prefill})))
        cluster.end(other, outcome(20))
    assert cluster.conductor._suspects.shuts(cluster.now, "d0")
    assert not any(cluster.conductor._suspects.shuts(cluster.now, node) for node in ("p0", "p1", "d1"))


def test_a_first_token_clears_the_prefill_alone():
    cluster = Grey()
    for _ in range(2):
        placed = cluster.place_on("d0")
        cluster.end(placed, outcome(1))
        cluster.stall(cluster.place_on("d0"), tokens=1)
    assert cluster.conductor._suspects.shuts(cluster.now, "d0")


def test_a_node_that_comes_back_is_no_suspect():
    cluster = Grey()
    for _ in range(2):
        cluster.stall(cluster.place_on("d0"), tokens=1)
    cluster.down("d0")
    cluster.up("d0", "decode", "h0", incarnation=2)
    cluster.report()
    assert not len(cluster.conductor._suspects)
    assert cluster.place_on("d0")


def test_a_vllm_that_is_both_is_not_cleared_by_first_tokens():
    cluster = Cluster(1)
    cluster.up("v", "vllm", "h0")
    cluster.prefill_load("v")
    cluster.decode_load("v")
    for _ in range(2):
        placed = cluster.schedule(keys(f"v{cluster.serial}", 3), exclude=("p0",))
        assert placed.prefill == placed.decode == "v"
        ended = RequestEnded(request_id=placed.request_id, attempt=1, outcome=outcome(1), stalled=True)
        cluster.say("g", ended)
    assert cluster.conductor._suspects.shuts(cluster.now, "v")


def test_the_last_open_node_of_its_kind_is_not_closed():
    cluster = Grey()
    for decode in ("d0", "d1"):
        for _ in range(2):
            cluster.stall(cluster.place_on(decode), tokens=1)
    cluster.report()
    assert all(cluster.conductor._suspects.shuts(cluster.now, node) for node in ("d0", "d1"))
    assert cluster.news[-1].closed == ("d0",), "one of two that are silent goes on"
    assert cluster.schedule(keys("n", 3)).decode == "d1"
    cluster.down("d0")
    cluster.report()
    assert cluster.schedule(keys("m", 3)).decode == "d1"


def test_the_only_vllm_gets_requests_whatever_ended_in_silence_there():
    cluster = Cluster(0)
    cluster.up("v", "vllm", "h0")
    cluster.prefill_load("v")
    cluster.decode_load("v")
    for number in range(4):
        placed = cluster.schedule(keys(f"v{number}", 3))
        cluster.say("g", RequestEnded(request_id=placed.request_id, attempt=1, outcome=None, stalled=True))
        cluster.advance(REPORT_S)
        cluster.prefill_load("v")
        cluster.decode_load("v")
        assert cluster.conductor._suspects.shuts(cluster.now, "v") == (number > 0)


def test_the_only_decode_that_serves_stays_open_whatever_lends():
    cluster = Grey()
    for _ in range(2):
        cluster.decode_load("d1", room=0, max_batch=0, lendable=1000)
        cluster.stall(cluster.place_on("d0"), tokens=1)
        cluster.report()
    assert cluster.conductor._suspects.shuts(cluster.now, "d0")
    cluster.decode_load("d1", room=0, max_batch=0, lendable=1000)
    cluster.decode_load("d0")
    assert cluster.schedule(keys("n", 3)).decode == "d0"
