# SPDX-License-Identifier: Apache-2.0
"""A transport that fails as it is told to, write by write, and whose late bytes land as late as its contract allows.

It wraps loopback and promises less, as NIXL over TCP does: the target has to poll, nothing can be recalled, and a write that
failed may land all the same. What such a write carries stays on its way until the source closes the connection; it then waits
in the target's socket, and lands when the target drives its transport next.
"""

from __future__ import annotations

import ctypes
import enum
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvpush.backends._wrapped import WrappedTransport
from kvpush.backends.base import Backend, BackendInfo, Probe
from kvpush.backends.loopback import LoopbackBackend, LoopbackFabric, LoopbackPlugin, LoopbackTransport
from kvpush.core.ids import AgentName
from kvpush.core.transport import Completion, Descriptors, TransportCapabilities, WriteStatus
from kvpush.errors import TransportError

RETRY_WINDOW_S = 0.2


class Fault(enum.Enum):
    """What happens to one write."""

    HELD = "held"
    """It is on its way until :meth:`Wire.let_go`."""
    REFUSED = "its post fails"
    STUCK = "it never ends"
    UNTOLD = "its bytes arrive, and its end is never told"
    FAILED = "it ends with an error, and its bytes may land later"
    TWICE = "its end is told twice"


class _Bytes(NamedTuple):
    """What a write that was not simply handed on carries."""

    token: int
    peer: AgentName
    rows: list[tuple[int, int, int]]

    def land(self) -> None:
        for source, target, length in self.rows:
            ctypes.memmove(target, source, length)


class Wire:
    """What two faulty transports have in common, and what a test holds of them. **Owner** any thread.

    Args:
        slack_s: For how long the source may not have been running. What it had on its way for longer than that is dropped, as
            the kernel does with what it could not deliver in time.
    """

    def __init__(self, slack_s: float) -> None:
        self.fabric = LoopbackFabric(target_must_poll=True)
        self.lock = threading.RLock()
        self.slack_s = slack_s
        self.posted = 0
        """Writes since :meth:`arm`."""
        self.refuses_release = False
        self.transports: dict[AgentName, FaultyTransport] = {}
        self._faults: dict[int, Fault] = {}

    def arm(self, faults: Mapping[int, Fault]) -> None:
        """From now on writes are counted from 0, and these go wrong."""
        with self.lock:
            self.posted, self._faults = 0, dict(faults)

    def disarm(self) -> None:
        """What is posted from now on goes well."""
        with self.lock:
            self._faults.clear()
            self.refuses_release = False

    def next_fault(self) -> Fault | None:
        """Of the write that is being posted."""
        with self.lock:
            self.posted += 1
            return self._faults.get(self.posted - 1)

    def become(self, fault: Fault | None) -> None:
        """Writes that are held go wrong like this; None: they go on as if nothing had been."""
        with self.lock:
            for transport in self.transports.values():
                transport.turn_held(fault)

    def land_what_may(self) -> int:
        """Land all that is on its way, over connections that nobody has closed. Returns how many writes that were."""
        with self.lock:
            count = 0
            for transport in self.transports.values():
                count += transport.land_all()
            return count


class FaultyTransport(WrappedTransport):
    """A loopback transport whose writes have the wire's faults."""

    def __init__(self, inner: LoopbackTransport, wire: Wire) -> None:
        super().__init__(inner)
        self._wire = wire
        self._under_way: dict[int, tuple[_Bytes, Fault]] = {}
        """In flight here, and not at the transport below."""
        self._loose: list[_Bytes] = []
        """Ended as failed, and may land for as long as the connection is up."""
        self._socket: list[_Bytes] = []
        """Has come in, and lands when this transport is driven."""
        self._ended: list[Completion] = []
        self._again: set[int] = set()
        self._driven_at = time.monotonic()
        with wire.lock:
            wire.transports[inner.agent_name] = self

    @property
    def capabilities(self) -> TransportCapabilities:
        return replace(self._inner.capabilities, failures_are_final=False, retry_window_s=RETRY_WINDOW_S)

    def remove_peer(self, peer: AgentName) -> None:
        with self._wire.lock:
            if self._wire.refuses_release:
                raise TransportError("planted: the connection can't be released")
            self._inner.remove_peer(peer)
            self._close_connection(lambda name: name == peer)

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        with self._wire.lock:
            fault = self._wire.next_fault()
            if fault is Fault.REFUSED:
                raise TransportError("planted: the post was refused")
            if fault is None or fault is Fault.TWICE:
                self._inner.post_write(token, peer, src, dst)
                if fault is not None:
                    self._again.add(token)
                return
            rows = np.column_stack((src[:, 0], dst[:, 0], src[:, 1])).tolist()
            self._under_way[token] = (_Bytes(token, peer, [(int(a), int(b), int(c)) for a, b, c in rows]), Fault.HELD)
            self.turn_held(fault)

    def turn_held(self, fault: Fault | None) -> None:
        """With the wire's lock held."""
        for token, (carried, state) in list(self._under_way.items()):
            if state is not Fault.HELD or fault is Fault.HELD:
                continue
            if fault in (Fault.STUCK, Fault.UNTOLD):
                if fault is Fault.UNTOLD:
                    carried.land()
                self._under_way[token] = (carried, fault)
                continue
            del self._under_way[token]
            if fault is Fault.FAILED:
                self._loose.append(carried)
                self._ended.append(Completion(token, WriteStatus.FAILED, "planted: the write failed"))
                continue
            carried.land()
            self._ended.append(Completion(token, WriteStatus.DONE))
            if fault is Fault.TWICE:
                self._again.add(token)

    def poll(self) -> list[Completion]:
        with self._wire.lock:
            self._driven_at = time.monotonic()
            done = self._ended + self._inner.poll()
            self._ended = []
            again = [completion for completion in done if completion.token in self._again]
            self._again.difference_update(completion.token for completion in again)
            return done + again

    def progress(self) -> None:
        with self._wire.lock:
            self._inner.progress()
            for carried in self._socket:
                carried.land()
            self._socket.clear()

    @property
    def num_in_flight(self) -> int:
        return self._inner.num_in_flight + len(self._under_way) + len(self._ended)

    def close(self) -> None:
        with self._wire.lock:
            self._close_connection(lambda name: True)
            self._socket.clear()
            self._inner.close()
            self._wire.transports.pop(self.agent_name, None)

    def _close_connection(self, concerned: Callable[[AgentName], bool]) -> None:
        """What was on its way has left: it waits at the target now. Its writes end as failed."""
        left = [carried for carried in self._loose if concerned(carried.peer)]
        self._loose = [carried for carried in self._loose if not concerned(carried.peer)]
        for token, (carried, _) in list(self._under_way.items()):
            if concerned(carried.peer):
                del self._under_way[token]
                left.append(carried)
                self._ended.append(Completion(token, WriteStatus.FAILED, "the peer was removed"))
        if self._stalled:
            return
        for carried in left:
            target = self._wire.transports.get(carried.peer)
            if target is not None:
                target._socket.append(carried)

    @property
    def _stalled(self) -> bool:
        return time.monotonic() - self._driven_at > self._wire.slack_s

    def land_all(self) -> int:
        """With the wire's lock held. Nothing of a source that has not been running for longer than the slack, as in closing."""
        if self._stalled:
            return 0
        carried = [carried for carried, _ in self._under_way.values()] + self._loose
        for each in carried:
            each.land()
        return len(carried)


class FaultyPlugin:
    """The light half of a backend over a :class:`Wire`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._inner = LoopbackPlugin(wire.fabric)

    @property
    def info(self) -> BackendInfo:
        return self._inner.info

    def probe(self) -> Probe:
        return self._inner.probe()

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        return LoopbackBackend(self.info, FaultyTransport(self._wire.fabric.transport(agent_name), self._wire))
