"""The parts of a process: memory, engine, disks, servers and sockets, each closed by the process's stack."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import zmq

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import costs_of
from mooncake_zmq.core.actor import EngineBlocksReported, WorkDone, WorkProgress
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import SegmentRef
from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.core.work import Result
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.extras import installing
from mooncake_zmq.pool.node.settings import KvEventsSettings, SsdSettings
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.roles import PARTS
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.facts import Facts, named
from mooncake_zmq.runtime.kv_events import KvEventPublisher
from mooncake_zmq.runtime.kv_subscriber import KvSubscriber, OnEvents
from mooncake_zmq.runtime.lifecycle import Lifecycle
from mooncake_zmq.runtime.listening import PortInUse
from mooncake_zmq.runtime.node_plan import NodePlan
from mooncake_zmq.telemetry.usage import Meter
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment, DeviceSequence
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import BadEndpoint, Sockets

if TYPE_CHECKING:  # a node imports only what its role runs, and starts a fifth sooner
    from prometheus_client.metrics_core import Metric

    from mooncake_zmq.gateway.requests.otlp import Otlp
    from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
    from mooncake_zmq.runtime.executor.executor import Executor
    from mooncake_zmq.runtime.executor.lending import Lending
    from mooncake_zmq.runtime.generation import Generation
    from mooncake_zmq.telemetry.metrics import Snapshot

log = structlog.get_logger()

MEASURED_TOKENS = 128
"""Tokens of KV with which a decode's steps are measured."""


class Parts:
    """Opens the components of one node and enters their counters in `facts`; `stack` closes them in reverse order."""

    def __init__(self, plan: NodePlan, lifecycle: Lifecycle, stack: ExitStack) -> None:
        self.plan, self.lifecycle, self.stack = plan, lifecycle, stack
        self.facts = Facts(node=plan.node.name, host=plan.node.host, role=plan.node.role)
        if not plan.model.foreign:
            kv = {f"kv_bytes_per_token[codec={plan.model.codec}]": float(plan.model.kv_bytes_per_token)}
            self.facts.beside.append(lambda: ({}, kv))
        self.sockets = self._open_sockets()
        self.cuda = self._open_device() if plan.node.device == "cuda" else None

    # --- network

    def _open_sockets(self) -> Sockets:
        node, security = self.plan.node, self.plan.loaded.config.security
        directory = key_files.directory_of(security.keys)
        keys = key_files.load(directory, node.name) if directory else None
        if keys is not None:
            self.facts.beside.append(lambda: ({}, {"keys_not_followed": float(bool(keys.not_followed))}))
        sockets = Sockets(
            keys,
            allow_plain_tcp=security.allow_plain_tcp,
            encrypt_bulk=security.encrypt_bulk,
            io_threads=1 if node.role in ("gateway", "conductor") else 0,
            on_crash=self.lifecycle.on_crash,
        ).borrow()
        self.stack.callback(sockets.give_back)
        self.facts.threads["connections"] = sockets.counts
        return sockets

    def open_publisher(self, events: KvEventsSettings) -> KvEventPublisher:
        """Open the publisher of a cache-node's KV events."""
        publisher = KvEventPublisher(
            events.endpoint,
            replay_endpoint=events.replay_endpoint,
            topic=events.topic,
            format=events.format,
            block_tokens=self.plan.layout.block_tokens,
            on_crash=self.lifecycle.on_crash,
            sockets=self.sockets,
        )
        self.stack.callback(publisher.close)
        self.facts.threads["kv_events"] = publisher.counts
        return publisher

    def _subscribe(self, on_events: OnEvents) -> KvSubscriber:
        settings = self.plan.settings
        try:
            subscriber = KvSubscriber(
                settings.kv_events,
                replay_endpoint=settings.kv_events_replay,
                topic=settings.kv_events_topic,
                on_events=on_events,
                on_crash=self.lifecycle.on_crash,
            )
        except zmq.ZMQError as error:
            raise BadEndpoint(f"vllm.kv_events {settings.kv_events}: {error}") from error
        self.facts.threads["kv_subscriber"] = subscriber.counts
        return subscriber

    # --- memory and disks

    def open_segment(self) -> tuple[Segment | None, SegmentRef | None]:
        """Open the node's segment and serve it to its peers. Returns it with the reference that peers use; both None without
        one."""
        plan, node, cluster = self.plan, self.plan.node, self.plan.loaded.config.cluster
        setting = PARTS[node.role].segment_setting
        if not setting:
            return None, None
        slots = plan.segment_slots(node)
        create = partial(DeviceSegment.allocate, self.cuda) if self.cuda else Segment.create
        segment = create(
            cluster.shm_dir,
            cluster.name,
            node.name,
            plan.layout,
            slots,
            self.lifecycle.incarnation,
            setting=f"{node.role.replace('-', '_')}.{setting}",
        )
        self.stack.callback(segment.close)
        endpoint = self._serve_segment(segment)
        handle = segment.handle if isinstance(segment, DeviceSegment) else b""
        device = segment.device if handle else b""
        return segment, SegmentRef(path=str(segment.path), endpoint=endpoint, slots=slots, device=device, handle=handle)

    def _serve_segment(self, segment: Segment) -> str:
        node = self.plan.node
        wanted = self.plan.loaded.config.data_endpoint(node)
        try:
            server = DataServer(
                segment, wanted, stream_port=node.data_stream_port, on_crash=self.lifecycle.on_crash, sockets=self.sockets
            )
        except zmq.ZMQError as error:
            raise BadEndpoint(f"cannot listen on {wanted}: {error}") from error
        except OSError as error:
            raise _no_stream_port(node.data_stream_port, wanted, error) from error
        self.stack.callback(server.close)
        self.facts.threads["data_server"] = server.counts
        if wanted.startswith("ipc://"):
            self.stack.callback(Path(wanted.removeprefix("ipc://")).unlink, missing_ok=True)
        return server.endpoint

    def _open_device(self) -> Cuda:
        try:
            cuda = Cuda.open(self.plan.layout)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.stack.callback(cuda.close)
        self.facts.threads["cuda"] = cuda.counts
        log.info("device_open", device="cuda", uuid=cuda.uuid.hex())
        return cuda

    def open_disk(self, ssd: SsdSettings) -> Disk:
        """Open the SSD of a cache-node's blocks."""
        path = Path(ssd.directory) / self.plan.node.name
        progress = _recovery(path, "blocks")
        disk = Disk.open(path, self.plan.layout, ssd.bytes, threads=ssd.threads, progress=progress)
        self.stack.callback(disk.close)
        self.facts.threads["disk"] = disk.counts
        log.info("ssd_open", directory=ssd.directory, slots=disk.slots, blocks=len(disk.recovered), direct=disk.direct)
        return disk

    def _open_store_disk(self, objects: ObjectSettings) -> "ObjectDisk":
        from mooncake_zmq.pool.ssd.object_disk import ObjectDisk

        path = Path(objects.ssd.directory) / f"{self.plan.node.name}.objects"
        disk = ObjectDisk.open(path, objects.slab_bytes, _recovery(path, "values"))
        self.stack.callback(disk.close)
        log.info("store_ssd_open", directory=str(path), values=len(disk.recovered), direct=disk.direct)
        return disk

    def serve_store(self, objects: ObjectSettings, on_change: Callable[[EngineBlocksReported], None]) -> None:
        """Serve values to store clients. `on_change` is called from the store's threads."""
        from mooncake_zmq.pool.server.server import StoreServer

        node, cluster, lifecycle = self.plan.node, self.plan.loaded.config.cluster, self.lifecycle
        disk = self._open_store_disk(objects) if objects.ssd.directory else None
        try:
            store = StoreServer(
                settings=objects,
                directory=cluster.shm_dir,
                cluster=cluster.name,
                node=node.name,
                incarnation=lifecycle.incarnation,
                endpoint=node.store_endpoint,
                host=node.host,
                stream_port=node.store_stream_port,
                on_crash=lifecycle.on_crash,
                disk=disk,
                sockets=self.sockets,
                on_engine_blocks=on_change,
            )
        except zmq.ZMQError as error:
            raise BadEndpoint(f"cannot listen on store_endpoint {node.store_endpoint}: {error}") from error
        except OSError as error:
            raise _no_stream_port(node.store_stream_port, node.store_endpoint, error) from error
        self.stack.callback(lambda: store.close(lifecycle.drain_until, lifecycle.is_urgent))
        self.facts.dumps["store"] = lambda: {"counts": dict(store.counts), "gauges": store.gauges()}
        self.facts.beside.append(lambda: (named("store", store.counts), named("store", store.gauges())))
        log.info("store_open", endpoint=store.endpoint, bytes=objects.object_bytes)

    # --- the engine

    def load_engine(self) -> Engine:
        """Load the engine of a prefill or decode; one on a GPU is warmed up."""
        from mooncake_zmq.engine.blend import why_not
        from mooncake_zmq.engine.cpu import chosen, lacking
        from mooncake_zmq.engine.modelled import ModelledEngine
        from mooncake_zmq.engine.weights import load_engine

        node, model = self.plan.node, self.plan.model
        if node.modelled:
            return ModelledEngine(model.spec, costs_of(node.modelled, f"{node.name}: backend"))
        sequences = partial(DeviceSequence, self.cuda) if self.cuda else None
        backend = chosen(node.prepared_for)
        why = {"reason": lacking()} if node.prepared_for == "auto" and backend == "numpy" else {}
        if str(model.path) != "toy":
            log.info("engine", backend=backend, device=node.device, threads=node.threads, **why)
        engine = load_engine(
            model.path,
            device=node.device,
            threads=node.threads,
            backend=node.prepared_for,
            sequences=sequences,
            codec=self.plan.layout.block_codec,
        )
        if node.role == "prefill" and self.plan.settings.blend and (refusal := why_not(engine)):
            raise ConfigError(f"prefill.blend: {refusal}: leave it off")
        if self.cuda:
            _warm_up(engine)
        return engine

    def measure(self, engine: Engine) -> Costs:
        """Return the configured costs; without a profile those of this engine, measured now, since the first predictions
        need a base. A modelled engine has given costs."""
        from mooncake_zmq.engine.modelled import ModelledEngine
        from mooncake_zmq.engine.own_costs import measured

        costs = self.plan.costs
        if not costs.are_default:
            return costs
        if isinstance(engine, ModelledEngine):
            return costs.computing_as(engine.costs)
        most = self.plan.settings.chunk_tokens if self.plan.node.role == "prefill" else MEASURED_TOKENS
        costs = measured(engine, costs, most_tokens=most)
        log.info("engine_measured", token_s=costs.prefill_token_s, step_s=costs.step_s(1, 0))
        return costs

    # --- works

    def open_executor(
        self,
        emit: Callable[[WorkProgress | WorkDone[Result]], None],
        segment: Segment | None,
        engine: Engine | None,
        disk: Disk | None,
        served: str = "",
    ) -> "Executor | Generation | None":
        """Open the executor of the actor's works; None for a role that has none. The caller closes it. `served`: the name
        of the vLLM's model."""
        plan, node = self.plan, self.plan.node
        if node.role == "conductor":
            return None
        if node.role == "vllm":
            from mooncake_zmq.runtime.generation import Generation

            return Generation(
                plan.settings.url,
                connect_s=plan.settings.probe_timeout_s,
                emit=emit,
                on_crash=self.lifecycle.on_crash,
                embeds=plan.loaded.config.model.task == "embed",
                model=served,
                subscribe=self._subscribe if plan.settings.kv_events else None,
            )
        from mooncake_zmq.runtime.executor.executor import Executor

        has_loans = node.role == "decode" and (plan.settings.lend_tokens or plan.settings.borrow)
        lending = self._lending(engine) if engine and has_loans else None
        executor = Executor(
            self._directory(segment),
            engine=engine,
            runtime_dir=plan.runtime_dir,
            emit=emit,
            on_crash=self.lifecycle.on_crash,
            disk=disk,
            verify_local=plan.settings.pool.verify_local if engine else True,
            sockets=self.sockets,
            grammars=self._grammars() if engine else None,
            lending=lending,
        )
        self.facts.threads["data_reader"] = executor.read_counts
        return executor

    def _lending(self, engine: Engine) -> "Callable[[Callable[[BaseException], None]], Lending]":
        """Return what makes the decode lend and borrow."""
        from mooncake_zmq.engine.llama import Llama
        from mooncake_zmq.runtime.executor.lending import Lending, why_not

        plan, endpoint = self.plan, self.plan.endpoint
        if refusal := why_not(engine):
            raise ConfigError(f"{plan.node.name}: decode.lend_tokens and decode.borrow: {refusal}")
        assert isinstance(engine, Llama)
        sealed = self.sockets.seals(endpoint)

        def make(on_crash: Callable[[BaseException], None]) -> Lending:
            try:
                timeout_s = plan.settings.lender_timeout_s
                return Lending(engine, endpoint, plan.peer_endpoints, sealed=sealed, timeout_s=timeout_s, on_crash=on_crash)
            except OSError as error:
                raise _no_stream_port(0, endpoint, error) from error

        return make

    def _directory(self, segment: Segment | None) -> SegmentDirectory:
        """Return the directory of the own segment, and of those of peers as they connect."""
        node, shm_dir = self.plan.node, Path(self.plan.loaded.config.cluster.shm_dir)
        return SegmentDirectory(node.name, self.lifecycle.incarnation, node.host, self.plan.layout, segment, self.cuda, shm_dir)

    def _grammars(self) -> Grammars:
        """Return the grammars of the model, whose tokenizer is opened at the first constraint."""
        model = self.plan.model
        grammars = Grammars(str(model.path), model.spec.vocab_size)
        self.facts.threads["grammar_processes"] = grammars.counts
        return grammars

    # --- telemetry

    def open_otlp(self) -> "Otlp | None":
        """Open the export of a gateway's spans to a collector, if one is configured."""
        endpoint = self.plan.settings.otlp_endpoint
        if not endpoint:
            return None
        from mooncake_zmq.gateway.requests.otlp import Otlp, is_installed

        if not is_installed():
            raise ConfigError(f"gateway.otlp_endpoint needs the extra otel: {installing('otel')}")
        otlp = Otlp(endpoint, gateway=self.plan.node.name, on_crash=self.lifecycle.on_crash)
        self.stack.callback(otlp.close)
        self.facts.threads["otlp"] = otlp.counts
        return otlp

    def open_meter(self) -> Meter | None:
        """Open the files in which a gateway counts what API keys use, if they are configured. Raises ConfigError."""
        directory = self.plan.settings.usage_directory
        if not directory:
            return None
        try:
            meter = Meter(Path(directory).expanduser(), self.plan.node.name)
        except OSError as error:
            raise ConfigError(f"gateway.usage_directory: {directory}: {error.strerror}") from None
        self.stack.callback(meter.write)
        self.facts.threads["usage"] = meter.counts
        return meter

    def serve_metrics(self, snapshot: "Snapshot", also: "Callable[[], Iterable[Metric]]" = tuple) -> None:
        """Serve the node's metrics at its own port, if it has one; raises PortInUse."""
        node = self.plan.node
        if not node.metrics_port:
            return
        from mooncake_zmq.telemetry.metrics import page_of
        from mooncake_zmq.telemetry.metrics_endpoint import MetricsEndpoint

        try:
            host, port = node.metrics_host, node.metrics_port
            model = self.plan.model.spec.name if node.role in ENGINE_ROLES else ""  # a vLLM serves its own metrics
            self.stack.callback(MetricsEndpoint(host, port, page_of(snapshot, also, engine_of=model)).close)
        except OSError as error:
            raise PortInUse(f"metrics_host {host}, metrics_port {port}: {error.strerror}") from error


def _no_stream_port(port: int, endpoint: str, error: OSError) -> BadEndpoint:
    where = f"port {port}" if port else "a port"
    return BadEndpoint(f"cannot listen on {where} for streams of {endpoint}: {error}")


def _warm_up(engine: Engine) -> None:
    """Run a short prefill and a step, so that no request waits until a GPU's kernels are compiled and its libraries are
    opened."""
    import numpy as np

    began = time.monotonic()
    sequence = engine.new_sequence(8)
    engine.prefill(sequence, np.zeros(4, dtype=np.int32))
    engine.decode([sequence], np.zeros(1, dtype=np.int32))
    sequence.close()
    log.info("engine_warm", seconds=round(time.monotonic() - began, 3))


def _recovery(directory: Path, what: str) -> Callable[[int, int], None]:
    """Return a callback that reports to the log and to systemd how much of a disk's index is loaded."""

    def progress(done: int, total: int) -> None:
        log.info("ssd_recovery", directory=str(directory), what=what, done=done, of=total)
        notify.status(f"recovering {done} of {total} {what} from {directory}")
        notify.waiting()

    return progress
