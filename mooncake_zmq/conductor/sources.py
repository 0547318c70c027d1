"""Which cache-nodes are on which hosts, and whose turn it is to be fetched from; and what vLLMs alone can read: what each holds
itself, and the stores of its host. PURE."""

from collections.abc import Iterable

from mooncake_zmq.conductor.prefills import EVERYONE, PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import Run, bits_of

MAX_SOURCES = 4
"""Cache-nodes named in one plan: the one to fetch from, and three more should it be gone or have evicted."""
FEW = 16
"""Of so many it is quicker to look at each than to go through all in turn."""


class Sources:
    """The cache-nodes, named by their bits in the index."""

    def __init__(self, prefills: Prefills) -> None:
        self._prefills = prefills
        self._names: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._pools: dict[str, list[int]] = {}
        """By host, in name order."""
        self._named: dict[int, int] = {}
        """The turn in which each was last named first."""
        self._turns: dict[int, None] = {}
        """The one named longest ago first, of equals in name order."""
        self._turn = 0
        self._pool_bits = 0
        self._shelves: dict[int, str] = {}
        """The host of each store that holds blocks of vLLMs."""
        self._vllms: dict[int, PrefillNode] = {}

    def join(self, bit: int, name: str, host: str) -> None:
        """A cache-node came."""
        self._names[bit], self._hosts[bit], self._named[bit] = name, host, 0
        self._pool_bits |= 1 << bit
        pool = self._pools.setdefault(host, [])
        pool.append(bit)
        pool.sort(key=self._names.__getitem__)
        self._turns = dict.fromkeys(sorted(self._names, key=self._rank))
        self.settle(self._prefills.by_host.get(host, ()))

    def leave(self, bit: int) -> None:
        """A cache-node left."""
        host = self._hosts.pop(bit)
        del self._names[bit], self._named[bit], self._turns[bit]
        self._pool_bits &= ~(1 << bit)
        self._pools[host].remove(bit)
        if not self._pools[host]:
            del self._pools[host]
        self.settle(self._prefills.by_host.get(host, ()))

    def join_vllm(self, bit: int, node: PrefillNode) -> None:
        """A vLLM came; `bit`: of what it holds itself."""
        self._vllms[bit] = node
        self.settle([node])

    def join_shelf(self, bit: int, host: str) -> None:
        """A store has blocks of vLLMs, which those on its host can read."""
        self._shelves[bit] = host
        self.settle(self._prefills.by_host.get(host, ()))

    def leave_apart(self, bit: int) -> None:
        """A vLLM left, or a store."""
        self._vllms.pop(bit, None)
        host = self._shelves.pop(bit, None)
        if host is not None:
            self.settle(self._prefills.by_host.get(host, ()))

    def settle(self, nodes: Iterable[PrefillNode]) -> None:
        """Tell these prefills which cache-nodes are theirs."""
        for node in nodes:
            if node.whole:
                node.homes = self._apart(node)
                node.marks = node.homes << 1 | EVERYONE
                continue
            pool = self._pools.get(node.host, ())
            node.home = pool[0] if pool else -1
            node.homes = sum([1 << bit for bit in pool])
            node.marks = node.homes << 1 | EVERYONE

    def readers(self, mask: int) -> list[PrefillNode]:
        """The prefills on the hosts of these cache-nodes; a few of them."""
        by_host, hosts = self._prefills.by_host, self._hosts
        pools = mask & self._pool_bits
        found = [node for bit in bits_of(pools) for node in by_host.get(hosts[bit], ())]
        if pools != mask:
            for bit in bits_of(mask & ~pools):
                vllm = self._vllms.get(bit)
                found += by_host.get(self._shelves[bit], ()) if vllm is None else (vllm,)
        return found

    def first(self, mask: int) -> int:
        """Of these cache-nodes, the one named longest ago; -1 if none of them can be fetched from."""
        mask &= self._pool_bits
        if not mask:
            return -1
        if not mask & (mask - 1):
            return mask.bit_length() - 1
        count = mask.bit_count()
        if count * count <= len(self._turns):  # in turn one of so many comes by before long
            return min(bits_of(mask), key=self._rank)
        return next(bit for bit in self._turns if mask >> bit & 1)

    def order(self, first: int, runs: Iterable[Run], homes: int, blocks: int) -> tuple[int, ...]:
        """`first`, then others of other hosts that hold more than so many blocks: the longest first."""
        sources = [first]
        without = homes | 1 << first | ~self._pool_bits
        for longer, mask in reversed(list(runs)):
            mask &= ~without
            if longer > blocks and mask:
                in_turn = sorted(bits_of(mask), key=self._rank) if mask.bit_count() <= FEW else self._turns
                for bit in in_turn:
                    if mask >> bit & 1:
                        sources.append(bit)
                        if len(sources) == MAX_SOURCES:
                            return tuple(sources)
        return tuple(sources)

    def chosen(self, bit: int) -> None:
        """It was named first."""
        self._turn += 1
        self._named[bit] = self._turn
        del self._turns[bit]
        self._turns[bit] = None

    def check(self) -> None:
        """Assert the invariants."""
        assert list(self._turns) == sorted(self._names, key=self._rank)
        assert self._names.keys() == self._hosts.keys() == self._named.keys()
        assert sorted(bit for pool in self._pools.values() for bit in pool) == sorted(self._names)
        for node in self._prefills.nodes:
            if node.whole:
                assert node.home == -1
                assert node.homes == self._apart(node)
                continue
            pool = self._pools.get(node.host, [])
            assert node.homes == sum(1 << bit for bit in pool)
            assert node.home == (pool[0] if pool else -1)

    def _apart(self, vllm: PrefillNode) -> int:
        own = sum([1 << bit for bit, node in self._vllms.items() if node is vllm])
        return own | sum([1 << bit for bit, host in self._shelves.items() if host == vllm.host])

    def _rank(self, bit: int) -> tuple[int, str]:
        return self._named[bit], self._names[bit]
