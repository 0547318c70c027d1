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
"""A client of stores: it has a key of this cluster, and no business on any other plane."""
SUBSCRIBER = "subscriber"
"""Of KV events."""
NOBODY = "nobody"
"""Who has a key that no file names."""
SPREAD_S = 1.5
"""After which every running node has read the public keys anew."""


class RunKeys:
    """Of all nodes, and of two strangers. `hosts`: the directory for keys on each host, by name."""

    def __init__(self, directory: Path, nodes: Mapping[str, str], hosts: Mapping[str, Path]) -> None:
        """`nodes`: the host of each, by name."""
        self._directory = directory
        self._nodes, self._hosts = dict(nodes), dict(hosts)
        self._spreading = threading.Lock()
        wanted: list[tuple[str, tuple[Kind, ...]]] = [(name, ("node",)) for name in nodes]
        key_files.make(directory, [*wanted, (OUTSIDER, ("store",)), (SUBSCRIBER, ("events",))])
        key_files.make(directory / NOBODY, [(NOBODY, ("node",))])
        for path in hosts.values():
            make_own_directory(path)
        self._spread()
        for name in nodes:
            self._hand_over(name)

    def of_strangers(self) -> list[Keys]:
        """Of some who are not let in, with everybody's public keys all the same."""
        outsider = key_files.load(self._directory, OUTSIDER)
        nobody = key_files.load(self._directory / NOBODY, NOBODY)
        return [outsider, replace(nobody, book=outsider.book, path=outsider.path)]

    def of(self, name: str) -> Keys:
        """Somebody's own, as a thief would have them. Raises KeysError in the midst of a rotation."""
        return key_files.load(self._directory, name)

    def rotate(self, name: str) -> None:
        """Make a new key of a node, and bring it to its host; the node has it from its next life on. Takes a while."""
        key_files.rotate(self._directory, name)
        self._spread()
        time.sleep(SPREAD_S)
        self._hand_over(name)

    def drop(self, name: str) -> None:
        """Forget the former key of a node that runs with its new one."""
        key_files.drop(self._directory, name)
        self._spread()

    def _spread(self) -> None:
        with self._spreading:  # else of two at once the one who read first may write last
            content = (self._directory / key_files.PUBLIC_KEYS).read_bytes()
            for path in self._hosts.values():
                replace_own(path / key_files.PUBLIC_KEYS, content, mode=key_files.WORLD_READABLE)

    def _hand_over(self, name: str) -> None:
        secret = f"{name}.secret"
        replace_own(self._hosts[self._nodes[name]] / secret, (self._directory / secret).read_bytes())
