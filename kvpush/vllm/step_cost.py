# SPDX-License-Identifier: Apache-2.0
"""How long vLLM's engine thread spends in the connector's hooks, step by step.

It must stay small whatever the transfers do, so it is counted for every step: two reads of the clock a hook, one bucket a step.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

__all__ = ["BOUNDS_S", "REPORT_INTERVAL_S", "SERIES", "SIDES", "STEPS", "StepCost", "histogram_quantile"]

_BOUNDS_US = (*range(5, 30, 5), *range(30, 100, 10), 100, 125, 150, 200, 250, 300, 400, 500, 750, 1000, 2000, 5000, 10_000)
BOUNDS_S: Final = tuple(us / 1e6 for us in _BOUNDS_US)
"""Upper bounds of the buckets, seconds; narrow around the 100 us that a step may take."""
_BOUNDS_NS: Final = tuple(us * 1000 for us in _BOUNDS_US)

SIDES: Final = ("worker", "scheduler")
STEPS: Final = ("forward", "empty")
"""A step either runs a forward, or runs none because everything waits or there is only news to hand over."""

REPORT_INTERVAL_S: Final = 1.0
"""Building and sending a report costs more than most steps do: rarely enough to be none of the slowest hundredth."""


class _Series(NamedTuple):
    """What one bucket's count stands for."""

    side: str
    step: str
    bucket: int


def _count_key(series: _Series) -> str:
    return f"step_{series.side}_{series.step}_{series.bucket}"


SERIES: Final[Mapping[str, _Series]] = {
    _count_key(series): series
    for series in (_Series(side, step, bucket) for side in SIDES for step in STEPS for bucket in range(len(BOUNDS_S) + 1))
}
"""Names of the counts in a step's statistics. With ``_s`` appended: the seconds that those steps took together."""


class StepCost:
    """Adds up the time spent in hooks, and closes a step's account when it is over: ``with cost:`` around each hook.

    **Owner** the engine thread.

    Args:
        side: One of :data:`SIDES`.
    """

    __slots__ = ("_counts", "_dirty", "_due_ns", "_keys", "_spent_ns", "_started_ns", "_sums_ns")

    def __init__(self, side: str) -> None:
        num = len(_BOUNDS_NS) + 1
        self._keys = [[_count_key(_Series(side, step, bucket)) for bucket in range(num)] for step in STEPS]
        self._counts = [[0] * num for _ in STEPS]
        self._sums_ns = [[0] * num for _ in STEPS]
        self._spent_ns = 0
        self._started_ns = 0
        self._dirty = False
        self._due_ns = 0

    def __enter__(self) -> None:
        self._started_ns = time.perf_counter_ns()

    def __exit__(self, *exception: object) -> None:
        self._spent_ns += time.perf_counter_ns() - self._started_ns

    def end_step(self, *, computes: bool) -> None:
        """The hooks so far belong to one step; what is running now belongs to the next."""
        spent, self._spent_ns = self._spent_ns, 0
        which = 0 if computes else 1
        bucket = bisect_left(_BOUNDS_NS, spent)
        self._counts[which][bucket] += 1
        self._sums_ns[which][bucket] += spent
        self._dirty = True

    def take(self, *, now: bool = False) -> dict[str, float]:
        """Counts and seconds since the last time, named as in :data:`SERIES`; empty within :data:`REPORT_INTERVAL_S` of it.

        Args:
            now: Don't wait for the interval: something else is being reported anyway.
        """
        if not self._dirty:
            return {}
        at = time.perf_counter_ns()
        if at < self._due_ns and not now:
            return {}
        self._due_ns = at + round(REPORT_INTERVAL_S * 1e9)
        self._dirty = False
        found: dict[str, float] = {}
        for keys, counts, sums in zip(self._keys, self._counts, self._sums_ns, strict=True):
            for bucket, count in enumerate(counts):
                if count:
                    found[keys[bucket]] = count
                    found[keys[bucket] + "_s"] = sums[bucket] / 1e9
                    counts[bucket] = sums[bucket] = 0
        return found


def histogram_quantile(cumulated: Sequence[tuple[float, float]], quantile: float) -> float:
    """A quantile of a Prometheus histogram.

    Args:
        cumulated: upper bound and number of observations up to it, by rising bound, the last one infinite.
        quantile: 0 to 1.

    Returns:
        The quantile, linear within its bucket, the last finite bound where it lies beyond that; NaN without observations.
    """
    if not cumulated or cumulated[-1][1] <= 0:
        return math.nan
    rank = quantile * cumulated[-1][1]
    low, below = 0.0, 0.0
    for bound, up_to in cumulated:
        if up_to >= rank and up_to > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (up_to - below)
        low, below = bound, up_to
    return low
