"""No message of those that a peer's role may say, and however odd, ends a gateway's requests or spoils their state."""

from dataclasses import replace

import pytest
from actor_harness import LAYOUT as NARROW
from actor_harness import ROLES, Harness
from adversary import VOCABULARY, anything, pauses, said, senders
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.core.actor import Received
from mooncake_zmq.core.messages import FirstToken, Placed, Sampling, StopRule, TokensDecoded
from mooncake_zmq.gateway.requests.client_events import ClientGone, ClientRequest, TokenOut
from mooncake_zmq.gateway.requests.requests import Requests, RequestsSettings
from mooncake_zmq.kv.block_hash import extend_keys, namespace

LAYOUT = replace(NARROW, vocab_size=VOCABULARY)
ROOT = namespace(model="m", layout="l")
PEERS = {name: ROLES[name[0]] for name in ("k", "p0", "p1", "d0", "d1")}

steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), said("gateway", PEERS)),
        st.tuples(st.just("say"), said("gateway", PEERS)),
        st.tuples(st.just("say"), st.tuples(senders.filter(PEERS.__contains__), anything)),
        st.tuples(st.just("ask"), st.sampled_from(("r", "s", "t"))),
        st.tuples(st.just("gone"), st.sampled_from(("r", "s", "t", "u"))),
        st.tuples(st.just("place"), st.sampled_from(("d0", "d1"))),
        st.tuples(st.just("serve"), st.sampled_from((0, 1, VOCABULARY - 1, VOCABULARY, 1_000_000))),
        st.tuples(st.just("wait"), pauses),
        st.tuples(st.just("restart"), st.sampled_from(tuple(PEERS))),
    ),
    min_size=10,
    max_size=40,
)


@pytest.mark.filterwarnings("error")
@settings(max_examples=100)
@given(steps)
def test_any_messages_leave_a_gateway_sound(steps):
    requests = RequestsSettings(conductors=("k",), max_open=3, deadline_s=100.0, max_attempts=6)
    node = Harness(Requests(name="me", host="h0", incarnation=1, settings=requests, layout=LAYOUT))
    for name in PEERS:
        node.up(name, 7)
    for what, how in steps:
        take_step(node, what, how)
    node.advance(200.0)
    assert not node.busy()
    assert not node.timers
    told = [output.token for _, output in node.clients if isinstance(output, TokenOut)]
    assert all(token < VOCABULARY for token in told), "the tokenizer has no words for others"


def take_step(node, what, how):
    live = list(node.actor._requests.values())
    match what:
        case "say":
            node.handle(Received(*how))
        case "ask":
            packed = bytes(4 * 6)
            keys = tuple(extend_keys(ROOT, packed, LAYOUT.block_tokens))
            more = {"siblings": (("u", 5),)} if how == "s" else {"prompt_logprobs": 1} if how == "t" else {}
            asked = ClientRequest(tokens=packed, root=ROOT, keys=keys, sampling=Sampling(), stop=StopRule(max_tokens=4), **more)
            node.client(how, asked)
        case "gone":
            node.client(how, ClientGone())
        case "place" if live:
            one = live[-1]
            name = {"request_id": one.request_id, "attempt": one.attempt}
            plan = {"prefill": "p0", "decode": how, "reuse_blocks": 1 << 48, "sources": (), "ttft_s": 1e7, "tbt_s": 0.0}
            node.handle(Received("k", Placed(**name, **plan)))
        case "serve" if live:
            one = live[-1]
            name = {"request_id": one.request_id, "attempt": one.attempt}
            times = {"own": 1 << 48, "local": 0, "remote": 0, "queue_s": 0.0, "prefill_s": 1e7}
            if not one.answer.tokens:
                node.handle(Received("p0", FirstToken(**name, index=0, token=how % VOCABULARY, **times)))
            following = (one.request_id, one.attempt, len(one.answer.tokens), (0, how))
            node.handle(Received(one.decode or "d0", TokensDecoded(entries=(following,))))
        case "wait":
            node.advance(how)
        case "restart":
            node.down(how)
            node.up(how, int(node.now * 1000) + 8)
