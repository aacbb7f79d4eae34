# SPDX-License-Identifier: Apache-2.0
"""What a channel needs to keep one peer from taking it all: a token bucket, and a way to end a connection of libzmq's."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import Any

FRAME_UNIT_BYTES = 4096
"""A frame costs one token, and one more for each so many bytes."""


class TokenBucket:
    """Lets ``burst`` tokens pass at once and ``per_s`` a second in the long run."""

    __slots__ = ("_at", "_burst", "_level", "_per_s")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = now

    def take(self, tokens: float, now: float) -> bool:
        """Take tokens; False when there aren't as many."""
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now
        if tokens > self._level:
            return False
        self._level -= tokens
        return True


def frame_cost(num_frames: int, num_bytes: int) -> float:
    """Tokens for one message."""
    return num_frames + num_bytes / FRAME_UNIT_BYTES


def peer_of(fd: int, port: int) -> tuple[Any, ...] | None:
    """Who is at the other end of a connection to a port of ours; None when the descriptor is no such connection (any more)."""
    connection = _share(fd)
    if connection is None:
        return None
    with connection:
        return _peer_name(connection, port)


def cut(fd: int, port: int, peer: tuple[Any, ...]) -> bool:
    """Shut a connection to a port of ours down that another library owns, if the descriptor is still the one of that peer.

    libzmq can't be told to drop one of a ROUTER's connections. It may close this one and have the number used again at any
    moment, so what is looked at and shut down is a duplicate, which stays what it is.
    """
    connection = _share(fd)
    if connection is None:
        return False
    with connection:
        if _peer_name(connection, port) != peer:
            return False
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    return True


def _share(fd: int) -> socket.socket | None:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _peer_name(connection: socket.socket, port: int) -> tuple[Any, ...] | None:
    """None but for connections to that port: any other that has got the number is none of libzmq's, nor ours to shut."""
    try:
        own, name = connection.getsockname(), connection.getpeername()
    except OSError:
        return None
    return name if isinstance(own, tuple) and own[1] == port and isinstance(name, tuple) else None
