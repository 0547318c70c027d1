"""Chats with images that vLLM writes for gateways: a queue and its limits, and what is made of vLLM's answers."""

import json

import pytest
from msgspec import structs
from stub_vllm import DONE, event
from test_generation import Bench, work
from test_vllm_node import BASE, Node

from mooncake_zmq.core.actor import DrainWanted
from mooncake_zmq.core.messages import AttemptFailed, CancelRequest, ChatRendered, ChatUnrendered, Image, RenderChat
from mooncake_zmq.core.work import ChatWritten, Generate, Generated, WorkFailed, WriteChat
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.image_keys import digest_of
from mooncake_zmq.runtime.derender import RENDER
from mooncake_zmq.runtime.generation import request_body
from mooncake_zmq.runtime.rendering import PATCHWORK, without_repeats
from mooncake_zmq.vllm_node.renders import AT_ONCE, MOST_BYTES

CAT, DOG = "ca" * 32, "d0" * 32
IMAGES = (
    Image(begin=1, length=3, digest=digest_of(CAT), url=b"data:image/png;base64,AA"),
    Image(begin=5, length=2, digest=digest_of(DOG), url=b"data:image/png;base64,BB"),
)
TOKENS = [7, 3, 3, 3, 8, 3, 3, 9]
WRITTEN = ChatWritten(pack_tokens(TOKENS), tuple(structs.replace(image, url=b"") for image in IMAGES))


class Writer(Node):
    def asks(self, request_id="r", call=1, *, gateway="g", chat=b"{}", deadline_s=10.0, tenant=""):
        self.say(gateway, RenderChat(request_id=request_id, call=call, chat=chat, deadline_s=deadline_s, tenant=tenant))

    @property
    def writing(self):
        return [work_id for work_id, work in self.works.items() if isinstance(work, WriteChat)]


def test_a_chat_that_was_written_goes_to_the_gateway_that_asked():
    node = Writer()
    node.asks(chat=b'{"messages": []}')
    (work_id,) = node.writing
    assert node.works[work_id] == WriteChat(b'{"messages": []}')
    node.done(work_id, WRITTEN)
    rendered = node.one(ChatRendered, "g")
    assert (rendered.request_id, rendered.call) == ("r", 1)
    assert (rendered.tokens, rendered.images) == (WRITTEN.tokens, WRITTEN.images)
    assert not node.busy()


def test_a_few_are_written_at_once_in_order_and_a_later_call_replaces_the_one_before_it():
    node = Writer()
    for name in ("a", "b", "c"):
        node.asks(name)
    node.asks("c", 2, chat=b"[]")
    node.asks("d", deadline_s=1.0)
    assert len(node.writing) == AT_ONCE
    node.now += 2
    node.done(node.writing[0], WRITTEN)
    node.done(node.writing[0], WRITTEN)
    (work_id,) = node.writing
    assert node.works[work_id].chat == b"[]"
    node.done(work_id, WRITTEN)
    assert [rendered.request_id for rendered in node.take(ChatRendered)] == ["a", "b", "c"], "nobody waits for d any more"
    assert not node.busy()


def test_a_lost_vllm_is_not_waited_for():
    node = Writer(well=False)
    node.probed(ready=False)
    node.asks()
    assert node.one(ChatUnrendered).reason.endswith("it is gone")
    assert not node.busy()


def test_what_vllm_refuses_is_told_apart_from_what_failed():
    node = Writer()
    node.asks("a")
    node.asks("b")
    node.done(node.writing[0], WorkFailed("at most 0 images", stuck=True))
    node.done(node.writing[0], WorkFailed("it is gone"))
    told = [(each.request_id, each.reason, each.refused) for each in node.take(ChatUnrendered)]
    assert told == [("a", "at most 0 images", True), ("b", "it is gone", False)]


def test_more_than_may_wait_by_number_or_bytes_are_refused():
    node = Writer()
    for number in range(AT_ONCE + BASE.max_queued + 1):
        node.asks(f"r{number}")
    assert node.one(ChatUnrendered).request_id == f"r{AT_ONCE + BASE.max_queued}"
    roomy = Writer(max_queued=100)
    large = bytes(5 << 20)
    for number in range(AT_ONCE + MOST_BYTES // len(large) + 1):
        roomy.asks(f"r{number}", chat=large)
    assert roomy.one(ChatUnrendered).request_id == f"r{AT_ONCE + MOST_BYTES // len(large)}"


def test_tenants_take_turns_and_none_has_more_than_half_of_the_queue_beside_others():
    node = Writer(max_queued=8)
    for number in range(AT_ONCE + 6):
        node.asks(f"a{number}", tenant="a")
    node.asks("b0", tenant="b")
    node.asks("a9", tenant="a")
    assert node.one(ChatUnrendered).request_id == "a9"
    node.asks("b1", tenant="b")
    node.now += 1
    node.done(node.writing[0], WRITTEN)
    node.now += 1
    node.done(node.writing[0], WRITTEN)
    waiting = node.actor.dump(node.now)["renders"]["waiting"]
    assert not {"b0", "b1"} & set(waiting), "the other tenant's are next"


def test_a_call_that_is_cancelled_is_not_written():
    node = Writer()
    for name in ("a", "b", "c"):
        node.asks(name)
    node.say("g", CancelRequest(request_id="c", attempt=1))
    node.say("k", CancelRequest(request_id="a", attempt=1))
    assert len(node.writing) == AT_ONCE
    (first, _) = node.writing
    node.say("g", CancelRequest(request_id="a", attempt=1))
    assert first in node.cancelled
    for _ in range(AT_ONCE):
        node.done(node.writing[0], WorkFailed("cancelled"))
    assert not node.busy()


def test_a_node_that_drains_writes_no_more_chats():
    node = Writer()
    node.handle(DrainWanted())
    node.asks()
    assert node.one(ChatUnrendered).reason == "the node is draining"


def test_chats_of_a_gateway_that_left_and_of_strangers_are_not_written():
    node = Writer()
    for name in ("a", "b", "c"):
        node.asks(name)
    node.down("g")
    node.asks("k", gateway="k")
    for _ in range(AT_ONCE):
        node.done(node.writing[0], WRITTEN)
    assert not node.busy()


def test_a_drain_whose_time_is_over_ends_what_is_written_and_what_waits():
    node = Writer()
    for name in ("a", "b", "c"):
        node.asks(name)
    node.drain()
    assert not node.drained
    node.run_out_of_drain()
    assert node.one(ChatUnrendered).request_id == "c"
    for work_id in node.writing:
        assert work_id in node.cancelled
        node.done(work_id, WorkFailed("cancelled"))
    assert node.drained


def test_vllm_gets_the_images_of_a_request_and_again_where_its_answer_goes_on():
    node = Node()
    tokens = pack_tokens(TOKENS)
    node.begin(tokens=tokens, images=IMAGES)
    assert node.work(Generate)[1].images == IMAGES
    node.ends(Generated((9,)))
    node.begin("s", tokens=tokens + pack_tokens([4]), images=IMAGES, first_index=1)
    assert node.work(Generate)[1].images == IMAGES


@pytest.mark.parametrize(
    "changes",
    [{"begin": 0}, {"begin": 2}, {"begin": 6, "length": 9}, {"length": 4}, {"url": b""}],
)
def test_images_that_are_not_those_of_the_tokens_are_refused(changes):
    node = Node()
    node.begin(tokens=pack_tokens(TOKENS), images=(IMAGES[0], structs.replace(IMAGES[0], **changes)))
    assert node.one(AttemptFailed).reason == "the images are not those of its tokens"


def test_images_are_passed_on_only_to_a_node_of_a_release_that_takes_them():
    node = Node(part="prefill")
    for name, protocol in (("v1", 22), ("v2", 23)):
        node.up(name)
        node.actor._peers[name] = structs.replace(node.actor._peers[name], protocol=protocol)
    node.begin("old", tokens=pack_tokens(TOKENS), images=IMAGES, decode="v1")
    assert node.one(AttemptFailed).avoid == "v1"
    node.begin("new", tokens=pack_tokens(TOKENS), images=IMAGES, decode="v2")
    assert not node.take(AttemptFailed)


# --- over HTTP


@pytest.fixture
def bench():
    made = Bench(event([1], "length"), DONE)
    yield made
    made.close()


def features(hashes, places):
    return {
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": [{"offset": at, "length": length} for at, length in places]},
        "kwargs_data": None,
    }


def writes(bench, content, status=200):
    asked = []

    def post(body):
        asked.append(body)
        return status, json.dumps(content).encode()

    bench.stub.posts[RENDER] = post
    return bench.result(WriteChat(b'{"messages":[1],"tools":[2]}')), asked[0]


def test_a_chat_is_written_without_tensors_and_whether_or_not_vllm_parses_calls(bench):
    rendered = {"token_ids": TOKENS, "features": features([CAT, DOG], [(1, 3), (5, 2)]), "sampling_params": {}}
    written, asked = writes(bench, rendered)
    assert written == WRITTEN
    assert asked == {"messages": [1], "tools": [2], "mm_payload": "none", "tool_choice": "none"}


def test_what_vllm_refuses_is_in_its_own_words(bench):
    words = "At most 0 image(s) may be provided in one prompt."
    written, _ = writes(bench, {"error": {"message": words, "type": "BadRequestError", "code": 400}}, 400)
    assert written == WorkFailed(words, stuck=True)


def test_images_of_several_kinds_of_tokens_are_refused(bench):
    written, _ = writes(bench, {"token_ids": TOKENS, "features": features([CAT], [(1, 4)])})
    assert written == WorkFailed(PATCHWORK, stuck=True)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ({"error": {"message": "busy"}}, 500),
        ({"token_ids": []}, 200),
        ({"token_ids": [-1]}, 200),
        ({"token_ids": [1 << 40]}, 200),
        ({"token_ids": TOKENS, "features": features([CAT], [])}, 200),
        ({"token_ids": TOKENS, "features": features(["mine"], [(1, 3)])}, 200),
        ({"token_ids": TOKENS, "features": features([CAT], [(7, 3)])}, 200),
        ({"token_ids": TOKENS, "features": features([CAT, DOG], [(1, 3), (2, 2)])}, 200),
        ({"token_ids": TOKENS, "features": features([CAT], [(1, 0)])}, 200),
        ({"token_ids": TOKENS, "features": {"mm_hashes": {"audio": [CAT]}, "mm_placeholders": {"audio": []}}}, 200),
        ([], 200),
    ],
)
def test_an_answer_that_is_no_chat_with_images_may_be_tried_elsewhere(bench, content, status):
    written, _ = writes(bench, content, status)
    assert isinstance(written, WorkFailed)
    assert not written.stuck


def test_a_prompt_goes_to_vllm_with_one_token_and_the_data_for_each_image():
    body = json.loads(request_body(work(tokens=pack_tokens(TOKENS), images=IMAGES)))
    assert body["token_ids"] == [7, 3, 8, 3, 9]
    assert body["content_parts"] == [{"type": "image_url", "url": image.url.decode()} for image in IMAGES]
    assert "content_parts" not in json.loads(request_body(work()))
    assert without_repeats(pack_tokens(TOKENS), ()) == pack_tokens(TOKENS)


@pytest.mark.parametrize(("count", "final"), [(0, True), (1, False)])
def test_a_prompt_with_images_that_vllm_refuses_is_refused_everywhere_unless_its_answer_has_begun(bench, count, final):
    bench.stub.status = 400
    result = bench.result(work(tokens=pack_tokens(TOKENS), images=IMAGES, count=count))
    assert isinstance(result, WorkFailed)
    assert result.stuck is final


@pytest.mark.parametrize(("counted", "fails"), [(8, False), (7, True)])
def test_an_answer_to_another_prompt_than_was_hashed_is_none(bench, counted, fails):
    bench.stub.answer = lambda body: iter((event([1], "length", usage={"prompt_tokens": counted}), DONE))
    result = bench.result(work(max_tokens=1, tokens=pack_tokens(TOKENS), images=IMAGES))
    assert isinstance(result, WorkFailed) is fails
