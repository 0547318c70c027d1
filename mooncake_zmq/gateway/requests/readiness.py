"""The choice of a gateway's conductors, and the gateway's readiness by those conductors' reports. PURE."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.actor import Effect, SetTimer, TimerKey
from mooncake_zmq.core.messages import Hello, NodesReported

WAIT: TimerKey = ("ready",)
ENGINES = ("prefill", "decode")


def is_for(peer: Hello, model: str) -> bool:
    """Return whether a peer is for the model with this identity; the empty one is the only model of a cluster."""
    return not model or model in peer.model.split()


def missing_roles(there: Iterable[Hello], model: str = "") -> list[str]:
    """Return the roles that are missing to serve requests of a model: a conductor, and a prefill and a decode or any vLLM. A
    vLLM for one phase serves whole requests if there is none for the other."""
    roles = {hello.role for hello in there if is_for(hello, model)}
    engines = () if "vllm" in roles else tuple(role for role in ENGINES if role not in roles)
    return [*(() if "conductor" in roles else ("conductor",)), *engines]


def least_missing(there: Collection[Hello], models: Iterable[str]) -> list[str]:
    """Return the roles that are missing to serve any of several models: those of the model that lacks least."""
    return min((missing_roles(there, model) for model in models), key=len)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as the conductors report it, for /health. `missing`: nodes from which no report or not all blocks have
    arrived; `closed`: nodes that accept no new requests."""

    ready: bool
    cache_nodes: tuple[str, ...] | None = None
    """None if no conductor has reported."""
    missing: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()


class Readiness:
    """The readiness of a gateway. It becomes ready once each model's conductor has received reports of all configured nodes and
    all blocks, or `wait_s` after the cluster could first serve any model. It then stays ready, even if a node is lost."""

    def __init__(self, conductors: Sequence[str], wait_s: float, models: Sequence[str] = ("",)) -> None:
        """`models`: the identities of all models; an empty one stands for the only one."""
        self._conductors = conductors
        self._wait_s = wait_s
        self._models = models
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
        lacking = [bool(missing_roles(peers.values(), model)) for model in self._models]
        if self._ready or all(lacking):
            return []
        news = self._news(peers)
        self._ready = not any(lacking) and all(each is not None and not each.missing for each in news)
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
        news = [each for each in self._news(peers) if each is not None]
        if not news:
            return ClusterView(self._ready)
        return ClusterView(
            self._ready,
            cache_nodes=_all_of(each.cache_nodes for each in news),
            missing=_all_of(each.missing for each in news),
            closed=_all_of(each.closed for each in news),
        )

    def conductor(self, peers: Mapping[str, Hello], model: str = "") -> str:
        """Return the first conductor of a model that is up, a cordoned one only if all are; empty if none is up."""
        there = [name for name in self._conductors if name in peers and is_for(peers[name], model)]
        return next((name for name in there if not self._is_cordoned(name)), there[0] if there else "")

    def _news(self, peers: Mapping[str, Hello]) -> list[NodesReported | None]:
        """Return the report of each model's conductor, None where there is none."""
        return [self._reports.get(self.conductor(peers, model)) for model in self._models]

    def _is_cordoned(self, conductor: str) -> bool:
        return conductor in self._reports and self._reports[conductor].cordoned


def _all_of(reported: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all nodes that are named, each once, in the order of the reports."""
    return tuple(dict.fromkeys(name for names in reported for name in names))
