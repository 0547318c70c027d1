"""The live cluster, its engines modelled, under more load than it can carry: some are refused at once, the rest are served."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import web
from toy_cluster import ROOT, ToyCluster, eventually, greedy, of_the_engine_alone

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.profile import Fitted, PrefillTime, Profile, StepTime, encode
from mooncake_zmq.engine.modelled import ModelledEngine
from mooncake_zmq.engine.toy import TOY_SPEC

pytestmark = pytest.mark.timeout(120)

COSTS = Fitted(prefill_token_s=1e-3, prefill_square_s=0, decode_step_s=0.01, decode_request_s=0, decode_context_s=0).costs
PROMPT_TOKENS, OUTPUT_TOKENS, CLIENTS = 400, 8, 24
TTFT_SLO_S = 2.0
"""Five prompts for each of the two prefills."""


def profile() -> Profile:
    """What an engine of these costs would be measured as."""
    prefill = tuple(PrefillTime(n, p, COSTS.compute_s(p + n, p)) for n in (64, 512, 2048) for p in (0, 1024))
    steps = tuple(StepTime(b, c, COSTS.step_s(b, b * c)) for b in (1, 4, 16) for c in (128, 1024))
    return Profile(model="toy", fingerprint="", threads=1, backend="numpy", machine="stated", prefill=prefill, decode=steps)


def undisturbed(prompt: list[int]) -> list[int]:
    """What the engine alone gives."""
    return of_the_engine_alone(ModelledEngine(TOY_SPEC, Costs(), sleep=lambda seconds: None), prompt, OUTPUT_TOKENS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ToyCluster]:
    (tmp_path / "profile.json").write_bytes(encode(profile()))
    text = (ROOT / "configs/toy.toml").read_text()
    for role in ("prefill", "decode"):
        text = text.replace(f'role = "{role}"', f'role = "{role}"\nbackend = "modelled:{tmp_path}/profile.json"')
    config = tmp_path / "modelled.toml"
    config.write_text(text)
    costs = tuple(f"costs.{name}={getattr(COSTS, name)}" for name in Fitted.__struct_fields__)
    settings = (f"conductor.ttft_slo_s={TTFT_SLO_S}", *costs)
    cluster = ToyCluster(tmp_path / "run", config=str(config), settings=settings)
    with cluster.unbroken():
        yield cluster


def test_in_overload_some_are_told_when_to_come_back_and_the_rest_finish(cluster: ToyCluster) -> None:
    eventually(lambda: not cluster.missing(), what="everybody talks to everybody it should")
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 250, PROMPT_TOKENS).tolist() for _ in range(CLIENTS)]

    with web.Client(base_url=cluster.url, timeout=60) as client, ThreadPoolExecutor(CLIENTS) as clients:
        bodies = [greedy(prompt=prompt, max_tokens=OUTPUT_TOKENS) for prompt in prompts]
        answers = list(clients.map(lambda body: client.post("/v1/completions", json=body), bodies))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert 2 <= len(refused) <= CLIENTS - 2
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == undisturbed(prompt)
    eventually(lambda: not cluster.busy_gauges(), what="nothing is left behind")
