"""The interface of a gateway's process to its HTTP edge: the way to the actor, and the state of peers and of the process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mooncake_zmq.core.actor import FromClient
from mooncake_zmq.core.messages import Hello
from mooncake_zmq.gateway.http.cluster_reports import Watching
from mooncake_zmq.gateway.requests.readiness import ClusterView


class Backing(Watching, Protocol):
    """Interface of the process to its edge. The loop calls its methods, and each returns at once."""

    def inject(self, event: FromClient) -> None:
        """Pass an event to the actor. Its effects may arrive at `Edge.deliver` before this returns."""

    def peers(self) -> Mapping[str, Hello]:
        """Return the peers with a session to this gateway: `Session.up_peers`."""

    def refusals(self) -> Mapping[str, str]:
        """Return the reasons why peers were refused, by name: `Session.refusals`."""

    def departed(self) -> Sequence[str]:
        """Return the peers that ended in order and have not come back: `Session.departed`."""

    def cluster(self) -> ClusterView:
        """Return what the conductor reported of the cluster: `Requests.cluster`."""

    def counts(self) -> Mapping[str, float]:
        """Return the monotonic counters of actor, session and runtime, named as `Actor.counts` says."""

    def gauges(self) -> Mapping[str, float]:
        """Return the current levels, named like the counters."""

    def cordoned(self) -> bool:
        """Return whether an operator cordoned this gateway: it accepts no new calls."""

    def is_listening(self) -> bool:
        """Return whether the process accepts connections."""

    def call_later(self, write: Callable[[], None]) -> None:
        """Call `write` soon, after the answers that just ended have been sent."""
