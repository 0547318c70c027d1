"""`drain` as an operator meets it: it looks on until nothing is left, and its exit code says what came of it."""

from io import StringIO

import httpx
import pytest
from rich.console import Console

from mooncake_zmq.operate.console import drain as draining
from mooncake_zmq.operate.console.gateways import Gateways


def node(state: str, left: float = 0, *, cordoned: bool = True) -> dict:
    return {"name": "d", "state": state, "left": left, "cordoned": cordoned}


def gateways(*answers: httpx.Response, asked: list[str]) -> Gateways:
    """The first is to the order, the others to looks at the cluster."""
    left = iter(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        return next(left)

    return Gateways({"g": "http://g", "h": "http://h"}, transport=httpx.MockTransport(handle))


def ok(told: dict) -> httpx.Response:
    return httpx.Response(200, json=told)


def snapshot(told: dict) -> httpx.Response:
    return ok({"status": "ok", "nodes": [told]})


def said(of: Gateways, *, within_s: float = 60.0) -> tuple[int, str]:
    output = StringIO()
    return draining.drain(of, "d", Console(file=output, width=120), within_s=within_s), output.getvalue()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(draining, "EVERY_S", 0.0)


def test_it_tells_what_is_left_until_nothing_is():
    asked: list[str] = []
    answers = (ok(node("draining", 2)), snapshot(node("draining", 1)), snapshot(node("draining", 1)), snapshot(node("drained")))
    code, text = said(gateways(*answers, asked=asked))
    assert code == 0
    assert [line for line in text.splitlines() if "left" in line] == ["2 left to finish", "1 left to finish"]
    assert asked == ["POST /admin/drain/d", *["GET /cluster"] * 3]


def test_what_takes_longer_goes_on_and_is_1():
    code, text = said(gateways(ok(node("draining", 2)), asked=[]), within_s=0.0)
    assert (code, "not done yet: 2 left" in text) == (1, True)


def test_one_that_somebody_else_has_serve_again_is_1():
    serving = [snapshot(node("ready", 0, cordoned=False))] * draining.SURE
    code, text = said(gateways(ok(node("draining", 2)), *serving, asked=[]))
    assert (code, "is no longer cordoned: it is ready" in text) == (1, True)


def test_a_gateway_that_heard_less_or_nothing_lately_is_not_taken_at_its_word():
    stale, silent = node("ready", 0, cordoned=False), node("draining", 1)
    del silent["cordoned"]
    code, _ = said(gateways(ok(node("draining", 2)), *map(snapshot, (stale, silent, stale, node("drained"))), asked=[]))
    assert code == 0


def test_a_refusal_is_told_and_no_other_gateway_is_tried():
    asked: list[str] = []
    refused = httpx.Response(403, json={"error": {"message": "is for keys with role=admin"}})
    code, text = said(gateways(refused, asked=asked))
    assert (code, "is for keys with role=admin" in text, asked) == (2, True, ["POST /admin/drain/d"])


def test_a_gateway_that_does_not_know_better_is_passed_over():
    asked: list[str] = []
    down = httpx.Response(503, json={"error": {"message": "d does not answer"}})
    code, _ = said(gateways(down, ok(node("drained")), asked=asked))
    assert (code, asked) == (0, ["POST /admin/drain/d"] * 2)


def test_undo():
    asked: list[str] = []
    output = StringIO()
    assert draining.undo(gateways(ok(node("ready")), asked=asked), "d", Console(file=output)) == 0
    assert (asked, "serves again" in output.getvalue()) == (["DELETE /admin/drain/d"], True)


@pytest.mark.parametrize(("others", "warns"), [([], True), ([{"name": "e", "role": "decode", "state": "ready"}], False)])
def test_a_drain_of_the_last_decode_warns(others: list[dict], warns: bool):
    mine = {**node("drained"), "role": "decode"}
    code, text = said(gateways(ok(mine), ok({"status": "ok", "nodes": [mine, *others]}), asked=[]))
    assert (code, "nothing decodes now" in text) == (0, warns)
