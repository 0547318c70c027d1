"""The loop's time is shared by turns: a client among many of another address or tenant waits for few of them."""

import asyncio
import socket
from itertools import count

import pytest
from scripted_actor import ScriptedActor
from test_edge_keys import guarded

from mooncake_zmq.gateway.http import loop_turns
from mooncake_zmq.gateway.http.connection import Connection
from mooncake_zmq.gateway.http.loop_turns import TURN_S, LoopTurns
from mooncake_zmq.gateway.requests.client_events import TokenOut

MANY = 100
ALICE, BOB = "127.0.0.2", "127.0.0.1"
CALL = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n\r\n"


def test_a_work_waits_for_one_of_each_other_owner_and_turns_are_bounded():
    now, done, turns_taken = [0.0], [], [0]

    async def run():
        turns = LoopTurns(lambda: now[0])
        next_turn = turns._next

        def turn():
            turns_taken[0] += 1
            next_turn()

        turns._next = turn

        def work(owner):
            now[0] += TURN_S / 4
            done.append(owner)

        while turns.has_time:
            work("early")
        for owner in ["alice"] * MANY + ["carol"] * MANY + ["bob"]:
            turns.add(("", owner), lambda owner=owner: work(owner))
        while len(turns):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert done.index("bob") <= 4 + 3
    assert {owner: done.count(owner) for owner in ("alice", "carol", "bob")} == {"alice": MANY, "carol": MANY, "bob": 1}
    assert turns_taken[0] >= 2 * MANY / 4


def test_time_that_a_work_needs_later_counts_for_its_turn_and_its_owner():
    now, done, ends = [0.0], [], []

    async def run():
        turns = LoopTurns(lambda: now[0])
        turns.spend(2 * TURN_S)
        for number in range(8):
            turns.add(("", "alice"), lambda number=number: done.append(number), TURN_S / 2)
        turns.add(("", "bob"), lambda: done.append("bob"), TURN_S / 2)
        while len(turns):
            ends.append(len(done))
            await asyncio.sleep(0)

    asyncio.run(run())
    assert done[:2] == [0, "bob"]
    assert max(after - before for before, after in zip(ends, ends[1:], strict=False)) <= 2


def slow_clock(acceptor) -> None:
    """Let each look at the clock take a quarter of a turn's time."""
    looks = count()
    acceptor._clock = lambda: next(looks) * TURN_S / 4


@pytest.mark.parametrize("what", ["take", "_begin_call"])
def test_a_connection_of_another_address_waits_for_few_of_a_crowd(what, monkeypatch):
    actor, order = ScriptedActor(), []
    does = getattr(Connection, what)

    def note(connection, *arguments):
        order.append(connection.address)
        does(connection, *arguments)

    monkeypatch.setattr(Connection, what, note)

    def called_from(address, port):
        made = socket.create_connection(("127.0.0.1", port), source_address=(address, 0))
        made.sendall(CALL % b"x")
        return made

    async def client(port):
        slow_clock(actor.acceptor)
        made = [called_from(address, port) for address in [ALICE] * MANY + [BOB]]  # before the loop accepts any of them
        await actor.until(lambda: len(order) == len(made))
        for each in made:
            each.close()

    actor.serve(client)
    assert order.index(BOB) < 10


def test_a_call_of_another_tenant_waits_for_few_of_a_crowd_at_the_same_address(monkeypatch):
    actor, order = guarded(), []
    begin = Connection._begin_call

    def note(connection, *arguments):
        order.append(connection.tenant)
        begin(connection, *arguments)

    async def client(port):
        pairs = []
        for key in ["alice"] * MANY + ["bob"]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CALL % key.encode())
            await reader.readuntil(b"}]}")
            pairs.append((reader, writer))
        monkeypatch.setattr(Connection, "_begin_call", note)
        slow_clock(actor.acceptor)
        for (_, writer), key in zip(pairs, ["alice"] * MANY + ["bob"], strict=True):
            writer.write(CALL % key.encode())
        for reader, writer in pairs:
            await asyncio.wait_for(reader.readuntil(b"}]}"), 10)
            writer.close()

    actor.serve(client)
    assert len(order) == MANY + 1
    assert order.index("bob") < 20, "few: bytes are read from the connections in the kernel's order"


def test_connections_that_wait_for_their_turn_are_bounded_and_closed_with_the_acceptor(monkeypatch):
    actor = ScriptedActor()
    monkeypatch.setattr("mooncake_zmq.gateway.http.acceptor.MAX_UNMET", 8)
    unmet = []

    async def client(port):
        made = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        slow_clock(actor.acceptor)
        meet = actor.acceptor._meet_next

        def note(incoming):
            unmet.append(len(actor.acceptor._unmet))
            meet(incoming)

        monkeypatch.setattr(actor.acceptor, "_meet_next", note)
        await actor.until(lambda: len(actor.acceptor.connections) == 40)
        monkeypatch.setattr(loop_turns, "TURN_S", 0.0)
        made += [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        await actor.until(lambda: actor.acceptor._unmet)
        actor.acceptor.close()
        assert not actor.acceptor._unmet
        for each in made:
            each.close()

    actor.serve(client)
    assert max(unmet) <= 8


@pytest.mark.parametrize("streams", [1, 10, MANY])
def test_a_token_of_another_tenant_waits_for_one_turn_of_a_flood_of_streams(streams):
    actor, now, waits, sent = guarded(), [0.0], [], [0]
    actor.edge.calls._turns = LoopTurns(lambda: now[0])

    def reads(name):
        """A call whose chunks take a quarter of a turn each; the reader never takes one itself."""
        call = actor.edge.calls.call()
        call.hold(name, 0)
        arrived = []

        def write(outputs):
            now[0] += TURN_S / 4
            if name == "bob":
                waits.append(now[0] - arrived.pop())
            sent[0] += len(outputs)
            return True

        async def read():
            with call:
                call.shortcut = write
                await call.take()

        def feed(index):
            arrived.append(now[0])
            call.receive(0, TokenOut(index, 65, (0.0, ())))

        return asyncio.create_task(read()), call, feed

    async def run():
        readers = [reads("alice") for _ in range(streams)] + [reads("bob")]
        await asyncio.sleep(0)
        for index in range(20):
            for _, _, feed in readers:
                feed(index)
            while len(waits) == index:
                await asyncio.sleep(0)
        while sent[0] < 20 * len(readers):
            await asyncio.sleep(0)
        for task, call, _ in readers:
            call.hang_up()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert max(waits) <= 2 * TURN_S, "what this turn has room for, and then one of alice's chunks"
    actor.check_idle()
