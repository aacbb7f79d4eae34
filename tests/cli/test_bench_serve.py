# SPDX-License-Identifier: Apache-2.0
"""`kvpush bench serve` with stand-ins for vLLM: real processes, real HTTP, no model. And the arithmetic of its report."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvpush.bench import cli, serve
from kvpush.bench import link as link_module
from kvpush.bench.arms import Arm, Rate, parse_arm, parse_arms, parse_rate
from kvpush.bench.drive import Driver, EngineCpu, Measured
from kvpush.bench.link import DATA_DEVICE, Link, LinkSpec, places
from kvpush.bench.report import as_json, as_table, figures, ratios, remarks
from kvpush.bench.serve import ArmResult, BenchConfig, BenchResult, Point, lane_of
from kvpush.demo.client import RequestResult, make_requests
from kvpush.demo.connectors import Connector, Deployment, InstanceOptions, Place, plan
from kvpush.demo.stats import Calibration
from kvpush.demo.supervisor import ServerSpec
from kvpush.errors import ConfigError
from kvpush.tiny_model import TinyModelSpec

# Answers with tokens that depend on the whole prompt, shifted by argv[2]. A prefill leg takes 30 ms; a decode leg waits for
# it if it can. Legs that aren't what the connector needs are refused, and so is every request that the servers see twice.
STAND_IN = """
import asyncio, hashlib, json, os, sys
from aiohttp import web
port, shift, kind, fail_at = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
served, seen = 0, set()
async def complete(request):
    global served
    served += 1
    body = await request.json()
    params = body.get("kv_transfer_params")
    digest = hashlib.sha256(repr(body["prompt"]).encode()).digest()
    if digest in seen:
        return web.Response(status=400, text="this prompt was here before")
    seen.add(digest)
    if served == fail_at:
        return web.Response(status=500, text="out of luck")
    if kind.endswith("prefill"):
        if not (params and params["do_remote_decode"] and body["max_tokens"] == 1 and not body["stream"]):
            return web.Response(status=400, text="not a prefill leg")
        await asyncio.sleep(0.03)
        answer = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_host": "h",
                  "remote_port": 1, "tp_size": 1, "remote_request_id": "r", "transfer_id": params["transfer_id"]}
        return web.json_response({"kv_transfer_params": answer, "choices": []})
    if kind.endswith("decode"):
        if not (params and params["do_remote_prefill"] and params["remote_host"] and request.headers["X-Request-Id"]):
            return web.Response(status=400, text="not a decode leg")
        if "nixl-push" in kind and not (params["remote_engine_id"] == "e" and params["remote_request_id"]):
            return web.Response(status=400, text="push has no coordinates")
        await asyncio.sleep(0.04)
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
    return web.Response(text='# HELP x y\\nvllm:external_prefix_cache_hits_total{model="m"} %d\\n'
        'kvpush_submitter_cpu_seconds_total %f\\n' % (5 * served, 0.001 * served)
        + ''.join('kvpush_engine_step_seconds_%s,side="worker",step="forward"} %f\\n' % (part, value * served)
                  for part, value in (('bucket{le="1e-05"', 3), ('bucket{le="+Inf"', 4), ('count{e="0"', 4),
                                      ('sum{e="0"', 1e-4))))
app = web.Application()
app.add_routes([web.post("/v1/completions", complete), web.get("/health", health), web.get("/metrics", metrics)])
web.run_app(app, host="127.0.0.1", port=port, print=None)
"""

SMALL = {"--layers": 1, "--hidden": 32, "--heads": 1, "--kv-heads": 1, "--idle-seconds": 0.1, "--warm-up": 1}


def stand_in_plan(shifts: dict[Connector, int], fail_at: dict[Connector, int]) -> Callable[..., Deployment]:
    def plan(
        connector: Connector,
        options: InstanceOptions,
        *,
        cores: Sequence[int],
        pick_port: Callable[[], int],
        places: Mapping[str, Place],
    ) -> Deployment:
        assert not places
        urls, instances = {}, {}
        for role in ("single",) if connector is Connector.NONE else ("prefill", "decode"):
            port = pick_port()
            urls[role] = f"http://127.0.0.1:{port}"
            shift = 0 if role == "prefill" else shifts.get(connector, 0)
            fails = fail_at.get(connector, 0) if role != "decode" else 0
            kind = f"{connector.value} {role}"
            argv = (sys.executable, "-c", STAND_IN, str(port), str(shift), kind, str(fails))
            instances[role] = ServerSpec(name=kind, argv=argv, health_url=f"{urls[role]}/health")
        controls = dict.fromkeys(urls, ("127.0.0.1", 9))
        return Deployment(
            connector=connector, instances=instances, router=ServerSpec(name="r", argv=()), url="", urls=urls, controls=controls
        )

    return plan


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    def call(
        *arguments: str,
        shifts: dict[Connector, int] | None = None,
        fail_at: dict[Connector, int] | None = None,
        **options: Any,
    ) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(serve, "plan", stand_in_plan(shifts or {}, fail_at or {}))
        monkeypatch.setattr(cli, "check_requirements", lambda _: None)
        report = tmp_path / "report.json"
        given = {
            **SMALL,
            "--json": report,
            "--requests": 4,
            "--rounds": 2,
            "--output-tokens": 4,
            "--prompt-tokens": 5,
            **options,
        }
        flat = itertools.chain.from_iterable((name, str(value)) for name, value in given.items())
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["serve", *arguments, *flat])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, result.output, json.loads(report.read_text()) if report.exists() else {}

    return call


Invoke = Callable[..., tuple[int, str, dict[str, Any]]]


def test_matrix_of_every_arm(invoke: Invoke) -> None:
    arms = ("kvpush", "kvpush:sequential", "nixl-push", "nixl-push:concurrent", "nixl-pull")
    arguments = [*itertools.chain.from_iterable(("--connector", arm) for arm in arms), "--qps", "0", "--prompt-tokens", "6"]
    status, output, report = invoke(*arguments, **{"--qps": 100})
    assert status == 0, output
    assert [(one["prompt_tokens"], one["qps"], one["link"]) for one in report["points"]] == [
        (tokens, qps, None) for tokens, qps in itertools.product((6, 5), (0, 100))
    ]
    for point in report["points"]:
        assert list(point["connectors"]) == [*arms, "none"]
        assert point["ok"] is True
        for name, found in point["connectors"].items():
            assert (found["requests"], found["errors"], found["outputs_equal"]) == (4, 0, True)
            assert all(found["ttft_ms"][figure] > 0 for figure in ("mean", "p50", "p99"))
            if name == "none":
                assert found["prefill_ms"]["mean"] is None
                continue
            assert found["prefill_ms"]["p50"] >= 30
            assert found["ttft_ms"]["mean"] > 30
            concurrent = name in ("kvpush", "nixl-push:concurrent")
            # Decode takes 40 ms: after prefill's 30, or beside them.
            assert found["ttft_ms"]["mean"] >= (40 if concurrent else 70)
            assert found["gap_ms"]["p50"] >= (0 if concurrent else 40)
            for one in found["per_request"]:
                assert one["gap_ms"] == pytest.approx(one["ttft_ms"] - one["prefill_ms"], abs=0.01)
            # The stand-ins count no CPU time under vLLM's title.
            assert found["decode_connector_cpu_ms_per_request"]["mean"] is None
            assert found["decode_instance_cpu_s"] > 0
            assert found["kv_tokens_received"] == 4 * 5
            if name.startswith("kvpush"):
                assert found["submitter"]["decode_cpu_ms_per_request"] == pytest.approx(1, abs=0.01)
                assert set(found["kvpush_counters"]) == {"prefill", "decode"}
                steps = {"steps": 16, "mean": 25.0, "p50": 6.7, "p99": 10.0}
                assert found["engine_step_us"] == {role: {"worker": {"forward": steps}} for role in ("prefill", "decode")}
                assert not any("engine_step" in name for name in found["kvpush_counters"]["decode"])
            else:
                assert found["engine_step_us"] is None
        assert set(point["ratios"]) == {"kvpush", "kvpush:sequential"}
        assert point["ratios"]["kvpush"]["nixl-pull"]["ttft"] > 0
    # Arms of a connector have prompts of their own, those of different connectors the same.
    first = report["points"][0]["connectors"]
    assert first["kvpush"]["outputs_sha256"] == first["nixl-pull"]["outputs_sha256"] == first["none"]["outputs_sha256"]
    assert first["kvpush:sequential"]["outputs_sha256"] == first["nixl-push:concurrent"]["outputs_sha256"]
    assert first["kvpush"]["outputs_sha256"] != first["kvpush:sequential"]["outputs_sha256"]
    # One point at the top too, as the demo's report has it.
    assert report["connectors"] == first
    assert report["config"]["kv_bytes_per_token"] == 2 * 32 * 4
    assert {one["round"] for one in report["calibration"]} == {0, 1}
    assert set(report["interference"]) == {"other_cpu_percent", "steal_percent"}
    assert "loopback: 4 requests, 6 + 4 tokens, one at a time" in output
    assert "KV of" in output  # 20 of 24 tokens at the points with 6


def test_other_outputs_fail_the_run(invoke: Invoke) -> None:
    status, output, report = invoke("--connector", "kvpush", shifts={Connector.KVPUSH: 1})
    assert status == 1, output
    assert report["outputs_equal"] is False
    assert "differ" in output
    assert "Logs:" in output


def test_in_tree_outputs_do_not_decide_about_kvpush(invoke: Invoke) -> None:
    status, output, report = invoke("--connector", "nixl-pull", "--connector", "kvpush", shifts={Connector.NIXL_PULL: 1})
    assert status == 0, output
    assert report["connectors"]["nixl-pull"]["outputs_equal"] is False


@pytest.mark.parametrize("arm", ["kvpush", "kvpush:sequential"])
def test_a_failed_prefill_leg_fails_its_request(invoke: Invoke, arm: str) -> None:
    status, output, report = invoke("--connector", arm, fail_at={Connector.KVPUSH: 3})
    assert status == 1, output
    found = report["connectors"][arm]
    assert found["errors"] == 1
    assert found["per_request"][1]["error"] == "prefill: HTTP 500: out of luck"
    assert found["per_request"][1]["ttft_ms"] is None
    assert "1 bad" in output


def test_percents_of_saturation(invoke: Invoke) -> None:
    status, output, report = invoke("--connector", "kvpush", "--connector", "nixl-pull", **{"--qps": "50%"})
    assert status == 0, output
    point = report["points"][0]
    capacities = [point["connectors"][name]["capacity_qps"] for name in ("kvpush", "nixl-pull")]
    assert point["rate"] == "50%"
    assert point["qps"] == pytest.approx(min(capacities) / 2, rel=0.01)
    assert point["connectors"]["none"]["capacity_qps"] is None


def test_a_saturation_that_can_not_be_told_is_no_wrong_option(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_SATURATION_REQUESTS", 1)
    status, output, report = invoke("--connector", "kvpush", **{"--qps": "50%"})
    assert status == 1, output
    assert "answered 1 of 1 requests: saturation is unknown" in output
    assert not report


def test_under_load_in_bfloat16_outputs_are_compared_in_a_pass_of_their_own(invoke: Invoke) -> None:
    arguments = ("--connector", "kvpush", "--connector", "kvpush:sequential")
    status, output, report = invoke(*arguments, **{"--dtype": "bfloat16", "--qps": 200})
    assert status == 0, output
    assert "in a pass of its own" in report["equality"]
    assert report["connectors"]["kvpush"]["requests"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "1gb"], "is not a rate"),
        (["--link", "1gbit", "--loopback"], "exclude each other"),
        (["--connector", "magic"], "no connector is called 'magic'"),
        (["--connector", "nixl-pull:concurrent"], "can't be sent concurrently"),
        (["--qps", "-1"], "must not be negative"),
        (["--heads", "3"], "multiple of"),
        (["--prompt-tokens", "5"], "given twice"),
        (["--json", "/no/such/folder/report.json"], "is not a folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(cli, "check_requirements", lambda _: None)
    monkeypatch.setattr(cli, "check_link_requirements", lambda: None)
    monkeypatch.setattr(cli, "run", None)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["serve", "--prompt-tokens", "5", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Logs:" not in result.output


def test_missing_rights_are_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["serve", "--link", "1gbit"])
    assert result.exit_code == 2
    assert "root" in result.output or "iproute2" in result.output


def test_arms_and_rates() -> None:
    assert [str(arm) for arm in parse_arms([])] == ["kvpush", "nixl-push", "nixl-push:concurrent", "nixl-pull", "none"]
    assert [str(arm) for arm in parse_arms(["nixl-push:sequential", "kvpush:concurrent", "kvpush"])] == [
        "nixl-push",
        "kvpush",
        "none",
    ]
    for text in ("none:sequential", "kvpush:", "kvpush:both", ""):
        with pytest.raises(ConfigError):
            parse_arm(text)
    assert (parse_rate("0"), parse_rate("1.5"), parse_rate("70%")) == (Rate(0.0), Rate(1.5), Rate(70.0, True))
    assert str(parse_rate("70%")) == "70%"
    for text in ("", "fast", "nan", "inf", "0%", "-1", "200%"):
        with pytest.raises(ConfigError):
            parse_rate(text)


def test_places_on_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places(None) == {}
    monkeypatch.setattr(link_module, "check_requirements", lambda: None)
    link = Link(LinkSpec(10**9), pid=7, run=lambda argv: "").__enter__()
    ports = itertools.count(5001)
    for connector in (Connector.KVPUSH, Connector.NIXL_PULL):
        deployment = plan(
            connector,
            InstanceOptions(model=Path("model")),
            cores=(0, 1),
            pick_port=lambda: next(ports),
            places=places(link),
        )
        for role, side, data in (("prefill", "p", "198.19.0.1"), ("decode", "d", "198.19.0.2")):
            spec = deployment.instances[role]
            assert spec.argv[:4] == ("ip", "netns", "exec", f"kvp-7-{side}")
            assert spec.argv[spec.argv.index("--host") + 1] == link.management_address(side)  # type: ignore[arg-type]
            assert spec.health_url == f"{deployment.urls[role]}/health"
            assert (spec.env["UCX_TLS"], spec.env["UCX_NET_DEVICES"]) == ("tcp,self", DATA_DEVICE)
            assert deployment.controls[role][0] == data
            if connector is Connector.KVPUSH:
                transfer = json.loads(spec.argv[spec.argv.index("--kv-transfer-config") + 1])
                assert transfer["kv_connector_extra_config"]["control_host"] == data
                # Off the loopback kvpush asks for a secret: one for this run, and nowhere in the arguments.
                secret = spec.env["KVPUSH_AUTH_SECRET"]
                assert secret is not None
                assert len(secret) > 32
                assert secret == deployment.instances["decode"].env["KVPUSH_AUTH_SECRET"]
                assert secret not in " ".join(spec.argv)
            else:
                assert spec.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == data
    single = plan(Connector.NONE, InstanceOptions(model=Path("m")), cores=(0,), pick_port=lambda: 1, places=places(link))
    assert single.urls == {"single": "http://127.0.0.1:1"}


def request(index: int, ttft_s: float, prefill_s: float, tpot_s: float = 0.01, error: str | None = None) -> Measured:
    result = RequestResult(index=index, token_ids=(1, 2, 3), error=error, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=1.0)
    return Measured(result=result, prefill_s=prefill_s, cpu_before_s=0.05, cpu_after_s=0.02)


KVPUSH, PULL, SINGLE = parse_arm("kvpush"), parse_arm("nixl-pull"), parse_arm("none")


def point_of(**arms: list[Measured]) -> Point:
    point = Point(
        prompt_tokens=100,
        rate=Rate(0.0),
        dtype="float32",
        arms={
            parse_arm(name.replace("_", "-")): ArmResult(
                measured=measured, equality_results=[one.result for one in measured], counters={}
            )
            for name, measured in arms.items()
        },
        calibrations=[[Calibration(0, 1.0, 2.0)]],
    )
    point.references[0] = point.arms[SINGLE].equality_results
    return point


def bench_of(point: Point) -> BenchResult:
    config = BenchConfig(arms=tuple(point.arms), tiny=TinyModelSpec(dtype="float32"), work_dir=Path("work"))
    return BenchResult(config=config, points=[point], host={})


def test_arithmetic_of_a_point() -> None:
    nan = math.nan
    point = point_of(
        kvpush=[request(0, 1.02, 1.0), request(1, 1.03, 1.0)],
        nixl_pull=[request(0, 1.2, 0.95), request(1, 1.25, 1.0, tpot_s=0.03), request(2, nan, nan, nan, "timed out")],
        # Its TPOT counts for nothing: prompts are computed beside it.
        none=[request(0, 0.9, nan, 0.5), request(1, 0.9, nan, 0.5)],
    )
    assert point.decode_step_ms == pytest.approx(10)
    own, theirs = figures(point, KVPUSH), figures(point, PULL)
    assert own["gap_ms"].mean == pytest.approx(25)
    assert own["exposed_transfer_ms"].mean == pytest.approx(15)
    assert own["exposed_transfer_ms"].p99 == pytest.approx(20, rel=0.01)
    assert theirs["prefill_ms"].mean == pytest.approx(975)
    assert theirs["exposed_transfer_ms"].mean == pytest.approx(240)
    # 50 ms before the first token, 20 ms for the two steps after it.
    assert own["decode_connector_cpu_ms_per_request"].mean == pytest.approx(40)
    found = ratios(point)
    assert list(found) == ["kvpush"]
    assert found["kvpush"] == {
        "nixl-pull": {
            "ttft": pytest.approx(1.025 / 1.225, abs=1e-3),
            "tpot": pytest.approx(0.5, abs=1e-3),
            "prefill": pytest.approx(1 / 0.975, abs=1e-3),
            "gap": pytest.approx(0.1, abs=1e-3),
            "exposed_transfer": pytest.approx(15 / 240, abs=1e-3),
        }
    }
    report = as_json(bench_of(point))
    assert report["connectors"]["kvpush"]["ttft_over_single_ms"] == pytest.approx(125)
    assert report["connectors"]["nixl-pull"]["errors"] == 1
    assert report["ok"] is False
    json.dumps(report, allow_nan=False)


def test_figures_that_are_not_there_are_null() -> None:
    nan = math.nan
    failed = [request(0, nan, nan, nan, "no")]
    point = point_of(kvpush=failed, nixl_pull=[request(0, 1.0, 1.0)], none=failed)
    report = as_json(bench_of(point))
    assert report["connectors"]["kvpush"]["gap_ms"] == {"mean": None, "p50": None, "p99": None}
    # 1.0 - 1.0 less a step is no time that one could be in proportion to.
    assert set(report["ratios"]["kvpush"]["nixl-pull"].values()) == {None}
    assert report["connectors"]["kvpush"]["submitter"]["prefill_cpu_percent"] is None
    json.dumps(report, allow_nan=False)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(as_table(bench_of(point), point))
    assert "1 bad" in console.export_text()
    console.file.close()


def test_table_fits_80_columns() -> None:
    good = [request(0, 12.345, 11.0), request(1, 12.345, 11.0)]
    point = point_of(kvpush=good, none=good, nixl_pull=good)
    point.arms[parse_arm("nixl-push:concurrent")] = ArmResult(measured=good, engine_cpu_s=20.0)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(as_table(bench_of(point), point))
    text = console.export_text()
    console.file.close()
    assert "…" not in text
    assert "nixl-push:concurrent" in text


def test_remarks() -> None:
    point = point_of(kvpush=[request(0, 1.0, 0.9)], none=[request(0, 1.0, 0.9)])
    assert remarks(bench_of(point)) == []
    point.other_cpu_percent, point.steal_percent = 15.0, 15.0
    point.arms[KVPUSH].counters = {"decode": {"vllm:external_prefix_cache_hits_total": 60.0}}
    lines = remarks(bench_of(point))
    assert "others took 30 % of a core" in lines[0]
    assert "KV of 60 of 100 prompt tokens" in lines[1]


def test_arms_of_a_connector_have_lanes() -> None:
    arms = parse_arms(["kvpush", "nixl-push:concurrent", "kvpush:sequential", "nixl-push"])
    assert [lane_of(arm, arms) for arm in arms] == [0, 0, 1, 1, 0]


def test_config_is_checked() -> None:
    tiny = TinyModelSpec()
    changes: list[dict[str, Any]] = [
        {"requests": 0},
        {"requests": 10_000},
        {"arms": ()},
        {"prompt_tokens": ()},
        {"prompt_tokens": (0,)},
        {"rates": (Rate(1.0), Rate(1.0))},
        {"max_num_batched_tokens": 0},
        {"idle_s": -1.0},
    ]
    for change in changes:
        with pytest.raises(ConfigError):
            BenchConfig(**{"arms": (KVPUSH, SINGLE), "tiny": tiny, "work_dir": Path("work"), **change})
    small = BenchConfig(arms=(KVPUSH,), tiny=tiny, work_dir=Path("work"), prompt_tokens=(100, 300))
    assert small.longest == 384
    loaded = BenchConfig(arms=(KVPUSH,), tiny=tiny, work_dir=Path("work"), prompt_tokens=(300,), rates=(Rate(0.0), Rate(1.0)))
    assert loaded.cache_bytes > 2 * small.cache_bytes


def test_cpu_time_is_that_of_the_process_with_the_engines_title() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ntime.sleep(60)"
    engine = subprocess.Popen(
        ["VLLM::EngineCore", "-I", "-S", "-c", burn], executable=sys.executable, stdout=subprocess.PIPE, text=True
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "done\n"
        server: Any = SimpleNamespace(processes=lambda: [psutil.Process(), psutil.Process(engine.pid)])
        assert 0.15 < EngineCpu(server).seconds() < 5
    finally:
        engine.kill()
        engine.wait()
        if engine.stdout is not None:
            engine.stdout.close()
    nothing: Any = SimpleNamespace(processes=lambda: [psutil.Process()])
    assert math.isnan(EngineCpu(nothing).seconds())


async def test_an_instance_that_is_not_there_is_an_error_of_the_request() -> None:
    urls = {"prefill": "http://127.0.0.1:9", "decode": "http://127.0.0.1:9", "single": "http://127.0.0.1:9"}
    deployment = Deployment(
        connector=Connector.KVPUSH,
        instances={},
        router=ServerSpec(name="r", argv=()),
        url="",
        urls=urls,
        controls={"prefill": ("127.0.0.1", 9)},
    )
    (spec,) = make_requests(1, prompt_tokens=3, output_tokens=2, seed=0)
    async with aiohttp.ClientSession() as session:
        for text in ("kvpush", "kvpush:sequential", "none"):
            measured = await asyncio.wait_for(Driver(parse_arm(text), deployment, session).send(spec), 20)
            assert not measured.result.ok
            assert math.isnan(measured.gap_s)


def test_arm_names_are_stable() -> None:
    assert str(Arm(Connector.NIXL_PUSH, parse_arm("nixl-push:concurrent").mode)) == "nixl-push:concurrent"
