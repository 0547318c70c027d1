"""Checks the invariant I7 from outside: no tenant has more of a tier than its share, and within it loses nothing to others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_zmq.core.actor import Effect, Event, Publish, Received, Send, Start, WorkDone
from mooncake_zmq.core.messages import ReportCorrupt, ReserveSlots, SlotsReserved
from mooncake_zmq.core.work import BlocksCopied, CopyBlocks, DiskWritten, WriteToDisk
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksRemoved, BlocksStored, Medium
from mooncake_zmq.simulation.violation import Violation

Shares = Mapping[Medium, Mapping[str, int]]
"""The number of blocks that each tenant may have of each tier; a tenant that is not named has no share."""
Held = dict[Medium, set[Key]]


@dataclass(slots=True)
class ShareChecker:
    """Checks pools' KV events. `owners`: the tenant of each key, by its salt; what the actors say of that does not count."""

    owners: Mapping[Key, str]
    shares: Shares
    _held: dict[tuple[str, int], Held] = field(default_factory=dict)
    """The blocks that each incarnation of a cache-node holds by its KV events."""

    def observed(self, name: str, incarnation: int, actor: Any, event: Event, effects: Sequence[Effect]) -> None:
        """Check an event that a cache-node handled, before its effects are carried out."""
        held = self._held.setdefault((name, incarnation), {medium: set() for medium in Medium})
        events = [each for effect in effects if isinstance(effect, Publish) for each in effect.events]
        left: dict[Medium, Counter[str]] = {medium: Counter() for medium in held}
        for each in events:
            if isinstance(each, BlocksStored):
                held[each.medium].update(each.keys)
            elif isinstance(each, BlocksRemoved):
                held[each.medium].difference_update(each.keys)
                left[each.medium].update(map(self._owner, each.keys))
        if events:
            self._check_limits(name, held)
        if any(left.values()) and not _is_of_damage(event):
            self._check_promises(name, left, self._came(actor, event, effects))

    def _owner(self, key: Key) -> str:
        return self.owners.get(key, "")

    def _check_limits(self, name: str, held: Held) -> None:
        for medium, shares in self.shares.items():
            has = Counter(map(self._owner, held[medium]))
            for tenant, share in shares.items():
                if has[tenant] > share:
                    raise Violation("I7", f"{name} has {has[tenant]} blocks of {tenant} on {medium.value}, {share} at most")

    def _check_promises(self, name: str, left: Mapping[Medium, Counter[str]], came: Mapping[Medium, Counter[str]]) -> None:
        """Check that the blocks removed of a tenant with a share made room for blocks of its own."""
        for medium, shares in self.shares.items():
            for tenant in shares:
                went, room_for = left[medium][tenant], came[medium][tenant]
                if went > room_for:
                    raise Violation(
                        "I7", f"{name} takes {went} blocks of {tenant} from {medium.value} for {room_for} of its own"
                    )

    def _came(self, actor: Any, event: Event, effects: Sequence[Effect]) -> dict[Medium, Counter[str]]:
        """Return the blocks for which slots were reserved, by tenant."""
        keys: dict[Medium, list[Key]] = {medium: [] for medium in Medium}
        for effect in effects:
            match effect:
                case Send(_, SlotsReserved(grants=grants)) if isinstance(event, Received):
                    assert isinstance(event.message, ReserveSlots)
                    keys[Medium.CPU] += [event.message.keys[grant.index] for grant in grants]
                case Start(_, CopyBlocks(copies)):
                    keys[Medium.CPU] += [actor.slots.key_of(grant.slot) for _, grant in copies]
                case Start(_, WriteToDisk(blocks)):
                    keys[Medium.DISK] += [block.key for _, block in blocks]
        return {medium: Counter(map(self._owner, some)) for medium, some in keys.items()}


def _is_of_damage(event: Event) -> bool:
    """Return whether copies go because they are bad, of whatever tenant."""
    match event:
        case Received(_, ReportCorrupt()):
            return True
        case WorkDone(_, BlocksCopied() | DiskWritten() as done):
            return bool(done.corrupt or done.fault)
    return False
