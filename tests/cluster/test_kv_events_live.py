"""A router outside the cluster that subscribes to a cache-node's events knows what its pool holds, by tokens."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from toy_cluster import ROOT, ToyCluster, eventually, expected_tokens, until_none

pytestmark = pytest.mark.timeout(120)

PROMPT = [(13 * position) % 250 for position in range(200)]


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    with tempfile.TemporaryDirectory(prefix="mz-") as path, tempfile.TemporaryDirectory(prefix="mz-ssd-") as ssd:
        directory = Path(path)
        text = (ROOT / "configs/toy.toml").read_text()
        for host in "ab":
            node = f'name = "cache-{host}"\nrole = "cache-node"\n'
            events = f'kv_events = {{ endpoint = "ipc://{path}/{host}.pub", replay_endpoint = "ipc://{path}/{host}.replay" }}'
            text = text.replace(node, f"{node}settings = {{ {events} }}\n")
        config = directory / "events.toml"
        config.write_text(text)
        settings = (f"cache_node.ssd.directory={ssd}", "cache_node.ssd.ahead=1.0", "prefill.own_reuse=false")
        cluster = ToyCluster(directory / "run", config=str(config), settings=settings)
        cluster.sockets = directory
        with cluster.unbroken():
            until_none(cluster.missing, 30)
            yield cluster


def replayed(context: zmq.Context, endpoint: str) -> list[dict]:
    """All events since the beginning, asked for as vLLM's subscribers do after a gap."""
    events = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert dealer.poll(5000), "the replay answers"
            _, number, payload = dealer.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return events
            events += msgpack.unpackb(payload)[1]


def told(context: zmq.Context, cluster: ToyCluster, host: str, medium: str | None = None) -> dict[bytes, tuple]:
    """Of each block that the cache-node of `host` told of in this life: what it follows and holds."""
    blocks: dict[bytes, tuple] = {}
    for event in replayed(context, f"ipc://{cluster.sockets}/{host}.replay"):
        if event["type"] == "BlockStored" and medium in (None, event["medium"]):
            size = event["block_size"]
            parent = event["parent_block_hash"]
            for index, key in enumerate(event["block_hashes"]):
                blocks[key] = (parent, event["token_ids"][index * size : (index + 1) * size])
                parent = key
    return blocks


def test_a_subscriber_learns_every_block_of_a_prompt(cluster: ToyCluster) -> None:
    with cluster.stream(prompt=PROMPT, max_tokens=80) as stream:
        tokens = stream.read()
        host = stream.served["prefill"][-1]
        decode_host = stream.served["decode"][-1]
    assert tokens == expected_tokens(PROMPT, 80)
    until_none(cluster.busy_gauges, 30)
    context = zmq.Context()
    try:

        def found() -> dict[bytes, tuple]:
            return {key: block for place in {host, decode_host} for key, block in told(context, cluster, place).items()}

        # All but the last token have KV: 279 of them, so 8 whole blocks.
        blocks = eventually(lambda: (now := found()) and len(now) >= 8 and now, 20, "all blocks are told")
    finally:
        context.destroy(linger=0)
    chain: list[int] = []
    parent = None
    while following := [key for key, block in blocks.items() if block[0] == parent]:
        (parent,) = following
        chain += blocks[parent][1]
    assert chain == np.asarray(PROMPT + tokens)[:256].tolist()


def test_copies_fetched_and_found_after_a_restart_are_told_as_the_put_was(cluster: ToyCluster) -> None:
    def ask() -> dict:
        with cluster.stream(prompt=PROMPT, max_tokens=8) as stream:
            assert stream.read() == expected_tokens(PROMPT, 8)
            return stream.served

    blocks = len(PROMPT) // 32
    hosts = ("a", "b")
    with cluster.only("a"):
        ask()
        until_none(cluster.busy_gauges, 30)
    until_none(cluster.missing, 60)
    with cluster.only("b"):
        assert ask()["cached_remote"] == blocks * 32
    context = zmq.Context()
    try:
        put, fetched = (told(context, cluster, host, "CPU") for host in hosts)
        assert [tokens for _, tokens in put.values()] == [PROMPT[at : at + 32] for at in range(0, blocks * 32, 32)]
        assert [parent for parent, _ in put.values()] == [None, *put][:blocks]
        assert fetched == put
        for host in hosts:
            eventually(lambda host=host: told(context, cluster, host, "DISK") == put, 20, "what is on disk is told")
            killed = cluster.pid(f"cache-{host}")
            cluster.signal(f"cache-{host}", signal.SIGKILL)
            eventually(lambda node=f"cache-{host}", pid=killed: cluster.pid(node) != pid, 30, "it is restarted")
        until_none(cluster.missing, 60)
        for host in hosts:
            _, found = replayed(context, f"ipc://{cluster.sockets}/{host}.replay")
            assert (found["block_hashes"], found["medium"]) == (list(put), "DISK"), "in one event, parents first"
            assert told(context, cluster, host) == put
    finally:
        context.destroy(linger=0)
