"""Reads of blocks from other hosts: requested from their owners within credits, and ended, verified or failed, in time.

Sketch: the kernel's copy into the slot is the only one, at the speed of a bare stream, and the hashed bytes are in the cache
anyway; so one thread keeps up with one network. Credits: at most `window_bytes` are outstanding per owner.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.block_stream import BlockStreams
from mooncake_zmq.transfer.channel import Channel, ChannelLost, OpenChannel, ReadBatch, RemoteRead
from mooncake_zmq.transfer.directory import Incarnation
from mooncake_zmq.transfer.sockets import Sockets

log = structlog.get_logger()

MAX_OUTSTANDING_READS = 128
"""Outstanding reads of one owner, whatever their size."""
ENDED_AT_ONCE = 8
"""Ended reads of one owner that are handled before another owner's."""
MAX_WAIT_S = 60.0
PAUSE_S = 1.0
"""Pause after an owner could not be reached: until then reads from it fail at once, without a connection attempt."""


class _Link:
    """Reads from one incarnation's data server. `channel`: None while it is being opened."""

    def __init__(self) -> None:
        self.waiting: deque[RemoteRead] = deque()
        self.outstanding: dict[int, RemoteRead] = {}
        """Requested reads, by id()."""
        self.outstanding_bytes = 0
        self.channel: Channel | None = None
        self.has_more = False
        """Whether `ended` was left before it was exhausted."""
        self.is_over = False

    def landing(self) -> Sequence[RemoteRead]:
        return self.channel.landing() if self.channel is not None else ()

    def take_back(self) -> list[RemoteRead]:
        """Remove and return all reads that have not ended, in their order."""
        reads = [*self.outstanding.values(), *self.waiting]
        self.outstanding.clear()
        self.waiting.clear()
        self.outstanding_bytes = 0
        return [read for read in reads if read.is_wanted]


class RemoteReader:
    """Fetches blocks from other hosts on one thread of its own. Every submitted read ends, at its deadline if not before.

    A lost connection fails its outstanding reads at once; the next read opens a new one.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        on_crash: Callable[[BaseException], None],
        window_bytes: int = 32 << 20,
        sockets: Sockets | None = None,
        open_channel: OpenChannel | None = None,
    ) -> None:
        """Start the thread. `sockets`: the process's; None: the reader makes its own. `open_channel`: opens a transport other
        than streams."""
        self.counts = {"reads": 0, "bytes": 0, "failed": 0, "lost_links": 0}
        self._layout = layout
        self._window_bytes = window_bytes
        self._on_crash = on_crash
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._over = False
        """Whether the thread has ended, or is about to: then the calling thread runs its commands, and all reads fail."""
        self._guard = threading.Lock()
        """Guards `_over`, and appending to `_commands`."""
        self._endpoints: dict[Incarnation, str] = {}
        self._links: dict[Incarnation, _Link] = {}
        self._paused: dict[Incarnation, float] = {}
        """End of the pause of PAUSE_S, by incarnation; only of those whose endpoints are known."""
        self._openers: set[threading.Thread] = set()
        self._batches: dict[int, ReadBatch] = {}
        self._sockets = (sockets or Sockets(io_threads=1)).borrow()
        self._open_channel = open_channel or BlockStreams(layout, self._sockets).open
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="remote-reader", daemon=True)
        self._thread.start()

    def learn(self, incarnation: Incarnation, endpoint: str) -> None:
        """Note that this incarnation can be read at `endpoint`."""
        self._command(lambda: self._learn(incarnation, endpoint))

    def forget(self, incarnation: Incarnation) -> None:
        """Fail all reads of this incarnation, which has ended or cannot be reached."""
        self._command(lambda: self._forget(incarnation))

    def submit(self, reads: Sequence[RemoteRead], deadline: float, finished: Callable[[], None]) -> ReadBatch:
        """Begin `reads`, at least one; `deadline` is a time of `time.monotonic`."""
        assert reads
        batch = ReadBatch(reads, deadline, finished, len(reads))
        self._command(lambda: self._begin(batch))
        return batch

    def cancel(self, batch: ReadBatch) -> None:
        """End the reads of a batch early; after its `finished` no sink of it is called, and nothing is written to its
        memory."""
        self._command(lambda: self._end_batch(batch))

    def close(self) -> None:
        """Fail everything under way and stop. May be called twice."""
        if self._wake >= 0:
            self._command(self._request_stop)
            self._thread.join()
            os.close(self._wake)
            self._wake = -1

    def _command(self, command: Callable[[], None]) -> None:
        with self._guard:
            if not self._over:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)
                return
        if threading.current_thread() is not self._thread:
            self._thread.join()
        command()

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            self._crash(error)
        finally:
            self._shut_down()

    def _crash(self, error: Exception) -> None:
        self._on_crash(error)
        log.critical("remote_reader_crashed", exc_info=error)

    def _shut_down(self) -> None:
        for link in self._links.values():
            link.is_over = True
        for opener in list(self._openers):
            opener.join()
        with self._guard:
            self._over = True
        while self._commands:
            self._commands.popleft()()
        for incarnation in list(self._links):
            self._drop_link(incarnation)
        for batch in list(self._batches.values()):
            self._end_batch(batch)
        self._poll.close()
        self._sockets.give_back()

    def _turn(self) -> None:
        ready = {descriptor for descriptor, _ in self._poll.poll(self._timeout_s())}
        if self._wake in ready:
            os.eventfd_read(self._wake)
            while self._commands:
                self._commands.popleft()()
        for incarnation, link in list(self._links.items()):
            if link.channel is not None and (link.has_more or link.channel.fileno() in ready):
                self._take(incarnation, link, link.channel)
        now = time.monotonic()
        for batch in [batch for batch in self._batches.values() if batch.deadline <= now]:
            self._end_batch(batch, is_late=True)
        for incarnation, link in list(self._links.items()):
            self._ask(incarnation, link)

    def _timeout_s(self) -> float:
        if any(link.has_more for link in self._links.values()):
            return 0.0
        if not self._batches:
            return -1.0
        left_s = min(batch.deadline for batch in self._batches.values()) - time.monotonic()
        return min(max(0.0, left_s), MAX_WAIT_S)

    # --- commands

    def _begin(self, batch: ReadBatch) -> None:
        self._batches[id(batch)] = batch
        for read in batch.reads:
            read.batch = batch
            read.size_bytes = len(read.layers) * self._layout.part_bytes
        for read in batch.reads:
            link = self._link((read.source.node, read.source.incarnation))
            if link:
                link.waiting.append(read)
            else:
                self._end(read, ReadFailure.UNREACHED)

    def _learn(self, incarnation: Incarnation, endpoint: str) -> None:
        self._endpoints[incarnation] = endpoint
        self._paused.pop(incarnation, None)

    def _forget(self, incarnation: Incarnation) -> None:
        self._endpoints.pop(incarnation, None)
        self._paused.pop(incarnation, None)
        for read in self._drop_link(incarnation):
            self._end(read, ReadFailure.UNREACHED)

    def _end_batch(self, batch: ReadBatch, *, is_late: bool = False) -> None:
        """Fail the reads of a batch that have not ended. A connection that may still write to its memory is closed, and so is
        one that let it miss its deadline (`is_late`); other batches' reads from there are requested again."""
        for incarnation, link in list(self._links.items()):
            asked = link.outstanding.values() if is_late else link.landing()
            if any(read.batch is batch for read in asked):
                self._renew(incarnation, without=batch)
        for read in batch.reads:
            if read.is_wanted:
                self._end(read, ReadFailure.UNREACHED)

    def _end(self, read: RemoteRead, failure: ReadFailure | None) -> None:
        batch, read.batch = read.batch, None
        assert batch
        self.counts["failed" if failure else "reads"] += 1
        self.counts["bytes"] += 0 if failure else read.size_bytes
        try:
            read.sink.end(failure)
        except Exception as error:  # the others of its batch must still end
            self._crash(error)
        batch.left -= 1
        if not batch.left:
            del self._batches[id(batch)]
            batch.finished()

    # --- links

    def _link(self, incarnation: Incarnation) -> _Link | None:
        link = self._links.get(incarnation)
        if (
            link is not None
            or incarnation not in self._endpoints
            or self._over
            or time.monotonic() < self._paused.get(incarnation, 0.0)
        ):
            return link
        link = _Link()
        arguments = (incarnation, link, self._endpoints[incarnation])
        opener = threading.Thread(target=self._open, args=arguments, name="remote-opener", daemon=True)
        try:
            opener.start()
        except RuntimeError as error:  # the system cannot start a thread
            self._pause(incarnation, str(error))
            return None
        self._openers.add(opener)
        self._links[incarnation] = link
        return link

    def _pause(self, incarnation: Incarnation, reason: str) -> None:
        if incarnation in self._endpoints:
            self._paused[incarnation] = time.monotonic() + PAUSE_S
        log.warning("data_not_reached", node=incarnation[0], incarnation=incarnation[1], reason=reason)

    def _open(self, incarnation: Incarnation, link: _Link, endpoint: str) -> None:
        """Open a connection, on a thread of its own."""
        opener = threading.current_thread()
        try:
            channel = self._open_channel(incarnation, endpoint, lambda: link.is_over)
        except ChannelLost as error:
            reason = str(error)
            self._command(lambda: self._opened(opener, incarnation, link, None, reason))
        except Exception as error:
            self._crash(error)
            self._command(lambda: self._opened(opener, incarnation, link, None, "a bug"))
        else:
            self._command(lambda: self._opened(opener, incarnation, link, channel, ""))

    def _opened(
        self, opener: threading.Thread, incarnation: Incarnation, link: _Link, channel: Channel | None, reason: str
    ) -> None:
        self._openers.discard(opener)
        if self._links.get(incarnation) is not link or link.is_over:
            if channel is not None:
                channel.close()
        elif channel is None:
            self._pause(incarnation, reason)
            self._fail_link(incarnation)
        else:
            link.channel = channel
            self._poll.register(channel.fileno(), select.EPOLLIN)

    def _renew(self, incarnation: Incarnation, *, without: ReadBatch) -> None:
        reads = [read for read in self._drop_link(incarnation) if read.batch is not without]
        link = self._link(incarnation) if reads else None
        for read in reads:
            if link:
                link.waiting.append(read)
            else:
                self._end(read, ReadFailure.UNREACHED)

    def _lose_link(self, incarnation: Incarnation, reason: str) -> None:
        log.warning("data_link_lost", node=incarnation[0], incarnation=incarnation[1], reason=reason)
        self._fail_link(incarnation)

    def _fail_link(self, incarnation: Incarnation) -> None:
        self.counts["lost_links"] += 1
        for read in self._drop_link(incarnation):
            self._end(read, ReadFailure.UNREACHED)

    def _drop_link(self, incarnation: Incarnation) -> list[RemoteRead]:
        """Close a link; returns its reads that have not ended."""
        link = self._links.pop(incarnation, None)
        if link is None:
            return []
        link.is_over = True
        if link.channel is not None:
            self._poll.unregister(link.channel.fileno())
            link.channel.close()
        return link.take_back()

    def _ask(self, incarnation: Incarnation, link: _Link) -> None:
        """Request reads within the credits, once half of them are free: each request wakes the owner, whose receiving thread
        then takes the CPU from its serving one (0.5 ms each time where both share two cores)."""
        is_busy = link.outstanding_bytes > self._window_bytes // 2 or len(link.outstanding) > MAX_OUTSTANDING_READS // 2
        if link.channel is None or is_busy:
            return
        reads: list[RemoteRead] = []
        while link.waiting and len(link.outstanding) < MAX_OUTSTANDING_READS:
            read = link.waiting[0]
            if read.is_wanted:  # else it was cancelled while it waited
                if link.outstanding and link.outstanding_bytes + read.size_bytes > self._window_bytes:
                    break
                link.outstanding[id(read)] = read
                link.outstanding_bytes += read.size_bytes
                reads.append(read)
            link.waiting.popleft()
        if reads:
            try:
                link.channel.ask(reads)
            except ChannelLost as error:
                self._lose_link(incarnation, str(error))

    def _take(self, incarnation: Incarnation, link: _Link, channel: Channel) -> None:
        """Handle the reads that have ended."""
        link.has_more = False
        try:
            for count, (read, failure) in enumerate(channel.ended(), 1):
                del link.outstanding[id(read)]
                link.outstanding_bytes -= read.size_bytes
                if read.is_wanted:
                    self._end(read, failure)
                if count == ENDED_AT_ONCE:
                    link.has_more = True
                    return
                self._ask(incarnation, link)
                if link.is_over:
                    return
        except ChannelLost as error:
            self._lose_link(incarnation, str(error))
