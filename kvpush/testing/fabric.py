# SPDX-License-Identifier: Apache-2.0
"""Two connected transport endpoints with memory, ready for tests. Needs no pytest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvpush.backends.base import Backend, BackendPlugin, CacheView
from kvpush.backends.loopback import LoopbackFabric
from kvpush.core.ids import AgentName
from kvpush.core.transport import Descriptors, Region, Transport

__all__ = [
    "BringsDevice",
    "Bytes",
    "Device",
    "Memory",
    "Side",
    "TransportPair",
    "backend_pair",
    "connect",
    "device_of",
    "host_memory",
    "loopback_pair",
    "register",
]

Bytes = npt.NDArray[np.uint8]

_serial = itertools.count()


class Memory(Protocol):
    """Memory of some device, seen as a row of bytes. A NumPy array of uint8 is one.

    Reading copies to the host, writing copies from it, both as the *device* sees its memory: where written bytes need a
    visibility fence, reading without one may give the old ones.
    """

    @property
    def size(self) -> int:
        """Bytes."""

    def __getitem__(self, part: slice, /) -> Any:
        """A part of the bytes, as an array of uint8 on the host."""

    def __setitem__(self, part: slice, value: Any, /) -> None:
        """Change a part: an array of uint8 of its length, or one number for all of it."""


class Device:
    """Where tests of a backend get memory from. This class gives the host's; a plugin for other memory overrides it::

    class Gadget(Device):
        device_type = "gadget"

        def allocate(self, num_bytes):
            memory = gadget.malloc(num_bytes)            # zeroed; indexed as Memory says
            return memory, Region(memory.address, num_bytes, 0, MemoryKind.DEVICE, memory)
    """

    device_type = "cpu"
    """As cache views name it."""
    device_id = 0
    order = "BHNC"
    """How the caches lie that tests ask for; letters as in :class:`~kvpush.backends.base.CacheView`, B among them."""

    def allocate(self, num_bytes: int) -> tuple[Memory, Region]:
        """Fresh zeroed memory that the backend can register, and where it lies. The region's ``keepalive`` owns it."""
        memory = host_memory(num_bytes)
        return memory, Region(memory.ctypes.data, num_bytes, keepalive=memory)

    def view(self, name: str = "layer.0", num_blocks: int = 8) -> tuple[CacheView, Memory]:
        """One layer's cache in memory of its own: blocks of 4 tokens, 2 heads, 16 two-byte elements per head and token."""
        extents = {"B": num_blocks, "H": 2, "N": 4, "C": 16, "2": 2}
        shape = tuple(extents[letter] for letter in self.order)
        strides = tuple(2 * math.prod(shape[idx + 1 :]) for idx in range(len(shape)))
        memory, region = self.allocate(2 * math.prod(shape))
        view = CacheView(
            name=name,
            group=0,
            address=region.address,
            shape=shape,
            strides=strides,
            itemsize=2,
            dtype="bfloat16",
            device_type=self.device_type,
            device_id=self.device_id,
            num_blocks=num_blocks,
            block_tokens=4,
            head_lo=0,
            num_heads=2,
            order=self.order,
            region=region,
        )
        return view, memory

    def copy(self, target: Memory, source: Memory) -> bool:
        """Copy all of one memory into another of the same size, as fast as one thread of this device can, and wait until that
        is over: what benches measure transfers against. False: nobody has said how, nothing was copied."""
        if not isinstance(target, np.ndarray) or not isinstance(source, np.ndarray):
            return False
        np.copyto(target, source)
        return True


@runtime_checkable
class BringsDevice(Protocol):
    """A :class:`~kvpush.backends.base.BackendPlugin` that brings memory to be tested with, so that ``kvpush backends check``
    can run the whole contract suite on it. Not needed by one that serves host memory."""

    def test_device(self) -> Device:
        """Where tests get memory from. Asked only where the probe is ok. Import ``kvpush.testing`` inside."""


def device_of(plugin: BackendPlugin) -> Device | None:
    """Where tests of a plugin get memory from; None when it serves other memory than the host's and brings none."""
    if isinstance(plugin, BringsDevice):
        return plugin.test_device()
    return Device() if "cpu" in plugin.info.device_types else None


@dataclass
class Side:
    """A transport and the memory that it has registered.

    Args:
        transport: The endpoint.
        memory: Registered memory, ``size`` bytes.
        region: Where it lies; known by itself of a NumPy array.
    """

    transport: Transport
    memory: Any
    region: Region | None = None

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.region.address if self.region is not None else int(self.memory.ctypes.data)

    def rows(self, *spans: tuple[int, int]) -> Descriptors:
        """Descriptors of (offset, length) pairs in :attr:`memory`, shape ``[n, 3]``."""
        device_id = self.region.device_id if self.region is not None else 0
        return np.array([(self.address + offset, length, device_id) for offset, length in spans], np.uint64).reshape(-1, 3)


@dataclass
class TransportPair:
    """A source that knows a target as ``peer``.

    Args:
        source: Posts the writes.
        target: Is written to.
        peer: The target's name at the source.
        advance: Called while waiting; moves a fake clock, or does nothing.
        settle: Called after completions and before anybody looks at either memory: runs the visibility fences.
        device: Where more memory of the same kind comes from.
        release: Called by :meth:`close` after the transports are closed.
    """

    source: Side
    target: Side
    peer: AgentName
    advance: Callable[[], None] = field(default=lambda: None)
    settle: Callable[[], None] = field(default=lambda: None)
    device: Device = field(default_factory=Device)
    release: Callable[[], None] = field(default=lambda: None)

    def close(self) -> None:
        """Close both transports."""
        self.source.transport.close()
        self.target.transport.close()
        self.release()


def host_memory(num_bytes: int, fill: int = 0) -> Bytes:
    """Fresh host memory; hold on to it for as long as it is registered."""
    return np.full(num_bytes, fill, np.uint8)


def register(transport: Transport, memory: Memory, region: Region | None = None) -> Side:
    """Register all of ``memory`` as one region; a NumPy array's is known."""
    side = Side(transport, memory, region)
    transport.register_memory([region or Region(side.address, memory.size, keepalive=memory)])
    return side


def connect(source: Side, target: Side, advance: Callable[[], None] = lambda: None) -> TransportPair:
    """Let the source know the target, and the target the source."""
    peer = source.transport.add_peer(target.transport.metadata())
    target.transport.add_peer(source.transport.metadata())
    return TransportPair(source, target, peer, advance)


def loopback_pair(
    num_bytes: int = 1 << 20, fabric: LoopbackFabric | None = None, advance: Callable[[], None] = lambda: None
) -> TransportPair:
    """Two connected loopback endpoints, ``source`` and ``target``, with ``num_bytes`` of zeroed memory each."""
    fabric = fabric or LoopbackFabric()
    sides = [register(fabric.transport(name), host_memory(num_bytes)) for name in ("source", "target")]
    return connect(sides[0], sides[1], advance)


def backend_pair(
    plugin: BackendPlugin,
    device: Device | None = None,
    options: Mapping[str, object] | None = None,
    *,
    num_bytes: int = 1 << 20,
    wait_until: Callable[[Callable[[], bool], str], None],
) -> TransportPair:
    """Two connected working halves of one plugin, with ``num_bytes`` of the device's memory each.

    Args:
        plugin: The light half.
        device: Where memory comes from; :func:`device_of` by default.
        options: ``backend_options`` of both.
        num_bytes: Memory on each side.
        wait_until: Waits for a condition, named for the error.

    Returns:
        The pair; reading the target's memory after ``settle`` gives what the device sees.
    """
    device = device or device_of(plugin)
    assert device is not None, f"{plugin.info.name} brings no memory to test with: give it a test_device()"
    number = next(_serial)
    backends: list[Backend] = []
    try:
        sides = []
        for name in ("source", "target"):
            backends.append(plugin.create(f"{name}-{number}", options or {}))
            sides.append(register(backends[-1].transport, *device.allocate(num_bytes)))
        pair = connect(sides[0], sides[1])
    except BaseException:
        for backend in backends:
            backend.close()
        raise

    def settle() -> None:
        for backend, side in zip(backends, sides, strict=True):
            assert side.region is not None
            fence = backend.start_visibility_fence([side.region])
            if fence is not None:
                wait_until(fence.done, "the visibility fence")

    def release() -> None:
        for backend in backends:
            backend.close()

    pair.settle, pair.device, pair.release = settle, device, release
    return pair
