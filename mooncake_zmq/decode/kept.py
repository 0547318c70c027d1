"""KV of ended requests, kept in a decode while no running one needs the room: prompts that begin alike copy it. PURE."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.actor import CloseSequence, Effect
from mooncake_zmq.decode.request import Holder, Request
from mooncake_zmq.kv.block_hash import Key


@dataclass(slots=True)
class KeptSequence:
    """The sequence of a request that ended."""

    sequence: int
    capacity_tokens: int
    keys: Sequence[Key]
    """The keys of its leading complete blocks."""
    readers: int = 0
    """Copies from it that are in flight; until they end it stays open."""


class Kept:
    """Hold the kept sequences of one decode, the one that was used least recently first. All open sequences, kept or not, have
    at most `capacity_tokens`, unless the running ones alone have more or one that has to go is being copied."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._running_tokens = 0
        self._kept_tokens = 0
        self._sequences: OrderedDict[int, KeptSequence] = OrderedDict()
        self._by_key: dict[Key, KeptSequence] = {}
        """By each block, the sequence that was kept last of those that have it."""

    @property
    def tokens(self) -> int:
        """The capacity of the kept sequences."""
        return self._kept_tokens

    @property
    def sequences(self) -> list[int]:
        """The kept sequences."""
        return list(self._sequences)

    def find(self, keys: Sequence[Key]) -> tuple[KeptSequence | None, int]:
        """Return the kept sequence with the most of these leading blocks, and their number. A key stands for all blocks before
        it as well."""
        for blocks in range(len(keys), 0, -1):
            found = self._by_key.get(keys[blocks - 1])
            if found is not None:
                return found, blocks
        return None, 0

    def begin(self, request: Request) -> list[Effect]:
        """Count the sequence of a new request, and close kept ones that have no room beside it; last the one that it will
        copy."""
        found, _ = self.find(request.request.reuse_keys)
        if found is not None:
            self._sequences.move_to_end(found.sequence)
        return self.hold(request.capacity_tokens)

    def hold(self, tokens: int) -> list[Effect]:
        """Count an open sequence that is not kept, and close kept ones that have no room beside it; below 0: it is closed."""
        self._running_tokens += tokens
        return self._close_most()

    def end(self, request: Request) -> list[Effect]:
        """Keep the sequence of a request that ended if its KV is complete and another kept one does not have it all, instead of
        those whose blocks it has."""
        self._running_tokens -= request.capacity_tokens
        keys = request.keys if request.verified_at else ()
        longer = self._by_key.get(keys[-1]) if keys else None
        if longer is not None:
            self._sequences.move_to_end(longer.sequence)
        if not keys or longer is not None:
            return [CloseSequence(request.sequence)]
        shorter = [each for key in keys if (each := self._by_key.get(key)) is not None and each.keys[-1] == key]
        effects = [effect for each in shorter if not each.readers for effect in self._close(each)]
        kept = self._sequences[request.sequence] = KeptSequence(request.sequence, request.capacity_tokens, keys)
        self._kept_tokens += kept.capacity_tokens
        self._by_key.update(dict.fromkeys(keys, kept))
        return effects + self._close_most()

    def read(self, kept: KeptSequence) -> None:
        """Note that a copy of it begins."""
        kept.readers += 1
        self._sequences.move_to_end(kept.sequence)

    def release(self, kept: KeptSequence) -> list[Effect]:
        """Note that a copy of it ended."""
        kept.readers -= 1
        return self._close_most()

    def close_all(self) -> list[Effect]:
        """Close every sequence; nothing may be copied any more."""
        return [effect for each in list(self._sequences.values()) for effect in self._close(each)]

    def check(self, holders: Iterable[Holder]) -> None:
        """Assert the invariants; `holders` are all that hold sequences."""
        assert self._running_tokens == sum(holder.capacity_tokens for holder in holders)
        assert self._kept_tokens == sum(each.capacity_tokens for each in self._sequences.values())
        assert all(self._sequences.get(each.sequence) is each for each in self._by_key.values())
        fits = self._running_tokens + self._kept_tokens <= self._capacity_tokens
        assert fits or all(each.readers for each in self._sequences.values())

    def _close_most(self) -> list[Effect]:
        """Close sequences until all open ones fit, or those that are left are being copied."""
        effects: list[Effect] = []
        for each in list(self._sequences.values()):
            if self._running_tokens + self._kept_tokens <= self._capacity_tokens:
                break
            if not each.readers:
                effects += self._close(each)
        return effects

    def _close(self, kept: KeptSequence) -> list[Effect]:
        del self._sequences[kept.sequence]
        self._kept_tokens -= kept.capacity_tokens
        for key in kept.keys:
            if self._by_key.get(key) is kept:
                del self._by_key[key]
        return [CloseSequence(kept.sequence)]
