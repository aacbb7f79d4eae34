# SPDX-License-Identifier: Apache-2.0
"""The two edges of ``core``: the data plane (:class:`Transport`) and the message plane (:class:`Channel`).

Both are protocols. Implementations live in ``kvpush.backends`` and ``kvpush.channels``; the submitter thread is the only
caller of every method unless a docstring says otherwise.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpush.core.ids import AgentName, PeerAddress

Descriptors = npt.NDArray[np.uint64]
"""Descriptor array, shape ``[n, 3]``: address (bytes), length (bytes), device id."""


class MemoryKind(enum.StrEnum):
    """What a region is made of, as far as a transport needs to know."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous range of memory to register with the transport.

    Args:
        address: First byte; never 0.
        length: Bytes; positive.
        device_id: Index of the device; 0 for host memory.
        kind: Host or device memory.
        keepalive: Any object that owns the memory; held as long as the registration.
    """

    address: int
    length: int
    device_id: int = 0
    kind: MemoryKind = MemoryKind.HOST
    keepalive: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """What a transport can and can't do; the core asks, never guesses.

    Args:
        target_must_poll: Writes only land while the target calls :meth:`Transport.progress` (NIXL with UCX and no
            progress thread, seen on shared memory and TCP).
        detects_peer_loss: A write to a dead peer completes with an error by itself.
        failures_are_final: Nothing of a write that has ended as FAILED lands any more. Where False, the connection is given up
            after a failure, and the target's blocks wait for the lease and the retry window.
        retry_window_s: How long after its last valid lease a posted write may still touch the target's memory, if the target
            goes on to call :meth:`Transport.progress` and the source has cut the connection when the lease ended.
        in_process_only: Both sides must live in one process.
    """

    target_must_poll: bool = False
    detects_peer_loss: bool = True
    failures_are_final: bool = False
    retry_window_s: float = 1.0
    in_process_only: bool = False


class WriteStatus(enum.Enum):
    """The end of a posted write."""

    DONE = "done"
    FAILED = "failed"


class Completion(NamedTuple):
    """A posted write has ended: the token given to ``post_write``, how, and a message where it failed."""

    token: int
    status: WriteStatus
    error: str = ""


class Transport(Protocol):
    """One-sided writes into a peer's registered memory.

    **Owner** the submitter thread for everything after construction. No method blocks for longer than the posting of its
    own descriptors takes.
    """

    @property
    def name(self) -> str:
        """Short name shown to people and compared at the handshake, such as ``nixl-ucx`` or ``loopback``."""

    @property
    def agent_name(self) -> AgentName:
        """This endpoint's name, unique per process start."""

    @property
    def capabilities(self) -> TransportCapabilities: ...

    def register_memory(self, regions: Sequence[Region]) -> None:
        """Register regions for local reads and remote writes. Before any peer is added.

        Regions that overlap have to count as one: descriptors may run across both. None runs across two that only touch.

        Raises:
            MemoryRegistrationError: a region was refused; says which and what to do.
        """

    def metadata(self) -> bytes:
        """What a peer needs for :meth:`add_peer`; includes keys to write the registered memory."""

    def add_peer(self, metadata: bytes) -> AgentName:
        """Make a peer known and open the connection to it. Idempotent for the same metadata.

        Raises:
            TransportError: the metadata is broken or the peer can't be reached.
        """

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer and close the connection: what of its writes has not left yet never will. Writes in flight to it end
        with FAILED where the transport can tell; unknown names are ignored."""

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        """Post one write: row i of ``src`` (local memory) to row i of ``dst`` (the peer's memory), lengths equal.

        Args:
            token: The caller's number for it; comes back in exactly one :class:`Completion`.

        Raises:
            TransportError: it was not posted, and nothing of it will happen.
        """

    def poll(self) -> list[Completion]:
        """Completions since the last call, at most one per token. Never blocks. DONE means the bytes are at the target,
        readable there as far as the backend's visibility fence says."""

    def progress(self) -> None:
        """Let incoming writes land. Called by the target while it expects any. Never blocks."""

    @property
    def num_in_flight(self) -> int:
        """Posted and not yet returned by :meth:`poll`."""

    def close(self) -> None:
        """Deregister and release everything. Idempotent. Memory with a write in flight stays registered (leaked) rather
        than freed under the transport."""


class Link(NamedTuple):
    """One end of a conversation on a channel. Consumers connect to a producer's address, producers are connected to."""

    id: int


class Received(NamedTuple):
    """Bytes that came in on a link."""

    link: Link
    data: bytes


class LinkClosed(NamedTuple):
    """A link of ours broke or can't be made. Not every channel can tell; heartbeats are what the core relies on."""

    link: Link
    reason: str


class Channel(Protocol):
    """Small messages between endpoints, in order per link while it lives, possibly lost when it breaks.

    **Owner** the submitter thread, but for :meth:`wake`.
    """

    @property
    def address(self) -> PeerAddress | None:
        """Where others can reach us; None if this endpoint doesn't listen."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Trouble with peers' connections since the start, for metrics: ``failed_handshakes``, ``refused_producers``,
        ``disconnected_peers``; empty where there is no such thing."""

    def connect(self, address: PeerAddress) -> Link:
        """Open a link to a producer's control endpoint. Returns at once; sending queues until it is up.

        Raises:
            TransportError: the address can't be used at all (malformed host, port out of range).
        """

    def send(self, link: Link, data: bytes) -> bool:
        """Queue a message. False when it could not be queued (unknown link, queue full): treat it as lost."""

    def close_link(self, link: Link, *, hostile: bool = False) -> None:
        """Drop a link. Idempotent.

        Args:
            hostile: The peer breaks the rules: end its connection too, where the channel can.
        """

    def receive(self) -> list[Received | LinkClosed]:
        """What has come in, bounded per call; call again until empty. Never blocks."""

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something has come in, :meth:`wake` is called, or the time is over (None: no limit)."""

    def wake(self) -> None:
        """End :meth:`wait` now, or the next one at once. **Owner** any thread; never blocks."""

    def close(self) -> None:
        """Release sockets. Idempotent."""
