"""The other process of `bench gpu`: the decode's side. It opens a prefill's slab by its handle and loads its blocks, or
fetches them over a stream as if it were on another host.

Its argument is a JSON object: the slab's place and the data server's endpoint. It answers one line when ready, and one for each
request; see `bench.others.peers`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence

from mooncake_zmq.bench.block_fetch import BareStream, BlockFetch
from mooncake_zmq.bench.gpu import BLOCK_TOKENS, INCARNATION, NODE, blank, digest, load_all, new_sequence, references
from mooncake_zmq.bench.keys_driver import fail
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    shape = {name: order[name] for name in ("layers", "kv_heads", "head_dim")}
    layout = BlockLayout(**shape, block_tokens=BLOCK_TOKENS)
    cuda = Cuda.open(layout)
    device, handle = bytes.fromhex(order["device"]), bytes.fromhex(order["handle"])
    slab = DeviceSegment.open(cuda, order["path"], layout, INCARNATION, device, handle)
    sequence = new_sequence(cuda, layout)
    fetch = BlockFetch(layout, slab.slots, (NODE, INCARNATION), order["data"], on_crash=fail)
    bare = BareStream(order["bare"])

    def load(*, verify: bool) -> float:
        began = time.perf_counter()
        load_all(sequence, slab, verify=verify)
        return time.perf_counter() - began

    ways: dict[str, Callable[..., float]] = {
        "load": load,
        "fetch": lambda: fetch.fetch_s(references(slab)),
        "receive": lambda: bare.fetch_s(fetch.memory),
    }

    def digest_of(way: str, **options: bool) -> str:
        """Take a way into memory that holds something else; return the digest of what came."""
        blank(sequence, layout)
        fetch.memory[:] = bytes(len(fetch.memory))
        ways[way](**options)
        return digest(sequence, layout) if way == "load" else hashlib.sha256(fetch.memory).hexdigest()

    _answer({})
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        _answer({"digest": digest_of(**asked)} if do == "digest" else {"s": ways[do](**asked)})


def _answer(answer: dict[str, float] | dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
