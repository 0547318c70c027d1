"""The KV connector of vLLM for our pool: `MooncakeZmqConnector`. It translates; `ledger.py` decides and `mover.py` copies. Only
this module imports vLLM. Written against vLLM 0.32; docs/vllm.md says what has been run.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "MooncakeZmqConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "mooncake_zmq.vllm.connector", "kv_connector_extra_config": {"stores": "127.0.0.1:7300"}}'

No hook waits for the pool while anything is computed: loads are asynchronous to the engine's steps, saves hold their blocks
until they are over.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import vllm
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from mooncake_zmq.kv.block_hash import root_of_salt
from mooncake_zmq.store.client.client import StoreClient
from mooncake_zmq.vllm import hints
from mooncake_zmq.vllm.adapters import Adapters, file_time_ns
from mooncake_zmq.vllm.choice import Choice
from mooncake_zmq.vllm.codes import keys_in_a_row
from mooncake_zmq.vllm.groups import ATTENTION, STATE, Group
from mooncake_zmq.vllm.ledger import Ledger, Orders, Progress
from mooncake_zmq.vllm.lookups import Lookups
from mooncake_zmq.vllm.mover import HostMemory, Memory, Mover
from mooncake_zmq.vllm.names import (
    Adapter,
    BlockKeys,
    Engine,
    LayerOrder,
    chain_root,
    derived_keys,
    image_keys,
    is_of_content,
    speculation,
    stored_form,
    token_keys,
)
from mooncake_zmq.vllm.settings import ConnectorSettings, read_settings
from mooncake_zmq.vllm.spans import BlockSpans, layer_spans
from mooncake_zmq.vllm.staged_memory import StagedMemory
from mooncake_zmq.vllm.weights import has_key_biases, identity

log = init_logger("vllm.mooncake_zmq")  # under vLLM's own logger, or it would not be shown

SAVING_SHARE = 0.5
"""Largest share of the engine's blocks that are held for saving."""
IDLE_WAIT_S = 4e-3
"""How long a step that computes nothing waits for an answer of the pool, or for a copy to end. Otherwise the engine would
poll a thousand times a second, and where its ranks spin on all cores, the store that has to answer would get no CPU."""
DESERTED_WAIT_S = 32e-3
"""Likewise where saves alone are under way, which a stopped store keeps for seconds: the next request may wait so long."""
GPU_COPY_THREADS = 4
"""A single thread that verifies what it copies is slower than a GPU that computes the prompt of an 8B model."""


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """Orders of the scheduler to the workers. `number`: of the step; 0 if it computes nothing."""

    orders: Orders = field(default_factory=Orders)
    number: int = 0


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Report of the workers to the scheduler after step `number`. Each rank that has completed one adds to `saved` the
    number of a save, and to `loads_took` a load's number, the blocks of its prefix, and seconds."""

    number: int
    saved: list[int]
    loads_took: list[tuple[int, int, float]]

    def aggregate(self, other: "StepReport") -> "StepReport":
        return StepReport(self.number, self.saved + other.saved, self.loads_took + other.loads_took)


@dataclass
class RankPrefix(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Prefix of the names of one rank's blocks."""

    prefix: str


class PoolStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name, which can be added."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PoolMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Export `vllm:mooncake_zmq_pool_total`, by `what`: the counts of both halves; and `vllm:mooncake_zmq_stores_info`, by
    which `mooncake-zmq attach` recognizes a connector and its stores."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter = metric_types[PrometheusCounter](
            name="vllm:mooncake_zmq_pool_total",
            documentation="What became of KV blocks and questions between this engine and its pool.",
            labelnames=[*labelnames, "what"],
        )
        info = metric_types[Gauge](
            name="vllm:mooncake_zmq_stores_info",
            documentation="Stores of this engine's pool, separated by commas.",
            labelnames=[*labelnames, "stores"],
            multiprocess_mode="mostrecent",
        )
        stores = ",".join(read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config).endpoints)
        for values in per_engine_labelvalues.values():
            info.labels(*values, stores).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for what, count in (transfer_stats_data or {}).items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], what).inc(count)


class MooncakeZmqConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Serve as either half; vLLM creates one of each. Raises ValueError in one line for an unsupported configuration."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = _checked(vllm_config, kv_cache_config)
        self._scheduler = _SchedulerHalf(vllm_config, kv_cache_config, settings) if role is KVConnectorRole.SCHEDULER else None
        self._worker = _WorkerHalf(vllm_config, kv_cache_config, settings) if role is KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is only a later miss."""
        return False

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._scheduler or self._worker
        counts = +half.take_counts() if half is not None else None
        return PoolStats(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return PoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- the scheduler's half

    @property
    def _planning(self) -> "_SchedulerHalf":
        assert self._scheduler is not None, "called on the worker's half"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._planning.block_pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        self._planning.meet([metadata[rank].prefix for rank in sorted(metadata)])

    def on_new_request(self, request: Any) -> None:
        self._planning.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        found = self._planning.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planning.ledger.allocated(request.request_id, num_external_tokens, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._planning.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        half = self._planning
        half.ledger.loaded(
            connector_output.finished_recving or (), connector_output.invalid_block_ids, connector_output.failed_recving
        )
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            half.learn(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planning.finished(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_block_frees(self) -> bool:
        return self._planning.can_free()

    def has_pending_push_work(self) -> bool:
        return self._planning.ledger.saving > 0

    def reset_cache(self) -> bool:
        self._planning.start_anew()
        return True

    # --- the worker's half

    @property
    def _moving(self) -> "_WorkerHalf":
        assert self._worker is not None, "called on the scheduler's half"
        return self._worker

    @property
    def _step(self) -> StepOrders:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, StepOrders) else StepOrders()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._moving.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return RankPrefix(self._moving.prefix)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._moving.start_loads(self._step.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request waits for its load before it is computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole steps are saved, so that CUDA graphs need not be cut at each layer."""

    def wait_for_save(self) -> None:
        self._moving.start_saves(self._step.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded, failed = self._moving.take(self._step.orders)
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._moving.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._moving.report(self._step.number)


class _SchedulerHalf:
    """Connect the ledger to vLLM's requests and blocks."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            log.info("kv_load_failure_policy is set to 'recompute': blocks that do not come are computed")
            transfer.kv_load_failure_policy = "recompute"
        self.block_pool: Any = None
        self._requests: dict[str, Any] = {}
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._anew = ""
        """Part of every chain's root since the engine's KV was last declared invalid."""
        self._names_images_of_all = settings.images == "all"
        self._lora_config = vllm_config.lora_config
        self._adapters = Adapters(file_time_ns())
        self._lookups = Lookups(_connected(settings, settings.asking))
        self._is_asked_again = False
        """Whether a request is deferred in the step that is being planned."""
        scheduler = vllm_config.scheduler_config
        self._choice = Choice(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)
        self.ledger = Ledger(
            block_tokens=self._block_tokens,
            pool=self._lookups,
            may_load=transfer.is_kv_consumer,
            may_save=transfer.is_kv_producer,
            most_saving=max(1, int(kv_cache_config.num_blocks * SAVING_SHARE)),
            lookup_s=2 * settings.lookup_timeout_s,
            coming_s=settings.coming_timeout_s,
            choice=self._choice if settings.load == "faster" else None,
            groups=_groups(kv_cache_config),
            offers_loaded=settings.copies > 1,
        )

    def meet(self, prefixes: Sequence[str]) -> None:
        self.ledger.prefixes = tuple(prefixes)
        log.info("KV blocks are in the pool as %s", ", ".join(prefixes))

    def add(self, request: Any) -> None:
        if request.resumable:  # its tokens may change
            return
        keys = self._keys(request)
        if keys is None:
            self.ledger.counts["unnamed_requests"] += 1
            return
        self._requests[request.request_id] = request
        self.ledger.add(request.request_id, keys, hints.read(request.kv_transfer_params))

    def finished(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self.ledger.finished(request_id)

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        found = self.ledger.matched(time.monotonic(), request.request_id, computed_tokens, request.num_tokens)
        self._is_asked_again |= found is None
        return found

    def plan(self, scheduler_output: Any) -> StepOrders:
        now = time.monotonic()
        state = scheduler_output.kv_connector_block_state
        scheduled = self._progress(scheduler_output)
        orders = self.ledger.step(now, scheduled, state.get_block_ids)
        for save in orders.saves:
            self.block_pool.touch([self.block_pool.blocks[block] for block in save.blocks])
        if self._is_asked_again and not scheduler_output.total_num_scheduled_tokens:
            self._lookups.wait(IDLE_WAIT_S)
        self._is_asked_again = False
        self._lookups.begin_step()
        return StepOrders(orders, self._choice.step_begins(now, scheduler_output.total_num_scheduled_tokens))

    def learn(self, report: StepReport) -> None:
        self._choice.step_ended(time.monotonic(), report.number)
        ranks = len(self.ledger.prefixes)
        for number, blocks, took_s in report.loads_took:
            self._choice.part_took(number, blocks, took_s, ranks)
        over = self.ledger.saved(report.saved, ranks)
        self.block_pool.free_blocks([self.block_pool.blocks[block] for block in reversed(over)])

    def can_free(self) -> bool:
        """Return whether a block is held only for saving."""
        return any(self.block_pool.blocks[block].ref_cnt == 1 for block in self.ledger.kept())

    def start_anew(self) -> None:
        """Begin new chains: the weights may have changed in a way that their files do not show, so later KV is this engine's
        alone. Requests that are there have the names of the old weights, and are forgotten."""
        self._anew = os.urandom(16).hex()
        for request_id in [*self._requests]:
            self.finished(request_id)

    def take_counts(self) -> Counter[str]:
        counts = self.ledger.counts + self._choice.counts
        counts["lookups_deferred"] = self._lookups.deferred
        self.ledger.counts, self._choice.counts, self._lookups.deferred = Counter(), Counter(), 0
        return counts

    def close(self) -> None:
        self._lookups.close()

    def _progress(self, scheduler_output: Any) -> Iterable[Progress]:
        states = scheduler_output.kv_connector_block_state.boundary_state_offloads
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                computed = request.num_computed_tokens + tokens
                yield Progress(request_id, computed, len(request.all_token_ids), states.get(request_id, ()))

    def _keys(self, request: Any) -> BlockKeys | None:
        """Return the keys of a request; None if what its adapter or its images hold is not known."""
        adapter = ""
        if request.lora_request:
            content = self._adapters.content(request.lora_request.lora_path)
            if not content:
                return None
            adapter = Adapter(content, self._lora_config, request.lora_request).identity
        salt = request.cache_salt or ""
        root = chain_root(salt, self._anew, adapter)
        of_gateway = root_of_salt(salt) is not None
        if request.mm_features and not (of_gateway or self._names_images_of_all):
            return None
        if not all(is_of_content(feature.identifier) for feature in request.mm_features):
            return None
        if request.prompt_embeds is not None:
            return derived_keys(root, request.block_hashes)
        if request.mm_features:
            images = [(feature.mm_position.offset, feature.identifier) for feature in request.mm_features]
            return image_keys(root, request.all_token_ids, self._block_tokens, images)
        return token_keys(root, request.all_token_ids, self._block_tokens)


class _WorkerHalf:
    """Connect the mover to one rank's KV."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        self._config, self._cache, self._settings = vllm_config, kv_cache_config, settings
        groups = _groups(kv_cache_config)
        self._fails_by_block = len(groups) == 1 and groups[0].needs_all
        """Whether vLLM may keep the blocks before one that failed. It would also do so for a window, which begins with blocks
        that were never loaded."""
        self._mover: Mover | None = None
        self._staged: list[StagedMemory] = []
        self._failed: set[int] = set()
        self._report = StepReport(0, [], [])
        self.prefix = ""

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raise ValueError if the KV caches cannot be copied."""
        groups = [
            _tensors({name: kv_caches[name] for name in group.layer_names if name in kv_caches})
            for group in self._cache.kv_cache_groups
        ]
        kinds = {tensor.device.type for tensors in groups for tensor in tensors.values()}
        engine = _engine(self._settings, self._config, self._cache, groups)
        self.prefix = engine.key_prefix(f"{get_pp_group().rank_in_group}.{get_tp_group().rank_in_group}", self._settings.prefix)
        loading: Sequence[Memory]
        saving: Sequence[Memory]
        threads = 1
        codec = self._settings.codec
        keys: list[list[int]] = [[] for _ in groups]
        if codec is not None and not codec.is_alike:
            layers = iter(engine.attention)
            keys = [[keys_in_a_row(next(layers), tensor.shape) for tensor in tensors.values()] for tensors in groups]
        if kinds == {"cpu"} and codec is None:
            loading = saving = [HostMemory(_spans(tensors, self._cache.num_blocks)) for tensors in groups]
        elif kinds in ({"cuda"}, {"cpu"}):
            staging, blocks = self._settings.staging_bytes // len(groups), self._cache.num_blocks
            loading, saving = (
                [
                    StagedMemory(list(tensors.values()), blocks, staging, codec, rows)
                    for tensors, rows in zip(groups, keys, strict=True)
                ]
                for _ in range(2)
            )
            self._staged = [*loading, *saving]
            threads = max(1, min(GPU_COPY_THREADS, (os.cpu_count() or 1) // 4)) if kinds == {"cuda"} else 1
        else:
            raise ValueError(f"MooncakeZmqConnector: KV on {sorted(kinds)} is not supported; on cpu or cuda it is")
        threads = self._settings.copy_threads or threads
        self._mover = Mover(
            _connected(self._settings, self._settings.client), self.prefix, loading, saving, threads, self._settings.copies
        )

    def start_loads(self, orders: Orders) -> None:
        if orders.loads and self._mover is not None:
            self._fence()
            for load in orders.loads:
                self._mover.load(load)

    def start_saves(self, orders: Orders) -> None:
        if orders.saves and self._mover is not None:
            self._fence()
            for save in orders.saves:
                self._mover.save(save)

    def take(self, orders: Orders) -> tuple[set[str], set[str]]:
        """Return the requests whose loads ended, and those of them that failed and are to be computed as a whole."""
        if self._mover is None:
            return set(), set()
        idle_s = DESERTED_WAIT_S if orders.deserted else IDLE_WAIT_S
        moved = self._mover.take(idle_s if orders.idle else 0.0)
        if self._fails_by_block:
            self._failed |= moved.failed_blocks
        self._report.saved += moved.saved
        self._report.loads_took += moved.loads_took
        return moved.loaded, set() if self._fails_by_block else moved.failed

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def report(self, number: int) -> StepReport | None:
        """Return the report of step `number`; None if it is empty."""
        report, self._report = replace(self._report, number=number), StepReport(0, [], [])
        return report if number or report.saved or report.loads_took else None

    def take_counts(self) -> Counter[str]:
        return self._mover.take_counts() if self._mover is not None else Counter()

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()

    def _fence(self) -> None:
        """Order later copies after everything that was submitted to the device before."""
        for memory in self._staged:
            memory.fence()


def _checked(vllm_config: Any, kv_cache_config: Any) -> ConnectorSettings:
    """Return the settings; raises ValueError in one line for an unsupported configuration."""

    def refuse(reason: str) -> ValueError:
        return ValueError(f"MooncakeZmqConnector: {reason}")

    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _specs(group)]
    kinds = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
    if others := sorted({type(spec).__name__ for spec in specs if not isinstance(spec, kinds)}):
        raise refuse(f"KV of kind {', '.join(others)} is not supported")
    if any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align" for spec in specs):
        raise refuse("states are reused in vLLM's mode 'align' only: add --enable-prefix-caching --mamba-cache-mode align")
    sizes = sorted({group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups})
    if len(sizes) > 1:
        raise refuse(f"KV cache groups with blocks of different sizes, here {sizes}, are not supported")
    if len(kv_cache_config.kv_cache_groups) > 1 and speculation(vllm_config) is not None:
        raise refuse("speculation with drafts that have KV is not supported where there are several KV cache groups")
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise refuse("context parallelism is not supported")
    # vLLM 0.31 has no such field: with blocks of one size, its hashes are of other sizes by this setting alone.
    hashed = getattr(kv_cache_config, "hash_block_size", getattr(vllm_config.cache_config, "prefix_match_unit", None))
    if hashed not in (None, sizes[0]):
        raise refuse(f"block hashes are of {hashed} tokens, blocks of {sizes[0]}")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise refuse("calculate_kv_scales makes scales that blocks do not carry")
    try:
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
    except ValueError as error:
        raise refuse(f"kv_connector_extra_config: {error}") from error
    if settings.codec is not None and any(isinstance(spec, MambaSpec) for spec in specs):
        raise refuse("kv_codec is for attention's KV, and this model has states too")
    if settings.codec is not None and has_key_biases(vllm_config.model_config, vllm_config.load_config.download_dir):
        if settings.codec.key_bits < 8:
            raise refuse(f"kv_codec {settings.codec.name!r} ruins the answers of a model whose keys have biases: take int8")
        log.warning("this model's keys have biases: with a kv_codec its answers from stores differ more than other models'")
    return settings


def _specs(group: Any) -> list[Any]:
    """Return what a KV cache group's layers have; all are of one kind."""
    return list(getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values())


def _groups(kv_cache_config: Any) -> tuple[Group, ...]:
    return tuple(_group(_specs(group)[0]) for group in kv_cache_config.kv_cache_groups)


def _group(spec: Any) -> Group:
    """Return what a prefix needs of the group of a layer."""
    if isinstance(spec, MambaSpec):
        return STATE
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Group(chunk=spec.attention_chunk_size)
    return Group(window=spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else ATTENTION


def _connected(settings: ConnectorSettings, client: Any) -> StoreClient:
    """Return a client, which connects on a separate thread: an engine starts without its pool. Raises KeysError."""
    store = StoreClient(settings.endpoints, client)

    def meet() -> None:
        reason = store.connect()
        if reason is not None:
            log.warning("no store of %s answers yet: %s", ", ".join(settings.endpoints), reason)

    threading.Thread(target=meet, name="kv-connect", daemon=True).start()
    return store


def _identity(model: Any, load_config: Any) -> str:
    """Return the identity of a model's weights; of unknown weights, one that is this process's alone."""
    found = identity(model, str(load_config.load_format), load_config.download_dir)
    if not found:
        log.warning(
            "the files of %s are not at hand: its KV is not shared unless the setting 'model' names its weights", model.model
        )
    return found or os.urandom(16).hex()


def _engine(
    settings: ConnectorSettings, vllm_config: Any, kv_cache_config: Any, groups: Sequence[Mapping[str, torch.Tensor]]
) -> Engine:
    """Return what names are made of. Raises ValueError."""
    tensors = {name: tensor for group in groups for name, tensor in group.items()}
    device = next(iter(tensors.values())).device.type
    model, drafts = vllm_config.model_config, speculation(vllm_config)
    weights = settings.model or _identity(model, vllm_config.load_config)
    draft = getattr(drafts, "draft_model_config", None)
    if draft is None or draft.model == model.model:
        draft_weights = weights
    else:
        draft_weights = _identity(draft, drafts.draft_load_config or vllm_config.load_config)
    return Engine(
        version=vllm.__version__,
        weights=weights,
        draft_weights=draft_weights,
        device=device,
        cpu=torch.backends.cpu.get_cpu_capability() if device == "cpu" else "",
        config=vllm_config,
        cache=kv_cache_config,
        attention=[vllm_config.compilation_config.static_forward_context[_layer_of(name)] for name in tensors],
        layers=tuple(
            LayerOrder(
                name,
                (tensor.shape[0] // kv_cache_config.num_blocks, *tensor.shape[1:]),
                tuple(sorted(range(1, tensor.dim()), key=lambda axis, at=tensor: -at.stride(axis))),  # type: ignore[misc]
                stored_form(str(tensor.dtype), settings.codec),
            )
            for name, tensor in tensors.items()
        ),
    )


def _tensors(kv_caches: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a group by layer, without layers that use another one's; a layer with several, as states have, has
    a number after its name. Raises ValueError for anything else."""
    found: dict[str, torch.Tensor] = {}
    for name, cache in kv_caches.items():
        several = {f"{name}#{number}": each for number, each in enumerate(cache)} if isinstance(cache, list | tuple) else {}
        found |= several or {name: cache}
    if not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ValueError("MooncakeZmqConnector: a layer's KV is not made of tensors, which is not supported")
    by_place = {tensor.data_ptr(): name for name, tensor in reversed(found.items())}
    return {name: tensor for name, tensor in found.items() if by_place[tensor.data_ptr()] == name}


def _layer_of(name: str) -> str:
    """Return the layer of a name that `_tensors` made."""
    return name.partition("#")[0]


def _spans(tensors: dict[str, torch.Tensor], num_blocks: int) -> BlockSpans:
    return BlockSpans(
        [
            layer_spans(
                tensor.data_ptr(),
                tuple(tensor.shape),
                tuple(stride * tensor.element_size() for stride in tensor.stride()),
                tensor.element_size(),
                num_blocks,
            )
            for tensor in tensors.values()
        ]
    )
