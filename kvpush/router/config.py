# SPDX-License-Identifier: Apache-2.0
"""What the router is told at start-up: instances, policies, limits and deadlines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from kvpush.errors import ConfigError

DEFAULT_CONTROL_PORT = 14579
"""Port of a prefill instance's kvpush control endpoint unless the target names another."""

DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024


class Mode(StrEnum):
    """Order of the two legs of a request."""

    CONCURRENT = "concurrent"
    SEQUENTIAL = "sequential"


class OnPrefillFailure(StrEnum):
    """What happens to a request whose prefill leg failed before decode answered."""

    RETRY = "retry"
    DECODE_ONLY = "decode-only"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """A prefill instance: its HTTP base URL and its kvpush control endpoint."""

    url: str
    control_host: str
    control_port: int


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything the router can be told.

    Args:
        decode: base URLs of the decode instances; at least one.
        prefill: prefill instances; empty makes the router a plain reverse proxy.
        mode: send both legs at once, or prefill first and its answer's parameters on to decode.
        on_prefill_failure: policy for a prefill leg that failed before decode answered.
        max_tries: most times a request is sent to decode instances, first try included.
        max_body_bytes: largest request body accepted; more is a 413.
        allow_client_kv_params: pass a client's own ``kv_transfer_params`` to decode, with no prefill leg.
        connect_timeout_s: for one connection to an instance, name resolution included.
        ttft_timeout_s: from the arrival of the whole request to the first byte of the answer, tries included.
        prefill_timeout_s: for one whole prefill leg; ``None`` means the same as ``ttft_timeout_s``.
        idle_timeout_s: between two chunks of an answer, and for the client to take one.
        body_timeout_s: for the client to send its request body.
        client_error_grace_s: how long decode may still answer by itself once prefill has answered 4xx.
        prefill_linger_s: how long a prefill leg may outlive the answer before it is closed.
        probe_timeout_s: for one health probe of an instance.
        probe_backoff_s: first pause before an instance that refused a connection is probed; it doubles.
        probe_backoff_max_s: longest such pause.
        shutdown_timeout_s: how long running requests may go on once the router was told to stop.
    """

    decode: tuple[str, ...]
    prefill: tuple[PrefillTarget, ...] = field(default=())
    mode: Mode = Mode.CONCURRENT
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    max_tries: int = 4
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    allow_client_kv_params: bool = False
    connect_timeout_s: float = 5.0
    ttft_timeout_s: float = 600.0
    prefill_timeout_s: float | None = None
    idle_timeout_s: float = 300.0
    body_timeout_s: float = 120.0
    client_error_grace_s: float = 2.0
    prefill_linger_s: float = 5.0
    probe_timeout_s: float = 2.0
    probe_backoff_s: float = 1.0
    probe_backoff_max_s: float = 30.0
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Reject what can't work.

        Raises:
            ConfigError: no decode instance, duplicates, or a limit that is not positive.
        """
        if not self.decode:
            raise ConfigError("at least one decode instance is needed")
        for role, urls in (("decode", list(self.decode)), ("prefill", [t.url for t in self.prefill])):
            if len(set(urls)) != len(urls):
                raise ConfigError(f"a {role} instance is named twice")
        endpoints = [(t.control_host, t.control_port) for t in self.prefill]
        if self.mode is Mode.CONCURRENT and len(set(endpoints)) != len(endpoints):
            raise ConfigError("two prefill instances have the same control endpoint; add @host:port to them")
        if self.max_tries < 1 or self.max_body_bytes < 1:
            raise ConfigError("max_tries and max_body_bytes must be at least 1")
        for name in (
            "connect_timeout_s",
            "ttft_timeout_s",
            "idle_timeout_s",
            "body_timeout_s",
            "client_error_grace_s",
            "prefill_linger_s",
            "probe_timeout_s",
            "probe_backoff_s",
            "probe_backoff_max_s",
            "shutdown_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive")
        if self.prefill_timeout_s is not None and not self.prefill_timeout_s > 0:
            raise ConfigError("prefill_timeout_s must be positive")

    @property
    def prefill_deadline_s(self) -> float:
        """The deadline of one prefill leg."""
        return self.ttft_timeout_s if self.prefill_timeout_s is None else self.prefill_timeout_s


def parse_url(text: str) -> str:
    """Check the base URL of an instance.

    Args:
        text: ``http://host:port`` or ``https://...``, with or without a base path.

    Returns:
        The URL without a trailing slash.

    Raises:
        ConfigError: not an HTTP URL with a host, or one with credentials, query or fragment.
    """
    try:
        parts = urlsplit(text)
        host, _port = parts.hostname, parts.port
    except ValueError as err:
        raise ConfigError(f"not a usable URL: {text!r}") from err
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"not an http(s) URL with a host: {text!r}")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"a URL with credentials, query or fragment can't be used: {text!r}")
    return text.rstrip("/")


def parse_prefill(text: str) -> PrefillTarget:
    """Read ``URL[@control_host[:control_port]]``.

    Args:
        text: for instance ``http://10.0.0.1:8100`` or ``http://10.0.0.1:8100@192.168.0.1:14579``; the control
            host is the URL's and the port ``DEFAULT_CONTROL_PORT`` unless they are named. IPv6 goes in brackets.

    Returns:
        The instance.

    Raises:
        ConfigError: the URL or the control endpoint can't be read.
    """
    base, at, endpoint = text.rpartition("@")
    url = parse_url(base if at else text)
    host, port = urlsplit(url).hostname or "", DEFAULT_CONTROL_PORT
    if at:
        try:
            parts = urlsplit(f"//{endpoint}")
            host = parts.hostname or host
            port = DEFAULT_CONTROL_PORT if parts.port is None else parts.port
        except ValueError as err:
            raise ConfigError(f"not a control endpoint host:port: {endpoint!r}") from err
        if not endpoint or parts.path or parts.query or parts.fragment or port < 1:
            raise ConfigError(f"not a control endpoint host:port: {endpoint!r}")
    return PrefillTarget(url=url, control_host=host, control_port=port)
