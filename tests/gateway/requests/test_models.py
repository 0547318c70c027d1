"""Requests for one of several models: asked for at its conductors, sent to its engines, and ready when any model is."""

from dataclasses import replace

import pytest
from actor_harness import LAYOUT, Harness

from mooncake_zmq.core.messages import Hello, NodesReported, Placed, Sampling, Schedule, StartPrefill, StopRule
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Failed
from mooncake_zmq.gateway.requests.readiness import least_missing, missing_roles
from mooncake_zmq.gateway.requests.requests import Requests
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.block_hash import namespace, pack_tokens

SETTINGS = RequestsSettings(conductors=("k0", "k1", "k2"), placement_wait_s=5.0, ready_wait_s=10.0)
MODELS = {"m": LAYOUT, "n": replace(LAYOUT, block_tokens=2 * LAYOUT.block_tokens)}


class Gateway(Harness):
    """Two models: k0 and v0 are for "m", k1, k2 and v1 for "n"; c0 is for both."""

    def __init__(self, *without):
        super().__init__(Requests(name="me", host="h0", incarnation=1, settings=SETTINGS, layout=LAYOUT, models=MODELS))
        for name, model in {"k0": "m", "k1": "n", "k2": "n", "v0": "m", "v1": "n", "c0": "m n"}.items():
            if name not in without:
                self.up(name, role="vllm" if name[0] == "v" else None, model=model)

    def ask(self, model, request_id="r"):
        sampling, stop = Sampling(), StopRule(max_tokens=4)
        root = namespace(model=model, layout="l")
        request = ClientRequest(tokens=pack_tokens(range(6)), root=root, model=model, keys=(), sampling=sampling, stop=stop)
        self.client(request_id, request)

    def place(self, sender, node, request_id="r", attempt=1):
        placed = Placed(
            request_id=request_id, attempt=attempt, prefill=node, decode=node, reuse_blocks=0, sources=(), ttft_s=0.1, tbt_s=0.1
        )
        self.say(sender, placed)

    def asked(self):
        return [to for to, message in self.sent if isinstance(message, Schedule)]

    def hears(self, conductor, *, missing=(), closed=(), cordoned=False):
        report = NodesReported(cache_nodes=("c0",), missing=missing, closed=closed, cordoned=cordoned)
        self.say(conductor, report)


def test_a_request_is_placed_by_a_conductor_of_its_model_and_runs_on_an_engine_of_it():
    gateway = Gateway()
    for model, conductor, engine in (("m", "k0", "v0"), ("n", "k1", "v1")):
        gateway.ask(model, model)
        assert gateway.asked()[-1] == conductor
        gateway.place(conductor, engine, model)
        assert [to for to, message in gateway.sent if isinstance(message, StartPrefill)][-1] == engine


def test_another_conductor_of_the_model_takes_over_and_none_of_another_model_does():
    gateway = Gateway()
    gateway.hears("k1", cordoned=True)
    gateway.ask("n")
    assert gateway.asked() == ["k2"]
    gateway.down("k2")
    gateway.advance(1.0)
    assert gateway.asked() == ["k2", "k1"], "a cordoned one is better than none"
    gateway.down("k1")
    gateway.advance(1.0)
    assert gateway.asked() == ["k2", "k1"]
    gateway.advance(SETTINGS.placement_wait_s)
    (failed,) = [output for _, output in gateway.clients if isinstance(output, Failed)]
    assert (failed.status, failed.code) == (503, "no_conductor")


def test_an_engine_of_another_model_gets_nothing_whatever_a_conductor_says():
    gateway = Gateway()
    gateway.ask("m")
    gateway.place("k0", "v1")
    assert not [message for _, message in gateway.sent if isinstance(message, StartPrefill)]
    gateway.advance(1.0)
    assert gateway.asked() == ["k0", "k0"]
    gateway.place("k0", "v0", attempt=2)
    assert [to for to, message in gateway.sent if isinstance(message, StartPrefill)] == ["v0"]


def test_a_conductor_of_another_model_places_nothing():
    gateway = Gateway()
    gateway.ask("m")
    gateway.place("k1", "v0")
    assert not [message for _, message in gateway.sent if isinstance(message, StartPrefill)]


def test_blocks_are_counted_by_the_models_own_size():
    gateway = Gateway()
    requests = gateway.actor._requests
    gateway.ask("m", "r1")
    gateway.ask("n", "r2")
    assert [requests[each].layout.block_tokens for each in ("r1", "r2")] == [LAYOUT.block_tokens, 2 * LAYOUT.block_tokens]


def test_it_is_ready_once_the_conductors_of_all_models_have_all_reports():
    gateway = Gateway()
    gateway.hears("k0")
    assert not gateway.actor.cluster.ready
    gateway.hears("k1", missing=("v1",))
    assert not gateway.actor.cluster.ready
    assert gateway.actor.cluster.missing == ("v1",)
    gateway.hears("k1")
    assert gateway.actor.cluster.ready
    assert gateway.actor.cluster.cache_nodes == ("c0",)


def test_a_model_that_is_not_there_keeps_the_others_waiting_no_longer_than_set():
    gateway = Gateway("v1")
    gateway.hears("k0")
    gateway.hears("k1", missing=("v1",))
    assert not gateway.actor.cluster.ready
    gateway.advance(SETTINGS.ready_wait_s + 0.1)
    assert gateway.actor.cluster.ready


def test_nodes_that_any_conductor_calls_closed_are_closed():
    gateway = Gateway()
    gateway.hears("k0", closed=("v0",))
    gateway.hears("k1", closed=("v1",))
    assert gateway.actor.cluster.closed == ("v0", "v1")


@pytest.mark.parametrize(
    ("there", "of_m", "of_n", "least"),
    [
        ([], ["conductor", "prefill", "decode"], ["conductor", "prefill", "decode"], ["conductor", "prefill", "decode"]),
        (["conductor m", "vllm n"], ["prefill", "decode"], ["conductor"], ["conductor"]),
        (["conductor m", "vllm m"], [], ["conductor", "prefill", "decode"], []),
        (["conductor m", "vllm m", "conductor n", "vllm n"], [], [], []),
    ],
)
def test_what_is_missing_is_what_the_model_lacks_that_lacks_least(there, of_m, of_n, least):
    hellos = [
        Hello(protocol=1, role=role, host="h", model=model, tokenizer="t", layout="l")
        for role, model in (each.split() for each in there)
    ]
    assert [missing_roles(hellos, model) for model in ("m", "n")] == [of_m, of_n]
    assert least_missing(hellos, ("m", "n")) == least


def test_requests_for_a_model_that_no_node_serves_leave_room_for_the_others():
    gateway = Gateway("v1")
    for number in range(SETTINGS.max_open):
        gateway.ask("n", f"n{number}")
    failed = [output for _, output in gateway.clients if isinstance(output, Failed)]
    assert len(failed) == SETTINGS.max_open - SETTINGS.max_open // 4
    assert {(each.status, each.code) for each in failed} == {(503, "no_conductor")}
    gateway.ask("m", "m0")
    assert gateway.asked()[-1] == "k0"
