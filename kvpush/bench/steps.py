# SPDX-License-Identifier: Apache-2.0
"""What a step of vLLM's engine costs in kvpush's hooks, from the histogram in an instance's metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from kvpush.vllm.step_cost import histogram_quantile

__all__ = ["STEP_SERIES", "engine_steps"]

STEP_SERIES: Final = "kvpush_engine_step_seconds"
"""Name of the histogram. Labels `side`: worker or scheduler; `step`: with a forward, or empty."""

_SERIES: Final = re.compile(rf"{STEP_SERIES}_(?P<part>bucket|sum|count){{(?P<labels>[^}}]*)}}")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def engine_steps(counters: Mapping[str, float]) -> dict[str, dict[str, dict[str, Any]]]:
    """The cost of an instance's steps.

    Args:
        counters: how far the metrics have moved, by name and labels.

    Returns:
        By side and kind of step: `steps`, and `mean`, `p50` and `p99` in microseconds, percentiles linear within a bucket. Only
        those that there were.
    """
    buckets: dict[tuple[str, str], dict[float, float]] = {}
    sums: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], float] = {}
    for series, value in counters.items():
        found = _SERIES.fullmatch(series)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found["labels"]))
        key = (labels.get("side", ""), labels.get("step", ""))
        if found["part"] == "bucket":
            bound = float(labels["le"])
            own = buckets.setdefault(key, {})
            own[bound] = own.get(bound, 0.0) + value
        else:
            totals = sums if found["part"] == "sum" else counts
            totals[key] = totals.get(key, 0.0) + value
    report: dict[str, dict[str, dict[str, Any]]] = {}
    for (side, step), number in counts.items():
        if number <= 0:
            continue
        cumulated = sorted(buckets.get((side, step), {}).items())
        figures = {
            "mean": sums.get((side, step), 0.0) / number,
            "p50": histogram_quantile(cumulated, 0.5),
            "p99": histogram_quantile(cumulated, 0.99),
        }
        report.setdefault(side, {})[step] = {
            "steps": round(number),
            **{name: None if math.isnan(value) else round(1e6 * value, 1) for name, value in figures.items()},
        }
    return report
