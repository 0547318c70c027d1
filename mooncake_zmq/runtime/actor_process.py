"""A process of a role without HTTP clients: conductor, prefill, decode, cache-node, or a node beside vLLM."""

from collections import deque
from typing import TYPE_CHECKING

from mooncake_zmq.core.actor import EngineBlocksReported, WorkDone, WorkProgress
from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.core.work import Result
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.node_process import NodeProcess
from mooncake_zmq.runtime.parts import Parts
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime

if TYPE_CHECKING:
    from mooncake_zmq.runtime.executor.executor import Executor
    from mooncake_zmq.runtime.generation import Generation


class ActorProcess(NodeProcess):
    """Run the actor in this thread, with its executor beside it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._executor: Executor | Generation | None = None
        self._store_changes: deque[EngineBlocksReported] = deque()
        """Changes in the store that the actor has not received yet."""

    def serve(self) -> None:
        plan, node, parts = self.plan, self.plan.node, self.parts
        with notify.extended_timeout("allocating shared memory"):
            segment, segment_ref = parts.open_segment()
        if node.may_become:
            plan.segment_slots(node.in_role(node.may_become))  # an error is better reported now than at the change of role
        served = ""
        if node.role == "vllm":
            from mooncake_zmq.runtime.vllm_server import await_server

            with notify.extended_timeout("waiting for vLLM"):
                model = plan.loaded.config.model
                served = await_server(
                    plan.settings,
                    plan.model.max_model_len,
                    adapters=model.adapters,
                    embeds=model.task == "embed",
                    model=model.path,
                )
        engine, costs = None, plan.costs
        if node.role in ENGINE_ROLES:
            with notify.extended_timeout("loading the engine"):
                engine = parts.load_engine()
            with notify.extended_timeout("measuring the engine"):
                costs = parts.measure(engine)
        pool = plan.settings if node.role == "cache-node" else None
        disk = parts.open_disk(pool.ssd) if pool and pool.ssd.directory else None
        publisher = parts.open_publisher(pool.kv_events) if pool and pool.kv_events.endpoint else None
        if pool and node.store_endpoint:
            parts.serve_store(pool.objects, self._on_store_change)
        executor = self._executor = parts.open_executor(self._emit, segment, engine, disk, served)
        self._runtime = ZmqRuntime(
            self.make_node(self.make_actor(costs, _contents(disk)), segment_ref),
            endpoint=plan.endpoint,
            peers=plan.peer_endpoints,
            executor=executor,
            publish=publisher.publish if publisher else None,
            answer=self.files.write_answer,
            sockets=parts.sockets,
        )
        parts.stack.callback(self.runtime.close)
        if executor is not None:
            parts.stack.callback(executor.close)  # before the runtime: its threads wake the runtime's loop
        parts.serve_metrics(lambda: self.in_loop(self.facts))
        self.attend()
        self.runtime.call(self._hand_in_store_changes)
        self.runtime.call(self.report_ready)
        self.runtime.run()

    def overdue_s(self) -> float:
        return self._executor.engine_overdue_s() if self._executor is not None else 0.0

    def _emit(self, event: WorkProgress | WorkDone[Result]) -> None:
        self.runtime.post(event)

    def _on_store_change(self, change: EngineBlocksReported) -> None:
        """Queue a change for the actor; called from the store's threads, and before there is a loop."""
        self._store_changes.append(change)
        if self._runtime is not None:
            self._runtime.call(self._hand_in_store_changes)

    def _hand_in_store_changes(self) -> None:
        while self._store_changes:
            self.runtime.handle(self._store_changes.popleft())


def _contents(disk: Disk | None) -> DiskContents | None:
    """Return the blocks that a disk holds, which the actor's columns hold from here on."""
    if disk is None:
        return None
    contents = DiskContents(disk.slots, disk.recovered)
    disk.recovered = ()
    return contents
