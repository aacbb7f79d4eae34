# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: the card and a truthful probe. This release doesn't carry the working half yet.

The probe looks at files and package metadata only. It imports no framework and opens no device, so it leaves no CUDA
context behind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvpush import _host
from kvpush.backends.base import BACKEND_API_VERSION, Backend, BackendInfo, Capability, Probe
from kvpush.backends.hookspecs import hookimpl
from kvpush.errors import BackendError

__all__ = ["CudaPlugin"]

NO_BODY = (
    'this release of kvpush carries no body for the cuda backend (planned: issue "Accelerators"); '
    "use vLLM on a CPU device with the cpu backend until then"
)


class CudaPlugin:
    """Light half of the ``cuda`` backend.

    Args:
        root: Where ``/dev``, ``/proc`` and ``/sys`` are looked for; tests give another one.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            name="cuda",
            api_version=BACKEND_API_VERSION,
            device_types=("cuda",),
            transports=("nixl-ucx", "nixl-libfabric"),
            capabilities=frozenset({Capability.LAYER_FENCE}),
            summary="NVIDIA GPU memory over NIXL (UCX or LIBFABRIC); not in this release yet",
            priority=20,
        )

    def probe(self) -> Probe:
        """Never ok in this release; the first reason says so, the others say what this host lacks besides."""
        reasons = [NO_BODY]
        details: dict[str, str] = {}

        torch = _host.distribution_version("torch")
        details["torch"] = torch or "missing"
        if torch is None:
            reasons.append("torch is missing: install vLLM's CUDA build (pip install 'kvpush[vllm]')")
        elif "+cpu" in torch or "+rocm" in torch:
            reasons.append(f"torch {torch} is no CUDA build: install the one that vLLM's CUDA build asks for")

        devices = sorted(path.name for path in (self._root / "dev").glob("nvidia[0-9]*"))
        details["devices"] = ", ".join(devices) or "none"
        if not devices:
            reasons.append("no /dev/nvidia* here: install the driver, or start the container with GPUs (--gpus all)")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            details["CUDA_VISIBLE_DEVICES"] = visible
            if visible.strip() in ("", "-1"):
                reasons.append("CUDA_VISIBLE_DEVICES hides every GPU: unset it or name some")

        nixl = _host.nixl_version()
        details["nixl"] = nixl or "missing"
        if nixl is None:
            reasons.append("nixl is missing: pip install 'kvpush[nixl]'")
        elif not _host.nixl_has_plugin("UCX"):
            reasons.append(f"nixl {nixl} has no UCX plugin: reinstall it from a wheel, or set NIXL_PLUGIN_DIR")

        details["gpu-direct"] = self._gpu_direct()
        return Probe(ok=False, reasons=tuple(reasons), details=details)

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Always raises in this release."""
        raise BackendError(NO_BODY)

    def _gpu_direct(self) -> str:
        """How a NIC could reach GPU memory. A hint, not a condition: without it UCX copies through the host."""
        modules = self._root / "sys/module"
        if (modules / "nvidia_peermem").exists():
            return "nvidia_peermem is loaded"
        version = modules / "nvidia/version"
        if version.exists():
            return (
                f"driver {version.read_text(encoding='utf-8').strip()}, no nvidia_peermem: dmabuf if the NIC's driver takes it"
            )
        return "no NVIDIA kernel module"


@hookimpl
def kvpush_backend() -> CudaPlugin:
    """The plugin of this module."""
    return CudaPlugin()
