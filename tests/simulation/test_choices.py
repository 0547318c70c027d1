"""Sixteen answers to one prompt in a whole cluster: its tokens are computed once, and each answer is the one of its seed."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from mooncake_zmq.core.messages import Sampling, StopRule
from mooncake_zmq.gateway.requests.client_events import ClientRequest
from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens
from mooncake_zmq.simulation.checkers import Checkers
from mooncake_zmq.simulation.clients import Clients
from mooncake_zmq.simulation.cluster import ClusterSettings, processes
from mooncake_zmq.simulation.faults import Fault, FaultKind
from mooncake_zmq.simulation.injection import Injection
from mooncake_zmq.simulation.machine import Hardware
from mooncake_zmq.simulation.share_checker import ShareChecker
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.traces import Answer, Chat, Turn, Workload, reference

CHOICES = 16
PROMPT = [3 * token for token in range(50)]


class Sixteen:
    """One call to a cluster whose decodes have room for all."""

    def __init__(self, *, room: int = 40, seed: int = 1) -> None:
        plain = ClusterSettings.of_seed(seed)
        decode = replace(plain.decode, capacity_tokens=room * 80, max_requests=room, max_batch=room)
        settings = replace(plain, decode=decode)
        layout, workload = settings.layout, Workload()
        root, blocks = workload.root(layout, ""), {}
        sampling = Sampling(temperature=0.8, seed=5, prompt_tokens=len(PROMPT))
        stop, tokens = StopRule(max_tokens=12), pack_tokens(PROMPT)
        answers = []
        for number in range(5, 5 + CHOICES):
            own = replace_seed(sampling, number)
            answers.append(Answer(number, *reference(root, PROMPT, own, stop, layout, blocks)))
        keys = tuple(extend_keys(root, tokens, layout.block_tokens))
        request = ClientRequest(tokens=tokens, root=root, keys=keys, sampling=sampling, stop=stop)
        turn = Turn(request, tuple(answers), 0.0, None, None, cancel_alone=False)
        self.answers = answers
        self.checkers = Checkers(
            blocks=blocks,
            roots=workload.roots(layout),
            block_tokens=layout.block_tokens,
            max_lease_s=settings.cache_node.max_lease_s,
            shares=ShareChecker({}, {}),
        )
        specs = processes(settings)
        self.simulator = Simulator(
            random=Random(seed),
            specs=specs,
            layout=layout,
            hardware=Hardware(),
            session=settings.session,
            checkers=self.checkers,
            keyed=False,
        )
        self.simulator.run_until(2.0)
        self.clients = Clients(self.simulator, ["gateway-1"], limit_s=36.0)
        self.outcomes: Counter[str] = self.clients.add([Chat(0, 2.0, (turn,))])

    def run(self) -> None:
        """To the end of the call, and of the run."""
        while self.clients.waiting:
            self.simulator.run_until(self.simulator.now + 0.5)
            assert self.simulator.now < 40
        self.checkers.finish()

    def decode(self) -> str:
        """Where they run."""
        loads = {
            name: process.current.node.actor.gauges(self.simulator.now)["requests_running"]
            for name, process in self.simulator.processes.items()
            if name.startswith("decode") and process.current is not None
        }
        return max(loads, key=loads.__getitem__)


def replace_seed(sampling: Sampling, seed: int) -> Sampling:
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**(fields | {"seed": seed}))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_prompt_is_computed_once_and_each_seed_gives_its_own_answer(seed: int) -> None:
    """The clients compare every token with an undisturbed run of its seed alone. Seed 1 computes in a pipeline."""
    cluster = Sixteen(seed=seed)
    cluster.run()
    assert cluster.outcomes == {"finished": 1, "finished with choices": 1}
    counts = cluster.checkers.counts
    stages = counts["stage_tokens_computed"]
    assert counts["prompt_tokens_computed"] == len(PROMPT)
    assert (stages > 0) == (seed == 1)
    assert cluster.checkers.works["ForkSequence"] == 1
    assert len({answer.tokens for answer in cluster.answers}) > CHOICES / 2


def test_each_answer_goes_on_elsewhere_when_its_decode_dies() -> None:
    cluster = Sixteen()
    cluster.simulator.run_until(2.3)
    victim = cluster.decode()
    Injection(cluster.simulator).schedule(Fault(FaultKind.CRASH, cluster.simulator.now, 20.0, (victim,)))
    cluster.run()
    assert cluster.outcomes["finished"] == 1
    assert cluster.outcomes["finished after resume"] == CHOICES


def test_a_decode_without_room_for_all_takes_some_and_the_others_run_elsewhere() -> None:
    cluster = Sixteen(room=6)
    cluster.run()
    assert cluster.outcomes["finished"] == 1
    counts = cluster.checkers.counts
    assert counts["reservations_denied"] > 0
    assert counts["prompt_tokens_computed"] < 3 * len(PROMPT), "what is computed again is the end of the prompt"
