# SPDX-License-Identifier: Apache-2.0
"""Checks on control addresses, the same for every channel: they come from requests, so they are not to be trusted."""

from __future__ import annotations

from kvpush.core.ids import PeerAddress
from kvpush.errors import TransportError

MAX_HOST_CHARS = 255
_FORBIDDEN = frozenset(";*/\\@,?#\"'<>|`$(){}")


def check_address(address: PeerAddress, *, allow_port_zero: bool = False) -> None:
    """Refuse an address that can't name one endpoint, before it reaches a socket library.

    Args:
        address: Host (name, IPv4 or IPv6 literal without brackets, an optional ``%zone``) and port.
        allow_port_zero: Port 0 is right where it means "any free one".

    Raises:
        TransportError: says which part is wrong, without repeating more than 64 characters of it.
    """
    host, port = address
    if not isinstance(host, str) or not host:
        raise TransportError("the control host is empty")
    if len(host) > MAX_HOST_CHARS:
        raise TransportError(f"the control host has {len(host)} characters, more than {MAX_HOST_CHARS}: {host[:64]!r}...")
    bad = sorted({char for char in host if char in _FORBIDDEN or not "!" <= char <= "~"})
    if bad or host.startswith("[") or host.endswith("]"):
        raise TransportError(f"the control host {host[:64]!r} holds characters that no host name has: {bad or ['[', ']']}")
    lowest = 0 if allow_port_zero else 1
    if isinstance(port, bool) or not isinstance(port, int) or not lowest <= port <= 65535:
        raise TransportError(f"the control port {port!r:.32} is not a number from {lowest} to 65535")
