# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of one router, in a registry of their own.

Every label takes its values from a fixed set or from the configured instances, so that no client can add one.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

OUTCOMES = (
    "ok",
    "client_error",  # decode answered 4xx
    "upstream_error",  # decode answered 5xx
    "bad_request",  # refused by the router
    "no_decode",  # no decode instance could be reached
    "prefill_failed",  # with on_prefill_failure=error
    "timeout",  # no first byte in time
    "stream_broken",  # decode died or fell silent after its first byte
    "client_stalled",  # the client stopped reading
    "client_disconnected",
    "shutdown",
    "internal",
)
LEGS = ("prefill", "decode")
REASONS = (
    "connect",
    "connect_timeout",
    "disconnected",
    "timeout",
    "protocol",
    "status_4xx",
    "status_5xx",
    "bad_answer",
)
ENDPOINTS = ("completions", "chat_completions")
RETRIES = ("prefill_failed", "decode_failed", "stale_connection")
_TTFB_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RouterMetrics:
    """The counters of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvpush_router_requests", "Requests by how they ended.", ["endpoint", "outcome"], registry=self.registry
        )
        self.in_flight = Gauge("kvpush_router_in_flight", "Requests being served.", registry=self.registry)
        self.retries = Counter(
            "kvpush_router_retries", "Further tries of a request, by cause.", ["reason"], registry=self.registry
        )
        self.fallbacks = Counter(
            "kvpush_router_decode_only",
            "Requests served by decode alone although prefill instances are configured.",
            registry=self.registry,
        )
        self.leg_errors = Counter(
            "kvpush_router_leg_errors", "Failed legs by cause.", ["leg", "reason"], registry=self.registry
        )
        self.ttfb = Histogram(
            "kvpush_router_time_to_first_byte_seconds",
            "From the whole request to the first byte of a successful answer.",
            ["endpoint"],
            buckets=_TTFB_BUCKETS,
            registry=self.registry,
        )
        self.instance_up = Gauge(
            "kvpush_router_instance_up",
            "0 while an instance is left out after a failed connection.",
            ["role", "instance"],
            registry=self.registry,
        )
        self.instance_in_flight = Gauge(
            "kvpush_router_instance_in_flight", "Legs open to an instance.", ["role", "instance"], registry=self.registry
        )
        for endpoint in ENDPOINTS:
            self.requests.labels(endpoint, "ok")
            self.ttfb.labels(endpoint)
        for reason in RETRIES:
            self.retries.labels(reason)

    def render(self) -> bytes:
        """Return the text exposition format."""
        return generate_latest(self.registry)
