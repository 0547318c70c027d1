"""Chats with images: a vLLM writes each, or the client learns why not; and requests carry their images wherever they go."""

import pytest
from actor_harness import LAYOUT, Harness
from msgspec import structs

from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    ChatRendered,
    ChatUnrendered,
    FirstToken,
    Image,
    Placed,
    RenderChat,
    Sampling,
    Schedule,
    StartPrefill,
    StopRule,
)
from mooncake_zmq.gateway.requests.client_events import ChatToRender, ClientGone, ClientRequest, Failed, Rendered
from mooncake_zmq.gateway.requests.readiness import WAIT
from mooncake_zmq.gateway.requests.renderings import AGAIN_S, RENDER_S, TRIES
from mooncake_zmq.gateway.requests.requests import Requests, RequestsSettings
from mooncake_zmq.kv.block_hash import namespace, pack_tokens
from mooncake_zmq.kv.image_keys import digest_of, keys_with_images

ROOT = namespace(model="m", layout="l")
CAT, DOG = digest_of("cat"), digest_of("dog")
CHAT = ChatToRender(chat=b"{}", images=1)
TOKENS = pack_tokens([7, 3, 3, 3, 8, 9])
PLACE = Image(begin=1, length=3, digest=CAT)
WAIT_S = 10.0


class Node(Harness):
    """A gateway with a conductor and two nodes beside vLLMs."""

    def __init__(self, *there, protocol=23):
        self.protocol = protocol
        settings = RequestsSettings(conductors=("k0",), max_open=4, deadline_s=100.0, placement_wait_s=WAIT_S)
        super().__init__(Requests(name="me", host="h0", incarnation=1, settings=settings, layout=LAYOUT))
        for name in ("k0", *(there or ("v0", "v1"))):
            self.up(name)

    def handle(self, event):
        if hasattr(event, "hello"):
            event = structs.replace(event, hello=structs.replace(event.hello, protocol=self.protocol))
        return super().handle(event)

    def asked(self):
        """The node that has the call not looked at yet, and the call."""
        ((node, message),) = [(to, each) for to, each in self.sent if isinstance(each, RenderChat)]
        self.take(RenderChat)
        return node, message

    def writes(self, node, call, tokens=TOKENS, images=(PLACE,)):
        self.say(node, ChatRendered(request_id="r", call=call, tokens=tokens, images=images))

    def fails(self, node, call, reason="why not", *, refused=False):
        self.say(node, ChatUnrendered(request_id="r", call=call, reason=reason, refused=refused))

    @property
    def ended(self):
        ((request_id, output),) = self.clients
        assert request_id == "r"
        assert not self.busy()
        assert self.timers.keys() <= {WAIT}
        return output


def test_a_chat_is_written_by_one_vllm_and_goes_to_the_client():
    node = Node()
    node.client("r", CHAT)
    name, call = node.asked()
    assert (call.request_id, call.chat, call.call) == ("r", b"{}", 1)
    node.writes(name, 1)
    assert node.ended == Rendered(TOKENS, (PLACE,))


def test_a_failed_call_is_made_again_elsewhere_a_few_times():
    node = Node()
    node.client("r", CHAT)
    names = []
    for tried in range(1, TRIES + 1):
        name, call = node.asked()
        names.append(name)
        assert call.call == tried
        node.fails(name, call.call)
        node.advance(AGAIN_S * 2 ** (tried - 1))
    assert set(names) == {"v0", "v1"}
    assert (node.ended.status, node.ended.code) == (503, "render_failed")


def test_a_refusal_is_the_clients_to_know_at_once():
    node = Node()
    node.client("r", CHAT)
    name, call = node.asked()
    node.fails(name, call.call, "At most 0 image(s) may be provided", refused=True)
    assert (node.ended.status, node.ended.message) == (400, "At most 0 image(s) may be provided")


@pytest.mark.parametrize("end", ["down", "late"])
def test_a_lost_node_or_call_costs_nothing_but_time(end):
    node = Node()
    node.client("r", CHAT)
    name, call = node.asked()
    node.down(name) if end == "down" else node.advance(RENDER_S)
    node.advance(AGAIN_S)
    other, again = node.asked()
    assert other != name
    if end == "late":
        node.writes(name, call.call)
        assert not node.clients, "an answer to a call that is over"
    node.writes(other, again.call)
    assert isinstance(node.ended, Rendered)


def test_without_a_vllm_a_chat_waits_and_is_answered_503():
    node = Node("p0", "d0")
    node.client("r", CHAT)
    assert not node.take(RenderChat)
    node.advance(WAIT_S)
    assert (node.ended.status, node.ended.code) == (503, "no_vllm")
    other = Node("p0", "d0")
    other.client("r", CHAT)
    other.advance(WAIT_S / 2)
    other.up("v0")
    assert other.asked()[0] == "v0"
    other.advance(WAIT_S)
    assert not other.clients, "the wait is over, the call is not"


def test_a_client_that_leaves_ends_its_call_at_the_node():
    node = Node()
    node.client("r", CHAT)
    name, call = node.asked()
    node.client("r", ClientGone())
    assert node.one(CancelRequest, name) == CancelRequest(request_id="r", attempt=call.call)
    assert not node.busy()


def test_a_second_call_that_takes_too_long_is_the_last():
    node = Node()
    node.client("r", CHAT)
    for _ in range(2):
        node.asked()
        node.advance(RENDER_S)
        node.advance(AGAIN_S)
    assert (node.ended.status, node.ended.code) == (503, "render_failed")


def test_vllms_are_asked_by_turns_and_those_that_failed_wait_for_one_where_the_last_is_gone():
    node = Node("v0", "v1", "v2")
    names = []
    for _ in range(6):
        node.client("r", CHAT)
        name, call = node.asked()
        names.append(name)
        node.writes(name, call.call)
        assert isinstance(node.ended, Rendered)
        node.clients.clear()
    assert names == ["v0", "v1", "v2"] * 2
    alone = Node("v0")
    alone.client("r", CHAT)
    alone.fails("v0", alone.asked()[1].call)
    alone.down("v0")
    alone.advance(AGAIN_S)
    alone.actor.check(alone.now)
    alone.advance(WAIT_S)
    assert (alone.ended.status, alone.ended.code) == (503, "no_vllm")


def test_a_vllm_of_a_release_that_knows_no_images_is_not_asked():
    node = Node(protocol=22)
    node.client("r", CHAT)
    assert not node.take(RenderChat)


@pytest.mark.parametrize(
    ("tokens", "images"),
    [
        (b"x", (PLACE,)),
        (TOKENS, (structs.replace(PLACE, begin=4),)),
        (TOKENS, (PLACE, PLACE)),
    ],
)
def test_what_is_no_chat_with_these_images_is_tried_elsewhere(tokens, images):
    node = Node()
    node.client("r", ChatToRender(chat=b"{}", images=len(images)))
    name, call = node.asked()
    node.writes(name, call.call, tokens, images)
    assert not node.clients
    node.advance(AGAIN_S)
    assert node.asked()[0] != name


def test_a_template_that_leaves_an_image_out_is_an_error():
    node = Node()
    node.client("r", ChatToRender(chat=b"{}", images=2))
    name, call = node.asked()
    node.writes(name, call.call)
    assert (node.ended.status, node.ended.message) == (400, "the chat's template writes 1 of 2 images")


def test_a_client_that_leaves_and_a_drain_end_what_is_written():
    node = Node()
    node.client("r", CHAT)
    node.client("r", ClientGone())
    assert not node.busy()
    assert node.timers.keys() <= {WAIT}
    assert not node.clients
    node.client("r", CHAT)
    node.drain()
    assert not node.drained
    node.client("s", CHAT)
    assert [(name, output.status) for name, output in node.clients] == [("s", 503)]
    node.clients.clear()
    node.run_out_of_drain()
    assert node.ended.code == "gateway_stopped"
    assert node.drained


def test_more_than_may_be_open_are_refused():
    node = Node()
    for number in range(5):
        node.client(f"r{number}", CHAT)
    assert [(name, output.status, output.code) for name, output in node.clients] == [("r4", 503, "overloaded")]


# --- requests with images


def request(digest=CAT):
    images = (Image(begin=5, length=2, digest=digest, url=b"data:image/png;base64,AA"),)
    tokens = pack_tokens([1, 2, 3, 4, 5, 3, 3])
    keys = tuple(keys_with_images(ROOT, tokens, LAYOUT.block_tokens, [(5, digest)]))
    return ClientRequest(tokens=tokens, root=ROOT, keys=keys, sampling=Sampling(), stop=StopRule(max_tokens=8), images=images)


def placed(node, to="v0"):
    asked = node.one(Schedule)
    plan = {"reuse_blocks": 0, "sources": (), "ttft_s": 0.0, "tbt_s": 0.0}
    node.say("k0", Placed(request_id="r", attempt=asked.attempt, prefill=to, decode=to, **plan))
    return asked


def test_an_answer_that_goes_on_elsewhere_takes_its_images_and_has_them_in_its_keys():
    keys = {}
    for digest in (CAT, DOG):
        node = Node()
        node.client("r", request(digest))
        placed(node)
        assert node.one(StartPrefill, "v0").images == request(digest).images
        times = {"own": 0, "local": 0, "remote": 0, "queue_s": 0.0, "prefill_s": 0.0}
        node.say("v0", FirstToken(request_id="r", attempt=1, index=0, token=11, **times))
        node.say("v0", AttemptFailed("r", 1, "it died"))
        node.advance(1)
        keys[digest] = placed(node, "v1").keys
        start = node.one(StartPrefill, "v1")
        assert start.images == request(digest).images
        assert start.tokens == request(digest).tokens + pack_tokens([11])
        assert start.keys == keys[digest]
        assert len(start.keys) == 2, "the answer completed the block in which the image begins"
    assert keys[CAT][0] == keys[DOG][0]
    assert keys[CAT][1] != keys[DOG][1]


def test_images_that_a_vllm_does_not_take_after_all_are_an_error_at_once():
    node = Node()
    node.client("r", request())
    placed(node)
    node.say("v0", AttemptFailed("r", 1, "no placeholder", stuck=True))
    assert (node.ended.status, node.ended.message) == (400, "the model takes no such images (no placeholder)")


@pytest.mark.parametrize("to", ["p0", "v0"])
def test_images_are_not_sent_where_they_would_be_lost(to):
    node = Node("p0", "d0", "v0", "v1", protocol=22 if to == "v0" else 23)
    node.client("r", request())
    asked = node.one(Schedule)
    plan = {"reuse_blocks": 0, "sources": (), "ttft_s": 0.0, "tbt_s": 0.0}
    decode = "d0" if to == "p0" else to
    node.say("k0", Placed(request_id="r", attempt=asked.attempt, prefill=to, decode=decode, **plan))
    assert not node.take(StartPrefill)
    node.advance(1)
    assert to in node.one(Schedule).exclude
    assert not [output for _, output in node.clients if isinstance(output, Failed)]
