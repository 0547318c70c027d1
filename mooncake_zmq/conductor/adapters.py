"""Which vLLMs serve which adapters, as they list them. PURE."""

NONE: frozenset[str] = frozenset()
MOST_KEPT = 1024
"""The number of adapters whose nodes are kept; more are found again."""


class Adapters:
    """The adapters of each vLLM; None for one that has not listed any or none yet."""

    def __init__(self) -> None:
        self._listed: dict[str, frozenset[str] | None] = {}
        self._lacking: dict[str, frozenset[str]] = {}
        """The nodes that lack an adapter, for those asked for since the last change."""

    def join(self, node: str) -> None:
        """Add a vLLM that has listed nothing yet."""
        self._listed[node] = None
        self._lacking.clear()

    def listed(self, node: str, adapters: tuple[str, ...]) -> None:
        """Take in what a vLLM lists."""
        self._listed[node] = frozenset(adapters)
        self._lacking.clear()

    def forget(self, node: str) -> None:
        """Forget a node that left."""
        self._listed.pop(node, None)
        self._lacking.clear()

    def dump(self) -> dict[str, list[str]]:
        """Return the adapters by the vLLM that lists them."""
        return {node: sorted(self._listed[node] or ()) for node in sorted(self._listed)}

    def lacking(self, adapter: str) -> frozenset[str]:
        """Return the nodes to leave out for an adapter: all that do not list it; if none lists it, those that list others, so
        that one which has not listed any yet is tried; and none if all list others, as vLLM has plugins that load adapters on
        demand."""
        without = self._lacking.get(adapter)
        if without is None:
            if len(self._lacking) >= MOST_KEPT:
                self._lacking.clear()
            without = self._lacking[adapter] = self._without(adapter)
        return without

    def _without(self, adapter: str) -> frozenset[str]:
        having = {node for node, names in self._listed.items() if names and adapter in names}
        having = having or {node for node, names in self._listed.items() if names is None}
        return frozenset(self._listed.keys() - having) if having else NONE

    def with_less(self, node: str) -> tuple[str, ...]:
        """Return the nodes that lack any adapter which this one lists, or have not listed theirs yet."""
        mine = self._listed.get(node)
        return tuple([other for other, names in self._listed.items() if not (names or NONE) >= mine]) if mine else ()
