# SPDX-License-Identifier: Apache-2.0
"""The NIXL transport. The only file that imports nixl, and only inside functions.

Facts that it rests on, measured with nixl 1.5.1 (UCX backend, no progress thread, two processes on one Linux host of two
cores) unless a source is named:

* **GIL.** ``transfer()``, ``check_xfer_state()`` and ``get_new_notifs()`` run without it: a counting thread kept its pace
  through calls of 50 ms to 2 s.
* **Posting can block the caller.** Over shared memory (CMA) the copy happens *inside* ``transfer()``: 128 MiB took 27 ms. Over
  TCP a post of one run returns in 2 to 30 ms, but 16,384 runs of 4 KiB in one post took 0.4 to 2 s. Post in bounded pieces.
* **Descriptors.** ``initialize_xfer`` costs about 100 us and 0.15 us a row; ``make_prepped_xfer`` on prepared lists 27 us and
  0.04 us a row. Posting costs more than both (3 us a row and up), so prepared lists aren't worth their bookkeeping.
* **The target has to poll** for a TCP write to end, and for the first write to a peer over any transport (wire-up: 7 to 120 ms,
  down to 1 to 3 ms when both sides have polled between ``add_peer`` and the write). CMA writes after that land by themselves.
* **``get_new_notifs()`` runs until nothing more has come in** (NIXL, src/plugins/ucx/ucx_backend.cpp, ``getNotifs``): under a
  TCP write of 256 MiB on one host single calls took 30 to 110 ms, once 2 s. On a network slower than the CPU it returns sooner.
* **DONE** means flushed to the target, not only that the source may be reused (same file, ``sendXferRange``: the requests are
  followed by a flush of every connection).
* **``release()`` of a write in flight succeeds** and returns in 10 us over TCP, though nothing has been recalled. So a handle
  is released only after DONE or an error, never earlier.
* **``add_remote_agent`` opens the TCP connection and waits for it**: 3 s for an address that nobody answers, and as long as the
  kernel retries for one that drops packets. ``UCX_TCP_CONN_NB=y``, set here, makes it return in 7 ms; the first write then
  ends with an error. ``make_connection`` adds nothing. Neither needs the target to poll.
* **A target killed with SIGKILL**, error handling ``peer``: writes in flight over TCP raise ``nixlRemoteDisconnectError`` from
  ``check_xfer_state`` within milliseconds, CMA writes likewise at the next post. ``UCX_TLS=posix,self`` with ``none``: they
  stay in PROC for ever. So mode ``none`` doesn't detect peer loss; :meth:`NixlTransport.remove_peer` still ends them.
* **``remove_remote_agent`` with writes in flight** makes their status raise ``nixlNotFoundError`` at once, after which release
  works and the peer can be added again. What had left already may still land.
* **Error handling ``peer``** can't be had when ``UCX_TLS`` allows shared memory only (no endpoint is made: "no peer failure
  handler"); with it unset, or with ``tcp`` among it, it works, and CMA still carries the bytes on one host (4.5 to 5.3 GB/s
  against 2.4 GB/s at best over TCP alone). So ``UCX_TLS`` is best left unset.
* **Bytes of a writer that has gone wait in the target's socket** (TCP) for as long as the target doesn't poll, and land with
  its next poll, whatever is in that memory by then: 1 MiB of a writer that was killed, and of one that had removed the peer.
  One call of ``get_new_notifs()`` takes them all in. So a consumer polls until its blocks are safe.
* **TCP delivers late.** A write posted as the network became a black hole landed 13 s later when that lasted 12.7 s, and 27 s
  later when it lasted 14.5 s (the kernel's pauses between retries double), even with the peer removed after 3 s: closing a
  socket leaves what is in it to be sent. ``UCX_TCP_USER_TIMEOUT``, set here below ``retry_window_s``, makes the kernel drop
  it: the same write then FAILED in time and nothing landed. What remains is a link that is alive and crawls: a full send
  buffer drains at its rate.
* **Deregistering doesn't protect the target**: a write to memory that the target had deregistered was DONE, over TCP and over
  CMA. Only fences do. Rows outside what the peer *announced* are refused by ``initialize_xfer``.
* **Garbage metadata** can crash the process: of 5,400 corruptions nearly all raised, a few were taken, two died of SIGSEGV in
  ``add_remote_agent``; and after a failed load the same name may be refused for good. So metadata travels with a digest here,
  and bytes broken on the way never reach NIXL. A digest is no signature: a *hostile* peer can still crash the process. Only
  trusted instances may reach the control port.
* **``import nixl``** imports torch when a CPU build of it is installed (to ask it for CUDA, nixl_meta_utils.py): 1 to 7 s. The
  wheels behind it import in 0.2 to 0.5 s.
* ``register_memory`` takes any address without looking at it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvpush import _host
from kvpush.backends._data_path import PathWatch, SeenPath
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

__all__ = ["NixlReader", "NixlTransport", "import_problem"]

logger = logging.getLogger(__name__)

_MAGIC = b"KVPNIXL1"
_DIGEST_BYTES = 16
_MAX_NAME_CHARS = 512
_MEMORY_TYPES = {MemoryKind.HOST: "DRAM", MemoryKind.DEVICE: "VRAM"}
_SHARED_MEMORY_TLS = frozenset({"sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "self", "loopback"})
_DEVICE_TLS = frozenset({"cuda", "cuda_copy", "cuda_ipc", "gdr_copy"})
"""Reach device memory, and no other host: they go with shared memory, and make nothing else of it."""
_ENVIRONMENT = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error", "UCX_TCP_CONN_NB": "y"}
_USER_TIMEOUT = "UCX_TCP_USER_TIMEOUT"
_USER_TIMEOUT_SHARE = 0.8
"""Of the retry window: what TCP has not delivered by then is dropped, with room for the kernel's timers."""
_UNITS_S = {"m": 60.0, "s": 1.0, "": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_environment_lock = threading.Lock()
_leaked: list[object] = []
"""What was in flight when its transport closed: kept for the life of the process rather than freed under the transport."""


class _Announcement(NamedTuple):
    """What a peer tells of itself, beside NIXL's own metadata."""

    transport: str
    agent_name: str
    kind: MemoryKind
    nixl: bytes
    host: tuple[tuple[int, int], ...] = ()
    """Ranges of host memory (address, length) beside that of ``kind``, if that is the device's."""


def import_problem() -> str:
    """Why nixl can't be imported here; empty when it can. Loads its shared libraries, starts no thread."""
    try:
        _nixl_api()
    except (ImportError, OSError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def _nixl_api() -> Any:
    """The module ``nixl._api``, without importing torch just to learn that it has no CUDA."""
    torch = _host.distribution_version("torch")
    if "nixl" not in sys.modules and "torch" not in sys.modules and (torch is None or "+cpu" in torch):
        for wheel in ("nixl_cu13", "nixl_cu12"):  # the order in which nixl itself looks when there is no CUDA
            try:
                return importlib.import_module(f"{wheel}._api")
            except ModuleNotFoundError:
                continue
    return importlib.import_module("nixl._api")


def shared_memory_only(ucx_tls: str | None) -> bool:
    """Whether a value of ``UCX_TLS`` allows nothing but shared memory on one host."""
    names = [name.strip() for name in (ucx_tls or "").split(",") if name.strip()]
    return (
        bool(names)
        and not names[0].startswith("^")
        and any(name in _SHARED_MEMORY_TLS for name in names)
        and all(name in _SHARED_MEMORY_TLS | _DEVICE_TLS for name in names)
    )


def user_timeout_problem(text: str | None, retry_window_s: float) -> str:
    """What is wrong with a value of ``UCX_TCP_USER_TIMEOUT`` that a user has set; empty when nothing is.

    UCX takes ``<number>[m|s|ms|us|ns]``, ``inf`` or ``auto`` (its own help); the last two and 0 leave it to the kernel, which
    tries for a quarter of an hour.
    """
    if text is None or retry_window_s <= 0:
        return ""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)(m|s|ms|us|ns|)", text.strip())
    if found is None and text.strip() not in ("inf", "auto"):
        return ""  # UCX itself complains of it
    seconds = float(found[1]) * _UNITS_S[found[2]] if found is not None else 0.0
    if 0 < seconds <= retry_window_s:
        return ""
    return (
        f"{_USER_TIMEOUT}={text} is longer than retry_window_s ({retry_window_s:g} s): what TCP delivers after that may land "
        f"in blocks that were given away meanwhile. Unset it, set it to {_USER_TIMEOUT_SHARE * retry_window_s:g}s, or set the "
        "backend option retry_window_s to more"
    )


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the user hasn't set, for as long as NIXL and UCX read them."""
    with _environment_lock:
        added = [key for key in values if key not in os.environ]
        os.environ.update({key: values[key] for key in added})
        try:
            yield
        finally:
            for key in added:
                os.environ.pop(key, None)


class NixlTransport:
    """Writes through a NIXL agent; satisfies :class:`kvpush.core.transport.Transport`.

    **Owner** one thread for everything after construction (the agent has no lock).

    Args:
        agent_name: Unique per process start.
        backend: NIXL backend: ``UCX`` or ``LIBFABRIC``.
        ucx_tls: For UCX: ``UCX_TLS``, such as ``tcp,self``, unless the user's environment has it. None: UCX chooses.
        ucx_net_devices: Likewise ``UCX_NET_DEVICES``, such as ``eth0``.
        ucx_error_handling_mode: ``peer`` or ``none``. None: ``none`` when only shared memory is allowed, else ``peer``.
        retry_window_s: How long what was posted may still be under way after its lease (:class:`TransportCapabilities`).
        environment: More variables that NIXL's backend reads as it is made, set unless the user has set them.

    Raises:
        TransportError: nixl is missing or the agent can't be made; says what to do.
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        agent_name: str,
        *,
        backend: str = "UCX",
        ucx_tls: str | None = None,
        ucx_net_devices: str | None = None,
        ucx_error_handling_mode: str | None = None,
        retry_window_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if ucx_error_handling_mode not in (None, "peer", "none"):
            raise ConfigError(f"ucx_error_handling_mode must be 'peer' or 'none', not {ucx_error_handling_mode!r}")
        if not 1 <= len(agent_name) <= _MAX_NAME_CHARS:
            raise ConfigError(f"a transport's agent name has 1 to {_MAX_NAME_CHARS} characters")
        self._backend = backend
        self._agent_name = AgentName(agent_name)
        self._closed = False
        self._keepalive: list[object] = []
        self._regions: list[Region] = []
        self._registered: list[Any] = []
        self._kind = MemoryKind.HOST
        self._host: tuple[tuple[int, int], ...] = ()
        self._metadata: bytes | None = None
        self._peers: dict[AgentName, _Announcement] = {}
        self._handles: dict[int, tuple[AgentName, Any]] = {}
        self._finished: dict[int, Completion] = {}
        self._unreleased: list[Any] = []
        self._path_watch = PathWatch()

        variables = {**_ENVIRONMENT, **(environment or {})}
        if retry_window_s > 0:
            variables[_USER_TIMEOUT] = f"{max(1, round(1000 * _USER_TIMEOUT_SHARE * retry_window_s))}ms"
        if ucx_tls:
            variables["UCX_TLS"] = ucx_tls
        if ucx_net_devices:
            variables["UCX_NET_DEVICES"] = ucx_net_devices
        with _environment(variables):
            tls = os.environ.get("UCX_TLS")
            problem = user_timeout_problem(os.environ.get(_USER_TIMEOUT), retry_window_s)
            if backend == "UCX" and problem and not shared_memory_only(tls):
                logger.warning("kvpush: %s", problem)
            params: dict[str, str] = {}
            mode = "peer"
            if backend == "UCX":
                mode = ucx_error_handling_mode or ("none" if shared_memory_only(tls) else "peer")
                params["ucx_error_handling_mode"] = mode
            try:
                api = _nixl_api()
            except (ImportError, OSError) as exc:
                raise TransportError(f"nixl can't be imported ({exc}): pip install 'kvpush[nixl]'") from exc
            with _translated(f"no NIXL agent with backend {backend} (UCX_TLS={tls or 'unset'}, error handling {mode})"):
                self._agent: Any = api.nixl_agent(agent_name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
                self._agent.create_backend(backend, params)
        self._capabilities = TransportCapabilities(
            target_must_poll=True,
            detects_peer_loss=mode == "peer",
            retry_window_s=retry_window_s,
        )

    @property
    def name(self) -> str:
        return f"nixl-{self._backend.lower()}"

    @property
    def agent_name(self) -> AgentName:
        return self._agent_name

    @property
    def capabilities(self) -> TransportCapabilities:
        return self._capabilities

    def register_memory(self, regions: Sequence[Region]) -> None:
        """Register regions; those that overlap are registered as one, and host ranges that only touch. Host and device memory
        may be registered beside each other, and a write takes either on each side: their addresses differ.

        Raises:
            MemoryRegistrationError: which region, and why.
        """
        if self._closed or self._peers or self._metadata is not None:
            raise MemoryRegistrationError("memory has to be registered before the metadata is handed out, on an open transport")
        for region in regions:
            if region.address <= 0 or region.length <= 0:
                raise MemoryRegistrationError(f"region [{region.address:#x}, +{region.length}) has no address or no length")
        for kind in MemoryKind:
            self._register(kind, [region for region in regions if region.kind is kind])
        of_host = [region for region in self._regions if region.kind is MemoryKind.HOST]
        if len(of_host) < len(self._regions):
            self._kind = MemoryKind.DEVICE
            self._host = tuple((address, length) for address, length, _ in merged_ranges(of_host))

    def _register(self, kind: MemoryKind, regions: Sequence[Region]) -> None:
        if not regions:
            return
        rows = [(address, length, device, "") for address, length, device in merged_ranges(regions)]
        try:
            with _translated("NIXL refused the memory"):
                self._registered.append(self._agent.register_memory(rows, _MEMORY_TYPES[kind], backends=[self._backend]))
        except TransportError as exc:
            total = sum(region.length for region in regions)
            raise MemoryRegistrationError(
                f"NIXL refused to register {len(rows)} regions of {kind} memory, {total} bytes: {exc.__cause__}. "
                "With RDMA, 'ulimit -l' (RLIMIT_MEMLOCK) must allow as much; device memory needs peer-memory support"
            ) from exc
        self._regions += regions
        self._keepalive += [region.keepalive for region in regions]

    def metadata(self) -> bytes:
        """NIXL's metadata of this agent with a name, the memory kind and a digest around it."""
        self._check_open()
        if self._metadata is None:
            with _translated("NIXL gave no metadata"):
                blob = self._agent.get_agent_metadata()
            body = msgspec.msgpack.encode(_Announcement(self.name, self._agent_name, self._kind, bytes(blob), self._host))
            self._metadata = _MAGIC + _digest(body) + body
        return self._metadata

    def add_peer(self, metadata: bytes) -> AgentName:
        """Make a peer known. Opens the connection without waiting for it; the first write needs the peer to poll.

        Raises:
            TransportError: broken metadata, another transport, a name that is taken by another peer, or NIXL refuses.
        """
        self._check_open()
        peer = _parse(metadata)
        name = AgentName(peer.agent_name)
        if peer.transport != self.name:
            raise TransportError(f"the peer uses transport {peer.transport[:64]!r}, this side {self.name!r}")
        known = self._peers.get(name)
        if known is not None:
            if known == peer:
                return name
            raise TransportError(f"a peer named {name!r} is known already, with other metadata: agent names must be unique")
        try:
            with _translated(f"NIXL can't connect to {name!r}"):
                loaded = self._agent.add_remote_agent(peer.nixl)
        except TransportError:
            with contextlib.suppress(TransportError), _translated("cleaning up"):
                self._agent.remove_remote_agent(name)
            raise
        loaded = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if loaded != name:
            if loaded not in self._peers:
                with contextlib.suppress(TransportError), _translated("cleaning up"):
                    self._agent.remove_remote_agent(loaded)
            raise TransportError(f"the peer calls itself {name!r}, its NIXL metadata {loaded[:64]!r}")
        self._peers[name] = peer
        return name

    def remove_peer(self, peer: AgentName) -> None:
        """Forget a peer and close the connection. Writes in flight to it end as FAILED; bytes that have left may still land."""
        if self._closed or self._peers.pop(peer, None) is None:
            return
        self._collect()  # what was done before must not count as failed
        with contextlib.suppress(TransportError), _translated("removing a peer"):
            self._agent.remove_remote_agent(peer)
        for token in [token for token, (of, _) in self._handles.items() if of == peer]:
            self._end(token, WriteStatus.FAILED, "the peer was removed")
        self._path_watch.forget(peer)

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        """Post a write. Copies the arrays. Over shared memory this call does the copying (see the module's facts).

        Raises:
            TransportError: unknown peer, token in flight, rows that don't pair, or memory that isn't registered.
        """
        self._check_open()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"no peer {peer!r} is known here")
        if token in self._handles or token in self._finished:
            raise TransportError(f"write {token} is in flight already")
        if src.ndim != 2 or src.shape != dst.shape or src.shape[1] != 3 or not np.array_equal(src[:, 1], dst[:, 1]):
            raise TransportError(f"source rows {src.shape} and target rows {dst.shape} don't pair, or differ in length")
        if not src[:, 1].all():
            keep = src[:, 1] > 0
            src, dst = src[keep], dst[keep]
        if len(src) == 0:
            self._finished[token] = Completion(token, WriteStatus.DONE)
            return
        agent = self._agent
        here, there = _kind_of(src, self._kind, self._host), _kind_of(dst, known.kind, known.host)
        with _translated(f"NIXL refused a write of {len(src)} rows to {peer!r}"):
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(np.ascontiguousarray(src, np.uint64), _MEMORY_TYPES[here]),
                agent.get_xfer_descs(np.ascontiguousarray(dst, np.uint64), _MEMORY_TYPES[there]),
                peer,
                backends=[self._backend],
            )
        self._path_watch.posting(peer, int(src[:, 1].sum()), alone=not self._handles)
        self._handles[token] = (peer, handle)
        # From here on part of it may have left: an error is a completion, not an exception.
        try:
            with _translated("the post failed"):
                state = agent.transfer(handle)
        except TransportError as exc:
            self._end(token, WriteStatus.FAILED, exc.message)
            return
        self._settle(token, state)

    def poll(self) -> list[Completion]:
        if self._closed:
            return []
        self._collect()
        done = list(self._finished.values())
        self._finished.clear()
        return done

    def progress(self) -> None:
        """Let incoming writes land and connections be made. Drops notifications: kvpush sends none."""
        if not self._closed:
            with contextlib.suppress(TransportError), _translated("no progress"):
                self._agent.get_new_notifs()

    @property
    def num_in_flight(self) -> int:
        return len(self._handles) + len(self._finished)

    def close(self) -> None:
        """Deregister and release everything, or keep it all for the life of the process if a write is still in flight.

        The target's memory can't be protected from a peer that still writes (see the module's facts): fence first.
        Idempotent.
        """
        if self._closed:
            return
        self._collect()
        self._closed = True
        self._finished.clear()
        if self._handles or self._unreleased:
            _leaked.append((self._agent, self._handles, self._unreleased, self._registered, self._keepalive))
        else:
            for peer in self._peers:
                with contextlib.suppress(TransportError), _translated("removing a peer"):
                    self._agent.remove_remote_agent(peer)
            for registered in self._registered:
                with contextlib.suppress(TransportError), _translated("deregistering"):
                    self._agent.deregister_memory(registered, backends=[self._backend])
        self._agent = None
        self._handles = {}
        self._unreleased = []
        self._registered = []
        self._keepalive = []
        self._peers.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")

    def _collect(self) -> None:
        """Ask the state of every write in flight."""
        if self._unreleased:
            handles, self._unreleased = self._unreleased, []
            for handle in handles:
                self._release(handle)
        for token, (_, handle) in list(self._handles.items()):
            try:
                with _translated("the write failed"):
                    state = self._agent.check_xfer_state(handle)
            except TransportError as exc:
                self._end(token, WriteStatus.FAILED, exc.message)
            else:
                self._settle(token, state)

    def _settle(self, token: int, state: str) -> None:
        if state == "DONE":
            self._end(token, WriteStatus.DONE, "")
        elif state != "PROC":
            self._end(token, WriteStatus.FAILED, f"NIXL reports {state}")

    def _end(self, token: int, status: WriteStatus, error: str) -> None:
        peer, handle = self._handles.pop(token)
        self._finished[token] = Completion(token, status, error)
        known = self._peers.get(peer)
        device = MemoryKind.DEVICE in (self._kind, known.kind if known is not None else self._kind)
        clear = self._path_watch.ended(ok=status is WriteStatus.DONE, idle=not self._handles, device=device)
        if clear is not None:
            self._log_path(clear, handle)
        self._release(handle)

    def _log_path(self, path: SeenPath, handle: Any) -> None:
        """Say once per peer which way its bytes go: what NIXL answers, and what has been seen."""
        try:
            answer = str(self._agent.query_xfer_backend(handle))
        except Exception as exc:  # noqa: BLE001 - whatever nixl raises: it is for the log only
            answer = f"nothing ({type(exc).__name__})"
        logger.info(
            "kvpush: data path to %s: %s (asked: NIXL says backend %s; seen: %s)", path.peer, path.words, answer, path.seen
        )

    def _release(self, handle: Any) -> None:
        try:
            with _translated("release"):
                handle.release()
        except TransportError:
            self._unreleased.append(handle)  # tried again with every poll; never dropped, which would free it


class NixlReader:
    """Reads registered memory of *this* process through the network card, by an agent of its own. What is read is thrown away:
    on some devices such a read is what makes earlier writes of that card visible.

    The transport's own agent won't do: NIXL's LIBFABRIC backend calls a transfer of an agent with itself done as soon as it is
    posted (src/plugins/libfabric/libfabric_backend.cpp, ``postXfer``: "Same-agent transfer: adjusted total requests to 0").

    **Owner** one thread for everything after construction; any one, the transport's or another.

    Args:
        agent_name: Unique per process start.
        backend: As for :class:`NixlTransport`.
        kind: What the memory is made of that is to be read.
        environment: As for :class:`NixlTransport`.

    Raises:
        TransportError: nixl is missing or the agent can't be made.
    """

    MAX_BYTES = 64
    """Longest row that :meth:`read` takes."""

    def __init__(
        self, agent_name: str, *, backend: str, kind: MemoryKind, environment: Mapping[str, str] | None = None
    ) -> None:
        self._backend = backend
        self._kind = kind
        self._peer = AgentName("")
        self._running: dict[int, tuple[Any, str]] = {}
        self._unreleased: list[Any] = []
        """Ended badly, or not released: may still be under way."""
        self._scratch = np.zeros(self.MAX_BYTES, np.uint8)
        with _environment({**_ENVIRONMENT, **(environment or {})}):
            try:
                api = _nixl_api()
            except (ImportError, OSError) as exc:
                raise TransportError(f"nixl can't be imported ({exc}): pip install 'kvpush[nixl]'") from exc
            with _translated(f"no second NIXL agent with backend {backend}"):
                self._agent: Any = api.nixl_agent(agent_name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
                self._agent.create_backend(backend, {})
                row = (self._scratch.ctypes.data, self.MAX_BYTES, 0, "")
                self._registered = self._agent.register_memory([row], "DRAM", backends=[backend])

    def attach(self, metadata: bytes) -> None:
        """Connect to the transport whose memory is to be read. Once.

        Args:
            metadata: What its :meth:`NixlTransport.metadata` has given.

        Raises:
            TransportError: broken metadata, or NIXL refuses.
        """
        target = _parse(metadata)
        with _translated("NIXL can't connect this process with itself"):
            self._agent.add_remote_agent(target.nixl)
        self._peer = AgentName(target.agent_name)

    def read(self, rows: Descriptors) -> Callable[[], bool]:
        """Begin to read.

        Args:
            rows: Ranges of the transport's registered memory, each of 1 to :attr:`MAX_BYTES` bytes.

        Returns:
            Whether all have been read. Never blocks; raises :class:`TransportError` when they can't be.

        Raises:
            TransportError: not begun: not attached, closed, or memory that isn't registered.
        """
        if self._agent is None or not self._peer:
            raise TransportError("the reader is closed, or not attached yet")
        agent = self._agent
        into = np.empty_like(rows, np.uint64)
        into[:, 0], into[:, 1], into[:, 2] = self._scratch.ctypes.data, rows[:, 1], 0
        with _translated(f"NIXL refused to read {len(rows)} rows back"):
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(into, "DRAM"),
                agent.get_xfer_descs(np.ascontiguousarray(rows, np.uint64), _MEMORY_TYPES[self._kind]),
                self._peer,
                backends=[self._backend],
            )
        try:
            with _translated("reading back failed"):
                self._running[id(handle)] = (handle, agent.transfer(handle))
        except TransportError:
            self._unreleased.append(handle)
            raise
        return lambda: self._done(handle)

    def _done(self, handle: Any) -> bool:
        if id(handle) not in self._running:
            return True
        _, state = self._running[id(handle)]
        if state == "PROC":
            with _translated("reading back failed"):
                state = self._agent.check_xfer_state(handle)
        if state == "PROC":
            return False
        if state != "DONE":
            raise TransportError(f"reading back failed: NIXL reports {state}")
        del self._running[id(handle)]
        try:
            with _translated("release"):
                handle.release()
        except TransportError:
            self._unreleased.append(handle)
        return True

    def close(self) -> None:
        """Release everything, or keep it all for the life of the process if something is being read still. Idempotent."""
        if self._agent is None:
            return
        if self._running or self._unreleased:
            _leaked.append((self._agent, self._running, self._unreleased, self._registered, self._scratch))
        else:
            if self._peer:
                with contextlib.suppress(TransportError), _translated("removing a peer"):
                    self._agent.remove_remote_agent(self._peer)
            with contextlib.suppress(TransportError), _translated("deregistering"):
                self._agent.deregister_memory(self._registered, backends=[self._backend])
        self._agent = None


def merged_ranges(regions: Sequence[Region]) -> list[tuple[int, int, int]]:
    """Regions as (address, length, device id): what overlaps is joined, host ranges that only touch too. Device ranges that do
    may be two allocations, which the driver doesn't register as one; no descriptor of the core's runs across both."""
    out: list[tuple[int, int, int]] = []
    for region in sorted(set(regions), key=lambda region: (region.device_id, region.address, region.length)):
        if out:
            address, length, device = out[-1]
            end = address + length
            one = region.address < end or (region.kind is MemoryKind.HOST and region.address == end)
            if device == region.device_id and one:
                out[-1] = (address, max(length, region.address + region.length - address), device)
                continue
        out.append((region.address, region.length, region.device_id))
    return out


def _kind_of(rows: Descriptors, kind: MemoryKind, host: Sequence[tuple[int, int]]) -> MemoryKind:
    """What memory rows are of, given a side's kind and its ranges of host memory beside that.

    Raises:
        TransportError: some are of the one, and some of the other.
    """
    if not host:
        return kind
    starts = rows[:, 0]
    of_host = np.zeros(len(rows), bool)
    for address, length in host:
        of_host |= (starts >= np.uint64(address)) & (starts < np.uint64(address + length))
    if of_host.any() and not of_host.all():
        raise TransportError("a write has rows of host memory and of device memory on one side")
    return MemoryKind.HOST if of_host.any() else kind


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _parse(metadata: bytes) -> _Announcement:
    """Check and take apart what :meth:`NixlTransport.metadata` made."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if metadata[: len(_MAGIC)] != _MAGIC or metadata[len(_MAGIC) : start] != _digest(metadata[start:]):
        raise TransportError("the peer's NIXL metadata is broken, or of another version")
    try:
        peer = msgspec.msgpack.decode(metadata[start:], type=_Announcement)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise TransportError(f"the peer's NIXL metadata is broken: {exc}") from exc
    if not 1 <= len(peer.agent_name) <= _MAX_NAME_CHARS:
        raise TransportError(f"the peer's agent name has {len(peer.agent_name)} characters, not 1 to {_MAX_NAME_CHARS}")
    return peer


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn whatever nixl raises into :class:`TransportError`, with the original as ``__cause__``.

    nixl's exceptions share no base below ``Exception``, so anything but ours is taken for one of theirs.
    """
    try:
        yield
    except TransportError:
        raise
    except Exception as exc:
        raise TransportError(f"{what}: {type(exc).__name__} {exc}".rstrip()) from exc
