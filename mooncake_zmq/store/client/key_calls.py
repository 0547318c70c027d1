"""The calls of Mooncake's Python store API that move no values: questions about keys, and removal."""

import re
from collections.abc import Sequence

from mooncake_zmq.store.client.client import UNREACHED, StoreClient
from mooncake_zmq.store.client.replicas import Descriptor, MemoryDescriptor, ReplicaDescriptor
from mooncake_zmq.store.codes import Code

MAX_PATTERN_LENGTH = 1024
INVALID = int(Code.INVALID)


class KeyCalls:
    """The part of `MooncakeDistributedStore` that needs the client alone, which is there from `setup` to `close`."""

    def __init__(self) -> None:
        self._client: StoreClient | None = None

    def is_exist(self, key: str) -> int:
        """1, 0, or -1 if no store answers."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        client = self._client
        return [-1] * len(keys) if client is None else client.exist(keys)

    def get_size(self, key: str) -> int:
        client = self._client
        return UNREACHED if client is None else client.sizes([key])[0]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The copies of each key that has one."""
        client = self._client
        found = client.locate(keys) if client is not None else []
        return {
            key: [ReplicaDescriptor(MemoryDescriptor(Descriptor(size, name))) for name, size in copies]
            for key, copies in zip(keys, found, strict=False)
            if copies
        }

    def remove(self, key: str, force: bool = False) -> int:
        """Remove a key. Reads under way may finish, so that `force` changes nothing."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        client = self._client
        return [UNREACHED] * len(keys) if client is None else client.remove(keys)

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove the copies in the store of that name, as `get_hostname` or a replica descriptor has it, or in all stores;
        return the keys that had one. Reads under way may finish."""
        client = self._client
        codes = [] if client is None else client.remove(keys, segment_name)
        return [key for key, code in zip(keys, codes, strict=False) if code == 0]

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many keys went; -600 for a bad pattern. Matched here: a costly pattern is the caller's own time."""
        client = self._client
        if client is None:
            return UNREACHED
        try:
            pattern = re.compile(regex_pattern)
        except re.error:
            return INVALID
        if len(regex_pattern) > MAX_PATTERN_LENGTH:
            return INVALID
        matching = list(dict.fromkeys(key for key in client.list_keys() if pattern.search(key)))
        return sum(code == 0 for code in client.remove(matching))

    def remove_all(self, force: bool = False) -> int:
        """How many copies went."""
        client = self._client
        return UNREACHED if client is None else client.remove_all()
