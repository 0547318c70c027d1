"""The last requests of a gateway, found by any of their names, in a bounded ring. PURE."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from mooncake_zmq.gateway.requests.request_log import Account, told

MAX_TRACES = 2048
"""Limit on the requests kept, a few KiB each: the oldest are dropped first."""
MAX_OPEN = 8192
MAX_FOUND = 128
"""Limit on the requests found by one name: choices of a call, or calls to which a client gave one name."""
RECENT = 24
"""Number of requests in a snapshot of the cluster."""


class Names(NamedTuple):
    """Names of a call: the gateway's id, the client's x-request-id, the trace id of its traceparent; empty if it has none."""

    id: str
    client_id: str = ""
    trace_id: str = ""
    parent_id: str = ""
    """Id of the client's span, from its traceparent."""
    sampled: bool = True
    """Whether its trace is to be exported: true unless the client's traceparent says otherwise."""


class Traces:
    """The names of open requests and the records of the last ones that ended."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, Names] = OrderedDict()
        self._ended: deque[tuple[Names, Account]] = deque(maxlen=MAX_TRACES)

    def name(self, request_ids: Sequence[str], names: Names) -> None:
        """Note the names of a call for its requests."""
        for request_id in request_ids:
            self._names[request_id] = names
            if len(self._names) > MAX_OPEN:
                self._names.popitem(last=False)

    def end(self, account: Account) -> Names:
        """Keep the record of a request that ended. Return the names of its call."""
        names = self._names.pop(account.request_id, Names(account.request_id))
        self._ended.append((names, account))
        return names

    def find(self, wanted: str) -> list[dict[str, Any]]:
        """Return the last ended requests with this name, for JSON: `MAX_FOUND` at most."""
        known = (each for each in reversed(self._ended) if wanted in each[0][:3] or wanted == each[1].request_id)
        return [_record(names, account) for names, account in islice(known, MAX_FOUND if wanted else 0)][::-1]

    def recent(self) -> list[dict[str, Any]]:
        """Return the last ended requests, the newest first."""
        return [_record(names, account) for names, account in islice(reversed(self._ended), RECENT)]


def _record(names: Names, account: Account) -> dict[str, Any]:
    return {"id": names.id, "x_request_id": names.client_id, "trace_id": names.trace_id, **told(account)}


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
