"""The shell of one role's process: lock, memory, signals, and an end that leaves nothing behind.

`main` is the only way in. The operator's mistakes end it with one line on stderr and exit code 2; our bugs with a
traceback in the log and exit code 1; a drained or finished process with 0.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import math
import os
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import uvicorn
import zmq
from prometheus_client.metrics_core import Metric

from mooncake_zmq.config import ConfigError, Loaded, NodeSettings, check_local_reads, check_open, costs_of, gateway_warnings
from mooncake_zmq.core import asks
from mooncake_zmq.core.actor import Actor, Answered, Asked, FromClient, RestWanted, ShelfTold
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Hello, SegmentRef, StateTold
from mooncake_zmq.core.node import Node, Observe, printable
from mooncake_zmq.core.roles import BECOMES, ENGINE_ROLES, Role
from mooncake_zmq.core.session import Session
from mooncake_zmq.core.talk import Member, may_talk
from mooncake_zmq.core.watch import WATCH_S, Heard
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.gateway.http.api_keys import REFRESH_S, ApiKeys, api_keys_of
from mooncake_zmq.gateway.http.http_calls import Edge
from mooncake_zmq.gateway.http.reuse_port import LEAVE_S, SharedAddress
from mooncake_zmq.gateway.http.tls import Tls, tls_files_of
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.otlp import OTEL, Otlp, is_installed
from mooncake_zmq.gateway.requests.readiness import ClusterView
from mooncake_zmq.gateway.requests.request_log import Accounts
from mooncake_zmq.gateway.requests.requests import Requests
from mooncake_zmq.gateway.served_model import ServedModel
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.settings import KvEventsSettings, SsdSettings
from mooncake_zmq.pool.node.store_events import ShelfChanged
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.pool.ssd.disk_directory import DiskError
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.roles import PARTS, make_actor
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.executor import Executor
from mooncake_zmq.runtime.generation import Generation
from mooncake_zmq.runtime.kv_events import KvEventPublisher
from mooncake_zmq.runtime.kv_subscriber import KvSubscriber, Tell
from mooncake_zmq.runtime.model import learn
from mooncake_zmq.runtime.starvation import waits_for_cpu
from mooncake_zmq.runtime.vllm_server import ServerError, await_server
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime
from mooncake_zmq.telemetry import log as logs
from mooncake_zmq.telemetry.metrics import Snapshot, page_of
from mooncake_zmq.telemetry.metrics_endpoint import MetricsEndpoint
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment, DeviceSequence
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.own_files import make_own_directory, read_own, replace_own
from mooncake_zmq.transfer.process_lock import ProcessLock, ProcessLockError, is_alive
from mooncake_zmq.transfer.shared_memory import Segment, SharedMemoryError, sweep
from mooncake_zmq.transfer.sockets import BadEndpoint, Sockets

if TYPE_CHECKING:  # else where there is one: no other role needs it
    from mooncake_zmq.gateway.http.acceptor import Door

log = structlog.get_logger()
T = TypeVar("T")

PARENT_VARIABLE = "MOONCAKE_ZMQ_PARENT"
"""The pid of the `up` that started this process: when that dies, this one drains."""
BAD_INPUT = 2
PR_SET_PDEATHSIG = 1
HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PRIVATE_UMASK = 0o077
"""Sockets are made by ZeroMQ and files by SQLite and others, with what this leaves: a role makes nothing for other users."""
MAX_ASKS = 64
"""Of the operator's, taken at a time; further ones wait for the next signal."""
ASKED_ROLES: tuple[Role, ...] = ("conductor",)
READY_POLL_S = 0.1
CLOSE_S = 60.0
"""For what follows a drain: an SSD gets what DRAM alone holds, threads and memory are let go of."""
HTTP_CLOSE_S = 5
"""How long the last HTTP answers may take to be written out once the requests have ended; then connections are cut."""
HTTP_BACKLOG = 2048
LOG_LATE_S = 0.05
"""A request's line in the log is written so long after its end: by then its client has it."""
MEASURED_TOKENS = 128
"""The KV that a decode's steps are measured with."""
FILES_PER_PEER = 8
"""Descriptors that a gateway's conversation with a peer may take, while either side connects anew too."""


class PortInUse(OSError):
    """Somebody else listens where this process wants to."""


MISTAKES = (
    ConfigError,
    ModelError,
    ProcessLockError,
    SharedMemoryError,
    BadEndpoint,
    KeysError,
    DiskError,
    PortInUse,
    ServerError,
)
"""What the operator can put right: told in one line."""


def main(loaded: Loaded, name: str, *, role: Role | None = None, begin_as: Callable[[Role], object] = lambda role: None) -> int:
    """Run the node called `name` until it is told to stop; returns the exit code. `role`: another one that it may become.
    `begin_as` begins its next life in another role, and is called once everything of this one is released."""
    try:
        node = loaded.config.node(name)
        node = node.in_role(role or node.role)
        logs.configure(node=name, role=node.role, form=loaded.config.cluster.log_format, level=loaded.config.cluster.log_level)
        with ExitStack() as stack:
            process = _Process(loaded, node, stack)
            process.run()
        _hold_signals()
        if process.next_role is not None and not process.signals_seen:
            log.info("role_changes", to=process.next_role)
            notify.alive(f"becoming a {process.next_role}")
            begin_as(process.next_role)
    except MISTAKES as mistake:
        sys.stderr.write(f"mooncake-zmq: {name}: {mistake}\n")
        return BAD_INPUT
    except Exception:
        # The one place: a bug must not leave segments, sockets or threads behind, and must be seen.
        log.critical("crashed", exc_info=True)
        return 1
    return 0


class _Process:
    """Everything one life of one node holds; `stack` lets go of it in reverse order."""

    def __init__(self, loaded: Loaded, node: NodeSettings, stack: ExitStack) -> None:
        self.loaded, self.config, self.node, self.stack = loaded, loaded.config, node, stack
        self.settings = loaded.section(node)
        check_open(loaded, [node])
        check_local_reads(loaded, [node])
        cluster = self.config.cluster
        self.runtime_dir = Path(cluster.runtime_dir)
        _mind_early_signals()
        _follow_parent()
        os.umask(PRIVATE_UMASK)
        make_private(self.runtime_dir)
        lock = ProcessLock.acquire(self.runtime_dir, node.name)
        stack.callback(lock.release)
        self.incarnation = lock.incarnation
        for swept in sweep(cluster.shm_dir, cluster.name, lambda name, life: is_alive(self.runtime_dir, name, life)):
            log.warning("stale_segment_removed", path=str(swept))
        if node.device == "cuda":
            self._find_device()
        with notify.patience("waiting for the model"):
            self.model = learn(self.config, self.node)
        self.layout = self.model.layout(self.config.model.block_tokens)
        self._costs = self._configured_costs()
        self.signals_seen = 0
        self.drain_until = 0.0
        """When what is done before the end must have ended (monotonic clock); 0: there is no time for any."""
        self.crash: BaseException | None = None
        self.data_counts: dict[str, Mapping[str, float]] = {}
        """Counters of the data plane's threads, by part."""
        self.beside: list[Snapshot] = []
        """Counts and gauges of what is neither the actor nor such a thread; asked in the loop."""
        self.dumps: dict[str, Callable[[], Any]] = {}
        """What beside the actor has something to dump, by part."""
        self._shelf: deque[ShelfChanged] = deque()
        """What the store tells and the actor has not heard yet."""
        self._runtime: ZmqRuntime | None = None
        self._executor: Executor | None = None
        self.sockets = self._open_sockets()
        self.cuda = self._open_device() if node.device == "cuda" else None

    @property
    def runtime(self) -> ZmqRuntime:
        assert self._runtime is not None, "this process has no loop yet"
        return self._runtime

    @property
    def next_role(self) -> Role | None:
        """What the process is to become once this life is over; None: nothing."""
        return BECOMES[self.node.role] if self._runtime is not None and self._runtime.become else None

    def run(self) -> None:
        """Build the role, serve, and raise what a worker thread died of, if one did."""
        if self.node.role == "gateway":
            self._run_gateway()
        else:
            self._serve_actor()
        log.info("stopped")
        if self.crash is not None:
            raise self.crash

    # --- roles without clients

    def _serve_actor(self) -> None:
        config, node = self.config, self.node
        with notify.patience("allocating shared memory"):
            segment, segment_ref = self._make_segment()
        if node.may_become:
            self._slots(node.in_role(node.may_become))  # better told now than when it is asked to change
        if node.role == "vllm":
            with notify.patience("waiting for vLLM"):
                await_server(self.settings, self.model.max_model_len)
        engine = None
        if node.role in ENGINE_ROLES:
            with notify.patience("loading the engine"):
                engine = self._load_engine()
            with notify.patience("measuring the engine"):
                self._measure(engine)
        pool = self.settings if node.role == "cache-node" else None
        disk = self._open_disk(pool.ssd) if pool and pool.ssd.directory else None
        publisher = self._open_publisher(pool.kv_events) if pool and pool.kv_events.endpoint else None
        if pool and node.store_endpoint:
            self._serve_store(pool.objects, node)
        executor = self._make_executor(segment, engine, disk)
        self._runtime = ZmqRuntime(
            self._node(self._actor(disk), segment_ref),
            endpoint=config.endpoint(node),
            peers={name: self.config.endpoint(peer) for name, peer in self._peers.items()},
            executor=executor,
            publish=publisher.publish if publisher else None,
            answer=self._write_answer,
            sockets=self.sockets,
        )
        self.stack.callback(self.runtime.close)
        if isinstance(executor, Executor):
            self.data_counts["data_reader"] = executor.read_counts
            self._executor = executor
        if executor is not None:
            self.stack.callback(executor.close)  # before the runtime: its threads wake the runtime's loop
        self._attend()
        self.runtime.call(self._tell_of_shelf)
        self.runtime.call(self._ready)
        self.runtime.run()

    def _make_executor(self, segment: Segment | None, engine: Engine | None, disk: Disk | None) -> Executor | Generation | None:
        """What carries out the actor's works, if it has any."""
        node = self.node
        if node.role == "conductor":
            return None
        if node.role == "vllm":
            return Generation(
                self.settings.url,
                connect_s=self.settings.probe_timeout_s,
                emit=lambda event: self.runtime.post(event),
                on_crash=self._on_crash,
                subscribe=self._subscribe if self.settings.kv_events else None,
            )
        return Executor(
            node=node.name,
            incarnation=self.incarnation,
            host=node.host,
            layout=self.layout,
            segment=segment,
            engine=engine,
            runtime_dir=self.runtime_dir,
            emit=lambda event: self.runtime.post(event),
            on_crash=self._on_crash,
            disk=disk,
            verify_local=self.settings.pool.verify_local if engine else True,
            cuda=self.cuda,
            sockets=self.sockets,
            shm_dir=Path(self.config.cluster.shm_dir),
            grammars=self._grammars() if engine else None,
        )

    def _grammars(self) -> Grammars:
        """Of the model: its tokenizer is opened where a constraint is first asked for."""
        grammars = Grammars(str(self.model.path), self.model.spec.vocab_size)
        self.data_counts["grammar_processes"] = grammars.counts
        return grammars

    def _on_shelf(self, changed: ShelfChanged) -> None:
        """From the store's threads, and before there is a loop."""
        self._shelf.append(changed)
        if self._runtime is not None:
            self._runtime.call(self._tell_of_shelf)

    def _tell_of_shelf(self) -> None:
        while self._shelf:
            changed = self._shelf.popleft()
            self.runtime.handle(ShelfTold(changed.stored, changed.removed))

    def _open_sockets(self) -> Sockets:
        security = self.config.security
        directory = key_files.directory_of(security.keys)
        keys = key_files.load(directory, self.node.name) if directory else None
        if keys is not None:
            self.beside.append(lambda: ({}, {"keys_not_followed": float(bool(keys.not_followed))}))
        sockets = Sockets(
            keys,
            allow_plain_tcp=security.allow_plain_tcp,
            encrypt_bulk=security.encrypt_bulk,
            io_threads=1 if self.node.role in ("gateway", "conductor") else 0,
            on_crash=self._on_crash,
        ).borrow()
        self.stack.callback(sockets.give_back)
        self.data_counts["connections"] = sockets.counts
        return sockets

    def _load_engine(self) -> Engine:
        from mooncake_zmq.engine.cpu import chosen, lacking
        from mooncake_zmq.engine.modelled import ModelledEngine
        from mooncake_zmq.engine.weights import load_engine

        node = self.node
        if node.modelled:
            return ModelledEngine(self.model.spec, costs_of(node.modelled, f"{node.name}: backend"))
        sequences = partial(DeviceSequence, self.cuda) if self.cuda else None
        backend = chosen(node.prepared_for)
        why = {"reason": lacking()} if node.prepared_for == "auto" and backend == "numpy" else {}
        if str(self.model.path) != "toy":
            log.info("engine", backend=backend, device=node.device, threads=node.threads, **why)
        engine = load_engine(
            self.model.path, device=node.device, threads=node.threads, backend=node.prepared_for, sequences=sequences
        )
        if self.cuda:
            _warm_up(engine)
        return engine

    def _measure(self, engine: Engine) -> None:
        """Without a profile, what this engine takes is measured once: or the first predictions would rest on nothing. One that
        only takes time has it said."""
        from mooncake_zmq.engine.modelled import ModelledEngine
        from mooncake_zmq.engine.own_costs import measured

        costs = self._costs
        if not costs.are_nobodys:
            return
        if isinstance(engine, ModelledEngine):
            self._costs = costs.computing_as(engine.costs)
            return
        most = self.settings.chunk_tokens if self.node.role == "prefill" else MEASURED_TOKENS
        self._costs = measured(engine, costs, most_tokens=most)
        log.info("engine_measured", token_s=self._costs.prefill_token_s, step_s=self._costs.step_s(1, 0))

    def _make_segment(self) -> tuple[Segment | None, SegmentRef | None]:
        setting = PARTS[self.node.role].segment_setting
        if not setting:
            return None, None
        slots = self._slots(self.node)
        section = self.node.role.replace("-", "_")
        cluster = self.config.cluster
        create = partial(DeviceSegment.allocate, self.cuda) if self.cuda else Segment.create
        segment = create(
            cluster.shm_dir,
            cluster.name,
            self.node.name,
            self.layout,
            slots,
            self.incarnation,
            setting=f"{section}.{setting}",
        )
        self.stack.callback(segment.close)
        wanted = self.config.data_endpoint(self.node)
        try:
            server = DataServer(
                segment, wanted, stream_port=self.node.data_stream_port, on_crash=self._on_crash, sockets=self.sockets
            )
        except zmq.ZMQError as error:
            raise BadEndpoint(f"cannot listen on {wanted}: {error}") from error
        except OSError as error:
            where = f"port {self.node.data_stream_port}" if self.node.data_stream_port else "a port"
            raise BadEndpoint(f"cannot listen on {where} for streams of {wanted}: {error}") from error
        self.stack.callback(server.close)
        self.data_counts["data_server"] = server.counts
        if wanted.startswith("ipc://"):
            self.stack.callback(Path(wanted.removeprefix("ipc://")).unlink, missing_ok=True)
        handle = segment.handle if isinstance(segment, DeviceSegment) else b""
        device = segment.device if handle else b""
        return segment, SegmentRef(path=str(segment.path), endpoint=server.endpoint, slots=slots, device=device, handle=handle)

    def _slots(self, node: NodeSettings) -> int:
        """Of the segment that this node has; 0: it has none. Raises ConfigError for one that is too small."""
        setting, section = PARTS[node.role].segment_setting, node.role.replace("-", "_")
        slots = PARTS[node.role].segment_slots(self.loaded.section(node), self.layout)
        if setting and slots < 1:
            raise ConfigError(f"{section}.{setting} is less than one slot of {self.layout.slot_bytes} bytes")
        needed = self.layout.blocks_for(self.model.max_model_len)
        if node.role == "prefill" and slots < needed:
            raise ConfigError(
                f"{section}.{setting} holds {slots} blocks, and a request of model.max_model_len {self.model.max_model_len} "
                f"needs {needed}: raise it to {needed * self.layout.slot_bytes}, or lower max_model_len"
            )
        return slots

    def _find_device(self) -> None:
        """Before a model is made ready for one that is not there. Raises ConfigError."""
        from mooncake_zmq.engine.backend import array_namespace, keep_kernels_in
        from mooncake_zmq.engine.prepare import default_cache_dir

        cache_dir = self.config.model.cache_dir
        keep_kernels_in(Path(cache_dir) if cache_dir else default_cache_dir())
        try:
            array_namespace(self.node.device)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _open_device(self) -> Cuda:
        try:
            cuda = Cuda.open(self.layout)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.stack.callback(cuda.close)
        self.data_counts["cuda"] = cuda.counts
        log.info("device_open", device="cuda", uuid=cuda.uuid.hex())
        return cuda

    def _open_disk(self, ssd: SsdSettings) -> Disk:
        path = Path(ssd.directory) / self.node.name
        progress = _recovery(path, "blocks")
        disk = Disk.open(path, self.layout, ssd.bytes, threads=ssd.threads, progress=progress)
        self.stack.callback(disk.close)
        self.data_counts["disk"] = disk.counts
        log.info("ssd_open", directory=ssd.directory, slots=disk.slots, blocks=len(disk.recovered), direct=disk.direct)
        return disk

    def _open_store_disk(self, objects: ObjectSettings) -> ObjectDisk:
        path = Path(objects.ssd.directory) / f"{self.node.name}.objects"
        disk = ObjectDisk.open(path, objects.slab_bytes, _recovery(path, "values"))
        self.stack.callback(disk.close)
        log.info("store_ssd_open", directory=str(path), values=len(disk.recovered), direct=disk.direct)
        return disk

    def _serve_store(self, objects: ObjectSettings, node: NodeSettings) -> None:
        disk = self._open_store_disk(objects) if objects.ssd.directory else None
        try:
            store = StoreServer(
                settings=objects,
                directory=self.config.cluster.shm_dir,
                cluster=self.config.cluster.name,
                node=self.node.name,
                incarnation=self.incarnation,
                endpoint=node.store_endpoint,
                stream_port=node.store_stream_port,
                on_crash=self._on_crash,
                disk=disk,
                sockets=self.sockets,
                on_shelf=self._on_shelf,
            )
        except zmq.ZMQError as error:
            raise BadEndpoint(f"cannot listen on store_endpoint {node.store_endpoint}: {error}") from error
        except OSError as error:
            where = f"port {node.store_stream_port}" if node.store_stream_port else "a port"
            raise BadEndpoint(f"cannot listen on {where} for streams of {node.store_endpoint}: {error}") from error
        self.stack.callback(lambda: store.close(self.drain_until, lambda: self.signals_seen > 1))
        self.dumps["store"] = lambda: {"counts": dict(store.counts), "gauges": store.gauges()}
        self.beside.append(lambda: (_named("store", store.counts), _named("store", store.gauges())))
        log.info("store_open", endpoint=store.endpoint, bytes=objects.object_bytes)

    def _open_publisher(self, events: KvEventsSettings) -> KvEventPublisher:
        publisher = KvEventPublisher(
            events.endpoint,
            replay_endpoint=events.replay_endpoint,
            topic=events.topic,
            format=events.format,
            block_tokens=self.layout.block_tokens,
            on_crash=self._on_crash,
            sockets=self.sockets,
        )
        self.stack.callback(publisher.close)
        self.data_counts["kv_events"] = publisher.counts
        return publisher

    def _subscribe(self, tell: Tell) -> KvSubscriber:
        settings = self.settings
        try:
            subscriber = KvSubscriber(
                settings.kv_events,
                replay_endpoint=settings.kv_events_replay,
                topic=settings.kv_events_topic,
                tell=tell,
                on_crash=self._on_crash,
            )
        except zmq.ZMQError as error:
            raise BadEndpoint(f"vllm.kv_events {settings.kv_events}: {error}") from error
        self.data_counts["kv_subscriber"] = subscriber.counts
        return subscriber

    def _actor(self, disk: Disk | None = None) -> Actor:
        found = None
        if disk:
            found = DiskContents(disk.slots, disk.recovered)
            disk.recovered = ()  # the actor's columns hold it from here on
        return make_actor(
            self.node.role,
            name=self.node.name,
            host=self.node.host,
            incarnation=self.incarnation,
            settings=self._actor_settings(),
            layout=self.layout,
            costs=self._costs,
            disk=found,
            may_become=self.node.may_become,
        )

    def _configured_costs(self) -> Costs:
        try:
            self.config.costs.check_model(self.model.spec.fingerprint)
        except ValueError as error:
            raise ConfigError(f"costs.profile: {error}") from None
        # The cost model needs the model's own size, whatever the file says.
        return replace(self.config.costs, kv_bytes_per_token=self.model.spec.kv_bytes_per_token)

    def _actor_settings(self) -> Any:
        """The section of the role, with what the file cannot know."""
        settings = self.settings
        match self.node.role:
            case "gateway":
                requests = settings.requests
                conductors = requests.conductors or tuple(node.name for node in self.config.of_role("conductor"))
                return replace(requests, conductors=conductors)
            case "conductor" if not settings.members:
                nodes = self.config.of_role("prefill", "decode", "cache-node", "vllm")
                return replace(settings, members=tuple(node.name for node in nodes))
        return settings

    # --- the gateway

    def _run_gateway(self) -> None:
        from mooncake_zmq.gateway.http.acceptor import new_loop

        with asyncio.Runner(loop_factory=partial(new_loop, tls=bool(self.settings.tls_certificate))) as runner:
            runner.run(self._serve_gateway())

    async def _serve_gateway(self) -> None:
        from mooncake_zmq.engine.tokenizer import open_tokenizer
        from mooncake_zmq.gateway.http.acceptor import Door, server_config
        from mooncake_zmq.gateway.http.app import create_app

        shared = self.settings.reuse_port
        # Where others serve too, nobody is to meet us before we can.
        listener = (claim if shared else listen)(self.settings.http_host, self.settings.http_port, share=shared)
        self.stack.callback(listener.close)
        tokenizer = open_tokenizer(self.model.path)
        requests = self._actor()
        assert isinstance(requests, Requests)
        accounts = Accounts(lambda account: edge.ended(account))
        self._runtime = ZmqRuntime(
            self._node(requests, None, accounts.observe),
            endpoint=self.config.endpoint(self.node),
            peers={name: self.config.endpoint(peer) for name, peer in self._peers.items()},
            deliver=lambda effect: edge.deliver(effect),
            sockets=self.sockets,
        )
        files = tls_files_of(self.settings.tls_certificate, self.settings.tls_key)
        tls = Tls(files) if files else None
        if tls:
            self.runtime.every(REFRESH_S, tls.refresh)
        for text in gateway_warnings(self.settings):
            log.warning("gateway_is_open", reason=text)
        path = api_keys_of(self.settings.api_keys)
        api_keys = ApiKeys(path, self.settings.requests.max_open) if path else None
        if api_keys:
            self.runtime.every(REFRESH_S, api_keys.refresh)
        otlp = self._open_otlp()
        edge = Edge(
            name=self.node.name,
            incarnation=self.incarnation,
            model=ServedModel(
                id=self.model.spec.name,
                max_model_len=self.loaded.longest_request(self.model.max_model_len, self.layout.block_tokens),
                vocab_size=min(self.model.spec.vocab_size, tokenizer.vocab_size),
                block_tokens=self.layout.block_tokens,
                model_fingerprint=self.model.spec.fingerprint,
                layout_fingerprint=self.layout.fingerprint,
                tokenizer=tokenizer,
                foreign=self.model.foreign,
            ),
            settings=self.settings.edge,
            max_open=self.settings.requests.max_open,
            backing=_Backing(self.runtime, requests, self._data),
            tenants=api_keys.tenants if api_keys else None,
            allow_open=self.settings.allow_open,
            listed=[Listed(node.name, node.role, node.host) for node in self.config.nodes],
            about={
                "cluster": self.config.cluster.name,
                "block_tokens": self.layout.block_tokens,
                "block_bytes": self.layout.block_bytes,
                "ttft_slo_s": self.config.conductor.ttft_slo_s,
                "tbt_slo_s": self.config.conductor.tbt_slo_s,
            },
            export=otlp.tell if otlp else lambda account, names: None,
        )
        self.dumps["edge"] = lambda: {"counts": edge.own_counts(), "gauges": edge.own_gauges()}
        self.beside.append(lambda: (edge.own_counts(), edge.own_gauges()))
        server = _Server(server_config(create_app(edge, self.settings.cors_origins), self.settings.connections))
        door = Door(
            server,
            listener,
            self.settings.connections,
            send_timeout_s=self.settings.edge.send_timeout_s,
            reserved_files=64 + FILES_PER_PEER * len(self._peers),
            tls=(lambda: tls.context) if tls else None,
            count=edge.count,
        )
        self.stack.callback(lambda: door.listener.close())  # maybe another one by then
        self.stack.callback(door.close)
        self.stack.callback(edge.close)
        edge.listens = lambda: door.listens
        stopped = asyncio.Event()
        try:
            if self.node.metrics_port:
                self._serve_metrics(lambda: ({}, {}), lambda: self._in_loop(lambda: [*edge.metrics.registry.collect()]))
            self._attend(on_drain=edge.drain, before_drain=partial(_leave_first, door.leave) if shared else None)
            edge.later = partial(asyncio.get_running_loop().call_later, LOG_LATE_S)
            self.runtime.attach(asyncio.get_running_loop(), stopped.set, self._on_crash)
            serving = asyncio.create_task(server.serve(sockets=[]))
            opening = asyncio.create_task(self._open(door, listener, edge))
            announcing = asyncio.create_task(self._announce(edge))
            await asyncio.wait([serving, asyncio.create_task(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
            announcing.cancel()
            opening.cancel()
            door.close()
            server.should_exit = True
            asyncio.get_running_loop().call_later(0 if self.signals_seen > 1 else HTTP_CLOSE_S, door.abort)
            await serving
        finally:
            self.runtime.close()

    def _open_otlp(self) -> Otlp | None:
        endpoint = self.settings.otlp_endpoint
        if not endpoint:
            return None
        if not is_installed():
            raise ConfigError(f"gateway.otlp_endpoint needs the extra otel: {OTEL}")
        otlp = Otlp(endpoint, gateway=self.node.name, model=self.model.spec.name, on_crash=self._on_crash)
        self.stack.callback(otlp.close)
        self.data_counts["otlp"] = otlp.counts
        return otlp

    # --- what every role has

    def _node(self, actor: Actor, segment: SegmentRef | None, observe: Observe | None = None) -> Node:
        session = self._session(segment)
        return Node(actor, session, layout=self.layout, facts=self._facts, state=self._state, observe=observe)

    def _session(self, segment: SegmentRef | None) -> Session:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            role=self.node.role,
            host=self.node.host,
            model=self.model.spec.fingerprint,
            tokenizer=self.model.tokenizer,
            layout=self.layout.fingerprint,
            segment=segment,
            may_become=self.node.may_become,
            part=self.settings.part if self.node.role == "vllm" else "both",
        )
        return Session(
            me=self.node.name,
            incarnation=self.incarnation,
            hello=hello,
            peers={name: Member(peer.roles, peer.host) for name, peer in self._peers.items()},
            settings=self.config.session,
            now=time.monotonic(),
            starved=partial(waits_for_cpu, self.runtime_dir),
        )

    @cached_property
    def _peers(self) -> dict[str, NodeSettings]:
        """Those that this process keeps a conversation with, by name."""
        node, config = self.node, self.config
        parts = {self.loaded.section(node).part for node in config.of_role("vllm")}
        talk = partial(may_talk, pipelines=config.conductor.pipeline_stages > 1, watched=True, apart=len(parts) > 1)
        return {
            peer.name: peer
            for peer in config.nodes
            if peer.name != node.name and talk(node.roles, node.host, peer.roles, peer.host)
        }

    def _attend(self, on_drain: Any = lambda: None, before_drain: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Signals, watchdog, metrics: what the operator and systemd see of the loop. `before_drain` is given what begins it."""
        runtime = self.runtime

        def drain() -> None:
            log.info("draining")
            notify.stopping("draining", self.config.cluster.drain_timeout_s + CLOSE_S)
            on_drain()
            runtime.drain()

        def on_signal(number: int, _frame: object) -> None:
            self.signals_seen += 1
            if self.signals_seen > 1:
                runtime.call(runtime.stop)
                return
            self.drain_until = time.monotonic() + self.config.cluster.drain_timeout_s
            runtime.call(drain if before_drain is None else partial(before_drain, lambda: runtime.call(drain)))
            runtime.call(lambda: runtime.every(self.config.cluster.drain_timeout_s, give_up))

        def give_up() -> None:
            log.warning("drain_timed_out")
            runtime.hand_over()

        def look_at_own_key() -> None:
            if self.sockets.keys is not None and self.sockets.keys.own_is_dropped and not self.signals_seen:
                log.error("own_key_dropped", path=str(self.sockets.keys.path))
                on_signal(signal.SIGTERM, None)

        runtime.every(REFRESH_S, look_at_own_key)
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGUSR1, lambda *_: runtime.call(self._write_dump))
        signal.signal(signal.SIGUSR2, lambda *_: runtime.call(self._take_asks))
        if watchdog_s := notify.watchdog_s():
            runtime.every(watchdog_s / 2, lambda: self._show_life(watchdog_s))
        if self.node.metrics_port and self.node.role != "gateway":
            self._serve_metrics(self._snapshot)
        log.info("started", incarnation=self.incarnation, endpoint=runtime.endpoint, pid=os.getpid())
        if self.crash is not None:
            runtime.stop()

    def _show_life(self, patience_s: float) -> None:
        """The loop's own word that it turns, and none while the engine's thread is stuck: the service manager then ends us."""
        overdue_s = self._executor.engine_overdue_s() if self._executor else 0.0
        if overdue_s > patience_s:
            log.error("engine_stuck", overdue_s=round(overdue_s, 1))
            notify.status(f"the engine is {overdue_s:.0f} s past the deadline of its work")
            return
        notify.alive(self._status())

    def _status(self) -> str:
        session = self.runtime.node.session
        doing = "draining" if self.signals_seen else "resting" if self.runtime.node.resting else "serving"
        return f"{doing}; hears {len(session.up_peers)} of {len(self._peers)} peers"

    def _ready(self) -> None:
        gc.collect()
        gc.freeze()  # what is there from the start stays to the end: the collector need not look at it again and again
        log.info("ready")
        notify.ready("serving")

    async def _open(self, door: "Door", listener: socket.socket, edge: Edge) -> None:
        if not self.settings.reuse_port:
            await door.open()
            return
        while not self._may_open(edge):
            await asyncio.sleep(READY_POLL_S)
        listener.listen(HTTP_BACKLOG)
        await door.open()
        self._mind_address(door, edge)

    def _may_open(self, edge: Edge) -> bool:
        """One that rests may, too: it is there, to be told to serve again."""
        return edge.may_open and not self.signals_seen

    def _mind_address(self, door: "Door", edge: Edge) -> None:
        """See `gateway.http.reuse_port`."""
        here, node = (self.settings.http_host, self.settings.http_port), self.runtime.node
        address = SharedAddress(door, self._sharers(), partial(listen, *here, share=True), partial(is_deserted, *here))
        node.defers_rest = True

        def mind() -> None:
            if self.signals_seen:
                return
            if node.rest_wanted:
                self.runtime.look(WATCH_S)
            if address.mind(node.rest_wanted, edge.overview.seen) and not node.resting:
                self.runtime.handle(RestWanted(True))

        self.runtime.every(READY_POLL_S, mind)

    def _sharers(self) -> list[str]:
        """The other gateways of this gateway's host and address."""
        here = self.settings.http_host, self.settings.http_port
        others = [node for node in self.config.of_role("gateway") if node.host == self.node.host and node != self.node]
        sections = {node.name: self.loaded.section(node) for node in others}
        return [name for name, section in sections.items() if (section.http_host, section.http_port) == here]

    async def _announce(self, edge: Edge) -> None:
        """Tell systemd once all is met that /ready asks for, and until then what is missing."""
        told_at = -math.inf
        while not self._may_open(edge):
            detail = edge.health()[1]
            if time.monotonic() - told_at >= notify.AGAIN_S:
                told_at = time.monotonic()
                notify.status(f"{detail['status']}: missing {', '.join(detail['missing'] or detail['not_heard']) or 'nothing'}")
                notify.waiting()
            await asyncio.sleep(READY_POLL_S)
        if not_heard := edge.backing.cluster().missing:
            log.warning("ready_without", nodes=list(not_heard))
        self._ready()

    def _on_crash(self, error: BaseException) -> None:
        """From any thread, and at any time: a data server already runs while there is no loop yet; `_attend` then stops it."""
        self.crash = error
        if self._runtime is not None:
            self._runtime.call(self._runtime.stop)

    def _serve_metrics(self, snapshot: Snapshot, also: Callable[[], Iterable[Metric]] = tuple) -> None:
        try:
            host, port = self.node.metrics_host, self.node.metrics_port
            model = self.model.spec.name if self.node.role in ENGINE_ROLES else ""  # a vLLM tells its own
            self.stack.callback(MetricsEndpoint(host, port, page_of(snapshot, also, engine_of=model)).close)
        except OSError as error:
            raise PortInUse(f"metrics_host {host}, metrics_port {port}: {error.strerror}") from error

    def _in_loop(self, look: Callable[[], T]) -> T:
        """What the loop's thread sees, asked for by another."""
        taken: Future[T] = Future()
        self.runtime.call(lambda: taken.set_result(look()))
        return taken.result(timeout=5)

    def _data(self) -> dict[str, float]:
        """Counts of the parts that run beside the loop."""
        return {name: value for part, counts in self.data_counts.items() for name, value in _named(part, counts).items()}

    def _snapshot(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return self._in_loop(self._facts)

    def _facts(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Counts and gauges of this process, for metrics and for who watches it."""
        parts = [(_counts(self.runtime), self.runtime.gauges()), (self._data(), {}), *(tell() for tell in self.beside)]
        return (
            {name: value for counts, _ in parts for name, value in counts.items()},
            {name: value for _, gauges in parts for name, value in gauges.items()},
        )

    def _state(self) -> dict[str, Any]:
        """All there is to know of this process."""
        state = {"node": self.node.name, "role": self.node.role, "incarnation": self.incarnation, **self.runtime.dump()}
        state |= {part: tell() for part, tell in self.dumps.items()}
        state["parts"] = {part: dict(counts) for part, counts in self.data_counts.items()}
        return state

    def _write_dump(self) -> None:
        path = self.runtime_dir / f"{self.node.name}.dump.json"
        try:
            replace_own(path, json.dumps(self._state(), default=printable, indent=1).encode())
        except OSError as error:  # a full disk is no reason to end
            log.warning("dump_failed", path=str(path), reason=error.strerror)
        else:
            log.info("dumped", path=str(path))

    def _take_asks(self) -> None:
        """What the operator left in the runtime directory, which is ours alone; see `operate.local_nodes`."""
        for path in sorted(self.runtime_dir.glob(f"{self.node.name}.ask.*.json"))[:MAX_ASKS]:
            ask_id = path.name.removeprefix(f"{self.node.name}.ask.").removesuffix(".json")
            try:
                content = read_own(path)
                path.unlink()
                ask = asks.decode(content)
            except FileNotFoundError:  # whoever asked gave up
                continue
            except OSError as error:
                log.warning("ask_unreadable", path=str(path), reason=error.strerror)
                continue
            except asks.AskError as error:
                self._write_answer(Answered(ask_id, {"error": str(error)}))
                continue
            if self.node.role not in ASKED_ROLES:
                self._write_answer(Answered(ask_id, {"error": f"{self.node.name} is a {self.node.role}: ask a conductor"}))
                continue
            log.info("asked", ask=repr(ask))
            self.runtime.handle(Asked(ask_id, ask))

    def _write_answer(self, answered: Answered) -> None:
        path = self.runtime_dir / f"{self.node.name}.answer.{answered.ask_id}.json"
        try:
            replace_own(path, json.dumps(answered.answer).encode())
        except OSError as error:
            log.warning("answer_failed", path=str(path), reason=error.strerror)


class _Backing:
    """What the HTTP edge asks of this process; see `gateway.http.http_calls.Backing`."""

    def __init__(
        self,
        runtime: ZmqRuntime,
        requests: Requests,
        beside: Callable[[], Mapping[str, float]],
    ) -> None:
        """`beside`: counts of the parts that run beside the loop."""
        self._runtime, self._requests, self._beside = runtime, requests, beside
        self._asked: OrderedDict[int, tuple[str, Callable[[StateTold], None]]] = OrderedDict()
        """Who waits for which node's state; who waits longer than `MAX_ASKS` others waits in vain."""
        runtime.node.on_state = self._on_state

    def inject(self, event: FromClient) -> None:
        self._runtime.handle(event)

    def peers(self) -> Mapping[str, Hello]:
        return self._runtime.node.session.up_peers

    def refusals(self) -> Mapping[str, str]:
        return self._runtime.node.session.refusals

    def cluster(self) -> ClusterView:
        return self._requests.cluster

    def counts(self) -> Mapping[str, float]:
        return {**_counts(self._runtime), **self._beside()}

    def gauges(self) -> Mapping[str, float]:
        return self._runtime.gauges()

    def resting(self) -> bool:
        return self._runtime.node.resting

    def look(self, for_s: float) -> None:
        self._runtime.look(for_s)

    def heard(self) -> Mapping[str, Heard]:
        node, now = self._runtime.node, time.monotonic()
        return {**node.looking.heard, node.session.me: Heard(now, node.session.incarnation, node.report(now))}

    def awaits_reports(self) -> bool:
        node = self._runtime.node
        return node.looking.awaits(node.session.lives)

    def ask_state(self, node: str, ask_id: int, tell: Callable[[StateTold], None]) -> None:
        if node == self._runtime.node.session.me:
            tell(StateTold(ask_id=ask_id, state=self._runtime.node.state(time.monotonic())))
            return
        self._asked[ask_id] = node, tell
        if len(self._asked) > MAX_ASKS:
            self._asked.popitem(last=False)
        self._runtime.ask_state(node, ask_id)

    def rest(self, node: str, resting: bool) -> None:
        self._runtime.rest(node, resting)

    def _on_state(self, sender: str, told: StateTold) -> None:
        node, tell = self._asked.get(told.ask_id, ("", None))
        if node == sender and tell is not None:
            del self._asked[told.ask_id]
            tell(told)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: this process has its own, which drain first. A `Door` lets its clients in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _leave_first(leave: Callable[[], None], drain: Callable[[], None]) -> None:
    """Who came before we left the address is still served; then the drain refuses what is new."""
    leave()
    asyncio.get_running_loop().call_later(LEAVE_S, drain)


def _warm_up(engine: Engine) -> None:
    """A short prefill and a step, so that no request waits while a GPU's kernels are compiled and its libraries are opened."""
    import numpy as np

    began = time.monotonic()
    sequence = engine.new_sequence(8)
    engine.prefill(sequence, np.zeros(4, dtype=np.int32))
    engine.decode([sequence], np.zeros(1, dtype=np.int32))
    sequence.close()
    log.info("engine_warm", seconds=round(time.monotonic() - began, 3))


def _recovery(directory: Path, what: str) -> Callable[[int, int], None]:
    """Tells the log and systemd how far a disk's index is loaded."""

    def progress(done: int, total: int) -> None:
        log.info("ssd_recovery", directory=str(directory), what=what, done=done, of=total)
        notify.status(f"recovering {done} of {total} {what} from {directory}")
        notify.waiting()

    return progress


def _named(part: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{part}_{name}": value for name, value in values.items()}


def _counts(runtime: ZmqRuntime) -> dict[str, float]:
    node = runtime.node
    return {**node.actor.counts, **_named("session", node.session.counts), **_named("zmq", runtime.counts)}


def claim(host: str, port: int, *, share: bool) -> socket.socket:
    """A socket that has an address for HTTP and does not listen yet; raises PortInUse. `share`: with others of this user that
    want to share it; the kernel lets nobody else in."""
    try:
        return _bound(host, port, share)
    except OSError as error:
        raise _in_use(host, port, error) from error


def is_deserted(host: str, port: int) -> bool:
    """Does nobody listen there? Whoever does keeps others from having the address, unless they too want to share it."""
    try:
        claim(host, port, share=False).close()
    except PortInUse:
        return False
    return True


def _bound(host: str, port: int, share: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off; else a first token waits 40 ms for the headers' ACK.
    claimed = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        claimed.setblocking(False)
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        claimed.bind((host, port))
    except OSError:
        claimed.close()
        raise
    return claimed


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A listening socket for HTTP; raises PortInUse."""
    listener = claim(host, port, share=share)
    try:
        listener.listen(HTTP_BACKLOG)
    except OSError as error:
        listener.close()
        raise _in_use(host, port, error) from error
    return listener


def _in_use(host: str, port: int, error: OSError) -> PortInUse:
    return PortInUse(f"cannot listen on {host}:{port}: {error.strerror or error}")


def make_private(runtime_dir: Path) -> None:
    """Our sockets and locks must be nobody else's: the directory is ours alone, or we do not use it."""
    try:
        make_own_directory(runtime_dir)
    except OSError as error:
        raise ConfigError(f"cluster.runtime_dir {runtime_dir}: {error.strerror}") from error


def _mind_early_signals() -> None:
    """Until the loop runs: a request for a dump is not deadly, and one to stop still lets go of everything."""

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)  # see `_hold_signals`


def _hold_signals() -> None:
    """What comes between this life and one that follows in the same process waits for the next one's handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)


def follow_parent() -> None:
    """This process, and what it becomes by exec, is told to end when the thread that started it does."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _follow_parent() -> None:
    """Drain when the `up` that started us dies, however it dies."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    follow_parent()
    if os.getppid() != int(parent):  # it died before we asked
        raise ConfigError("the process that started this one is gone")
