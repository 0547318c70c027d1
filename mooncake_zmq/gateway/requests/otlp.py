"""Sending the spans of requests that ended to an OpenTelemetry collector, from a thread of its own.

Nothing waits for the thread: requests that do not fit into its queue, or that the collector does not accept in time, are
dropped and counted. The module needs the extra `otel`.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import structlog

from mooncake_zmq import __version__
from mooncake_zmq.gateway.requests.request_log import RequestEntry
from mooncake_zmq.gateway.requests.spans import CALLER, Branch, tree
from mooncake_zmq.gateway.requests.traces import Names

MAX_QUEUED = 2048
"""Requests that wait to be sent: seconds of a busy gateway, a few KiB each."""
BATCH = 64
"""Requests in one message, about a hundred spans: encoding more would hold the interpreter for too long."""
EVERY_S = 1.0
TIMEOUT_S = 5.0
"""Timeout for one message, with the exporter's retries."""
CLOSE_S = 3.0
TRACES_PATH = "/v1/traces"
NANOSECONDS = 1_000_000_000
SERVICE = "mooncake_zmq"
EXPORTED, NOT_SAMPLED = "requests_exported", "requests_not_sampled"
QUEUE_FULL, NOT_TAKEN = "requests_dropped[reason=queue_full]", "requests_dropped[reason=collector]"
COUNTED = (EXPORTED, NOT_SAMPLED, QUEUE_FULL, NOT_TAKEN)
log = structlog.get_logger("otlp")


class Ended(NamedTuple):
    """A request that ended, with the time of its end in ns of the wall clock."""

    entry: RequestEntry
    names: Names
    at_ns: int


def is_installed() -> bool:
    """Return whether the extra `otel` is installed."""
    found = [name for name in ("opentelemetry", "opentelemetry.sdk") if find_spec(name) is not None]
    return len(found) == 2 and find_spec("opentelemetry.exporter") is not None


def full_url(endpoint: str) -> str:
    """Return the URL for traces. A collector's address without a path is that of all signals, as OTLP over HTTP defines."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path not in ("", "/") else f"{endpoint.rstrip('/')}{TRACES_PATH}"


class Otlp:
    """The exporter of one gateway. `export` queues a request that ended; `counts` shows what became of them."""

    def __init__(self, endpoint: str, *, gateway: str, on_crash: Callable[[BaseException], None]) -> None:
        """Start the thread. Headers, certificates and compression are read from the usual OTEL_EXPORTER_OTLP_... variables."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._made = _Spans(gateway)
        self._on_crash = on_crash
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # its repeated messages are logged once below
        self._exporter = OTLPSpanExporter(endpoint=full_url(endpoint), timeout=TIMEOUT_S)
        self._queue: queue.Queue[Ended] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._reached = True
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def export(self, entry: RequestEntry, names: Names) -> None:
        """Queue a request that ended. Requests whose client marked the trace as not sampled are only counted."""
        if not names.sampled:
            self._count(NOT_SAMPLED)
            return
        try:
            self._queue.put_nowait(Ended(entry, names, time.time_ns()))
        except queue.Full:
            self._count(QUEUE_FULL)

    def close(self) -> None:
        """Send the queued requests, if the collector accepts them soon."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # it may be waiting to retry
        self._thread.join(CLOSE_S)

    # --- the own thread

    def _run(self) -> None:
        try:
            while not self._closing.wait(EVERY_S):
                self._send_all()
            self._send_all()
        except Exception as error:
            self._on_crash(error)
            log.critical("worker_crashed", thread="otlp", exc_info=error)

    def _send_all(self) -> None:
        """Send batches until the queue is empty or a batch fails."""
        while batch := self._batch():
            if not self._send(batch):
                return

    def _batch(self) -> list[Ended]:
        batch: list[Ended] = []
        while len(batch) < BATCH:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _send(self, batch: list[Ended]) -> bool:
        from requests import RequestException

        spans = [span for each in batch for span in self._made.of(each)]
        try:
            reached = bool(self._exporter.export(spans).name == "SUCCESS")
        except RequestException:  # some releases of the exporter do not catch it
            reached = False
        self._count(EXPORTED if reached else NOT_TAKEN, len(batch))
        if reached != self._reached:
            self._reached = reached
            (log.info if reached else log.warning)("otlp_reached" if reached else "otlp_unreached")
        return reached

    def _count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount


class _Spans:
    """A factory of OpenTelemetry's spans."""

    def __init__(self, gateway: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._gateway = gateway
        self._resource = Resource.create(
            {"service.name": SERVICE, "service.instance.id": gateway, "service.version": __version__}
        )
        self._scope = InstrumentationScope(SERVICE, __version__)

    def of(self, ended: Ended) -> list[Any]:
        """Return the spans of a request, in the client's trace and below its span, if the client sent them."""
        names = ended.names
        trace_id = int(names.trace_id, 16) if names.trace_id else secrets.randbits(128) or 1
        caller = int(names.parent_id, 16) if names.parent_id else 0
        branches = tree(ended.entry, names, gateway=self._gateway)
        ids = [secrets.randbits(64) or 1 for _ in branches]
        began_ns = ended.at_ns - round(ended.entry.duration_s * NANOSECONDS)
        return [
            self._span(branch, trace_id, own, caller if branch.parent == CALLER else ids[branch.parent], began_ns)
            for branch, own in zip(branches, ids, strict=True)
        ]

    def _span(self, branch: Branch, trace_id: int, own: int, parent: int, began_ns: int) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        flags, is_root = TraceFlags(TraceFlags.SAMPLED), branch.parent == CALLER
        return ReadableSpan(
            name=branch.name,
            context=SpanContext(trace_id, own, is_remote=False, trace_flags=flags),
            parent=SpanContext(trace_id, parent, is_remote=is_root, trace_flags=flags) if parent else None,
            resource=self._resource,
            attributes=branch.attributes,
            kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, branch.failed) if branch.failed else Status(StatusCode.UNSET),
            start_time=began_ns + round(branch.start_s * NANOSECONDS),
            end_time=began_ns + round((branch.start_s + branch.duration_s) * NANOSECONDS),
            instrumentation_scope=self._scope,
        )
