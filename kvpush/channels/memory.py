# SPDX-License-Identifier: Apache-2.0
"""A channel inside one process, with faults on demand: the embedded default and the one for tests."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvpush.channels._address import check_address
from kvpush.core.ids import PeerAddress
from kvpush.core.transport import Link, LinkClosed, Received
from kvpush.core.wire import MAX_FRAME_BYTES
from kvpush.errors import ConfigError, TransportError

_FIRST_FREE_PORT = 49152


class Fault(NamedTuple):
    """What happens to one message on its way.

    Args:
        copies: How often it arrives; 0 loses it.
        delay_s: How much later; later messages of the same link wait behind it, so order holds.
    """

    copies: int = 1
    delay_s: float = 0.0


class Passing(NamedTuple):
    """One message under way, as a fault rule sees it.

    Args:
        dialled: Address that the link was opened to.
        to_listener: True from the side that connected to the side that listens.
        data: The message.
    """

    dialled: PeerAddress
    to_listener: bool
    data: bytes


FaultRule = Callable[[Passing], Fault | None]
"""Asked for every message; None lets it pass. Called with the network's lock held: be quick, call no channel."""


class _Pipe:
    """One link: the end that connected, and the end that listens once there is one."""

    def __init__(self, dialled: PeerAddress, dialler: MemoryChannel, dialler_link: Link) -> None:
        self.dialled = dialled
        self.dialler = dialler
        self.dialler_link = dialler_link
        self.listener: MemoryChannel | None = None
        self.listener_link = Link(0)
        self.backlog: list[tuple[float, bytes]] = []
        self.due = {True: 0.0, False: 0.0}


class MemoryNetwork:
    """Where the channels of one process find one another.

    Thread-safe: one lock guards everything in it.

    Args:
        max_queued: Messages that may wait at one end before ``send`` returns False.
        clock: Time in seconds for delays; a fake one needs :meth:`kick` after it has moved.
    """

    def __init__(self, *, max_queued: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_queued = max_queued
        self.clock = clock
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._ports = itertools.count(_FIRST_FREE_PORT)
        self._listeners: dict[PeerAddress, MemoryChannel] = {}
        self._channels: set[MemoryChannel] = set()
        self._waiting: dict[PeerAddress, list[_Pipe]] = {}
        self._rule: FaultRule | None = None
        self._partitioned: set[PeerAddress] = set()

    def channel(self, address: PeerAddress | None = None) -> MemoryChannel:
        """Make an endpoint.

        Args:
            address: Where it listens; port 0 picks a free one. None: it only connects.

        Raises:
            ConfigError: another endpoint of this network listens there.
        """
        with self._lock:
            if address is not None:
                check_address(address, allow_port_zero=True)
                while address.port == 0 or (address in self._listeners and address.port >= _FIRST_FREE_PORT):
                    address = PeerAddress(address.host, next(self._ports))
                if address in self._listeners:
                    raise ConfigError(f"{address} is in use in this process: set control_port to another one, or to 0")
            channel = MemoryChannel(self, address)
            self._channels.add(channel)
            if address is not None:
                self._listeners[address] = channel
                for pipe in self._waiting.pop(address, []):
                    self._attach(pipe, channel)
            return channel

    def set_faults(self, rule: FaultRule | None) -> None:
        """Install a rule that loses, repeats or delays messages; None removes it. **Owner** any thread."""
        with self._lock:
            self._rule = rule

    def partition(self, *addresses: PeerAddress) -> None:
        """Silently lose everything on links to these addresses, both ways, until :meth:`heal`. **Owner** any thread."""
        with self._lock:
            self._partitioned.update(addresses)

    def heal(self) -> None:
        """End every partition. **Owner** any thread."""
        with self._lock:
            self._partitioned.clear()

    def kick(self) -> None:
        """Let every waiting endpoint look at the clock again. **Owner** any thread."""
        with self._lock:
            for channel in self._channels:
                channel._condition.notify_all()

    # What follows is called by channels, with the lock held.

    def _dial(self, dialler: MemoryChannel, address: PeerAddress) -> _Pipe:
        pipe = _Pipe(address, dialler, self._next_link())
        listener = self._listeners.get(address)
        if listener is None:
            self._waiting.setdefault(address, []).append(pipe)
        else:
            self._attach(pipe, listener)
        return pipe

    def _attach(self, pipe: _Pipe, listener: MemoryChannel) -> None:
        pipe.listener = listener
        pipe.listener_link = self._next_link()
        listener._pipes[pipe.listener_link] = pipe
        for due, data in pipe.backlog:
            listener._push(due, Received(pipe.listener_link, data))
        pipe.backlog.clear()

    def _carry(self, pipe: _Pipe, data: bytes, to_listener: bool) -> bool:
        target = pipe.listener if to_listener else pipe.dialler
        queued = len(pipe.backlog) if target is None else len(target._queue)
        if queued >= self.max_queued:
            return False
        fault = self._rule(Passing(pipe.dialled, to_listener, data)) if self._rule is not None else None
        copies, delay_s = fault if fault is not None else Fault()
        if pipe.dialled in self._partitioned:
            copies = 0
        due = max(self.clock() + delay_s, pipe.due[to_listener]) if delay_s > 0 else pipe.due[to_listener]
        pipe.due[to_listener] = due
        for _ in range(copies):
            if target is None:
                pipe.backlog.append((due, data))
            else:
                target._push(due, Received(pipe.listener_link if to_listener else pipe.dialler_link, data))
        return True

    def _drop(self, pipe: _Pipe, by: MemoryChannel, reason: str) -> None:
        """End a link; the other end learns it unless a partition hides it."""
        waiting = self._waiting.get(pipe.dialled)
        if waiting is not None and pipe in waiting:
            waiting.remove(pipe)
            if not waiting:
                del self._waiting[pipe.dialled]
        for channel, link in ((pipe.dialler, pipe.dialler_link), (pipe.listener, pipe.listener_link)):
            if channel is None or channel._pipes.get(link) is not pipe:
                continue
            if channel is not by and pipe.dialled in self._partitioned:
                continue
            del channel._pipes[link]
            if channel is not by:
                channel._push(max(pipe.due.values()), LinkClosed(link, reason))

    def _forget(self, channel: MemoryChannel) -> None:
        self._channels.discard(channel)
        if channel.address is not None and self._listeners.get(channel.address) is channel:
            del self._listeners[channel.address]

    def _next_link(self) -> Link:
        return Link(next(self._ids))


class MemoryChannel:
    """An endpoint of a :class:`MemoryNetwork`; satisfies :class:`kvpush.core.transport.Channel`.

    Made by :meth:`MemoryNetwork.channel`.
    """

    def __init__(self, network: MemoryNetwork, address: PeerAddress | None) -> None:
        self._network = network
        self._address = address
        self._condition = threading.Condition(network._lock)
        self._queue: deque[tuple[float, Received | LinkClosed]] = deque()
        self._pipes: dict[Link, _Pipe] = {}
        self._woken = False
        self._closed = False

    @property
    def address(self) -> PeerAddress | None:
        """Where others can reach us; None if this endpoint doesn't listen. **Owner** any thread."""
        return self._address

    @property
    def counts(self) -> Mapping[str, int]:
        """Empty. **Owner** any thread."""
        return {}

    def connect(self, address: PeerAddress) -> Link:
        """Open a link. Returns at once, also when nobody listens there yet.

        Raises:
            TransportError: the address is malformed, or this channel is closed.
        """
        check_address(address)
        with self._condition:
            if self._closed:
                raise TransportError("the channel is closed")
            pipe = self._network._dial(self, PeerAddress(*address))
            self._pipes[pipe.dialler_link] = pipe
            return pipe.dialler_link

    def send(self, link: Link, data: bytes) -> bool:
        """Queue a message; False for an unknown link, a full queue or more than ``MAX_FRAME_BYTES``. Never blocks."""
        with self._condition:
            pipe = self._pipes.get(link)
            if self._closed or pipe is None or len(data) > MAX_FRAME_BYTES:
                return False
            return self._network._carry(pipe, bytes(data), to_listener=link == pipe.dialler_link)

    def close_link(self, link: Link, *, hostile: bool = False) -> None:
        """Drop a link. Idempotent. The other end gets ``LinkClosed``."""
        del hostile
        with self._condition:
            pipe = self._pipes.get(link)
            if pipe is not None:
                self._network._drop(pipe, self, "the peer closed the link")

    def receive(self) -> list[Received | LinkClosed]:
        """What has arrived, at most 256 at a time. Never blocks."""
        with self._condition:
            out: list[Received | LinkClosed] = []
            now = self._network.clock()
            later: list[tuple[float, Received | LinkClosed]] = []
            while self._queue and len(out) < 256:
                due, item = self._queue.popleft()
                if due > now:
                    later.append((due, item))
                elif isinstance(item, LinkClosed) or item.link in self._pipes or self._ends(item.link):
                    out.append(item)
            self._queue.extendleft(reversed(later))
            return out

    def _ends(self, link: Link) -> bool:
        """The peer has closed this link: what it sent before still counts."""
        return any(isinstance(item, LinkClosed) and item.link == link for _, item in self._queue)

    def _push(self, due: float, item: Received | LinkClosed) -> None:
        if not self._closed:
            self._queue.append((due, item))
            self._condition.notify_all()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something can be received, :meth:`wake`, or the timeout. Uses no CPU meanwhile."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            while not self._woken and not self._closed:
                pause = None if deadline is None else deadline - time.monotonic()
                if self._queue:
                    next_due = min(due for due, _ in self._queue) - self._network.clock()
                    if next_due <= 0:
                        break
                    pause = next_due if pause is None else min(pause, next_due)
                if pause is not None and pause <= 0:
                    break
                self._condition.wait(pause)
            self._woken = False

    def wake(self) -> None:
        """End :meth:`wait` now, or the next one at once. **Owner** any thread; holds the network's lock for a moment."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def close(self) -> None:
        """Leave the network; the other ends of all links get ``LinkClosed``. Idempotent."""
        with self._condition:
            if self._closed:
                return
            for pipe in list(self._pipes.values()):
                self._network._drop(pipe, self, "the peer closed its endpoint")
            self._closed = True
            self._queue.clear()
            self._network._forget(self)
            self._condition.notify_all()
