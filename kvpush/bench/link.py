# SPDX-License-Identifier: Apache-2.0
"""A network of two hosts on one: two network namespaces, and between them a link of a set rate.

What it makes, all of it named after the process that does::

    namespace kvp-PID-p                                  namespace kvp-PID-d
    prefill instances                                    decode instances
    kvpdata 198.19.0.1 ---- tbf (and netem) both ways ---- kvpdata 198.19.0.2
    kvpmgmt                                              kvpmgmt
       |                                                    |
    kvpPIDp, kvpPIDd: the host's ends, 198.18.x.y, not shaped; client's HTTP only

Addresses are from the block that RFC 2544 sets aside for benchmarks. Needs root and iproute2.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from types import TracebackType
from typing import Final, Literal, Self

from kvpush.demo.connectors import Place
from kvpush.errors import ConfigError, KvPushError

__all__ = [
    "DATA_DEVICE",
    "Dropper",
    "Link",
    "LinkFailed",
    "LinkSpec",
    "Runner",
    "Side",
    "check_requirements",
    "parse_link",
    "places",
    "remove_stale",
]

Side = Literal["p", "d"]
SIDES: Final[tuple[Side, Side]] = ("p", "d")

#: The shaped device, in either namespace.
DATA_DEVICE: Final = "kvpdata"
_MANAGEMENT_DEVICE: Final = "kvpmgmt"

_DATA_NETWORK: Final = ipaddress.IPv4Network("198.19.0.0/30")
_MANAGEMENT_NETWORK: Final = ipaddress.IPv4Network("198.18.0.0/16")

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.IGNORECASE)
_RATE_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_DELAY: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)", re.IGNORECASE)
_DELAY_UNITS: Final = {"us": 1, "ms": 10**3, "s": 10**6}

#: Bytes that may leave at once: 1 ms of the rate, but no less than a packet of TCP's segmentation offload (64 KiB), which
#: would be cut into single frames otherwise, and that costs the sender's core more than the link takes.
_BURST_S: Final = 1e-3
_MIN_BURST: Final = 128 << 10
#: How long a packet may wait for its turn before packets are dropped.
_QUEUE_MS: Final = 50
#: The same while the link is squeezed.
_SQUEEZED_QUEUE_MS: Final = 20
_MTU: Final = 1500
_DROP_TABLE: Final = "kvpush_chaos"

_COMMAND_TIMEOUT_S: Final = 20.0
_NAMESPACE: Final = re.compile(r"kvp-(\d+)-[pd]")
_HOST_DEVICE: Final = re.compile(r"kvp(\d+)[pd]")

Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns what it printed; raises `LinkFailed`."""


class Dropper(StrEnum):
    """What can make the link lose packets at random here."""

    NETEM = "netem"
    NFT = "nft"
    IPTABLES = "iptables"


class LinkFailed(KvPushError):
    """The namespaces or the link can't be made; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link.

    Args:
        rate_bits: bits a second, each way.
        delay_us: added to every packet, each way, in microseconds; a round trip takes twice that.
    """

    rate_bits: int
    delay_us: int = 0

    def __str__(self) -> str:
        rate = _in_units(self.rate_bits, {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1})
        return f"{rate},{_in_units(self.delay_us, {'ms': 1000, 'us': 1})}" if self.delay_us else rate

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket."""
        return max(_MIN_BURST, round(self.rate_bits / 8 * _BURST_S))

    @property
    def delay_packets(self) -> int:
        """Packets that netem has to hold for the link to be full, with room to spare."""
        return max(1000, 2 * round(self.rate_bits / 8 * self.delay_us / 1e6 / _MTU))


def _in_units(value: int, units: dict[str, int]) -> str:
    for name, size in units.items():
        if value >= size:
            return f"{value / size:g}{name}" if value % size else f"{value // size}{name}"
    return str(value)


def parse_link(text: str) -> LinkSpec:
    """Read ``RATE[,DELAY]``.

    Args:
        text: such as ``1gbit``, ``250mbit,2ms`` or ``10Gbit,50us``.

    Returns:
        The link.

    Raises:
        ConfigError: it is none of these.
    """
    rate_text, comma, delay_text = text.strip().partition(",")
    rate = _RATE.fullmatch(rate_text.strip())
    if rate is None:
        raise ConfigError(f"{rate_text!r} is not a rate: write 100mbit, 1gbit or 2.5gbit")
    bits = round(Fraction(rate[1]) * _RATE_UNITS[rate[2].lower()])
    if bits < 8000:
        raise ConfigError(f"a rate of {text!r} is below 8 kbit/s")
    if not comma:
        return LinkSpec(bits)
    delay = _DELAY.fullmatch(delay_text.strip())
    if delay is None:
        raise ConfigError(f"{delay_text!r} is not a delay: write 50us, 2ms or 0.1s")
    return LinkSpec(bits, round(Fraction(delay[1]) * _DELAY_UNITS[delay[2].lower()]))


def run_command(argv: Sequence[str]) -> str:
    """Run a command of iproute2.

    Args:
        argv: the command.

    Returns:
        Its output.

    Raises:
        LinkFailed: it isn't there, failed or hung.
    """
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise LinkFailed(f"{argv[0]} is missing: install iproute2 (apt-get install iproute2)") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkFailed(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise LinkFailed(f"{' '.join(argv)}: {said}")
    return done.stdout


class Link(AbstractContextManager["Link"]):
    """The two namespaces and what joins them. A context manager: made on entering, gone on leaving, however that happens.

    Leaving removes names and devices; whatever runs in the namespaces is ended first by who started it.

    Owner: one thread. Entering and leaving block for some hundred milliseconds.

    Args:
        spec: rate and delay.
        pid: names it; one link a process.
        run: runs commands.
    """

    def __init__(self, spec: LinkSpec, *, pid: int | None = None, run: Runner = run_command) -> None:
        self.spec = spec
        self._pid = os.getpid() if pid is None else pid
        self._run = run
        self._management: dict[Side, ipaddress.IPv4Network] = {}

    def __enter__(self) -> Self:
        check_requirements()
        remove_stale(own=self._pid, run=self._run)
        first, second = _free_networks(self._run, start=self._pid)
        self._management = {"p": first, "d": second}
        try:
            for argv in self.setup_commands():
                self._run(argv)
        except LinkFailed as error:
            self.remove()
            raise LinkFailed(_explain(error.message)) from error
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def namespace(self, side: Side) -> str:
        """Name of the namespace of prefill (``p``) or decode (``d``)."""
        return f"kvp-{self._pid}-{side}"

    def host_device(self, side: Side) -> str:
        """The host's end of the management pair."""
        return f"kvp{self._pid}{side}"

    def data_address(self, side: Side) -> str:
        """Address on the shaped link."""
        return str(_DATA_NETWORK[1 if side == "p" else 2])

    def management_address(self, side: Side) -> str:
        """Address that the host reaches the namespace at; known once entered."""
        return str(self._management[side][2])

    def enter_prefix(self, side: Side) -> tuple[str, ...]:
        """What to put before a command to run it in a namespace.

        `ip netns exec` and not `nsenter`: it also mounts the /sys of the namespace, in which UCX looks devices up.
        """
        return ("ip", "netns", "exec", self.namespace(side))

    def setup_commands(self) -> list[tuple[str, ...]]:
        """The commands that make everything, in order."""
        commands: list[tuple[str, ...]] = [("ip", "netns", "add", self.namespace(side)) for side in SIDES]
        p, d = (self.namespace(side) for side in SIDES)
        commands.append(
            (
                *("ip", "link", "add", "name", DATA_DEVICE, "netns", p, "type", "veth"),
                *("peer", "name", DATA_DEVICE, "netns", d),
            )
        )
        for side in SIDES:
            name, host = self.namespace(side), self.host_device(side)
            network = self._management[side]
            data = f"{self.data_address(side)}/{_DATA_NETWORK.prefixlen}"
            commands += [
                ("ip", "link", "add", "name", host, "type", "veth", "peer", "name", _MANAGEMENT_DEVICE, "netns", name),
                ("ip", "addr", "add", f"{network[1]}/{network.prefixlen}", "dev", host),
                ("ip", "link", "set", host, "up"),
                ("ip", "-n", name, "addr", "add", f"{network[2]}/{network.prefixlen}", "dev", _MANAGEMENT_DEVICE),
                ("ip", "-n", name, "addr", "add", data, "dev", DATA_DEVICE),
                *(("ip", "-n", name, "link", "set", device, "up") for device in ("lo", _MANAGEMENT_DEVICE, DATA_DEVICE)),
                *self._shaping(name),
            ]
        return commands

    def _shaping(self, namespace: str) -> list[tuple[str, ...]]:
        spec = self.spec
        add = ("tc", "-n", namespace, "qdisc", "add", "dev", DATA_DEVICE)
        bucket = ("tbf", "rate", f"{spec.rate_bits}bit", "burst", str(spec.burst_bytes), "latency", f"{_QUEUE_MS}ms")
        if not spec.delay_us:
            return [(*add, "root", "handle", "1:", *bucket)]
        return [
            (*add, "root", "handle", "1:", "netem", "delay", f"{spec.delay_us}us", "limit", str(spec.delay_packets)),
            (*add, "parent", "1:1", "handle", "10:", *bucket),
        ]

    # --- faults of the link -------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Take the link down: nothing gets through, and nobody is told. What is under way is lost.

        Raises:
            LinkFailed: it can't be.
        """
        self._run(("ip", "-n", self.namespace("p"), "link", "set", DATA_DEVICE, "down"))

    def join(self) -> None:
        """Undo `cut`.

        Raises:
            LinkFailed: it can't be.
        """
        self._run(("ip", "-n", self.namespace("p"), "link", "set", DATA_DEVICE, "up"))

    def squeeze(self, rate_bits: int) -> None:
        """Let the link carry so much less that queues overflow and packets are dropped, both ways.

        Args:
            rate_bits: bits a second.

        Raises:
            LinkFailed: it can't be.
        """
        self._change_bucket(rate_bits, 2 * _MTU + 1000, _SQUEEZED_QUEUE_MS)

    def relax(self) -> None:
        """Undo `squeeze`.

        Raises:
            LinkFailed: it can't be.
        """
        self._change_bucket(self.spec.rate_bits, self.spec.burst_bytes, _QUEUE_MS)

    def _change_bucket(self, rate_bits: int, burst_bytes: int, queue_ms: int) -> None:
        where = ("parent", "1:1", "handle", "10:") if self.spec.delay_us else ("root", "handle", "1:")
        for side in SIDES:
            self._run(
                (
                    *("tc", "-n", self.namespace(side), "qdisc", "change", "dev", DATA_DEVICE, *where),
                    *("tbf", "rate", f"{rate_bits}bit", "burst", str(burst_bytes), "latency", f"{queue_ms}ms"),
                )
            )

    def find_dropper(self) -> Dropper | None:
        """Find out, by trying, what can drop packets at random here.

        Returns:
            The first of netem, nftables and iptables that works; None if none does.
        """
        for dropper in Dropper:
            try:
                self.lose(1, dropper)
                self.lose_no_more(dropper)
            except LinkFailed:
                continue
            return dropper
        return None

    def lose(self, percent: int, dropper: Dropper) -> None:
        """Drop packets at random, both ways, where they come in.

        Args:
            percent: of the packets, 1 to 100: then the link is up, and a black hole.
            dropper: what to use.

        Raises:
            LinkFailed: it isn't there.
        """
        for side in SIDES:
            name = self.namespace(side)
            if dropper is Dropper.NETEM:
                limit = str(self.spec.delay_packets)
                self._run((*self._below_bucket(name), "netem", "limit", limit, "loss", f"{percent}%"))
                continue
            inside = self.enter_prefix(side)
            if dropper is Dropper.NFT:
                chain = "{ type filter hook input priority 0 ; }"
                draw = "" if percent == 100 else f"numgen random mod 100 < {percent} "
                rule = f"iifname {DATA_DEVICE} {draw}drop"
                self._run((*inside, "nft", "add", "table", "inet", _DROP_TABLE))
                self._run((*inside, "nft", "add", "chain", "inet", _DROP_TABLE, "lossy", chain))
                self._run((*inside, "nft", "add", "rule", "inet", _DROP_TABLE, "lossy", rule))
            else:
                self._run((*inside, "iptables", "-A", *self._iptables_rule(percent)))

    def lose_no_more(self, dropper: Dropper, percent: int = 1) -> None:
        """Undo `lose`.

        Args:
            dropper: as given to it.
            percent: likewise.

        Raises:
            LinkFailed: it isn't losing that way.
        """
        for side in SIDES:
            name = self.namespace(side)
            if dropper is Dropper.NETEM:
                # Not deleted: a bucket with nothing below drops everything.
                limit = self.spec.burst_bytes + round(self.spec.rate_bits / 8 * _QUEUE_MS / 1000)
                self._run((*self._below_bucket(name), "bfifo", "limit", str(limit)))
            elif dropper is Dropper.NFT:
                self._run((*self.enter_prefix(side), "nft", "delete", "table", "inet", _DROP_TABLE))
            else:
                self._run((*self.enter_prefix(side), "iptables", "-D", *self._iptables_rule(percent)))

    def _below_bucket(self, namespace: str) -> tuple[str, ...]:
        parent = "10:1" if self.spec.delay_us else "1:1"
        return ("tc", "-n", namespace, "qdisc", "replace", "dev", DATA_DEVICE, "parent", parent)

    @staticmethod
    def _iptables_rule(percent: int) -> tuple[str, ...]:
        match = ("-m", "statistic", "--mode", "random", "--probability", f"{percent / 100:.2f}")
        return ("INPUT", "-i", DATA_DEVICE, *match, "-j", "DROP")

    def removal_commands(self) -> list[tuple[str, ...]]:
        """The commands that remove everything; each may fail because its object is not there."""
        return [
            *(("ip", "link", "del", self.host_device(side)) for side in SIDES),
            # At once, not when the last process of the namespace has gone.
            ("ip", "-n", self.namespace("p"), "link", "del", DATA_DEVICE),
            *(("ip", "netns", "del", self.namespace(side)) for side in SIDES),
        ]

    def remove(self) -> None:
        """Remove everything that is there. May be called again."""
        for argv in self.removal_commands():
            try:
                self._run(argv)
            except LinkFailed:
                continue


def places(link: Link | None, roles: Iterable[str] = ("prefill", "decode")) -> dict[str, Place]:
    """Where instances run.

    Args:
        link: entered; None is the loopback.
        roles: of the deployment.

    Returns:
        By role, decode on the one side and the others on the other one; the single instance stays on the host.
    """
    if link is None:
        return {}
    found = {}
    for role in roles:
        side: Side = "d" if role == "decode" else "p"
        found[role] = Place(
            host=link.management_address(side),
            transfer_host=link.data_address(side),
            prefix=link.enter_prefix(side),
            env={
                "UCX_TLS": "tcp,self",
                "UCX_NET_DEVICES": DATA_DEVICE,
                # No route leads out of the namespace, which is how vLLM finds its address.
                "VLLM_HOST_IP": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
    return found


def check_requirements(what: str = "--link") -> None:
    """Find out before anything is made whether a link can be.

    Args:
        what: needs it; for the message.

    Raises:
        ConfigError: names what is missing.
    """
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise ConfigError(f"{what} makes network namespaces and needs root; the loopback doesn't")


def _explain(said: str) -> str:
    if "netem" in said and ("unknown" in said or "No such file" in said or "not supported" in said):
        return (
            "this kernel has no netem (CONFIG_NET_SCH_NETEM, module sch_netem), so packets can't be delayed: "
            "give the rate alone, such as --link 1gbit"
        )
    if "tbf" in said and ("unknown" in said or "No such file" in said):
        return "this kernel has no tbf (CONFIG_NET_SCH_TBF, module sch_tbf), so a rate can't be set"
    if "type veth" in said and ("not supported" in said or "Unknown device type" in said):
        return "this kernel has no veth devices (CONFIG_VETH, module veth)"
    if "not permitted" in said or "Permission denied" in said:
        return f"{said} (in a container, --link needs the capabilities SYS_ADMIN and NET_ADMIN)"
    return said


def remove_stale(*, own: int, run: Runner = run_command) -> list[str]:
    """Remove what runs that were killed have left: namespaces and devices named after a process that is gone.

    Args:
        own: this process; what bears its number is an older process's.
        run: runs commands.

    Returns:
        Names of what was removed.
    """
    removed = []

    def attempt(name: str, argv: Sequence[str]) -> None:
        try:
            run(argv)
        except LinkFailed:
            return
        removed.append(name)

    for device in _names(run, ("ip", "-j", "link", "show"), "ifname"):
        found = _HOST_DEVICE.fullmatch(device.partition("@")[0])
        if found is not None and (int(found[1]) == own or not _alive(int(found[1]))):
            attempt(found[0], ("ip", "link", "del", found[0]))
    for namespace in _names(run, ("ip", "-j", "netns", "list"), "name"):
        found = _NAMESPACE.fullmatch(namespace)
        if found is not None and (int(found[1]) == own or not _alive(int(found[1]))):
            attempt(namespace, ("ip", "netns", "del", namespace))
    return removed


def _names(run: Runner, argv: Sequence[str], key: str) -> list[str]:
    return [str(entry[key]) for entry in json.loads(run(argv) or "[]") if key in entry]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _free_networks(run: Runner, *, start: int) -> tuple[ipaddress.IPv4Network, ipaddress.IPv4Network]:
    """Two networks of four addresses that no interface of the host has."""
    used = [
        ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}").network
        for entry in json.loads(run(("ip", "-j", "-4", "addr", "show")) or "[]")
        for address in entry.get("addr_info", ())
        if "local" in address
    ]
    candidates = list(_MANAGEMENT_NETWORK.subnets(new_prefix=29))
    for offset in range(len(candidates)):
        candidate = candidates[(start + offset) % len(candidates)]
        if not any(candidate.overlaps(network) for network in used):
            first, second = candidate.subnets(new_prefix=30)
            return first, second
    raise LinkFailed(f"every address of {_MANAGEMENT_NETWORK} is taken on this host")
