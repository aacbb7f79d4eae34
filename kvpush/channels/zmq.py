# SPDX-License-Identifier: Apache-2.0
"""The control channel between processes: ZeroMQ over TCP.

One ROUTER listens, one DEALER per link connects. No call blocks, except that :meth:`ZmqChannel.wait` sleeps in ``poll`` until
a socket or a wake-up needs it: an idle channel uses no CPU.

Trust: with :class:`~kvpush.channels.auth.Credentials` both sides prove that they know the shared secret before a message
passes, everything is encrypted, and a recorded connection can't be replayed. The listener's answer to libzmq's question whether
a client key is known (ZAP, RFC 27) is given by the thread that owns the channel, between messages: no thread more, no timer.

Bounds: of a frame (``MAX_FRAME_BYTES``), of queues, of links, of how long a connection may take to its first message, and of
how much a peer may send: one that sends more is disconnected, and so is one whose frames make no sense. What arrives is read
in turns, so a peer that floods delays others by its share of a turn. But libzmq joins the frames of one
multi-frame message before it hands them over, so a hostile peer can make the process hold such a message; and, without
authentication, it takes bytes without a ZMTP greeting for those of a peer of its first version, so that junk may arrive as
messages, which ``core.wire`` refuses. Without authentication, keep control ports where only the instances reach them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import math
import os
import secrets
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from kvpush.channels import _limits
from kvpush.channels._address import check_address
from kvpush.channels._limits import TokenBucket
from kvpush.channels.auth import Credentials
from kvpush.channels.policy import ProducerPolicy
from kvpush.core.ids import PeerAddress
from kvpush.core.transport import Link, LinkClosed, Received
from kvpush.core.wire import MAX_FRAME_BYTES
from kvpush.errors import ConfigError, TransportError

_PER_CALL = 256
_PER_SOCKET = 64
_EVENT = struct.Struct("=HI")
_FAILED_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CURVE_BYTES = 33
"""What CURVE adds to a message: command name, nonce, flags and authenticator. Source: RFC 26/CURVEZMQ, MESSAGE command."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"kvpush"
_LOG_INTERVAL_S = 60.0
_NEW_LINKS_PER_S = 200.0
_REMEMBERED_OFFENDERS = 4096

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ZmqCounters:
    """Monotonic counts, for metrics and tests.

    Args:
        failed_handshakes: Connections to us that did not get as far as a message: another secret, none, or no peer at all.
        refused_keys: Of those, the ones whose client key was not made from our secret.
        handshakes_refused_by_peer: Connections of ours that the other side broke off before a message could pass.
        refused_producers: Addresses that the policy refused.
        flooders: Links closed because the peer sent more than it may.
        turned_away: Connections closed at their first message, since there were too many links, or too many new ones a second.
        cut: Connections to us that were ended from this side.
    """

    failed_handshakes: int = 0
    refused_keys: int = 0
    handshakes_refused_by_peer: int = 0
    refused_producers: int = 0
    flooders: int = 0
    turned_away: int = 0
    cut: int = 0


class _Occasional:
    """A warning that is logged at once, and then at most once a minute with the number of the ones left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, text: str, about: object = None) -> None:
        """Log; ``about`` is the one that it is told of, among those left out there may be others."""
        now = self._clock()
        if now < self._next.get(text, float("-inf")):
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return
        self._next[text] = now + _LOG_INTERVAL_S
        more = self._left_out.pop(text, 0)
        logger.warning(
            "kvpush: %s%s%s",
            text,
            f": {about}" if about is not None else "",
            f" ({more} more since this was last said)" if more else "",
        )


_write_holding_gil = ctypes.PyDLL(None).write
"""``os.write`` gives up the interpreter's lock, though this one never blocks: the thread that it wakes would take it and do
all that it has to, copies of KV among it, before the caller went on, an engine thread in the middle of its step."""
_write_holding_gil.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write_holding_gil.restype = ctypes.c_ssize_t


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
        # (-1, already full: already awake.)
        _write_holding_gil(self._write_fd, self._token, len(self._token))

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

    def __init__(
        self, link: Link, address: PeerAddress, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], bucket: TokenBucket
    ) -> None:
        self.link = link
        self.address = address
        self.dealer = dealer
        self.monitor = monitor
        self.bucket = bucket
        self.established = False
        self.mismatch = False
        """The two sides don't speak the same security mechanism."""


@dataclass(slots=True)
class _Inbound:
    """One link that was opened to us.

    Args:
        identity: What libzmq's ROUTER calls it.
        fd: The connection's, libzmq's own; -1 when unknown.
        peer: Who was at its other end when the link was made; None when it had gone already.
        heard_at: When something was last received or sent.
    """

    link: Link
    identity: bytes
    fd: int
    peer: tuple[Any, ...] | None
    bucket: TokenBucket
    heard_at: float

    def __str__(self) -> str:
        return f"{self.peer[0]}:{self.peer[1]}" if self.peer else "a peer that has gone"


class ZmqChannel:
    """Messages over TCP; satisfies :class:`kvpush.core.transport.Channel`.

    **Owner** one thread, the submitter's, for everything but the constructor, :attr:`address` and :meth:`wake`.

    Args:
        bind: Where to listen: a host name, an address, ``0.0.0.0`` or ``::``; port 0 takes a free one. None: only connect.
        high_water_mark: Messages queued per connection and direction before ``send`` returns False.
        max_inbound_links: Inbound links at once. For one more the longest silent one is dropped (``LinkClosed``), if it has
            been silent for ``idle_link_s``; else the new one is turned away.
        max_outbound_links: Links that may be open to others at once; each costs three sockets.
        credentials: Authenticate and encrypt every link with these; None: speak to anybody in the clear.
        producers: Decides where :meth:`connect` may go; None: anywhere.
        max_messages_per_s: What one peer may send in the long run, and twice that at once; 4 KiB count as a message more.
            One that sends more is disconnected.
        idle_link_s: See ``max_inbound_links``.
        handshake_timeout_s: A connection that has not got through its handshake by then is closed.
        prefer_ipv6: Look up host names as IPv6. Literal addresses always work as they are.
        clock: Monotonic seconds, for the limits.

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
        credentials: Credentials | None = None,
        producers: ProducerPolicy | None = None,
        max_messages_per_s: float = 10_000.0,
        idle_link_s: float = 30.0,
        handshake_timeout_s: float = 5.0,
        prefer_ipv6: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if high_water_mark < 1 or max_inbound_links < 1 or max_outbound_links < 1:
            raise ConfigError("the bounds of a control channel must be at least 1")
        self._high_water_mark = high_water_mark
        self._max_inbound = max_inbound_links
        self._max_outbound = max_outbound_links
        self._prefer_ipv6 = prefer_ipv6
        self._max_messages_per_s = max_messages_per_s
        self._idle_link_s = idle_link_s
        self._handshake_ms = max(1, math.ceil(handshake_timeout_s * 1000))
        self._clock = clock
        self._credentials = credentials
        self._producers = producers
        self.counters = ZmqCounters()
        self._occasional = _Occasional(clock)
        self._newcomers = TokenBucket(_NEW_LINKS_PER_S, max(max_inbound_links, _NEW_LINKS_PER_S), clock())
        self._offenders: OrderedDict[bytes, None] = OrderedDict()
        self._turn = 0
        self._waker = _Waker()
        self._closed = False
        self._next_id = 0
        self._inbound: OrderedDict[Link, _Inbound] = OrderedDict()  # least recently active first
        self._by_identity: dict[bytes, _Inbound] = {}
        self._by_fd: dict[int, _Inbound] = {}
        self._outbound: dict[Link, _Outbound] = {}
        self._of_socket: dict[zmq.Socket[bytes], _Outbound] = {}
        self._pending: list[LinkClosed] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._router: zmq.Socket[bytes] | None = None
        self._router_monitor: zmq.Socket[bytes] | None = None
        self._zap: zmq.Socket[bytes] | None = None
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

    @property
    def counts(self) -> Mapping[str, int]:
        """See :class:`kvpush.core.transport.Channel`; :attr:`counters` has more. **Owner** any thread."""
        return {
            "failed_handshakes": self.counters.failed_handshakes + self.counters.handshakes_refused_by_peer,
            "refused_producers": self.counters.refused_producers,
            "disconnected_peers": self.counters.flooders + self.counters.turned_away,
        }

    def connect(self, address: PeerAddress) -> Link:
        """Open a link. Returns at once: the name is looked up, and the connection made and retried, in the background.

        When an established connection breaks, the link ends with one ``LinkClosed``; connect again for a new one.

        Raises:
            TransportError: the address is malformed or not allowed, the channel is closed, or too many links are open.
        """
        check_address(address)
        refusal = self._producers.refusal(*address) if self._producers is not None else None
        if refusal is not None:
            self.counters.refused_producers += 1
            raise TransportError(refusal)
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
            if self._credentials is not None:
                dealer.curve_serverkey = self._credentials.server_public
                dealer.curve_publickey = self._credentials.client_public
                dealer.curve_secretkey = self._credentials.client_secret
            monitor = self._monitor(dealer, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED_HANDSHAKE)
            dealer.connect(_endpoint(address))
        except (zmq.ZMQError, OSError) as exc:
            if dealer is not None:
                _discard(dealer, monitor)
            raise TransportError(f"can't open a control link to {address}: {exc}") from exc
        out = _Outbound(self._new_link(), address, dealer, monitor, self._new_bucket())
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
            inbound = self._inbound.get(link)
            if inbound is None or self._router is None:
                return False
            self._router.send_multipart((inbound.identity, data), zmq.NOBLOCK)
            self._touch(inbound, self._clock())
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:  # ROUTER_MANDATORY: the peer has gone
                self._forget_inbound(link)
                self._pending.append(LinkClosed(link, "the peer's connection has gone"))
            return False
        return True

    def close_link(self, link: Link, *, hostile: bool = False) -> None:
        """Drop a link and what is queued on it. Idempotent. An inbound peer that writes again gets a new link, unless it was
        hostile: then its connection is ended, and what is left of it is not read."""
        out = self._outbound.get(link)
        if out is not None:
            self._drop_outbound(out)
        elif hostile and link in self._inbound:
            self._cut(self._inbound[link])
        else:
            self._forget_inbound(link)

    def receive(self) -> list[Received | LinkClosed]:
        """What has arrived, a few hundred at most; call again until empty. Never blocks."""
        if self._closed:
            return []
        items: list[Received | LinkClosed] = []
        events = self._poller.poll(0)
        self._turn += 1
        first = self._turn % len(events) if events else 0
        for sock, _ in (*events[first:], *events[:first]):  # another one begins each time: all get their turn
            if len(items) >= _PER_CALL:
                break
            if not isinstance(sock, zmq.Socket):
                continue  # a wake-up ends the next wait; only wait takes it
            if sock is self._router:
                self._read_router(items)
            elif sock is self._zap:
                self._answer_zap()
            elif sock is self._router_monitor:
                self._read_router_monitor()
            else:
                out = self._of_socket.get(sock)
                if out is None:  # closed earlier in this call
                    continue
                if sock is out.dealer:
                    self._read_dealer(out, items)
                elif _disconnected(out):
                    while self._read_dealer(out, items):
                        pass
                    if out.link in self._outbound:
                        self._drop_outbound(out)
                        items.append(LinkClosed(out.link, self._why_broken(out)))
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
            self._poller.unregister(self._router_monitor)
            _discard(self._router, self._router_monitor)
        if self._zap is not None:
            self._poller.unregister(self._zap)
            self._zap.close(0)
        self._context.term()
        self._inbound.clear()
        self._by_identity.clear()
        self._by_fd.clear()
        self._pending.clear()
        self._waker.set()

    def _listen(self, bind: PeerAddress) -> None:
        try:
            check_address(bind, allow_port_zero=True)
        except TransportError as exc:
            raise ConfigError(f"can't listen on {bind}: {exc.message} (settings control_host and control_port)") from exc
        host = _numeric(bind.host, prefer_ipv6=self._prefer_ipv6)
        router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        monitor: zmq.Socket[bytes] | None = None
        try:
            self._configure(router, ipv6=":" in host)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.BACKLOG, 256)
            if self._credentials is not None:
                # Answers before anybody can ask. A domain that must be answered for: no answer, no connection.
                self._zap = self._context.socket(zmq.REP)
                self._zap.bind(_ZAP_ENDPOINT)
                self._poller.register(self._zap, zmq.POLLIN)
                router.curve_server = True
                router.curve_publickey = self._credentials.server_public
                router.curve_secretkey = self._credentials.server_secret
                router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
                router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            monitor = self._monitor(router, _FAILED_HANDSHAKE)
            router.bind(_endpoint(PeerAddress(host, bind.port)))
            endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as exc:
            _discard(router, monitor)
            if exc.errno == zmq.EADDRINUSE:
                raise ConfigError(
                    f"control_port {bind.port} on {bind.host} is in use: set control_port to a free port, or to 0 for any"
                ) from exc
            raise ConfigError(f"can't listen on {bind} (settings control_host and control_port): {exc}") from exc
        assert isinstance(endpoint, bytes)
        self._router, self._router_monitor = router, monitor
        for sock in (router, monitor):
            self._poller.register(sock, zmq.POLLIN)
        self._address = PeerAddress(bind.host, int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1]))

    def _configure(self, sock: zmq.Socket[bytes], *, ipv6: bool) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES + (_CURVE_BYTES if self._credentials is not None else 0)),
            (zmq.SNDHWM, self._high_water_mark),
            (zmq.RCVHWM, self._high_water_mark),
            (zmq.HANDSHAKE_IVL, self._handshake_ms),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.IPV6, int(ipv6)),
        ):
            sock.setsockopt(option, value)

    def _monitor(self, sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """Have a socket's fate reported. Without a bound: libzmq's own thread would wait for us at a full queue."""
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        sock.monitor(endpoint, events)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(endpoint)
        return monitor

    def _answer_zap(self) -> None:
        """Tell libzmq which client keys are known: the one that follows from the secret."""
        assert self._zap is not None
        assert self._credentials is not None
        expected = z85.decode(self._credentials.client_public)
        for _ in range(_PER_SOCKET):
            frames = _read_frames(self._zap, 8)
            if frames is None:
                return
            # Version, request id, domain, address, identity, mechanism, client key. Source: RFC 27/ZAP.
            request_id = frames[1] if len(frames) > 1 else b""
            known = len(frames) == 7 and frames[5] == b"CURVE" and hmac.compare_digest(frames[6], expected)
            if not known:
                self.counters.refused_keys += 1
            status = (b"200", b"") if known else (b"400", b"unknown key")
            self._zap.send_multipart((b"1.0", request_id, *status, b"", b""), zmq.NOBLOCK)

    def _read_router_monitor(self) -> None:
        assert self._router_monitor is not None
        for event, value in _events(self._router_monitor, _PER_CALL):
            self.counters.failed_handshakes += 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # Who goes away or says nothing: scans and health checks too. A peer with the other setting may look so as well.
                logger.debug("kvpush: a connection to the control endpoint ended before its handshake had")
            elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                ours, theirs = ("on", "off") if self._credentials is not None else ("off", "on")
                self._occasional.warn(
                    f"a connection to the control endpoint was refused: authentication is {ours} here and {theirs} there; "
                    "set the same secret on both sides (auth_secret_file or KVPUSH_AUTH_SECRET)"
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                self._occasional.warn(
                    "a connection to the control endpoint was refused: the two sides have different secrets "
                    "(auth_secret_file or KVPUSH_AUTH_SECRET)"
                )
            else:
                self._occasional.warn("a connection to the control endpoint was refused: what came was no valid handshake")

    def _why_broken(self, out: _Outbound) -> str:
        if out.established:
            return f"the connection to {out.address} broke"
        self.counters.handshakes_refused_by_peer += 1
        if out.mismatch:
            ours, theirs = ("on", "off") if self._credentials is not None else ("off", "on")
            return f"the handshake with {out.address} failed: authentication is {ours} here and {theirs} there"
        if self._credentials is not None:
            return (
                f"{out.address} broke the handshake off: most likely the two sides have different secrets "
                "(auth_secret_file or KVPUSH_AUTH_SECRET), or authentication is off there"
            )
        return f"{out.address} broke the handshake off: is authentication on there and off here?"

    def _wants_ipv6(self, host: str) -> bool:
        return ":" in host or (self._prefer_ipv6 and not _is_ipv4(host))

    def _new_link(self) -> Link:
        self._next_id += 1
        return Link(self._next_id)

    def _new_bucket(self) -> TokenBucket:
        return TokenBucket(self._max_messages_per_s, 2 * self._max_messages_per_s, self._clock())

    def _touch(self, inbound: _Inbound, now: float) -> None:
        inbound.heard_at = now
        self._inbound.move_to_end(inbound.link)

    def _read_router(self, items: list[Received | LinkClosed]) -> None:
        router = self._router
        assert router is not None
        now = self._clock()
        for _ in range(_PER_SOCKET):
            try:
                identity = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not router.getsockopt(zmq.RCVMORE):
                continue
            inbound = self._by_identity.get(identity)
            # A first frame is asked which connection it came over.
            frame = router.recv(zmq.NOBLOCK, copy=inbound is not None)
            data = frame if isinstance(frame, bytes) else frame.bytes
            num_frames, num_bytes = 1, len(data)
            while router.getsockopt(zmq.RCVMORE):
                num_bytes += len(router.recv(zmq.NOBLOCK))
                num_frames += 1
            if inbound is None:
                inbound = self._admit(identity, frame, now, items)
                if inbound is None:
                    continue
            if not inbound.bucket.take(_limits.frame_cost(num_frames, num_bytes), now):
                self.counters.flooders += 1
                self._occasional.warn("a peer sent more messages than a peer may", inbound)
                self._cut(inbound)
                items.append(LinkClosed(inbound.link, "it sent more messages than a peer may"))
                continue
            self._touch(inbound, now)
            if num_frames == 1:
                items.append(Received(inbound.link, data))

    def _admit(
        self, identity: bytes, frame: bytes | zmq.Frame, now: float, items: list[Received | LinkClosed]
    ) -> _Inbound | None:
        """Make a link for a peer that is heard for the first time; None when it gets none."""
        if identity in self._offenders:
            return None
        assert self._address is not None
        fd = _descriptor(frame)
        peer = _limits.peer_of(fd, self._address.port) if fd >= 0 else None
        before = self._by_fd.get(fd) if fd >= 0 else None
        # The same peer: one of the two has gone, its descriptor is the other's now. There's no telling which; both are heard.
        if before is not None and before.peer != peer:
            self._forget_inbound(before.link)
            items.append(LinkClosed(before.link, "the peer's connection has gone"))
        inbound = _Inbound(self._new_link(), identity, fd if peer is not None else -1, peer, self._new_bucket(), now)
        if len(self._inbound) >= self._max_inbound:
            oldest = next(iter(self._inbound.values()))
            if now - oldest.heard_at >= self._idle_link_s:
                self._forget_inbound(oldest.link)
                items.append(LinkClosed(oldest.link, f"more than {self._max_inbound} peers; this one was silent for longest"))
        if len(self._inbound) >= self._max_inbound or not self._newcomers.take(1, now):
            self.counters.turned_away += 1
            self._occasional.warn("too many control connections: new ones are turned away")
            self._cut(inbound)
            return None
        self._inbound[inbound.link] = inbound
        self._by_identity[identity] = inbound
        if inbound.fd >= 0:
            self._by_fd[inbound.fd] = inbound
        return inbound

    def _cut(self, inbound: _Inbound) -> None:
        """End a connection, forget its link, and read no more of what has come over it already."""
        self._forget_inbound(inbound.link)
        self._offenders[inbound.identity] = None
        if len(self._offenders) > _REMEMBERED_OFFENDERS:
            self._offenders.popitem(last=False)
        assert self._address is not None
        if inbound.peer is not None and _limits.cut(inbound.fd, self._address.port, inbound.peer):
            self.counters.cut += 1

    def _read_dealer(self, out: _Outbound, items: list[Received | LinkClosed]) -> bool:
        """Read up to a bound; True when there may be more."""
        now = self._clock()
        for _ in range(_PER_SOCKET):
            frames = _read_frames(out.dealer, 1)
            if frames is None:
                return False
            if not out.bucket.take(_limits.frame_cost(len(frames), sum(map(len, frames))), now):
                self.counters.flooders += 1
                self._drop_outbound(out)
                items.append(LinkClosed(out.link, f"{out.address} sent more messages than a peer may"))
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
        inbound = self._inbound.pop(link, None)
        if inbound is not None:
            del self._by_identity[inbound.identity]
            if self._by_fd.get(inbound.fd) is inbound:
                del self._by_fd[inbound.fd]


def _descriptor(frame: bytes | zmq.Frame) -> int:
    """Of the connection that a frame came over; -1 when libzmq doesn't say."""
    try:
        number = -1 if isinstance(frame, bytes) else frame.get(zmq.SRCFD)
    except zmq.ZMQError:
        return -1
    return number if isinstance(number, int) else -1


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


def _events(monitor: zmq.Socket[bytes], limit: int) -> Iterator[tuple[int, int]]:
    """What a monitor has to report, event and value."""
    for _ in range(limit):
        frames = _read_frames(monitor, 2)
        if frames is None:
            return
        if len(frames[0]) == _EVENT.size:
            event, value = _EVENT.unpack(frames[0])
            yield event, value


def _disconnected(out: _Outbound) -> bool:
    """Read a link's monitor empty; True if the connection has broken."""
    for event, value in _events(out.monitor, _PER_SOCKET):
        if event == zmq.EVENT_DISCONNECTED:
            return True
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            out.established = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            out.mismatch = True
    return False


def _discard(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
    with contextlib.suppress(zmq.ZMQError):
        sock.monitor(None, 0)
    if monitor is not None:
        monitor.close(0)
    sock.close(0)


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
