"""The hit ratio of a cache over a trace of requests, by replaying the trace through the pool's own slots."""

from collections.abc import Iterable, Sequence

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.slots import Slots

Trace = Sequence[tuple[Key, ...]]
"""The keys of each request's blocks, from the root on."""


def hit_ratio(trace: Trace, slots: Slots) -> float:
    """Return the share of the trace's blocks that `slots` holds, with all blocks before them in their prompt, when they are
    needed."""
    hits = asked = 0
    for keys in trace:
        asked += len(keys)
        hits += len(slots.leading_run(keys))
        slots.unpin(hold(slots, keys))
        slots.take_fences()
        slots.evicted.clear()
    return hits / asked if asked else 0.0


def infinite_hit_ratio(trace: Trace) -> float:
    """Return the share of the trace's blocks that a pool which never evicts would hold when they are needed."""
    seen: set[Key] = set()
    hits = asked = 0
    for keys in trace:
        asked += len(keys)
        hits += next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
    return hits / asked if asked else 0.0


def hold(slots: Slots, keys: Iterable[Key]) -> list[int]:
    """Pin those of `keys` that are there, then write and pin others while there is room. Return slots by the keys' order."""
    held = {key: slot for key in keys if (slot := slots.committed(key)) is not None}
    slots.pin(list(held.values()))
    for key in keys:
        if key not in held:
            new = slots.reserve(key)
            if new is None:
                break
            slots.pin((new,))
            slots.commit(new, 0)
            held[key] = new
    return [held[key] for key in dict.fromkeys(keys) if key in held]
