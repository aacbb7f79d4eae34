# SPDX-License-Identifier: Apache-2.0
"""Sums of measured times, digests of outputs, and a figure for the speed of the host."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Calibration", "HostCpu", "Summary", "calibrate", "host_cpu", "percentile", "sha256_of_tokens", "summarize"]


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linear between the two nearest ranks, as `numpy.percentile` gives it.

    Args:
        values: at least one, in any order.
        percent: 0 to 100.

    Returns:
        The percentile; NaN if there are no values.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, median and 99th percentile, in the unit of what was summed up; NaN if that was nothing."""

    mean: float
    p50: float
    p99: float

    def as_dict(self, digits: int = 3) -> dict[str, float | None]:
        """For JSON, which has no NaN: None stands for it.

        Args:
            digits: decimals kept.

        Returns:
            The three figures by name.
        """
        figures = {"mean": self.mean, "p50": self.p50, "p99": self.p99}
        return {name: None if math.isnan(value) else round(value, digits) for name, value in figures.items()}


def summarize(values: Sequence[float]) -> Summary:
    """Sum values up.

    Args:
        values: in any order; may be empty.

    Returns:
        The summary.
    """
    mean = math.fsum(values) / len(values) if values else math.nan
    return Summary(mean, percentile(values, 50), percentile(values, 99))


def sha256_of_tokens(outputs: Iterable[Sequence[int]]) -> str:
    """Digest of token ids, sensitive to where one output ends and the next begins.

    Args:
        outputs: token ids of each request, in request order.

    Returns:
        64 hex digits.
    """
    digest = hashlib.sha256()
    for tokens in outputs:
        digest.update((",".join(map(str, tokens)) + "\n").encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Calibration:
    """How fast one core was for a moment.

    Args:
        core: its number.
        matmul_gflops: float32 product of two 384 x 384 matrices, best of several, one thread.
        memcpy_gb_s: copy of 32 MiB, best of several.
    """

    core: int
    matmul_gflops: float
    memcpy_gb_s: float


@dataclass(frozen=True, slots=True)
class HostCpu:
    """CPU time of the whole host since it was started, in seconds.

    Args:
        busy_s: spent by any process, all cores together.
        stolen_s: that the hypervisor gave to others while a core here wanted it.
    """

    busy_s: float
    stolen_s: float


def host_cpu(stat: Path = Path("/proc/stat")) -> HostCpu | None:
    """Read the host's CPU time.

    Args:
        stat: of the kernel.

    Returns:
        The time; None where the kernel doesn't tell.
    """
    try:
        fields = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _wait, irq, softirq, steal = fields
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return HostCpu((user + nice + system + irq + softirq) / tick, steal / tick)


# Its own process: a BLAS that is loaded already keeps the threads that it has made.
_CALIBRATE: Final = """
import json, time
import numpy as np
def best(action, times):
    spans = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        spans.append(time.perf_counter() - start)
    return min(spans)
n = 384
a = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
out = np.empty_like(a)
source = np.ones(32 << 20, dtype=np.uint8)
target = np.empty_like(source)
print(json.dumps([2 * n**3 / best(lambda: np.matmul(a, a, out=out), 20) / 1e9,
                  source.nbytes / best(lambda: np.copyto(target, source), 8) / 1e9]))
"""


def calibrate(cores: Sequence[int]) -> list[Calibration]:
    """Time a fixed amount of work on each core, one after another. Takes about 0.3 s a core.

    Args:
        cores: core numbers.

    Returns:
        One figure a core; a core whose measurement failed is left out.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    found = []
    for core in cores:
        command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{_CALIBRATE}"]
        try:
            done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=True)
            gflops, gb_s = json.loads(done.stdout)
        except (subprocess.SubprocessError, OSError, ValueError):
            continue
        found.append(Calibration(core, round(gflops, 2), round(gb_s, 2)))
    return found
