# SPDX-License-Identifier: Apache-2.0
"""Every setting of kvpush, read once at start-up and never changed.

Sources, the first that has a value wins:

1. the environment: ``KVPUSH_LEASE_S=20``; ``KVPUSH_BACKEND_OPTIONS`` is JSON;
2. ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``;
3. the TOML file that ``KVPUSH_CONFIG`` names, keys at the top level;
4. the defaults below.

``backend_options`` of several sources are merged key by key. This is the only module that reads ``KVPUSH_*`` variables.

``auth_secret`` is taken from the environment only: vLLM logs ``kv_connector_extra_config``, and the file is for everybody to
read. ``auth_secret_file`` names a file of its own for it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvpush.channels.policy import ProducerPolicy, is_loopback
from kvpush.errors import ConfigError

__all__ = ["CONFIG_VARIABLE", "ENV_PREFIX", "Settings", "Sourced"]

ENV_PREFIX = "KVPUSH_"
CONFIG_VARIABLE = "KVPUSH_CONFIG"
"""Names the TOML file."""

# Kubernetes puts such variables into every pod for each service, here for one whose name starts with "kvpush".
# Source: Kubernetes documentation, "Accessing the Service", environment variables.
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)$|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")

_MIB = 1024 * 1024

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Host = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\s/]+$")]


class Sourced(NamedTuple):
    """A setting's value and where it came from.

    Args:
        value: The value; of a secret only whether it is set.
        source: ``environment``, ``extra config``, ``file`` or ``default``; several where they are merged.
        overrides: Sources that have a value as well and lost, the strongest first.
    """

    value: object
    source: str
    overrides: tuple[str, ...] = ()


class _EnvSource(InitSettingsSource):
    """Reads ``KVPUSH_<FIELD>`` and turns the text into the field's type, so that the model itself can be strict."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, _from_environment(settings_cls.model_fields))


class _FileSource(InitSettingsSource):
    """Reads the TOML file, if there is one."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, _from_file(settings_cls.model_fields))


class Settings(BaseSettings):
    """Settings of one engine process. Frozen; build it with :meth:`load`, which gives one-line errors."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", strict=True, env_prefix=ENV_PREFIX, hide_input_in_errors=True
    )

    backend: str | None = Field(
        default=None, min_length=1, max_length=64, description="Name of the backend; chosen by device type if not given."
    )
    backend_options: dict[str, Any] = Field(
        default_factory=dict, description="Options handed to the backend as they are; see its manual."
    )
    control_host: Host = Field(
        default="127.0.0.1", description="Address that the control endpoint binds to; loopback unless you say otherwise."
    )
    control_port: int = Field(
        default=14579,
        ge=0,
        le=65_535,
        description="Port of the control endpoint of rank 0; rank r uses control_port + r. 0 lets the system choose.",
    )
    advertise_host: Host | None = Field(
        default=None, description="Host that others connect to; control_host if not given. Needed when that is a wildcard."
    )
    auth: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Authentication of the control channel: on where a secret is given, always, or never. Off the loopback a "
        "producer without a secret starts only when this is off.",
    )
    auth_secret_file: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="File with the secret that all instances share; nobody but its owner may read it.",
    )
    auth_secret: SecretStr | None = Field(
        default=None, description="The secret itself; from the environment only, since other sources end up in logs."
    )
    allowed_producers: list[str] | None = Field(
        default=None,
        max_length=4096,
        description="Producers that requests may name: hosts, addresses or networks, each with or without :port; * for any. "
        "Not set: any with authentication, the loopback without. Separated by commas in the environment.",
    )
    max_messages_per_s: int = Field(
        default=10_000,
        ge=2000,
        le=10_000_000,
        description="Control messages that one peer may send, per second; one that sends more is disconnected.",
    )
    lease_s: Seconds = Field(
        default=10.0, description="How long a producer may go on writing without hearing from the consumer, seconds."
    )
    lease_guard_s: Seconds = Field(default=0.5, description="Nothing is posted in this last part of a lease, seconds.")
    heartbeat_s: Seconds = Field(default=0.5, description="Interval of heartbeats while transfers run, seconds.")
    idle_heartbeat_s: Seconds = Field(default=3.0, description="Interval of heartbeats while nothing runs, seconds.")
    peer_timeout_s: Seconds = Field(
        default=2.0, description="A peer with running transfers that is silent for so long is lost, seconds."
    )
    handshake_timeout_s: Seconds = Field(default=3.0, description="How long a handshake may take, seconds.")
    announce_timeout_s: Seconds = Field(
        default=30.0, description="How long decode waits for a producer that has never heard of the transfer, seconds."
    )
    source_timeout_s: Seconds = Field(
        default=120.0, description="How long prefill keeps finished blocks for a consumer that has not come, seconds."
    )
    transfer_timeout_s: Seconds = Field(
        default=300.0, description="How long a transfer may go without progress once streaming has started, seconds."
    )
    fence_timeout_s: Seconds = Field(
        default=0.5, description="How long to wait for a fence's acknowledgement before the lease is waited out, seconds."
    )
    write_timeout_s: Seconds = Field(default=30.0, description="How long one posted write may take, seconds.")
    max_write_bytes: int = Field(default=8 * _MIB, ge=4096, le=2**40, description="Size of one posted write, bytes.")
    max_inflight_bytes_per_peer: int = Field(
        default=64 * _MIB, ge=4096, le=2**40, description="Bytes posted and not yet completed to one peer."
    )
    max_inflight_bytes: int = Field(
        default=256 * _MIB, ge=4096, le=2**40, description="Bytes posted and not yet completed to all peers."
    )
    staging: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Scattered blocks travel packed, and are unpacked where they arrive: where that is measured to be faster, "
        "always, or never. Both sides need it, and backends that can.",
    )
    staging_bytes: int = Field(
        default=64 * _MIB,
        ge=4 * _MIB,
        le=2**36,
        description="Memory for packed blocks, bytes: three quarters for what arrives, 8 MiB for each producer rank, and one "
        "for what is sent.",
    )
    push_granularity: Literal["auto", "layer", "chunk", "request"] = Field(
        default="auto", description="Finished blocks are handed over after each layer, chunk, whole prompt, or as fits."
    )
    poll_interval_us: int = Field(
        default=200, ge=1, le=1_000_000, description="Pause between polls while writes are in flight or awaited, microseconds."
    )
    empty_step_wait_ms: float = Field(
        default=25.0,
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="Longest wait for an outcome in an engine step that has nothing to compute, milliseconds; 0 turns it off.",
    )
    max_pinned_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of decode's KV blocks that requests may hold whose prefill has not started; 1 turns it off.",
    )
    recompute_below_tokens: int = Field(
        default=32,
        ge=0,
        le=2**31,
        description="Prompts with fewer uncached tokens are computed on decode, not transferred: the first token comes sooner, "
        "what decode is generating meanwhile waits for one step that is longer by so many tokens. 0 transfers always.",
    )
    verify: Literal["off", "sample", "all"] = Field(
        default="off",
        description=(
            "Set on decode: compare digests of what was sent and what arrived before a request is reported as received. A "
            "difference is logged, counted, and recomputed. Guards against faults, not attackers."
        ),
    )
    verify_sample_share: float = Field(
        default=0.05,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the transfers that verify=sample checks; by a hash of their ids, the same on every rank.",
    )

    @property
    def advertised_host(self) -> str:
        """What others are told to connect to."""
        return self.advertise_host or self.control_host

    @property
    def exposed_hosts(self) -> list[str]:
        """The control endpoint's hosts that others than this machine may reach."""
        return [host for host in (self.control_host, self.advertised_host) if not is_loopback(host)]

    @classmethod
    def load(cls, extra: Mapping[str, Any] | None = None) -> Self:
        """Read all sources.

        Args:
            extra: vLLM's ``kv_connector_extra_config``.

        Raises:
            ConfigError: a value is wrong or a name is unknown; one line that names the setting, what is wrong, the value,
                and where it came from.
        """
        given = dict(extra or {})
        _refuse_unknown(given, cls.model_fields, "kv_connector_extra_config")
        _refuse_secret(given, "kv_connector_extra_config")
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigError("; ".join(_one_line(item, given) for item in error.errors(include_url=False))) from error

    @classmethod
    def explain(cls, extra: Mapping[str, Any] | None = None) -> dict[str, Sourced]:
        """Each setting's value and its source, in the order of this class.

        Raises:
            ConfigError: as :meth:`load`.
        """
        settings = cls.load(extra)
        given = dict(extra or {})
        answer = {}
        for name in cls.model_fields:
            source, overrides = _sources_of(name, given)
            answer[name] = Sourced(_shown(getattr(settings, name)), source, overrides)
        return answer

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the environment first; pydantic's hook."""
        return _EnvSource(settings_cls), init_settings, _FileSource(settings_cls)

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        problems = []
        if self.lease_guard_s >= self.lease_s:
            problems.append(f"lease_guard_s ({self.lease_guard_s}) must be less than lease_s ({self.lease_s})")
        if self.heartbeat_s * 2 > self.lease_s:
            problems.append(f"heartbeat_s ({self.heartbeat_s}) must be at most half of lease_s ({self.lease_s})")
        if self.idle_heartbeat_s >= self.lease_s:
            problems.append(f"idle_heartbeat_s ({self.idle_heartbeat_s}) must be less than lease_s ({self.lease_s})")
        if self.heartbeat_s >= self.peer_timeout_s:
            problems.append(f"heartbeat_s ({self.heartbeat_s}) must be less than peer_timeout_s ({self.peer_timeout_s})")
        if not self.max_write_bytes <= self.max_inflight_bytes_per_peer <= self.max_inflight_bytes:
            problems.append(
                f"max_write_bytes ({self.max_write_bytes}) <= max_inflight_bytes_per_peer ({self.max_inflight_bytes_per_peer})"
                f" <= max_inflight_bytes ({self.max_inflight_bytes}) must hold"
            )
        if self.control_host in ("0.0.0.0", "::", "*") and self.advertise_host is None:
            problems.append(f"control_host {self.control_host!r} is a wildcard: say with advertise_host where others connect")
        if self.allowed_producers is not None:
            try:
                ProducerPolicy.parse(self.allowed_producers)
            except ConfigError as error:
                problems.append(error.message)
        if self.advertise_host in ("0.0.0.0", "::", "*"):
            problems.append(f"advertise_host {self.advertise_host!r} is a wildcard: nobody can connect to that")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _from_environment(fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in fields and variable == _variable(name):
            values[name] = _decode(variable, text, fields[name].annotation)
        elif not _SERVICE_LINK.search(variable):
            unknown[variable] = text
    _refuse_unknown(unknown, [_variable(name) for name in fields] + [CONFIG_VARIABLE], "the environment")
    return values


def _from_file(fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return {}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {path} is no TOML: {error}") from error
    _refuse_unknown(values, fields, path)
    _refuse_secret(values, path)
    return values


def _decode(variable: str, text: str, annotation: object) -> object:
    """Text of the environment to the field's type; bounds are the model's business."""
    try:
        if annotation is int:
            return int(text)
        if annotation is float:
            return float(text)
        if annotation == dict[str, Any]:
            return json.loads(text)
        if annotation == list[str] | None:
            return [item.strip() for item in text.split(",") if item.strip()]
    except ValueError as error:
        wanted = {int: "a whole number", float: "a number"}.get(annotation, "JSON")  # type: ignore[call-overload]
        raise ConfigError(f"{variable} must be {wanted}, not {_short(text)}") from error
    return text


def _refuse_secret(given: Mapping[str, object], where: str) -> None:
    if "auth_secret" in given:
        raise ConfigError(
            f"{where} must not hold auth_secret, it is no place for secrets: "
            f"put it into a file of its own and name that in auth_secret_file, or into {_variable('auth_secret')}"
        )


def _refuse_unknown(given: Mapping[str, object], known: Mapping[str, object] | list[str], where: str) -> None:
    names = list(known)
    complaints = []
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            complaints.append(f"{where} has no setting called {_short(name)}{hint}")
    if complaints:
        if not all("did you mean" in complaint for complaint in complaints):
            complaints.append(f"known settings: {', '.join(names)}")
        raise ConfigError("; ".join(complaints))


def _one_line(item: Any, given: Mapping[str, object]) -> str:
    """One of pydantic's errors as ``name: what is wrong, value (source)``."""
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    message = re.sub(r"^\w+ should ", "must ", message).removesuffix(".")
    return f"{name} {message}, not {_short(item['input'])} ({_where(name, given)})"


def _sources_of(name: str, given: Mapping[str, object]) -> tuple[str, tuple[str, ...]]:
    """Where a setting's value comes from, and which sources lost against that."""
    found = []
    if _variable(name) in os.environ:
        found.append("environment")
    if name in given:
        found.append("extra config")
    if name in _from_file(Settings.model_fields):
        found.append("file")
    if name == "backend_options":
        return " + ".join(found) or "default", ()
    return (found[0], tuple(found[1:])) if found else ("default", ())


def _where(name: str, given: Mapping[str, object]) -> str:
    return {
        "environment": _variable(name),
        "extra config": "kv_connector_extra_config",
        "file": os.environ.get(CONFIG_VARIABLE, "file"),
    }.get(_sources_of(name, given)[0], "default")


def _shown(value: object) -> object:
    return "(set, not shown)" if isinstance(value, SecretStr) else value


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
