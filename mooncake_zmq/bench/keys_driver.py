"""The remote side of `bench pool --only keys`: a process that returns control frames, and serves blocks and values, over TCP.

Its argument is a JSON object with `keys`, a directory or "" for none, and `encrypt_bulk`. It answers one line when it serves,
and ends with its input. As references it also sends the blocks' memory over a bare socket and as frames, on request.
"""

import json
import os
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import zmq

from mooncake_zmq.bench.block_fetch import send_bare
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.runtime.peer_sockets import LIMITS
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import USER_ID, Limits, Sockets

FAR, NEAR = "far", "near"
"""The names of both sides."""
LAYOUT = BlockLayout(layers=8, block_tokens=32, kv_heads=4, head_dim=128)
"""Blocks of 1 MiB."""
BLOCKS = 128
BULK = Limits(max_message_bytes=2 << 20, send_hwm=16, receive_hwm=16)
WANTED = b"!"
"""Prefix of the frames that are to be returned."""
ANYWHERE = "tcp://127.0.0.1:*"


def open_sockets(keys: str, name: str, *, encrypt_bulk: bool) -> Sockets:
    """Return the sockets of one side, which the caller borrows."""
    return Sockets(key_files.load(Path(keys), name) if keys else None, encrypt_bulk=encrypt_bulk).borrow()


def main() -> None:
    """Run the process that the module's docstring describes."""
    order = json.loads(sys.argv[1])
    with ExitStack() as stack:
        sockets = open_sockets(order["keys"], FAR, encrypt_bulk=order["encrypt_bulk"])
        router = sockets.listening(zmq.ROUTER, ANYWHERE, "control", LIMITS)
        router.bind(ANYWHERE)
        threading.Thread(target=return_frames, args=(router, bool(order["keys"])), daemon=True).start()
        directory = stack.enter_context(TemporaryDirectory(prefix="mczmq-bench-", dir="/dev/shm"))
        segment = Segment.create(directory, "bench", FAR, LAYOUT, BLOCKS, 1)
        stack.callback(segment.close)
        server = DataServer(segment, ANYWHERE, on_crash=fail, sockets=sockets)
        stack.callback(server.close)
        checksums = [fill(segment, slot).checksum for slot in range(BLOCKS)]
        bare = socket.create_server(("127.0.0.1", 0))
        views = [segment.layers_view(slot, 0, LAYOUT.layers) for slot in range(BLOCKS)]
        threading.Thread(target=send_bare, args=(bare, views), daemon=True).start()
        framing = sockets.listening(zmq.ROUTER, ANYWHERE, "data", BULK)
        framing.router_mandatory = True  # Wait for the queue instead of dropping.
        framing.bind(ANYWHERE)
        threading.Thread(target=send_frames, args=(framing, segment), daemon=True).start()
        store = StoreServer(
            settings=ObjectSettings(object_bytes=2 * BLOCKS * LAYOUT.block_bytes, max_objects=1024),
            directory=directory,
            cluster="bench",
            node=FAR,
            incarnation=1,
            endpoint=ANYWHERE,
            on_crash=fail,
            sockets=sockets,
        )
        stack.callback(store.close)
        answer = {
            "control": router.get_string(zmq.LAST_ENDPOINT),
            "data": server.endpoint,
            "bare": bare.getsockname()[1],
            "framed": framing.get_string(zmq.LAST_ENDPOINT),
            "store": store.endpoint,
            "checksums": checksums,
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    os._exit(0)  # The threads are blocked in a receive.


def return_frames(router: "zmq.Socket[bytes]", keyed: bool) -> None:
    """Receive and return frames as a node does: with keys, it looks up the connection's name for each."""
    while True:
        sender = router.recv()
        frame: Any = router.recv(copy=False)
        assert not keyed or frame.get(USER_ID).split()[0] == NEAR
        if frame.bytes.startswith(WANTED):
            router.send_multipart((sender, frame.bytes))


def send_frames(router: "zmq.Socket[bytes]", segment: Segment) -> None:
    """Send all blocks' bytes, a block a frame, not copied, for each message that arrives."""
    while True:
        peer, _ = router.recv_multipart()
        for slot in range(BLOCKS):
            router.send_multipart([peer, segment.layers_view(slot, 0, LAYOUT.layers)], copy=False)


def fill(segment: Segment, slot: int) -> SlotRef:
    """Write and commit a block of random bytes."""
    noise = np.random.default_rng(slot)
    segment.set_generation(slot, 1)
    for layer in range(LAYOUT.layers):
        part = segment.part_view(slot, layer)
        part[...] = noise.random(part.shape, dtype=np.float32)
        segment.parts(slot)[layer] = part_checksum(part.data)
    segment.set_generation(slot, 2)
    return SlotRef(FAR, 1, slot, 2, block_checksum(segment.parts(slot).tolist()))


def fail(error: BaseException) -> None:
    """End the process on a thread's bug: its measurements would mean nothing."""
    sys.stderr.write(f"{error!r}\n")
    os._exit(1)


if __name__ == "__main__":
    main()
