# SPDX-License-Identifier: Apache-2.0
"""What kvpush tells vLLM's own log line and ``/metrics``: counters, added up over ranks and steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: Mapping[str, str] = {
    "received_requests": "Requests whose KV was pushed to this instance.",
    "received_tokens": "Prompt tokens whose KV was pushed to this instance.",
    "failed_receives": "Requests whose KV did not arrive: recomputed or failed, as configured.",
    "cancelled_receives": "Requests that were aborted while their KV was awaited.",
    "quarantined_receives": "Failed receives whose blocks had to be kept out of use for a while.",
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
    "submitter_cpu_seconds": "CPU time of the submitter thread.",
}
"""Name to help text. The Prometheus names are ``kvpush_<name>_total``."""


class KVPushStats(KVConnectorStats):
    """Increments of :data:`COUNTERS` since the last step; zeros are left out."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVPushStats:
        """Add another rank's or step's increments."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what has happened, nothing that hasn't."""
        return {name: round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


class KVPushPromMetrics(KVConnectorPromMetrics):
    """One counter per name and engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = metric_types[Counter](name=f"kvpush_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count increments."""
        for name, value in transfer_stats_data.items():
            per_engine = self._counters.get(name)
            if per_engine is not None and engine_idx in per_engine and value > 0:
                per_engine[engine_idx].inc(value)
