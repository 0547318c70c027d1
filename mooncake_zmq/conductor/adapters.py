"""Which vLLMs serve which adapters, as they list them. PURE."""


class Adapters:
    """The adapters of each vLLM that has listed any or none; one that has not is taken to have all."""

    def __init__(self) -> None:
        self._listed: dict[str, frozenset[str]] = {}

    def listed(self, node: str, adapters: tuple[str, ...]) -> None:
        """Take in what a vLLM lists."""
        self._listed[node] = frozenset(adapters)

    def forget(self, node: str) -> None:
        """Forget a node that left."""
        self._listed.pop(node, None)

    def lacking(self, adapter: str) -> tuple[str, ...]:
        """Return the nodes that do not serve an adapter; the empty one stands for none, which all serve. If none lists it, any
        may be tried: vLLM has plugins that load adapters on demand."""
        if not adapter:
            return ()
        without = tuple([node for node, names in self._listed.items() if adapter not in names])
        return without if len(without) < len(self._listed) else ()
