# SPDX-License-Identifier: Apache-2.0
"""The half of the connector that lives in each worker: a step's metadata becomes events, outcomes become vLLM's results.

**Owner** the worker's main thread, for everything here. Nothing waits, but for :meth:`WorkerSide.wait_if_idle` in a step that
computes nothing, for a bounded time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpush.core.events import (
    BlocksSafe,
    EngineEvent,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveStatus,
    SourceAborted,
    SourceFinished,
    SourcePreempted,
    SourceProgressed,
    SourceReleased,
    SourceStarted,
    StartAwaitCancelled,
)
from kvpush.core.ids import BlockTable, RequestId
from kvpush.endpoint import Endpoint
from kvpush.errors import KvPushError, SubmitterClosed
from kvpush.vllm.metadata import KVPushMetadata, KVPushWorkerMetadata, Progress
from kvpush.vllm.step_cost import REPORT_INTERVAL_S, StepCost

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5e-3


@dataclass(slots=True)
class StepResults:
    """What one step reports. Each id once in the life of its request."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class WorkerCounters:
    """Monotonic counts, for metrics and tests."""

    sent: int = 0
    unclaimed: int = 0
    received: int = 0
    failed: int = 0
    cancelled: int = 0
    quarantined: int = 0
    tokens_received: int = 0
    bytes_sent: int = 0
    surprises: int = 0


class WorkerSide:
    """Feeds the endpoint and keeps the books that vLLM's asserts demand.

    Args:
        endpoint: Open already.
        layer_names: In forward order, as in the endpoint's layout.
        layer_events: Tell the endpoint of layers as they are written, as soon as it is worth it (else of whole steps).
        token_bytes: Bytes of KV that each layer has per token, in the order of ``layer_names``.
        empty_step_wait_s: Longest wait in a step that computes nothing.
        failures_by_request: vLLM gives the blocks of a failed request back. False: it goes on using them (see
            :data:`kvpush.vllm.compat.FAILURES_BY_REQUEST`), so that failures are reported when the blocks are safe, not sooner.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        layer_names: list[str],
        *,
        layer_events: bool,
        empty_step_wait_s: float,
        failures_by_request: bool = True,
        token_bytes: Sequence[int] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.counters = WorkerCounters()
        self.cost = StepCost("worker")
        self._layer_idx = {name: idx for idx, name in enumerate(layer_names)}
        self._num_layers = len(layer_names)
        self._layer_events = layer_events
        self._token_bytes = list(token_bytes) if token_bytes is not None else [0] * len(layer_names)
        self._untold_bytes = 0
        self._hooks_fired = False
        self._empty_step_wait_s = empty_step_wait_s
        self._failures_by_request = failures_by_request
        self._step: list[Progress] = []
        self._next_layer = 0
        self._bound: KVPushMetadata | None = None
        self._receiving: dict[str, BlockTable] = {}
        self._held: dict[str, BlockTable] = {}
        self._sources: set[str] = set()
        self._ended_sources: set[str] = set()
        self._released_early: set[str] = set()
        self._quarantined: set[str] = set()
        self._results = StepResults()
        self._meta = KVPushWorkerMetadata()
        self._last_totals: dict[str, float] = {}
        self._news = False
        self._next_look = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._said_no_hooks = False

    # --- before the forward --------------------------------------------------------------------------------------------

    def begin_step(self, meta: KVPushMetadata) -> None:
        """Hand over what the scheduler says, before the forward runs. Idempotent for one step."""
        if meta is self._bound:
            return
        # vLLM skips wait_for_save on pipeline ranks that draft nothing though others do.
        self.end_forward()
        if self._bound is not None:
            self.cost.end_step(computes=self._bound.computes)
        self._bound = meta
        for request_id in meta.preempted:
            if request_id not in self._released_early:
                self._submit(SourcePreempted(RequestId(request_id)))
        for announced in meta.announced:
            self._sources.add(announced.source_id)
            if self._submit(announced) is not None:
                self._released_early.add(announced.source_id)
        for request_id in meta.finished:
            self._end_source(SourceFinished(RequestId(request_id)))
        for aborted in meta.aborted:
            self._end_source(aborted)
        for receive in meta.receives:
            self._receiving[receive.request_id] = receive.blocks
            error = self._submit(receive)
            if error is not None:
                self._on_receive_ended(ReceiveEnded(receive.request_id, ReceiveStatus.FAILED, True, error=error))
        for request_id in meta.receive_aborts:
            self._submit(ReceiveAborted(RequestId(request_id)))
        for declined in meta.declined:
            self._submit(declined)
        for watch in meta.watches:
            if self._submit(watch) is not None:
                self._meta.started.add(watch.request_id)
        for request_id in meta.unwatched:
            self._submit(StartAwaitCancelled(RequestId(request_id)))
        self._step = meta.progress
        self._next_layer = 0
        self._untold_bytes = 0

    def _end_source(self, event: SourceFinished | SourceAborted) -> None:
        source_id = event.source_id
        self._ended_sources.add(source_id)
        if source_id in self._released_early or self._submit(event) is not None:
            self._on_source_released(SourceReleased(source_id, 0, 0))

    def _submit(self, event: EngineEvent, *, wake: bool = True) -> KvPushError | None:
        """Submit, or say why that is impossible. Never raises: vLLM's worker would die of it."""
        try:
            self.endpoint.submit(event, wake=wake)
        except SubmitterClosed as error:
            return error
        return None

    # --- during and after the forward ----------------------------------------------------------------------------------

    @property
    def awaits_layers(self) -> bool:
        """Whether :meth:`layer_done` has anything to do in this step: asked once a layer, so the answer is kept simple."""
        return self._layer_events and bool(self._step)

    def layer_done(self, layer_name: str) -> None:
        """``save_kv_layer``: this layer's attention has written its KV."""
        if not self._step or not self._layer_events:
            return
        idx = self._layer_idx.get(layer_name)
        self._hooks_fired = True
        if idx is None or idx < self._next_layer:
            return
        self._untold_bytes += self._token_bytes[idx] * sum(item.num_tokens for item in self._step)
        if self._untold_bytes >= self.endpoint.worthwhile_bytes or idx + 1 == self._num_layers:
            self._tell(idx + 1)

    def end_forward(self) -> None:
        """The forward has ended, or has been launched: whatever had no hook is swept. Idempotent for one step."""
        if self._step and self._next_layer < self._num_layers:
            if self._layer_events and not self._hooks_fired and not self._said_no_hooks:
                self._said_no_hooks = True
                logger.info("kvpush: layer hooks don't fire here (full CUDA graphs?): KV is pushed at the end of each chunk")
            self._tell(self._num_layers)
        self._step = []

    def _tell(self, layer_hi: int) -> None:
        first = self._next_layer == 0
        fence = self.endpoint.device_fence()
        for item in self._step:
            if item.source_id in self._released_early:
                continue  # the submitter has crashed since it was announced, and may have been started again
            blocks: BlockTable | None = None
            if first and item.new_blocks is not None:
                blocks = tuple(np.asarray(ids, np.int32) for ids in item.new_blocks)
            self._submit(SourceProgressed(RequestId(item.source_id), self._next_layer, layer_hi, item.token_hi, blocks, fence))
        self._next_layer = layer_hi
        self._untold_bytes = 0

    # --- outcomes ------------------------------------------------------------------------------------------------------

    def results(self) -> StepResults:
        """``get_transfer_results``: outcomes since the last step.

        Sweeps nothing: where drafts are made, their layers are written after this and before ``wait_for_save``.
        """
        for outcome in self.endpoint.drain():
            self._news = True
            if isinstance(outcome, ReceiveEnded):
                self._on_receive_ended(outcome)
            elif isinstance(outcome, SourceReleased):
                self._on_source_released(outcome)
            elif isinstance(outcome, SourceStarted):
                self._meta.started.add(outcome.request_id)
            else:
                self._on_blocks_safe(outcome)
        results, self._results = self._results, StepResults()
        return results

    def wait_if_idle(self) -> None:
        """In a step that computes nothing, while requests of ours wait: sleep until something has happened, for a bounded time.

        vLLM would otherwise run about 1,000 such steps a second. The first ones in a row wait only briefly, so that what
        follows at once is not held up.
        """
        bound = self._bound
        if bound is None or bound.computes or not bound.waiting:
            self._pause_s = _FIRST_PAUSE_S
            return
        if self._results.sent or self._results.received or self._empty_step_wait_s <= 0:
            return
        if self.endpoint.wait_outcome(min(self._pause_s, self._empty_step_wait_s)):
            self._pause_s = _FIRST_PAUSE_S
        else:
            self._pause_s = min(self._pause_s * 2, 1.0)

    def _on_receive_ended(self, outcome: ReceiveEnded) -> None:
        request_id = outcome.request_id
        if request_id not in self._receiving:
            self.counters.surprises += 1
            return
        blocks = self._receiving.pop(request_id)
        if outcome.status is ReceiveStatus.RECEIVED:
            self.counters.received += 1
            self.counters.tokens_received += outcome.num_tokens
            self._results.received.add(request_id)
            return
        if outcome.status is ReceiveStatus.CANCELLED:
            self.counters.cancelled += 1
            self._results.received.add(request_id)
            return
        self.counters.failed += 1
        logger.warning("kvpush: request %s was not received: %s", request_id, outcome.error)
        if outcome.error is not None:
            for line in outcome.error.story:
                logger.debug("kvpush:   %s", line)
        if not outcome.blocks_safe:
            self.counters.quarantined += 1
            if not self._failures_by_request:
                self._held[request_id] = blocks
                return
            self._quarantined.add(request_id)
            self._meta.unsafe[request_id] = 1
        self._report_failed(request_id, blocks)

    def _report_failed(self, request_id: str, blocks: BlockTable) -> None:
        self._results.received.add(request_id)
        self._results.failed.add(request_id)
        if not self._failures_by_request:
            self._results.failed_blocks.update(int(block) for group in blocks for block in group)

    def _on_blocks_safe(self, outcome: BlocksSafe) -> None:
        request_id = outcome.request_id
        held = self._held.pop(request_id, None)
        if held is not None:
            self._report_failed(request_id, held)
        elif request_id in self._quarantined:
            self._quarantined.discard(request_id)
            self._meta.safe[request_id] = 1
        else:
            self.counters.surprises += 1

    def _on_source_released(self, outcome: SourceReleased) -> None:
        source_id = outcome.source_id
        if source_id not in self._sources:
            self.counters.surprises += 1
            return
        if source_id not in self._ended_sources:
            # Only after a crash of the submitter: vLLM doesn't know yet that it will have to wait for this id.
            self._released_early.add(source_id)
            return
        self._sources.discard(source_id)
        self._ended_sources.discard(source_id)
        self._released_early.discard(source_id)
        self._results.sent.add(source_id)
        self.counters.bytes_sent += outcome.num_bytes
        if outcome.num_streams:
            self.counters.sent += 1
        else:
            self.counters.unclaimed += 1
        if outcome.error is not None:
            logger.warning("kvpush: nobody took the KV of request %s: %s", source_id, outcome.error)

    def take_meta(self) -> KVPushWorkerMetadata | None:
        """``build_connector_worker_meta``: what the scheduler has to know of quarantines."""
        if not self._meta.unsafe and not self._meta.safe and not self._meta.started:
            return None
        meta, self._meta = self._meta, KVPushWorkerMetadata()
        return meta

    def totals(self) -> dict[str, float]:
        """Every counter of :data:`kvpush.vllm.stats.COUNTERS` since start-up. Reads what the submitter thread counts: each
        number is right by itself, the set may be a moment apart."""
        submitter = self.endpoint.submitter
        totals: dict[str, float] = {
            "received_requests": self.counters.received,
            "received_tokens": self.counters.tokens_received,
            "failed_receives": self.counters.failed,
            "cancelled_receives": self.counters.cancelled,
            "quarantined_receives": self.counters.quarantined,
            "sent_requests": self.counters.sent,
            "unclaimed_requests": self.counters.unclaimed,
            "sent_bytes": self.counters.bytes_sent,
            "bad_frames": submitter.counters.bad_frames,
            "submitter_restarts": self.endpoint.restarts,
            "submitter_cpu_seconds": submitter.counters.cpu_s,
        }
        if submitter.producer is not None:
            produced = submitter.producer.counters
            totals |= {
                "writes": produced.writes,
                "failed_streams": produced.streams_failed,
                "expired_sources": produced.sources_expired,
                "restarted_sources": produced.restarts,
                "lease_stalls": produced.lease_stalls,
                "lost_sessions": produced.sessions_lost,
                "refused_handshakes": produced.refused_hellos,
            }
        totals |= submitter.channel_counts()
        if submitter.consumer is not None:
            consumed = submitter.consumer.counters
            totals["lost_sessions"] = totals.get("lost_sessions", 0) + consumed.sessions_lost
            totals["verified_receives"] = consumed.verified
            totals["integrity_errors"] = consumed.integrity_errors
        return totals

    def take_increments(self) -> dict[str, float]:
        """What has changed since the last call; empty when nothing but CPU time has, and that by less than 10 ms.

        Looks only after an outcome, and else at intervals: it is called in every step of the engine.
        """
        now = time.monotonic()
        if not self._news and now < self._next_look:
            return {}
        self._news = False
        self._next_look = now + REPORT_INTERVAL_S
        totals = self.totals()
        grown = {name: value - self._last_totals.get(name, 0) for name, value in totals.items()}
        grown = {name: value for name, value in grown.items() if value}
        if not grown or (set(grown) == {"submitter_cpu_seconds"} and grown["submitter_cpu_seconds"] < 0.01):
            return self.cost.take()
        self._last_totals = totals
        return grown | self.cost.take(now=True)

    def close(self) -> None:
        """``shutdown``."""
        if not self.endpoint.close():
            logger.warning("kvpush: not every transfer ended in time; memory with writes in flight is left registered")
