# SPDX-License-Identifier: Apache-2.0
"""Tests that need an NVIDIA GPU. Elsewhere one is skipped, with what the probe says is missing, and the others are left out.
See ``run.sh``."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvpush.backends.cuda import CudaPlugin

PROBE = CudaPlugin().probe()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One skip with the reasons instead of a hundred."""
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    if PROBE.ok or not mine:
        return
    mine[0].add_marker(pytest.mark.skip(f"tests/cuda, all of {len(mine)}: can't run here: {'; '.join(PROBE.reasons)}"))
    left_out = mine[1:]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", autouse=True)
def torch() -> Any:
    """torch, with CUDA started. Where the probe says that the backend can run, it has to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of packages and drivers
        module = importlib.import_module("torch")
        assert module.cuda.is_available(), f"the probe found a GPU, torch doesn't: {PROBE.details}"
        module.zeros(1, device="cuda")
    return module
