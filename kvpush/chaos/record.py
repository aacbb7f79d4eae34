# SPDX-License-Identifier: Apache-2.0
"""Keeps what is seen and done during a storm: its clock, counters of instances, faults, failures."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from kvpush.chaos.asking import Ask, Reply
from kvpush.chaos.cluster import Cluster, Condition
from kvpush.chaos.faults import FaultLog, clock
from kvpush.chaos.leaks import Totals
from kvpush.chaos.oracle import Difference
from kvpush.chaos.results import Failure, StormResult, Topology
from kvpush.demo.runner import read_metrics

__all__ = ["Record"]


class Record:
    """What is seen and done during one storm. Owner: the event loop.

    Args:
        topology: of the storm.
        cluster: what it rages over.
        session: for metrics.
    """

    def __init__(self, topology: Topology, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self.result = StormResult(topology)
        self.log = FaultLog(self.now)
        self.totals = {role: Totals() for role in cluster.instances}
        self._router_totals = Totals()
        self._cluster = cluster
        self._session = session
        self.begin()

    def begin(self) -> None:
        """The storm begins now."""
        self._began = asyncio.get_running_loop().time()

    def now(self) -> float:
        """Seconds of the storm."""
        return asyncio.get_running_loop().time() - self._began

    async def metrics(self, url: str) -> dict[str, float]:
        """Read what a server counts, for seconds at most.

        Args:
            url: of the server.

        Returns:
            By name, added up over labels; nothing if it can't be had.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                return await read_metrics(self._session, f"{url}/metrics")
        return {}

    async def scrape(self) -> None:
        """Note the counters of every server that is up."""
        for role, instance in self._cluster.instances.items():
            if instance.condition is Condition.UP:
                lives = len(instance.logs)
                metrics = await self.metrics(instance.url)
                if len(instance.logs) == lives and instance.condition is Condition.UP:
                    self.totals[role].seen(metrics)
        self._router_totals.seen(await self.metrics(self._cluster.url))

    def fail_request(self, kind: str, asked: Ask, reply: Reply, sent_at: float, wrong: Sequence[Difference]) -> None:
        """Note the failure of a request.

        Args:
            kind: see `Failure`.
            asked: what was asked.
            reply: what came.
            sent_at: when it was sent, in seconds of the storm.
            wrong: how the answers differ from the right ones.
        """
        detail = {
            "request_id": asked.request_id,
            "prompt_id": asked.prompt.prompt_id,
            "prompt_tokens": len(asked.prompt.tokens),
            "output_tokens": asked.output_tokens,
            "samples": asked.samples,
            "stream": asked.stream,
            "sent_at_s": round(sent_at, 2),
            "ending": reply.ending.value,
            "error": reply.error,
            "detail": reply.detail,
            "differences": [
                {
                    "what": one.what,
                    "position": one.position,
                    "expected": list(one.expected),
                    "got": list(one.got),
                    "deviation": None if math.isnan(one.deviation) else round(one.deviation, 6),
                }
                for one in wrong
            ],
        }
        what = wrong[0].what if wrong else f"{reply.error or 'no end'} {reply.detail}".strip()
        self.fail(kind, what, since_s=sent_at, logs=[*self._cluster.instances, "router"], detail=detail)

    def fail(
        self,
        kind: str,
        what: str,
        *,
        logs: Sequence[str] = (),
        detail: Mapping[str, Any] | None = None,
        since_s: float | None = None,
    ) -> None:
        """Note a failure.

        Args:
            kind: see `Failure`.
            what: in one line.
            logs: roles whose logs are to be looked at.
            detail: more of it.
            since_s: when it began, in seconds of the storm; now if None.
        """
        now = self.now()
        paths: list[str] = []
        for role in logs:
            instance = self._cluster.instances.get(role)
            if instance is not None:
                paths += [str(path) for path in instance.logs[-2:]]
            elif role == "router" and self._cluster.router is not None:
                paths.append(str(self._cluster.router.log_path))
        self.result.failures.append(
            Failure(
                kind=kind,
                what=what,
                at_s=now,
                clock=clock(),
                detail=detail or {},
                faults=self.log.around(now if since_s is None else since_s, now),
                logs=paths,
            )
        )

    def finish(self) -> None:
        """Put everything that was counted into the result."""
        result = self.result
        result.faults = self.log.counts()
        result.fault_log = [fault.as_json() for fault in self.log.entries]
        result.kvpush = {role: totals.as_dict() for role, totals in self.totals.items()}
        if result.integrity_errors:
            what = f"{result.integrity_errors} requests arrived with another digest than they were sent with"
            self.fail("integrity", what, logs=["decode"])
        for role, counters in result.kvpush.items():
            if counters.get("kvpush_submitter_restarts"):
                self.fail("internal error", f"the submitter of {role} stopped on a bug of its own", logs=[role])
        result.router = self._router_totals.as_dict()
        result.instances = {
            role: {"pinned": one.pinned, "logs": [str(path) for path in one.logs]}
            for role, one in self._cluster.instances.items()
        }
