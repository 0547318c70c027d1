"""vLLM's answers over HTTP: every work ends once, whatever the server sends, and hanging up ends it there."""

import gzip
import json
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import structlog
from stub_vllm import DONE, StubVllm, event, usage
from waiting import eventually

from mooncake_zmq.core.actor import WorkDone
from mooncake_zmq.core.messages import MAX_RUN, Embedding, Sampling, StopRule
from mooncake_zmq.core.work import (
    Embed,
    EngineProbed,
    Generate,
    Generated,
    ProbeEngine,
    PromptScoresGenerated,
    ReadTokens,
    WorkFailed,
    WriteChat,
)
from mooncake_zmq.gateway.openai.bodies import CompletionBody
from mooncake_zmq.gateway.openai.constraints import of_lark, of_schema
from mooncake_zmq.kv.block_hash import pack_tokens, salt_of
from mooncake_zmq.runtime import generation as generation_module
from mooncake_zmq.runtime import vllm_server
from mooncake_zmq.runtime.derender import DERENDER, RENDER
from mooncake_zmq.runtime.embedding import EMBEDDINGS
from mooncake_zmq.runtime.generation import GENERATE, MAX_LINE_BYTES, Generation, request_body
from mooncake_zmq.runtime.vllm_answers import MOST_BYTES
from mooncake_zmq.runtime.vllm_server import ServerError, await_server
from mooncake_zmq.vllm_node.settings import VllmSettings

ROOT = bytes(range(16))


def work(max_tokens=8, **changes):
    fields = {"tokens": pack_tokens([5, 6]), "count": 0, "root": ROOT, "sampling": Sampling()}
    return Generate(**(fields | {"stop": StopRule(max_tokens=max_tokens, eos_ids=(7,)), "quiet_s": 5.0} | changes))


class Bench:
    """A stub and what asks it; `heard`: (work id, tokens) and ends, in order."""

    def __init__(self, *pieces: bytes, model: str = "") -> None:
        self.stub = StubVllm(lambda body: iter(pieces))
        self.heard = []
        self.crashes = []
        self._news = threading.Condition()
        self.generation = Generation(self.stub.url, connect_s=2.0, emit=self._emit, on_crash=self.crashes.append, model=model)

    def _emit(self, told):
        with self._news:
            self.heard.append(told)
            self._news.notify_all()

    def until(self, condition):
        with self._news:
            assert self._news.wait_for(condition, 20), self.heard

    def result(self, work, deadline_s=20.0):
        self.generation.start(1, work, deadline_s)
        return self.end()

    def end(self):
        self.until(lambda: any(isinstance(told, WorkDone) for told in self.heard))
        (done,) = [told for told in self.heard if isinstance(told, WorkDone)]
        return done.result

    @property
    def tokens(self):
        return [token for told in self.heard if not isinstance(told, WorkDone) for token in told.progress.tokens]

    def close(self):
        self.generation.close()
        self.stub.close()
        assert not self.crashes


@pytest.fixture
def bench():
    made = []

    def make(*pieces, **options):
        made.append(Bench(*pieces, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_tokens_come_as_they_are_made_and_the_last_with_what_was_reused(bench):
    answers = bench(event([1]), event([2, 3]), event([4], "length"), usage(16), DONE)
    assert answers.result(work()) == Generated((4,), 16)
    assert answers.tokens == [1, 2, 3]


def test_a_connection_serves_one_request_after_another(bench, monkeypatch):
    """A request that begins before the transfer of the last answer has ended needs a further connection."""
    monkeypatch.setattr(generation_module, "READ_OUT_S", 60.0)
    answers = bench(event([1], "length"), usage(16), DONE)
    answers.stub.chunked = True
    for _ in range(20):
        assert answers.result(work()) == Generated((1,), 16)
        answers.heard.clear()
    assert answers.stub.connections < 10


def test_an_answer_whose_transfer_does_not_end_is_whole_all_the_same(bench):
    answers = bench(event([1], "length"), usage(16), DONE)
    answers.stub.chunked, answers.stub.ends = True, False
    assert answers.result(work()) == Generated((1,), 16)
    assert answers.tokens == []


def test_the_rest_of_a_transfer_delays_no_result(bench, monkeypatch):
    monkeypatch.setattr(generation_module, "READ_OUT_S", 60.0)
    answers = bench(event([1], "length"), usage(16), DONE)
    answers.stub.chunked, answers.stub.ends = True, False
    assert answers.result(work(quiet_s=60.0), deadline_s=60.0) == Generated((1,), 16)


def spans(*starts):
    """As vLLM gives versions of weights."""
    ends = [start for _, start in starts[1:]] + [3]
    return [{"version": name, "start": start, "end": end} for (name, start), end in zip(starts, ends, strict=True)]


def test_the_end_says_which_weights_made_the_tokens_where_vllm_has_names_for_them(bench):
    answers = bench(event([1, 2]), event([3], "length", versions=spans(("default", 0), ("step-7" + "x" * 200, 2))), DONE)
    assert answers.result(work()).versions == (("default", 0), (("step-7" + "x" * 200)[:128], 2))


@pytest.mark.parametrize("versions", [None, [], spans(("default", 0))])
def test_weights_without_a_name_are_not_spoken_of(bench, versions):
    answers = bench(event([1, 2]), event([3], "length", versions=versions), DONE)
    assert answers.result(work()).versions == ()


def test_of_many_versions_the_latest_are_kept(bench):
    many = [{"version": str(at), "start": at, "end": at + 1} for at in range(100)]
    answers = bench(event(list(range(100)), "length", versions=many), DONE)
    assert answers.result(work(max_tokens=100)).versions == tuple((str(at), at) for at in range(36, 100))


@pytest.mark.parametrize("starts", [[0, 0], [1, 0], [0, 3], [-1], ["x"], [None]])
def test_versions_of_tokens_that_there_are_not_are_left_out_of_a_right_answer(bench, starts):
    versions = [{"version": "v", "start": start, "end": 3} for start in starts]
    answers = bench(event([1, 2]), event([3], "length", versions=versions), DONE)
    assert answers.result(work()) == Generated((3,))


def test_events_may_be_cut_anywhere(bench):
    whole = event([1]) + b": a comment\r\n\r\n" + event([2]) + event([3], "stop") + DONE
    answers = bench(*(whole[i : i + 1] for i in range(len(whole))))
    assert answers.result(work()) == Generated((3,))
    assert answers.tokens == [1, 2]


def test_what_vllm_is_asked():
    asked = json.loads(request_body(work(max_tokens=8, count=3, sampling=Sampling(temperature=0.5, top_p=0.9, seed=4))))
    assert asked["token_ids"] == [5, 6]
    assert asked["cache_salt"] == salt_of(ROOT)
    parameters = asked["sampling_params"]
    assert parameters["max_tokens"] == 5
    assert parameters["stop_token_ids"] == [7]
    assert parameters["ignore_eos"], "whether eos ends it is our own rule's to say"
    assert (parameters["temperature"], parameters["top_p"], parameters["seed"]) == (0.5, 0.9, 7)
    assert "kv_transfer_params" not in asked
    assert "seed" not in json.loads(request_body(work()))["sampling_params"]
    assert json.loads(request_body(work(sources=("cache-b",))))["kv_transfer_params"] == {"mooncake_zmq.sources": ["cache-b"]}


def scored(*tokens):
    """The logprobs of tokens, each with itself and three candidates."""

    def candidates(token):
        return [{"token_id": each, "logprob": -float(each), "rank": 1} for each in (token, 30, 10, 20)]

    content = [{"token_id": token, "logprob": -float(token), "rank": 1, "top_logprobs": candidates(token)} for token in tokens]
    return {"content": content}


def test_a_request_with_an_adapter_names_it_and_no_other_does():
    assert json.loads(request_body(work(adapter="poet")))["model"] == "poet"
    assert "model" not in json.loads(request_body(work()))


def test_tokens_come_with_their_logprobs_and_the_likeliest_in_order(bench):
    answers = bench(event([15], logprobs=scored(15)), event([40, 10], "length", logprobs=scored(40, 10)), DONE)
    result = answers.result(work(sampling=Sampling(logprobs=2)))
    assert result == Generated((40, 10), 0, ((-40.0, ((10, -10.0), (20, -20.0))), (-10.0, ((10, -10.0), (20, -20.0)))))
    (first,) = [each.progress for each in answers.heard if not isinstance(each, WorkDone)]
    assert first.logprobs == ((-15.0, ((10, -10.0), (15, -15.0))),)
    asked = [json.loads(request_body(work(sampling=Sampling(logprobs=most))))["sampling_params"] for most in (0, 20)]
    assert [each["logprobs"] for each in asked] == [1, 20]


@pytest.mark.parametrize("given", [None, {"content": None}, scored(2), scored(1, 1), {"content": [{"token_id": 1}]}])
def test_other_logprobs_than_those_of_the_tokens_fail_the_work(bench, given):
    result = bench(event([1], "stop", logprobs=given), DONE).result(work(sampling=Sampling(logprobs=0)))
    assert isinstance(result, WorkFailed)


def test_logprobs_are_within_what_messages_hold(bench):
    content = [{"token_id": 1, "logprob": value, "top_logprobs": []} for value in (0.5, -1e300)]
    result = bench(event([1, 1], "stop", logprobs={"content": content}), DONE).result(work(sampling=Sampling(logprobs=0)))
    assert result.logprobs == ((0.0, ()), (-1e30, ()))


def whole(*scores):
    return json.dumps({"choices": [], "prompt_logprobs": [None, *scores]}).encode()


def score(**by_token):
    return {name[1:]: {"logprob": value, "rank": 1, "decoded_token": None} for name, value in by_token.items()}


def test_a_prompts_logprobs_come_before_its_answer_in_pieces_that_a_message_holds(bench, monkeypatch):
    monkeypatch.setattr(generation_module, "MAX_SCORED", 2)
    answers = bench(event([1], "stop"), DONE)
    answers.stub.scored = whole(score(_6=-1.5, _9=-0.5), score(_7=-0.25), score(_8=-3.0, _2=-1.0, _3=-1.0))
    prompt = work(tokens=pack_tokens([5, 6, 7, 8]), prompt_likeliest=1, adapter="poet", sampling=Sampling(temperature=0.5))
    assert answers.result(prompt).tokens == (1,)
    found = [each.progress for each in answers.heard[:-1]]
    assert found == [
        PromptScoresGenerated(1, ((-1.5, ((9, -0.5),)), (-0.25, ((7, -0.25),)))),
        PromptScoresGenerated(3, ((-3.0, ((2, -1.0),)),)),
    ]
    scoring, asked = answers.stub.asked
    assert scoring["sampling_params"] == {"prompt_logprobs": 1, "max_tokens": 1, "temperature": 0.0, "detokenize": False}
    same = ("model", "token_ids", "cache_salt")
    assert [scoring[name] for name in same] == [asked[name] for name in same]
    assert ("stream" in scoring, "prompt_logprobs" in asked["sampling_params"]) == (False, False)


@pytest.mark.parametrize(
    "scored",
    [
        b"",
        b"{}",
        b'{"prompt_logprobs": null}',
        whole(),
        whole(score(_6=-1.0), score(_6=-1.0)),
        whole(score(_9=-1.0)),
        whole(None),
        whole({"6": {"logprob": "x"}}),
        whole({"-1": {"logprob": -1.0}, "6": {"logprob": -1.0}}),
        b"x" * 1_000_000,
    ],
)
def test_logprobs_that_are_not_those_of_the_prompt_fail_the_work_in_one_line(bench, scored):
    answers = bench(event([1], "stop"), DONE)
    answers.stub.scored = scored
    result = answers.result(work(prompt_likeliest=0))
    assert isinstance(result, WorkFailed)
    assert "logprobs" in result.reason
    assert "\n" not in result.reason


def test_a_grammar_is_asked_for_as_vllm_takes_it():
    def asked(grammar):
        sampling = Sampling(constraint=grammar)
        return json.loads(request_body(work(sampling=sampling)))["sampling_params"]["structured_outputs"]

    schema = {"type": "object", "properties": {"a": {"enum": ["x-guidance"]}}, "required": ["a"]}
    assert asked(of_schema(schema)) == {"json": schema}
    assert asked(of_lark('start: "a" | "b"')) == {"grammar": 'start: "a" | "b"'}
    body = msgspec.json.decode(b'{"prompt": "p", "guided_regex": "[a-z]+"}', type=CompletionBody)
    assert asked(body.constraint()[1]) == {"grammar": "start: /[a-z]+/"}
    assert "structured_outputs" not in json.loads(request_body(work()))["sampling_params"]


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((event([1]),), "hung up"),
        ((), "hung up"),
        ((event([1]), DONE), "hung up"),
        ((b"data: {not json\n\n",), "no event"),
        ((b'data: {"choices": 3}\n\n',), "no event"),
        ((b'data: {"choices": [{"token_ids": ["a"]}]}\n\n',), "no event"),
        ((b"data: \xff\xfe\n\n",), "no event"),
        ((b'data: {"choices":' + b"[" * 100_000 + b"\n\n",), "no event"),
        ((b"data: " + b"1" * (2 * MAX_LINE_BYTES),), "more than"),
        (tuple(b"x" * 65536 for _ in range(32)), "more than"),
        ((b'data: {"error": {"message": "no memory"}}\n\n', DONE), "no memory"),
        ((event([1]), event([], "abort"), DONE), "abort"),
        ((event([1] * 9),), "more tokens than"),
        ((event([1], "stop"), event([2]), DONE), "after the end"),
    ],
)
def test_nonsense_fails_the_work_in_one_line(bench, pieces, reason):
    result = bench(*pieces).result(work())
    assert isinstance(result, WorkFailed)
    assert reason in result.reason
    assert "\n" not in result.reason
    assert len(result.reason) < 600


def test_more_tokens_than_a_message_holds_are_told_in_pieces(bench):
    answers = bench(event(list(range(2 * MAX_RUN + 5)), "length"), DONE)
    result = answers.result(work(max_tokens=3 * MAX_RUN))
    assert answers.tokens + list(result.tokens) == list(range(2 * MAX_RUN + 5))
    assert all(len(told.progress.tokens) <= MAX_RUN for told in answers.heard if not isinstance(told, WorkDone))


def test_an_error_status_is_told(bench):
    answers = bench()
    answers.stub.status = 400
    assert "400" in answers.result(work()).reason


def test_of_a_refusal_without_end_the_beginning_is_enough(bench):
    answers = bench()
    answers.stub.status = 503
    answers.stub.answer = endless(0.0)
    reason = answers.result(work(quiet_s=60.0), deadline_s=60.0).reason
    assert "503" in reason
    assert len(reason) < 600


def test_nobody_there_is_a_failure(bench):
    answers = bench()
    answers.stub.close()
    assert isinstance(answers.result(work()), WorkFailed)


def endless(gap_s):
    def answer(body):
        while True:
            yield event([1])
            time.sleep(gap_s)

    return answer


def test_hanging_up_ends_it_there_too(bench):
    answers = bench()
    answers.stub.answer = endless(0.01)
    answers.generation.start(1, work(max_tokens=1 << 20), 60.0)
    answers.until(lambda: answers.tokens)
    answers.generation.cancel(1)
    assert answers.end() == WorkFailed("cancelled")
    eventually(lambda: not answers.stub.running)
    assert answers.stub.hung_up == 1


def test_a_server_that_falls_silent_has_failed(bench):
    answers = bench()
    gate = threading.Event()

    def silent(body):
        yield event([1])
        gate.wait(20)

    answers.stub.answer = silent
    assert "nothing comes for 0.2 s" in answers.result(work(quiet_s=0.2)).reason
    gate.set()


def test_a_deadline_ends_it(bench):
    answers = bench()
    answers.stub.answer = endless(0.01)
    assert "in time" in answers.result(work(max_tokens=1 << 20), deadline_s=0.3).reason


def test_closing_ends_all_works(bench):
    answers = bench()
    answers.stub.answer = endless(0.01)
    for work_id in range(3):
        answers.generation.start(work_id, work(max_tokens=1 << 20), 60.0)
    answers.until(lambda: answers.tokens)
    answers.generation.close()
    assert sorted(told.work_id for told in answers.heard if isinstance(told, WorkDone)) == [0, 1, 2]


def test_a_probe_tells_whether_it_is_well(bench):
    answers = bench()
    assert answers.result(ProbeEngine()) == EngineProbed(True, adapters=())
    answers.heard.clear()
    answers.stub.well = 503
    assert answers.result(ProbeEngine()) == EngineProbed(False, "it answers 503")


@pytest.mark.parametrize(
    ("page", "adapters"),
    [
        ((200, b'{"data": [{"id": "m", "parent": null}, {"id": "b", "parent": "m"}, {"id": "a", "parent": "m"}]}'), ("b", "a")),
        ((200, b'{"data": []}'), ()),
        ((200, json.dumps({"data": [{"id": i, "parent": "m"} for i in (7, None, "x" * 300, "y")]}).encode()), ("y",)),
        ((200, b'{"data": 7}'), None),
        ((200, b"[["), None),
        ((200, b'{"data":' + b"[" * 100_000), None),
        ((200, b'{"data": [{"id": "\\ud800", "parent": "m"}]}'), None),
        ((200, b" " * (MOST_BYTES + 1)), None),
        ((500, b"{}"), None),
    ],
)
def test_a_probe_tells_which_adapters_are_listed(bench, page, adapters):
    answers = bench()
    answers.stub.pages["/v1/models"] = page
    assert answers.result(ProbeEngine()) == EngineProbed(True, adapters=adapters)


def test_parsers_of_nested_json_are_not_known(bench):
    answers = bench()
    answers.stub.posts["/v1/chat/completions/render"] = (200, b'{"a":' + b"[" * 100_000)
    assert answers.result(ProbeEngine(parsers=True)) == EngineProbed(True, adapters=())


@pytest.mark.parametrize(
    "grammar", [b"\xff", b"{", b'{"x-guidance":1}', b'{"a":' + b"[" * 20_000, b'{"grammars": [1]}'], ids=repr
)
def test_a_constraint_that_is_no_grammar_fails_its_work_alone(bench, grammar):
    assert isinstance(bench().result(work(sampling=Sampling(constraint=grammar))), WorkFailed)


def test_a_chat_that_is_no_json_fails_its_work_alone(bench):
    assert bench().result(WriteChat(b"x")).stuck


CALLS = (
    (work(), "own"),
    (work(adapter="poet"), "poet"),
    (work(prompt_likeliest=1), "own"),
    (ProbeEngine(generate=True), "own"),
    (Embed(pack_tokens([1]), Embedding((1,)), ROOT), "own"),
    (WriteChat(b'{"model": "x"}'), "own"),
    (ReadTokens(b"{}", b"", b"", b"", "", whole=True), "own"),
)


@pytest.mark.parametrize(("asked", "model"), CALLS, ids=lambda value: type(value).__name__)
def test_each_request_names_the_model_that_was_served_at_the_start(bench, asked, model):
    answers = bench(model="own")
    seen = []
    for path in (GENERATE, EMBEDDINGS, DERENDER, RENDER):
        answers.stub.posts[path] = lambda body: seen.append(body["model"]) or (404, b"The model `own` does not exist")
    result = answers.result(asked)
    assert isinstance(result, WorkFailed | EngineProbed)
    assert not getattr(result, "stuck", False), "another node's vLLM may have it"
    assert seen == [model]


def test_a_server_that_came_back_with_another_model_is_not_well(bench):
    answers = bench(model="own")
    for names, ready in ((("own",), True), (("other",), False), (("other", "own"), True), ((), True)):
        answers.heard.clear()
        answers.stub.pages["/v1/models"] = (200, json.dumps({"data": [{"id": name} for name in names]}).encode())
        assert answers.result(ProbeEngine()).ready == ready


def test_a_server_with_another_model_on_this_machine_is_refused_at_the_start(tmp_path):
    stub = StubVllm()
    try:
        for name, hidden in (("own", 8), ("same", 8), ("other", 9)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": hidden, "rope_theta": len(name)}))
        for root, refused in (("own", False), ("same", False), ("other", True), ("none", False)):
            listed = {"data": [{"id": "a", "root": str(tmp_path / root)}]}
            stub.pages["/v1/models"] = (200, json.dumps(listed).encode())
            with pytest.raises(ServerError, match="another model") if refused else nullcontext():
                assert await_server(VllmSettings(url=stub.url), 4096, model=str(tmp_path / "own")) == "a"
    finally:
        stub.close()


def test_a_node_waits_for_its_server_and_tells_what_is_wrong_with_it():
    stub = StubVllm()
    try:
        settings, waits = VllmSettings(url=stub.url), []

        def sleep(seconds):
            waits.append(seconds)
            stub.well = 200

        stub.well = 503
        await_server(settings, 4096, sleep)
        assert waits
        with pytest.raises(ServerError, match="--max-model-len"):
            await_server(settings, 1 << 21)
        stub.status = 403
        with pytest.raises(ServerError, match="--enable-scale-out"):
            await_server(settings, 4096)
    finally:
        stub.close()


def test_a_unit_is_ready_while_its_server_loads_so_that_gateways_start(monkeypatch):
    stub, reported = StubVllm(), []
    monkeypatch.setattr(vllm_server.notify, "ready", reported.append)
    stub.well = 503
    try:
        await_server(VllmSettings(url=stub.url), 4096, lambda _: setattr(stub, "well", 200))
        assert reported == ["waiting for vLLM"]
        await_server(VllmSettings(url=stub.url), 4096)
        assert len(reported) == 1, "of one that serves, only the node's own beginning"
    finally:
        stub.close()


def test_a_node_waits_for_its_server_for_an_hour_however_long_each_look_lasts(monkeypatch):
    now = 0.0

    def look(client):
        nonlocal now
        now += 600
        return "no answer"

    monkeypatch.setattr(vllm_server, "unwell", look)
    monkeypatch.setattr(vllm_server, "time", SimpleNamespace(monotonic=lambda: now))
    waits = []
    with pytest.raises(ServerError, match="does not serve after 3600 s: no answer"):
        await_server(VllmSettings(), 4096, lambda _: waits.append(1) if len(waits) < 10 else pytest.fail("it waits on"))


@pytest.mark.parametrize("page", [b"x" * 2000, gzip.compress(bytes(1 << 20))], ids=["long", "compressed"])
def test_a_start_reads_little_of_a_server_and_nothing_that_is_compressed(monkeypatch, page):
    monkeypatch.setattr(vllm_server, "MAX_ANSWER_BYTES", 1500)
    stub = StubVllm()
    stub.headers["content-encoding"] = "gzip"
    stub.pages["/v1/models"] = (200, page)
    try:
        with pytest.raises(ServerError, match="more than 0 MiB") if page[0] == ord("x") else nullcontext():
            await_server(VllmSettings(url=stub.url), 4096)
    finally:
        stub.close()


def test_an_adapter_that_a_server_does_not_list_is_logged_and_others_are_not():
    stub = StubVllm()
    listed = [{"id": "m", "max_model_len": 4096}, {"id": "poet", "parent": "m", "max_model_len": None}]
    stub.pages["/v1/models"] = (200, json.dumps({"data": listed}).encode())
    try:
        with structlog.testing.capture_logs() as logs:
            await_server(VllmSettings(url=stub.url), 4096, adapters=("poet",))
            assert not logs
            stub.status = 404
            with pytest.raises(ServerError, match="--enable-scale-out"):
                await_server(VllmSettings(url=stub.url), 4096, adapters=("poet", "sql"))
    finally:
        stub.close()
    assert [(each["event"], each["adapters"]) for each in logs] == [("adapters_not_listed", ["sql"])]


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:8000", "ftp://a", "http://", "http://a:0", "http://u:p@a", "http://a?b", "http://a:x"),
        *("http://a/v1", "http://a:8000/v1/", "http://a..b:8000", f"http://{'a' * 64}:8000"),
    ],
)
def test_urls_that_are_none_are_refused(url):
    with pytest.raises(ValueError, match="url must be"):
        VllmSettings(url=url)
