"""A gateway's process: HTTP, the actor and the runtime in one asyncio loop."""

import asyncio
import contextlib
import math
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import structlog
import uvicorn
from prometheus_client.metrics_core import Metric

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import GatewaySettings
from mooncake_zmq.config.warnings import gateway_warnings
from mooncake_zmq.core.actor import CordonWanted, FromClient
from mooncake_zmq.core.messages import Hello, StateReported
from mooncake_zmq.core.watch import WATCH_S, PeerReport
from mooncake_zmq.gateway.http.api_keys import REFRESH_S, ApiKeys, api_keys_of
from mooncake_zmq.gateway.http.edge import Edge
from mooncake_zmq.gateway.http.reuse_port import SharedAddress, leave_first
from mooncake_zmq.gateway.http.tls import Tls, tls_files_of
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.history import STEP_S
from mooncake_zmq.gateway.requests.readiness import ClusterView
from mooncake_zmq.gateway.requests.request_log import RequestLog
from mooncake_zmq.gateway.requests.requests import Requests
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.facts import counts_of
from mooncake_zmq.runtime.listening import begin, claim, is_deserted, listen
from mooncake_zmq.runtime.model import Model
from mooncake_zmq.runtime.node_process import NodeProcess
from mooncake_zmq.runtime.parts import Parts
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime
from mooncake_zmq.telemetry.usage import WRITE_S

log = structlog.get_logger()

READY_POLL_S = 0.1
HTTP_CLOSE_S = 5
"""How long the last HTTP answers may take to be written after the requests have ended; then connections are cut."""
LOG_LATE_S = 0.05
"""A request's log line is written so long after its end: by then its client has the answer."""
FILES_PER_PEER = 8
"""Descriptors that the connections of a gateway and a peer may take, while both sides reconnect."""
MAX_STATES_ASKED = 64
"""Most pending requests for nodes' states; beyond that the oldest gets no answer."""


class GatewayProcess(NodeProcess):
    """Own the edge, the acceptor, the HTTP server and the runtime of one gateway, as the edge's `Backing`."""

    def __init__(self, parts: Parts) -> None:
        """Raise PortInUse, ConfigError, or an error of opening the certificate, the API keys or the tokenizer."""
        from mooncake_zmq.gateway.http.acceptor import Acceptor, server_config
        from mooncake_zmq.gateway.http.app import create_app
        from mooncake_zmq.gateway.http.auth import name_of

        super().__init__(parts)
        settings = self.settings
        # A shared address is only claimed: no client is to connect before this gateway can serve.
        self._listener = (claim if settings.reuse_port else listen)(*self._address, share=settings.reuse_port)
        parts.stack.callback(self._listener.close)
        self._states_asked: OrderedDict[int, tuple[str, Callable[[StateReported], None]]] = OrderedDict()
        requests = self.make_actor(self.plan.costs)
        assert isinstance(requests, Requests)
        self._requests = requests
        files = tls_files_of(settings.tls_certificate, settings.tls_key)
        self._tls = Tls(files) if files else None
        for text in gateway_warnings(settings):
            log.warning("gateway_is_open", reason=text)
        keys = api_keys_of(settings.api_keys)
        self._api_keys = ApiKeys(keys, settings.requests.max_open) if keys else None
        self.edge = self._make_edge()
        self._runtime = self._make_runtime()
        self._server = _Server(server_config(create_app(self.edge, settings.cors_origins), settings.connections))
        self.acceptor = Acceptor(
            self._server,
            self._listener,
            settings.connections,
            send_timeout_s=settings.edge.send_timeout_s,
            reserved_files=64 + FILES_PER_PEER * len(self.plan.peers),
            tls=self._tls_context if self._tls else None,
            whose=partial(name_of, self.edge.tenants),
            count=self.edge.count,
        )
        parts.stack.callback(self._close_listener)
        parts.stack.callback(self.acceptor.close)
        parts.stack.callback(self.edge.ended.close)

    @property
    def settings(self) -> GatewaySettings:
        found: GatewaySettings = self.plan.settings
        return found

    @property
    def _address(self) -> tuple[str, int]:
        return self.settings.http_host, self.settings.http_port

    # --- components

    def _make_edge(self) -> Edge:
        config, layout, settings = self.plan.loaded.config, self.plan.layout, self.settings
        otlp = self.parts.open_otlp()
        edge = Edge(
            name=self.plan.node.name,
            incarnation=self.lifecycle.incarnation,
            models=self._served_models(),
            settings=settings.edge,
            max_open=settings.requests.max_open,
            backing=self,
            tenants=self._api_keys.tenants if self._api_keys else None,
            allow_open=settings.allow_open,
            listed=[Listed(node.name, node.role, node.host, node.model) for node in config.nodes],
            about={
                "cluster": config.cluster.name,
                "block_tokens": layout.block_tokens,
                "block_bytes": layout.block_bytes,
                "ttft_slo_s": config.conductor.ttft_slo_s,
                "tbt_slo_s": config.conductor.tbt_slo_s,
            },
            export=otlp.export if otlp else lambda entry, names: None,
            meter=self.parts.open_meter(),
            answers=settings.answers,
            parsers=self._requests.readings.offered,
        )
        self.parts.facts.dumps["edge"] = lambda: {"counts": edge.own_counts(), "gauges": edge.own_gauges()}
        self.parts.facts.beside.append(lambda: (edge.own_counts(), edge.own_gauges()))
        return edge

    def _served_models(self) -> ServedModels:
        """Return all models of the deployment. Raises ConfigError if two have a name in common."""
        plan = self.plan
        each = zip((plan.model, *plan.others), plan.loaded.of_each, strict=True)
        try:
            return ServedModels(
                *(_served(plan.layouts[model.identity], model, loaded, bool(plan.others)) for model, loaded in each)
            )
        except ValueError as error:
            raise ConfigError(f"{plan.loaded.path}: models: {error}") from None

    def _make_runtime(self) -> ZmqRuntime:
        node = self.make_node(
            self._requests,
            observe=RequestLog(self.edge.ended.add).observe,
            on_state=self._on_state,
            part=self.edge.overview.part,
        )
        runtime = ZmqRuntime(
            node,
            endpoint=self.plan.endpoint,
            peers=self.plan.peer_endpoints,
            deliver=self.edge.calls.deliver,
            sockets=self.parts.sockets,
        )
        runtime.every(STEP_S, self.edge.sample)
        if self.edge.meter is not None:
            runtime.every(WRITE_S, self.edge.meter.write)
        for file in (self._tls, self._api_keys):
            if file is not None:
                runtime.every(REFRESH_S, file.refresh)
        return runtime

    def _tls_context(self) -> ssl.SSLContext:
        """Return the context for a new connection: the certificate may have changed."""
        assert self._tls, "this gateway serves HTTP in clear"
        return self._tls.context

    def _close_listener(self) -> None:
        """Close the acceptor's present listener, which may not be the first one."""
        self.acceptor.listener.close()

    # --- serving

    def serve(self) -> None:
        from mooncake_zmq.gateway.http.acceptor import new_loop

        with asyncio.Runner(loop_factory=partial(new_loop, tls=self._tls is not None)) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        try:
            self.parts.serve_metrics(lambda: ({}, {}), lambda: self.in_loop(self._collect_metrics))
            self.attend()
            self.runtime.attach(loop, stopped.set, self.lifecycle.on_crash)
            serving = asyncio.create_task(self._server.serve(sockets=[]))
            opening = asyncio.create_task(self._open())
            announcing = asyncio.create_task(self._announce(opening))
            announcing.add_done_callback(partial(_report_error, self.lifecycle.on_crash))
            await asyncio.wait([serving, asyncio.create_task(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
            announcing.cancel()
            opening.cancel()
            self.acceptor.close()
            self._server.should_exit = True
            loop.call_later(0 if self.lifecycle.is_urgent() else HTTP_CLOSE_S, self.acceptor.abort)
            await serving
        finally:
            self.runtime.close()

    def _collect_metrics(self) -> list[Metric]:
        return [*self.edge.metrics.registry.collect()]

    async def _open(self) -> None:
        """Accept connections; at a shared address only once the gateway can serve."""
        if not self.settings.reuse_port:
            await self.acceptor.open()
            return
        while not self._may_open():
            await asyncio.sleep(READY_POLL_S)
        begin(self._listener)
        await self.acceptor.open()
        self.runtime.node.defer_cordon()
        self.runtime.every(READY_POLL_S, partial(self._follow_cordon, self._shared_address()))

    def _may_open(self) -> bool:
        """Return whether the gateway can serve; a cordoned one accepts connections too, so that it can be uncordoned."""
        return self.edge.may_open and not self.lifecycle.signals_seen

    def _shared_address(self) -> SharedAddress:
        listen_again = partial(listen, *self._address, share=True)
        return SharedAddress(self.acceptor, self._sharers(), listen_again, partial(is_deserted, *self._address))

    def _sharers(self) -> list[str]:
        """Return the other gateways of this gateway's host and address."""
        loaded, own = self.plan.loaded, self.plan.node
        others = [node for node in loaded.config.of_role("gateway") if node.host == own.host and node != own]
        sections = {node.name: loaded.section(node) for node in others}
        return [name for name, section in sections.items() if (section.http_host, section.http_port) == self._address]

    def _follow_cordon(self, address: SharedAddress) -> None:
        """Leave the shared address before calls are refused, and return later; see `gateway.http.reuse_port`."""
        node = self.runtime.node
        if self.lifecycle.signals_seen:
            return
        if node.cordon_wanted:
            self.runtime.look(WATCH_S)
        if address.mind(node.cordon_wanted, self.edge.overview.seen) and not node.cordoned:
            self.runtime.handle(CordonWanted(True))

    async def _announce(self, opening: asyncio.Task[None]) -> None:
        """Report readiness to systemd once everything that /ready requires is there and connections are accepted, and until
        then what is missing."""
        reported_at = -math.inf
        while not self._may_open():
            detail = self.edge.health()[1]
            if time.monotonic() - reported_at >= notify.AGAIN_S:
                reported_at = time.monotonic()
                notify.status(
                    f"{detail['status']}: missing {', '.join(detail['missing'] or detail['not_connected']) or 'nothing'}"
                )
                notify.waiting()
            await asyncio.sleep(READY_POLL_S)
        await opening
        if missing := self.cluster().missing:
            log.warning("ready_without", nodes=list(missing))
        self.report_ready()

    def begin_drain(self) -> None:
        """Serve the clients that connected before a shared address was left; then the drain refuses new calls."""
        if not self.settings.reuse_port:
            self.drain()
            return
        leave_first(self.acceptor, partial(self.runtime.call, self.drain))

    def drain(self) -> None:
        self.edge.drain()
        super().drain()

    # --- the edge's `Backing`; see `gateway.http.backing`

    def inject(self, event: FromClient) -> None:
        self.runtime.handle(event)

    def peers(self) -> Mapping[str, Hello]:
        return self.runtime.node.session.up_peers

    def refusals(self) -> Mapping[str, str]:
        return self.runtime.node.session.refusals

    def departed(self) -> Sequence[str]:
        return self.runtime.node.session.departed

    def cluster(self) -> ClusterView:
        return self._requests.cluster

    def counts(self) -> Mapping[str, float]:
        return {**counts_of(self.runtime), **self.parts.facts.of_threads(), **self.parts.facts.of_itself()[0]}

    def gauges(self) -> Mapping[str, float]:
        return {**self.runtime.gauges(), **self.parts.facts.of_itself()[1]}

    def cordoned(self) -> bool:
        return self.runtime.node.cordoned

    def is_listening(self) -> bool:
        return self.acceptor.listens

    def call_later(self, write: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(LOG_LATE_S, write)

    def look(self, for_s: float) -> None:
        self.runtime.look(for_s)

    def last_reports(self) -> Mapping[str, PeerReport]:
        node, now = self.runtime.node, time.monotonic()
        return {**node.looking.reports, node.session.me: PeerReport(now, node.session.incarnation, node.report(now))}

    def awaits_reports(self) -> bool:
        node = self.runtime.node
        return node.looking.awaits(node.session.incarnations)

    def ask_state(self, node: str, ask_id: int, on_answer: Callable[[StateReported], None], part: str = "") -> None:
        own = self.runtime.node
        if node == own.session.me:
            on_answer(StateReported(ask_id=ask_id, state=own.state(time.monotonic())))
            return
        self._states_asked[ask_id] = node, on_answer
        if len(self._states_asked) > MAX_STATES_ASKED:
            self._states_asked.popitem(last=False)
        self.runtime.ask_state(node, ask_id, part)

    def set_cordon(self, node: str, cordoned: bool) -> None:
        self.runtime.set_cordon(node, cordoned)

    def _on_state(self, sender: str, answer: StateReported) -> None:
        node, on_answer = self._states_asked.get(answer.ask_id, ("", None))
        if node == sender and on_answer is not None:
            del self._states_asked[answer.ask_id]
            on_answer(answer)


def _report_error(on_crash: Callable[[BaseException], None], ended: asyncio.Task[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()):
        on_crash(error)


def _served(layout: BlockLayout, model: Model, loaded: Loaded, one_of_several: bool) -> ServedModel:
    """Return a model of a deployment as clients know it."""
    from mooncake_zmq.engine.key_cache import KeyCache
    from mooncake_zmq.engine.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(model.path)
    return ServedModel(
        id=model.spec.name,
        max_model_len=loaded.longest_request(model.max_model_len, layout.block_tokens),
        max_positions=model.max_model_len,
        vocab_size=min(model.spec.vocab_size, tokenizer.vocab_size),
        block_tokens=layout.block_tokens,
        model_fingerprint=model.identity,
        layout_fingerprint=layout.fingerprint,
        tokenizer=tokenizer,
        kv_codec=model.codec,
        kv_bytes_per_token=0 if model.foreign else model.kv_bytes_per_token,
        identity=model.identity if one_of_several else "",
        adapters=loaded.config.model.adapters,
        embeds=loaded.config.model.task == "embed",
        takes_images=loaded.config.model.engine == "vllm",
        extend_keys=KeyCache().extend,
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, since this process drains first. The acceptor of the gateway takes its
    connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
