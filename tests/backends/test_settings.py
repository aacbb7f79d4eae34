# SPDX-License-Identifier: Apache-2.0
"""Settings: sources and their order, strictness, one-line errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvpush.errors import ConfigError
from kvpush.settings import Settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVPUSH_")]:
        monkeypatch.delenv(name)


def message(extra: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.load(extra)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults() -> None:
    settings = Settings.load()
    assert settings.backend is None
    assert settings.advertised_host == settings.control_host == "127.0.0.1"
    assert settings.control_port == 14579
    assert settings.max_write_bytes == 8 * 1024 * 1024
    assert all(sourced.source == "default" for sourced in Settings.explain().values())
    with pytest.raises(ValidationError):
        settings.lease_s = 1.0


def test_every_field_is_described() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_order_of_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kvpush.toml"
    file.write_text('lease_s = 11\nheartbeat_s = 0.25\ncontrol_port = 1\n[backend_options]\na = "file"\nb = "file"\n')
    monkeypatch.setenv("KVPUSH_CONFIG", str(file))
    monkeypatch.setenv("KVPUSH_CONTROL_PORT", "3")
    monkeypatch.setenv("KVPUSH_BACKEND_OPTIONS", '{"b": "env"}')
    extra = {"control_port": 2, "lease_s": 12, "backend_options": {"c": 1}}
    settings = Settings.load(extra)
    assert (settings.control_port, settings.lease_s, settings.heartbeat_s) == (3, 12.0, 0.25)
    assert settings.backend_options == {"a": "file", "b": "env", "c": 1}
    sources = {name: sourced.source for name, sourced in Settings.explain(extra).items()}
    assert sources["control_port"] == "environment"
    assert sources["lease_s"] == "extra config"
    assert sources["heartbeat_s"] == "file"
    assert sources["backend_options"] == "environment + extra config + file"
    assert sources["peer_timeout_s"] == "default"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"lease_s": -1}, "lease_s must be greater than 0, not -1 (kv_connector_extra_config)"),
        ({"lease_s": "10"}, "lease_s must be a valid number, not '10' (kv_connector_extra_config)"),
        ({"lease_s": float("nan")}, "lease_s must be a finite number, not nan (kv_connector_extra_config)"),
        ({"control_port": 70_000}, "control_port must be less than or equal to 65535, not 70000"),
        ({"control_port": True}, "control_port must be a valid integer, not True"),
        ({"control_port": 1.5}, "control_port must be a valid integer, not 1.5"),
        ({"push_granularity": "block"}, "push_granularity must be 'auto', 'layer', 'chunk' or 'request', not 'block'"),
        ({"backend_options": [1]}, "backend_options must be a valid dictionary, not [1]"),
        ({"control_host": "a b"}, "control_host must match pattern "),
        ({"backend": "x" * 10_000}, "backend must have at most 64 characters, not 'xxx"),
        ({"leese_s": 1}, "kv_connector_extra_config has no setting called 'leese_s'; did you mean lease_s?"),
        ({"zzz": 1}, "has no setting called 'zzz'; known settings: backend, "),
        ({"lease_guard_s": 10.0}, "lease_guard_s (10.0) must be less than lease_s (10.0)"),
        ({"heartbeat_s": 6.0, "peer_timeout_s": 7.0}, "heartbeat_s (6.0) must be at most half of lease_s (10.0)"),
        ({"idle_heartbeat_s": 10.0}, "idle_heartbeat_s (10.0) must be less than lease_s (10.0)"),
        ({"peer_timeout_s": 0.5}, "heartbeat_s (0.5) must be less than peer_timeout_s (0.5)"),
        ({"max_write_bytes": 2**30}, "max_write_bytes (1073741824) <= max_inflight_bytes_per_peer"),
        ({"control_host": "0.0.0.0"}, "say with advertise_host where others connect"),
        ({"advertise_host": "::"}, "nobody can connect to that"),
        ({"auth": "yes"}, "auth must be 'auto', 'on' or 'off', not 'yes'"),
        ({"allowed_producers": ["10.0.0.0/8", "a b"]}, "allowed_producers: 'a b' is no host, address, network or '*'"),
        ({"allowed_producers": "10.0.0.1"}, "allowed_producers must be a valid list"),
        ({"auth_secret": "x"}, "auth_secret_file, or into KVPUSH_AUTH_SECRET"),
    ],
)
def test_wrong_values(extra: dict[str, Any], expected: str) -> None:
    text = message(extra)
    assert expected in text
    assert len(text) < 1200


def test_wrong_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_LEASE_S", "ten")
    assert message() == "KVPUSH_LEASE_S must be a number, not 'ten'"
    monkeypatch.setenv("KVPUSH_LEASE_S", "0")
    assert message({"lease_s": 5}) == "lease_s must be greater than 0, not 0.0 (KVPUSH_LEASE_S)"
    monkeypatch.setenv("KVPUSH_LEASE_S", "20")
    assert Settings.load().lease_s == 20.0
    monkeypatch.setenv("KVPUSH_BACKEND_OPTIONS", "{")
    assert message() == "KVPUSH_BACKEND_OPTIONS must be JSON, not '{'"
    monkeypatch.delenv("KVPUSH_BACKEND_OPTIONS")
    monkeypatch.setenv("KVPUSH_LEASES", "1")
    assert message() == "the environment has no setting called 'KVPUSH_LEASES'; did you mean KVPUSH_LEASE_S?"


def test_service_links_of_kubernetes_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "KVPUSH_SERVICE_HOST": "10.0.0.1",
        "KVPUSH_SERVICE_PORT_HTTP": "80",
        "KVPUSH_PORT": "tcp://10.0.0.1:80",
        "KVPUSH_ROUTER_PORT_80_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    assert Settings.load() == Settings()


def test_wrong_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kvpush.toml"
    monkeypatch.setenv("KVPUSH_CONFIG", str(file))
    assert "can't be read" in message()
    file.write_text("lease_s = ")
    assert "is no TOML" in message()
    file.write_text("leas_s = 1")
    assert f"{file} has no setting called 'leas_s'; did you mean lease_s?" in message()
    file.write_text("lease_s = -1")
    assert message() == f"lease_s must be greater than 0, not -1 ({file})"


def test_several_mistakes_in_one_line() -> None:
    text = message({"lease_s": -1, "control_port": -1})
    assert "lease_s must be" in text
    assert "control_port must be" in text
    assert "); " in text


def test_wildcard_with_advertised_host() -> None:
    settings = Settings.load({"control_host": "0.0.0.0", "advertise_host": "prefill-0.example"})
    assert settings.advertised_host == "prefill-0.example"


def test_producers_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load().allowed_producers is None
    monkeypatch.setenv("KVPUSH_ALLOWED_PRODUCERS", "10.0.0.0/8, prefill-0:14579,,")
    assert Settings.load().allowed_producers == ["10.0.0.0/8", "prefill-0:14579"]
    monkeypatch.setenv("KVPUSH_ALLOWED_PRODUCERS", "")
    assert Settings.load().allowed_producers == []
