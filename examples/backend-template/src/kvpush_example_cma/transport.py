# SPDX-License-Identifier: Apache-2.0
"""One-sided writes into another process of this machine: process_vm_writev(2).

The smallest transport that is one. It copies inside :meth:`CmaTransport.post_write`, so a write is over when that returns;
a real one posts to hardware there and learns of the end in ``poll``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from kvpush.core.ids import AgentName
from kvpush.core.transport import Completion, Descriptors, MemoryKind, Region, TransportCapabilities, WriteStatus
from kvpush.errors import MemoryRegistrationError, TransportError

_IOV_MAX = 1024  # Source: Linux, include/uapi/linux/uio.h, UIO_MAXIOV.
_PR_SET_PTRACER = 0x59616D61  # Source: Linux, include/uapi/linux/prctl.h.
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

Ranges = list[tuple[int, int]]


class _Peer(NamedTuple):
    pid: int
    pidfd: int
    ranges: Ranges


class CmaTransport:
    """A transport between processes of one machine and one user.

    Args:
        agent_name: This endpoint's name.
    """

    def __init__(self, agent_name: str) -> None:
        self._name = AgentName(agent_name)
        self._regions: list[Region] = []
        self._peers: dict[AgentName, _Peer] = {}
        self._completions: list[Completion] = []
        self._closed = False

    @property
    def name(self) -> str:
        return "cma"

    @property
    def agent_name(self) -> AgentName:
        return self._name

    @property
    def capabilities(self) -> TransportCapabilities:
        # A write is over when post_write returns: nothing is ever in flight when a lease ends.
        return TransportCapabilities(retry_window_s=0.0)

    def register_memory(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if region.kind is not MemoryKind.HOST:
                raise MemoryRegistrationError(f"cma reaches host memory only, not {region.kind} memory")
            if region.address <= 0 or region.length <= 0:
                raise MemoryRegistrationError(f"not a memory range: address {region.address}, {region.length} bytes")
        # Where the Yama module restricts ptrace, a process has to allow others to write to it.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        self._regions += regions

    def metadata(self) -> bytes:
        ranges = [(region.address, region.length) for region in self._regions]
        text = json.dumps([self._name, os.getpid(), _start_time(os.getpid()), ranges]).encode()
        return zlib.crc32(text).to_bytes(4, "big") + text

    def add_peer(self, metadata: bytes) -> AgentName:
        if self._closed:
            raise TransportError("the transport is closed")
        if zlib.crc32(metadata[4:]).to_bytes(4, "big") != metadata[:4]:
            raise TransportError("not the metadata of a cma peer: the checksum is wrong")
        try:
            name, pid, started, ranges = json.loads(metadata[4:])
            peer_name, pid, ranges = AgentName(str(name)), int(pid), [(int(address), int(size)) for address, size in ranges]
        except (ValueError, TypeError) as error:
            raise TransportError(f"not the metadata of a cma peer: {error}") from error
        if peer_name in self._peers:
            return peer_name
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            raise TransportError(f"peer {peer_name} can't be reached: no process {pid} here ({error})") from error
        if _start_time(pid) != started:
            os.close(pidfd)
            raise TransportError(f"peer {peer_name} can't be reached: process {pid} is another one by now")
        self._peers[peer_name] = _Peer(pid, pidfd, ranges)
        return peer_name

    def remove_peer(self, peer: AgentName) -> None:
        gone = self._peers.pop(peer, None)
        if gone is not None:
            os.close(gone.pidfd)

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        if self._closed or peer not in self._peers:
            raise TransportError(f"unknown peer {peer}" if not self._closed else "the transport is closed")
        target = self._peers[peer]
        if any(completion.token == token for completion in self._completions):
            raise TransportError(f"token {token} is still in use")
        if src.ndim != 2 or src.shape[1] != 3 or src.shape != dst.shape or not np.array_equal(src[:, 1], dst[:, 1]):
            raise TransportError("source and destination descriptors differ in number or length")
        _check_inside(src, [(region.address, region.length) for region in self._regions], "source")
        _check_inside(dst, target.ranges, "destination")
        error = _write(target, src, dst)
        self._completions.append(Completion(token, WriteStatus.FAILED if error else WriteStatus.DONE, error))

    def poll(self) -> list[Completion]:
        ended, self._completions = self._completions, []
        return ended

    def progress(self) -> None:
        """Nothing to do: the writer's system call does it all."""

    @property
    def num_in_flight(self) -> int:
        return len(self._completions)

    def close(self) -> None:
        self._closed = True
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._regions.clear()
        self._completions.clear()


def self_test() -> str:
    """Write into this very process. Returns what is wrong; empty when it works."""
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    src, dst = (np.array([[array.ctypes.data, 16, 0]], np.uint64) for array in (source, target))
    try:
        _write_rows(os.getpid(), src, dst)
    except OSError as error:
        return str(error)
    return "" if bool((source == target).all()) else "the bytes did not arrive"


def _write(peer: _Peer, src: Descriptors, dst: Descriptors) -> str:
    """Copy row by row. Returns what went wrong; empty when nothing did."""
    if select.select([peer.pidfd], [], [], 0)[0]:
        return f"process {peer.pid} has ended"
    try:
        for start in range(0, len(src), _IOV_MAX):
            _write_rows(peer.pid, src[start : start + _IOV_MAX], dst[start : start + _IOV_MAX])
    except OSError as error:
        return f"process_vm_writev to process {peer.pid}: {error}"
    return ""


def _write_rows(pid: int, src: Descriptors, dst: Descriptors) -> None:
    """At most _IOV_MAX rows. An iovec is two machine words, address and length: the first two columns of a row."""
    local, remote = (np.ascontiguousarray(rows[:, :2]) for rows in (src, dst))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_writev.restype = ctypes.c_ssize_t
    written = libc.process_vm_writev(
        ctypes.c_int(pid),
        ctypes.c_void_p(local.ctypes.data),
        ctypes.c_ulong(len(local)),
        ctypes.c_void_p(remote.ctypes.data),
        ctypes.c_ulong(len(remote)),
        ctypes.c_ulong(0),
    )
    if written < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if written != int(local[:, 1].sum()):
        raise OSError(f"only {written} bytes were written")


def _check_inside(rows: Descriptors, ranges: Ranges, side: str) -> None:
    """Every row lies in one registered range."""
    first, size = rows[:, 0].astype(object), rows[:, 1].astype(object)
    inside = np.zeros(len(rows), bool)
    for address, length in ranges:
        inside |= ((first >= address) & (first + size <= address + length)).astype(bool)
    if not inside.all():
        raise TransportError(f"{side} descriptor {int(np.argmin(inside))} lies outside the registered memory")


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks: tells it from a later one with the same number. Empty: no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
