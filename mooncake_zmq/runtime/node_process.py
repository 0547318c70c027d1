"""The loop of one node toward the operator and systemd: signals, watchdog, metrics, dumps and requests."""

import gc
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

from mooncake_zmq.core.actor import Actor
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import SegmentRef, StateReported
from mooncake_zmq.core.node import Node, Observe
from mooncake_zmq.core.roles import BECOMES, Role
from mooncake_zmq.gateway.http.api_keys import REFRESH_S
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.roles import make_actor
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.asking import OperatorFiles
from mooncake_zmq.runtime.parts import Parts
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime

log = structlog.get_logger()
T = TypeVar("T")

CLOSE_S = 60.0
"""Time after a drain for an SSD to store what only DRAM holds, and for releasing threads and memory."""
IN_LOOP_S = 5.0
"""How long another thread waits for the loop."""


class NodeProcess:
    """Own everything that one incarnation of a node holds, except what its role adds."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.plan, self.lifecycle = parts, parts.plan, parts.lifecycle
        self.files = OperatorFiles(self.plan.runtime_dir, self.plan.node.name, self.plan.node.role)
        self._runtime: ZmqRuntime | None = None

    @property
    def runtime(self) -> ZmqRuntime:
        assert self._runtime is not None, "this process has no loop yet"
        return self._runtime

    @property
    def next_role(self) -> Role | None:
        """Return the role that the process takes after this one; None: it ends."""
        return BECOMES[self.plan.node.role] if self.runtime.become else None

    def run(self) -> None:
        """Serve until stopped, and raise the error that ended a worker thread, if one did."""
        self.serve()
        log.info("stopped")
        if self.lifecycle.crash is not None:
            raise self.lifecycle.crash

    def serve(self) -> None:
        """Open the role's components and run the loop to its end."""
        raise NotImplementedError

    def make_actor(self, costs: Costs, disk: DiskContents | None = None) -> Actor:
        """Create the actor of the node's role."""
        node = self.plan.node
        return make_actor(
            node.role,
            name=node.name,
            host=node.host,
            incarnation=self.lifecycle.incarnation,
            settings=self.plan.actor_settings(),
            layout=self.plan.layout,
            costs=costs,
            disk=disk,
            may_become=node.may_become,
            models=self.plan.layouts if self.plan.others else None,
        )

    def make_node(
        self,
        actor: Actor,
        segment: SegmentRef | None = None,
        observe: Observe | None = None,
        on_state: Callable[[str, StateReported], None] | None = None,
        part: Callable[[str], bytes] | None = None,
    ) -> Node:
        """Create the node of the actor and its session; the arguments are those of `core.node.Node`."""
        return Node(
            actor,
            self.plan.session(self.lifecycle.incarnation, segment),
            layout=self.plan.layout,
            facts=self.facts,
            state=self.state,
            observe=observe,
            on_state=on_state,
            part=part,
        )

    # --- end

    def begin_drain(self) -> None:
        """Begin the drain; called in the loop at the first signal."""
        self.drain()

    def drain(self) -> None:
        """Ask the actor to finish; the loop ends once it has."""
        log.info("draining")
        notify.stopping("draining", self.lifecycle.drain_timeout_s + CLOSE_S)
        self.runtime.drain()

    # --- signals and the service manager

    def attend(self) -> None:
        """Handle signals and the watchdog from here on."""
        runtime = self.runtime
        runtime.every(REFRESH_S, self._check_own_key)
        signal.signal(signal.SIGUSR1, lambda *_: runtime.call(lambda: self.files.write_dump(self.state())))
        signal.signal(signal.SIGUSR2, lambda *_: runtime.call(lambda: self.files.take(runtime.handle)))
        self.lifecycle.attend(runtime, self.begin_drain)
        if watchdog_s := notify.watchdog_s():
            runtime.every(watchdog_s / 2, lambda: self._feed_watchdog(watchdog_s))
        log.info("started", incarnation=self.lifecycle.incarnation, endpoint=runtime.endpoint, pid=os.getpid())

    def _check_own_key(self) -> None:
        """Drain as at a signal once the operator removed this node's own key."""
        keys = self.parts.sockets.keys
        if keys is not None and keys.own_is_dropped and not self.lifecycle.signals_seen:
            log.error("own_key_dropped", path=str(keys.path))
            signal.raise_signal(signal.SIGTERM)

    def _feed_watchdog(self, limit_s: float) -> None:
        """Report to the watchdog from the loop; omitted while the engine's thread hangs, so that the service manager ends
        the process."""
        overdue_s = self.overdue_s()
        if overdue_s > limit_s:
            log.error("engine_stuck", overdue_s=round(overdue_s, 1))
            notify.status(f"the engine is {overdue_s:.0f} s past the deadline of its work")
            return
        notify.alive(self._status())

    def overdue_s(self) -> float:
        """Return how far the oldest work of an engine is past its deadline."""
        return 0.0

    def _status(self) -> str:
        session = self.runtime.node.session
        doing = "draining" if self.lifecycle.signals_seen else "cordoned" if self.runtime.node.cordoned else "serving"
        return f"{doing}; connected to {len(session.up_peers)} of {len(self.plan.peers)} peers"

    def report_ready(self) -> None:
        """Log that the process serves, and report it to the service manager."""
        gc.collect()
        gc.freeze()  # objects of the start remain: the collector need not scan them again
        log.info("ready")
        notify.ready("serving")

    # --- state for operators and peers

    def facts(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return counts and gauges of this process."""
        return self.parts.facts.of_process(self.runtime)

    def state(self) -> dict[str, Any]:
        """Return the state of this process, for a dump."""
        node = self.plan.node
        about = {"node": node.name, "role": node.role, "incarnation": self.lifecycle.incarnation}
        return {**about, **self.runtime.dump(), **self.parts.facts.dump()}

    def in_loop(self, look: Callable[[], T]) -> T:
        """Call `look` in the loop's thread, from another one, where its errors are raised too."""
        taken: Future[T] = Future()

        def take() -> None:
            try:
                taken.set_result(look())
            except BaseException as error:
                taken.set_exception(error)

        self.runtime.call(take)
        return taken.result(timeout=IN_LOOP_S)
