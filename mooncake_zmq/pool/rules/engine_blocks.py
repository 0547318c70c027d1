"""Which blocks of vLLMs a store holds, by the names of its values; conductors send requests where their beginnings are. PURE.

    NAMESPACE vllm / DIGEST of the engine / RANK / KEY        (see `vllm.names`)

A block has a value for each rank that shares the model; it counts from the first to the last of them, as a stale block costs
no more than a miss.
"""

from collections.abc import Callable, Sequence

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key

DIGITS = frozenset("0123456789abcdef")
MARK = "vllm/"


def block_key(name: str) -> Key | None:
    """The key of the block that a value is part of; None: it is of no block."""
    prefix, _, digits = name.rpartition("/")
    parts = prefix.split("/")
    if len(digits) != 2 * KEY_BYTES or len(parts) < 3 or not parts[-3].endswith("vllm") or not set(digits) <= DIGITS:
        return None
    return bytes.fromhex(digits) if len(parts[-2]) == 2 * KEY_BYTES and set(parts[-2]) <= DIGITS else None


class EngineBlocks:
    """Takes note of values that come and go; `changes` returns what became of their blocks."""

    def __init__(self) -> None:
        self._names: dict[Key, set[str]] = {}
        self._touched: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._names)

    def touch(self, name: str) -> None:
        """A value of this name came or went."""
        if MARK in name and (key := block_key(name)) is not None:
            self._touched[name] = key

    @property
    def is_touched(self) -> bool:
        return bool(self._touched)

    def changes(self, exist: Callable[[Sequence[str]], bytes]) -> tuple[list[Key], list[Key]]:
        """The blocks that came and those that went since the last call; `exist`: 1 for each name that can be read."""
        before = {key: key in self._names for key in self._touched.values()}
        names = list(self._touched)
        for name, readable in zip(names, exist(names), strict=True):
            key = self._touched[name]
            if readable:
                self._names.setdefault(key, set()).add(name)
            elif key in self._names:
                self._names[key].discard(name)
                if not self._names[key]:
                    del self._names[key]
        self._touched.clear()
        changed = [(key, held) for key, held in before.items() if held != (key in self._names)]
        return [key for key, held in changed if not held], [key for key, held in changed if held]
