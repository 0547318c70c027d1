"""What one tenant's floods cost another tenant in the simulated cluster: the live conductors, prefills, decodes and gateways'
requests, in virtual time. No machine's load takes part in it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from random import Random
from typing import Any

import pytest

from mooncake_zmq.core.messages import Sampling, StopRule
from mooncake_zmq.gateway.requests.client_events import ClientGone, ClientRequest, Finished, TokenOut
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens
from mooncake_zmq.simulation.cluster import SLOT_BYTES, ClusterSettings, processes
from mooncake_zmq.simulation.engine import VOCABULARY
from mooncake_zmq.simulation.machine import Hardware
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.traces import MODEL

BOB, ALICE, GATEWAY = "bob", "alice", "gateway-1"
BEGINS_S, LASTS_S, ENDS_WITHIN_S = 2.0, 10.0, 8.0


@dataclass(frozen=True)
class Flow:
    """Requests of one tenant: the mean time between them, and the tokens of each prompt and answer. `hangs_up_s`: the time
    after which each is left; 0: never."""

    every_s: float
    prompt: int
    answer: int
    hangs_up_s: float = 0.0


BOBS = Flow(0.25, 24, 24)
FLOODS = {
    "long prompts": Flow(0.05, 240, 2),
    "many short requests": Flow(0.008, 24, 2),
    "hang-ups": Flow(0.012, 60, 40, hangs_up_s=0.3),
    "long answers": Flow(0.05, 8, 60),
}


@dataclass
class Asked:
    """One request: when it came, the times of its tokens, and how it ended."""

    at: float
    tokens: list[float] = field(default_factory=list)
    end: str = ""

    @property
    def first_s(self) -> float:
        return self.tokens[0] - self.at

    @property
    def whole_s(self) -> float:
        return self.tokens[-1] - self.at


def p99(values: Iterable[float]) -> float:
    ranked = sorted(values)
    return ranked[max(0, math.ceil(0.99 * len(ranked)) - 1)]


class Unchecked:
    """Stands for the checkers: what they find is sought by the seeds."""

    def broken(self, _machine: Any, text: str) -> None:
        raise AssertionError(text)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


class Trial:
    """A cluster without faults, and the requests of both tenants."""

    def __init__(self, flood: str = "", *, named: bool = True) -> None:
        """Unless `named`, no request tells its tenant."""
        plain = ClusterSettings()
        self._settings = replace(
            plain,
            conductor=replace(plain.conductor, role_change_after_s=0.0),
            prefill=replace(plain.prefill, slab_bytes=256 * SLOT_BYTES, max_active=4),
            decode=replace(plain.decode, capacity_tokens=1200, max_batch=6, max_requests=24),
        )
        self._named = named
        self._asked: dict[str, Asked] = {}
        self._simulator = Simulator(
            random=Random(7),
            specs=processes(self._settings),
            layout=self._settings.layout,
            hardware=Hardware(jitter=0.0),
            session=self._settings.session,
            checkers=Unchecked(),  # type: ignore[arg-type]
            check_every=1000,
        )
        self._simulator.to_client = self._receive
        self._ask(BOB, BOBS)
        if flood:
            self._ask(ALICE, FLOODS[flood])
        self._simulator.run_until(BEGINS_S + LASTS_S + ENDS_WITHIN_S)

    def _ask(self, tenant: str, flow: Flow) -> None:
        """Have a tenant's requests come at random, each with a prompt and of a length of its own."""
        random, at = Random(tenant), BEGINS_S
        for number in count():
            at += random.expovariate(1 / flow.every_s)
            if at > BEGINS_S + LASTS_S:
                return
            prompt = [random.randrange(VOCABULARY) for _ in range(flow.prompt)]
            self._simulator.at(at, self._send, f"{tenant}.{number}", tenant, prompt, flow)

    def _send(self, name: str, tenant: str, prompt: list[int], flow: Flow) -> None:
        layout, told = self._settings.layout, tenant if self._named else ""
        tokens, root = pack_tokens(prompt), namespace(model=MODEL, layout=layout.fingerprint, salt=told)
        request = ClientRequest(
            tokens=tokens,
            root=root,
            keys=tuple(extend_keys(root, tokens, layout.block_tokens)),
            sampling=Sampling(prompt_tokens=len(prompt)),
            stop=StopRule(max_tokens=flow.answer),
            tenant=told,
            ttft_slo_s=0.0,
            tbt_slo_s=0.0,
        )
        simulator = self._simulator
        self._asked[name] = Asked(simulator.now)
        simulator.from_client(GATEWAY, name, request)
        if flow.hangs_up_s:
            simulator.at(simulator.now + flow.hangs_up_s, simulator.from_client, GATEWAY, name, ClientGone())

    def _receive(self, _gateway: str, name: str, output: Any) -> None:
        asked = self._asked[name]
        if isinstance(output, TokenOut):
            asked.tokens.append(self._simulator.now)
        else:
            asked.end = "finished" if isinstance(output, Finished) else output.code

    def of(self, tenant: str) -> list[Asked]:
        """The requests of a tenant."""
        return [asked for name, asked in self._asked.items() if name.startswith(f"{tenant}.")]


@cache
def alone() -> list[Asked]:
    return Trial().of(BOB)


LONGEST_CHUNK_S = Hardware().compute_start_s + Hardware().compute_token_s * ClusterSettings().prefill.chunk_tokens
"""The chunk that no turn interrupts."""


def is_fair(beside: list[Asked]) -> bool:
    """Whether the whole answers beside a flood are within the wanted ratio, and their first tokens wait for few chunks."""
    if any(asked.end != "finished" for asked in beside):
        return False
    beside_s, alone_s = ([p99(each.whole_s for each in some), p99(each.first_s for each in some)] for some in (beside, alone()))
    return beside_s[0] <= 1.5 * alone_s[0] and beside_s[1] <= alone_s[1] + 2.5 * LONGEST_CHUNK_S


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_delays_another_tenants_answers_by_half_at_most(flood: str) -> None:
    assert is_fair(Trial(flood).of(BOB))


@pytest.mark.parametrize("flood", FLOODS)
def test_first_come_first_served_would_not(flood: str) -> None:
    assert not is_fair(Trial(flood, named=False).of(BOB))
