"""A store that does not answer is left alone, and met again by pings beside the calls."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stopping import stop
from store_harness import wait_for

from mooncake_zmq.store import protocol
from mooncake_zmq.store.client.client import StoreClient
from mooncake_zmq.store.client.link import Link
from mooncake_zmq.store.client.outage import LONGEST_PAUSE_S, Outage
from mooncake_zmq.store.client.peer import ClientSettings

VALUE = np.arange(20_000, dtype=np.uint8)
SPAN = [(VALUE.__array_interface__["data"][0], VALUE.size)]


class Store:
    """A store as its client sees it, over the seconds of a clock: `pings` are the times of pings during an outage."""

    def __init__(self) -> None:
        self.outage, self.now, self.pings = Outage(), 0.0, list[float]()

    def call_without_answer(self) -> None:
        assert not self.outage.is_on
        assert self.outage.begin("no answer in time")
        assert not self.outage.begin("another call got none either"), "pings are under way"

    def ping(self, *, answered: bool) -> None:
        self.now += self.outage.pause_s
        self.pings.append(self.now)
        (self.outage.met if answered else self.outage.missed)()


def test_pings_begin_at_once_and_come_later_and_later_up_to_a_limit():
    store = Store()
    store.call_without_answer()
    for _ in range(7):
        store.ping(answered=False)
        assert store.outage.is_on
    assert store.pings == [0, 1, 3, 7, 12, 17, 22]
    assert store.outage.pause_s == LONGEST_PAUSE_S
    store.ping(answered=True)
    assert not store.outage.is_on


def test_a_store_that_answers_pings_and_no_calls_is_pinged_later_each_time():
    store = Store()
    for _ in range(6):
        store.call_without_answer()
        store.ping(answered=True)
    assert store.pings == [0, 1, 3, 7, 12, 17]


def test_after_an_answer_the_next_outage_begins_with_a_ping_at_once():
    store = Store()
    for _ in range(3):
        store.call_without_answer()
        store.ping(answered=True)
    store.outage.answered()
    store.call_without_answer()
    store.ping(answered=True)
    assert store.pings == [0, 1, 3, 3]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store in a process of its own, and its endpoint."""
    endpoint = f"ipc://{tmp_path}/pool.sock"
    script = Path(__file__).parents[1] / "vllm" / "pool_process.py"
    command = [sys.executable, str(script), str(tmp_path), endpoint, "1", "1"]
    environment = os.environ | {"PYTHONPATH": str(script.parents[2]), "MOONCAKE_ZMQ_MYPYC": "0"}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "serving\n"
    yield started, endpoint
    started.send_signal(signal.SIGCONT)
    started.terminate()
    started.wait(30)


@pytest.mark.parametrize("shared", [True, False])
def test_a_store_that_is_stopped_costs_one_call_a_wait_and_is_met_again_once_it_goes_on(process, monkeypatch, shared):
    started, endpoint = process
    client = StoreClient([endpoint], ClientSettings(timeout_s=0.3, share_memory=shared))
    assert client.connect() is None
    assert client.put(["a"], [SPAN]) == [0]
    assert client.hold(["a"]).count == 1
    pings, asked = [], []
    send = Link.send

    def watched(self: Link, message: object, deadline: float) -> None:
        own = threading.current_thread() is threading.main_thread()
        (asked if own else pings).append(type(message))
        send(self, message, deadline)

    monkeypatch.setattr(Link, "send", watched)
    stop(started.pid)
    assert client.hold(["a"]).count == 0
    wait_for(lambda: len(pings) >= 3, "it is pinged")
    asked.clear()
    assert [client.hold(["a"]).count for _ in range(3)] == [0] * 3
    assert client.exist(["a"]) == [-1]
    assert not asked, "calls send it nothing meanwhile"
    assert set(pings) == {protocol.Hello}
    started.send_signal(signal.SIGCONT)
    wait_for(lambda: client.hold(["a"]).count == 1, "it is met again")
    client.close()


def test_closing_a_client_ends_its_pings(tmp_path):
    client = StoreClient([f"ipc://{tmp_path}/nothing.sock"], ClientSettings(setup_timeout_s=0.3))
    assert client.connect() is not None
    assert [thread for thread in threading.enumerate() if thread.name == "store-ping"]
    client.close()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "store-ping"], "the thread is over")
