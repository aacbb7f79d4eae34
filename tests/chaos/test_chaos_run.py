# SPDX-License-Identifier: Apache-2.0
"""Whole storms over stand-ins for vLLM: real processes, real kills, the real router and relays, no model.

Each thing that a storm looks for is planted once, so that none of its zeros is one that can't be anything else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from kvpush.chaos import cli, storm
from kvpush.demo import connectors

STAND_IN = Path(__file__).with_name("stand_in.py")
pytestmark = pytest.mark.timeout(120)


def stand_in_command(sins: dict[str, Any]) -> Callable[..., tuple[str, ...]]:
    """In place of vLLM's command line."""

    def command(options: object, host: str, port: int, transfer: dict[str, Any] | None) -> tuple[str, ...]:
        role = {None: "single", "kv_producer": "prefill", "kv_consumer": "decode"}[transfer and transfer["kv_role"]]
        config = [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
        return (sys.executable, str(STAND_IN), host, str(port), role, json.dumps(sins), *config)

    return command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Runs `kvpush chaos` over stand-ins; gives its status, its report and its output."""

    def run_(*arguments: str, **sins: Any) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(connectors, "_vllm_command", stand_in_command(sins))
        monkeypatch.setattr(cli, "check_requirements", lambda _: None)
        monkeypatch.setattr(storm, "_SETTLE_S", 1.0)
        monkeypatch.setattr(storm, "_SETTLE_AGAIN_S", 0.5)
        monkeypatch.setattr(storm, "_PROBE_TRIES", 4)
        monkeypatch.setattr(storm, "_IDLE_S", 0.5)
        app = typer.Typer()
        app.command()(cli.chaos_command)
        report = tmp_path / "report.json"
        options = ["--json", str(report), "--work-dir", str(tmp_path), "--prompts", "8", "--workers", "4", *arguments]
        done = CliRunner().invoke(app, options)
        if not report.exists():
            pytest.fail(f"no report: {done.output}")
        return done.exit_code, json.loads(report.read_text()), done.output

    return run_


#: What is planted shows with the first few requests, so that a machine that stalls for a second or two makes no difference.
SHORT = ("--topology", "1p1d", "--minutes", "0.05", "--network", "loopback", "--fault", "none")


def test_a_storm_over_two_prefill_instances_passes(run: Any, tmp_path: Path) -> None:
    status, report, output = run("--topology", "2p1d", "--minutes", "0.2", "--network", "loopback", "--seed", "3")
    assert status == 0, output
    wanted = ["requests", "wrong", "hung", "engine_deaths", "leaked_blocks", "recomputed", "faults"]
    assert list(report)[: len(wanted)] == wanted
    assert report["requests"] > 50
    assert report["left"] > 5
    assert report["ok"] > 20
    assert (report["wrong"], report["hung"], report["engine_deaths"], report["leaked_blocks"]) == (0, 0, 0, 0)
    assert report["faults"]["kill-prefill"] >= 1
    assert report["received"] > 20
    assert report["answers_judged"] > report["ok"]
    assert report["storms"][0]["restarts"] >= 1
    assert report["storms"][0]["not_possible"], "the link can't be cut on the loopback, and the report says so"
    assert "there is no link" in output
    assert all(fault["healed_at_s"] is not None for fault in report["storms"][0]["fault_log"])
    # A killed instance's first log is still there.
    logs = report["storms"][0]["instances"]
    assert max(len(one["logs"]) for one in logs.values()) >= 2
    assert all(Path(path).is_file() for one in logs.values() for path in one["logs"])
    assert not [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


def test_killed_decode_instances_excuse_errors_and_nothing_else(run: Any) -> None:
    status, report, output = run(
        *("--topology", "1p1d", "--minutes", "0.12", "--network", "loopback", "--fault", "kill-decode", "--seed", "1")
    )
    assert status == 0, output
    assert report["faults"]["kill-decode"] >= 1
    assert sum(report["excused_errors"].values()) >= 1
    assert report["errors"] == {}


@pytest.mark.parametrize(
    ("sins", "name", "kind", "says"),
    [
        pytest.param({"wrong_token": 5}, "wrong", "wrong", "token 2 is", id="token"),
        pytest.param({"wrong_logprob": 5}, "wrong", "wrong", "log-probability of token 1", id="log-probability"),
        pytest.param({"silent": 5}, "hung", "hung", "no end", id="hung"),
        pytest.param({"dies": 10}, "engine_deaths", "engine death", "ended with status 3", id="death"),
        pytest.param({"leaks_blocks": 1}, "leaked_blocks", "leak", "decode still holds 12 blocks", id="blocks"),
        pytest.param({"mute": 1}, "unreadable", "unreadable", "decode's metrics can't be read", id="mute"),
        pytest.param({"leaks_fds": 1}, "leaked_fds", "leak", "file descriptors", id="descriptors"),
        pytest.param({"spins": 1}, "busy", "busy", "with nothing to do", id="busy"),
        pytest.param({"pushes_nothing": 1}, "not_healed", "not healed", "nothing is pushed from prefill", id="no-push"),
        pytest.param({"pushes_nothing": 1, "stutters": 1}, "not_healed", "not healed", "from prefill", id="no-metrics"),
        pytest.param({"restarts": 2}, "internal_errors", "internal error", "submitter of decode", id="internal"),
        pytest.param({"differs": 3}, "integrity_errors", "integrity", "3 requests arrived with another digest", id="digest"),
        pytest.param({"error": 5}, "errors", "error", "HTTP 500", id="error"),
    ],
)
def test_what_is_planted_is_found(run: Any, sins: dict[str, int], name: str, kind: str, says: str) -> None:
    status, report, output = run(*SHORT, "--deadline", "2", "--leaving-percent", "0", **sins)
    assert status == 1, output
    found = sum(report[name].values()) if isinstance(report[name], dict) else report[name]
    assert found > 0
    failures = [failure for failure in report["failures"] if failure["kind"] == kind]
    assert says in failures[0]["what"]
    assert all(Path(path).is_file() for path in failures[0]["logs"])
    assert failures[0]["logs"] or kind == "busy"
    if kind in ("wrong", "hung", "error"):
        assert failures[0]["request_id"].startswith("chaos-0-0-")
        assert failures[0]["prompt_id"]
    if kind == "wrong":
        difference = failures[0]["differences"][0]
        assert difference["expected"]
        assert difference["got"]
    if kind == "engine death":
        assert failures[0]["first_exception"] == "AssertionError: request is unknown"
    assert "must be 0" in output


def test_prompts_that_rounding_decides_are_left_out(run: Any) -> None:
    """Every third answer of the stand-in has two tokens that are equally likely; those are never asked in a storm."""
    status, report, output = run(*SHORT, undecided=3)
    assert status == 0, output
    assert report["ok"] > 0


def test_a_prefill_instance_that_dies_by_itself_is_started_again(run: Any) -> None:
    status, report, _ = run(*SHORT, dies_prefill=4)
    assert status == 1
    assert report["engine_deaths"] >= 1
    assert report["storms"][0]["restarts"] >= 1
    assert report["wrong"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    root = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
    if os.environ.get("CI") and not root:
        pytest.fail("CI has root and iproute2, and this test makes namespaces with them")
    code = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from test_chaos_run import stand_in_command
from kvpush.chaos import cli
from kvpush.demo import connectors
import typer
connectors._vllm_command = stand_in_command({})
cli.check_requirements = lambda _: None
app = typer.Typer()
app.command()(cli.chaos_command)
app()
"""
    options = ["--topology", "2p1d", "--minutes", "5", "--work-dir", str(tmp_path), "--prompts", "8"]
    options += ["--network", "namespaces" if root else "loopback"]
    chaos = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent), *options], stdout=subprocess.PIPE, text=True
    )
    output: list[str] = []
    try:
        assert chaos.stdout is not None
        for line in chaos.stdout:
            output.append(line)
            if "storm of" in line:
                break
        time.sleep(3.0)
        assert chaos.poll() is None, "".join(output)
        started = psutil.Process(chaos.pid).children(recursive=True)
        assert len(started) >= 8
        chaos.send_signal(number)
        rest, _ = chaos.communicate(timeout=40)
    finally:
        chaos.kill()
        chaos.wait()
    assert chaos.returncode == 128 + number, "".join([*output, rest])
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    if root:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
        assert f"kvp-{chaos.pid}-" not in listed
