"""The choice of a gateway's conductor, and the gateway's readiness by that conductor's reports. PURE."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.actor import Effect, SetTimer, TimerKey
from mooncake_zmq.core.messages import Hello, NodesReported

WAIT: TimerKey = ("ready",)
ENGINES = ("prefill", "decode")


def missing_roles(there: Iterable[Hello]) -> list[str]:
    """Return the roles that are missing to serve requests: a conductor, and a prefill and a decode or any vLLM. A vLLM for one
    phase serves whole requests if there is none for the other."""
    roles = {hello.role for hello in there}
    engines = () if "vllm" in roles else tuple(role for role in ENGINES if role not in roles)
    return [*(() if "conductor" in roles else ("conductor",)), *engines]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as the conductor reports it, for /health. `missing`: nodes from which no report or not all blocks have
    arrived; `closed`: nodes that accept no new requests."""

    ready: bool
    cache_nodes: tuple[str, ...] | None = None
    """None if no conductor has reported."""
    missing: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()


class Readiness:
    """The readiness of a gateway. It becomes ready once its conductor has received reports of all configured nodes and all
    blocks, or `wait_s` after the cluster could first serve. It then stays ready, even if a node is lost."""

    def __init__(self, conductors: Sequence[str], wait_s: float) -> None:
        self._conductors = conductors
        self._wait_s = wait_s
        self._reports: dict[str, NodesReported] = {}
        self._ready = False
        self._waiting = False

    def on_report(self, conductor: str, news: NodesReported, peers: Mapping[str, Hello]) -> list[Effect]:
        """Take a conductor's report on the nodes from which it receives."""
        self._reports[conductor] = news
        return self.changed(peers)

    def forget(self, peer: str) -> None:
        """Forget the report of a peer whose session ended."""
        self._reports.pop(peer, None)

    def changed(self, peers: Mapping[str, Hello]) -> list[Effect]:
        """Decide again whether the gateway is ready, after a new peer or report."""
        if self._ready or missing_roles(peers.values()):
            return []
        news = self._reports.get(self.conductor(peers))
        self._ready = news is not None and not news.missing
        if self._ready or self._waiting:
            return []
        self._waiting = True
        return [SetTimer(WAIT, self._wait_s)]

    def waited(self) -> bool:
        """End the wait. Return whether it ended without all reports."""
        in_vain, self._ready = not self._ready, True
        return in_vain

    def view(self, peers: Mapping[str, Hello]) -> ClusterView:
        """Return the present view of the cluster."""
        news = self._reports.get(self.conductor(peers))
        if news is None:
            return ClusterView(self._ready)
        return ClusterView(self._ready, news.cache_nodes, news.missing, news.closed)

    def conductor(self, peers: Mapping[str, Hello]) -> str:
        """Return the first conductor that is up, a cordoned one only if all are; empty if none is up."""
        there = [name for name in self._conductors if name in peers]
        return next((name for name in there if not self._is_cordoned(name)), there[0] if there else "")

    def _is_cordoned(self, conductor: str) -> bool:
        return conductor in self._reports and self._reports[conductor].cordoned
