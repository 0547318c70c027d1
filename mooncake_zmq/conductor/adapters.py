"""Which vLLMs serve which adapters, as they list them. PURE."""

from collections.abc import Callable

NONE: frozenset[str] = frozenset()
MOST_KEPT = 1024
"""The number of adapters whose nodes are kept; more are found again."""


class Adapters:
    """The adapters of each vLLM that has listed any or none; one that has not is taken to have all."""

    def __init__(self) -> None:
        self._listed: dict[str, frozenset[str]] = {}
        self._lacking: dict[str, frozenset[str]] = {}
        """The nodes that lack an adapter, for those asked for since the last change."""

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
        return {node: sorted(names) for node, names in sorted(self._listed.items())}

    def lacking(self, adapter: str, vllms: Callable[[], int]) -> frozenset[str]:
        """Return the nodes that do not serve an adapter. If that is all vLLMs, as many as `vllms` returns, return none: any may
        be tried then, as vLLM has plugins that load adapters on demand."""
        without = self._lacking.get(adapter)
        if without is None:
            if len(self._lacking) >= MOST_KEPT:
                self._lacking.clear()
            without = frozenset([node for node, names in self._listed.items() if adapter not in names])
            self._lacking[adapter] = without
        return without if len(without) < len(self._listed) or len(without) < vllms() else NONE

    def with_less(self, node: str) -> tuple[str, ...]:
        """Return the nodes that lack any adapter which this one lists."""
        mine = self._listed.get(node)
        return tuple([other for other, names in self._listed.items() if not names >= mine]) if mine else ()
