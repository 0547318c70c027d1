"""The block keys whose KV a vLLM's own prefix cache holds, by its KV events. PURE.

vLLM's blocks have hashes of their own and perhaps another length than ours. Tokens are what both have in common, so each of its
blocks is recorded as a place in a prompt: the key of our last complete block there, and the tokens after it.

An engine with several KV cache groups has a block of each group under the same hash. The first group with full attention stands
for all of them: what it holds of a prompt is the most that can be reused.

    vLLM   |  h1  |  h2  |  h3  |        h2 completes K1, which needs h1 and h2; h4 completes K2, which needs h3 and h4
    ours   |      K1     |      K2 ...
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from mooncake_zmq.kv.image_keys import Begin, keys_with_images, shifted

RootOf = Callable[[str], Key | None]


@dataclass(slots=True)
class _Block:
    parent: "_Block | None"
    """The block before this one; None where none of our blocks needs both."""
    size_bytes: int
    """Bytes of its tokens."""
    key: Key
    tail: bytes
    """Tokens after the block of `key`, up to the end of this one."""
    begins: tuple[Begin, ...]
    """The images that begin in these tokens."""
    keys: list[Key] = field(default_factory=list)
    """Keys of our blocks that need this one."""


class Mirror:
    """Record at most `max_blocks` of vLLM's blocks; further ones are ignored, which costs a hit."""

    def __init__(self, block_tokens: int, max_blocks: int, root_of: RootOf) -> None:
        """`root_of(salt)`: the root of the keys of prompts with this cache salt, or None if such keys are not ours."""
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._root_of = root_of
        self._group: int | None = None
        """The KV cache group whose blocks are recorded; None before the first."""
        self._blocks: dict[bytes, _Block] = {}
        self._held: dict[Key, None] = {}
        self._before: dict[Key, bool] = {}
        """By key that the current events touch: whether it was held before."""
        self.unknown = 0
        """Number of blocks ignored, either after an unknown one or beyond the limit."""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def held(self) -> list[Key]:
        """Return all keys that can be reused there."""
        return list(self._held)

    def apply(self, events: Iterable[EngineEvent]) -> tuple[list[Key], list[Key]]:
        """Apply events. Returns the keys that were added and stayed, and those that were removed."""
        self._before.clear()
        for event in events:
            match event:
                case EngineStored(group=group) if self._group in (None, group):
                    self._group = group
                    self._stored(event)
                case EngineRemoved(hashes, group) if group == self._group:
                    self._removed(hashes)
                case EngineCleared():
                    self._group = None
                    self._blocks.clear()
                    self._let_go(list(self._held))
        changed = [(key, held) for key, held in self._before.items() if held != (key in self._held)]
        return [key for key, held in changed if not held], [key for key, held in changed if held]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._blocks) <= self._max_blocks
        needed = {key for block in self._blocks.values() for key in block.keys}
        assert self._held.keys() <= needed

    def _stored(self, event: EngineStored) -> None:
        parent = self._blocks.get(event.parent) if event.parent is not None else None
        root = self._root_of(event.salt) if event.parent is None else None
        if (parent is None) == (root is None):
            self.unknown += len(event.hashes)
            return
        size = 4 * event.block_tokens
        for index, name in enumerate(event.hashes):
            if len(self._blocks) >= self._max_blocks and name not in self._blocks:
                self.unknown += len(event.hashes) - index
                break
            images = [each for each in shifted(event.images, index * event.block_tokens) if each[0] < event.block_tokens]
            block, keys = self._place(parent, root or b"", event.tokens[index * size : (index + 1) * size], images)
            known = self._blocks.get(name)
            if known is None or (known.key, known.tail, known.begins) != (block.key, block.tail, block.begins):
                if known is not None:  # one name for two blocks is an error: the earlier one is gone
                    self._let_go(known.keys)
                self._blocks[name] = block
                self._needs(block, keys, len(parent.tail) if parent else 0)
                for key in keys:
                    self._before.setdefault(key, key in self._held)
                    self._held[key] = None
            parent = self._blocks[name]

    def _place(self, parent: _Block | None, root: Key, tokens: bytes, images: Iterable[Begin]) -> tuple[_Block, list[Key]]:
        before, rest, begun = (parent.key, parent.tail, parent.begins) if parent else (root, b"", ())
        open_tokens = rest + tokens
        begins = [*begun, *((len(rest) // 4 + at, digest) for at, digest in images)]
        keys = keys_with_images(before, open_tokens, self._block_tokens, begins)
        done = len(keys) * self._block_tokens
        last = keys[-1] if keys else before
        return _Block(parent if rest else None, len(tokens), last, open_tokens[4 * done :], shifted(begins, done)), keys

    def _needs(self, block: _Block, keys: list[Key], behind_bytes: int) -> None:
        """Record at each block the keys that need it: the first of `keys` needs the blocks before, as far as its tokens
        reach."""
        block.keys += keys
        earlier = block.parent
        while keys and behind_bytes > 0 and earlier is not None:
            earlier.keys.append(keys[0])
            behind_bytes -= earlier.size_bytes
            earlier = earlier.parent

    def _removed(self, hashes: Iterable[bytes]) -> None:
        for name in hashes:
            block = self._blocks.pop(name, None)
            if block is not None:
                self._let_go(block.keys)

    def _let_go(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._before.setdefault(key, key in self._held)
            self._held.pop(key, None)
