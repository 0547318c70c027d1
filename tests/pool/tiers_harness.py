"""A store's actor and a real disk, without sockets and threads: works are carried out when a test says so."""

import itertools
import mmap
import time

from mooncake_zmq.core.actor import Fence, Start, Started, TimerFired, WorkDone
from mooncake_zmq.pool.node.store_events import Asked, Greeted, Reply, Serve, StreamAsked, StreamBegan
from mooncake_zmq.pool.node.store_node import StoreFacts, StoreNode
from mooncake_zmq.pool.node.tiers import LOOK
from mooncake_zmq.pool.rules.object_log import ObjectLog, ObjectSsdSettings
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.disk_works import DiskHand
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Pin
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.stream_messages import Attach, Promote

ME = b"m" * 16
CONNECTION = b"c" + ME + b"1234"
STREAM = 1


class Tiers:
    def __init__(self, home, *, slab, slabs=3, ssd_bytes, max_objects=1 << 20, in_memory=4096, max_ttl_s=30.0, disk=ObjectDisk):
        ssd = ObjectSsdSettings(directory="x", bytes=ssd_bytes, ahead=1.0, threads=1, max_objects=max_objects)
        settings = ObjectSettings(
            object_bytes=slabs * slab,
            slab_bytes=slab,
            max_objects=in_memory,
            max_client_share=1.0,
            ssd=ssd,
            max_ttl_s=max_ttl_s,
        )
        self.disk = disk.open(home / "ssd", slab)
        self.log = ObjectLog(ssd)
        self.log.restore(self.disk.lengths, self.disk.recovered.items())
        self.node = StoreNode(settings, StoreFacts(name="n", cluster="c", incarnation=1), self.log)
        self.objects = self.node.objects
        self.memory = memoryview(mmap.mmap(-1, settings.object_bytes))
        self.hand = DiskHand(self.disk, self.view)
        self.works = []
        self.replies = []
        self.said = 0
        self.ids = itertools.count(1)
        self.take(Started())
        self.take(Greeted(CONNECTION, protocol.Hello(0, protocol.PROTOCOL_VERSION, "", True), "x", True, bytes(16), ""))
        self.take(StreamBegan(STREAM, Attach(ME, bytes(16))))
        self.replies.clear()

    def close(self):
        self.disk.close()

    def view(self, offset, size):
        return self.memory[offset : offset + size]

    def take(self, event):
        for effect in self.node.handle(time.monotonic(), event):
            match effect:
                case Start():
                    self.works.append(effect)
                case Reply(_, reply):
                    self.replies.append(reply)
                case Serve(_, answer):
                    self.said += answer is not None
                case Fence():
                    pass

    def step(self):
        """Carry out the work that was begun first; False if there is none."""
        if self.works:
            start = self.works.pop(0)
            self.take(WorkDone(start.work_id, self.hand.carry_out(start.work)))
            return True
        return False

    def settle(self):
        """Carry out all works, and what they lead to."""
        while self.step():
            pass

    def ask(self, request):
        """Its answer, or None as long as that waits for the disk."""
        self.take(Asked(CONNECTION, request))
        return self.replies.pop() if self.replies and self.replies[-1].id == request.id else None

    def demote(self):
        """Write what is due; False if nothing is."""
        before = self.objects.counts["demoted"]
        self.take(TimerFired(LOOK))
        self.settle()
        return self.objects.counts["demoted"] > before

    def reserve(self, keys, values, pins=Pin.NONE):
        """The request and its answer; the values are in their cells."""
        request = protocol.Reserve(next(self.ids), list(keys), [len(value) for value in values], int(pins), 30.0)
        reserved = self.ask(request)
        for code, offset, value in zip(reserved.codes, reserved.offsets, values, strict=True):
            if code == 0:
                self.view(offset, len(value))[:] = value
        return request, reserved

    def commit(self, reserved, values):
        indexes = list(range(len(values)))
        return self.ask(protocol.Commit(next(self.ids), reserved.id, indexes, [checksum_of(value) for value in values]))

    def put(self, *keys, size):
        request, reserved = self.reserve(keys, [b"v" * size] * len(keys))
        assert not any(reserved.codes)
        assert not any(self.commit(request, [b"v" * size] * len(keys)).numbers)

    def remove(self, *keys):
        return self.ask(protocol.Remove(next(self.ids), list(keys)))

    def evict(self, *keys):
        for key in keys:
            self.objects.entries.forget(self.objects.by_key[key])

    def promote(self, *keys):
        said = self.said
        self.take(StreamAsked(STREAM, Promote(list(keys), [])))
        self.settle()
        assert self.said == said + 1

    def lease(self, *keys):
        return self.ask(protocol.Lease(next(self.ids), list(keys), 30.0))

    def release(self, leased):
        self.take(Asked(CONNECTION, protocol.Release([leased.id], [])))
