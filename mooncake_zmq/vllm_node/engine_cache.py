"""Blocks in the cache of a vLLM, by its KV events, and their announcement to conductors. PURE."""

from collections.abc import Sequence

from mooncake_zmq.core.actor import Effect, Send, Start
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.work import WatchEngine
from mooncake_zmq.kv.block_hash import root_of_salt
from mooncake_zmq.kv.engine_events import EngineEvent
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.announcer import announcements
from mooncake_zmq.vllm_node.mirror import Mirror
from mooncake_zmq.vllm_node.settings import VllmSettings

FOREVER_S = 1e7


class EngineCache:
    """Mirror the cache of one vLLM, and own the work that watches it."""

    def __init__(self, settings: VllmSettings, layout: BlockLayout, ids: Ids, counts: Tally) -> None:
        self._settings = settings
        self._ids = ids
        self._counts = counts
        self._mirror = Mirror(layout.block_tokens, settings.max_known_blocks, root_of_salt)
        self._watch: int | None = None

    def __len__(self) -> int:
        return len(self._mirror)

    def begin(self) -> list[Effect]:
        """Watch vLLM's cache, if it reports its blocks."""
        if not self._settings.kv_events:
            return []
        self._watch = self._ids.new()
        return [Start(self._watch, WatchEngine(), FOREVER_S)]

    def is_watched_by(self, work_id: int) -> bool:
        """Return whether this work watches the cache."""
        return work_id == self._watch

    def announce_to(self, conductor: str) -> list[Effect]:
        """Announce all blocks to a new conductor."""
        return [Send(conductor, message) for message in announcements(self._mirror.held)]

    def on_events(self, events: tuple[EngineEvent, ...], conductors: Sequence[str]) -> list[Effect]:
        """Announce to the conductors the blocks that were stored and removed, as those of a pool that this node alone reads."""
        unknown = self._mirror.unknown
        came, gone = self._mirror.apply(events)
        self._counts.add("engine_blocks_unknown", self._mirror.unknown - unknown)
        self._counts.add("announced_blocks[change=stored]", len(came))
        self._counts.add("announced_blocks[change=removed]", len(gone))
        return [Send(conductor, message) for message in announcements(came, gone) for conductor in conductors]

    def check(self) -> None:
        self._mirror.check()
