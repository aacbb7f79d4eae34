# SPDX-License-Identifier: Apache-2.0
"""Transfers inside one process: real memory, no nixl, and faults on demand. The embedded default, and the one for tests.

A write is a promise to copy; the copy happens when the simulated link has carried it and somebody polls. Until then the source
may still change, as with a real transport. Addresses are checked against registered regions on both sides, so that a wrong
descriptor is an error and not a crash.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvpush.backends._host_layout import HostBackend
from kvpush.backends.base import BACKEND_API_VERSION, Backend, BackendInfo, Capability, Probe
from kvpush.backends.hookspecs import hookimpl
from kvpush.core.ids import AgentName
from kvpush.core.transport import (
    Completion,
    Descriptors,
    MemoryKind,
    Region,
    TransportCapabilities,
    WriteStatus,
)
from kvpush.errors import ConfigError, MemoryRegistrationError, TransportError

__all__ = [
    "LoopbackBackend",
    "LoopbackFabric",
    "LoopbackPlugin",
    "LoopbackTransport",
    "Posting",
    "WriteFault",
    "default_fabric",
    "kvpush_backend",
]

TRANSPORT_NAME = "loopback"
_NEVER = float("inf")


class Posting(NamedTuple):
    """A write being posted, as a fault rule sees it."""

    source: AgentName
    target: AgentName
    token: int
    num_bytes: int
    serial: int
    """Counts the posts of the fabric, from 0."""


@dataclass(frozen=True, slots=True)
class WriteFault:
    """What goes wrong with one write.

    Args:
        fail_post: ``post_write`` raises with this text; nothing is copied.
        fail: It ends FAILED with this text, at the time when it would have been done; nothing is copied.
        copy_anyway: With ``fail``: the bytes arrive all the same, as when only the answer was lost.
        never: It neither ends nor copies anything.
        delay_s: It takes this much longer.
        late_copy_s: This long after its end the bytes are written once more: the late write that fences must keep out. Reads
            the source as it is by then.
        spoil: It says that it is done, and is not right: one bit is ``flip``-ped, some bytes are ``drop``-ped, or are
            ``misplace``-d, over others of the same write. What digests are for.
    """

    fail_post: str = ""
    fail: str = ""
    copy_anyway: bool = False
    never: bool = False
    delay_s: float = 0.0
    late_copy_s: float | None = None
    spoil: Literal["", "flip", "drop", "misplace"] = ""


FaultRule = Callable[[Posting], WriteFault | None]
"""Asked for every post; None lets it pass. Called with the fabric's lock held."""


class _Write:
    def __init__(
        self, token: int, source: LoopbackTransport, target: LoopbackTransport, src: Descriptors, dst: Descriptors
    ) -> None:
        self.token = token
        self.source = source
        self.target = target
        self.src = src
        self.dst = dst
        self.fault = WriteFault()
        self.ended = False

    def copy(self) -> str:
        """Copy the bytes; what is wrong where the memory has gone meanwhile."""
        source, target = self.source, self.target
        for side, regions, rows in (("source", source._regions, self.src), ("target", target._regions, self.dst)):
            problem = regions.problem(rows)
            if problem:
                return f"{side}: {problem}"
        copies = [
            (src, dst, length) for (src, length, _), (dst, _, _) in zip(self.src.tolist(), self.dst.tolist(), strict=True)
        ]
        for src, dst, length in self._spoiled(copies):
            ctypes.memmove(dst, src, length)
        if self.fault.spoil == "flip" and copies:
            _, dst, length = copies[len(copies) // 2]
            ctypes.c_uint8.from_address(dst + length // 2).value ^= 0x10
        return ""

    def _spoiled(self, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Without the second half of the last row, or with it written where the first half of the first one belongs."""
        if self.fault.spoil not in ("drop", "misplace") or not rows or rows[-1][2] < 2:
            return rows
        src, dst, length = rows[-1]
        half = length // 2
        rows = [*rows[:-1], (src, dst, half)]
        if self.fault.spoil == "misplace":
            rows.append((src + half, rows[0][1], min(half, rows[0][2])))
        return rows


class _Regions:
    """Registered ranges, merged where they touch or overlap, and the check of descriptors against them."""

    def __init__(self) -> None:
        self._ranges: list[Region] = []
        self._tables: dict[int, tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]] = {}

    def add(self, regions: Sequence[Region]) -> None:
        self._ranges += regions
        by_device: dict[int, list[tuple[int, int]]] = {}
        for region in sorted(self._ranges, key=lambda region: region.address):
            known = by_device.setdefault(region.device_id, [])
            end = region.address + region.length
            if known and region.address <= known[-1][1]:
                known[-1] = (known[-1][0], max(known[-1][1], end))
            else:
                known.append((region.address, end))
        self._tables = {
            device: (np.array([lo for lo, _ in known], np.uint64), np.array([hi - lo for lo, hi in known], np.uint64))
            for device, known in by_device.items()
        }

    def clear(self) -> None:
        self._ranges.clear()
        self._tables.clear()

    def problem(self, rows: Descriptors) -> str:
        """What is wrong with descriptors; empty when each lies inside one registered region."""
        for device in np.unique(rows[:, 2]).tolist():
            mine = rows[rows[:, 2] == device]
            if device not in self._tables:
                return f"no memory of device {device} is registered"
            starts, lengths = self._tables[device]
            found = np.searchsorted(starts, mine[:, 0], side="right").astype(np.int64) - 1
            region = np.maximum(found, 0)
            offset = mine[:, 0] - starts[region]
            bad = (
                (found < 0)
                | (mine[:, 1] > lengths[region])
                | (offset > lengths[region] - np.minimum(mine[:, 1], lengths[region]))
            )
            if bad.any():
                address, length, _ = mine[int(np.flatnonzero(bad)[0])].tolist()
                return f"[{address:#x}, +{length}) lies outside the registered memory"
        return ""


class LoopbackFabric:
    """The wire between the loopback transports of one process.

    Thread-safe: one lock guards everything in it.

    Args:
        clock: Time in seconds; a fake one makes tests deterministic.
        latency_s: Time from post to completion beyond the transfer itself.
        bytes_per_s: Bandwidth of the link into each target; writes to one target queue behind one another. None: unlimited.
        target_must_poll: Bytes land only when the *target* polls or calls ``progress``, as with NIXL.
        detects_peer_loss: Writes to a dropped peer fail by themselves; False: they stay in flight.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        target_must_poll: bool = False,
        detects_peer_loss: bool = True,
    ) -> None:
        if latency_s < 0 or (bytes_per_s is not None and bytes_per_s <= 0):
            raise ConfigError("a loopback link needs a latency of at least 0 and a bandwidth above 0")
        self.clock = clock
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.capabilities = TransportCapabilities(
            target_must_poll=target_must_poll,
            detects_peer_loss=detects_peer_loss,
            failures_are_final=True,
            retry_window_s=0.0,
            in_process_only=True,
        )
        self.id = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._transports: dict[AgentName, LoopbackTransport] = {}
        self._dropped: set[AgentName] = set()
        self._rule: FaultRule | None = None
        self._serial = itertools.count()
        self._order = itertools.count()
        self._link_free: dict[AgentName, float] = {}
        self._due: list[tuple[float, int, _Write]] = []

    def transport(
        self, agent_name: str, *, latency_s: float | None = None, bytes_per_s: float | None = None
    ) -> LoopbackTransport:
        """Make an endpoint. **Owner** any thread.

        Raises:
            ConfigError: the name is taken.
        """
        return LoopbackTransport(agent_name, self, latency_s=latency_s, bytes_per_s=bytes_per_s)

    def set_faults(self, rule: FaultRule | None) -> None:
        """Install a rule that breaks writes; None removes it. **Owner** any thread."""
        with self._lock:
            self._rule = rule

    def drop_peer(self, name: AgentName) -> None:
        """A process dies without a word: nothing more reaches its memory, and nothing that it had posted lands anywhere.

        Posts to it raise, and writes in flight fail, if ``detects_peer_loss``; else both stay in flight for ever.
        """
        with self._lock:
            self._dropped.add(name)
            self._settle()

    def next_due(self) -> float | None:
        """When, on the fabric's clock, the next write can land; None when none will. For simulations."""
        with self._lock:
            return self._due[0][0] if self._due and self._due[0][0] != _NEVER else None

    # What follows is called by transports, with the lock held.

    def _post(self, write: _Write, latency_s: float, bytes_per_s: float | None) -> None:
        num_bytes = int(write.src[:, 1].sum()) if len(write.src) else 0
        target = write.target.agent_name
        posting = Posting(write.source.agent_name, target, write.token, num_bytes, next(self._serial))
        fault = (self._rule(posting) if self._rule is not None else None) or WriteFault()
        if fault.fail_post:
            raise TransportError(fault.fail_post)
        write.fault = fault
        now = self.clock()
        start = max(now, self._link_free.get(target, now))
        carried = start + (num_bytes / bytes_per_s if bytes_per_s else 0.0)
        self._link_free[target] = carried
        lost = target in self._dropped
        due = _NEVER if fault.never or lost else carried + latency_s + fault.delay_s
        write.source._in_flight[write.token] = write
        heapq.heappush(self._due, (due, next(self._order), write))

    def _advance(self, poller: LoopbackTransport) -> None:
        """Land what is due."""
        now = self.clock()
        blocked: list[tuple[float, int, _Write]] = []
        while self._due and self._due[0][0] <= now:
            entry = heapq.heappop(self._due)
            write = entry[2]
            if self.capabilities.target_must_poll and write.target is not poller:
                blocked.append(entry)
            else:
                self._land(write, entry[0])
        for entry in blocked:
            heapq.heappush(self._due, entry)

    def _land(self, write: _Write, due: float) -> None:
        fault = write.fault
        if write.ended:  # the late copy of one that has ended, or one that was recalled
            if fault.late_copy_s is not None and not self._gone(write):
                write.copy()
            return
        if fault.fail:
            if fault.copy_anyway:
                write.copy()
            self._end(write, WriteStatus.FAILED, fault.fail)
        else:
            problem = write.copy()
            self._end(write, WriteStatus.FAILED if problem else WriteStatus.DONE, problem)
        if fault.late_copy_s is not None:
            heapq.heappush(self._due, (due + fault.late_copy_s, next(self._order), write))

    def _end(self, write: _Write, status: WriteStatus, error: str) -> None:
        write.ended = True
        if write.source._in_flight.get(write.token) is write:
            write.source._finished.append(Completion(write.token, status, error))
            # Counts as in flight until poll() has returned it.

    def _gone(self, write: _Write) -> bool:
        ends = (write.source, write.target)
        return any(end._closed or end.agent_name in self._dropped for end in ends)

    def _recall(self, concerned: Callable[[_Write], bool], error: str, *, report: bool) -> None:
        """Take writes back for certain: not a byte of them lands any more."""
        keep: list[tuple[float, int, _Write]] = []
        for entry in self._due:
            write = entry[2]
            if not concerned(write):
                keep.append(entry)
            elif report and not write.ended:
                self._end(write, WriteStatus.FAILED, error)
            elif not report:
                keep.append((_NEVER, entry[1], write))
        heapq.heapify(keep)
        self._due = keep

    def _settle(self) -> None:
        """After peers were dropped."""
        dead = self._dropped
        self._recall(lambda w: w.source.agent_name in dead, "this process is dead", report=True)
        self._recall(lambda w: w.target.agent_name in dead, "the peer has gone", report=self.capabilities.detects_peer_loss)


class LoopbackTransport:
    """An endpoint of a :class:`LoopbackFabric`; satisfies :class:`kvpush.core.transport.Transport`.

    Args:
        agent_name: Unique in the fabric.
        fabric: The wire.
        latency_s: Of the writes that it posts; the fabric's by default.
        bytes_per_s: Likewise.

    Raises:
        ConfigError: the name is taken.
    """

    def __init__(
        self, agent_name: str, fabric: LoopbackFabric, *, latency_s: float | None = None, bytes_per_s: float | None = None
    ) -> None:
        self._name = AgentName(agent_name)
        self._fabric = fabric
        self._latency_s = fabric.latency_s if latency_s is None else latency_s
        self._bytes_per_s = fabric.bytes_per_s if bytes_per_s is None else bytes_per_s
        self._regions = _Regions()
        self._peers: dict[AgentName, LoopbackTransport] = {}
        self._in_flight: dict[int, _Write] = {}
        self._finished: list[Completion] = []
        self._closed = False
        with fabric._lock:
            if self._name in fabric._transports:
                raise ConfigError(f"a loopback endpoint named {agent_name!r} exists already in this process")
            fabric._transports[self._name] = self

    @property
    def name(self) -> str:
        return TRANSPORT_NAME

    @property
    def agent_name(self) -> AgentName:
        return self._name

    @property
    def capabilities(self) -> TransportCapabilities:
        return self._fabric.capabilities

    def register_memory(self, regions: Sequence[Region]) -> None:
        """Register host memory of this process.

        Raises:
            MemoryRegistrationError: not host memory, address 0, no length, or too late (a peer is known already).
        """
        with self._fabric._lock:
            if self._closed or self._peers:
                raise MemoryRegistrationError(
                    "memory has to be registered before the first peer is added, on an open transport"
                )
            for region in regions:
                if region.kind is not MemoryKind.HOST or region.address <= 0 or region.length <= 0:
                    raise MemoryRegistrationError(
                        f"loopback takes host memory with an address and a length only, not {region.kind} "
                        f"[{region.address:#x}, +{region.length})"
                    )
            self._regions.add(list(regions))

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode((TRANSPORT_NAME, self._fabric.id, self._name))

    def add_peer(self, metadata: bytes) -> AgentName:
        """Make a peer of the same fabric known.

        Raises:
            TransportError: broken metadata, another process or fabric, or an endpoint that has gone.
        """
        try:
            kind, fabric_id, name = msgspec.msgpack.decode(metadata, type=tuple[str, str, str])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise TransportError(f"the peer's loopback metadata is broken: {exc}") from exc
        if kind != TRANSPORT_NAME:
            raise TransportError(f"the peer's metadata is of transport {kind[:64]!r}, not {TRANSPORT_NAME}")
        if fabric_id != self._fabric.id:
            raise TransportError(
                f"the peer {name[:64]!r} lives in another process: loopback joins endpoints of one process only"
            )
        with self._fabric._lock:
            peer = self._fabric._transports.get(AgentName(name))
            if self._closed or peer is None or peer._name in self._fabric._dropped:
                raise TransportError(f"the peer {name[:64]!r} can't be reached: it or this endpoint is closed")
            self._peers[peer._name] = peer
            return peer._name

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer and recall the writes in flight to it: none of their bytes lands any more."""
        with self._fabric._lock:
            if self._peers.pop(peer, None) is not None:
                self._fabric._recall(
                    lambda write: write.source is self and write.target._name == peer, "the peer was removed", report=True
                )

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        """Post a write. Copies the arrays.

        Raises:
            TransportError: unknown or lost peer, token in flight, rows that don't pair, or memory that isn't registered.
        """
        with self._fabric._lock:
            target = self._peers.get(peer)
            if self._closed or target is None:
                raise TransportError(f"no peer {peer!r} is known here")
            if token in self._in_flight:
                raise TransportError(f"write {token} is in flight already")
            if target._closed or (peer in self._fabric._dropped and self.capabilities.detects_peer_loss):
                raise TransportError(f"the peer {peer!r} has gone")
            if src.ndim != 2 or src.shape != dst.shape or src.shape[1] != 3 or not np.array_equal(src[:, 1], dst[:, 1]):
                raise TransportError(f"source rows {src.shape} and target rows {dst.shape} don't pair, or differ in length")
            write = _Write(token, self, target, src.astype(np.uint64), dst.astype(np.uint64))
            for side, regions, rows in (("source", self._regions, write.src), ("target", target._regions, write.dst)):
                problem = regions.problem(rows)
                if problem:
                    raise TransportError(f"{side} {problem}")
            self._fabric._post(write, self._latency_s, self._bytes_per_s)

    def poll(self) -> list[Completion]:
        with self._fabric._lock:
            if not self._closed:
                self._fabric._advance(self)
            done, self._finished = self._finished, []
            for completion in done:
                del self._in_flight[completion.token]
            return done

    def progress(self) -> None:
        with self._fabric._lock:
            if not self._closed:
                self._fabric._advance(self)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def close(self) -> None:
        """Leave the fabric. Writes in flight from here are recalled, those to here fail. Idempotent."""
        with self._fabric._lock:
            if self._closed:
                return
            self._closed = True
            self._fabric._recall(lambda write: self in (write.source, write.target), "the endpoint was closed", report=True)
            self._in_flight.clear()
            self._finished.clear()
            self._peers.clear()
            self._regions.clear()
            del self._fabric._transports[self._name]


_default: list[LoopbackFabric] = []
_default_lock = threading.Lock()


def default_fabric() -> LoopbackFabric:
    """The fabric that loopback backends of this process share when they are given no other."""
    with _default_lock:
        if not _default:
            _default.append(LoopbackFabric())
        return _default[0]


class LoopbackBackend(HostBackend):
    """Working half of the ``loopback`` backend: see :class:`kvpush.backends._host_layout.HostBackend`."""


class LoopbackPlugin:
    """Light half of the ``loopback`` backend.

    Args:
        fabric: The wire for all that it creates; :func:`default_fabric` by default.
    """

    def __init__(self, fabric: LoopbackFabric | None = None) -> None:
        self._fabric = fabric

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            name="loopback",
            api_version=BACKEND_API_VERSION,
            device_types=("cpu",),
            transports=(TRANSPORT_NAME,),
            capabilities=frozenset({Capability.IN_PROCESS, Capability.LAYER_FENCE, Capability.DIGEST, Capability.STAGING}),
            summary="Host memory inside one process, with fault injection: tests, embedding and demos",
            priority=-10,
        )

    def probe(self) -> Probe:
        """Always ok."""
        return Probe(ok=True, details={"transport": "in-process"})

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Make the working half.

        Args:
            agent_name: Unique in the process.
            options: ``latency_s`` and ``bytes_per_s``, numbers, for the writes that it posts.

        Raises:
            ConfigError: an unknown or wrong option, or the name is taken.
        """
        known = ("latency_s", "bytes_per_s")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"backend loopback has no option {', '.join(unknown)}: it knows {', '.join(known)}")
        numbers: dict[str, float] = {}
        for key, value in options.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _NEVER:
                raise ConfigError(f"backend option {key} must be a number of at least 0, not {value!r}")
            numbers[key] = float(value)
        if numbers.get("bytes_per_s") == 0:
            raise ConfigError("backend option bytes_per_s must be above 0; leave it away for no limit")
        fabric = self._fabric or default_fabric()
        return LoopbackBackend(self.info, fabric.transport(agent_name, **numbers))


@hookimpl
def kvpush_backend() -> LoopbackPlugin:
    """The plugin of this module."""
    return LoopbackPlugin()
