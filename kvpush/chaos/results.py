# SPDX-License-Identifier: Apache-2.0
"""What is run, and what was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvpush.chaos.cluster import Network
from kvpush.chaos.faults import Kind
from kvpush.chaos.oracle import Oracle
from kvpush.errors import ConfigError

__all__ = ["MUST_BE_ZERO", "ChaosConfig", "ChaosResult", "Failure", "StormResult", "Topology"]

MUST_BE_ZERO: Final = (
    ("wrong", "wrong answers"),
    ("integrity_errors", "digests that differ"),
    ("hung", "requests without an end"),
    ("engine_deaths", "engines that died by themselves"),
    ("leaked_blocks", "blocks not given back"),
    ("unreadable", "instances whose metrics can't be read"),
    ("leaked_fds", "file descriptors left over"),
    ("leaked_threads", "threads left over"),
    ("not_healed", "instances that push no more"),
    ("internal_errors", "bugs that stopped a submitter"),
    ("busy", "idle instances that compute"),
)
"""Counts of a `StormResult` that must be 0, and what they are called. Its `errors` must be none too."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What a storm rages over.

    Args:
        prefills: number of prefill instances, before one decode instance.
        network: what lies between.
    """

    prefills: int
    network: Network

    def __str__(self) -> str:
        return f"{self.prefills}p1d"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """What to run.

    Args:
        topologies: one storm each.
        seed: of prompts, load and faults.
        minutes: of load and faults, over all storms.
        kinds: faults that may be dealt; those that can't be made here are left out.
        verify: kvpush's setting of that name: "off", "sample" or "all".
        workers: requests at once.
        prompts: how many different ones.
        leaving: share of the requests whose client goes away at a random moment.
        deadline_s: by then a request must have ended.
        start_timeout_s: for the servers of a storm, and for each restart.
        work_dir: folder for model and logs.
    """

    topologies: tuple[Topology, ...]
    seed: int = 0
    minutes: float = 6.0
    kinds: tuple[Kind, ...] = tuple(Kind)
    verify: str = "all"
    workers: int = 8
    prompts: int = 48
    leaving: float = 0.3
    deadline_s: float = 120.0
    start_timeout_s: float = 300.0
    work_dir: Path

    def __post_init__(self) -> None:
        if not self.topologies:
            raise ConfigError("no topology is given")
        if self.minutes <= 0 or self.workers < 1 or self.prompts < 8:
            raise ConfigError("minutes must be above 0, workers at least 1 and prompts at least 8")
        if not 0 <= self.leaving <= 1:
            raise ConfigError("the share of clients that leave must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that must not happen, with what an engineer needs to find out why it did.

    Args:
        kind: "wrong", "hung", "error", "engine death", "leak", "unreadable", "not healed", "busy", "integrity" or
            "internal error".
        what: in one line.
        at_s: when it was seen, in seconds of the storm; `clock`: the same by this host's clock.
        detail: more of it.
        faults: what was done to the cluster around then.
        logs: of whom to look at.
    """

    kind: str
    what: str
    at_s: float
    clock: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    faults: Sequence[Mapping[str, Any]] = ()
    logs: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "kind": self.kind,
            "what": self.what,
            "at_s": round(self.at_s, 2),
            "clock": self.clock,
            **self.detail,
            "faults": list(self.faults),
            "logs": list(self.logs),
        }


@dataclass(slots=True)
class StormResult:
    """What one storm did and saw.

    Args:
        topology: what it raged over.
    """

    topology: Topology
    requests: int = 0
    ok: int = 0
    left: int = 0
    wrong: int = 0
    hung: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    """Errors by kind of requests that no recompute could save: their decode instance was killed."""
    errors: Counter[str] = field(default_factory=Counter)
    """Every other error, by kind."""
    engine_deaths: int = 0
    leaked_blocks: int = 0
    unreadable: int = 0
    leaked_fds: int = 0
    leaked_threads: int = 0
    not_healed: int = 0
    busy: int = 0
    restarts: int = 0
    fault_log: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    kvpush: dict[str, dict[str, float]] = field(default_factory=dict)
    """kvpush's counters by role, over all lives."""
    router: dict[str, float] = field(default_factory=dict)
    idle_cpu_percent: dict[str, float] = field(default_factory=dict)
    footprints: dict[str, dict[str, Any]] = field(default_factory=dict)
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_possible: list[str] = field(default_factory=list)
    """Faults that were asked for and can't be made here, and why."""

    def _decode(self, name: str) -> int:
        return round(self.kvpush.get("decode", {}).get(name, 0.0))

    @property
    def received(self) -> int:
        """Requests of engines whose KV was pushed to decode."""
        return self._decode("kvpush_received_requests")

    @property
    def recomputed(self) -> int:
        """Requests that decode computed itself because their KV did not come, or because prefill was not there to be asked."""
        return self._decode("kvpush_failed_receives") + round(self.router.get("kvpush_router_decode_only", 0.0))

    @property
    def integrity_errors(self) -> int:
        """Requests whose KV arrived with another digest than it was sent with. Each was recomputed."""
        return self._decode("kvpush_integrity_errors")

    @property
    def internal_errors(self) -> int:
        """Times that a submitter stopped on a bug of its own, and was started again."""
        return round(sum(counters.get("kvpush_submitter_restarts", 0.0) for counters in self.kvpush.values()))

    @property
    def ok_in_all(self) -> bool:
        """Whether nothing was lost, wrong, stuck or left behind, and KV was pushed at all."""
        counts = (*(getattr(self, name) for name, _ in MUST_BE_ZERO), *self.errors.values())
        return not any(counts) and self.received > 0 and self.ok > 0


@dataclass(slots=True, kw_only=True)
class ChaosResult:
    """What a run did and saw.

    Args:
        config: what was run.
        storms: in order.
        oracle: that judged the answers.
        host: what it ran on.
    """

    config: ChaosConfig
    storms: list[StormResult] = field(default_factory=list)
    oracle: Oracle
    host: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether every storm was as it must be."""
        return bool(self.storms) and all(storm.ok_in_all for storm in self.storms)
