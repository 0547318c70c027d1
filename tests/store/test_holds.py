"""Values that one client keeps in memory for others to read."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from store_harness import idle, wait_for

from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.store.client.client import StoreClient
from mooncake_zmq.store.client.peer import ClientSettings

VALUE = np.arange(20_000, dtype=np.uint8)
SPAN = [(VALUE.__array_interface__["data"][0], VALUE.size)]


@pytest.fixture
def client() -> Iterator[Callable[..., StoreClient]]:
    made: list[StoreClient] = []

    def make(*servers: StoreServer, **settings: object) -> StoreClient:
        addresses = [server.endpoint for server in servers]
        made.append(StoreClient(addresses, ClientSettings(**({"timeout_s": 0.5, "setup_timeout_s": 0.5} | settings))))
        made[-1].connect()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("shared", [True, False])
def test_the_leading_values_are_held_until_released(make_server, client, shared):
    server = make_server()
    one = client(server, share_memory=shared)
    assert one.put(["a", "b", "d"], [SPAN] * 3) == [0, 0, 0]
    wait_for(lambda: idle(server), "the put is over")
    hold = one.hold(["a", "b", "c", "d"])
    assert hold.count == 2
    assert server.gauges()["leases"] == 1
    one.release(hold)
    wait_for(lambda: idle(server), "nothing is held any more")
    one.release(hold)
    assert one.hold(["c", "a"]).count == 0
    assert one.hold([]).count == 0
    assert one.hold(["a", "", "b"]).count == 1, "what is no key is not there"


def test_a_prefix_may_lie_in_several_stores_and_one_that_is_gone_has_nothing(make_server, client):
    first, second = make_server("first"), make_server("second")
    client(first).put(["a", "c"], [SPAN] * 2)
    client(second).put(["b", "d"], [SPAN] * 2)
    both = client(first, second)
    hold = both.hold(["a", "b", "c", "d", "e"])
    assert hold.count == 4
    assert [server.gauges()["leases"] for server in (first, second)] == [1, 1]
    both.release(hold)
    wait_for(lambda: idle(first) and idle(second), "nothing is held any more")
    second.close()
    assert both.hold(["a", "b"]).count == 1


def test_more_keys_than_a_message_holds_are_held(make_server, client):
    server = make_server(max_objects=4096)
    one = client(server)
    keys = [f"k{number}" for number in range(1500)]
    assert set(one.put(keys, [[(SPAN[0][0], 10)]] * len(keys))) == {0}
    hold = one.hold([*keys, "no"])
    assert hold.count == 1500
    assert server.gauges()["leases"] == 2
    one.release(hold)
    wait_for(lambda: idle(server), "nothing is held any more")


def test_a_hold_whose_holder_is_gone_ends_by_itself(make_server, client):
    server = make_server()
    one = client(server, share_memory=False, ttl_s=0.2)
    one.put(["a"], [SPAN])
    assert one.hold(["a"]).count == 1
    wait_for(lambda: idle(server), "the lease is over")
