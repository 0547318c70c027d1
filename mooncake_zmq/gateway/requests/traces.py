"""The last requests of a gateway, found by any of their names, in a bounded ring. PURE."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from mooncake_zmq.gateway.requests.request_log import CANCELLED, RequestEntry, Slos, as_json
from mooncake_zmq.gateway.requests.slowness import FAR, FAR_S

MAX_TRACES = 2048
"""Limit on the requests kept, a few KiB each: the oldest are dropped first."""
MAX_OPEN = 8192
MAX_FOUND = 128
"""Limit on the requests found by one name: choices of a call, or calls to which a client gave one name."""
RECENT = 24
"""Number of requests in a snapshot of the cluster, and of those that a filter finds."""
ANSWERED = ("stop", "length", CANCELLED)
"""Outcomes that are no failure."""


NO_SLOS = Slos()


class Names(NamedTuple):
    """Names of a call: the gateway's id, the client's x-request-id, the trace id of its traceparent; empty if it has none."""

    id: str
    client_id: str = ""
    trace_id: str = ""
    parent_id: str = ""
    """Id of the client's span, from its traceparent."""
    sampled: bool = True
    """Whether its trace is to be exported: true unless the client's traceparent says otherwise."""


class Wanted(NamedTuple):
    """A filter of requests that ended: each field that is set excludes others."""

    failed: bool = False
    """Refused ones too."""
    slow: bool = False
    """Beyond an SLO, or with a first token after more than twice the predicted time."""
    tenant: str = ""


ALL = Wanted()


class Traces:
    """The names of open requests and the records of the last ones that ended. `slos`: those of requests without their own."""

    def __init__(self, slos: Slos = NO_SLOS) -> None:
        self._slos = slos
        self._names: OrderedDict[str, Names] = OrderedDict()
        self._ended: deque[tuple[Names, RequestEntry]] = deque(maxlen=MAX_TRACES)

    def name(self, request_ids: Sequence[str], names: Names) -> None:
        """Note the names of a call for its requests."""
        for request_id in request_ids:
            self._names[request_id] = names
            if len(self._names) > MAX_OPEN:
                self._names.popitem(last=False)

    def end(self, entry: RequestEntry) -> Names:
        """Keep the record of a request that ended. Return the names of its call."""
        names = self._names.pop(entry.request_id, Names(entry.request_id))
        self._ended.append((names, entry))
        return names

    def find(self, wanted: str) -> list[dict[str, Any]]:
        """Return the last ended requests with this name, for JSON: `MAX_FOUND` at most."""
        known = (each for each in reversed(self._ended) if wanted in each[0][:3] or wanted == each[1].request_id)
        return [_record(names, entry) for names, entry in islice(known, MAX_FOUND if wanted else 0)][::-1]

    def recent(self, now: float, wanted: Wanted = ALL) -> list[dict[str, Any]]:
        """Return the last ended requests that pass a filter, the newest first, each with its age in seconds."""
        passing = (each for each in reversed(self._ended) if self._passes(each[1], wanted))
        return [
            {**_record(names, entry), "ago_s": round(now - entry.arrived_at - entry.duration_s, 3)}
            for names, entry in islice(passing, RECENT)
        ]

    def _passes(self, entry: RequestEntry, wanted: Wanted) -> bool:
        if wanted.tenant and entry.tenant != wanted.tenant:
            return False
        if wanted.failed and entry.outcome in ANSWERED:
            return False
        return not wanted.slow or self._is_slow(entry)

    def _is_slow(self, entry: RequestEntry) -> bool:
        last = entry.last
        if not all([met for _, met in self._slos.judge(entry)]):
            return True
        if last is None or last.ttft_s is None or last.predicted_ttft_s is None:
            return False
        return last.ttft_s > FAR * last.predicted_ttft_s and last.ttft_s - last.predicted_ttft_s > FAR_S


def _record(names: Names, entry: RequestEntry) -> dict[str, Any]:
    return {"id": names.id, "x_request_id": names.client_id, "trace_id": names.trace_id, **as_json(entry)}


def names_of(own_id: str, client_id: str, traceparent: str) -> Names:
    """Return the names of a call. A traceparent that is not as W3C defines it is ignored."""
    parts = traceparent.split("-")
    if len(parts) < 4 or not (_is_id(parts[1], 32) and _is_id(parts[2], 16)):
        return Names(own_id, client_id)
    flags = parts[3][:2]
    return Names(own_id, client_id, parts[1], parts[2], not _is_hex(flags) or bool(int(flags, 16) & 1))


def _is_id(text: str, digits: int) -> bool:
    """Return whether the text is an id: hexadecimal, and not only zeros."""
    return len(text) == digits and _is_hex(text) and any(each != "0" for each in text)


def _is_hex(text: str) -> bool:
    return bool(text) and all(each in "0123456789abcdef" for each in text)
