"""The other process of `bench gpu`: a decode's side, which opens a prefill's slab by its handle and loads its blocks.

Its argument is a JSON object: where the slab is. It answers one line when ready, and one for each request; see `bench.peers`.
"""

import json
import sys
import time
from collections.abc import Sequence

from mooncake_zmq.bench.gpu import BLOCK_TOKENS, LIFE, load_all, new_sequence
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    shape = {name: order[name] for name in ("layers", "kv_heads", "head_dim")}
    layout = BlockLayout(**shape, block_tokens=BLOCK_TOKENS)
    cuda = Cuda.open(layout)
    device, handle = bytes.fromhex(order["device"]), bytes.fromhex(order["handle"])
    slab = DeviceSegment.open(cuda, order["path"], layout, LIFE, device, handle)
    sequence = new_sequence(cuda, layout)
    _tell({})
    for line in sys.stdin:
        began = time.perf_counter()
        load_all(sequence, slab, verify=json.loads(line)["verify"])
        _tell({"s": time.perf_counter() - began})


def _tell(answer: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
