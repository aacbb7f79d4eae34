# SPDX-License-Identifier: Apache-2.0
"""The keys of an authenticated control channel, made from one secret that all instances share.

The mechanism is ZeroMQ's CURVE (RFC 26/CURVEZMQ: Curve25519, both sides authenticated, encrypted, forward secret). Its keys are
not distributed: every instance derives the same two pairs, one for those that listen and one for those that connect. A side
that doesn't know the secret can neither pass as a producer nor as a consumer, since even a listener's *public* key follows from
the secret and is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvpush.errors import ConfigError

__all__ = ["MIN_SECRET_BYTES", "Credentials", "read_secret_file"]

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_SALT = b"kvpush control channel 1"
"""Fixed: both sides must come to the same keys without having spoken."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Both key pairs, in Z85. Never shown: ``repr`` has the fingerprint only.

    Args:
        fingerprint: Tells two secrets apart, and nothing about them that couldn't be had from a recorded handshake.
    """

    fingerprint: str
    server_public: bytes = field(repr=False)
    server_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes) -> Credentials:
        """Keys for a secret. Takes some 50 ms and 16 MiB: that is what makes guessing at a recorded handshake slow.

        Args:
            secret: At least 16 bytes, best 32 random ones as text.

        Raises:
            ConfigError: it is too short or too long, or libzmq was built without CURVE. The text holds nothing of it.
        """
        if not MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
            raise ConfigError(
                f"the shared secret has {len(secret)} bytes; {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} are wanted: "
                "make one with `openssl rand -base64 32`"
            )
        if not zmq.has("curve"):
            raise ConfigError("this libzmq has no CURVE security: install pyzmq's own wheel (pip install pyzmq)")
        root = hashlib.scrypt(secret, salt=_SALT, n=2**14, r=8, p=1, dklen=32)
        server, client = _pair(root, b"listens"), _pair(root, b"connects")
        return cls(_expand(root, b"fingerprint")[:4].hex(), *server, *client)


def _pair(root: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    secret = z85.encode(_expand(root, purpose))
    return zmq.curve_public(secret), secret


def _expand(root: bytes, purpose: bytes) -> bytes:
    """HKDF-Expand of RFC 5869 for one block of SHA-256."""
    return hmac.digest(root, purpose + b"\x01", "sha256")


def read_secret_file(path: str) -> bytes:
    """The secret in a file, without the white space around it.

    Raises:
        ConfigError: it can't be read, is no plain file, or others than its owner may read or write it; says what mends that.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"auth_secret_file: {path} is no plain file")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"auth_secret_file: {path} has mode {stat.S_IMODE(status.st_mode):04o}, others than its owner may use it: "
                    f"chmod 600 {path}"
                )
            return file.read(_MAX_SECRET_BYTES + 1024).strip()
    except OSError as error:
        raise ConfigError(f"auth_secret_file: {path} can't be read: {error.strerror or error}") from error
