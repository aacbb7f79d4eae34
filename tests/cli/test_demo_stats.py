# SPDX-License-Identifier: Apache-2.0
"""Sums and digests of the demo."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from kvpush.demo.stats import HostCpu, calibrate, host_cpu, percentile, sha256_of_tokens, summarize
from kvpush.demo.supervisor import available_cores


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 95, 99, 100])
def test_percentile_is_numpys(count: int, percent: float) -> None:
    values = np.random.default_rng(count).standard_normal(count).tolist()
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_summary() -> None:
    assert summarize([4.0, 1.0, 3.0, 2.0]).as_dict() == {"mean": 2.5, "p50": 2.5, "p99": 3.97}


def test_summary_of_nothing_is_null_in_json() -> None:
    assert math.isnan(summarize([]).mean)
    assert summarize([]).as_dict() == {"mean": None, "p50": None, "p99": None}


def test_digest_sees_order_and_limits_of_outputs() -> None:
    digests = {
        sha256_of_tokens(outputs)
        for outputs in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[12], [3]], [[1, 2, 3]], [[1, 2], [3], []])
    }
    assert len(digests) == 6
    assert sha256_of_tokens([(1, 2), (3,)]) == sha256_of_tokens([[1, 2], [3]])


def test_calibration_gives_a_figure_for_each_core() -> None:
    core = available_cores()[0]
    (found,) = calibrate([core])
    assert found.core == core
    assert found.matmul_gflops > 0
    assert found.memcpy_gb_s > 0


def test_calibration_leaves_out_a_core_that_is_not_there() -> None:
    assert calibrate([100_000]) == []


def test_cpu_time_of_the_host(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(f"cpu  {tick} {tick} {tick} 900 900 {tick} {tick} {3 * tick} 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert host_cpu(stat) == HostCpu(5.0, 3.0)
    stat.write_text("nonsense\n")
    assert host_cpu(stat) is None
    assert host_cpu(tmp_path / "missing") is None
    now = host_cpu()
    assert now is None or now.busy_s > 0
