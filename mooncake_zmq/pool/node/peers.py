"""The processes that a cache-node is connected to. PURE."""

from dataclasses import dataclass

from mooncake_zmq.core.actor import PeerUp
from mooncake_zmq.kv.lease import HolderId


@dataclass(frozen=True, slots=True)
class _Peer:
    incarnation: int
    role: str


class Peers:
    """The connected peers by name, each with its incarnation and role."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def connected(self, up: PeerUp) -> None:
        """Note a new connection."""
        self._peers[up.peer] = _Peer(up.incarnation, up.hello.role)

    def disconnected(self, peer: str) -> None:
        """Note that a connection was lost."""
        self._peers.pop(peer, None)

    def holder(self, peer: str, number: int) -> HolderId:
        """Return the identity of a lease or put to which a connected peer gave this number."""
        return HolderId(peer, self._peers[peer].incarnation, number)

    def has_role(self, peer: str, role: str) -> bool:
        """Return whether this peer is connected and has this role."""
        return peer in self._peers and self._peers[peer].role == role

    def conductors(self) -> list[str]:
        """Return the names of the connected conductors."""
        return [name for name, peer in self._peers.items() if peer.role == "conductor"]
