"""Requests of a gateway that have ended: their SLOs, traces, export and lines in the log."""

from collections import deque
from collections.abc import Callable

import structlog

from mooncake_zmq.gateway.requests.history import SLO_MET, SLO_MISSED
from mooncake_zmq.gateway.requests.request_log import RequestEntry, Slos, line
from mooncake_zmq.gateway.requests.traces import Names, Traces

LINES_AT_ONCE = 32
"""Log lines written in one turn of the loop: each takes about 40 us."""
_log = structlog.get_logger("gateway")


class EndedRequests:
    """Keeps the traces of the last requests that ended, exports each, and writes one line about it."""

    def __init__(
        self,
        slos: Slos,
        *,
        export: Callable[[RequestEntry, Names], None],
        count: Callable[[str], None],
        call_later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Hold none yet. `export`: called with each request. `count` counts an event by its name. `call_later` calls a function
        when the loop has less to do."""
        self.traces = Traces(slos)
        self._slos = slos
        self._export = export
        self._count = count
        self._call_later = call_later
        self._unwritten: deque[tuple[RequestEntry, Names]] = deque()
        self._will_write = False

    def add(self, entry: RequestEntry) -> None:
        """Keep the trace of a request that ended, export it, and write one line in the log."""
        for of, met in self._slos.judge(entry):
            self._count(f"{SLO_MET if met else SLO_MISSED}[of={of}]")
        names = self.traces.end(entry)
        self._export(entry, names)
        self._unwritten.append((entry, names))
        self._write_later()

    def close(self) -> None:
        """Write the log lines that are left."""
        while self._unwritten:
            self._write_line()

    def _write_later(self) -> None:
        """Write log lines later, so that the end of an answer does not wait for them."""
        if self._unwritten and not self._will_write:
            self._will_write = True
            self._call_later(self._write_some)

    def _write_some(self) -> None:
        self._will_write = False
        try:
            for _ in range(min(LINES_AT_ONCE, len(self._unwritten))):
                self._write_line()
        finally:
            self._write_later()

    def _write_line(self) -> None:
        entry, names = self._unwritten.popleft()
        ids = {"id": entry.request_id, "x_request_id": names.client_id, "trace_id": names.trace_id}
        _log.info("request", **ids, **line(entry))
