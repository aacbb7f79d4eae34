# SPDX-License-Identifier: Apache-2.0
"""AWS Trainium: HBM over NIXL (LIBFABRIC on EFA), with Neuron Direct RDMA.

**Never run on a Trainium host so far.** What is here rests on public sources, named below, and on tests over a mock of the
Neuron runtime; docs/accelerators.md says what has to be measured, and how.

* **Addresses.** A torch tensor has its HBM address as ``data_ptr()`` only where ``NEURON_RT_MAP_HBM=1`` was set before the
  process allocated its first device tensor; otherwise it is 0, which is refused here.
* **Order of start-up.** libfabric asks libnrt for its devices when it is first used. An agent made before the runtime is up
  registers HBM as system memory, with no more than a warning (libfabric 11804). So :meth:`NeuronPlugin.create` refuses until
  the runtime is initialised.
* **Late visibility.** On trn2 the card's writes into HBM and the completions of these writes take different PCIe paths, and so
  does a read by the CPU through libnrt: a completion, a message, or ``nrt_tensor_read`` prove nothing (libfabric 12761). An
  access by the *card* that is begun after the completion comes after the data (libfabric 12807; fi_ext_efa.h: what completes
  is ordered before later operations to the same endpoint, unless FI_EFA_MR_RELAXED_ORDERING is asked for, which NIXL doesn't).
  So the last bytes of what was written are read back through the card: :class:`ReadBackFence`.
* **The reader is an agent of its own**: see :class:`kvpush.backends._nixl.NixlReader`. Between two agents of one host EFA would
  use shared memory, which orders nothing: ``FI_EFA_ENABLE_SHM_TRANSFER=0`` is demanded, not only advised.
* **One card per allocation.** NIXL registers HBM with the card that ``nrt_get_attached_efa_bdf`` names, so the writes into an
  allocation and its read-back share an endpoint. Where libnrt names none, registration is refused.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvpush import _host
from kvpush.backends import _nixl
from kvpush.backends._host_layout import host_layout
from kvpush.backends._wrapped import WrappedTransport
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
from kvpush.errors import BackendError, ConfigError, LayoutError, MemoryRegistrationError, TransportError

__all__ = ["LibNrt", "NeuronBackend", "NeuronPlugin", "NeuronRuntime", "ReadBackFence", "Reader", "kvpush_backend"]

logger = logging.getLogger(__name__)

DEVICE_TYPES = ("neuron", "privateuseone")
"""As torch names them: torch-neuronx renames PrivateUse1 to ``neuron``; older ones leave its first name."""

_MAP_HBM = "NEURON_RT_MAP_HBM"
_NO_ADDRESS = f"has no address: set {_MAP_HBM}=1 in the environment before the process allocates its first device tensor"
_XLA = (
    "its tensors are XLA's (torch-neuronx before its native backend), which have no address that could be registered: use a "
    "torch-neuronx with the native backend (device type 'neuron')"
)
_EFA_ENVIRONMENT = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
_READ_BACK_BYTES = _nixl.NixlReader.MAX_BYTES
_ROWS_PER_READ = 256
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 1e-3
_JOIN_S = 2.0
_LIBNRT = "libnrt.so.1"
# Source: nrt/nrt_status.h of aws-neuronx-runtime-lib.
_NRT_UNINITIALIZED, _NRT_CLOSED = 13, 14


class NeuronRuntime(Protocol):
    """What is asked of the Neuron runtime of this process."""

    def problem(self) -> str:
        """Why no device memory can be registered now; empty when it can."""

    def attached_efa(self, address: int) -> str:
        """PCI address of the EFA device next to the HBM at an address.

        Raises:
            BackendError: the runtime can't tell.
        """


class LibNrt:
    """The runtime that torch-neuronx has loaded into this process; see :class:`NeuronRuntime`. Loads and starts nothing.

    Args:
        name: Of the shared library, as the loader knows it.
    """

    def __init__(self, name: str = _LIBNRT) -> None:
        self._name = name

    def problem(self) -> str:
        try:
            library = self._loaded()
        except OSError:
            return f"{self._name} is not loaded, so the Neuron runtime is not up: allocate a tensor on the device first"
        # An empty tensor has no storage: this asks for the runtime's state and touches no device. Source: nrt/nrt.h.
        tensor = ctypes.c_void_p()
        status = library.nrt_tensor_allocate_empty(b"kvpush", ctypes.byref(tensor))
        if status == 0:
            library.nrt_tensor_free(ctypes.byref(tensor))
            return ""
        if status == _NRT_UNINITIALIZED:
            return "the Neuron runtime is not initialised: allocate a tensor on the device before kvpush starts"
        if status == _NRT_CLOSED:
            return "the Neuron runtime is closed (nrt_close) and can't be used again in this process"
        return f"the Neuron runtime doesn't answer (status {status}); a process that was forked after its start can't use it"

    def attached_efa(self, address: int) -> str:
        try:
            ask = self._loaded().nrt_get_attached_efa_bdf
        except (OSError, AttributeError) as exc:
            raise BackendError(
                f"{self._name} can't tell which EFA device is next to HBM: update aws-neuronx-runtime-lib"
            ) from exc
        text = ctypes.create_string_buffer(64)
        length = ctypes.c_size_t(len(text))
        status = ask(ctypes.c_void_p(address), text, ctypes.byref(length))
        if status != 0:
            raise BackendError(
                f"the Neuron runtime names no EFA device for HBM address {address:#x} (status {status}): is it device memory "
                "of this process, and was the instance launched with all of its EFA interfaces (16 on trn2.48xlarge)?"
            )
        return text.value.decode(errors="replace")

    def _loaded(self) -> ctypes.CDLL:
        """The library, where somebody has loaded it; from now on its symbols are found by libfabric too."""
        library = ctypes.CDLL(self._name, mode=os.RTLD_NOW | os.RTLD_GLOBAL | os.RTLD_NOLOAD)
        library.nrt_tensor_allocate_empty.argtypes = (ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
        library.nrt_tensor_free.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
        library.nrt_tensor_free.restype = None
        return library


class Reader(Protocol):
    """Reads memory of this process through the network card; satisfied by :class:`kvpush.backends._nixl.NixlReader`.

    **Owner** the fence thread for everything after construction.
    """

    def attach(self, metadata: bytes) -> None:
        """Connect to the transport that has the memory registered."""

    def read(self, rows: Descriptors) -> Callable[[], bool]:
        """Begin to read; the result says whether it has ended, without blocking."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class ReadBackFence:
    """A running read-back; satisfies :class:`kvpush.backends.base.VisibilityFence`."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self._ended = threading.Event()
        self._error = ""

    def done(self) -> bool:
        """Whether what had been written when the fence was started is in HBM.

        Raises:
            BackendError: it could not be read back.
        """
        if not self._ended.is_set():
            # The first read of a connection needs an answer of the transport's own endpoint.
            self._progress()
            return False
        if self._error:
            raise BackendError(f"what has arrived can't be read back from HBM: {self._error}")
        return True

    def end(self, error: str = "") -> None:
        """**Owner** the fence thread."""
        self._error = error
        self._ended.set()


class _Reading:
    """The rows of one fence, read piece by piece so that none of them holds the others up for long."""

    def __init__(self, fence: ReadBackFence, rows: Descriptors, reader: Reader) -> None:
        self.fence = fence
        self._left = rows
        self._reader = reader
        self._done: Callable[[], bool] = lambda: True

    def step(self) -> bool:
        """Go on if the piece that runs has ended; whether the fence has ended."""
        try:
            while self._done():
                if not len(self._left):
                    self.fence.end()
                    return True
                piece, self._left = self._left[:_ROWS_PER_READ], self._left[_ROWS_PER_READ:]
                self._done = self._reader.read(piece)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is the end of this fence, and of no other
            self.fence.end(f"{type(exc).__name__}: {exc}")
            return True
        return False


class _ReadBack:
    """The fence thread: posts the reads and asks for their ends. Sleeps while there are none."""

    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self._changed = threading.Condition()
        self._asked: deque[tuple[ReadBackFence, Descriptors, bytes]] = deque()
        self._closing = False
        self._attached = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, fence: ReadBackFence, rows: Descriptors, metadata: bytes) -> None:
        """Read these rows of the transport with that metadata. **Owner** submitter thread; never blocks."""
        with self._changed:
            if self._closing:
                raise BackendError("the backend is closed")
            self._asked.append((fence, rows, metadata))
            self._changed.notify()

    def close(self) -> None:
        """End what runs and stop the thread. Waits for the call of the reader that it is in, but not for ever."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        running: list[_Reading] = []
        pause = _MIN_PAUSE_S
        while True:
            with self._changed:
                if not running:
                    self._changed.wait_for(lambda: self._closing or bool(self._asked))
                if self._closing:
                    break
                asked = list(self._asked)
                self._asked.clear()
            running += [_Reading(fence, rows, self._reader) for fence, rows, metadata in asked if self._attach(fence, metadata)]
            left = [reading for reading in running if not reading.step()]
            pause = _MIN_PAUSE_S if asked or len(left) < len(running) else min(2 * pause, _MAX_PAUSE_S)
            running = left
            if running:
                time.sleep(pause)
        for reading in running:
            reading.fence.end("the backend was closed")
        for fence, *_ in self._asked:
            fence.end("the backend was closed")
        self._reader.close()

    def _attach(self, fence: ReadBackFence, metadata: bytes) -> bool:
        if not self._attached:
            try:
                self._reader.attach(metadata)
            except Exception as exc:  # noqa: BLE001 - tried again with the next fence
                fence.end(f"{type(exc).__name__}: {exc}")
                return False
            self._attached = True
        return True


class _Synchronized:
    """A token of :class:`_SyncThread`."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error = ""


class _SyncThread:
    """Device fences for a torch-neuronx without events: a thread waits for the device, so that nobody else has to."""

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize
        self._changed = threading.Condition()
        self._asked: list[_Synchronized] = []
        self._closing = False
        threading.Thread(target=self._run, name="kvpush-neuron-sync", daemon=True).start()

    def token(self) -> _Synchronized:
        token = _Synchronized()
        with self._changed:
            self._asked.append(token)
            self._changed.notify()
        return token

    def close(self) -> None:
        """The thread ends after the wait that it is in. Doesn't block."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._asked))
                if self._closing:
                    return
                asked, self._asked = self._asked, []
            error = ""
            try:
                # What was queued before a token was made is queued before this call.
                self._synchronize()
            except Exception as exc:  # noqa: BLE001 - the device's failure belongs to those who asked
                error = f"{type(exc).__name__}: {exc}"
            for token in asked:
                token.error = error
                token.ended.set()


class _CheckedTransport(WrappedTransport):
    """A transport that takes device memory only where it is what it seems, and remembers it."""

    def __init__(self, inner: Transport, runtime: NeuronRuntime) -> None:
        super().__init__(inner)
        self._runtime = runtime
        self.device_regions: tuple[Region, ...] = ()
        self.efa: dict[str, int] = {}
        """PCI addresses of the cards next to the registered memory, and how many regions each serves."""

    def register_memory(self, regions: Sequence[Region]) -> None:
        """Register regions.

        Raises:
            MemoryRegistrationError: no address, not known to the Neuron runtime, or the inner transport refuses.
        """
        found: dict[str, int] = {}
        device = [region for region in regions if region.kind is MemoryKind.DEVICE]
        for region in device:
            if region.address == 0:
                raise MemoryRegistrationError(f"a region of {region.length} bytes on device {region.device_id} {_NO_ADDRESS}")
            try:
                card = self._runtime.attached_efa(region.address)
            except BackendError as exc:
                raise MemoryRegistrationError(exc.message) from exc
            found[card] = found.get(card, 0) + 1
        super().register_memory(regions)
        self.device_regions = tuple(sorted({*self.device_regions, *device}, key=lambda region: region.address))
        for card, count in found.items():
            self.efa[card] = self.efa.get(card, 0) + count
        if found:
            logger.info("kvpush: HBM is registered with EFA device %s", ", ".join(sorted(found)))


class NeuronBackend(Backend):
    """Working half of the ``neuron`` backend. Satisfies :class:`kvpush.backends.base.Backend`.

    Args:
        info: The plugin's card.
        transport: Moves the bytes; closed by :meth:`close`.
        reader: Reads them back; likewise.
        runtime: The Neuron runtime of this process.
        device_module: What torch calls ``torch.neuron``; looked up when first needed if not given.
    """

    def __init__(
        self,
        info: BackendInfo,
        transport: Transport,
        reader: Reader,
        runtime: NeuronRuntime,
        device_module: Any = None,
    ) -> None:
        self._info = info
        self._transport = _CheckedTransport(transport, runtime)
        self._read_back = _ReadBack(reader, "kvpush-neuron-fence")
        self._module = device_module
        self._sync: _SyncThread | None = None

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def transport(self) -> Transport:
        return self._transport

    def describe(self, views: Sequence[CacheView]) -> CacheLayout:
        """See :func:`kvpush.backends._host_layout.host_layout`: K and V are planes of their own where their dimension comes
        before the blocks', as in ``(2, num_blocks, kv_heads, block_size, head_size)``.

        Raises:
            LayoutError: XLA's tensors, memory without an address, or a torch that has no such device.
        """
        for view in views:
            if view.device_type == "xla":
                raise LayoutError(f"layer {view.name!r}: {_XLA}")
            if view.device_type in DEVICE_TYPES and 0 in (view.address, view.region.address):
                raise LayoutError(f"layer {view.name!r} {_NO_ADDRESS}")
            if view.device_type in DEVICE_TYPES and view.region.kind is not MemoryKind.DEVICE:
                raise LayoutError(f"layer {view.name!r}: its region is of {view.region.kind} memory, not of the device's")
        layout = host_layout(views, self._info.device_types)
        self._device()
        return layout

    def device_fence(self) -> object | None:
        """An event on the current stream; without events, a token that a thread ends which waits for the device."""
        module = self._device()
        if hasattr(module, "Event"):
            event: object = module.Event()
            event.record()  # type: ignore[attr-defined]
            return event
        if self._sync is None:
            self._sync = _SyncThread(module.synchronize)
        return self._sync.token()

    def fence_done(self, token: object) -> bool:
        """Whether what had been queued before :meth:`device_fence` is in HBM.

        Raises:
            BackendError: the device has failed.
        """
        if isinstance(token, _Synchronized):
            if token.ended.is_set() and token.error:
                raise BackendError(f"waiting for the Neuron device failed: {token.error}")
            return token.ended.is_set()
        try:
            return bool(token.query())  # type: ignore[attr-defined]
        except Exception as exc:
            raise BackendError(f"the Neuron device has failed: {type(exc).__name__}: {exc}") from exc

    def start_visibility_fence(self, regions: Sequence[Region]) -> VisibilityFence | None:
        """Begin to read the ends of ``regions`` back through the network card. None: nothing of them is registered memory of
        the device, so that nothing can have been written there."""
        rows = _ends(regions, self._transport.device_regions)
        if not len(rows):
            return None
        fence = ReadBackFence(self._transport.progress)
        self._read_back.start(fence, rows, self._transport.metadata())
        return fence

    @property
    def digest_scheme(self) -> str:
        """None; the card doesn't promise digests."""
        return ""

    def start_digest(self, layers: Sequence[LayerLayout], blocks: BlockTable) -> RunningDigest:
        """Always raises: HBM can't be read by this process at a useful rate."""
        raise BackendError("the neuron backend can't compute digests: set verify=off")

    def close(self) -> None:
        """Stop the fence thread, and close the reader and the transport. Idempotent."""
        self._read_back.close()
        if self._sync is not None:
            self._sync.close()
        self._transport.close()

    def _device(self) -> Any:
        if self._module is None:
            _, self._module = _torch_device()
        return self._module


def _ends(regions: Sequence[Region], registered: Sequence[Region]) -> Descriptors:
    """The last bytes of each range in each registered region that it touches.

    Args:
        regions: What has been written.
        registered: Device memory, sorted by address.

    Returns:
        Rows of at most :data:`_READ_BACK_BYTES` bytes, shape ``[n, 3]``.
    """
    starts = np.array([region.address for region in registered], np.uint64)
    rows: list[tuple[int, int, int]] = []
    for written in regions:
        lo, hi = written.address, written.address + written.length
        first = max(0, int(np.searchsorted(starts, lo, side="right")) - 1)
        last = int(np.searchsorted(starts, hi, side="left"))
        for region in registered[first:last]:
            end = min(hi, region.address + region.length)
            begin = max(lo, region.address, end - _READ_BACK_BYTES)
            if begin < end and region.device_id == written.device_id:
                rows.append((begin, end - begin, region.device_id))
    return np.array(rows, np.uint64).reshape(-1, 3)


def _torch_device() -> tuple[str, Any]:
    """The device's name in torch, and ``torch.neuron`` by that name.

    Raises:
        LayoutError: torch has no such device.
    """
    torch = importlib.import_module("torch")
    for name in DEVICE_TYPES:
        module = getattr(torch, name, None)
        if module is not None and (hasattr(module, "Event") or hasattr(module, "synchronize")):
            return name, module
    raise LayoutError(
        f"torch {torch.__version__} has no device {' or '.join(DEVICE_TYPES)} in this process, so nothing tells when the "
        "device has finished: import torch_neuronx before kvpush starts"
    )


class _Tensor:
    """A tensor of bytes on the device; satisfies :class:`kvpush.testing.fabric.Memory`. For ``kvpush backends check``."""

    def __init__(self, device_type: str, num_bytes: int) -> None:
        torch = importlib.import_module("torch")
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device_type)
        self.size = num_bytes

    def __getitem__(self, part: slice) -> Any:
        return self.tensor.cpu().numpy()[part]

    def __setitem__(self, part: slice, value: Any) -> None:
        host = self.tensor.cpu()
        host.numpy()[part] = value
        self.tensor.copy_(host)


Link = Callable[[str, float], tuple[Transport, Reader]]
"""Makes the transport and the reader, from the agent's name and the retry window in seconds."""


def _efa_link(agent_name: str, retry_window_s: float) -> tuple[Transport, Reader]:
    transport = _nixl.NixlTransport(
        agent_name, backend="LIBFABRIC", retry_window_s=retry_window_s, environment=_EFA_ENVIRONMENT
    )
    try:
        reader = _nixl.NixlReader(
            f"{agent_name}-reader", backend="LIBFABRIC", kind=MemoryKind.DEVICE, environment=_EFA_ENVIRONMENT
        )
    except TransportError:
        transport.close()
        raise
    return transport, reader


class NeuronPlugin:
    """Light half of the ``neuron`` backend.

    Args:
        root: Where ``/dev``, ``/opt`` and ``/sys`` are looked for; tests give another one.
        runtime: The Neuron runtime; that of this process by default.
        link: Makes transport and reader; over EFA by default.
        device_module: What stands for ``torch.neuron``; torch's own by default.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        runtime: NeuronRuntime | None = None,
        link: Link = _efa_link,
        device_module: Any = None,
    ) -> None:
        self._root = root
        self._runtime = runtime or LibNrt()
        self._link = link
        self._device_module = device_module

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            name="neuron",
            api_version=BACKEND_API_VERSION,
            device_types=DEVICE_TYPES,
            transports=("nixl-libfabric",),
            # No LAYER_FENCE: a step runs as one compiled graph, so that nothing of Python is called between its layers.
            capabilities=frozenset({Capability.VISIBILITY_FENCE}),
            summary="AWS Trainium HBM over NIXL (LIBFABRIC on EFA); so far tested over a mock runtime only",
            priority=20,
        )

    def probe(self) -> Probe:
        """Look at files, package metadata, the environment and the loader. Doesn't initialise the Neuron runtime."""
        details: dict[str, str] = {}
        reasons = [
            *self._packages(details),
            *self._devices(details),
            *self._nixl(details),
            *_environment_problems(details),
        ]
        return Probe(ok=not reasons, reasons=tuple(reasons), details=details)

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Make the working half. The engine's worker has allocated its cache by then, so the runtime is up.

        Args:
            agent_name: Unique per process start.
            options: ``retry_window_s``, seconds: how long EFA may go on delivering what prefill has posted. Not measured.

        Raises:
            BackendError: the Neuron runtime is not up, the environment can't work, or no agent can be made.
            ConfigError: an unknown or wrong option.
        """
        unknown = sorted(set(options) - {"retry_window_s"})
        if unknown:
            raise ConfigError(f"backend neuron has no option {', '.join(unknown)}: it knows retry_window_s")
        window = options.get("retry_window_s", 30.0)
        if isinstance(window, bool) or not isinstance(window, (int, float)) or not math.isfinite(window) or window < 0:
            raise ConfigError(f"backend option retry_window_s must be a number of seconds, not {window!r}")
        problems = _environment_problems({})
        problem = self._runtime.problem()
        if problem:
            problems.append(problem)
        if problems:
            raise BackendError(f"backend neuron can't run here: {'; '.join(problems)}")
        try:
            transport, reader = self._link(agent_name, float(window))
        except TransportError as exc:
            raise BackendError(f"backend neuron can't run here: {exc.message}") from exc
        return NeuronBackend(self.info, transport, reader, self._runtime, self._device_module)

    def test_device(self) -> Any:
        """Memory for ``kvpush backends check neuron``: a :class:`kvpush.testing.fabric.Device` of torch tensors in HBM, laid
        out as vllm-neuron's caches are. Starts the Neuron runtime."""
        from kvpush.testing.fabric import Device

        importlib.import_module("torch_neuronx")
        name, _ = _torch_device()

        class Neuron(Device):
            device_type = name
            order = "2BHNC"

            def allocate(self, num_bytes: int) -> tuple[_Tensor, Region]:
                memory = _Tensor(name, num_bytes)
                address = memory.tensor.data_ptr()
                return memory, Region(address, num_bytes, memory.tensor.device.index or 0, MemoryKind.DEVICE, memory)

        device = Neuron()
        device.allocate(64)  # the first tensor initialises the runtime, which create() asks for
        return device

    def _packages(self, details: dict[str, str]) -> list[str]:
        reasons = []
        torch_neuronx = _host.distribution_version("torch-neuronx")
        details["torch-neuronx"] = torch_neuronx or "missing"
        if torch_neuronx is None:
            reasons.append("torch-neuronx is missing: install it from the AWS Neuron package index, not from PyPI")
        elif torch_neuronx == "1.0":
            # Source: PyPI holds placeholders of that version for torch-neuronx, neuronx-cc and libneuronxla.
            reasons.append(
                "torch-neuronx 1.0 is PyPI's empty placeholder: install the real one from the AWS Neuron package index"
            )
        complaint = _host.shared_library_loads(_LIBNRT)
        details[_LIBNRT] = complaint or "loads"
        if complaint:
            reasons.append(
                f"{_LIBNRT} doesn't load: install aws-neuronx-runtime-lib and add /opt/aws/neuron/lib to LD_LIBRARY_PATH"
            )
        runtime = (self._root / "opt/aws/neuron/lib" / _LIBNRT).resolve().name.removeprefix("libnrt.so.")
        details["runtime"] = runtime if runtime != "1" else "unknown"
        if runtime.startswith("2.32.31.0"):
            # Source: public reports of its nrt_get_dmabuf_fd, which returns NRT_INVALID without asking the driver.
            reasons.append(
                "aws-neuronx-runtime-lib 2.32.31.0 can't give HBM to the network card (nrt_get_dmabuf_fd): update it"
            )
        return reasons

    def _devices(self, details: dict[str, str]) -> list[str]:
        reasons = []
        devices = sorted(path.name for path in (self._root / "dev").glob("neuron[0-9]*"))
        details["devices"] = ", ".join(devices) or "none"
        if not devices:
            reasons.append("no /dev/neuron* here: install aws-neuronx-dkms, or give the container the devices")
        efa = sorted(path.name for path in (self._root / "sys/class/infiniband").glob("*"))
        details["efa"] = ", ".join(efa) or "none"
        if not efa:
            reasons.append(
                "no EFA device under /sys/class/infiniband: launch the instance with EFA interfaces and install the EFA driver"
            )
        return reasons

    def _nixl(self, details: dict[str, str]) -> list[str]:
        nixl = _host.nixl_version()
        details["nixl"] = nixl or "missing"
        if nixl is None:
            return ["nixl is missing: pip install 'kvpush[nixl]'"]
        if not _host.nixl_has_plugin("LIBFABRIC"):
            return [f"nixl {nixl} has no LIBFABRIC plugin: reinstall it from a wheel, or set NIXL_PLUGIN_DIR"]
        reasons = []
        # The plugin in the wheels leaves these to the host, and NIXL says no more than "unsupported backend" without them.
        for library, mend in (
            ("libfabric.so.1", "install AWS's EFA software and add /opt/amazon/efa/lib to LD_LIBRARY_PATH"),
            ("libhwloc.so.15", "install hwloc"),
            (
                "libcuda.so.1",
                "put CUDA's stub library on LD_LIBRARY_PATH, or build NIXL without CUDA",
            ),
        ):
            complaint = _host.shared_library_loads(library)
            details[library] = complaint or "loads"
            if complaint:
                reasons.append(f"NIXL's LIBFABRIC plugin needs {library}, which doesn't load: {mend}")
        return reasons


def _environment_problems(details: dict[str, str]) -> list[str]:
    """What in the environment can't work, each with its mend."""
    reasons = []
    for name in (_MAP_HBM, "FI_EFA_ENABLE_SHM_TRANSFER", *_EFA_ENVIRONMENT, "NEURON_RT_ENABLE_P2P", "NEURON_RT_VISIBLE_CORES"):
        details[name] = os.environ.get(name, "unset")
    if os.environ.get(_MAP_HBM, "").lower() not in ("1", "true"):
        reasons.append(f"{_MAP_HBM} is not 1, so device tensors have no address: set it before vLLM starts")
    if os.environ.get("FI_EFA_ENABLE_SHM_TRANSFER") != "0":
        reasons.append(
            "FI_EFA_ENABLE_SHM_TRANSFER is not 0, so that within a host EFA goes past the network card, which gives wrong KV: "
            "set it to 0 before vLLM starts"
        )
    if os.environ.get("FI_EFA_USE_DEVICE_RDMA", "1") == "0":
        reasons.append("FI_EFA_USE_DEVICE_RDMA is 0, so EFA can't write into HBM: unset it, or set it to 1")
    if "efa" not in os.environ.get("FI_PROVIDER", "efa"):
        reasons.append(f"FI_PROVIDER is {os.environ['FI_PROVIDER']!r}: unset it, or set it to efa")
    if os.environ.get("NEURON_RT_ENABLE_P2P", "1") == "0":
        reasons.append("NEURON_RT_ENABLE_P2P is 0, so HBM can't be exported to the network card: unset it")
    return reasons


@hookimpl
def kvpush_backend() -> NeuronPlugin:
    """The plugin of this module."""
    return NeuronPlugin()
