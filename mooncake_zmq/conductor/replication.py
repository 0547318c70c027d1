"""Copies of a prefix that an operator requests, and copies that are to be evicted first. PURE.

A *chain* is a leading run of blocks, named by its last key: that digest covers all blocks before it.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.sources import MAX_SOURCES
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import ChangeReplica
from mooncake_zmq.kv.block_hash import Key

COPY_REQUEST_S: Final = 30.0
"""The time after which a copy that was not announced is given up: the node had no room or no time. The node itself gives up
after as long."""
ASK_AGAIN_S: Final = 120.0
"""The time for which the same request is not sent to a node again, whatever its result: a node that evicts its copies need not
fetch them repeatedly, and a node evicts on request only when it needs the room."""
REQUESTS_PER_NODE: Final = 4
"""The most copies under way to one node, which works on a few at a time and drops the others."""
MAX_REQUESTS: Final = 256
"""The most requests remembered; at the limit none is sent. Requests to evict take at most half of them."""


@dataclass(slots=True, eq=False)
class CopyRequest:
    """A request to `node` at time `at`: to hold a copy of these keys, or, if not `more`, to evict its own copy of them
    first."""

    node: str
    keys: tuple[Key, ...]
    at: float
    more: bool


class Replication:
    """Requests and reduces copies of chains, and remembers its requests so that none is sent twice."""

    def __init__(self, index: PrefixIndex, counts: Tally) -> None:
        """Create it with the index of what is held, which the conductor keeps up to date, and the conductor's counters."""
        self._index = index
        self._counts = counts
        self._requests: deque[CopyRequest] = deque()
        """All remembered requests, in the order in which they were sent."""
        self._asked: dict[str, dict[Key, CopyRequest]] = {}
        """The last request by node and block."""

    def under_way(self, now: float) -> int:
        """Return the number of requested copies that have neither arrived nor been given up."""
        return sum(self._is_under_way(now, request) for request in self._requests)

    def change(
        self, now: float, keys: tuple[Key, ...], copies: int, *, hosts: Mapping[str, str], readers: Collection[str]
    ) -> list[tuple[str, ChangeReplica]]:
        """Return the requests to send, by node, so that `copies` hosts, at least one, hold `keys`; requests already sent are
        left out.

        `hosts`: the host of each cache-node. `readers`: hosts with a prefill, which alone are given copies.
        """
        self._forget_old(now)
        kept, coming = self._standing(now, keys, hosts)
        have = kept | coming
        if len(have) < copies:
            return self._ask_for(now, keys, copies - len(have), hosts, {host for host in readers if host not in have})
        if len(kept) > max(1, copies):
            return self._let_go(now, keys, len(kept) - max(1, copies), hosts, readers)
        return []

    def forget(self, node: str) -> None:
        """Forget all requests to this node."""
        self._asked.pop(node, None)
        self._requests = deque(request for request in self._requests if request.node != node)

    def check(self, now: float) -> None:
        """Assert the invariants."""
        assert len(self._requests) <= MAX_REQUESTS
        remembered = {id(request) for request in self._requests}
        for node, asked in self._asked.items():
            assert all(request.node == node and id(request) in remembered for request in asked.values())

    def _is_under_way(self, now: float, request: CopyRequest) -> bool:
        return request.more and now - request.at < COPY_REQUEST_S and not self._index.holds(request.node, request.keys[-1])

    def _standing(self, now: float, keys: tuple[Key, ...], hosts: Mapping[str, str]) -> tuple[set[str], set[str]]:
        """Return the hosts that hold all of `keys` and were not asked to evict them, and further hosts that were asked for a
        copy."""
        kept = {hosts[node] for node in self._kept_by(keys)}
        last = {node: request for node in self._asked if (request := self._last(node, keys))}
        coming = {hosts[node] for node, request in last.items() if self._is_under_way(now, request)}
        return kept, coming - kept

    def _kept_by(self, keys: tuple[Key, ...]) -> list[str]:
        return [node for node in self._index.holders(keys) if not self._is_going(node, keys)]

    def _is_going(self, node: str, keys: tuple[Key, ...]) -> bool:
        """Return whether `node` was asked to evict any of `keys` first."""
        asked = self._asked.get(node)
        return asked is not None and any(not request.more for key in keys if (request := asked.get(key)))

    def _last(self, node: str, keys: Sequence[Key]) -> CopyRequest | None:
        """Return the last request to `node` about the chain `keys`, possibly as part of a longer chain."""
        return self._asked.get(node, {}).get(keys[-1])

    def _under_way_to(self, now: float, node: str) -> int:
        return sum(request.node == node and self._is_under_way(now, request) for request in self._requests)

    def _ask_for(
        self, now: float, keys: tuple[Key, ...], count: int, hosts: Mapping[str, str], free: set[str]
    ) -> list[tuple[str, ChangeReplica]]:
        """Return requests for copies on `count` of the hosts in `free`: first on nodes that were asked to evict theirs, then
        on those whose pool holds the least."""
        holders = self._index.holders(keys)
        if not holders:
            return []
        going = {node for node in holders if self._is_going(node, keys)}
        asked: list[tuple[str, ChangeReplica]] = []
        for node in sorted(hosts, key=lambda node: (node not in going, self._index.held_by(node), node)):
            host = hosts[node]
            if host not in free or len(asked) == count:
                continue
            last = self._last(node, keys)
            if last is not None and last.more and node not in going:
                continue
            if len(self._requests) >= MAX_REQUESTS or self._under_way_to(now, node) >= REQUESTS_PER_NODE:
                self._counts.add("requested_copies_deferred")
                continue
            sources = [holder for holder in holders if hosts[holder] != host]
            if not sources:
                continue
            free.discard(host)
            self._remember(CopyRequest(node, keys, now, more=True))
            asked.append((node, ChangeReplica(keys=keys, sources=tuple(sources[:MAX_SOURCES]))))
        return asked

    def _let_go(
        self, now: float, keys: tuple[Key, ...], count: int, hosts: Mapping[str, str], readers: Collection[str]
    ) -> list[tuple[str, ChangeReplica]]:
        """Return requests to evict `count` copies: first on hosts without a reader, then on those whose pool holds the
        most."""
        spare = sorted(self._kept_by(keys), key=lambda node: (hosts[node] in readers, -self._index.held_by(node), node))
        asked: list[tuple[str, ChangeReplica]] = []
        for node in spare[:count]:
            if len(self._requests) >= MAX_REQUESTS // 2:
                self._counts.add("requested_copies_deferred")
                break
            self._remember(CopyRequest(node, keys, now, more=False))
            asked.append((node, ChangeReplica(keys=keys, sources=())))
        return asked

    def _remember(self, request: CopyRequest) -> None:
        self._requests.append(request)
        asked = self._asked.setdefault(request.node, {})
        for key in request.keys:
            asked[key] = request
        self._counts.add(f"requested_copies[change={'more' if request.more else 'fewer'}]")

    def _forget_old(self, now: float) -> None:
        while self._requests and now - self._requests[0].at >= ASK_AGAIN_S:
            request = self._requests.popleft()
            asked = self._asked[request.node]
            for key in request.keys:
                if asked.get(key) is request:
                    del asked[key]
