"""Which conductor a gateway asks, and whether it may call itself ready by what that one tells of the cluster. PURE."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.actor import Effect, SetTimer, TimerKey
from mooncake_zmq.core.messages import Hello, NodesHeard

WAIT: TimerKey = ("ready",)
ENGINES = ("prefill", "decode")


def missing_roles(there: Iterable[Hello]) -> list[str]:
    """Return the roles that lack before anything can be served, beside these: there have to be prefills and decodes of ours, or
    any vLLM, as one of one part takes whole requests where there is none of the other."""
    roles = {hello.role for hello in there}
    engines = () if "vllm" in roles else tuple(role for role in ENGINES if role not in roles)
    return [*(() if "conductor" in roles else ("conductor",)), *engines]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a gateway's /health says by its conductor's word. `missing`: not heard yet, or their blocks are not; `closed`: they
    take nothing new."""

    ready: bool
    cache_nodes: tuple[str, ...] | None = None
    """None: no conductor tells."""
    missing: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()


class Readiness:
    """Ready, once and for good: the conductor that is asked has heard every node of its config and all blocks, or `wait_s` have
    passed since the first moment at which the cluster could serve. A node lost later makes nobody less ready."""

    def __init__(self, conductors: Sequence[str], wait_s: float) -> None:
        self._conductors = conductors
        self._wait_s = wait_s
        self._told: dict[str, NodesHeard] = {}
        self._ready = False
        self._waiting = False

    def heard(self, conductor: str, news: NodesHeard, peers: Mapping[str, Hello]) -> list[Effect]:
        """A conductor says whom it hears."""
        self._told[conductor] = news
        return self.changed(peers)

    def forget(self, peer: str) -> None:
        """The conversation is over: what it said counts no more."""
        self._told.pop(peer, None)

    def changed(self, peers: Mapping[str, Hello]) -> list[Effect]:
        """Look again, now that a peer came or something was heard."""
        if self._ready or missing_roles(peers.values()):
            return []
        news = self._told.get(self.conductor(peers))
        self._ready = news is not None and not news.missing
        if self._ready or self._waiting:
            return []
        self._waiting = True
        return [SetTimer(WAIT, self._wait_s)]

    def waited(self) -> bool:
        """The wait is over; whether it was in vain."""
        in_vain, self._ready = not self._ready, True
        return in_vain

    def view(self, peers: Mapping[str, Hello]) -> ClusterView:
        """As it stands."""
        news = self._told.get(self.conductor(peers))
        if news is None:
            return ClusterView(self._ready)
        return ClusterView(self._ready, news.cache_nodes, news.missing, news.closed)

    def conductor(self, peers: Mapping[str, Hello]) -> str:
        """The one to ask: the first that is there, and one that rests only where all do. Empty: none is there."""
        there = [name for name in self._conductors if name in peers]
        return next((name for name in there if not self._rests(name)), there[0] if there else "")

    def _rests(self, conductor: str) -> bool:
        return conductor in self._told and self._told[conductor].resting
