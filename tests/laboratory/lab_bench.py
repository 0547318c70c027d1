"""A small cluster and small traces for the laboratory's tests, and one machine to hand works to."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from mooncake_zmq.core.actor import Effect, Event, WorkDone, WorkProgress
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Hello
from mooncake_zmq.core.work import Work
from mooncake_zmq.laboratory.generated import generate, parse_spec
from mooncake_zmq.laboratory.machine import ModelledMachine, lab_layout
from mooncake_zmq.laboratory.resources import Host
from mooncake_zmq.laboratory.study import Arrival, NodeProfile, Setup
from mooncake_zmq.simulation.links import Direct
from mooncake_zmq.simulation.world import Process, ProcessSpec, World

COSTS = Costs(
    prefill_token_s=1e-4,
    prefill_square_s=1e-9,
    kv_bytes_per_token=1000,
    load_bytes_per_s=1e9,
    disk_bytes_per_s=1e7,
    transfer_bytes_per_s=1e8,
    decode_step_s=0.02,
    decode_request_s=0.001,
    decode_context_s=1e-8,
)
NODE = NodeProfile(
    name="small",
    costs=COSTS,
    network_bytes_per_s=1e8,
    bus_bytes_per_s=1e9,
    disk_bytes_per_s=1e7,
    dram_tokens=60_000,
    disk_tokens=0,
    decode_tokens=60_000,
    max_batch=8,
)
SMALL = Setup(prefill=2, decode=2, hardware=NODE)


def small_trace(requests: int = 40, seed: int = 5) -> list[Arrival]:
    """Chats of several turns with a shared first block, their turns a few seconds apart."""
    random, arrivals, following = Random(seed), [], 1
    chats: list[tuple[float, tuple[int, ...]]] = [(random.uniform(0, 20), (0,)) for _ in range(max(1, requests // 3))]
    for number in range(requests):
        at_s, ids = chats[number % len(chats)]
        more = random.randrange(1, 6)
        ids = (*ids, *range(following, following + more))
        following += more
        tokens = len(ids) * 512 - random.choice([0, 0, 100, 400])
        arrivals.append(Arrival(at_s, tokens, random.randrange(1, 60), ids))
        complete = ids[: tokens // 512]
        chats[number % len(chats)] = (at_s + random.uniform(2, 8), complete)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def shifting_trace(half_s: float = 300.0) -> list[Arrival]:
    """Long prompts with short answers, then short prompts with long answers."""
    halves = (
        f"uniform:requests={int(6 * half_s)},rate=6,input=8192,output=10",
        f"uniform:requests={int(4 * half_s)},rate=4,input=512,output=400",
    )
    prompts, answers = (generate(parse_spec(spec)) for spec in halves)
    fresh = 1 + max(each for arrival in prompts for each in arrival.hash_ids)
    return prompts + [
        replace(arrival, at_s=half_s + arrival.at_s, hash_ids=tuple(fresh + each for each in arrival.hash_ids))
        for arrival in answers
        if arrival.at_s < half_s
    ]


def small_setup(**changes: Any) -> Setup:
    """The small cluster, changed."""
    return replace(SMALL, **changes)


class _Idle:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.counts: Any = {}

    def handle(self, now: float, event: Event) -> list[Effect]:
        self.heard.append(event)
        return []

    def check(self, now: float) -> None:
        pass

    def gauges(self, now: float) -> dict[str, float]:
        return {}

    def dump(self, now: float) -> dict[str, Any]:
        return {}


class Bench:
    """Machines by name, on the hosts they are given; what each told, and when."""

    def __init__(self, places: dict[str, str], *, block_tokens: int = 512, costs: Costs = COSTS) -> None:
        self.hosts = {
            host: Host(network_bytes_per_s=1e8, bus_bytes_per_s=1e9, disk_bytes_per_s=1e7) for host in places.values()
        }
        self.told: dict[str, list[tuple[float, Event]]] = {name: [] for name in places}
        layout = lab_layout(block_tokens)

        def build(process: Process[ModelledMachine]) -> tuple[ModelledMachine, _Idle]:
            machine = ModelledMachine(
                self.world,
                name=process.name,
                costs=costs,
                layout=layout,
                hosts=self.hosts,
                host_of=places.__getitem__,
                done=lambda work_id, result: self.told[process.name].append((self.world.now, WorkDone(work_id, result))),
                progressed=lambda work_id, progress: self.told[process.name].append(
                    (self.world.now, WorkProgress(work_id, progress))
                ),
                later=lambda *what: self.world.in_incarnation(process, *what),
            )
            return machine, _Idle()

        def hello(process: Process[Any]) -> Hello:
            return Hello(
                protocol=PROTOCOL_VERSION, role="prefill", host=process.spec.host, model="m", tokenizer="m", layout="l"
            )

        make: Callable[..., Any] = lambda *_: _Idle()  # noqa: E731
        self.world: World[ModelledMachine] = World(
            specs=[ProcessSpec(name=name, role="prefill", host=host, peers=(), make=make) for name, host in places.items()],
            link=Direct(delay_s=0.0, hello=hello),
            build=build,
            watch=lambda process: None,
        )
        for name in places:
            self.world.restart(name)

    def machine(self, name: str) -> ModelledMachine:
        current = self.world.processes[name].current
        assert current is not None
        return current.machine

    def start(self, name: str, work_id: int, work: Work, deadline_s: float = 1e3) -> None:
        self.machine(name).start(work_id, work, deadline_s)

    def pass_time(self, seconds: float) -> None:
        self.world.run_until(self.world.now + seconds)

    def ends(self, name: str) -> dict[int, tuple[float, Any]]:
        """Work id -> when it ended and how; each ended once."""
        done = [(at, event) for at, event in self.told[name] if isinstance(event, WorkDone)]
        assert len({event.work_id for _, event in done}) == len(done), "a work ends once"
        return {event.work_id: (at, event.result) for at, event in done}
