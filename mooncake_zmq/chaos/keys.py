"""The keys of a run: made in one place, copied to hosts as an operator copies them, and rotated."""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mooncake_zmq.core.keys import Kind
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.key_files import Keys
from mooncake_zmq.transfer.own_files import make_own_directory, replace_own

OUTSIDER = "outsider"
"""The name of a client of stores, whose key is valid on no other plane."""
SUBSCRIBER = "subscriber"
"""The name of a subscriber to KV events."""
UNLISTED = "unlisted"
"""The name of a client whose key stands in no file."""
SPREAD_S = 1.5
"""The time in which every running node has reread the public keys."""


class RunKeys:
    """The keys of all nodes, and of strangers. `hosts`: the directory for keys on each host, by name."""

    def __init__(self, directory: Path, nodes: Mapping[str, str], hosts: Mapping[str, Path]) -> None:
        """`nodes`: the host of each node, by name."""
        self._directory = directory
        self._nodes, self._hosts = dict(nodes), dict(hosts)
        self._spreading = threading.Lock()
        wanted: list[tuple[str, tuple[Kind, ...]]] = [(name, ("node",)) for name in nodes]
        key_files.make(directory, [*wanted, (OUTSIDER, ("store",)), (SUBSCRIBER, ("events",))])
        key_files.make(directory / UNLISTED, [(UNLISTED, ("node",))])
        for path in hosts.values():
            make_own_directory(path)
        self._spread()
        for name in nodes:
            self._hand_over(name)

    def of_strangers(self) -> list[Keys]:
        """Return the keys of clients that are not admitted, each with all public keys."""
        outsider = key_files.load(self._directory, OUTSIDER)
        unlisted = key_files.load(self._directory / UNLISTED, UNLISTED)
        return [outsider, replace(unlisted, book=outsider.book, path=outsider.path)]

    def of(self, name: str) -> Keys:
        """Return one node's own keys, as a thief would have them. Raises KeysError in the midst of a rotation."""
        return key_files.load(self._directory, name)

    def rotate(self, name: str) -> None:
        """Make a new key of a node and copy it to its host; the node uses it from its next incarnation on. Blocks for a
        while."""
        key_files.rotate(self._directory, name)
        self._spread()
        time.sleep(SPREAD_S)
        self._hand_over(name)

    def drop(self, name: str) -> None:
        """Delete the former key of a node that runs with its new one."""
        key_files.drop(self._directory, name)
        self._spread()

    def _spread(self) -> None:
        with self._spreading:  # of two at once, the first to read may be the last to write
            content = (self._directory / key_files.PUBLIC_KEYS).read_bytes()
            for path in self._hosts.values():
                replace_own(path / key_files.PUBLIC_KEYS, content, mode=key_files.WORLD_READABLE)

    def _hand_over(self, name: str) -> None:
        secret = f"{name}.secret"
        replace_own(self._hosts[self._nodes[name]] / secret, (self._directory / secret).read_bytes())
