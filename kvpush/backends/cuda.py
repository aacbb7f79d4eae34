# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: their memory over NIXL, with GPUDirect RDMA where network card and driver have it.

**Never run on a GPU so far.** What is here rests on public sources, named below, and on tests over a fake of ``torch.cuda``;
docs/accelerators.md says what has to be measured, and how.

* **Transports.** UCX carries GPU memory by RDMA, CUDA IPC, or by copies through the host. On EFA it doesn't write by RDMA
  (NIXL 909): there LIBFABRIC is used.
* **``cuda_copy`` is what UCX knows GPU memory by.** ``UCX_TLS`` is a list of what is allowed: without ``cuda_copy`` in it, NIXL
  from 1.5 on refuses the registration, older ones warn ("memory is detected as host") and the process dies with the first
  write. So that is refused here, at once.
* **Memory that is older than the agent.** UCX keeps a list of the allocations that it has seen (``UCX_MEMTYPE_CACHE``) and
  takes others for the host's (UCX 2755, 10245). The cache of an engine is allocated first, so the list is turned off.
* **No visibility fence.** A kernel that is launched after a GPUDirect write has completed sees it: what orders such writes is
  the submission of work (NVIDIA, GPUDirect RDMA, Synchronization and Memory Ordering). An engine launches kernels that read the
  blocks of a request only after it has been told that they are there.
* **Expandable segments** (``PYTORCH_ALLOC_CONF``) are mapped anew under a registration; see
  :func:`kvpush.backends._cuda_device.expandable_region`.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpush import _host
from kvpush.backends import _nixl
from kvpush.backends._cuda_copy import Driver, GpuDigest, LibCuda, RowCopy, StagingCopies
from kvpush.backends._cuda_device import DeviceContext, EventFence, EventFences, OnDevice, expandable_region, unknown_device
from kvpush.backends._host_digest import SCHEME, HostDigester
from kvpush.backends._host_layout import host_layout
from kvpush.backends.base import (
    BACKEND_API_VERSION,
    Backend,
    BackendInfo,
    CacheView,
    Capability,
    Probe,
    RunningDigest,
    VisibilityFence,
)
from kvpush.backends.hookspecs import hookimpl
from kvpush.core.ids import BlockTable
from kvpush.core.layout import CacheLayout, LayerLayout
from kvpush.core.transport import Descriptors, MemoryKind, Region, Transport
from kvpush.errors import BackendError, ConfigError, LayoutError, TransportError

__all__ = ["CudaBackend", "CudaLink", "CudaPlugin", "kvpush_backend"]

DEVICE_TYPE = "cuda"
_TRANSPORTS = {"nixl-ucx": "UCX", "nixl-libfabric": "LIBFABRIC"}
_TEXT_OPTIONS = ("transport", "ucx_tls", "ucx_net_devices", "ucx_error_handling_mode")
_OPTIONS = (*_TEXT_OPTIONS, "retry_window_s")
_RETRY_WINDOW_S = {"nixl-ucx": 10.0, "nixl-libfabric": 30.0}
_ENVIRONMENT = {"nixl-ucx": {"UCX_MEMTYPE_CACHE": "n"}, "nixl-libfabric": {"FI_EFA_USE_DEVICE_RDMA": "1"}}
_LIBCUDA = "libcuda.so.1"
_LIBFABRIC_NEEDS = ("libfabric.so.1", "libhwloc.so.15")
# Source: NVIDIA, GPUDirect RDMA: dma-buf export needs the open kernel modules and Linux 5.12.
_DMABUF_LINUX = (5, 12)
_AMAZON = "0x1d0f"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = (
    "lies in an expandable segment of torch's allocator, which maps other memory there under the registration: unset "
    f"expandable_segments in {' and '.join(_ALLOCATOR_VARIABLES)} before vLLM starts"
)


@dataclass(frozen=True, slots=True)
class CudaLink:
    """What is asked of whoever makes the transport.

    Args:
        agent_name: Unique per process start.
        transport: ``nixl-ucx`` or ``nixl-libfabric``.
        retry_window_s: As for :class:`kvpush.backends._nixl.NixlTransport`, like the others.
        ucx_tls: Likewise.
        ucx_net_devices: Likewise.
        ucx_error_handling_mode: Likewise.
    """

    agent_name: str
    transport: str
    retry_window_s: float
    ucx_tls: str | None = None
    ucx_net_devices: str | None = None
    ucx_error_handling_mode: str | None = None


def _nixl_link(wanted: CudaLink) -> Transport:
    return _nixl.NixlTransport(
        wanted.agent_name,
        backend=_TRANSPORTS[wanted.transport],
        ucx_tls=wanted.ucx_tls,
        ucx_net_devices=wanted.ucx_net_devices,
        ucx_error_handling_mode=wanted.ucx_error_handling_mode,
        retry_window_s=wanted.retry_window_s,
        environment=_ENVIRONMENT[wanted.transport],
    )


class CudaBackend(Backend):
    """Working half of the ``cuda`` backend. Satisfies :class:`kvpush.backends.base.Backend`.

    Args:
        info: The plugin's card.
        transport: Moves the bytes; closed by :meth:`close`.
        module: ``torch.cuda``.
        context: Of the device that the engine uses; follows the cache's.
        driver: The CUDA driver.
    """

    def __init__(self, info: BackendInfo, transport: Transport, module: Any, context: DeviceContext, driver: Driver) -> None:
        self._info = info
        self._module = module
        self._context = context
        self._num_devices = int(module.device_count())
        self._transport = OnDevice(transport, context, self._num_devices)
        self._fences = EventFences(module)
        self._fences.device_ids = (context.device_id,)
        self._gpu_digest = GpuDigest(module, driver, context)
        self._digester = HostDigester(self._gpu_digest, inline=False)
        self._staging = StagingCopies(module, driver, context)
        self._regions: tuple[Region, ...] = ()

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def transport(self) -> Transport:
        return self._transport

    def describe(self, views: Sequence[CacheView]) -> CacheLayout:
        """See :func:`kvpush.backends._host_layout.host_layout`. Device fences cover the devices of these views from now on.

        Raises:
            LayoutError: memory of another kind, a device that isn't there, an expandable segment, or blocks that are no slabs.
        """
        layout = host_layout(views, self._info.device_types)
        for view in views:
            if view.region.kind is not MemoryKind.DEVICE:
                raise LayoutError(f"layer {view.name!r}: its region is of {view.region.kind} memory, not of the device's")
            if view.device_id != view.region.device_id:
                raise LayoutError(
                    f"layer {view.name!r} is on CUDA device {view.device_id}, its region on device {view.region.device_id}"
                )
            if not 0 <= view.device_id < self._num_devices:
                raise LayoutError(f"layer {view.name!r}: {unknown_device(view.device_id, self._num_devices)}")
        moving = expandable_region(self._module, [view.region for view in views])
        if moving is not None:
            name = next(view.name for view in views if view.region == moving)
            raise LayoutError(f"layer {name!r} {_EXPANDABLE}")
        self._fences.device_ids = tuple(sorted({view.device_id for view in views}))
        self._context.device_id = views[0].device_id
        self._regions = tuple(view.region for view in views)
        return layout

    def device_fence(self) -> object | None:
        """An event on the current stream of every device that holds a part of the cache."""
        return self._fences.record()

    def fence_done(self, token: object) -> bool:
        """Whether the kernels that had been launched before :meth:`device_fence` have ended.

        Raises:
            BackendError: the device has failed.
        """
        assert isinstance(token, EventFence)
        return self._fences.done(token)

    def start_visibility_fence(self, regions: Sequence[Region]) -> VisibilityFence | None:
        """None: kernels that are launched from now on see what has arrived; see the module."""
        return None

    @property
    def digest_scheme(self) -> str:
        """That of host memory, so that a GPU's blocks can be compared with a host's."""
        return SCHEME

    def start_digest(self, layers: Sequence[LayerLayout], blocks: BlockTable) -> RunningDigest:
        """On a thread of its own, which copies the blocks to pinned host memory and hashes them there."""
        return self._digester.start(layers, blocks, self._regions)

    def staging_region(self, num_bytes: int) -> Region:
        """Pinned memory of the host: where network cards don't reach the GPU's, blocks go through it in two big copies and one
        write, whichever way the transport would take."""
        return self._staging.region(num_bytes)

    def start_copy(self, src: Descriptors, dst: Descriptors) -> RowCopy:
        """On a stream of its own; costs the caller some microseconds a row."""
        return self._staging.start(src, dst)

    def close(self) -> None:
        """Stop digests and close the transport. Idempotent."""
        self._gpu_digest.stop()
        self._digester.close()
        self._staging.close()
        self._transport.close()


class _Tensor:
    """A tensor of bytes; satisfies :class:`kvpush.testing.fabric.Memory`. For ``kvpush backends check``, so it may wait.

    Args:
        num_bytes: Its length.
        device: Where, such as ``cuda:0``.
    """

    def __init__(self, num_bytes: int, device: str) -> None:
        self._torch = importlib.import_module("torch")
        self.tensor = self._torch.zeros(num_bytes, dtype=self._torch.uint8, device=device)
        self.size = num_bytes
        self._settle()

    def __getitem__(self, part: slice) -> Any:
        return self.tensor[part].to("cpu", copy=True).numpy()

    def __setitem__(self, part: slice, value: Any) -> None:
        host = self[part]
        host[:] = value
        self.tensor[part].copy_(self._torch.from_numpy(host))
        self._settle()

    def take(self, other: _Tensor) -> None:
        """Copy all of another one of this length, without the host."""
        self.tensor.copy_(other.tensor)
        self._settle()

    def _settle(self) -> None:
        """What was launched has ended, before anybody else reads or writes here."""
        if self.tensor.is_cuda:
            self._torch.cuda.synchronize(self.tensor.device)


class CudaPlugin:
    """Light half of the ``cuda`` backend.

    Args:
        root: Where ``/dev``, ``/proc`` and ``/sys`` are looked for; tests give another one.
        link: Makes the transport; a NIXL agent by default.
        device_module: What stands for ``torch.cuda``; torch's own by default.
        driver: What stands for the CUDA driver; that of this process by default.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        link: Callable[[CudaLink], Transport] = _nixl_link,
        device_module: Any = None,
        driver: Driver | None = None,
    ) -> None:
        self._driver = driver
        self._root = root
        self._link = link
        self._device_module = device_module

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            name="cuda",
            api_version=BACKEND_API_VERSION,
            device_types=(DEVICE_TYPE,),
            transports=tuple(_TRANSPORTS),
            capabilities=frozenset({Capability.LAYER_FENCE, Capability.DIGEST, Capability.STAGING}),
            summary="NVIDIA GPU memory over NIXL (UCX, or LIBFABRIC on EFA); so far tested without a GPU only",
            priority=20,
            preferred_layout="BLHNC",
        )

    def probe(self) -> Probe:
        """Look at files, package metadata, the environment and the loader. Imports no framework, opens no device and leaves no
        CUDA context behind."""
        details: dict[str, str] = {}
        reasons = [*self._devices(details), *self._packages(details)]
        transport, why = self._transport_for("auto")
        details["transport"] = f"{transport} ({why})"
        if transport == "nixl-ucx":
            details["UCX_TLS"] = os.environ.get("UCX_TLS", "unset: UCX chooses")
            problem = _tls_problem("UCX_TLS", os.environ.get("UCX_TLS"))
            if problem:
                reasons.append(problem)
        details["gpu-direct"] = self._gpu_direct()
        details["expandable segments"] = (
            "asked for: the cache is refused if it lies in one (vLLM's --enable-cumem-allocator keeps it out)"
            if any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _ALLOCATOR_VARIABLES)
            else "off"
        )
        return Probe(ok=not reasons, reasons=tuple(reasons), details=details)

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Make the working half, with the device that is the current one on the calling thread.

        Args:
            agent_name: Unique per process start.
            options: ``transport`` (``auto``, ``nixl-ucx``, ``nixl-libfabric``; the same on both sides; ``auto`` takes
                LIBFABRIC where there is an EFA device and what it needs is installed, else UCX); ``ucx_tls`` (such as
                ``rc,cuda``), ``ucx_net_devices`` (such as ``mlx5_0:1``), both yielding to the environment's ``UCX_TLS`` and
                ``UCX_NET_DEVICES``; ``ucx_error_handling_mode`` (``peer`` or ``none``); ``retry_window_s``, seconds: how
                long what prefill has posted may still be under way. 10 with UCX, 30 with LIBFABRIC by default.

        Raises:
            BackendError: no GPU, a torch without CUDA, an environment that can't work, or no agent can be made.
            ConfigError: an unknown or wrong option.
        """
        wanted = self._wanted(agent_name, options)
        if wanted.transport == "nixl-ucx":
            problem = _tls_problem("UCX_TLS", os.environ.get("UCX_TLS"))
            if problem:
                raise BackendError(f"backend cuda can't run here: {problem}")
        module = self._module()
        driver = self._driver or LibCuda()
        try:
            context = DeviceContext(module, int(module.current_device()))
            with context.current():
                transport = self._link(wanted)
        except TransportError as exc:
            raise BackendError(f"backend cuda can't run here: {exc.message}") from exc
        except RuntimeError as exc:
            # Such as of a process that was forked after the start of CUDA.
            raise BackendError(f"backend cuda can't run here: CUDA doesn't start: {exc}") from exc
        return CudaBackend(self.info, transport, module, context, driver)

    def test_device(self) -> Any:
        """Memory for ``kvpush backends check cuda`` and ``kvpush doctor``: a :class:`kvpush.testing.fabric.Device` of torch
        tensors on the first GPU. Starts CUDA."""
        from kvpush.testing.fabric import Device

        class Cuda(Device):
            device_type = DEVICE_TYPE

            def allocate(self, num_bytes: int) -> tuple[_Tensor, Region]:
                memory = _Tensor(num_bytes, f"{DEVICE_TYPE}:{self.device_id}")
                return memory, Region(memory.tensor.data_ptr(), num_bytes, self.device_id, MemoryKind.DEVICE, memory)

            def copy(self, target: Any, source: Any) -> bool:
                target.take(source)
                return True

        return Cuda()

    def _wanted(self, agent_name: str, options: Mapping[str, object]) -> CudaLink:
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ConfigError(f"backend cuda has no option {', '.join(unknown)}: it knows {', '.join(_OPTIONS)}")
        text: dict[str, str | None] = {}
        for key in _TEXT_OPTIONS:
            value = options.get(key)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"backend option {key} must be text, not {value!r}")
            text[key] = value
        asked = text["transport"] or "auto"
        if asked not in ("auto", *_TRANSPORTS):
            raise ConfigError(f"backend option transport must be auto, {' or '.join(_TRANSPORTS)}, not {asked!r}")
        transport, _ = self._transport_for(asked)
        if transport == "nixl-ucx":
            # The environment goes before the option, so only what would be used is judged.
            problem = "" if "UCX_TLS" in os.environ else _tls_problem("backend option ucx_tls", text["ucx_tls"])
            if problem:
                raise ConfigError(problem)
        window = options.get("retry_window_s", _RETRY_WINDOW_S[transport])
        if isinstance(window, bool) or not isinstance(window, (int, float)) or not math.isfinite(window) or window < 0:
            raise ConfigError(f"backend option retry_window_s must be a number of seconds, not {window!r}")
        return CudaLink(
            agent_name,
            transport,
            float(window),
            text["ucx_tls"],
            text["ucx_net_devices"],
            text["ucx_error_handling_mode"],
        )

    def _module(self) -> Any:
        """``torch.cuda``, with at least one device.

        Raises:
            BackendError: there is none; says what to do.
        """
        module, version = self._device_module, ""
        if module is None:
            try:
                torch = importlib.import_module("torch")
            except ImportError as exc:
                raise BackendError(f"backend cuda can't run here: torch can't be imported ({exc}): {_NO_TORCH}") from exc
            if torch.version.cuda is None:
                raise BackendError(f"backend cuda can't run here: {_not_cuda(torch.__version__)}")
            module, version = torch.cuda, f" {torch.__version__}"
        if not module.is_available() or not module.device_count():
            hidden = _hidden()
            mend = hidden or (
                "see that nvidia-smi lists one, that the container has GPUs (--gpus all), and that the driver is as new as "
                "torch's CUDA"
            )
            raise BackendError(f"backend cuda can't run here: torch{version} finds no GPU: {mend}")
        return module

    def _devices(self, details: dict[str, str]) -> list[str]:
        reasons = []
        devices = sorted(path.name for path in (self._root / "dev").glob("nvidia[0-9]*"))
        details["devices"] = ", ".join(devices) or "none"
        models = sorted(_field(path, "Model") for path in (self._root / "proc/driver/nvidia/gpus").glob("*/information"))
        if models:
            details["models"] = ", ".join(models)
        if not devices:
            reasons.append("no /dev/nvidia* here: install the driver, or start the container with GPUs (--gpus all)")
        complaint = _host.shared_library_loads(_LIBCUDA)
        details[_LIBCUDA] = complaint or "loads"
        if complaint:
            reasons.append(
                f"{_LIBCUDA} doesn't load, so neither torch nor UCX finds the GPU: install the driver, or start the container "
                "with NVIDIA's runtime"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            details["CUDA_VISIBLE_DEVICES"] = visible
        hidden = _hidden()
        return [*reasons, hidden] if hidden else reasons

    def _packages(self, details: dict[str, str]) -> list[str]:
        reasons = []
        torch = _host.distribution_version("torch")
        details["torch"] = torch or "missing"
        if torch is None:
            reasons.append(f"torch is missing: {_NO_TORCH}")
        elif "+cpu" in torch or "+rocm" in torch:
            reasons.append(_not_cuda(torch))
        nixl = _host.nixl_version()
        details["nixl"] = nixl or "missing"
        if nixl is None:
            return [*reasons, "nixl is missing: pip install 'kvpush[nixl]'"]
        if not _host.nixl_has_plugin("UCX"):
            reasons.append(f"nixl {nixl} has no UCX plugin: reinstall it from a wheel, or set NIXL_PLUGIN_DIR")
        problem = _nixl.import_problem()
        if problem:
            reasons.append(
                f"nixl {nixl} is installed but can't be imported ({problem}): install the wheel of torch's CUDA, nixl-cu12 or "
                "nixl-cu13"
            )
        return reasons

    def _transport_for(self, asked: str) -> tuple[str, str]:
        """The transport, and why."""
        if asked != "auto":
            return asked, "asked for"
        efa = self._network_cards(_AMAZON)
        if not efa:
            return "nixl-ucx", "no EFA device here"
        lacks = [name for name in _LIBFABRIC_NEEDS if _host.shared_library_loads(name)]
        if not _host.nixl_has_plugin("LIBFABRIC"):
            lacks.append("NIXL's LIBFABRIC plugin")
        if lacks:
            return "nixl-ucx", (
                f"{', '.join(efa)} is EFA, where UCX is slow, but LIBFABRIC lacks {', '.join(lacks)}: install AWS's EFA "
                "software and add /opt/amazon/efa/lib to LD_LIBRARY_PATH"
            )
        return "nixl-libfabric", f"{', '.join(efa)} is EFA"

    def _network_cards(self, vendor: str | None = None) -> list[str]:
        """RDMA devices; of one PCI vendor, where one is given."""
        found = []
        for path in sorted((self._root / "sys/class/infiniband").glob("*")):
            if vendor is None or _text(path / "device/vendor") == vendor:
                found.append(path.name)
        return found

    def _gpu_direct(self) -> str:
        """How a network card could reach GPU memory. A hint, not a condition: without it UCX copies through the host."""
        modules = self._root / "sys/module"
        version = _text(modules / "nvidia/version")
        cards = self._network_cards()
        if not version and not (modules / "nvidia_peermem").exists():
            return "no NVIDIA kernel module"
        if not cards:
            return "no RDMA device: KV goes by CUDA IPC inside a host, through host memory to others"
        if (modules / "nvidia_peermem").exists():
            return f"nvidia_peermem is loaded, RDMA devices {', '.join(cards)}"
        release = _text(self._root / "proc/sys/kernel/osrelease")
        linux = tuple(int(part) for part in release.split(".")[:2] if part.isdigit())
        if "Open Kernel Module" in _text(self._root / "proc/driver/nvidia/version") and linux >= _DMABUF_LINUX:
            return f"dma-buf (open kernel module {version}, Linux {release}), RDMA devices {', '.join(cards)}"
        return (
            f"none: driver {version} without nvidia_peermem, so KV goes through host memory: modprobe nvidia_peermem, or "
            "install the driver's open kernel modules (dma-buf, Linux 5.12 and newer)"
        )


_NO_TORCH = "install vLLM's CUDA build (pip install 'kvpush[vllm]')"


def _not_cuda(version: str) -> str:
    return f"torch {version} is no CUDA build: install the one that vLLM's CUDA build asks for"


def _hidden() -> str:
    """Whether the environment hides every GPU; empty when it doesn't. GPUs and MIG instances may be named by number or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU: unset it or name some"
    return ""


def _tls_problem(name: str, tls: str | None) -> str:
    """What is wrong with a value of ``UCX_TLS`` for GPU memory; empty when nothing is."""
    names = [part.strip() for part in (tls or "").split(",") if part.strip()]
    if not names:
        return ""
    if names[0].startswith("^"):
        left_out = {names[0][1:].strip(), *names[1:]}
        if left_out & {"cuda", "cuda_copy"}:
            return f"{name} is {tls!r}, which leaves cuda_copy out: UCX takes GPU memory for the host's then; allow it"
        return ""
    if any(part.lstrip("\\") in ("all", "cuda", "cuda_copy") for part in names):
        return ""
    return (
        f"{name} is {tls!r}, a list of all that is allowed, without cuda_copy: UCX takes GPU memory for the host's then; add "
        "'cuda' to it, or unset it"
    )


def _text(path: Path) -> str:
    """A file's first line; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].strip()
    except OSError:
        return ""


def _field(path: Path, name: str) -> str:
    """A field of a file of ``name: value`` lines; ``unknown`` where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "unknown")


@hookimpl
def kvpush_backend() -> CudaPlugin:
    """The plugin of this module."""
    return CudaPlugin()
