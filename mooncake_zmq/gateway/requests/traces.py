"""The last requests of a gateway, found by any of their names: a bounded ring. PURE."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from mooncake_zmq.gateway.requests.request_log import Account, told

MAX_TRACES = 2048
"""Requests kept, of which the oldest go first: a few KiB each."""
MAX_OPEN = 8192
MAX_FOUND = 128
"""Requests told by one name: the choices of a call, or calls that their client calls the same."""
RECENT = 24
"""Of them, those that a picture of the cluster shows."""


class Names(NamedTuple):
    """What a call is known by: our id, its client's x-request-id, the trace id of its traceparent; empty: there is none."""

    id: str
    client_id: str = ""
    trace_id: str = ""
    parent_id: str = ""
    """The client's span, of its traceparent."""
    sampled: bool = True
    """Whether its trace is to be kept; a client that sends none does not mind."""


class Traces:
    """`name` what begins, `end` what is over, `find` what was asked for."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, Names] = OrderedDict()
        self._ended: deque[tuple[Names, Account]] = deque(maxlen=MAX_TRACES)

    def name(self, request_ids: Sequence[str], names: Names) -> None:
        """These requests belong to one call."""
        for request_id in request_ids:
            self._names[request_id] = names
            if len(self._names) > MAX_OPEN:
                self._names.popitem(last=False)

    def end(self, account: Account) -> Names:
        """A request is over; the names of its call."""
        names = self._names.pop(account.request_id, Names(account.request_id))
        self._ended.append((names, account))
        return names

    def find(self, wanted: str) -> list[dict[str, Any]]:
        """The last requests that were over and are known by this name, for JSON: `MAX_FOUND` at most."""
        known = (each for each in reversed(self._ended) if wanted in each[0][:3] or wanted == each[1].request_id)
        return [_record(names, account) for names, account in islice(known, MAX_FOUND if wanted else 0)][::-1]

    def recent(self) -> list[dict[str, Any]]:
        """The last ones, the newest first."""
        return [_record(names, account) for names, account in islice(reversed(self._ended), RECENT)]


def _record(names: Names, account: Account) -> dict[str, Any]:
    return {"id": names.id, "x_request_id": names.client_id, "trace_id": names.trace_id, **told(account)}


def names_of(own_id: str, client_id: str, traceparent: str) -> Names:
    """By a W3C traceparent, as far as it is one."""
    parts = traceparent.split("-")
    if len(parts) < 4 or not (_is_id(parts[1], 32) and _is_id(parts[2], 16)):
        return Names(own_id, client_id)
    flags = parts[3][:2]
    return Names(own_id, client_id, parts[1], parts[2], not _is_hex(flags) or bool(int(flags, 16) & 1))


def _is_id(text: str, digits: int) -> bool:
    """Zeros alone are none."""
    return len(text) == digits and _is_hex(text) and any(each != "0" for each in text)


def _is_hex(text: str) -> bool:
    return bool(text) and all(each in "0123456789abcdef" for each in text)
