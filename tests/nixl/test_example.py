# SPDX-License-Identifier: Apache-2.0
"""The example without an engine does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]


def test_two_processes() -> None:
    pytest.importorskip("nixl")
    example = Path(__file__).parents[2] / "examples" / "two_processes.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same bytes on both sides: True" in done.stdout
