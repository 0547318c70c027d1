"""A router outside the cluster that subscribes to a cache-node's events knows what its pool holds, by tokens."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from toy_cluster import ROOT, ToyCluster, eventually, expected_tokens, until_none

pytestmark = [pytest.mark.xdist_group("kv events"), pytest.mark.timeout(120)]

PROMPT = [(13 * position) % 250 for position in range(200)]


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        directory = Path(path)
        text = (ROOT / "configs/toy.toml").read_text()
        for host in "ab":
            node = f'name = "cache-{host}"\nrole = "cache-node"\n'
            events = f'kv_events = {{ endpoint = "ipc://{path}/{host}.pub", replay_endpoint = "ipc://{path}/{host}.replay" }}'
            text = text.replace(node, f"{node}settings = {{ {events} }}\n")
        config = directory / "events.toml"
        config.write_text(text)
        cluster = ToyCluster(directory / "run", config=str(config))
        cluster.sockets = directory
        try:
            cluster.start()
            until_none(cluster.missing, 30)
            yield cluster
            cluster.stop()
            assert cluster.leftovers() == []
        finally:
            if cluster.process and cluster.process.poll() is None:
                cluster.process.kill()


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


def test_a_subscriber_learns_every_block_of_a_prompt(cluster: ToyCluster) -> None:
    with cluster.stream(prompt=PROMPT, max_tokens=80) as stream:
        tokens = stream.read()
        host = stream.served["prefill"][-1]
        decode_host = stream.served["decode"][-1]
    assert tokens == expected_tokens(PROMPT, 80)
    until_none(cluster.busy_gauges, 30)
    context = zmq.Context()
    try:

        def told() -> dict[bytes, dict]:
            blocks: dict[bytes, dict] = {}
            for place in {host, decode_host}:
                for event in replayed(context, f"ipc://{cluster.sockets}/{place}.replay"):
                    if event["type"] == "BlockStored":
                        size = event["block_size"]
                        parent = event["parent_block_hash"]
                        for index, key in enumerate(event["block_hashes"]):
                            mine = event["token_ids"][index * size : (index + 1) * size]
                            blocks[key] = {"parent": parent, "tokens": mine}
                            parent = key
            return blocks

        # All but the last token have KV: 279 of them, so 8 whole blocks.
        blocks = eventually(lambda: (found := told()) and len(found) >= 8 and found, 20, "all blocks are told")
    finally:
        context.destroy(linger=0)
    chain: list[int] = []
    parent = None
    while following := [key for key, block in blocks.items() if block["parent"] == parent]:
        (parent,) = following
        chain += blocks[parent]["tokens"]
    assert chain == np.asarray(PROMPT + tokens)[:256].tolist()
