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

    def dump(self) -> dict[str, list[str]]:
        """Return the adapters by the vLLM that lists them."""
        return {node: sorted(names) for node, names in sorted(self._listed.items())}

    def lacking(self, adapter: str, vllms: int) -> tuple[str, ...]:
        """Return the nodes that do not serve an adapter. If that is all of the `vllms` that there are, return none: any may be
        tried then, as vLLM has plugins that load adapters on demand."""
        without = tuple([node for node, names in self._listed.items() if adapter not in names])
        return without if len(without) < vllms else ()

    def with_less(self, node: str) -> tuple[str, ...]:
        """Return the nodes that lack any adapter which this one lists."""
        mine = self._listed.get(node)
        return tuple([other for other, names in self._listed.items() if not names >= mine]) if mine else ()
