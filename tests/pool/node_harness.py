"""A store's actor by itself, and what its works do where that is nothing: what tests of it share."""

from mooncake_zmq.core.actor import Start, Started, TimerFired, WorkDone
from mooncake_zmq.core.work import Done, ForgetValues, ValuesWritten, WorkFailed, WriteValues
from mooncake_zmq.kv.object_record import ObjectRecord
from mooncake_zmq.pool.node.store_events import (
    Asked,
    Greeted,
    ReceiveValues,
    Reply,
    SendValues,
    Serve,
    StreamAsked,
    StreamBegan,
    ValuesCame,
    ValuesSent,
)
from mooncake_zmq.pool.node.store_node import StoreFacts, StoreNode
from mooncake_zmq.pool.node.tiers import LOOK
from mooncake_zmq.pool.rules.object_log import ObjectLog, ObjectSsdSettings
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Pin
from mooncake_zmq.store.stream_messages import Attach, Get, Put

SLAB = 1 << 17
SSD = ObjectSsdSettings(directory="x", bytes=64 * SLAB, ahead=1.0)
TOKEN = bytes(16)


class Store:
    """A node with clients by the names of their keys, each with a stream; `None` is the machine's own user."""

    def __init__(self, *tenants, on_disk=(), size=1000, slabs=8, ssd=False, **sizes):
        """`on_disk`: keys of values of `size` bytes; `ssd`: its settings; True: `SSD`."""
        ssd = SSD if ssd is True or on_disk else ssd or ObjectSsdSettings()
        log = ObjectLog(ssd) if ssd.directory else None
        if log is not None and on_disk:
            rows = [(key, ObjectRecord(number, 1, number * 4096, size, 7, 0)) for number, key in enumerate(on_disk, 1)]
            log.restore({1: 4 * SLAB}, rows)
        self.node = StoreNode(
            ObjectSettings(
                object_bytes=slabs * SLAB,
                slab_bytes=SLAB,
                max_client_share=1.0,
                ssd=ssd,
                tenants=tenants,
                **sizes,
            ),
            StoreFacts(name="n", cluster="c", incarnation=1),
            log,
        )
        self.log = log
        self.works = []
        self.full = False
        self.names = {}
        self.ids = iter(range(1, 1 << 60))
        self.take(Started())

    def take(self, event, now=0.0):
        effects = self.node.handle(now, event)
        self.node.check()
        self.works += [effect for effect in effects if isinstance(effect, Start)]
        return effects

    def connection(self, user):
        return b"c" + str(user).encode().ljust(16, b"_") + b"1234"

    def meet(self, user, *, shared=False):
        """Its Welcome, and its stream's number."""
        hello = protocol.Hello(next(self.ids), protocol.PROTOCOL_VERSION, "", shared)
        (said,) = [
            effect.reply
            for effect in self.take(Greeted(self.connection(user), hello, "path", shared, TOKEN, "s", user))
            if isinstance(effect, Reply)
        ]
        if user not in self.names:
            self.names[user] = next(self.ids)
            self.take(StreamBegan(self.names[user], Attach(self.connection(user)[1:17], TOKEN)))
        return said

    def ask(self, user, request):
        effects = self.take(Asked(self.connection(user), request, user))
        effects += self.settle()
        replies = [effect.reply for effect in effects if isinstance(effect, Reply)]
        return replies[-1] if replies else None

    def put(self, user, *keys, size=1000, pins=Pin.NONE):
        """The codes; over the client's stream."""
        if user not in self.names:
            self.meet(user)
        effects = self.take(StreamAsked(self.names[user], Put(list(keys), [size] * len(keys), int(pins), 30.0, [], False)))
        (receive,) = [effect for effect in effects if isinstance(effect, ReceiveValues)]
        effects = self.take(ValuesCame(self.names[user], [7] * len(receive.sizes), [7] * len(receive.sizes)))
        effects += self.settle()
        (ended,) = [effect.answer for effect in effects if isinstance(effect, Serve)]
        return ended.codes

    def get(self, user, *keys):
        """The sizes told."""
        effects = self.take(StreamAsked(self.names[user], Get(list(keys), [], 30.0))) + self.settle()
        (sent,) = [effect for effect in effects if isinstance(effect, SendValues)]
        self.take(ValuesSent(self.names[user]))
        return sent.sizes

    def settle(self):
        """Carry out all works; what they lead to."""
        effects = []
        while self.works:
            start = self.works.pop(0)
            result = Done()
            if isinstance(start.work, WriteValues):
                result = ValuesWritten(tuple(7 for _ in start.work.values))
            elif self.full and isinstance(start.work, ForgetValues):
                result = WorkFailed("full", full=True)
            effects += self.take(WorkDone(start.work_id, result))
        return effects

    def look(self):
        self.take(TimerFired(LOOK))
        self.settle()
