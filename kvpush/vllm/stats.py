# SPDX-License-Identifier: Apache-2.0
"""What kvpush tells vLLM's own log line and ``/metrics``: counters, added up over ranks and steps, and the cost of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpush.vllm.step_cost import BOUNDS_S, SERIES, SIDES, STEPS, histogram_quantile

COUNTERS: Mapping[str, str] = {
    "received_requests": "Requests whose KV was pushed to this instance.",
    "received_tokens": "Prompt tokens whose KV was pushed to this instance.",
    "failed_receives": "Requests whose KV did not arrive: recomputed or failed, as configured.",
    "cancelled_receives": "Requests that were aborted while their KV was awaited.",
    "quarantined_receives": "Failed receives whose blocks had to be kept out of use for a while.",
    "verified_receives": "Received requests whose digests were compared and are equal (setting verify).",
    "integrity_errors": "Requests whose KV arrived with another digest than it was sent with.",
    "sent_requests": "Prefill requests whose KV was pushed to at least one consumer.",
    "unclaimed_requests": "Prefill requests whose KV nobody took.",
    "sent_bytes": "Bytes of KV written to consumers.",
    "writes": "Writes posted.",
    "failed_streams": "Pushes that failed on this side.",
    "expired_sources": "Prefill requests for which no consumer came in time.",
    "restarted_sources": "Prefill requests that were preempted with parts pushed already.",
    "lease_stalls": "Times that posting waited for a lease to be renewed.",
    "lost_sessions": "Conversations with other instances that broke off.",
    "refused_handshakes": "Consumers that were refused at the handshake.",
    "bad_frames": "Frames from peers that were refused.",
    "failed_handshakes": "Control connections that ended before a message could pass: another secret, none, or no peer at all.",
    "refused_producers": "Requests for a producer that this instance may not connect to.",
    "disconnected_peers": "Peers that were disconnected since they sent too much, or too many came at once.",
    "submitter_restarts": "Times that the submitter was started again after an internal error.",
    "submitter_cpu_seconds": "CPU time of the submitter thread.",
}
"""Name to help text. The Prometheus names are ``kvpush_<name>_total``."""


class KVPushStats(KVConnectorStats):
    """Increments of :data:`COUNTERS` since the last step, and of :data:`~kvpush.vllm.step_cost.SERIES`; zeros are left out."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVPushStats:
        """Add another rank's or step's increments."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what has happened, nothing that hasn't; and what steps with a forward cost."""
        told: dict[str, int | float] = {name: round(self.data[name], 3) for name in COUNTERS if self.data.get(name)}
        for side in SIDES:
            cumulated, total = [], 0.0
            for key, series in SERIES.items():
                if series.side == side and series.step == "forward":
                    total += self.data.get(key, 0)
                    cumulated.append(((*BOUNDS_S, math.inf)[series.bucket], total))
            if total:
                told[f"{side}_step_p99_us"] = round(1e6 * histogram_quantile(cumulated, 0.99), 1)
        return told

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


class KVPushPromMetrics(KVConnectorPromMetrics):
    """One counter per name and engine, and a histogram of the engine thread's time in our hooks.

    A worker and a scheduler that share a thread, as with one rank in the engine's process, both spend that thread's time.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = metric_types[Counter](name=f"kvpush_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}
        histogram = metric_types[Histogram](
            name="kvpush_engine_step_seconds",
            documentation="Time of vLLM's engine thread in kvpush's hooks in one step; the wait of an empty step is left out.",
            buckets=BOUNDS_S,
            labelnames=[*labelnames, "side", "step"],
        )
        self._steps: dict[int, dict[tuple[str, str], Any]] = {
            engine: {(side, step): histogram.labels(*values, side, step) for side in SIDES for step in STEPS}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count increments."""
        steps = self._steps.get(engine_idx, {})
        for name, series in SERIES.items():
            count = transfer_stats_data.get(name)
            if count and steps:
                # Their mean lies in their bucket (but for rounding), so that counts and sum come out right.
                mean = min(transfer_stats_data.get(f"{name}_s", 0.0) / count, (*BOUNDS_S, math.inf)[series.bucket])
                for _ in range(int(count)):
                    steps[series.side, series.step].observe(mean)
        for name, value in transfer_stats_data.items():
            per_engine = self._counters.get(name)
            if per_engine is not None and engine_idx in per_engine and value > 0:
                per_engine[engine_idx].inc(value)
