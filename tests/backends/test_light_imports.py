# SPDX-License-Identifier: Apache-2.0
"""Light modules stay light: a fresh interpreter imports them and finds no torch, nixl or vllm."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

_SCRIPT = """
import importlib, json, pkgutil, sys
import kvpush.core
names = ["kvpush.core." + module.name for module in pkgutil.iter_modules(kvpush.core.__path__)] + {extra!r}
for name in names:
    importlib.import_module(name)
heavy = sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "nixl", "nixl_cu12", "nixl_cu13", "vllm"}})
print(json.dumps({{"imported": names, "heavy": heavy}}))
"""


def heavy_after(extra: list[str]) -> list[str]:
    done = subprocess.run([sys.executable, "-c", _SCRIPT.format(extra=extra)], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert len(answer["imported"]) >= len(extra) + 4
    heavy: list[str] = answer["heavy"]
    return heavy


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["kvpush.settings", "kvpush.backends.manager", "kvpush.backends.kit", "kvpush.cli", "kvpush.doctor"],
        [
            point.module
            for point in metadata.entry_points(group="kvpush.backends")
            if point.dist and point.dist.name == "kvpush"
        ],
    ],
    ids=["core", "front", "plugins"],
)
def test_no_framework_is_imported(extra: list[str]) -> None:
    assert heavy_after(extra) == []
