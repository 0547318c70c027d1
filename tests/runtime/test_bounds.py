"""How much memory one peer or stranger can make a process hold: in processes of their own, as what one allocates stays."""

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_zmq.core.messages import MAX_MESSAGE_BYTES
from mooncake_zmq.store.protocol import MAX_FRAME_BYTES as MAX_STORE_FRAME_BYTES

BOUND_BYTES = 64 << 20
SCRIPTS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]


def grown(tmp_path: Path, script: str, *arguments: str) -> tuple[int, int]:
    """What a script, run beside `hostile`, tells: by how many bytes it grew, and how many it was sent."""
    code = f"import sys; sys.path[:0] = {SCRIPTS!r}\n{script}"
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    growth, sent = ran.stdout.split()[-2:]
    return int(growth), int(sent)


RUNTIME = """
import os, socket, sys, threading, time
from hostile import connect, growth_while_sending, rss_bytes
from mooncake_zmq.transfer.zmtp import LONG, MORE, part
from test_zmq_runtime import HELLO, SETTINGS, Echo
from mooncake_zmq.core.messages import MAX_MESSAGE_BYTES
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.session import Session
from mooncake_zmq.runtime.peer_sockets import MAX_FRAME_BYTES
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime

what, scheme = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}" if scheme == "tcp" else f"ipc://{os.getcwd()}/me.ipc"
session = Session(me="a", incarnation=1, hello=HELLO, peers={}, settings=SETTINGS, now=time.monotonic())
runtime = ZmqRuntime(Node(Echo(), session), endpoint=endpoint, peers={})
frame = bytes(MAX_FRAME_BYTES)
"""

QUEUE = (
    RUNTIME
    + """
# The loop does not run: what a process that is busy for as long as it takes has to hold.
stranger = connect(endpoint, b"DEALER")
print(*growth_while_sending(stranger, (part(frame) for _ in range(100))))
os._exit(0)
"""
)

ENDLESS = (
    RUNTIME
    + """
serving = threading.Thread(target=runtime.run, daemon=True)
serving.start()
stranger = connect(endpoint, b"DEALER")
size = int(what)
each = part(frame[:size], MORE) * max(1, (1 << 20) // (size + 2))
print(*growth_while_sending(stranger, (each for _ in range((400 << 20) // len(each)))))
assert serving.is_alive()
os._exit(0)
"""
)


SERVERS = """
import os, sys
from hostile import connect, growth_while_sending
from mooncake_zmq.transfer.zmtp import MORE, part
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.shared_memory import Segment
what, size = sys.argv[1:]
if what == "data":
    segment = Segment.create(os.getcwd(), "test", "a", BlockLayout(layers=2, block_tokens=4, kv_heads=1, head_dim=8), 4, 1)
    server = DataServer(segment, "tcp://127.0.0.1:*", on_crash=print)
else:
    settings = ObjectSettings(object_bytes=8 << 20, slab_bytes=4 << 20, max_objects=64)
    places = {"directory": os.getcwd(), "cluster": "test", "node": "a", "incarnation": 1, "endpoint": "tcp://127.0.0.1:*"}
    server = StoreServer(settings=settings, on_crash=print, **places)
stranger = connect(server.endpoint, b"DEALER")
each = part(bytes(int(size)), MORE) * max(1, (1 << 20) // (int(size) + 2))
print(*growth_while_sending(stranger, (each for _ in range((400 << 20) // len(each)))))
assert server.counts["connections_cut"]
server.close()
if what == "data":
    segment.close()
"""


@pytest.mark.parametrize(("what", "size_bytes"), [("data", 0), ("store", MAX_STORE_FRAME_BYTES)])
def test_a_message_without_end_to_a_server_of_bytes_is_cut(tmp_path: Path, what: str, size_bytes: int) -> None:
    growth, sent = grown(tmp_path, SERVERS, what, str(size_bytes))
    assert sent < 400 << 20
    assert growth < BOUND_BYTES


SUBSCRIPTIONS_COST = 50
"""A subscription takes up to so many times its bytes: mostly 8, in libzmq's tree. 26 were seen on a busy machine, where those
that nothing has read yet are held besides."""
KV_EVENTS = """
import os, sys
from hostile import connect, growth_while_sending
from mooncake_zmq.transfer.zmtp import MORE, part
from mooncake_zmq.runtime.kv_events import KvEventPublisher
what, scheme = sys.argv[1:]
endpoint = f"ipc://{os.getcwd()}/kv.ipc" if scheme == "ipc" else "tcp://127.0.0.1:*"
publisher = KvEventPublisher(endpoint, topic="kv@a", block_tokens=4, on_crash=print)
stranger = connect(publisher.endpoint, b"SUB")
if what == "subscribe":
    told = (b"".join(part(b"\\1" + os.urandom(250)) for _ in range(100)) for _ in range(2000))
else:
    told = (part(bytes(255), MORE) * 10_000 for _ in range(100))
print(*growth_while_sending(stranger, told))
publisher.close()
"""


@pytest.mark.parametrize(("what", "scheme"), [("subscribe", "tcp"), ("subscribe", "ipc"), ("endless", "tcp")])
def test_what_a_subscriber_tells_is_bounded(tmp_path: Path, what: str, scheme: str) -> None:
    growth, sent = grown(tmp_path, KV_EVENTS, what, scheme)
    assert sent < (50_000_000 if what == "subscribe" else 200_000_000), "it was cut"
    assert growth < (SUBSCRIPTIONS_COST * max(sent, 1 << 20) if what == "subscribe" else BOUND_BYTES)


UNREAD_EVENTS = """
import os, selectors, sys, time
from hostile import connect, rss_bytes
from mooncake_zmq.transfer.zmtp import part
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.events import AllBlocksCleared, BlocksStored, Medium
from mooncake_zmq.runtime.kv_events import KvEventPublisher

what, scheme = sys.argv[1:]
endpoint = f"ipc://{os.getcwd()}/kv.ipc" if scheme == "ipc" else "tcp://127.0.0.1:*"
bounds = {"buffer_bytes": 1 << 20, "subscriber_bytes": 16 << 20, "queue_bytes": 1 << 20}
publisher = KvEventPublisher(endpoint, block_tokens=16, on_crash=print, **bounds)
strangers = [connect(publisher.endpoint, b"SUB") for _ in range(2)]
for stranger in strangers:
    stranger.sendall(part(b"\\1"))
    subscribed = selectors.DefaultSelector()
    subscribed.register(stranger, selectors.EVENT_READ)
    while not subscribed.select(0.01):  # then it is sent what is published from now on
        publisher.publish((AllBlocksCleared(),))
keys = tuple(number.to_bytes(16, "big") for number in range(1024))
stored = BlocksStored(keys, Medium.CPU, b"", pack_tokens(range(1 << 17, (1 << 17) + 16 * len(keys))))
before = rss_bytes()
while publisher.counts["bytes"] < 200 << 20:
    publisher.publish((stored,))
    while publisher._queue:
        time.sleep(0.0001)
print(rss_bytes() - before, publisher.counts["bytes"])
publisher.close()
"""


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_subscriber_that_reads_nothing_costs_no_more_than_its_queue(tmp_path: Path, scheme: str) -> None:
    growth, sent = grown(tmp_path, UNREAD_EVENTS, "read nothing", scheme)
    assert sent >= 200 << 20
    assert growth < BOUND_BYTES


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_receive_queue_is_bounded_in_bytes(tmp_path: Path, scheme: str) -> None:
    growth, sent = grown(tmp_path, QUEUE, "queue", scheme)
    assert sent > MAX_MESSAGE_BYTES
    assert growth < (BOUND_BYTES if scheme == "tcp" else 2 * BOUND_BYTES)


@pytest.mark.parametrize("size_bytes", [MAX_MESSAGE_BYTES, 1 << 10, 0])
def test_a_message_without_end_is_cut(tmp_path: Path, size_bytes: int) -> None:
    growth, sent = grown(tmp_path, ENDLESS, str(size_bytes), "tcp")
    assert sent < 400 << 20
    assert growth < BOUND_BYTES
