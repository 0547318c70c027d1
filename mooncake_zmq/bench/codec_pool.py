"""How many tokens a second one core puts into a host's pool and gets out of it, here and from another host, by codec.

A put encodes the blocks of a sequence into slots of shared memory, with checksums; a get verifies and decodes them into another
sequence. To another host blocks go as its pool fetches them, over TCP loopback: after the put, and before the get. The process
at the far end is this module, by `python codec_pool.py ORDER`.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from mooncake_zmq.bench.block_fetch import BlockFetch
from mooncake_zmq.bench.codec_rates import LAYOUT, filled, makers
from mooncake_zmq.bench.keys_driver import ANYWHERE, FAR, fail
from mooncake_zmq.bench.others.peers import driver_process
from mooncake_zmq.bench.report import Progress, Row
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.kv.codec import CODECS, EXACT
from mooncake_zmq.transfer.block_copy import load_blocks, store_block
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.shared_memory import Segment

TIMEOUT_S = 60.0
WAYS = {
    "put here": ("put",),
    "get here": ("get",),
    "put to another host": ("put", "fetch"),
    "get from another host": ("fetch", "get"),
}


class Host:
    """A pool of `blocks` blocks of a codec, the sequence that they come from, and one that they are loaded into."""

    def __init__(self, codec: str, blocks: int, stack: ExitStack) -> None:
        self._layout = LAYOUT.coded(codec)
        exact, coded, _ = makers()
        make = exact if codec == EXACT else partial(coded, CODECS[codec])
        self._source, self._target = filled(make, blocks), filled(make, blocks, seed=2)
        directory = stack.enter_context(TemporaryDirectory(prefix="mczmq-bench-", dir="/dev/shm"))
        self.segment = Segment.create(directory, "bench", FAR, self._layout, blocks, 1)
        stack.callback(self.segment.close)
        self._turn = 0

    def put(self) -> list[SlotRef]:
        """Store all blocks of the sequence, as a prefill and its pool do."""
        self._turn += 2
        refs = []
        for slot in range(self.segment.slots):
            self.segment.set_generation(slot, self._turn - 1)
            checksum = store_block(self._source, slot, self.segment, SlotGrant(FAR, 1, slot, self._turn - 1))
            self.segment.set_generation(slot, self._turn)
            assert checksum is not None, "a put was void"
            refs.append(SlotRef(node=FAR, incarnation=1, slot=slot, generation=self._turn, checksum=checksum))
        return refs

    def get(self, refs: list[SlotRef]) -> None:
        """Load all blocks into the other sequence, verified, as a prefill does."""
        layers, tokens = range(self._layout.layers), self._layout.block_tokens
        for block, ref in enumerate(refs):
            load = (self.segment, BlockLoad(block, ref, 0, layers.stop, tokens), layers)
            assert isinstance(load_blocks([load], self._target)[0], list), "a block did not verify"

    def check(self, refs: list[SlotRef]) -> None:
        """Check that all blocks have been loaded: the other sequence, which held other KV, is stored as the same bytes."""
        self._source, self._target = self._target, self._source
        assert [ref.checksum for ref in self.put()] == [ref.checksum for ref in refs], "a block was not loaded"


def pool_rows(blocks: int, rounds: int, progress: Progress) -> Iterator[Row]:
    """Yield tokens a second of each codec beside exact blocks; medians of rounds in which all take turns."""
    took: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        far = stack.enter_context(
            driver_process(
                Path(__file__), {"blocks": blocks}, python=sys.executable, what="the other host", timeout_s=TIMEOUT_S
            )
        )
        hosts = {name: Host(name, blocks, stack) for name in (EXACT, *CODECS)}
        fetches = {}
        for name in hosts:
            fetches[name] = BlockFetch(LAYOUT.coded(name), blocks, (FAR, 1), far.ready[name]["endpoint"], on_crash=fail)
            stack.callback(fetches[name].close)
        for number in range(rounds + 1):
            progress(f"pool, round {number} of {rounds}" if number else "pool, warming up")
            for name, host in hosts.items():
                theirs = [SlotRef(FAR, 1, slot, 2, checksum) for slot, checksum in enumerate(far.ready[name]["checksums"])]
                began = time.perf_counter()
                refs = host.put()
                between = time.perf_counter()
                host.get(refs)
                ended = time.perf_counter()
                if not number:
                    host.check(refs)
                seconds = {"put": between - began, "get": ended - between, "fetch": fetches[name].fetch_s(theirs)}
                for way, steps in WAYS.items():
                    took.setdefault((way, name), []).append(sum(seconds[step] for step in steps))
    for way in WAYS:
        for name in CODECS:
            value, reference = (blocks * LAYOUT.block_tokens / median(took[way, each][1:]) for each in (name, EXACT))
            yield Row(f"{way}, {name} / exact", "tokens/s", value, reference, higher=True)


def main() -> None:
    """Serve blocks of each codec until the input ends."""
    blocks, answer = json.loads(sys.argv[1])["blocks"], {}
    with ExitStack() as stack:
        for name in (EXACT, *CODECS):
            host = Host(name, blocks, stack)
            checksums = [ref.checksum for ref in host.put()]
            server = DataServer(host.segment, ANYWHERE, on_crash=fail)
            stack.callback(server.close)
            answer[name] = {"endpoint": server.endpoint, "checksums": checksums}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
