"""`bench schedule --zmq`: decisions through a real conductor process, requested over ZeroMQ by four gateways of another
process.

Every node is a session of its own: the gateways send requests at a steady rate, prefills, decodes and cache-nodes are connected
and silent. A time counts from when the request was due, so that a late sender hides nothing. Both sides share one machine.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from mooncake_zmq.bench.schedule_load import Asked
from mooncake_zmq.bench.stub_node import StubNode, role_process, runtime_of
from mooncake_zmq.config.records import Config
from mooncake_zmq.core.actor import Effect, Event, PeerUp, Received, Send, SetTimer, TimerFired
from mooncake_zmq.core.messages import Placed, Rejected, RequestEnded, Schedule
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime

CONDUCTOR = "conductor-0"
GATEWAYS = 4
HOSTS = 4
SETTLE_S = 1.0
"""Seconds between the last node's greeting and the first request."""
TIMEOUT_S = 60.0
TICK_S = 0.002
WATCH_S = 0.2
TICK = ("tick",)
ROLES = {"gateway": GATEWAYS, "prefill": HOSTS, "decode": HOSTS, "cache-node": HOSTS}


class Silent(StubNode):
    """A node that is connected and sends nothing."""

    def __init__(self, greeted: threading.Semaphore) -> None:
        super().__init__()
        self._greeted = greeted

    def handle(self, now: float, event: Event) -> list[Effect]:
        if isinstance(event, PeerUp):
            self._greeted.release()
        return []


class Asking(Silent):
    """A gateway that requests placements, `per_s` of them, and gives each back as soon as it is answered."""

    def __init__(self, greeted: threading.Semaphore, asked: Sequence[Asked], per_s: float) -> None:
        super().__init__(greeted)
        self.took_s: list[float] = []
        self.refused = 0
        self.ended_at = 0.0
        self.done = threading.Event()
        self._asked = asked
        self._gap_s = 1 / per_s
        self._begun_at = 0.0
        self._sent = 0

    def handle(self, now: float, event: Event) -> list[Effect]:
        match event:
            case TimerFired(key) if key == TICK:
                return self._ask(now)
            case Received(_, Placed() | Rejected() as answer):
                return self._answered(now, answer)
        return super().handle(now, event)

    def _ask(self, now: float) -> list[Effect]:
        self._begun_at = self._begun_at or now
        effects: list[Effect] = []
        while self._sent < len(self._asked) and self._due_at(self._sent) <= now:
            each = self._asked[self._sent]
            effects.append(
                Send(
                    CONDUCTOR,
                    Schedule(
                        request_id=str(self._sent), attempt=1, keys=each.keys, tokens=each.tokens, max_tokens=each.output_tokens
                    ),
                )
            )
            self._sent += 1
        return [*effects, SetTimer(TICK, TICK_S)] if self._sent < len(self._asked) else effects

    def _answered(self, now: float, answer: Placed | Rejected) -> list[Effect]:
        self.took_s.append(now - self._due_at(int(answer.request_id)))
        self.refused += isinstance(answer, Rejected)
        self.ended_at = now
        if len(self.took_s) == len(self._asked):
            self.done.set()
        return [Send(CONDUCTOR, RequestEnded(request_id=answer.request_id, attempt=1))]

    def _due_at(self, number: int) -> float:
        return self._begun_at + number * self._gap_s

    @property
    def answered_per_s(self) -> float:
        """Answers per second, from the first request to the last answer."""
        return len(self.took_s) / (self.ended_at - self._begun_at)


def times_over_zmq(asked: Sequence[Asked], per_s: float) -> tuple[list[float], float]:
    """Return the seconds of each decision at `per_s` of all gateways together, and the answers per second. Raises
    click.ClickException if it breaks off."""
    greeted = threading.Semaphore(0)
    gateways = [Asking(greeted, asked[number::GATEWAYS], per_s / GATEWAYS) for number in range(GATEWAYS)]
    with (
        role_process("conductor", CONDUCTOR, _config()) as (config, process, words),
        _nodes(config, gateways, greeted) as runtimes,
    ):
        deadline = time.monotonic() + TIMEOUT_S + len(asked) / per_s
        for _ in range(sum(ROLES.values())):
            if not greeted.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise click.ClickException(f"the conductor does not greet everybody:\n{words.read_text()}")
        time.sleep(SETTLE_S)
        for runtime in runtimes:
            runtime.post(TimerFired(TICK))
        for gateway in gateways:
            while not gateway.done.wait(WATCH_S):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise click.ClickException(f"the conductor does not answer:\n{words.read_text()}")
    if any(gateway.refused for gateway in gateways):
        raise click.ClickException("the conductor refused requests of a cluster that is idle")
    took_s = [each for gateway in gateways for each in gateway.took_s]
    return took_s, sum([gateway.answered_per_s for gateway in gateways])


def _config() -> str:
    nodes = [(CONDUCTOR, "conductor", "host-0")]
    nodes += [(f"{role}-{number}", role, f"host-{number}") for role, count in ROLES.items() for number in range(count)]
    tables = [f'[[nodes]]\nname = "{name}"\nrole = "{role}"\nhost = "{host}"\n' for name, role, host in nodes]
    head = '[model]\npath = "toy"\n[cache_node]\npool_bytes = 16_777_216\n[conductor]\nttft_slo_s = 0\ntbt_slo_s = 0\n'
    return head + "".join(tables)


@contextmanager
def _nodes(config: Config, gateways: Sequence[Asking], greeted: threading.Semaphore) -> Iterator[list[ZmqRuntime]]:
    """Run every node but the conductor, each in a thread; yield the gateways."""
    runtimes: list[ZmqRuntime] = []
    threads: list[threading.Thread] = []
    try:
        for role, count in ROLES.items():
            for number in range(count):
                actor = gateways[number] if role == "gateway" else Silent(greeted)
                runtimes.append(runtime_of(actor, config, f"{role}-{number}", peer=CONDUCTOR))
        threads = [threading.Thread(target=runtime.run) for runtime in runtimes]
        for thread in threads:
            thread.start()
        yield runtimes[: len(gateways)]
    finally:
        for runtime in runtimes:
            runtime.call(runtime.stop)
        for thread in threads:
            thread.join()
        for runtime in runtimes:
            runtime.close()
