"""Lease and release of blocks at a live cache-node on this host: the time a scheduler step spends before it can read a
prefix."""

import subprocess

import click

from mooncake_zmq.bench.stub_node import StubNode, role_process, runtime_of
from mooncake_zmq.config.records import Config
from mooncake_zmq.core.actor import Drained, Effect, Event, PeerDown, PeerUp, Received, Send, SetTimer, Started, TimerFired
from mooncake_zmq.core.messages import (
    BlocksLeased,
    CommitSlots,
    LeaseBlocks,
    ReleaseLease,
    ReserveSlots,
    SlotsReserved,
)
from mooncake_zmq.kv.block_hash import Key

BLOCKS = 32
TTL_S = 15.0
TIMEOUT_S = 60.0
WATCH_S = 0.2
CACHE, CLIENT = "cache-a", "client-a"
CONFIG = f"""
[model]
path = "toy"
[cache_node]
pool_bytes = 16_777_216
[[nodes]]
name = "{CACHE}"
role = "cache-node"
host = "host-a"
[[nodes]]
name = "{CLIENT}"
role = "decode"
host = "host-a"
"""


class LeaseClient(StubNode):
    """Puts a chain of blocks once, then leases and releases it, again and again; `took_s` has the time of each, release
    included.

    The cache-node handles a conversation in order: it answers the next lease only after the release sent before it.
    """

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.took_s: list[float] = []
        self.failure = "" if cycles else "no cycle was asked for"
        self._keys: tuple[Key, ...] = tuple(index.to_bytes(16, "big") for index in range(1, BLOCKS + 1))
        self._cycles = cycles
        self._lease_id = 0
        self._sent_at = 0.0

    def handle(self, now: float, event: Event) -> list[Effect]:
        match event:
            case Started():
                return [SetTimer(("too late",), TIMEOUT_S)]
            case PeerUp():
                return [Send(CACHE, ReserveSlots(put_id=1, keys=self._keys, ttl_s=TTL_S))]
            case Received(_, SlotsReserved(grants=grants)):
                # Leases belong to the control plane: the bytes behind them are not read here.
                commit = CommitSlots(put_id=1, checksums=tuple((grant.index, 1) for grant in grants))
                return [Send(CACHE, commit), self._lease(now)]
            case Received(_, BlocksLeased(sources=sources)) if len(sources) == BLOCKS:
                self.took_s.append(now - self._sent_at)
                release = Send(CACHE, ReleaseLease(lease_id=self._lease_id))
                return [release, Drained() if len(self.took_s) == self._cycles else self._lease(now)]
            case Received() | PeerDown() | TimerFired():
                self.failure = f"after {len(self.took_s)} leases came {event}"
                return [Drained()]
            case _:
                return []

    def _lease(self, now: float) -> Send:
        self._lease_id += 1
        self._sent_at = now
        return Send(CACHE, LeaseBlocks(lease_id=self._lease_id, keys=self._keys, sources=(), fetch_s=0.0, ttl_s=TTL_S))


def lease_times_s(cycles: int) -> list[float]:
    """Return the seconds of each lease and release of 32 blocks, one after another. Raises click.ClickException if it breaks
    off."""
    client = LeaseClient(cycles)
    with role_process("cache-node", CACHE, CONFIG) as (config, process, words):
        _run_client(client, config, process)
        if client.failure or len(client.took_s) < cycles:
            why = client.failure or f"it ended:\n{words.read_text()}"
            raise click.ClickException(f"the cache-node did not keep the conversation: {why}")
    return client.took_s


def _run_client(client: LeaseClient, config: Config, cache_node: "subprocess.Popen[bytes]") -> None:
    runtime = runtime_of(client, config, CLIENT, peer=CACHE)
    runtime.every(WATCH_S, lambda: runtime.stop() if cache_node.poll() is not None else None)
    try:
        runtime.run()
    finally:
        runtime.close()
