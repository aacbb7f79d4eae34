# SPDX-License-Identifier: Apache-2.0
"""A whole demo with stand-ins for vLLM and the router: real processes, real HTTP, no model."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvpush.demo import cli, runner
from kvpush.demo.cli import demo_command
from kvpush.demo.client import RequestResult
from kvpush.demo.connectors import Connector, Deployment, InstanceOptions
from kvpush.demo.report import as_json, as_table, remarks
from kvpush.demo.runner import ConnectorResult, RunConfig, RunResult, check_requirements
from kvpush.demo.stats import Calibration
from kvpush.demo.supervisor import ServerSpec
from kvpush.errors import ConfigError

# Answers with tokens that depend on the whole prompt, shifted by argv[2]; dies at the request number argv[3].
STAND_IN = """
import asyncio, hashlib, json, os, sys
from aiohttp import web
port, shift, dies_at = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
served = 0
async def complete(request):
    global served
    served += 1
    if served == dies_at:
        print("Segmentation fault (core dumped)", flush=True)
        os._exit(9)
    body = await request.json()
    digest = hashlib.sha256(repr(body["prompt"]).encode()).digest()
    response = web.StreamResponse()
    await response.prepare(request)
    for i in range(body["max_tokens"]):
        event = {"choices": [{"token_ids": [(digest[i % 32] + shift) % 256], "finish_reason": None}]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        await asyncio.sleep(0.001)
    await response.write(b"data: [DONE]\\n\\n")
    return response
async def health(request):
    return web.Response()
async def metrics(request):
    return web.Response(text='# HELP x y\\nvllm:time_to_first_token_seconds_sum{model="m"} %f\\n'
        'vllm:time_to_first_token_seconds_count{model="m"} %d\\n' % (served * 0.5, served))
app = web.Application()
app.add_routes([web.post("/v1/completions", complete), web.get("/health", health), web.get("/metrics", metrics)])
web.run_app(app, host="127.0.0.1", port=port, print=None)
"""

SMALL = {"--layers": 1, "--hidden": 32, "--heads": 1, "--kv-heads": 1, "--idle-seconds": 0.1, "--prompt-tokens": 5}


def stand_in_plan(shifts: dict[Connector, int], dies_at: dict[Connector, int]) -> Callable[..., Deployment]:
    """A `plan` whose "router" answers by itself and whose instances only are healthy."""

    def plan(
        connector: Connector, options: InstanceOptions, *, cores: Sequence[int], pick_port: Callable[[], int]
    ) -> Deployment:
        def spec(role: str) -> ServerSpec:
            port = pick_port()
            argv = (sys.executable, "-c", STAND_IN, str(port), str(shifts.get(connector, 0)), str(dies_at.get(connector, 0)))
            return ServerSpec(name=f"{connector.value} {role}", argv=argv, health_url=f"http://127.0.0.1:{port}/health")

        roles = ("single",) if connector is Connector.NONE else ("prefill", "decode")
        router = spec("router")
        url = (router.health_url or "").removesuffix("/health")
        return Deployment(connector=connector, instances={role: spec(role) for role in roles}, router=router, url=url)

    return plan


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    def call(
        *arguments: str,
        shifts: dict[Connector, int] | None = None,
        dies_at: dict[Connector, int] | None = None,
        **options: Any,
    ) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(runner, "plan", stand_in_plan(shifts or {}, dies_at or {}))
        monkeypatch.setattr(cli, "check_requirements", lambda _: None)
        app = typer.Typer()
        app.command()(demo_command)
        report = tmp_path / "report.json"
        given = {**SMALL, "--json": report, "--requests": 5, "--rounds": 2, "--output-tokens": 4, **options}
        flat = itertools.chain.from_iterable((name, str(value)) for name, value in given.items())
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, *flat])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, result.output, json.loads(report.read_text()) if report.exists() else {}

    return call


Invoke = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.mark.parametrize("qps", [0, 200])
def test_report_of_a_good_run(invoke: Invoke, qps: float) -> None:
    status, output, report = invoke(**{"--qps": qps})
    assert status == 0, output
    assert list(report["connectors"]) == ["kvpush", "none"]
    for name, found in report["connectors"].items():
        assert found["requests"] == 5
        assert found["errors"] == 0
        for times in (found["ttft_ms"], found["tpot_ms"]):
            assert set(times) == {"mean", "p50", "p99"}
            assert all(value > 0 for value in times.values())
        assert len(found["outputs_sha256"]) == 64
        assert set(found["idle_cpu_percent"]) == ({"single"} if name == "none" else {"prefill", "decode"})
        assert [one["index"] for one in found["per_request"]] == list(range(5))
        assert found["outputs_equal"] is True
    assert report["connectors"]["kvpush"]["outputs_sha256"] == report["connectors"]["none"]["outputs_sha256"]
    assert report["outputs_equal"] is True
    assert report["ok"] is True
    assert "float32" in report["equality"]
    assert report["host"]["cores"]
    assert set(report["interference"]) == {"other_cpu_percent", "steal_percent"}
    assert {one["round"] for one in report["calibration"]} == {0, 1}
    assert "kvpush" in output
    assert "kvpush prefill is up" in output


def test_other_outputs_fail_the_run(invoke: Invoke) -> None:
    status, output, report = invoke(shifts={Connector.KVPUSH: 1})
    assert status == 1, output
    assert report["outputs_equal"] is False
    assert report["connectors"]["kvpush"]["errors"] == 0
    assert "Logs:" in output


def test_in_tree_outputs_do_not_decide_about_kvpush(invoke: Invoke) -> None:
    arguments = ("--connector", "nixl-pull", "--connector", "kvpush")
    status, output, report = invoke(*arguments, shifts={Connector.NIXL_PULL: 1})
    assert status == 0, output
    assert list(report["connectors"]) == ["nixl-pull", "kvpush", "none"]
    assert report["outputs_equal"] is True
    assert report["connectors"]["nixl-pull"]["outputs_equal"] is False
    status, output, report = invoke("--connector", "nixl-pull", shifts={Connector.NIXL_PULL: 1})
    assert status == 1, output
    assert report["outputs_equal"] is False


def test_under_load_in_bfloat16_outputs_are_compared_in_a_pass_of_their_own(invoke: Invoke) -> None:
    status, output, report = invoke(**{"--dtype": "bfloat16", "--qps": 200})
    assert status == 0, output
    assert "in a pass of its own" in report["equality"]
    assert report["connectors"]["kvpush"]["requests"] == 5


def test_a_server_that_dies_ends_the_run_with_its_log(invoke: Invoke) -> None:
    status, output, report = invoke(dies_at={Connector.KVPUSH: 4})
    assert status == 1
    assert "kvpush router ended with status 9" in output
    assert "Segmentation fault" in output
    assert report == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--heads": 3}, "multiple of"),
        ({"--dtype": "int3"}, "dtype must be one of"),
        ({"--model": "/no/such/model"}, "not the folder of a model"),
        ({"--json": "/no/such/folder/report.json"}, "is not a folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_started(invoke: Invoke, options: dict[str, Any], message: str) -> None:
    status, output, _ = invoke(**options)
    assert status == 2
    assert message in output
    assert "Logs:" not in output


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vllm and nixl not found: pip install 'kvpush\[vllm\]'"):
        check_requirements([Connector.KVPUSH])
    with pytest.raises(ConfigError, match=r"^vllm not found"):
        check_requirements([Connector.NONE])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_first(tmp_path: Path, number: signal.Signals) -> None:
    """With servers that never become healthy: the demo waits, with two process trees up."""
    code = """
import sys
import typer
from kvpush.demo import cli, runner
from kvpush.demo.connectors import Deployment
from kvpush.demo.supervisor import ServerSpec
def plan(connector, options, *, cores, pick_port):
    def spec(role):
        argv = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
        return ServerSpec(name=f"{connector.value} {role}", argv=argv, health_url=f"http://127.0.0.1:{pick_port()}/health")
    return Deployment(connector=connector, instances={"prefill": spec("prefill")}, router=spec("router"), url="")
runner.plan = plan
cli.check_requirements = lambda _: None
app = typer.Typer()
app.command()(cli.demo_command)
app()
"""
    options = ["--layers", "1", "--hidden", "32", "--heads", "1", "--kv-heads", "1", "--work-dir", str(tmp_path)]
    demo = subprocess.Popen([sys.executable, "-c", code, *options], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        logs = tmp_path / "logs"
        while sum(path.read_text() == "up\n" for path in logs.glob("*.log")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = psutil.Process(demo.pid).children(recursive=True)
        assert len(started) >= 4
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 128 + number
    assert "everything that was started is gone" in output
    assert not [process for process in started if os.path.exists(f"/proc/{process.pid}") and process.is_running()]


def result_of(tokens: tuple[int, ...], index: int = 0, error: str | None = None) -> RequestResult:
    return RequestResult(index=index, token_ids=tokens, error=error, ttft_s=0.1, tpot_s=0.01, e2e_s=0.2)


def found(**results: list[RequestResult]) -> RunResult:
    connectors = {
        Connector(name.replace("_", "-")): ConnectorResult(results=one, equality_results=one) for name, one in results.items()
    }
    return RunResult(
        config=RunConfig(connectors=tuple(connectors), work_dir=Path("work")),
        connectors=connectors,
        calibrations=[[Calibration(0, 1.0, 2.0)]],
        host={},
    )


def test_equality_needs_every_output_whole() -> None:
    good = [result_of((1, 2)), result_of((3, 4), 1)]
    assert found(kvpush=good, none=good).ok
    assert not found(kvpush=good[:1], none=good).outputs_equal
    assert not found(kvpush=[], none=[]).outputs_equal
    broken = [result_of((1, 2)), result_of((3, 4), 1, "timed out")]
    assert not found(kvpush=broken, none=broken).outputs_equal
    assert not found(kvpush=[result_of((1, 2)), result_of((3, 5), 1)], none=good).outputs_equal
    failed = found(kvpush=good, nixl_pull=broken, none=good)
    assert failed.outputs_equal
    assert not failed.ok


def test_failed_requests_are_counted_but_not_timed() -> None:
    nan = float("nan")
    failed = RequestResult(index=1, token_ids=(), error="HTTP 500: no", ttft_s=nan, tpot_s=nan, e2e_s=1.0)
    report = as_json(found(kvpush=[result_of((1, 2)), failed], none=[result_of((1, 2)), result_of((3, 4), 1)]))
    kvpush = report["connectors"]["kvpush"]
    assert (kvpush["requests"], kvpush["errors"]) == (2, 1)
    assert kvpush["ttft_ms"] == {"mean": 100.0, "p50": 100.0, "p99": 100.0}
    assert kvpush["per_request"][1]["ttft_ms"] is None
    json.dumps(report, allow_nan=False)
    only_failures = as_json(found(kvpush=[failed], none=[failed]))
    assert only_failures["connectors"]["kvpush"]["ttft_ms"] == {"mean": None, "p50": None, "p99": None}
    json.dumps(only_failures, allow_nan=False)


def test_table_shows_every_connector() -> None:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    good = [result_of((1, 2))]
    console.print(as_table(found(kvpush=[result_of((1, 3))], nixl_push=good, none=good)))
    text = console.export_text()
    assert "kvpush" in text
    assert "nixl-push" in text
    assert "reference" in text
    console.file.close()


def test_remarks_tell_failures_and_kv_that_did_not_come() -> None:
    good = found(kvpush=[result_of((1, 2))], none=[result_of((1, 2))])
    good.other_cpu_percent, good.steal_percent = 15.0, 15.0
    assert "others took 30 % of a core" in remarks(good)[0]
    good.other_cpu_percent = 1.0
    good.connectors[Connector.KVPUSH].kv_tokens_received = 1000
    assert remarks(good) == []
    good.connectors[Connector.KVPUSH].kv_tokens_received = 0
    good.connectors[Connector.KVPUSH].decode_only = 1
    assert len(remarks(good)) == 2
    assert "KV of 0 of 1000 prompt tokens" in remarks(good)[1]
    assert remarks(found(kvpush=[result_of((), 3, "timed out")], none=[])) == ["kvpush, request 3: timed out"]


def test_config_is_checked() -> None:
    for change in ({"requests": 0}, {"qps": -1.0}, {"connectors": ()}, {"connectors": (Connector.NONE, Connector.NONE)}):
        with pytest.raises(ConfigError):
            RunConfig(work_dir=Path("work"), **change)  # type: ignore[arg-type]
