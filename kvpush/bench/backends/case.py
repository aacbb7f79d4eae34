# SPDX-License-Identifier: Apache-2.0
"""A case: something to run again and again, beside what it is compared with.

A case checks what it has done and judges no duration.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvpush.bench.backends.ends import Ends
from kvpush.bench.backends.results import Result

__all__ = ["FULL", "QUICK", "Axes", "Bench", "Case", "Effort", "LeftOut", "blank", "copying", "measure"]

Axes = Mapping[str, object]
"""Fields of :class:`~kvpush.bench.backends.results.Result` that tell a case of a bench from its others."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done.

    Args:
        num_bytes: Memory of each end, and bytes of a round where bandwidth is measured.
        block_bytes: Lengths of blocks.
        rounds: Of cases that take milliseconds.
        short_rounds: Of those that take microseconds.
    """

    num_bytes: int
    block_bytes: tuple[int, ...]
    rounds: int
    short_rounds: int


FULL = Effort(128 << 20, (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20), 9, 200)
"""A copy touches twice 128 MiB: more than any L2 cache, and than the last level that most CPUs have."""
QUICK = Effort(4 << 20, (4 << 10, 64 << 10), 2, 5)
"""To see that it works."""


class LeftOut(Exception):
    """A bench doesn't apply to a backend; the message says why."""


def _nothing() -> None:
    pass


@dataclass
class Case:
    """One thing to measure.

    Args:
        result: What is known of it beforehand.
        run: What is timed.
        rounds: How often, after a round that doesn't count.
        prepare: Called before each round, not timed.
        is_rate: It moves or reads ``num_bytes``, so that bytes a second mean something.
        limit: What it is compared with, timed before each round; None: nothing.
        check: Called once at the end; raises if what was done is wrong.
        close: Called whatever happened.
    """

    result: Result
    run: Callable[[], object]
    rounds: int
    prepare: Callable[[], None] = _nothing
    is_rate: bool = False
    limit: Callable[[], object] | None = None
    check: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    _limit_s: list[float] = field(default_factory=list)

    def between(self) -> None:
        """Everything before a round: a round of what it is compared with, and what isn't timed."""
        if self.limit is not None:
            begun = time.perf_counter()
            self.limit()
            self._limit_s.append(time.perf_counter() - begun)
        self.prepare()

    def finish(self, took_s: Sequence[float]) -> Result:
        """The result.

        Args:
            took_s: Seconds of each round that counts.
        """
        median_s = statistics.median(took_s)
        of = self.result
        found: dict[str, float] = {"rounds": len(took_s), "us": _rounded(median_s * 1e6)}
        if len(took_s) >= 100:
            found["us_p99"] = _rounded(statistics.quantiles(took_s, n=100)[98] * 1e6)
        if of.descriptors is not None:
            found["us_per_descriptor"] = _rounded(median_s * 1e6 / of.descriptors)
        if self.is_rate and of.num_bytes is not None:
            found["gbytes_per_s"] = _rounded(of.num_bytes / median_s / 1e9)
            if self.limit is not None:
                # The first round makes connections and touches memory.
                limit_s = statistics.median(self._limit_s[1:] or self._limit_s)
                found["memcpy_gbytes_per_s"] = _rounded(of.num_bytes / limit_s / 1e9)
                found["ratio"] = _rounded(limit_s / median_s)
        return msgspec.structs.replace(of, **found)


class Bench(NamedTuple):
    """A family of cases.

    Args:
        title: For people.
        axes: The cases, by how they differ.
        make: One case of them, given the result as far as it is known. Raises :class:`LeftOut` where it doesn't apply.
    """

    title: str
    axes: Callable[[Effort], Sequence[Axes]]
    make: Callable[[Ends, Result, Effort], Case]


def blank(ends: Ends, bench: str, variant: str) -> Result:
    """A result that says only what was measured where."""
    return Result(bench=bench, backend=ends.plugin.info.name, transport=ends.backend.transport.name, variant=variant)


def copying(ends: Ends) -> Callable[[], object] | None:
    """A plain copy of all of the source's memory; None where the device doesn't say how."""
    if not ends.device.copy(ends.spare, ends.side.memory):
        return None
    return lambda: ends.device.copy(ends.spare, ends.side.memory)


def measure(case: Case) -> Result:
    """Run a case, and check what it did.

    Raises:
        Exception: whatever the plugin raises, or what it did is wrong.
    """
    try:
        took_s = []
        for _ in range(1 + case.rounds):
            case.between()
            begun = time.perf_counter()
            case.run()
            took_s.append(time.perf_counter() - begun)
        case.check()
        return case.finish(took_s[1:])
    finally:
        case.close()


def _rounded(value: float) -> float:
    """To four significant digits."""
    return round(value, 3 - math.floor(math.log10(abs(value)))) if value else 0.0
