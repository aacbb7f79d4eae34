# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _commit() -> str:
    try:
        out = subprocess.run(
            ["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return out.stdout.strip()


@pytest.fixture(scope="session")
def circumstances() -> dict[str, Any]:
    """What a figure is worth nothing without."""
    names = ("kvpush", "numpy", "msgspec", "nixl", "pytest-benchmark")
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in names}},
        "commit": _commit(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
    }


@pytest.fixture(autouse=True)
def _say_circumstances(request: pytest.FixtureRequest, circumstances: dict[str, Any]) -> None:
    if "benchmark" in request.fixturenames:
        benchmark = request.getfixturevalue("benchmark")
        benchmark.extra_info.update({"backend": "none", "device": "cpu", "bytes": 0, "descriptors": 0, **circumstances})


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    config.addinivalue_line("python_functions", "bench_*")
