# SPDX-License-Identifier: Apache-2.0
"""What the commands that run servers have in common: exit status, messages, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from kvpush.demo.command import command
from kvpush.demo.signals import Stopped
from kvpush.errors import ConfigError, KvPushError


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")


def kept(tmp_path: Path) -> bool:
    return any(tmp_path.glob("kvpush-test-*"))


@pytest.mark.parametrize(
    ("error", "status", "says", "keeps"),
    [
        (ConfigError("wrong [option]"), 2, "error: wrong [option]", False),
        (KvPushError("no luck"), 1, "error: no luck", True),
        (OSError(28, "No space"), 1, "error: [Errno 28] No space", True),
        (Stopped(15), 143, "stopped; everything that was made or started is gone", False),
    ],
)
def test_errors_and_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, status: int, says: str, keeps: bool
) -> None:
    with pytest.raises(typer.Exit) as left, command("test", work_dir=None, json_path=None):
        raise error
    output = capsys.readouterr().out
    assert left.value.exit_code == status
    assert says in output
    assert ("Logs: " in output, kept(tmp_path)) == (keeps, keeps)


def test_a_bug_keeps_the_logs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="a bug"), command("test", work_dir=None, json_path=None):
        raise ValueError("a bug")
    assert kept(tmp_path)
    assert "Logs: " in capsys.readouterr().out


@pytest.mark.parametrize("ok", [True, False])
def test_what_was_found_decides(tmp_path: Path, ok: bool) -> None:
    report = tmp_path / "report.json"
    with pytest.raises(typer.Exit) as left, command("test", work_dir=None, json_path=report) as frame:
        frame.show(ok, [], ["a remark"], {"found": 1})
    assert left.value.exit_code == (0 if ok else 1)
    assert json.loads(report.read_text()) == {"found": 1}
    assert kept(tmp_path) is not ok


def test_a_given_folder_is_kept_and_a_report_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = tmp_path / "none" / "report.json"
    with pytest.raises(typer.Exit) as left, command("test", work_dir=tmp_path, json_path=nowhere):
        pytest.fail("must not be entered")
    assert left.value.exit_code == 2
    assert tmp_path.is_dir()
    assert f"error: {nowhere.parent} is not a folder" in capsys.readouterr().out
