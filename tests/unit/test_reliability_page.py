# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md names tests for each of its promises, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = re.split(r"^\*\*\d\. ", (ROOT / "docs/reliability.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def test_all_promises_are_here() -> None:
    assert len(PROMISES) == 8


@pytest.mark.parametrize("promise", PROMISES, ids=lambda text: text.split(".")[0])
def test_each_names_tests_that_exist(promise: str) -> None:
    _, _, listed = promise.partition("*Tests:*")
    names = re.findall(r"`(tests/[^`]*)`", listed)
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
