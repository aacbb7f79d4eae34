# SPDX-License-Identifier: Apache-2.0
"""Two connected transport endpoints with memory, ready for tests. Needs no pytest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpush.backends.loopback import LoopbackFabric
from kvpush.core.ids import AgentName
from kvpush.core.transport import Descriptors, Region, Transport

Bytes = npt.NDArray[np.uint8]


@dataclass
class Side:
    """A transport and the memory that it has registered.

    Args:
        transport: The endpoint.
        memory: Registered host memory, shape ``[num_bytes]``.
    """

    transport: Transport
    memory: Bytes

    def rows(self, *spans: tuple[int, int]) -> Descriptors:
        """Descriptors of (offset, length) pairs in :attr:`memory`, shape ``[n, 3]``."""
        base = self.memory.ctypes.data
        return np.array([(base + offset, length, 0) for offset, length in spans], np.uint64).reshape(-1, 3)


@dataclass
class TransportPair:
    """A source that knows a target as ``peer``.

    Args:
        source: Posts the writes.
        target: Is written to.
        peer: The target's name at the source.
        advance: Called while waiting; moves a fake clock, or does nothing.
    """

    source: Side
    target: Side
    peer: AgentName
    advance: Callable[[], None] = field(default=lambda: None)

    def close(self) -> None:
        """Close both transports."""
        self.source.transport.close()
        self.target.transport.close()


def host_memory(num_bytes: int, fill: int = 0) -> Bytes:
    """Fresh host memory; hold on to it for as long as it is registered."""
    return np.full(num_bytes, fill, np.uint8)


def register(transport: Transport, memory: Bytes) -> Side:
    """Register all of ``memory`` as one region."""
    transport.register_memory([Region(memory.ctypes.data, memory.nbytes, keepalive=memory)])
    return Side(transport, memory)


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
