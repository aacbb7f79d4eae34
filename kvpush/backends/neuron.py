# SPDX-License-Identifier: Apache-2.0
"""AWS Trainium and Inferentia: the card and a truthful probe. This release doesn't carry the working half yet.

The probe looks at files, package metadata and the loader only. It doesn't initialise the Neuron runtime.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvpush import _host
from kvpush.backends.base import BACKEND_API_VERSION, Backend, BackendInfo, Capability, Probe
from kvpush.backends.hookspecs import hookimpl
from kvpush.errors import BackendError

__all__ = ["NeuronPlugin"]

NO_BODY = 'this release of kvpush carries no body for the neuron backend (planned: issue "Accelerators")'


class NeuronPlugin:
    """Light half of the ``neuron`` backend.

    Args:
        root: Where ``/dev`` and ``/sys`` are looked for; tests give another one.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            name="neuron",
            api_version=BACKEND_API_VERSION,
            device_types=("neuron",),
            transports=("nixl-libfabric",),
            # On trn2 a receive completion does not prove that the bytes are in HBM. Source: libfabric 12761, 12807.
            capabilities=frozenset({Capability.VISIBILITY_FENCE}),
            summary="AWS Trainium HBM over NIXL (LIBFABRIC on EFA); not in this release yet",
            priority=20,
        )

    def probe(self) -> Probe:
        """Never ok in this release; the first reason says so, the others say what this host lacks besides."""
        reasons = [NO_BODY]
        details: dict[str, str] = {}

        torch_neuronx = _host.distribution_version("torch-neuronx")
        details["torch-neuronx"] = torch_neuronx or "missing"
        if torch_neuronx is None:
            reasons.append("torch-neuronx is missing: install it from the AWS Neuron package index, not from PyPI")
        elif torch_neuronx == "1.0":
            # Source: PyPI holds placeholders of that version for torch-neuronx, neuronx-cc and libneuronxla.
            reasons.append(
                "torch-neuronx 1.0 is PyPI's empty placeholder: install the real one from the AWS Neuron package index"
            )

        complaint = _host.shared_library_loads("libnrt.so.1")
        details["libnrt.so.1"] = complaint or "loads"
        if complaint:
            reasons.append(
                "libnrt.so.1 doesn't load: install aws-neuronx-runtime-lib and add /opt/aws/neuron/lib to LD_LIBRARY_PATH"
            )

        devices = sorted(path.name for path in (self._root / "dev").glob("neuron[0-9]*"))
        details["devices"] = ", ".join(devices) or "none"
        if not devices:
            reasons.append("no /dev/neuron* here: install aws-neuronx-dkms, or give the container the devices")

        mapped = os.environ.get("NEURON_RT_MAP_HBM", "")
        details["NEURON_RT_MAP_HBM"] = mapped or "unset"
        if mapped != "1":
            reasons.append("NEURON_RT_MAP_HBM is not 1, so device tensors have no address: set it before vLLM starts")

        nixl = _host.nixl_version()
        details["nixl"] = nixl or "missing"
        if nixl is None:
            reasons.append("nixl is missing: pip install 'kvpush[nixl]'")
        elif not _host.nixl_has_plugin("LIBFABRIC"):
            reasons.append(f"nixl {nixl} has no LIBFABRIC plugin: reinstall it from a wheel, or set NIXL_PLUGIN_DIR")

        efa = sorted(path.name for path in (self._root / "sys/class/infiniband").glob("*"))
        details["efa"] = ", ".join(efa) or "none"
        if not efa:
            reasons.append(
                "no EFA device under /sys/class/infiniband: launch the instance with EFA interfaces and install the EFA driver"
            )
        return Probe(ok=False, reasons=tuple(reasons), details=details)

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Always raises in this release."""
        raise BackendError(NO_BODY)


@hookimpl
def kvpush_backend() -> NeuronPlugin:
    """The plugin of this module."""
    return NeuronPlugin()
