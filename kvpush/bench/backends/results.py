# SPDX-License-Identifier: Apache-2.0
"""The form of what was found: what ``--json`` writes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["Report", "Result", "Status", "Subject"]

Status = Literal["measured", "failed", "given up", "cannot run", "broken"]
"""``failed``: some bench of it raised, the others are there. ``given up``: it hung, died, or never began."""


class Result(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One measured case. What a case doesn't have is left out.

    Args:
        bench: Name of the bench, such as ``write_bandwidth``.
        backend: Name of the backend.
        transport: Name that its transport gives itself, such as ``nixl-ucx``.
        variant: Which way of the transport: ``sm``, ``tcp``; not there where there is only one.
        num_bytes: Bytes moved, hashed or registered in one round.
        block_bytes: Length of a block.
        fragmented: Blocks in random order on both sides.
        coalesced: Neighbouring blocks are one descriptor.
        layout: ``direct`` or ``scatter``, as :attr:`kvpush.core.plan.PairPlan.way`; ``staged``: packed, and unpacked there.
        descriptors: Rows in one round.
        regions: Ranges of memory registered.
        rounds: Rounds behind the median.
        us: Median of a round, in microseconds.
        us_p99: 99th percentile, where rounds are many.
        us_per_descriptor: ``us`` by ``descriptors``.
        gbytes_per_s: ``num_bytes`` by the median, 1e9 bytes a second.
        memcpy_gbytes_per_s: Of a plain copy of as many bytes of the same memory, taken between the rounds.
        ratio: ``gbytes_per_s`` by ``memcpy_gbytes_per_s``.
    """

    bench: str
    backend: str
    transport: str
    variant: str = ""
    num_bytes: int | None = None
    block_bytes: int | None = None
    fragmented: bool | None = None
    coalesced: bool | None = None
    layout: str | None = None
    descriptors: int | None = None
    regions: int | None = None
    rounds: int | None = None
    us: float | None = None
    us_p99: float | None = None
    us_per_descriptor: float | None = None
    gbytes_per_s: float | None = None
    memcpy_gbytes_per_s: float | None = None
    ratio: float | None = None

    @property
    def way(self) -> str:
        """Backend and variant in one word."""
        return f"{self.backend}-{self.variant}" if self.variant else self.backend


class Subject(msgspec.Struct, frozen=True):
    """One way of one backend, measured or not.

    Args:
        backend: Its name.
        variant: As in :class:`Result`.
        distribution: What ships it; empty where that isn't known.
        status: What became of it.
        reasons: Why it wasn't measured, or what failed.
        processes: 2 where each end has a process of its own, 1 where they share one; 0 when not measured.
        left_out: Benches that it has nothing to show for, each with the reason.
    """

    backend: str
    variant: str
    distribution: str
    status: Status
    reasons: tuple[str, ...] = ()
    processes: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """Backend and variant in one word."""
        return f"{self.backend}-{self.variant}" if self.variant else self.backend


class Report(msgspec.Struct, frozen=True):
    """A whole run.

    Args:
        host: What a figure is worth nothing without, by :func:`kvpush.demo.runner.describe_host`, and the load at the end.
        quick: Whether it was only to see that all works: too few bytes and rounds for figures.
        backends: Every way of every backend that was found or asked for.
        results: All cases.
    """

    host: dict[str, Any]
    quick: bool
    backends: tuple[Subject, ...]
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whatever can run here was measured, all of it."""
        return all(subject.status in ("measured", "cannot run") for subject in self.backends)
