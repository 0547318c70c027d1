"""The process of one role, from its start to an end that leaves nothing behind.

`main` is its only entry. An operator's mistake ends it with one line on stderr and exit code 2; a bug with a traceback in the
log and exit code 1; a drained or finished process ends with 0.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack

import structlog

from mooncake_zmq.config.load import Loaded
from mooncake_zmq.core.roles import Role
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.lifecycle import Lifecycle, hold_signals
from mooncake_zmq.runtime.mistakes import MISTAKES
from mooncake_zmq.runtime.node_plan import NodePlan, check
from mooncake_zmq.runtime.node_process import NodeProcess
from mooncake_zmq.runtime.parts import Parts
from mooncake_zmq.telemetry import log as logs

log = structlog.get_logger()

BAD_INPUT = 2


def main(loaded: Loaded, name: str, *, role: Role | None = None, begin_as: Callable[[Role], object] = lambda role: None) -> int:
    """Run the node called `name` until it is stopped; returns the exit code. `role`: a different one that it may take.
    `begin_as` begins its next incarnation in another role, and is called once everything of this one is released."""
    try:
        loaded = loaded.of(loaded.config.node(name))
        node = loaded.config.node(name)
        node = node.in_role(role or node.role)
        logs.configure(node=name, role=node.role, form=loaded.config.cluster.log_format, level=loaded.config.cluster.log_level)
        with ExitStack() as stack:
            check(loaded, node)
            lifecycle = Lifecycle(loaded.config.cluster, node.name, stack)
            parts = Parts(NodePlan.learn(loaded, node), lifecycle, stack)
            process = _process(parts)
            process.run()
        hold_signals()
        if process.next_role is not None and not process.lifecycle.signals_seen:
            log.info("role_changes", to=process.next_role)
            notify.alive(f"becoming a {process.next_role}")
            begin_as(process.next_role)
    except MISTAKES as mistake:
        sys.stderr.write(f"mooncake-zmq: {name}: {mistake}\n")
        return BAD_INPUT
    except ModuleNotFoundError:
        raise  # the command line names the extra that brings the module
    except Exception:
        # The only such place: a bug must not leave segments, sockets or threads behind, and must be visible.
        log.critical("crashed", exc_info=True)
        return 1
    return 0


def _process(parts: Parts) -> NodeProcess:
    """Return the process of the node's role, after importing its modules alone, as each import lengthens the start."""
    if parts.plan.node.role == "gateway":
        from mooncake_zmq.runtime.gateway_process import GatewayProcess

        return GatewayProcess(parts)
    from mooncake_zmq.runtime.actor_process import ActorProcess

    return ActorProcess(parts)
