# SPDX-License-Identifier: Apache-2.0
"""Host memory over NIXL with UCX: vLLM on CPUs."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from kvpush import _host
from kvpush.backends import _nixl
from kvpush.backends._host_layout import HostBackend
from kvpush.backends.base import BACKEND_API_VERSION, Backend, BackendInfo, Capability, Probe
from kvpush.backends.hookspecs import hookimpl
from kvpush.errors import BackendError, ConfigError, TransportError

__all__ = ["CpuBackend", "CpuPlugin", "kvpush_backend"]

_TEXT_OPTIONS = ("ucx_tls", "ucx_net_devices", "ucx_error_handling_mode")
_OPTIONS = (*_TEXT_OPTIONS, "retry_window_s")


class CpuBackend(HostBackend):
    """Working half of the ``cpu`` backend: see :class:`kvpush.backends._host_layout.HostBackend`."""


class CpuPlugin:
    """Light half of the ``cpu`` backend."""

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            name="cpu",
            api_version=BACKEND_API_VERSION,
            device_types=("cpu",),
            transports=("nixl-ucx",),
            capabilities=frozenset({Capability.LAYER_FENCE, Capability.DIGEST, Capability.STAGING}),
            summary="Host memory over NIXL (UCX: shared memory, TCP, RDMA)",
            priority=0,
        )

    def probe(self) -> Probe:
        """Import nixl and look for its UCX plugin; makes no agent."""
        reasons: list[str] = []
        version = _host.nixl_version()
        details = {"nixl": version or "missing", "UCX_TLS": os.environ.get("UCX_TLS", "unset: UCX chooses")}
        if version is None:
            reasons.append("nixl is missing: pip install 'kvpush[nixl]'")
        else:
            if not _host.nixl_has_plugin("UCX"):
                reasons.append(f"nixl {version} has no UCX plugin: reinstall it from a wheel, or set NIXL_PLUGIN_DIR")
            problem = _nixl.import_problem()
            if problem:
                reasons.append(f"nixl {version} is installed but can't be imported ({problem}): reinstall it for this platform")
        details["RLIMIT_MEMLOCK"] = _memlock()
        details["rdma"] = "yes" if Path("/dev/infiniband").is_dir() else "no /dev/infiniband: TCP between hosts"
        return Probe(ok=not reasons, reasons=tuple(reasons), details=details)

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Make the working half.

        Args:
            agent_name: Unique per process start.
            options: ``ucx_tls`` (such as ``tcp,self``), ``ucx_net_devices`` (such as ``eth0``), both yielding to the
                environment's ``UCX_TLS`` and ``UCX_NET_DEVICES``; ``ucx_error_handling_mode`` (``peer`` or ``none``);
                ``retry_window_s``, seconds: prefill's kernel drops what it has not delivered by then. Decode waits for so long,
                by its own setting or prefill's if that is longer, before it gives blocks away.

        Raises:
            BackendError: no agent can be made; says why.
            ConfigError: an unknown or wrong option.
        """
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ConfigError(f"backend cpu has no option {', '.join(unknown)}: it knows {', '.join(_OPTIONS)}")
        text: dict[str, str | None] = {}
        for key in _TEXT_OPTIONS:
            value = options.get(key)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"backend option {key} must be text, not {value!r}")
            text[key] = value
        window = options.get("retry_window_s", 10.0)
        if isinstance(window, bool) or not isinstance(window, (int, float)) or not math.isfinite(window) or window < 0:
            raise ConfigError(f"backend option retry_window_s must be a number of seconds, not {window!r}")
        try:
            transport = _nixl.NixlTransport(
                agent_name,
                ucx_tls=text["ucx_tls"],
                ucx_net_devices=text["ucx_net_devices"],
                ucx_error_handling_mode=text["ucx_error_handling_mode"],
                retry_window_s=float(window),
            )
        except TransportError as exc:
            raise BackendError(f"backend cpu can't run here: {exc.message}") from exc
        return CpuBackend(self.info, transport)


def _memlock() -> str:
    """The limit on pinned memory, for people. It matters to RDMA only; shared memory and TCP pin nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{soft / 2**20:.0f} MiB (RDMA needs as much as the KV cache has; shared memory and TCP need none)"


@hookimpl
def kvpush_backend() -> CpuPlugin:
    """The plugin of this module."""
    return CpuPlugin()
