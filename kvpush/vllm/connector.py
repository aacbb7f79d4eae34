# SPDX-License-Identifier: Apache-2.0
"""``KVPushConnector``: vLLM's hooks, each delegated to one of the two sides."""

from __future__ import annotations

import logging
from typing import Any

from kvpush._host import request_amx_permission
from kvpush.backends.manager import BackendManager
from kvpush.core.ids import PeerAddress
from kvpush.endpoint import Endpoint
from kvpush.errors import ConfigError
from kvpush.security import Protection
from kvpush.settings import Settings
from kvpush.vllm import compat
from kvpush.vllm.caches import describe_caches
from kvpush.vllm.identity import compatibility
from kvpush.vllm.metadata import KVPushHandshakeMetadata, KVPushMetadata
from kvpush.vllm.plugin import register
from kvpush.vllm.scheduler_side import SchedulerConfig, SchedulerSide
from kvpush.vllm.stats import KVPushPromMetrics, KVPushStats
from kvpush.vllm.worker_side import StepResults, WorkerSide

logger = logging.getLogger(__name__)


class KVPushConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):
    """Pushes KV from prefill to decode instances while prefill still computes.

    One instance of role SCHEDULER per engine core, one of role WORKER per worker process. What can't work is refused here,
    at start-up.
    """

    _cache_hit_source = compat.cache_hit_source()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        register()
        compat.check_version()
        transfer = vllm_config.kv_transfer_config
        if kv_cache_config is None:
            raise ConfigError("vLLM gave the connector no KV-cache configuration: this version is not supported")
        compat.check_groups(kv_cache_config)
        compat.check_parallelism(vllm_config)
        compat.check_memory(vllm_config)
        settings = Settings.load(transfer.kv_connector_extra_config)
        if settings.control_port:
            # Ports are counted over all data-parallel instances of a host.
            first_rank = _first_rank(vllm_config.parallel_config)
            settings = settings.model_copy(update={"control_port": settings.control_port + first_rank})
        # Read again when the endpoint opens; here so that a missing secret is told before the model is loaded.
        Protection.load(settings, listens=transfer.is_kv_producer)
        self._settings = settings
        self._group_ids = compat.transfer_group_ids(kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._failed_blocks: set[int] = set()
        if role is compat.KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    "kvpush: kv_load_failure_policy is %r: a request whose KV doesn't arrive fails with HTTP 500. "
                    'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config to compute it here instead',
                    transfer.kv_load_failure_policy,
                )
            self._scheduler = SchedulerSide(
                SchedulerConfig(
                    engine_id=transfer.engine_id,
                    produce=transfer.is_kv_producer,
                    consume=transfer.is_kv_consumer,
                    address=PeerAddress(self._settings.advertised_host, self._settings.control_port),
                    block_tokens=kv_cache_config.kv_cache_groups[self._group_ids[0]].kv_cache_spec.block_size,
                    group_ids=self._group_ids,
                    num_groups=len(kv_cache_config.kv_cache_groups),
                    tp_size=parallel.tensor_parallel_size,
                    pp_size=parallel.pipeline_parallel_size,
                    recompute_below_tokens=self._settings.recompute_below_tokens,
                    num_blocks=kv_cache_config.num_blocks,
                    max_pinned_share=self._settings.max_pinned_share,
                )
            )
        else:
            amx = request_amx_permission()
            logger.info("kvpush: AMX: %s", amx)

    # --- classmethods, called where there is no instance ------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks don't fire when a full CUDA graph is replayed. vLLM is asked to do without those where every layer is to
        be pushed by itself (``push_granularity=layer``, from any source of settings). With ``auto``, steps that run as a full
        graph are pushed as chunks."""
        try:
            return Settings.load(extra_config).push_granularity == "layer"
        except ConfigError:
            return False  # The constructor tells.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout that the backend prefers. vLLM takes it if its attention backend can, else its own choice with a warning;
        ``VLLM_KV_CACHE_LAYOUT`` goes before. Asked once, in the engine core."""
        transfer = vllm_config.kv_transfer_config
        try:
            settings = Settings.load(transfer.kv_connector_extra_config)
        except ConfigError:
            return None  # The constructor tells.
        return compat.cache_layout(BackendManager().preferred_layout(settings.backend, compat.device_type()))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM 0.33 and newer. False: peers hold the cache's registered address, and sleep maps other memory there."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """The statistics of a step, rebuilt in the front end."""
        return KVPushStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> Any:
        """kvpush's counters in vLLM's ``/metrics``."""
        return KVPushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker ----------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache exists: choose the backend, register the memory, start the endpoint."""
        transfer, parallel = self._vllm_config.kv_transfer_config, self._vllm_config.parallel_config
        views = describe_caches(kv_caches, self._kv_cache_config, self._vllm_config)
        endpoint = Endpoint.open(
            views,
            produce=transfer.is_kv_producer,
            consume=transfer.is_kv_consumer,
            settings=self._settings,
            engine_id=transfer.engine_id,
            compat=compatibility(self._vllm_config),
            rank=parallel.rank,
            num_ranks=parallel.world_size,
        )
        granular = endpoint.layer_fences and self._settings.push_granularity in ("auto", "layer")
        self._worker = WorkerSide(
            endpoint,
            [view.name for view in views],
            layer_events=granular,
            empty_step_wait_s=self._settings.empty_step_wait_ms * 1e-3,
            failures_by_request=compat.FAILURES_BY_REQUEST,
            token_bytes=[layer.block_bytes // layer.block_tokens for layer in endpoint.layout.layers],
        )

    def get_handshake_metadata(self) -> KVPushHandshakeMetadata | None:
        """Where this rank listens."""
        address = self._worker.endpoint.address if self._worker else None
        if address is None:
            return None
        return KVPushHandshakeMetadata(self._vllm_config.parallel_config.rank, address.host, address.port)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Before the forward: registrations leave now."""
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything is overwritten."""
        self._begin_step(kv_connector_metadata)

    def _begin_step(self, meta: Any) -> None:
        if self._worker is not None and isinstance(meta, KVPushMetadata):
            with self._worker.cost:
                self._worker.begin_step(meta)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: receives were registered before the forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests run only after all of their KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's KV of this step is written, or its writing is launched."""
        worker = self._worker
        if worker is not None and worker.awaits_layers:
            with worker.cost:
                worker.layer_done(layer_name)

    def wait_for_save(self, **kwargs: Any) -> None:
        """The forward has been launched; nothing waits."""
        if self._worker is not None:
            with self._worker.cost:
                self._worker.end_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """vLLM 0.29: ids only; :meth:`get_block_ids_with_load_errors` follows in the same step."""
        if self._worker is None:
            return None, None
        results = self._results(self._worker)
        self._failed_blocks |= results.failed_blocks
        return results.sent or None, results.received or None

    @staticmethod
    def _results(worker: WorkerSide) -> StepResults:
        worker.wait_if_idle()
        with worker.cost:
            return worker.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """vLLM 0.29: the blocks of failed receives that :meth:`get_finished` has just reported. Newer: none, ever."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM 0.30 and newer: ids and failures together."""
        if self._worker is None:
            return compat.TransferResults()
        results = self._results(self._worker)
        return compat.TransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_kv_connector_stats(self) -> Any:
        """What has happened on this rank, or in the scheduler, since the last step."""
        if self._scheduler is not None:
            with self._scheduler.cost:
                grown = self._scheduler.cost.take()
        elif self._worker is not None:
            with self._worker.cost:
                grown = self._worker.take_increments()
        else:
            return None
        return KVPushStats(data=grown) if grown else None

    def build_connector_worker_meta(self) -> Any:
        """What the scheduler side has to know."""
        if self._worker is None:
            return None
        with self._worker.cost:
            return self._worker.take_meta()

    # --- scheduler -------------------------------------------------------------------------------------------------------

    @property
    def _sched(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The ranks' real addresses; the first rank's is what routers are told."""
        ranks = [item for item in metadata.values() if isinstance(item, KVPushHandshakeMetadata)]
        if ranks:
            first = min(ranks, key=lambda item: item.rank)
            self._sched.address = PeerAddress(self._settings.advertised_host, first.port)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The pool in which suspect blocks are pinned."""
        if self._scheduler is not None:
            self._scheduler.block_pool = gpu_block_pool

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All transferred groups are overwritten whole: vLLM must not zero them while bytes arrive."""
        return self._group_ids

    def on_new_request(self, request: Any) -> None:
        """First sight of a request."""
        with self._sched.cost:
            self._sched.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens will be pushed to us."""
        with self._sched.cost:
            return self._sched.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The destination blocks are allocated."""
        with self._sched.cost:
            self._sched.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVPushMetadata:
        """The step's metadata for the workers."""
        with self._sched.cost:
            meta = self._sched.build_meta(scheduler_output)
        self._sched.cost.end_step(computes=meta.computes)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' outcomes, before vLLM acts on them."""
        with self._sched.cost:
            self._sched.on_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """One group."""
        with self._sched.cost:
            return self._sched.on_finished(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """All groups."""
        with self._sched.cost:
            return self._sched.on_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    # --- both ------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the endpoint."""
        if self._worker is not None:
            self._worker.close()


def _first_rank(parallel: Any) -> int:
    """Number of the first rank of this data-parallel instance: ports are counted over all of them."""
    return int(getattr(parallel, "data_parallel_rank", 0) or 0) * int(parallel.world_size)
