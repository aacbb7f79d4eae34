# SPDX-License-Identifier: Apache-2.0
"""The cases of ``kvpush bench backends`` under pytest-benchmark: every way of every backend that can run here.

The source is in this process, the target in one of its own. ``extra_info`` has the result as the command writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvpush.bench.backends.benches import BENCHES
from kvpush.bench.backends.case import FULL, QUICK, Axes, LeftOut, blank
from kvpush.bench.backends.ends import Ends, open_ends
from kvpush.bench.backends.ways import Way, find_ways

WAYS, _ = find_ways()


def _way(way: Way) -> Any:
    return pytest.param(way, id=f"backend={way.name}", marks=[pytest.mark.nixl] if way.subject.variant else [])


def _cases() -> Iterator[Any]:
    for name, bench in BENCHES.items():
        for axes in bench.axes(FULL):
            words = [name, *(f"{axis}={value}" for axis, value in axes.items())]
            yield pytest.param(name, axes, id="-".join(words))


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[tuple[str, str], Ends]]:
    """The ends of the way and bench that are measured at the time."""
    ends: dict[tuple[str, str], Ends] = {}
    yield ends
    for one in ends.values():
        one.close()


@pytest.mark.parametrize(("name", "axes"), list(_cases()), scope="module")
@pytest.mark.parametrize("way", [_way(way) for way in WAYS], scope="module")
def bench_backend(
    benchmark: Any,
    way: Way,
    name: str,
    axes: Axes,
    opened: dict[tuple[str, str], Ends],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    effort = QUICK if benchmark.disabled else FULL
    if (way.name, name) not in opened:
        while opened:
            opened.popitem()[1].close()
        for variable, value in way.environment.items():
            monkeypatch.setenv(variable, value)
        opened[way.name, name] = open_ends(way.entry_point, way.options, effort.num_bytes)
    ends = opened[way.name, name]
    result = msgspec.structs.replace(blank(ends, name, way.subject.variant), **axes)
    try:
        case = BENCHES[name].make(ends, result, effort)
    except LeftOut as reason:
        pytest.skip(str(reason))
    try:
        benchmark.pedantic(case.run, setup=case.between, rounds=case.rounds, warmup_rounds=1)
        case.check()
    finally:
        case.close()
    if benchmark.stats is not None:
        benchmark.extra_info |= msgspec.to_builtins(case.finish(benchmark.stats.stats.data))
