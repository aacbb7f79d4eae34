# SPDX-License-Identifier: Apache-2.0
"""The benches still run, and what they compute is right. Each one once, without the large worlds and the transports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark")
ROOT = Path(__file__).parents[2]


def test_benches_run() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "benches", "--benchmark-disable", "-p", "no:cacheprovider"]
    command += ["-k", "not 10000 and not backend and not block_by_block"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
