"""The simulated machine of a store by itself: what a fault does to values, and what the checker makes of it."""

from typing import Any

import pytest
from simulation_harness import LAYOUT, World

from mooncake_zmq.simulation.disk import SimDisk
from mooncake_zmq.simulation.stores import Stores
from mooncake_zmq.store import protocol
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.stream_messages import Attach, Promote

VALUE = b"v" * (1 << 16)


class Client:
    """On the host of the store "cache"; asks what a test says, and keeps the answers."""

    name, connection = b"m" * 16, b"c" + b"m" * 16 + b"0001"
    incarnation, shared, user, beside = 1, True, None, "cache"

    def __init__(self) -> None:
        self.world = World({"cache": "a"})
        self.world.simulator.disks["cache"] = SimDisk(LAYOUT, 4)
        self.stores = Stores(self.world.simulator, 1)
        self.store = self.stores.living["cache"]
        self.stores.clients = [self]
        self.stores.checker.is_called(self.name, self.user)
        self.replies: list[Any] = []
        self.token = self.ask(protocol.Hello(1, protocol.PROTOCOL_VERSION, "", True)).token

    def received(self, incarnation: int, store: object, reply: Any) -> None:
        self.replies.append(reply)

    def streamed(self, *_: object) -> None:
        pass

    def ask(self, request: Any) -> Any:
        self.stores.send(self, "cache", request)
        self.world.pass_time(0.05)
        return self.replies.pop()

    def put(self, key: str, checksum: int) -> None:
        reserved = self.ask(protocol.Reserve(2, [key], [len(VALUE)], 0, 1.0))
        self.store.memory[reserved.offsets[0] : reserved.offsets[0] + len(VALUE)] = VALUE
        self.stores.checker.intends(self.name, 2, {0: VALUE})
        self.stores.send(self, "cache", protocol.Commit(3, 2, [0], [checksum]))
        while not self.replies:
            self.world.pass_time(1e-4)
        assert self.replies.pop().numbers == [0]

    def promote(self, key: str) -> None:
        pipe = self.store.attach(self, Attach(self.name, self.token))
        self.world.pass_time(0.05)
        self.stores.stream(pipe, Promote([key], []), [])
        self.world.pass_time(1.0)


@pytest.mark.parametrize("checked", [False, True])
def test_bits_flip_where_a_checksum_can_tell_and_what_comes_back_from_disk_is_what_was_put(checked: bool) -> None:
    client = Client()
    objects = client.store.node.objects
    client.put("k", checksum_of(VALUE) if checked else 0)
    client.stores.flip("cache", 1)
    client.world.pass_time(1.0)
    assert objects.exist(["k"]) == (b"\0" if checked else b"\1")
    assert objects.counts["corrupt"] == checked
    if not checked:
        objects.entries.evict(objects.by_key["k"])
        client.promote("k")
        assert client.ask(protocol.Lease(4, ["k"], 1.0)).checksums == [checksum_of(VALUE)]
