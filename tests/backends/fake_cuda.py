# SPDX-License-Identifier: Apache-2.0
"""GPUs in one process, without any: what the cuda backend asks of ``torch.cuda``, over host memory.

A stream is a queue of work that runs when told. An event has passed when everything that was queued before it has run.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvpush.backends.cuda import CudaLink, CudaPlugin
from kvpush.backends.loopback import LoopbackFabric, LoopbackTransport
from kvpush.core.transport import MemoryKind, Region, Transport, TransportCapabilities
from kvpush.errors import BackendError
from kvpush.testing.fabric import Device, Memory, host_memory


class Stream:
    """Work of one device, in order.

    Args:
        device: Its number.
        cuda_stream: The driver's handle, as torch names it.
    """

    def __init__(self, device: int, cuda_stream: int = 0) -> None:
        self.device = device
        self.cuda_stream = cuda_stream
        self.launched = 0
        self.ended = 0
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, work: Callable[[], None] = lambda: None) -> None:
        """Queue a kernel."""
        self.launched += 1
        self._queue.append(work)

    def run(self) -> None:
        """The device comes to everything that is queued."""
        while self._queue:
            self._queue.popleft()()
            self.ended += 1


class FakeCuda:
    """Stands for ``torch.cuda``. There is no ``synchronize``: whoever waits for the device fails.

    Args:
        num_devices: How many GPUs there are.
        runs: Streams run by themselves, before an event is asked for the second time.
    """

    def __init__(self, num_devices: int = 1, *, runs: bool = True) -> None:
        self.num_devices = num_devices
        self.runs = runs
        self.streams = [Stream(device) for device in range(num_devices)]
        """Those that engines compute on, one per device."""
        self.side_streams: list[Stream] = []
        self.events: list[Any] = []
        self.segments: list[dict[str, Any]] = []
        self.contexts: set[tuple[int, int]] = set()
        """Threads (by ident) and the devices that they have a context of."""
        self.failure = ""
        self._local = threading.local()
        fake = self

        class Event:
            """``torch.cuda.Event``: made on the first stream it is recorded on, and bound to its device."""

            def __init__(self) -> None:
                self.stream: Stream | None = None
                self.position = 0
                self.records = 0
                self.asked = 0
                fake.events.append(self)

            def record(self, stream: Stream) -> None:
                fake._check()
                assert self.stream is None or self.stream.device == stream.device, "an event belongs to one device"
                self.stream, self.position, self.asked = stream, stream.launched, 0
                self.records += 1

            def query(self) -> bool:
                fake._check()
                assert self.stream is not None, "recorded first"
                self.asked += 1
                if fake.runs and self.asked > 1:
                    self.stream.run()
                return self.stream.ended >= self.position and (not fake.runs or self.asked > 1)

        class device:
            """``torch.cuda.device``."""

            def __init__(self, device_id: int) -> None:
                self._device_id = device_id

            def __enter__(self) -> None:
                self._before = fake.current_device()
                fake.set_device(self._device_id)

            def __exit__(self, *unused: object) -> None:
                fake._local.device = self._before

        self.Event = Event
        self.device = device

    def _check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def is_available(self) -> bool:
        return self.num_devices > 0

    def device_count(self) -> int:
        return self.num_devices

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device_id: int) -> None:
        assert 0 <= device_id < self.num_devices
        if device_id != self.current_device():
            self.contexts.add((threading.get_ident(), device_id))
        self._local.device = device_id

    def mem_get_info(self, device_id: int) -> tuple[int, int]:
        self.contexts.add((threading.get_ident(), device_id))
        return 0, 0

    def has_context(self) -> bool:
        """Whether UCX, called now, would find a context on this thread."""
        return (threading.get_ident(), self.current_device()) in self.contexts

    def current_stream(self, device_id: int) -> Stream:
        return self.streams[device_id]

    def Stream(self, device: int, priority: int = 0) -> Stream:
        self._check()
        assert priority <= 0
        assert self.has_context()
        self.side_streams.append(Stream(device, 1 + len(self.side_streams)))
        return self.side_streams[-1]

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.segments


class Pinned:
    """Host memory; satisfies :class:`kvpush.backends._cuda_copy.HostBuffer`."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = host_memory(num_bytes)
        self.address = int(self.memory.ctypes.data)
        self.size = num_bytes


class FakeDriver:
    """The CUDA driver: copies are queued on the streams of a :class:`FakeCuda`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.copied: list[tuple[int, int, int]] = []
        """What was asked for: from where, to where, how much."""
        self.allocated: list[Pinned] = []
        self.fail_at = -1
        """The copy of that number is refused."""

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        assert self._cuda.has_context()
        if len(self.copied) == self.fail_at:
            raise BackendError("CUDA_ERROR_INVALID_VALUE")
        self.copied.append((src, dst, num_bytes))
        self._cuda.side_streams[stream - 1].launch(lambda: ctypes.memmove(dst, src, num_bytes))

    def pinned(self, num_bytes: int) -> Pinned:
        assert self._cuda.has_context()
        self.allocated.append(Pinned(num_bytes))
        return self.allocated[-1]


class FakeNixl:
    """A transport between fake GPUs, called as NIXL's is: it wants the context of the memory's device on every call."""

    def __init__(self, name: str, inner: LoopbackTransport, cuda: FakeCuda) -> None:
        self.name = name
        self._inner = inner
        self._cuda = cuda
        self.devices: set[int] = set()
        """The current device at each call after the registration."""

    @property
    def capabilities(self) -> TransportCapabilities:
        return replace(self._inner.capabilities, in_process_only=False)

    def register_memory(self, regions: Sequence[Region]) -> None:
        assert self._cuda.has_context()
        self._inner.register_memory([replace(region, kind=MemoryKind.HOST) for region in regions])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            assert self._cuda.has_context(), f"{name}() without a CUDA context"
            self.devices.add(self._cuda.current_device())
            return found(*arguments)

        return call


class FakeGpu(Device):
    """Caches on a fake GPU."""

    device_type = "cuda"

    def __init__(self, device_id: int = 0) -> None:
        self.device_id = device_id

    def allocate(self, num_bytes: int) -> tuple[Memory, Region]:
        memory = host_memory(num_bytes)
        return memory, Region(memory.ctypes.data, num_bytes, self.device_id, MemoryKind.DEVICE, memory)


class Host:
    """Everything that a test needs: :meth:`plugin` makes backends that share one wire.

    Args:
        cuda: The GPUs.
    """

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self.cuda = cuda or FakeCuda()
        self.driver = FakeDriver(self.cuda)
        self.fabric = LoopbackFabric()
        self.asked: list[CudaLink] = []
        self.transports: list[FakeNixl] = []

    def link(self, wanted: CudaLink) -> Transport:
        assert self.cuda.has_context(), "an agent that is made without a context takes GPU memory for the host's"
        self.asked.append(wanted)
        self.transports.append(FakeNixl(wanted.transport, self.fabric.transport(wanted.agent_name), self.cuda))
        return self.transports[-1]  # type: ignore[return-value]

    def plugin(self, **changes: Any) -> CudaPlugin:
        return CudaPlugin(**{"link": self.link, "device_module": self.cuda, "driver": self.driver, **changes})
