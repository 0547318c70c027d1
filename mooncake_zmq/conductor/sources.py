"""Tracks which cache-nodes are on which hosts and which one is next to be fetched from; what each prefill or vLLM holds
itself, in its slab or its prefix cache; and the stores that vLLMs of a host can read. PURE."""

from collections.abc import Iterable
from typing import Final

from mooncake_zmq.conductor.prefills import EVERYONE, PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import Run, bits_of

STORE: Final = "/store"
"""The suffix of a cache-node's name for its store of vLLMs' blocks, which are of another kind than the pool's."""
MAX_SOURCES: Final = 4
"""The most cache-nodes named in one plan: the one to fetch from, and three more in case it is down or has evicted the
blocks."""


class Sources:
    """The cache-nodes, identified by their bits in the index."""

    def __init__(self, prefills: Prefills) -> None:
        self._prefills = prefills
        self._names: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._pools: dict[str, list[int]] = {}
        """The cache-nodes of each host, in name order."""
        self._masks: dict[str, int] = {}
        """The mask of the cache-nodes that serve, by host."""
        self._named: dict[int, int] = {}
        """The turn in which each cache-node was last named first."""
        self._turns: dict[int, None] = {}
        """The cache-nodes in the order of their turns: the one named longest ago first, and equals in name order."""
        self._cordoned: set[int] = set()
        """The cordoned cache-nodes: none is the home of a prefill."""
        self._turn = 0
        self._pool_bits = 0
        self._stores: dict[int, tuple[str, str]] = {}
        """The cache-node and host of each store that holds blocks of vLLMs."""
        self._store_bits = 0
        self._own: dict[int, PrefillNode] = {}
        """Prefills and vLLMs by the bit of what they hold themselves, which no other node can read."""

    def join(self, bit: int, name: str, host: str) -> None:
        """Add a cache-node."""
        self._names[bit], self._hosts[bit], self._named[bit] = name, host, 0
        self._pool_bits |= 1 << bit
        pool = self._pools.setdefault(host, [])
        pool.append(bit)
        pool.sort(key=self._names.__getitem__)
        self._turns = dict.fromkeys(sorted(self._names, key=self._rank))
        self._mark(host)
        self.settle(self._prefills.by_host.get(host, ()))

    def leave(self, bit: int) -> None:
        """Remove a cache-node."""
        host = self._hosts.pop(bit)
        del self._names[bit], self._named[bit], self._turns[bit]
        self._cordoned.discard(bit)
        self._pool_bits &= ~(1 << bit)
        self._pools[host].remove(bit)
        if not self._pools[host]:
            del self._pools[host]
        self._mark(host)
        self.settle(self._prefills.by_host.get(host, ()))

    def set_cordon(self, bit: int, cordoned: bool) -> None:
        """Cordon a cache-node, or use it again."""
        if cordoned != (bit in self._cordoned):
            self._cordoned ^= {bit}
            self._mark(self._hosts[bit])
            self.settle(self._prefills.by_host.get(self._hosts[bit], ()))

    def join_own(self, bit: int, node: PrefillNode) -> None:
        """Add a prefill or vLLM; `bit` is that of what it holds itself."""
        self._own[bit] = node
        self.settle([node])

    def join_store(self, bit: int, name: str, host: str) -> None:
        """Add the store of this cache-node, whose blocks the vLLMs on its host can read at once."""
        self._stores[bit] = name, host
        self._store_bits |= 1 << bit
        self.settle(self._prefills.by_host.get(host, ()))

    def leave_own_or_store(self, bit: int) -> None:
        """Remove a store, or what a prefill or vLLM held itself."""
        self._own.pop(bit, None)
        _, host = self._stores.pop(bit, ("", ""))
        self._store_bits &= ~(1 << bit)
        if host:
            self.settle(self._prefills.by_host.get(host, ()))

    def settle(self, nodes: Iterable[PrefillNode]) -> None:
        """Set on these prefills which cache-nodes they use."""
        for node in nodes:
            pool = [] if node.vllm else self._serving(node.host)
            node.home = pool[0] if pool else -1
            node.homes = self._private_bits(node) if node.vllm else self.pools(node.host) | self._private_bits(node)
            node.marks = node.homes << 1 | EVERYONE

    def host_of(self, bit: int) -> str:
        """Return the host of a cache-node; empty if it is none."""
        return self._hosts.get(bit, "")

    def pools(self, host: str) -> int:
        """Return the mask of the cache-nodes of a host that serve."""
        return self._masks.get(host, 0)

    def readers(self, mask: int) -> list[PrefillNode]:
        """Return the prefills that can read from these holders, of which there are few."""
        by_host, hosts = self._prefills.by_host, self._hosts
        pools = mask & self._pool_bits
        found = [node for bit in bits_of(pools) for node in by_host.get(hosts[bit], ())]
        if pools != mask:
            for bit in bits_of(mask & ~pools):
                own = self._own.get(bit)
                found += by_host.get(self._stores[bit][1], ()) if own is None else (own,)
        return found

    def first(self, mask: int) -> int:
        """Return the one of these cache-nodes named longest ago; -1 if none of them can be fetched from."""
        mask &= self._pool_bits
        if not mask:
            return -1
        if not mask & (mask - 1):
            return mask.bit_length() - 1
        return self._in_turn(mask, 1)[0]

    def order(self, first: int, runs: Iterable[Run], homes: int, blocks: int) -> tuple[int, ...]:
        """Return `first`, then cache-nodes of other hosts that hold more than so many blocks, the longest runs first."""
        sources = [first]
        without = homes | 1 << first | ~self._pool_bits
        for longer, mask in reversed(list(runs)):
            mask &= ~without
            if longer > blocks and mask:
                sources += self._in_turn(mask, MAX_SOURCES - len(sources))
                if len(sources) == MAX_SOURCES:
                    break
        return tuple(sources)

    def in_stores(self, mask: int) -> bool:
        """Return whether any of these is a store that vLLMs can read."""
        return bool(mask & self._store_bits)

    def pooled(self, mask: int) -> bool:
        """Return whether any of these is a pool, from which other hosts can fetch."""
        return bool(mask & self._pool_bits)

    @property
    def vllms(self) -> Iterable[PrefillNode]:
        """All vLLMs."""
        return [node for node in self._own.values() if node.vllm]

    def stores(self, runs: Iterable[Run], host: str, blocks: int) -> tuple[str, ...]:
        """Return the cache-nodes of other hosts whose stores hold more than so many blocks of vLLMs, the longest runs
        first."""
        found: dict[str, None] = {}
        for longer, mask in reversed(list(runs)):
            for bit in bits_of(mask & self._store_bits) if longer > blocks else ():
                name, there = self._stores[bit]
                if there != host:
                    found[name] = None
        return tuple(found)[:MAX_SOURCES]

    def store_of(self, host: str) -> tuple[str, ...]:
        """Return the cache-node to whose store the vLLMs of this host write: the first by name, even if it has no store, where
        readers then find nothing. Empty if there is none."""
        return tuple(self._names[bit] for bit in self._pools.get(host, ())[:1])

    def chosen(self, bit: int) -> None:
        """Note that a cache-node was named first: it goes to the end of the turns."""
        self._turn += 1
        self._named[bit] = self._turn
        del self._turns[bit]
        self._turns[bit] = None

    def check(self) -> None:
        """Assert the invariants."""
        assert list(self._turns) == sorted(self._names, key=self._rank)
        assert self._names.keys() == self._hosts.keys() == self._named.keys()
        assert sorted(bit for pool in self._pools.values() for bit in pool) == sorted(self._names)
        serving = {host: sum(1 << bit for bit in self._serving(host)) for host in self._pools}
        assert self._masks == {host: mask for host, mask in serving.items() if mask}
        for node in self._prefills.nodes:
            pool = [] if node.vllm else self._serving(node.host)
            assert node.homes == sum(1 << bit for bit in pool) | self._private_bits(node)
            assert node.home == (pool[0] if pool else -1)

    def _in_turn(self, mask: int, most: int) -> list[int]:
        """Return up to `most` of these cache-nodes, those whose turns come first."""
        count = mask.bit_count()
        if count * count <= len(self._turns):
            return sorted(bits_of(mask), key=self._rank)[:most]
        found: list[int] = []  # of so many, some come early in the turns
        wanted = mask.to_bytes((mask.bit_length() + 7) // 8, "little")  # a large number is slow to shift
        for bit in self._turns:
            if bit >> 3 < len(wanted) and wanted[bit >> 3] >> (bit & 7) & 1:
                found.append(bit)
                if len(found) == most:
                    break
        return found

    def _mark(self, host: str) -> None:
        self._masks.pop(host, None)
        if pool := self._serving(host):
            self._masks[host] = sum([1 << bit for bit in pool])

    def _serving(self, host: str) -> list[int]:
        return [bit for bit in self._pools.get(host, ()) if bit not in self._cordoned]

    def _private_bits(self, reader: PrefillNode) -> int:
        """Return the bits of what only `reader` holds, and of the stores that it can read."""
        own = sum([1 << bit for bit, node in self._own.items() if node is reader])
        if not reader.vllm:
            return own
        return own | sum([1 << bit for bit, (_, host) in self._stores.items() if host == reader.host])

    def _rank(self, bit: int) -> tuple[int, str]:
        return self._named[bit], self._names[bit]
