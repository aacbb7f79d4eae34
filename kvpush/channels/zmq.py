# SPDX-License-Identifier: Apache-2.0
"""The control channel between processes: ZeroMQ over TCP.

One ROUTER listens, one DEALER per link connects. No call blocks, except that :meth:`ZmqChannel.wait` sleeps in ``poll`` until
a socket or a wake-up needs it: an idle channel uses no CPU.

Trust: there is no authentication. Frames are bounded (``MAX_FRAME_BYTES``) and so are queues, links and half-open
handshakes, but libzmq joins the frames of one multi-frame message before it hands them over, so a hostile peer can make the
process hold such a message; and it takes bytes without a ZMTP greeting for those of a peer of its first version, so that junk
may arrive as messages, which ``core.wire`` refuses. Keep control ports on a network that only the instances reach.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import struct
import sys
import time
from collections import OrderedDict

import zmq

from kvpush.channels._address import check_address
from kvpush.core.ids import PeerAddress
from kvpush.core.transport import Link, LinkClosed, Received
from kvpush.core.wire import MAX_FRAME_BYTES
from kvpush.errors import ConfigError, TransportError

_PER_CALL = 256
_PER_SOCKET = 64
_EVENT = struct.Struct("=HI")


class _Waker:
    """A file descriptor that becomes readable when another thread says so. Closed only with the last reference, so that a
    late :meth:`set` can't hit a recycled descriptor."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._write_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._token = (1).to_bytes(8, sys.byteorder)
        else:  # pragma: no cover - not Linux
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write_fd, False)
            self._token = b"\0"

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # already full: already awake
            os.write(self._write_fd, self._token)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def __del__(self) -> None:
        for fd in {getattr(self, "fd", -1), getattr(self, "_write_fd", -1)} - {-1}:
            with contextlib.suppress(OSError):
                os.close(fd)


class _Outbound:
    """One link that we opened: its DEALER and the socket that reports the DEALER's fate."""

    def __init__(self, link: Link, address: PeerAddress, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self.link = link
        self.address = address
        self.dealer = dealer
        self.monitor = monitor


class ZmqChannel:
    """Messages over TCP; satisfies :class:`kvpush.core.transport.Channel`.

    **Owner** one thread, the submitter's, for everything but the constructor, :attr:`address` and :meth:`wake`.

    Args:
        bind: Where to listen: a host name, an address, ``0.0.0.0`` or ``::``; port 0 takes a free one. None: only connect.
        high_water_mark: Messages queued per connection and direction before ``send`` returns False.
        max_inbound_links: Inbound links remembered; the longest silent one is dropped (``LinkClosed``) for a new one.
        max_outbound_links: Links that may be open to others at once; each costs three sockets.
        prefer_ipv6: Look up host names as IPv6. Literal addresses always work as they are.

    Raises:
        ConfigError: the address can't be listened on; names the setting to change. May block on the look-up of ``bind.host``.
    """

    def __init__(
        self,
        bind: PeerAddress | None = None,
        *,
        high_water_mark: int = 512,
        max_inbound_links: int = 4096,
        max_outbound_links: int = 4096,
        prefer_ipv6: bool = False,
    ) -> None:
        if high_water_mark < 1 or max_inbound_links < 1 or max_outbound_links < 1:
            raise ConfigError("the bounds of a control channel must be at least 1")
        self._high_water_mark = high_water_mark
        self._max_inbound = max_inbound_links
        self._max_outbound = max_outbound_links
        self._prefer_ipv6 = prefer_ipv6
        self._waker = _Waker()
        self._closed = False
        self._next_id = 0
        self._inbound: OrderedDict[Link, bytes] = OrderedDict()  # least recently active first
        self._by_identity: dict[bytes, Link] = {}
        self._outbound: dict[Link, _Outbound] = {}
        self._of_socket: dict[zmq.Socket[bytes], _Outbound] = {}
        self._pending: list[LinkClosed] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._router: zmq.Socket[bytes] | None = None
        self._address: PeerAddress | None = None
        if bind is not None:
            try:
                self._listen(bind)
            except BaseException:
                self.close()
                raise

    @property
    def address(self) -> PeerAddress | None:
        """Where others reach us (with the real port); None if this endpoint doesn't listen. **Owner** any thread."""
        return self._address

    def connect(self, address: PeerAddress) -> Link:
        """Open a link. Returns at once: the name is looked up, and the connection made and retried, in the background.

        When an established connection breaks, the link ends with one ``LinkClosed``; connect again for a new one.

        Raises:
            TransportError: the address is malformed, the channel is closed, or too many links are open.
        """
        check_address(address)
        if self._closed:
            raise TransportError("the control channel is closed")
        if len(self._outbound) >= self._max_outbound:
            raise TransportError(f"{len(self._outbound)} control links are open already; {address} is one too many")
        dealer: zmq.Socket[bytes] | None = None
        monitor: zmq.Socket[bytes] | None = None
        try:
            dealer = self._context.socket(zmq.DEALER)
            self._configure(dealer, ipv6=self._wants_ipv6(address.host))
            dealer.setsockopt(zmq.IDENTITY, b"\x01" + secrets.token_bytes(16))
            dealer.setsockopt(zmq.RECONNECT_IVL, 100)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(_endpoint(address))
        except (zmq.ZMQError, OSError) as exc:
            if dealer is not None:
                _discard(dealer, monitor)
            raise TransportError(f"can't open a control link to {address}: {exc}") from exc
        out = _Outbound(self._new_link(), address, dealer, monitor)
        self._outbound[out.link] = out
        for sock in (dealer, monitor):
            self._of_socket[sock] = out
            self._poller.register(sock, zmq.POLLIN)
        return out.link

    def send(self, link: Link, data: bytes) -> bool:
        """Queue a message. False when it could not be: unknown link, peer gone, queue full, too long. Never blocks."""
        if self._closed or len(data) > MAX_FRAME_BYTES:
            return False
        out = self._outbound.get(link)
        try:
            if out is not None:
                out.dealer.send(data, zmq.NOBLOCK)
                return True
            identity = self._inbound.get(link)
            if identity is None or self._router is None:
                return False
            self._router.send_multipart((identity, data), zmq.NOBLOCK)
            self._inbound.move_to_end(link)
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:  # ROUTER_MANDATORY: the peer has gone
                self._forget_inbound(link)
                self._pending.append(LinkClosed(link, "the peer's connection has gone"))
            return False
        return True

    def close_link(self, link: Link) -> None:
        """Drop a link and what is queued on it. Idempotent. An inbound peer that writes again gets a new link."""
        out = self._outbound.get(link)
        if out is not None:
            self._drop_outbound(out)
        else:
            self._forget_inbound(link)

    def receive(self) -> list[Received | LinkClosed]:
        """What has arrived, a few hundred at most; call again until empty. Never blocks."""
        if self._closed:
            return []
        items: list[Received | LinkClosed] = []
        for sock, _ in self._poller.poll(0):
            if len(items) >= _PER_CALL:
                break
            if not isinstance(sock, zmq.Socket):
                continue  # a wake-up ends the next wait; only wait takes it
            if sock is self._router:
                self._read_router(items)
            else:
                out = self._of_socket.get(sock)
                if out is None:  # closed earlier in this call
                    continue
                if sock is out.dealer:
                    self._read_dealer(out, items)
                elif _disconnected(out.monitor):
                    while self._read_dealer(out, items):
                        pass
                    self._drop_outbound(out)
                    items.append(LinkClosed(out.link, f"the connection to {out.address} broke"))
        if self._pending:
            items += self._pending
            self._pending.clear()
        return items

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something can be received, :meth:`wake`, or the timeout. Uses no CPU meanwhile.

        Timeouts below a millisecond, finer than ``poll`` can do, are slept through: such a wait may end that much late.
        """
        if self._closed or self._pending:
            return
        if timeout_s is None:
            events = self._poller.poll()
        elif 0 < timeout_s < 0.001:
            events = self._poller.poll(0)
            if not events:
                time.sleep(timeout_s)
                return
        else:
            events = self._poller.poll(math.ceil(max(0.0, min(timeout_s, 86400.0)) * 1000))
        if any(not isinstance(sock, zmq.Socket) for sock, _ in events):
            self._waker.clear()

    def wake(self) -> None:
        """End :meth:`wait` now, or the next one at once. **Owner** any thread, signal handlers too; one system call."""
        self._waker.set()

    def close(self) -> None:
        """Close all sockets; queued messages are lost. Idempotent; never lingers."""
        if self._closed:
            return
        self._closed = True
        for out in list(self._outbound.values()):
            self._drop_outbound(out)
        if self._router is not None:
            self._poller.unregister(self._router)
            self._router.close(0)
        self._context.term()
        self._inbound.clear()
        self._by_identity.clear()
        self._pending.clear()
        self._waker.set()

    def _listen(self, bind: PeerAddress) -> None:
        try:
            check_address(bind, allow_port_zero=True)
        except TransportError as exc:
            raise ConfigError(f"can't listen on {bind}: {exc.message} (settings control_host and control_port)") from exc
        host = _numeric(bind.host, prefer_ipv6=self._prefer_ipv6)
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._configure(router, ipv6=":" in host)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.BACKLOG, 256)
            router.bind(_endpoint(PeerAddress(host, bind.port)))
            endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as exc:
            router.close(0)
            if exc.errno == zmq.EADDRINUSE:
                raise ConfigError(
                    f"control_port {bind.port} on {bind.host} is in use: set control_port to a free port, or to 0 for any"
                ) from exc
            raise ConfigError(f"can't listen on {bind} (settings control_host and control_port): {exc}") from exc
        assert isinstance(endpoint, bytes)
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        self._address = PeerAddress(bind.host, int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1]))

    def _configure(self, sock: zmq.Socket[bytes], *, ipv6: bool) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.SNDHWM, self._high_water_mark),
            (zmq.RCVHWM, self._high_water_mark),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.IPV6, int(ipv6)),
        ):
            sock.setsockopt(option, value)

    def _wants_ipv6(self, host: str) -> bool:
        return ":" in host or (self._prefer_ipv6 and not _is_ipv4(host))

    def _new_link(self) -> Link:
        self._next_id += 1
        return Link(self._next_id)

    def _read_router(self, items: list[Received | LinkClosed]) -> None:
        assert self._router is not None
        for _ in range(_PER_SOCKET):
            frames = _read_frames(self._router, 2)
            if frames is None:
                return
            if len(frames) != 2:
                continue
            identity, data = frames
            link = self._by_identity.get(identity)
            if link is None:
                if len(self._inbound) >= self._max_inbound:
                    oldest = next(iter(self._inbound))
                    self._forget_inbound(oldest)
                    items.append(LinkClosed(oldest, f"more than {self._max_inbound} peers; this one was silent for longest"))
                link = self._new_link()
                self._by_identity[identity] = link
                self._inbound[link] = identity
            else:
                self._inbound.move_to_end(link)
            items.append(Received(link, data))

    def _read_dealer(self, out: _Outbound, items: list[Received | LinkClosed]) -> bool:
        """Read up to a bound; True when there may be more."""
        for _ in range(_PER_SOCKET):
            frames = _read_frames(out.dealer, 1)
            if frames is None:
                return False
            if len(frames) == 1:
                items.append(Received(out.link, frames[0]))
        return True

    def _drop_outbound(self, out: _Outbound) -> None:
        del self._outbound[out.link]
        for sock in (out.dealer, out.monitor):
            del self._of_socket[sock]
            self._poller.unregister(sock)
        _discard(out.dealer, out.monitor)

    def _forget_inbound(self, link: Link) -> None:
        identity = self._inbound.pop(link, None)
        if identity is not None:
            del self._by_identity[identity]


def _read_frames(sock: zmq.Socket[bytes], wanted: int) -> list[bytes] | None:
    """One message's frames, of which no more than ``wanted + 1`` are kept; None when there is no message."""
    try:
        frame = sock.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    frames = [frame]
    while sock.getsockopt(zmq.RCVMORE):
        frame = sock.recv(zmq.NOBLOCK)
        if len(frames) <= wanted:
            frames.append(frame)
    return frames


def _disconnected(monitor: zmq.Socket[bytes]) -> bool:
    """Read the monitor empty; True if the connection has broken."""
    broken = False
    while (frames := _read_frames(monitor, 2)) is not None:
        if len(frames[0]) == _EVENT.size:
            broken |= _EVENT.unpack(frames[0])[0] == zmq.EVENT_DISCONNECTED
    return broken


def _discard(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
    with contextlib.suppress(zmq.ZMQError):
        dealer.disable_monitor()
    if monitor is not None:
        monitor.close(0)
    dealer.close(0)


def _endpoint(address: PeerAddress) -> str:
    return f"tcp://[{address.host}]:{address.port}" if ":" in address.host else f"tcp://{address.host}:{address.port}"


def _is_ipv4(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True


def _numeric(host: str, *, prefer_ipv6: bool) -> str:
    """A host name as an address, since libzmq binds only to addresses and interface names; others come back unchanged."""
    if ":" in host or _is_ipv4(host):
        return host
    family = socket.AF_INET6 if prefer_ipv6 else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except OSError:
        return host
    return str(found[0][4][0])
