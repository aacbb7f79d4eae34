# SPDX-License-Identifier: Apache-2.0
"""A Trainium host in one process: the mock runtime of ``libnrt.c``, its memory, and an EFA that delivers late."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvpush.backends.base import CacheView
from kvpush.backends.loopback import LoopbackFabric, LoopbackTransport
from kvpush.backends.neuron import LibNrt, NeuronPlugin, Reader
from kvpush.core.transport import Descriptors, MemoryKind, Region, Transport, TransportCapabilities
from kvpush.errors import TransportError
from kvpush.testing.fabric import Bytes, Device, Memory

START, INIT, CHILD, CLOSED = range(4)


class MockNrt:
    """The shared library, built from ``libnrt.c``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "libnrt.so.1"
        source = Path(__file__).with_name("libnrt.c")
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o", str(self.path), str(source)], check=True
        )
        self.lib = ctypes.CDLL(str(self.path))
        self.lib.nrt_tensor_get_va.restype = ctypes.c_void_p
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.lib.nrt_tensor_allocate.argtypes = (ctypes.c_int, ctypes.c_int, size, ctypes.c_char_p, ctypes.POINTER(pointer))
        self.lib.nrt_tensor_get_va.argtypes = (pointer,)
        self.lib.nrt_tensor_read.argtypes = self.lib.nrt_tensor_write.argtypes = (pointer, pointer, size, size)
        self.lib.mock_efa_read.argtypes = (pointer, pointer, size)

    def runtime(self) -> LibNrt:
        return LibNrt(str(self.path))


class Hbm:
    """A tensor of the mock runtime; satisfies :class:`kvpush.testing.fabric.Memory` as the device sees it."""

    def __init__(self, nrt: MockNrt, num_bytes: int) -> None:
        self._lib = nrt.lib
        self._tensor = ctypes.c_void_p()
        assert self._lib.nrt_tensor_allocate(0, 0, num_bytes, b"kv", ctypes.byref(self._tensor)) == 0
        self.size = num_bytes

    @property
    def address(self) -> int:
        return int(self._lib.nrt_tensor_get_va(self._tensor) or 0)

    def __getitem__(self, part: slice) -> Bytes:
        start, stop, step = part.indices(self.size)
        assert step == 1
        into = np.empty(max(0, stop - start), np.uint8)
        assert self._lib.nrt_tensor_read(self._tensor, into.ctypes.data, start, into.size) == 0
        return into

    def __setitem__(self, part: slice, value: Any) -> None:
        start, stop, step = part.indices(self.size)
        assert step == 1
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.uint8), (max(0, stop - start),)))
        assert self._lib.nrt_tensor_write(self._tensor, data.ctypes.data, start, data.size) == 0

    def __del__(self) -> None:
        self._lib.nrt_tensor_free(ctypes.byref(self._tensor))


class NeuronDevice(Device):
    """Caches as vllm-neuron has them: K and V apart, heads before tokens."""

    device_type = "neuron"
    order = "2BHNC"

    def __init__(self, nrt: MockNrt) -> None:
        self.nrt = nrt

    def allocate(self, num_bytes: int) -> tuple[Memory, Region]:
        memory = Hbm(self.nrt, num_bytes)
        return memory, Region(memory.address, num_bytes, 0, MemoryKind.DEVICE, memory)


class MockEfa:
    """A transport between mock devices (and host memory), called as NIXL's is."""

    def __init__(self, inner: LoopbackTransport) -> None:
        self._inner = inner

    name = "nixl-libfabric"

    @property
    def capabilities(self) -> TransportCapabilities:
        return replace(self._inner.capabilities, in_process_only=False)

    def register_memory(self, regions: Sequence[Region]) -> None:
        self._inner.register_memory([replace(region, kind=MemoryKind.HOST) for region in regions])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class MockReader:
    """Reads through the mock's network card. A read ends when it has been asked for ``polls`` times."""

    def __init__(self, nrt: MockNrt, polls: int = 2) -> None:
        self._lib = nrt.lib
        self.polls = polls
        self.metadata: list[bytes] = []
        self.reads: list[Descriptors] = []
        self.closed = 0

    def attach(self, metadata: bytes) -> None:
        self.metadata.append(metadata)

    def read(self, rows: Descriptors) -> Callable[[], bool]:
        assert self.metadata, "attached first"
        assert not self.closed
        self.reads.append(rows.copy())
        left = self.polls
        scratch = (ctypes.c_uint8 * 64)()

        def done() -> bool:
            nonlocal left
            if left > 0:
                left -= 1
                return False
            for address, length, _ in rows.tolist():
                if self._lib.mock_efa_read(scratch, address, length) != 0:
                    raise TransportError("the card can't read")
            return True

        return done

    def close(self) -> None:
        self.closed += 1


class Event:
    """``torch.neuron.Event``: recorded on the current stream, done when asked for the second time."""

    def __init__(self) -> None:
        self.polls = -1

    def record(self) -> None:
        self.polls = 0

    def query(self) -> bool:
        assert self.polls >= 0, "recorded first"
        self.polls += 1
        return self.polls > 1


class NeuronModule:
    """``torch.neuron`` of a torch-neuronx with events."""

    Event = Event


class Host:
    """Everything that a test needs: :meth:`plugin` makes backends that share one wire.

    Args:
        nrt: The runtime, initialised.
    """

    def __init__(self, nrt: MockNrt) -> None:
        self.nrt = nrt
        self.fabric = LoopbackFabric()
        self.readers: list[MockReader] = []

    def link(self, agent_name: str, retry_window_s: float) -> tuple[Transport, Reader]:
        del retry_window_s
        self.readers.append(MockReader(self.nrt))
        return MockEfa(self.fabric.transport(agent_name)), self.readers[-1]

    def plugin(self, **changes: Any) -> NeuronPlugin:
        return NeuronPlugin(**{"runtime": self.nrt.runtime(), "link": self.link, "device_module": NeuronModule(), **changes})

    def view(self, name: str = "layer.0", num_blocks: int = 8) -> tuple[CacheView, Memory]:
        return NeuronDevice(self.nrt).view(name, num_blocks)
