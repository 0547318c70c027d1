"""Floods by many connections, in the model: memory stays bounded, and a peer that sends whole messages is not cut for them."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.core.messages import MAX_MESSAGE_BYTES
from mooncake_zmq.transfer import connections
from mooncake_zmq.transfer.connections import (
    LONG_BYTES,
    LOOK_S,
    MAX_UNTAKEN_BYTES,
    PARTIAL_BYTES,
    PARTIAL_S,
    SLOWEST_BYTES_PER_S,
    Connections,
)

HONEST, HONEST_PLACE = 1, "10.0.0.1"
HONEST_BYTES = 1 << 20
HELD_LOOKS = 3
"""Number of checks within which the receiving thread takes a whole message."""
FLOOD_BYTES = 256 << 10
"""Bytes of a flood between two checks, 25 MB/s. With ten times as many, from ever new hosts, the honest peer is cut too."""


class Listening:
    """Stands in for a listening socket without connections of its own."""

    type, rcvbuf, rcvhwm = zmq.ROUTER, 0, 0

    def get(self, _option: int) -> int:
        return 0

    def get_string(self, _option: int) -> str:
        return "tcp://here"

    def get_monitor_socket(self, _events: int) -> Any:
        return SimpleNamespace(close=lambda linger: None)

    def disable_monitor(self) -> None:
        pass


class Model(Connections):
    """Connections of which the test moves the bytes and the clock; memory grows by as much as is held."""

    def __init__(self) -> None:
        self.now, self.sent = 0.0, dict[int, int]()
        super().__init__(Listening(), {}, pytest.fail)  # type: ignore[arg-type]
        self._process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))  # type: ignore[assignment]

    def _run(self) -> None:
        pass

    def accept(self, descriptor: int, place: str) -> None:
        self.sent[descriptor] = 0
        self._accept(descriptor, place, self.now)

    def send(self, descriptor: int, size: int) -> None:
        if descriptor in self._open:
            self.sent[descriptor] += size

    def look(self) -> None:
        self.drained()
        self.now += LOOK_S
        self._look(self.now, LOOK_S)

    @property
    def untaken_bytes(self) -> float:
        return sum(held.untaken_bytes for held in self._open.values())


@pytest.fixture(autouse=True)
def model_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "cut", lambda listening, descriptor: None)
    monkeypatch.setattr(connections, "log", SimpleNamespace(warning=lambda *_, **__: None))


def flood(seed: int, attackers: int, hosts: int, size: int, rounds: int) -> Model:
    """Run a flood: each attacker begins a message of `size` that never ends, from one of so many hosts, and begins again where
    it was cut. The honest peer sends whole messages all the while. Returns the model."""
    draw, model = random.Random(seed), Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "_received_bytes", model.sent.get)
        model.accept(HONEST, HONEST_PLACE)
        waiting, number, budget = 0, HONEST, 0
        for turn in range(rounds):
            budget += FLOOD_BYTES
            while budget >= size and len(model._open) <= attackers:
                number, budget = number + 1, budget - size
                model.accept(number, f"10.0.1.{number % hosts}")
                model.send(number, size)
            if waiting:
                waiting -= 1
                if not waiting:
                    model.took(HONEST, HONEST_BYTES)
            elif turn > rounds // 2 and draw.random() < 0.5:
                model.send(HONEST, HONEST_BYTES + LONG_BYTES)
                waiting = HELD_LOOKS
            model.look()
            assert model.untaken_bytes <= MAX_UNTAKEN_BYTES
        model.close()
    return model


FLOODS = {
    "attackers": st.integers(10, 300),
    "hosts": st.sampled_from([1, 2, 40]),
    "size": st.integers(16 << 10, 2 * PARTIAL_BYTES),
    "rounds": st.just(300),
    "seed": st.integers(0, 99),
}


@settings(max_examples=60)
@given(**FLOODS)
def test_many_connections_that_never_end_a_message_do_not_have_a_peer_cut_that_ends_its_own(**drawn: int) -> None:
    assert HONEST in flood(**drawn)._open


def test_the_longest_message_comes_whole_over_the_slowest_link_and_one_that_never_ends_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    monkeypatch.setattr(connections, "_received_bytes", model.sent.get)
    monkeypatch.setattr(connections, "resident_bytes", lambda: 0)
    model.accept(HONEST, HONEST_PLACE)
    while model.sent[HONEST] < MAX_MESSAGE_BYTES:
        model.send(HONEST, int(SLOWEST_BYTES_PER_S * LOOK_S) + 1)
        model.look()
        assert HONEST in model._open
    for _ in range(int(PARTIAL_S / LOOK_S)):
        model.look()
    assert HONEST not in model._open
    model.close()


def most_bytes(self: Connections, _now: float) -> int:
    """Planted: the connection goes that holds most at this moment."""
    return max(self._open, key=lambda descriptor: self._open[descriptor].untaken_bytes)


def test_a_bug_planted_in_the_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connections, "_heaviest", most_bytes)
    assert HONEST not in flood(1, 120, 1, 400 << 10, 300)._open
    assert HONEST not in flood(1, 600, 40, 64 << 10, 300)._open


def crowded(arrivals: list[tuple[int, bool]], most: int) -> Model:
    """Run connections that come from hosts, by number, or go from them, and check what each may have. Returns the model."""
    model, of_hosts = Model(), dict[int, list[int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "MAX_OF_A_HOST", most)
        for descriptor, (host, comes) in enumerate(arrivals):
            there = of_hosts.setdefault(host, [])
            if comes:
                model.accept(descriptor, f"10.0.0.{host}")
                assert (descriptor in model._open) == (len(there) < most), "a host has its share, whatever others have"
                there += [descriptor] * (descriptor in model._open)
            elif there:
                model._forget(there.pop(0))
        assert sorted(model._open) == sorted(descriptor for there in of_hosts.values() for descriptor in there)
        assert model._of_hosts == {f"10.0.0.{host}": len(there) for host, there in of_hosts.items() if there}
        model.close()
    return model


@settings(max_examples=60)
@given(arrivals=st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 3]), st.booleans()), max_size=80), most=st.integers(1, 9))
def test_a_host_has_as_many_connections_as_it_may_and_leaves_others_theirs(arrivals: list[tuple[int, bool]], most: int) -> None:
    crowded(arrivals, most)


def test_a_bug_planted_in_the_share_of_a_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_sum(self: Connections, descriptor: int, address: str, now: float) -> None:
        """Planted: all hosts have one share together."""
        self._open[descriptor] = connections._Open(address, now)
        self._of_hosts[address] += 1
        if len(self._open) > connections.MAX_OF_A_HOST:
            self._forget(descriptor)

    monkeypatch.setattr(Connections, "_accept", by_sum)
    with pytest.raises(AssertionError, match="share"):
        crowded([(1, True)] * 3 + [(2, True)], 3)
