# SPDX-License-Identifier: Apache-2.0
"""Which way bytes really go, in plain words.

NIXL says which of its backends carries a write (``query_xfer_backend``), and nothing of what that one chose: with UCX it may be
TCP, shared memory or RDMA, and its Python API (1.5.1) has no question for that. So there are two sources here, and whoever
shows what they say tells them apart:

* **Asked**: UCX prints the protocol that it has selected for a connection (``UCX_PROTO_INFO``, :func:`asked_of_ucx`). It prints
  into one file or on stdout for the whole process, so this is for the trial of ``kvpush doctor``, not for an engine.
* **Seen**: the kernel counts what the TCP sockets of this process have delivered, and RDMA ports count what they have sent
  (:class:`Traffic`). Where neither has moved and no RDMA device is open, the bytes have stayed inside the host.

Source of the table's form and of the counters' units: UCX 1.23, ``src/ucp/proto/proto_debug.c``; Linux,
``include/uapi/linux/tcp.h`` (``tcpi_bytes_acked``) and ``Documentation/ABI/stable/sysfs-class-infiniband``
(``port_xmit_data``: units of 4 bytes).
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Asked", "PathWatch", "SeenPath", "Traffic", "asked_of_ucx", "seen_in_words", "ucx_in_words"]

DIRECT = "direct device RDMA"
HOST_RDMA = "RDMA between host memories"
STAGED = "through host memory"
SHARED = "shared memory on one host"
DEVICE_LINK = "device to device inside one host"
TCP = "TCP"

_SHARED_TLS = frozenset({"cma", "posix", "sysv", "xpmem", "knem", "mm", "shm"})
_DEVICE_LINKS = frozenset({"cuda_ipc", "rocm_ipc", "ze_ipc"})
_RDMA_TLS = re.compile(r"(rc|dc|ud|srd|gga|ib)(_|$)")
_COPIES = re.compile(r"copy-in|copy-out|emulation|frag|staging|(cuda|gdr|rocm)_copy")

PROTO_INFO = "*remote memory write by ucp_put*"
"""Value of ``UCX_PROTO_INFO``: tables of one-sided writes only."""


class Asked(NamedTuple):
    """What UCX has selected for big writes to a peer, in its own words.

    Args:
        where: ``intra-node`` or ``inter-node``.
        memory: Such as ``from host memory to host``.
        how: Such as ``zero-copy``.
        lanes: Transports and devices, such as ``52% on tcp/lo and 48% on tcp/eth0``.
    """

    where: str
    memory: str
    how: str
    lanes: str


def asked_of_ucx(log: str) -> Asked | None:
    """The last table for writes to another process in UCX's log; None where there is none.

    ::

        +--------+-------------+-----------------------------------+
        | source intra-node cfg#1                                  |
        | remote memory write by ucp_put* from host memory to host |
        +--------+-------------+-----------------------------------+
        | Range  | Description |              Config               |
        +--------+-------------+-----------------------------------+
        | 0..inf | zero-copy   | cma/memory                        |
        +--------+-------------+-----------------------------------+
    """
    found = None
    titles: list[str] = []
    for line in log.splitlines():
        _, bar, row = line.partition("|")
        cells = [cell.strip() for cell in row.rstrip().removesuffix("|").split("|")] if bar else []
        if len(cells) == 1:
            titles = [*titles[-1:], cells[0]]
        elif len(cells) == 3 and cells[0].endswith("..inf") and len(titles) == 2:
            where = re.search(r"\b(intra-node|inter-node)\b", titles[0])
            memory = re.search(r"remote memory write by ucp_put\S*(?: with \S+)? (from .*)", titles[1])
            if where and memory:
                found = Asked(where[1], memory[1], cells[1], cells[2])
    return found


def ucx_in_words(asked: Asked) -> str:
    """The data path in plain words; UCX's own where they are of no kind that is known here."""
    transports = {transport for transport, _ in re.findall(r"(\w+)/([\w.:-]+)", asked.lanes)}
    device = not asked.memory.startswith("from host memory")
    if "tcp" in transports:
        return f"{STAGED}, over {TCP}" if device else TCP
    if transports & _DEVICE_LINKS:
        return DEVICE_LINK
    if any(_RDMA_TLS.match(transport) for transport in transports):
        if not device:
            return HOST_RDMA
        return f"{STAGED}, over RDMA" if _COPIES.search(asked.how) or _COPIES.search(asked.lanes) else DIRECT
    if transports & _SHARED_TLS:
        return f"{STAGED}, by {SHARED}" if device else SHARED
    return f"{asked.how} over {asked.lanes}"


@dataclass(frozen=True)
class Traffic:
    """What this process's TCP sockets have had acknowledged, and what the host's RDMA ports have sent, since ever.

    Args:
        tcp: Bytes per socket, by its inode.
        rdma: Bytes of all ports; None where this process has no RDMA device open.
    """

    tcp: dict[int, int] = field(default_factory=dict)
    rdma: int | None = None

    @classmethod
    def now(cls, root: Path = Path("/")) -> Traffic:
        """Read the counters: some 10 us per open descriptor. Never raises for what can't be read."""
        tcp: dict[int, int] = {}
        rdma_open = False
        try:
            descriptors = os.listdir("/proc/self/fd")
        except OSError:
            descriptors = []
        for name in descriptors:
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    acked = _acked(int(name))
                    if acked is not None:
                        tcp[int(target[8:-1])] = acked
                rdma_open = rdma_open or "/infiniband/uverbs" in target
            except OSError:
                continue  # Closed meanwhile.
        return cls(tcp, _rdma_bytes(root) if rdma_open else None)

    def since(self, before: Traffic) -> tuple[int, int | None]:
        """Bytes over TCP and over RDMA since then. A socket that is new counts from its beginning."""
        tcp = sum(max(0, acked - before.tcp.get(inode, 0)) for inode, acked in self.tcp.items())
        return tcp, None if self.rdma is None else self.rdma - (before.rdma or 0)


_BYTES_ACKED_AT = 120
"""Offset of ``tcpi_bytes_acked`` (u64) in ``struct tcp_info``."""


def _acked(descriptor: int) -> int | None:
    """None when it is no TCP socket.

    By the system call alone: a Python socket over somebody else's descriptor may change how that one blocks.
    """
    info = ctypes.create_string_buffer(_BYTES_ACKED_AT + 8)
    size = ctypes.c_uint32(len(info))
    libc = ctypes.CDLL(None)
    if libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)) or size.value < len(info):
        return None
    acked: int = struct.unpack_from("=Q", info, _BYTES_ACKED_AT)[0]
    return acked


def _rdma_bytes(root: Path) -> int:
    total = 0
    ports = root / "sys/class/infiniband"
    for pattern, unit in (("*/ports/*/counters/port_xmit_data", 4), ("*/ports/*/hw_counters/tx_bytes", 1)):
        for counter in ports.glob(pattern):
            try:
                total += unit * int(counter.read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue
    return total


def seen_in_words(num_bytes: int, tcp: int, rdma: int | None, *, device: bool) -> tuple[str, str]:
    """The data path as far as counters tell, and what they showed.

    Args:
        num_bytes: Bytes of the writes that were watched.
        tcp: Bytes that TCP sockets have delivered meanwhile.
        rdma: Bytes that RDMA ports have sent meanwhile; None where no RDMA device is open.
        device: Device memory is at either end.
    """
    size = f"{num_bytes / 2**20:.1f} MiB"
    if tcp >= num_bytes / 2:
        return (
            f"{STAGED}, over {TCP}" if device else TCP
        ), f"{tcp / 2**20:.1f} MiB left through TCP sockets for {size} written"
    if rdma is not None and rdma >= num_bytes / 2:
        path = "RDMA, straight from the device or through host memory" if device else HOST_RDMA
        return path, f"RDMA ports sent {rdma / 2**20:.1f} MiB for {size} written"
    if rdma is not None:
        return f"RDMA or {SHARED}", f"{size} written, not through TCP; an RDMA device is open, its ports' counters tell nothing"
    return (DEVICE_LINK if device else SHARED), f"{size} written, not through TCP sockets, and no RDMA device is open"


class SeenPath(NamedTuple):
    """The peer, its data path in plain words, and what was seen."""

    peer: str
    words: str
    seen: str


class PathWatch:
    """Finds out once per peer which way writes to it go, by counters, while nothing else is under way.

    A *window* opens with a write that is posted when none is in flight, and closes when none is in flight any more. If all of
    its writes went to one peer, and the first was big enough, the counters tell. **Owner** the thread that owns the transport.

    Args:
        min_bytes: A window's first write has at least that: handshakes and heartbeats count too.
        max_windows: Then a transport whose windows never tell isn't watched any more.
    """

    def __init__(self, *, min_bytes: int = 16 * 1024, max_windows: int = 64) -> None:
        self._min_bytes = min_bytes
        self._left = max_windows
        self._known: set[str] = set()
        self._before: Traffic | None = None
        self._peers: set[str] = set()
        self._num_bytes = 0
        self._whole = True

    def posting(self, peer: str, num_bytes: int, *, alone: bool) -> None:
        """A write is about to be posted.

        Args:
            alone: Nothing is in flight.
        """
        if alone:
            self._before = None
            if peer not in self._known and num_bytes >= self._min_bytes and self._left > 0:
                self._left -= 1
                self._before, self._peers, self._num_bytes, self._whole = Traffic.now(), set(), 0, True
        if self._before is not None:
            self._peers.add(peer)
            self._num_bytes += num_bytes

    def ended(self, *, ok: bool, idle: bool, device: bool) -> SeenPath | None:
        """A write has ended. Returns a peer's path when that has become clear now.

        Args:
            ok: All of it is at the target.
            idle: Nothing is in flight any more.
            device: Device memory is at either end.
        """
        if self._before is None:
            return None
        self._whole = self._whole and ok
        if not idle:
            return None
        before, self._before = self._before, None
        if not self._whole or len(self._peers) != 1:
            return None
        (peer,) = self._peers
        self._known.add(peer)
        return SeenPath(peer, *seen_in_words(self._num_bytes, *Traffic.now().since(before), device=device))

    def forget(self, peer: str) -> None:
        """It is gone; should it come back, its path is told again."""
        self._known.discard(peer)
