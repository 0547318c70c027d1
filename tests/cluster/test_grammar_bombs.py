"""Grammars that take all time and memory end the processes that read them: gateways and engines serve on, and do not grow."""

import httpx
import psutil
import pytest
import web
from toy_cluster import NODES, ToyCluster

PATTERNS = [f".*a.{{{number},{number + 30}}}b.*" for number in range(30)]
TOGETHER = " & ".join(f"/{pattern}/" for pattern in PATTERNS)
AT_ONCE = {"guided_json": {"allOf": [{"type": "string", "pattern": f"^{pattern}$"} for pattern in PATTERNS]}}
AS_LARK = {"guided_grammar": f"start: A\nA: {TOGETHER}"}
IN_ITS_THIRD_TOKEN = {"guided_grammar": f'start: A\nA: /x/ | "bbb" (/x/ | ({TOGETHER}))', "logit_bias": {str(ord("b")): 100}}
MOST_BYTES = 256 << 20


def ask(cluster: ToyCluster, **asked) -> httpx.Response:
    body = {"prompt": "hi", "temperature": 0, "max_tokens": 8} | asked
    return web.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def pids(cluster: ToyCluster) -> list[int]:
    return [cluster.pid(node) for node in NODES]


def followed(cluster: ToyCluster) -> str:
    answer = ask(cluster, guided_choice=["yes", "no"])
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("bomb", [AT_ONCE, AS_LARK], ids=["schema", "lark"])
def test_a_grammar_that_would_compile_for_ever_is_refused_and_nobody_suffers(cluster, bomb):
    lives = pids(cluster)
    for _ in range(2):
        answer = ask(cluster, **bomb)
        assert answer.status_code == 400
        assert "fewer and simpler patterns" in answer.json()["error"]["message"]
        assert followed(cluster) in ("yes", "no")
    gateway = psutil.Process(cluster.pid("gateway-0"))
    assert gateway.memory_info().rss < MOST_BYTES
    assert pids(cluster) == lives


def test_a_client_that_hangs_up_leaves_no_grammar_that_compiles_on(cluster):
    body = {"prompt": "hi", "guided_grammar": AS_LARK["guided_grammar"] + "\n"}
    with pytest.raises(httpx.ReadTimeout):
        web.post(f"{cluster.url}/v1/completions", json=body, timeout=0.2)
    assert followed(cluster) in ("yes", "no")
    assert psutil.Process(cluster.pid("gateway-0")).memory_info().rss < MOST_BYTES


def test_a_grammar_that_never_comes_back_from_a_token_ends_its_answer_and_no_engine(cluster):
    lives = pids(cluster)
    answer = ask(cluster, **IN_ITS_THIRD_TOKEN)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "constraint_stuck"
    assert followed(cluster) in ("yes", "no")
    assert pids(cluster) == lives


def test_who_follows_grammars_may_die_at_any_time(cluster):
    assert followed(cluster) in ("yes", "no")
    children = [each for pid in pids(cluster) for each in psutil.Process(pid).children()]
    assert children
    for child in children:
        child.kill()
    assert followed(cluster) in ("yes", "no")
