"""The edge of a gateway: whether it serves, its calls and its ended requests, and the numbers that operators read."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake_zmq.core.messages import Parsers
from mooncake_zmq.gateway.answers.table import AnswerTable
from mooncake_zmq.gateway.http.backing import Backing
from mooncake_zmq.gateway.http.calls import Calls
from mooncake_zmq.gateway.http.cluster_reports import Overview
from mooncake_zmq.gateway.http.ended_requests import EndedRequests
from mooncake_zmq.gateway.http.metrics import EdgeMetrics
from mooncake_zmq.gateway.http.reuse_port import LISTENING
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.history import History
from mooncake_zmq.gateway.requests.readiness import least_missing, missing_roles
from mooncake_zmq.gateway.requests.request_log import RequestEntry, Slos
from mooncake_zmq.gateway.requests.tenants import Tenants
from mooncake_zmq.gateway.requests.traces import Names
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import AnswersSettings, EdgeSettings
from mooncake_zmq.telemetry.usage import Meter


def no_parsers(_model: str) -> Parsers:
    """Return the parsers of a model without vLLMs."""
    return Parsers()


class Edge:
    """The edge of one gateway: it connects many HTTP calls with one actor."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        models: ServedModels,
        settings: EdgeSettings,
        max_open: int,
        backing: Backing,
        tenants: Tenants | None = None,
        allow_open: bool = False,
        listed: Sequence[Listed] = (),
        about: Mapping[str, Any] | None = None,
        export: Callable[[RequestEntry, Names], None] = lambda entry, names: None,
        meter: Meter | None = None,
        answers: AnswersSettings | None = None,
        parsers: Callable[[str], Parsers] = no_parsers,
    ) -> None:
        """Open an edge. `max_open`: requests that the actor takes at once. `tenants`: those that may call; None: any caller on
        this machine, or with `allow_open` on any machine. `listed`: the nodes of the deployment. `about`: further fields of
        /cluster. `export`: called with each request that ended. `meter` counts what API keys use. `answers`: how answers are
        kept, to give them again; None: they are not. `parsers` returns those of a model's vLLMs, in any thread."""
        self.tenants = tenants
        self.allow_open = allow_open
        self.name = name
        self.models = models
        self.settings = settings
        self.backing = backing
        self.metrics = self._metrics()
        self.clock: Callable[[], float] = time.monotonic
        slos = Slos((about or {}).get("ttft_slo_s"), (about or {}).get("tbt_slo_s"))
        self.ended = EndedRequests(slos, export=export, count=self.count, call_later=backing.call_later)
        self.calls = Calls(
            settings,
            backing,
            max_open=max_open,
            id_prefix=f"{name}-{incarnation:x}",
            clock=lambda: self.clock(),
            metrics=self.metrics,
            traces=self.ended.traces,
            count=self.count,
            turns_away=lambda: self.turns_away,
        )
        self.history = History()
        """The last five minutes in numbers."""
        self.overview = self._overview(listed, about or {})
        self.draining = False
        self.meter = meter
        self.parsers = parsers
        self.counts: dict[str, float] = {}
        """Counters of the edge itself, named as the actor's are."""
        self.parts: dict[str, Mapping[str, float]] = {}
        """Counters of the edge's components, by component."""
        self.answers = AnswerTable(answers, random.random) if answers is not None and answers.enabled else None
        if self.answers is not None:
            self.parts["answers"] = self.answers.counts

    def _metrics(self) -> EdgeMetrics:
        return EdgeMetrics(
            {model.identity: model.id for model in self.models.each},
            waiting_and_running=lambda model: self.calls.waiting_and_running(model),
            counts=lambda: {**self.backing.counts(), **self.own_counts()},
            gauges=lambda: {**self.backing.gauges(), **self.own_gauges(), **self.overview.gauges()},
        )

    def _overview(self, listed: Sequence[Listed], about: Mapping[str, Any]) -> Overview:
        return Overview(
            self.name,
            self.models.shown,
            listed,
            self.backing,
            status=self.status,
            peers=self.backing.peers,
            refusals=self.backing.refusals,
            departed=self.backing.departed,
            recent=lambda wanted: self.ended.traces.recent(self.clock(), wanted),
            steps=lambda: self.history.steps,
            about=about,
            clock=lambda: self.clock(),
        )

    def sample(self) -> None:
        """End a step of the history; to be called every `STEP_S`."""
        self.history.sample({**self.backing.counts(), **self.own_counts(), **self.metrics.counted()})
        self.overview.note()

    def drain(self) -> None:
        """Refuse new calls; the open ones continue. The runtime informs the actor."""
        self.draining = True

    def shows_reuse(self, salt: str | None) -> bool:
        """Return whether a client may learn how much of its prompt was cached. It may not where that reveals the prompts of
        strangers, but it may of callers with its salt or on its machine. Timing reveals it too: salts prevent that."""
        return bool(salt) or self.tenants is not None or not self.allow_open

    @property
    def turns_away(self) -> bool:
        """Whether new calls are refused: the gateway drains or is cordoned."""
        return self.draining or self.backing.cordoned()

    def status(self) -> str:
        """Return "ok" if the cluster can serve, as far as this gateway knows, else the reason why not."""
        return "draining" if self.turns_away else self.cluster_status()

    def cluster_status(self) -> str:
        """Return the cluster's status, whether or not this gateway accepts calls."""
        return "unavailable" if self.missing() else "ok" if self.backing.cluster().ready else "starting"

    @property
    def may_open(self) -> bool:
        """Whether all roles that a request needs are connected. Cordoned nodes count: an operator uncordons them through an
        open gateway."""
        return self.backing.cluster().ready and not least_missing(self.backing.peers().values(), self.models.identities)

    def missing(self) -> list[str]:
        """Return the roles of which no node accepts requests. The cluster serves if it serves any of several models: this is
        for the one that lacks least."""
        return min(_missing_by_model(self).values(), key=len)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the cluster can serve, and details: missing roles, degraded nodes, peers."""
        up: dict[str, list[str]] = {"conductor": [], "prefill": [], "decode": []}
        for name, hello in self.backing.peers().items():
            if hello.role != "gateway":
                up.setdefault(hello.role, []).append(name)
        cluster = self.backing.cluster()
        if cluster.cache_nodes is not None:
            up["cache-node"] = list(cluster.cache_nodes)
        status = self.status()
        ok = status == "ok"
        detail = {
            "status": status,
            "degraded": self.overview.degraded_parts(),
            "gateway": self.name,
            "missing": self.missing(),
            "closed": list(cluster.closed),
            "not_connected": list(cluster.missing),
            "model": self.models.shown,
            **_kv_of(self.models.only),
            **({} if self.models.only else {"models": _missing_by_model(self)}),
            "peers": {role: sorted(names) for role, names in up.items()},
            "refused": dict(self.backing.refusals()),
            "open_requests": self.calls.open_requests,
        }
        return ok, detail

    def own_counts(self) -> dict[str, float]:
        """Return the counters of the edge and its components, without the actor's."""
        parts = {f"{part}_{name}": value for part, counts in self.parts.items() for name, value in counts.items()}
        return {**self.counts, **parts, **(self.tenants.counts() if self.tenants is not None else {})}

    def own_gauges(self) -> dict[str, float]:
        """Return the levels of the edge, without the actor's. All are zero when idle but whether it listens, and those of
        answers that are kept."""
        levels = {**self.calls.gauges(), LISTENING: float(self.backing.is_listening())}
        kept = self.answers.gauges() if self.answers is not None else {}
        levels |= {f"cached_answers_{name}": value for name, value in kept.items()}
        return {**levels, **(self.tenants.gauges() if self.tenants is not None else {})}

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


def _kv_of(model: ServedModel | None) -> dict[str, Any]:
    """Return how blocks hold the model's KV, as a detail of health; empty: another program has it."""
    if model is None or not model.kv_bytes_per_token:
        return {}
    return {"kv": {"codec": model.kv_codec, "bytes_per_token": model.kv_bytes_per_token}}


def _missing_by_model(edge: Edge) -> dict[str, list[str]]:
    """Return the roles of which no node accepts requests for a model, by the model's name."""
    closed = edge.backing.cluster().closed
    there = [hello for name, hello in edge.backing.peers().items() if name not in closed]
    return {model.id: missing_roles(there, model.identity) for model in edge.models.each}
