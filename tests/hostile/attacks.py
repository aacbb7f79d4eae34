# SPDX-License-Identifier: Apache-2.0
"""What attackers bring: sockets that speak ZMTP or nearly, and frames that are valid or nearly."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from hostile_rig import TRAFFIC_SLOTS, Party, Transfer
from hypothesis import strategies as st
from msgspec import inspect as mi

from kvpush.channels.auth import Credentials
from kvpush.core import wire
from kvpush.core.ids import PeerAddress
from kvpush.testing.contract import wait_until

NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def long_frame(num_bytes: int, *, command: bool = False) -> bytes:
    """The head of a frame that claims to have so many bytes."""
    return bytes([0x06 if command else 0x02]) + struct.pack(">Q", num_bytes)


def take(sock: zmq.Socket[bytes], wait_ms: int) -> list[bytes] | None:
    """The next message, or None. Never waits for longer: what a poll has announced can be gone with its connection."""
    if not sock.poll(wait_ms):
        return None
    try:
        return sock.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class Dealer:
    """A ZeroMQ socket of the attacker's own, that can do what no channel of ours does."""

    def __init__(self, context: zmq.Context[Any], address: PeerAddress, credentials: Credentials | None) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if credentials is not None:
            self.socket.curve_serverkey = credentials.server_public
            self.socket.curve_publickey = credentials.client_public
            self.socket.curve_secretkey = credentials.client_secret
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(f"tcp://{address}")

    def send(self, *messages: wire.Message | bytes) -> bool:
        """Queue messages; False when the queue is full."""
        try:
            for message in messages:
                self.socket.send(message if isinstance(message, bytes) else wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def answer(self, *kinds: type[wire.Message]) -> Any:
        """The next message of one of these kinds; others are passed over."""
        found: list[wire.Message] = []

        def there() -> bool:
            frames = take(self.socket, 10)
            if frames is None:
                return False
            found.append(wire.decode(frames[0]))
            return isinstance(found[-1], kinds)

        wait_until(there, f"an answer, one of {[kind.__name__ for kind in kinds]}; came: {found}")
        return found[-1]

    def drain(self) -> None:
        """Read what has come: a socket whose queue is full looks at its connection no more, not even at its end."""
        while take(self.socket, 0) is not None:
            pass

    @property
    def disconnected(self) -> bool:
        return bool(self.monitor.poll(0))

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


@contextmanager
def dealers(address: PeerAddress, credentials: Credentials | None) -> Iterator[Callable[[], Dealer]]:
    """Makes attackers' sockets; closes them."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    made: list[Dealer] = []

    def make() -> Dealer:
        made.append(Dealer(context, address, credentials))
        return made[-1]

    try:
        yield make
    finally:
        for dealer in made:
            dealer.close()
        context.term()


@contextmanager
def raw(address: PeerAddress, greeting: bytes = b"") -> Iterator[socket.socket]:
    """A TCP connection that has said a greeting."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(greeting)
        yield connection


def drained(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection; reads what it had to say before."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


class Traffic:
    """Good transfers, one after another, in a thread of their own for as long as the attack lasts."""

    def __init__(self, producer: Party, consumer: Party) -> None:
        self._parties = producer, consumer
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.done = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                Transfer(slot=self.done % TRAFFIC_SLOTS).run(*self._parties)
                self.done += 1
        except BaseException as error:  # noqa: BLE001 - handed over to the test's own thread
            self._error = error

    def __enter__(self) -> Traffic:
        self._thread.start()
        wait_until(lambda: self.done >= 1 or self._error is not None, "a first good transfer")
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        before = self.done
        if kind is None:
            wait_until(lambda: self.done >= before + 2 or self._error is not None, "good transfers go on")
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None and kind is None:
            raise self._error


# --- frames with random fields ----------------------------------------------------------------------------------------


def any_of(kind: Any, special: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Values of a wire type, by its declared bounds; fields named in ``special`` are drawn from there at times."""
    return _any(mi.type_info(kind), special)


def _any(info: mi.Type, special: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if isinstance(info, mi.IntType):
        low, high = info.ge if info.ge is not None else -(2**63), info.le if info.le is not None else 2**63 - 1
        return st.one_of(st.integers(low, min(high, low + 70)), st.integers(low, high))
    if isinstance(info, mi.FloatType):
        return st.floats(info.ge, info.le, allow_nan=False)
    if isinstance(info, mi.BoolType):
        return st.booleans()
    if isinstance(info, mi.StrType):
        return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or 20, 20))
    if isinstance(info, mi.BytesType):
        return st.binary(min_size=info.min_length or 0, max_size=min(info.max_length or 64, 64))
    if isinstance(info, mi.DictType):
        return st.dictionaries(_any(info.key_type, special), _any(info.value_type, special), max_size=3)
    if isinstance(info, mi.VarTupleType):
        items = st.lists(_any(info.item_type, special), min_size=info.min_length or 0, max_size=min(info.max_length or 3, 3))
        return items.map(tuple)
    if isinstance(info, mi.UnionType):
        return st.one_of([_any(item, special) for item in info.types])
    if isinstance(info, mi.NoneType):
        return st.none()
    if isinstance(info, mi.EnumType):
        return st.sampled_from(list(info.cls))
    if isinstance(info, mi.LiteralType):
        return st.sampled_from(list(info.values))
    if isinstance(info, mi.StructType | mi.NamedTupleType):
        cls = info.cls
        fields = {}
        for field in info.fields:
            drawn = _any(field.type, special)
            fields[field.name] = st.one_of(special[field.name], drawn) if field.name in special else drawn
        return st.fixed_dictionaries(fields).map(lambda values: cls(**values))
    raise TypeError(f"no values for {info}: extend this")


def mutations(frames: list[bytes]) -> st.SearchStrategy[bytes]:
    """Recorded frames with a stretch overwritten, cut out or doubled."""
    known = tuple(frames)  # The recording goes on; what is drawn from must not change.

    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        frame = draw(st.sampled_from(known))
        at = draw(st.integers(0, len(frame)))
        upto = draw(st.integers(at, min(len(frame), at + 16)))
        return frame[:at] + draw(st.binary(max_size=16)) + frame[upto:] + draw(st.sampled_from([b"", frame[at:upto]]))

    return mutate()


def forged(frames: list[bytes], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Any message either side may send, well-formed, with any fields."""
    kinds = msgspec.inspect.type_info(wire.Message)
    assert isinstance(kinds, mi.UnionType)
    return st.one_of(_any(kinds, special).map(wire.encode), mutations(frames))
