# SPDX-License-Identifier: Apache-2.0
"""docs/backends.md, "A backend in 100 lines": what it shows is installed and tested as it tells."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_template import install, run

DOCUMENT = Path(__file__).parents[2] / "docs" / "backends.md"
FILES = ("pyproject.toml", "kvpush_procmem.py", "test_procmem.py")


def shown() -> dict[str, str]:
    """The files of the tutorial: each is the code block that follows the line with its name."""
    text = DOCUMENT.read_text(encoding="utf-8")
    chapter = text.partition("\n## A backend in 100 lines\n")[2].partition("\n## ")[0]
    blocks = {}
    for name in FILES:
        found = re.search(rf"`{re.escape(name)}`[^`]*```\w+\n(.*?)^```$", chapter, re.DOTALL | re.MULTILINE)
        assert found is not None, f"the tutorial shows no {name}"
        blocks[name] = found[1]
    return blocks


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("procmem")
    for name, text in shown().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def site(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    install(package, target)
    return target


def test_it_has_100_lines_at_most() -> None:
    lines = shown()["kvpush_procmem.py"].splitlines()
    assert 60 < len(lines) <= 100
    assert max(map(len, lines)) <= 128


def test_its_own_test_passes_the_whole_suite(package: Path, site: Path) -> None:
    arguments = ["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--rootdir", str(package)]
    output = run(site, *arguments, str(package / "test_procmem.py"))
    assert re.search(r"\b(3[6-9]|[4-9]\d) passed(, \d+ skipped)? in", output), output


def test_found_and_checked_by_the_command(site: Path) -> None:
    listed = {entry["name"]: entry for entry in json.loads(run(site, "-m", "kvpush", "backends", "--json"))["backends"]}
    assert listed["procmem"]["distribution"] == "kvpush-procmem"
    assert listed["procmem"]["ok"] is True
    report = json.loads(run(site, "-m", "kvpush", "backends", "check", "procmem", "--json"))
    assert report["ok"] is True
    assert {promise["verdict"] for promise in report["promises"]} <= {"holds", "not promised"}, report
    assert report["counts"]["holds"] >= 36
