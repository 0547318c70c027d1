"""The recording of a replay as snapshots of the cluster at times of the virtual clock: the answers that a gateway's `/cluster`
would have given.

It observes and changes nothing. Its size is bounded: of too many snapshots every second one is dropped.
"""

import gzip
import io
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import msgspec

from mooncake_zmq.core.actor import Effect, Event, FromClient, Send, Start, ToClient, WorkDone
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.drain import changes_role
from mooncake_zmq.core.messages import Hello, Report, Sampling, Schedule, StopRule
from mooncake_zmq.core.transfer_stats import COUNTED, TransferStats
from mooncake_zmq.core.watch import PeerReport, report
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Failed, Finished
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed, Seen, count_prediction, snapshot
from mooncake_zmq.gateway.requests.history import BOUNDS, GAP, SLO_MET, SLO_MISSED, STEP_S, TOKENS, TTFT, History, histogram
from mooncake_zmq.gateway.requests.request_log import RequestEntry, RequestLog, Slos, as_json
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.laboratory.keys import ROOT, Prompt
from mooncake_zmq.laboratory.study import RequestRecord, Setup
from mooncake_zmq.simulation.world import Observe, Process, World

MAX_SNAPSHOTS = 2000
MAX_BYTES = 48 << 20
"""Size of all snapshots as JSON; they are written compressed, at a twentieth of that."""
WANTED_SNAPSHOTS = 1200
MIN_EVERY_S = 1.0
"""The interval at which a gateway receives its nodes' reports."""
KEPT_CHAINS = 24
"""Hot prefixes in a snapshot, of those that are followed and of those requested lately."""
KEPT, KEPT_REFUSED = 4, 2
"""Recorded requests of those that ended between two snapshots, and how many of them at most were refused if others were not."""


@dataclass(slots=True)
class _Incarnation:
    """One incarnation of a process."""

    began_at: float
    transfer_stats: TransferStats


@dataclass(frozen=True, slots=True)
class _Ended:
    refused: bool
    record: bytes


@dataclass(slots=True)
class _Snapshot:
    at_s: float
    packed: bytes
    """The JSON, compressed by zlib."""
    size: int
    """Size of the JSON in bytes, uncompressed."""
    open: int
    refused: int
    """Refused requests since the snapshot before."""
    ended: list[_Ended]


class Tape:
    """The recording of one run of `setup`, whose last request comes at `last_s`. `own`: returns another observer of a
    process."""

    def __init__(
        self, setup: Setup, layout: BlockLayout, *, last_s: float, own: Callable[[Process[Any]], Observe | None]
    ) -> None:
        self.due_at = 0.0
        """Virtual time of the next snapshot."""
        self._every_s = max(MIN_EVERY_S, last_s / WANTED_SNAPSHOTS)
        self._setup = setup
        self._layout = layout
        self._own = own
        self._block_bytes = layout.block_tokens * setup.hardware.costs.kv_bytes_per_token
        self._incarnations: dict[str, _Incarnation] = {}
        self._requests = RequestLog(self._request_closed)
        self._over: list[tuple[str, RequestRecord]] = []
        """Requests that ended in the event that is being handled."""
        self._counts = Tally()
        self._slos = Slos(setup.ttft_slo_s, setup.tbt_slo_s)
        self._buckets = {name: [0] * (len(bounds) + 1) for name, bounds in BOUNDS.items()}
        """TTFT and TBT of requests that ended: a live gateway has all gaps in place of the latter."""
        self._history = History()
        self._step_ends_at = STEP_S
        self._refused = 0
        self._ended: list[_Ended] = []
        self._snapshots: list[_Snapshot] = []
        self._world: World[Any]
        self._gateway: Any
        self._hello: Callable[[Process[Any]], Hello]

    def attach(self, world: World[Any], gateway: Any, hello: Callable[[Process[Any]], Hello]) -> None:
        """Set the replay that is recorded."""
        self._world, self._gateway, self._hello = world, gateway, hello

    # --- observing

    def watch(self, process: Process[Any]) -> Observe | None:
        transfer_stats = TransferStats(process.name, self._layout)
        self._incarnations[process.name] = _Incarnation(self._world.now, transfer_stats)
        if process.spec.role == "gateway":
            return self._gateway_did
        own = self._own(process)

        def observe(event: Event, effects: list[Effect]) -> None:
            if type(event) is WorkDone:
                transfer_stats.end(event.work_id, event.result)
            for effect in effects:
                if type(effect) is Start and type(effect.work) in COUNTED:
                    transfer_stats.begin(effect.work_id, effect.work)
            if own is not None:
                own(event, effects)

        return observe

    def on_ended(self, number: int, record: RequestRecord) -> None:
        """Record that a request has ended, in the event that its gateway handles now."""
        self._over.append((f"r{number}", record))

    def _gateway_did(self, event: Event, effects: list[Effect]) -> None:
        """Observe an event of the replay's gateway, with the messages from and to clients that a live gateway would have."""
        now = self._world.now
        while now >= self._step_ends_at:
            self._step_ends_at += STEP_S
            self._history.sample(self._counted())
        for effect in effects:
            if type(effect) is Send and type(effect.message) is Schedule and effect.message.attempt == 1:
                self._requests.observe(now, FromClient(effect.message.request_id, _asked(effect.message)), ())
        self._requests.observe(now, event, [*effects, *(ToClient(name, _outcome(record)) for name, record in self._over)])
        for _, record in self._over:
            self._count(record)
        self._over.clear()

    def _counted(self) -> dict[str, float]:
        """Return the counters of the gateway's history."""
        buckets = [histogram(name, counts) for name, counts in self._buckets.items()]
        return {**self._counts, **buckets[0], **buckets[1]}

    def _count(self, record: RequestRecord) -> None:
        """Count a request as `gateway.requests.requests` does."""
        self._counts.add("requests")
        if record.outcome == "rejected":
            self._refused += 1
            self._counts.add(f"requests_rejected[reason={record.reason}]")
        if record.outcome != "finished":
            self._counts.add(f"requests_failed[code={record.reason}]")
            return
        self._counts.add("requests_finished[reason=length]")
        self._counts.add(TOKENS, record.output_tokens)
        self._buckets[TTFT][bisect_left(BOUNDS[TTFT], record.ttft_s)] += 1
        if record.output_tokens > 1:
            self._buckets[GAP][bisect_left(BOUNDS[GAP], record.tbt_s)] += 1
        count_prediction(self._counts, "ttft", record.ttft_s, max(0.0, record.predicted_ttft_s))
        if record.output_tokens > 1:
            count_prediction(self._counts, "tbt", record.tbt_s, max(0.0, record.predicted_tbt_s))

    def _request_closed(self, closed: RequestEntry) -> None:
        refused = closed.outcome != "length"
        for of, met in self._slos.judge(closed):
            self._counts.add(f"{SLO_MET if met else SLO_MISSED}[of={of}]")
        record = {"id": closed.request_id, "x_request_id": "", "trace_id": "", **as_json(closed)}
        self._ended = _kept([*self._ended, _Ended(refused, msgspec.json.encode(record))])

    # --- snapshots

    def look(self) -> None:
        """Take a snapshot of the cluster."""
        now = self._world.now
        self.due_at = now + self._every_s
        more = {"about": self._about(), "replication": self._replication(now)}
        body = msgspec.json.encode(snapshot(self._seen(now)) | more)
        packed = zlib.compress(body, 1)
        self._snapshots.append(_Snapshot(now, packed, len(body), len(self._gateway.open), self._refused, self._ended))
        self._refused, self._ended = 0, []
        if len(self._snapshots) > MAX_SNAPSHOTS or sum([each.size for each in self._snapshots]) > MAX_BYTES:
            self._thin()

    def _thin(self) -> None:
        self._every_s *= 2
        left = self._snapshots
        self._snapshots = [_merged(one, other) for one, other in zip(left[::2], left[1::2], strict=False)]
        if len(left) % 2:
            self._snapshots.append(left[-1])
        self.due_at = self._snapshots[-1].at_s + self._every_s

    def _about(self) -> dict[str, Any]:
        setup = self._setup
        return {
            "cluster": f"{setup.prefill}P+{setup.decode}D of {setup.hardware.name}, {setup.policy}",
            "block_tokens": self._layout.block_tokens,
            "block_bytes": self._block_bytes,
            "ttft_slo_s": setup.ttft_slo_s,
            "tbt_slo_s": setup.tbt_slo_s,
        }

    def _seen(self, now: float) -> Seen:
        processes = self._world.processes.values()
        alive = [process for process in processes if process.current is not None]
        return Seen(
            now=now,
            gateway=self._gateway.name,
            status="ok",
            model=self._setup.hardware.name,
            listed=[Listed(each.name, each.configured, each.spec.host) for each in processes],
            peers={each.name: self._hello(each) for each in alive if each.name != self._gateway.name},
            steps=self._history.steps,
            last_reports={each.name: PeerReport(now, each.starts, self._report(now, each)) for each in alive},
        )

    def _replication(self, now: float) -> dict[str, Any]:
        """Return the prefixes requested lately and the nodes that hold them, from the conductor's dump."""
        incarnations = (each.current for each in self._world.processes.values() if each.spec.role == "conductor")
        found = next((each.actor.dump(now)["replication"] for each in incarnations if each is not None), None)
        return {"recent": found["recent"][:KEPT_CHAINS] if found else []}

    def _report(self, now: float, process: Process[Any]) -> Report:
        """Make a report as `core.node` does; bytes are those that the modelled blocks would have."""
        incarnation, actor = self._incarnations[process.name], process.current.actor if process.current is not None else None
        assert actor is not None
        counts = {**actor.counts, **self._counts} if actor is self._gateway else actor.counts
        scale = self._block_bytes / self._layout.block_bytes
        moved = [msgspec.structs.replace(each, bytes=int(each.bytes * scale)) for each in incarnation.transfer_stats.totals()]
        return report(
            uptime_s=now - incarnation.began_at,
            draining=changes_role(counts),
            counts=counts,
            gauges=actor.gauges(now),
            moved=moved,
            refused={},
        )

    def written(self) -> bytes:
        """Return the recording for `gateway.http.web.replay_page`: a head, then a line for each snapshot and each recorded
        request."""
        ended: list[bytes] = []
        until: list[int] = []
        for each in self._snapshots:
            ended += [one.record for one in each.ended]
            until.append(len(ended))
        head = {
            "at_s": [round(each.at_s, 3) for each in self._snapshots],
            "open": [each.open for each in self._snapshots],
            "refused": [each.refused for each in self._snapshots],
            "ended": until,
        }
        snapshots = (zlib.decompress(each.packed) for each in self._snapshots)
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as file:
            for number, line in enumerate(chain((msgspec.json.encode(head),), snapshots, ended)):
                file.write(b"\n" * bool(number) + line)
        return buffer.getvalue()


def _kept(ended: Sequence[_Ended]) -> list[_Ended]:
    """Return the last ones, refused ones among them."""
    if len(ended) <= KEPT:
        return list(ended)
    refused = [place for place, each in enumerate(ended) if each.refused]
    others = [place for place, each in enumerate(ended) if not each.refused]
    chosen = refused[-max(KEPT_REFUSED, KEPT - len(others)) :]
    chosen += others[-(KEPT - len(chosen)) :] if len(chosen) < KEPT else []
    return [ended[place] for place in sorted(chosen)]


def _merged(one: _Snapshot, other: _Snapshot) -> _Snapshot:
    """Return the later one, with the requests that ended since the one before both."""
    ended = _kept([*one.ended, *other.ended])
    return _Snapshot(other.at_s, other.packed, other.size, other.open, one.refused + other.refused, ended)


def _asked(schedule: Schedule) -> ClientRequest:
    """Return the request that a client would have sent; its tokens are not read."""
    tokens = cast(bytes, Prompt(schedule.tokens, 1, 0))
    stop = StopRule(max_tokens=schedule.max_tokens)
    return ClientRequest(tokens=tokens, root=ROOT, keys=schedule.keys, sampling=Sampling(), stop=stop)


def _outcome(record: RequestRecord) -> Finished | Failed:
    if record.outcome != "finished":
        return Failed(status=429, code=record.reason, message=record.reason)
    return Finished(
        reason="length",
        prompt_tokens=record.input_tokens,
        completion_tokens=record.output_tokens,
        cached_own=record.hit_own,
        cached_local=record.hit_dram + record.hit_disk,
        cached_remote=record.hit_remote,
        prefill=record.prefill,
        decode=record.decode,
        attempts=record.attempts,
    )
