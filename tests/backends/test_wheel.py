# SPDX-License-Identifier: Apache-2.0
"""The wheel of kvpush builds and holds what it must."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def test_wheel(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-index"]
    root = Path(__file__).parents[2]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(root)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "kvpush/py.typed" in names
    sources = {str(path.relative_to(root)) for path in (root / "kvpush").rglob("*.py")}
    assert sources <= names
    assert not {name for name in names if name.startswith(("tests/", "examples/", "benches/"))}
    for line in ("[kvpush.backends]", "[vllm.general_plugins]", "kvpush = kvpush.cli:app"):
        assert line in points
