# SPDX-License-Identifier: Apache-2.0
"""The cost of engine steps: counted by step and kind, told at intervals, and read back from Prometheus' text."""

from __future__ import annotations

import math

import pytest

from kvpush.bench.steps import STEP_SERIES, engine_steps
from kvpush.vllm import step_cost
from kvpush.vllm.step_cost import BOUNDS_S, SERIES, StepCost, histogram_quantile


class Clock:
    def __init__(self) -> None:
        self.ns = 10**12

    def perf_counter_ns(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_cost, "time", clock)
    return clock


def hooks(cost: StepCost, clock: Clock, *spans_us: int) -> None:
    for span in spans_us:
        with cost:
            clock.ns += span * 1000
        clock.ns += 50_000_000  # Not ours.


def raise_after(clock: Clock, ns: int) -> None:
    clock.ns += ns
    raise ZeroDivisionError


def told(found: dict[str, float]) -> dict[tuple[str, str, float], tuple[float, float]]:
    """By side, kind and upper bound: count and microseconds."""
    return {
        (series.side, series.step, (*BOUNDS_S, math.inf)[series.bucket]): (found[key], round(found[f"{key}_s"] * 1e6, 3))
        for key, series in SERIES.items()
        if key in found
    }


def test_the_hooks_of_a_step_add_up(clock: Clock) -> None:
    cost = StepCost("worker")
    hooks(cost, clock, 3, 4, 5)
    cost.end_step(computes=True)
    hooks(cost, clock, 10)
    cost.end_step(computes=True)
    hooks(cost, clock, 10_001)
    cost.end_step(computes=False)
    assert told(cost.take()) == {
        ("worker", "forward", 15e-6): (1, 12),
        ("worker", "forward", 10e-6): (1, 10),
        ("worker", "empty", math.inf): (1, 10_001),
    }


def test_what_runs_when_a_step_ends_belongs_to_the_next(clock: Clock) -> None:
    cost = StepCost("worker")
    hooks(cost, clock, 7)
    with cost:
        clock.ns += 20_000
        cost.end_step(computes=True)
        clock.ns += 20_000
    cost.end_step(computes=False)
    assert told(cost.take()) == {("worker", "forward", 10e-6): (1, 7), ("worker", "empty", 40e-6): (1, 40)}


def test_an_exception_in_a_hook_is_timed_and_passed_on(clock: Clock) -> None:
    cost = StepCost("scheduler")
    with pytest.raises(ZeroDivisionError), cost:
        raise_after(clock, 8_000)
    cost.end_step(computes=True)
    assert told(cost.take()) == {("scheduler", "forward", 10e-6): (1, 8)}


def test_it_is_told_at_intervals_or_with_other_news(clock: Clock) -> None:
    cost = StepCost("worker")
    assert cost.take() == {}
    cost.end_step(computes=True)
    assert cost.take() != {}
    cost.end_step(computes=True)
    assert cost.take() == {}
    assert told(cost.take(now=True)) == {("worker", "forward", 5e-6): (1, 0)}
    assert cost.take(now=True) == {}
    cost.end_step(computes=True)
    clock.ns += round(step_cost.REPORT_INTERVAL_S * 1e9)
    assert told(cost.take()) == {("worker", "forward", 5e-6): (1, 0)}


def test_quantiles_are_linear_within_a_bucket() -> None:
    cumulated = [(1.0, 0.0), (2.0, 50.0), (4.0, 100.0), (math.inf, 100.0)]
    assert histogram_quantile(cumulated, 0.5) == 2.0
    assert histogram_quantile(cumulated, 0.25) == 1.5
    assert histogram_quantile(cumulated, 0.99) == pytest.approx(3.96)
    assert histogram_quantile([(1.0, 1.0), (math.inf, 4.0)], 0.9) == 1.0
    assert math.isnan(histogram_quantile([], 0.5))
    assert math.isnan(histogram_quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5))


def test_steps_are_read_from_the_metrics_text() -> None:
    counters = {"kvpush_writes_total": 3.0}
    for side, step, below_10, below_20, total in (("worker", "forward", 90, 98, 100), ("scheduler", "empty", 0, 0, 0)):
        labels = f'engine="0",model_name="a \\"b\\"",side="{side}",step="{step}"'
        for bound, count in (("1e-05", below_10), ("2e-05", below_20), ("+Inf", total)):
            counters[f'{STEP_SERIES}_bucket{{le="{bound}",{labels}}}'] = count
        counters[f"{STEP_SERIES}_count{{{labels}}}"] = total
        counters[f"{STEP_SERIES}_sum{{{labels}}}"] = 1e-5 * total
        counters[f"{STEP_SERIES}_created{{{labels}}}"] = 1.7e9
    assert engine_steps(counters) == {"worker": {"forward": {"steps": 100, "mean": 10.0, "p50": 5.6, "p99": 20.0}}}
    assert engine_steps({}) == {}
