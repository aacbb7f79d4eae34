# SPDX-License-Identifier: Apache-2.0
"""Which producers a consumer may connect to. Addresses come from requests, so they are not to be trusted."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpush.errors import ConfigError

__all__ = ["ProducerPolicy", "is_loopback"]

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class _Rule(NamedTuple):
    """One entry of the list: a name or a network (neither: any host), and perhaps a port."""

    name: str | None
    network: _Network | None
    port: int | None


def is_loopback(host: str) -> bool:
    """Whether an address can only be this machine's loopback. Names are not looked up: but for ``localhost`` none counts."""
    address = _address(host)
    if address is not None:
        return address.is_loopback
    name = host.lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost")


@dataclass(frozen=True, slots=True)
class ProducerPolicy:
    """Decides for each address.

    Args:
        authenticated: Both sides prove that they know the secret.
        switched_off: Authentication was switched off in so many words.
        rules: What :meth:`parse` made of ``allowed_producers``; None: not set.
    """

    authenticated: bool = False
    switched_off: bool = False
    rules: tuple[_Rule, ...] | None = None

    @staticmethod
    def parse(entries: Sequence[str]) -> tuple[_Rule, ...]:
        """Read ``allowed_producers``: host names, addresses, networks (``10.0.0.0/8``), each with ``:port`` or without,
        ``[fd00::/8]:14579``, or ``*`` for any.

        Raises:
            ConfigError: names the entry.
        """
        return tuple(_rule(entry) for entry in entries)

    def refusal(self, host: str, port: int) -> str | None:
        """Why a producer's address may not be connected to; None when it may."""
        local, address = is_loopback(host), f"{host}:{port}"
        if not self.authenticated and not self.switched_off and not local:
            return (
                f"{address} is not on the loopback, and no secret is set here: give both sides the same one with "
                'auth_secret_file or KVPUSH_AUTH_SECRET (or set auth to "off" and allowed_producers, on a trusted network)'
            )
        if self.rules is None:
            if self.authenticated or local:
                return None
            return f"auth is off, so producers off the loopback must be named: {address} is not in allowed_producers"
        if any(_matches(rule, host, port) for rule in self.rules):
            return None
        return f"{address} is not in allowed_producers"


def _matches(rule: _Rule, host: str, port: int) -> bool:
    if rule.port is not None and rule.port != port:
        return False
    if rule.network is not None:
        ip = _address(host)
        return ip is not None and ip.version == rule.network.version and ip in rule.network
    return rule.name is None or rule.name == host.lower().removesuffix(".")


def _rule(entry: str) -> _Rule:
    host, port = _split(entry)
    if host == "*":
        return _Rule(None, None, port)
    try:
        network: _Network = ipaddress.ip_network(host, strict=False)
    except ValueError:
        name = host.lower().removesuffix(".")
        if not name or not all(char.isascii() and (char.isalnum() or char in "-._") for char in name):
            raise ConfigError(f"allowed_producers: {entry[:80]!r} is no host, address, network or '*'") from None
        return _Rule(name, None, port)
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped and network.prefixlen >= 96:
        network = ipaddress.ip_network((network.network_address.ipv4_mapped, network.prefixlen - 96))
    return _Rule(None, network, port)


def _split(entry: str) -> tuple[str, int | None]:
    """Entry -> host and port."""
    text = entry.strip()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ConfigError(f"allowed_producers: {entry[:80]!r} has a bracket too few or too many")
        port_text = rest[1:] if rest else None
    elif text.count(":") == 1:
        host, _, port_text = text.partition(":")
    else:
        host, port_text = text, None
    if port_text is None:
        return host, None
    if not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text) <= 65535):
        raise ConfigError(f"allowed_producers: {entry[:80]!r} has no port from 1 to 65535 after its colon")
    return host, int(port_text)


def _address(host: str) -> _Ip | None:
    """An address literal; IPv4 in IPv6 clothes counts as IPv4. None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
