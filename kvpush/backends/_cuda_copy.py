# SPDX-License-Identifier: Apache-2.0
"""Copies between GPU memory and pinned host memory, on a stream of their own; and digests of cache blocks by way of them.

By addresses, not tensors: the driver (``libcuda.so.1``) copies between any two that it knows. Nobody waits on the engine's or
the submitter's thread: a copy is begun, and asked whether it has ended. The thread that computes digests waits.

A copy is not ordered with what the engine computes. Who begins one knows that what it reads is final (a device fence has
passed), and that nobody uses what it writes before it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvpush.backends._cuda_device import DeviceContext, EventPool
from kvpush.backends._host_digest import has_blocks
from kvpush.core.layout import LayerLayout, Plane
from kvpush.core.plan import merge_adjacent
from kvpush.core.transport import Descriptors, Region
from kvpush.errors import BackendError

__all__ = ["Driver", "GpuDigest", "HostBuffer", "LibCuda", "RowCopy", "SideStream", "StagingCopies"]

logger = logging.getLogger(__name__)

_LIBCUDA = "libcuda.so.1"
# Source: cuda.h, CU_MEMHOSTALLOC_PORTABLE: pinned for every context of the process.
_PORTABLE = 1
_SCRATCH_BYTES = 4 << 20
_MIN_PAUSE_S, _MAX_PAUSE_S = 20e-6, 500e-6
_COPY_DEADLINE_S, _CLOSE_DEADLINE_S = 30.0, 1.0
_leaked: list[object] = []
"""Memory that a copy may still be writing to: kept for the life of the process."""


class HostBuffer(Protocol):
    """Pinned host memory."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def size(self) -> int:
        """Bytes."""


class Driver(Protocol):
    """What is asked of the CUDA driver. Every call is made with a context current."""

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """Queue a copy on a stream.

        Raises:
            BackendError: it was not queued.
        """

    def pinned(self, num_bytes: int) -> HostBuffer:
        """Fresh pinned memory, given back when the object goes.

        Raises:
            BackendError: there is none.
        """


class _Pinned:
    """Memory of ``cuMemHostAlloc``, given back in the context that it was made in: whichever thread drops it last has another
    or none."""

    def __init__(self, driver: LibCuda, context: ctypes.c_void_p, address: int, num_bytes: int) -> None:
        self._driver = driver
        self._context = context
        self.address = address
        self.size = num_bytes

    def __del__(self) -> None:
        self._driver.free_pinned(self._context, self.address)


class LibCuda:
    """The driver of this process; see :class:`Driver`. torch has loaded and initialised it by then.

    Args:
        name: Of the shared library, as the loader knows it.

    Raises:
        BackendError: it isn't there.
    """

    def __init__(self, name: str = _LIBCUDA) -> None:
        try:
            self._library = ctypes.CDLL(name)
        except OSError as exc:
            raise BackendError(f"{name} can't be loaded ({exc}): install the driver") from exc
        # Source: cuda.h. The names without _ptsz are those of the legacy default stream, which is not used here.
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, size, pointer)
        self._library.cuMemHostAlloc.argtypes = (ctypes.POINTER(pointer), size, ctypes.c_uint)
        self._library.cuMemFreeHost.argtypes = (pointer,)
        # cuda.h makes the two names with _v2 of those without.
        self._library.cuCtxGetCurrent.argtypes = (ctypes.POINTER(pointer),)
        self._library.cuCtxPushCurrent_v2.argtypes = (pointer,)
        self._library.cuCtxPopCurrent_v2.argtypes = (ctypes.POINTER(pointer),)
        self._library.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        status = self._library.cuMemcpyAsync(dst, src, num_bytes, stream)
        if status:
            raise BackendError(f"copying {num_bytes} bytes from {src:#x} to {dst:#x} was refused: {self._name(status)}")

    def pinned(self, num_bytes: int) -> HostBuffer:
        found, context = ctypes.c_void_p(), ctypes.c_void_p()
        status = self._library.cuMemHostAlloc(ctypes.byref(found), num_bytes, _PORTABLE)
        if status or not found.value:
            raise BackendError(f"{num_bytes} bytes of host memory can't be pinned: {self._name(status)}; see 'ulimit -l'")
        self._library.cuCtxGetCurrent(ctypes.byref(context))
        return _Pinned(self, context, found.value, num_bytes)

    def free_pinned(self, context: ctypes.c_void_p, address: int) -> None:
        """Give pinned memory back. Where the context has gone, as at the end of a process, the memory has gone with it."""
        status = self._library.cuCtxPushCurrent_v2(context)
        if not status:
            status = self._library.cuMemFreeHost(address)
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if status:
            logger.debug("kvpush: pinned memory at %#x was not given back: %s", address, self._name(status))

    def _name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(name))
        return name.value.decode(errors="replace") if name.value else f"CUDA error {status}"


class RowCopy:
    """A copy that runs."""

    def __init__(self, pool: EventPool, device_id: int, event: Any, error: str) -> None:
        self._pool = pool
        self._device_id = device_id
        self._event = event
        self._error = error

    @property
    def runs(self) -> bool:
        """Whether nobody has been told yet that it has ended. Asks the device nothing."""
        return self._event is not None

    def done(self) -> bool:
        """Whether all of it has been copied. Never waits.

        Raises:
            BackendError: it has failed; nothing of it goes on.
        """
        if self._event is not None:
            event = self._event
            try:
                if not self._pool.passed(self._device_id, event):
                    return False
            except BackendError as exc:
                self._error = self._error or exc.message
            self._event = None
        if self._error:
            raise BackendError(self._error)
        return True


class SideStream:
    """Copies rows on a stream that nothing else runs on, for one device.

    **Owner** one thread.

    Args:
        module: ``torch.cuda``.
        driver: The driver.
        context: Of the device whose memory is copied.
    """

    def __init__(self, module: Any, driver: Driver, context: DeviceContext) -> None:
        self._module = module
        self._driver = driver
        self._context = context
        self._pool = EventPool(module)
        self._stream: Any = None

    def start(self, src: Descriptors, dst: Descriptors) -> RowCopy:
        """Begin to copy row by row. Costs some microseconds a row; never waits.

        Args:
            src: Shape ``[n, 3]``: address, length, device id.
            dst: Likewise, lengths as in ``src``.

        Raises:
            BackendError: nothing of it was begun, or the device has failed.
        """
        if src.shape != dst.shape or not np.array_equal(src[:, 1], dst[:, 1]):
            raise BackendError(f"rows to copy from {src.shape} and to {dst.shape} don't pair")
        device_id = self._context.device_id
        error = ""
        with self._context.current():
            try:
                if self._stream is None:
                    # Streams of torch come from a pool that is shared; few take those of high priority.
                    self._stream = self._module.Stream(device=device_id, priority=-1)
                handle = int(self._stream.cuda_stream)
            except Exception as exc:
                raise BackendError(f"no stream to copy on: {type(exc).__name__}: {exc}") from exc
            try:
                # Once before anything is queued: torch makes it then, and what could not be watched must not be begun.
                event = self._pool.record(device_id, self._stream)
            except Exception as exc:
                raise BackendError(f"CUDA device {device_id} has failed: {type(exc).__name__}: {exc}") from exc
            try:
                for (source, length, _), target in zip(src.tolist(), dst[:, 0].tolist(), strict=True):
                    if length:
                        self._driver.copy(target, source, length, handle)
            except BackendError as exc:
                error = exc.message  # said when what was queued before it has ended
            try:
                event.record(self._stream)
            except Exception as exc:
                raise BackendError(f"CUDA device {device_id} has failed: {type(exc).__name__}: {exc}") from exc
            return RowCopy(self._pool, device_id, event, error)


class StagingCopies:
    """Pinned host memory for packed blocks, and the copies between it and the GPU's.

    **Owner** one thread.

    Args:
        module: ``torch.cuda``.
        driver: The driver.
        context: Of the device whose memory is copied.
    """

    def __init__(self, module: Any, driver: Driver, context: DeviceContext) -> None:
        self._driver = driver
        self._context = context
        self._side = SideStream(module, driver, context)
        self._memory: list[HostBuffer] = []
        self._running: list[RowCopy] = []

    def region(self, num_bytes: int) -> Region:
        """Fresh memory. Raises :class:`BackendError` where it can't be pinned."""
        with self._context.current():
            memory = self._driver.pinned(num_bytes)
        self._memory.append(memory)
        return Region(memory.address, num_bytes, keepalive=memory)

    def start(self, src: Descriptors, dst: Descriptors) -> RowCopy:
        """As :meth:`SideStream.start`."""
        self._running = [copy for copy in self._running if copy.runs]
        copy = self._side.start(src, dst)
        self._running.append(copy)
        return copy

    def close(self) -> None:
        """Keep the memory for the life of the process if a copy still reads or writes it. Idempotent."""
        for copy in self._running:
            with contextlib.suppress(BackendError):  # it has ended, if badly
                copy.done()
        if any(copy.runs for copy in self._running):
            _leaked.extend(self._memory)
        self._memory.clear()
        self._running.clear()


class GpuDigest:
    """Digests of blocks in GPU memory, the same as :func:`kvpush.backends._host_digest.digest_layer` has of the same content:
    slabs are copied to the host in token order, and hashed there. Waits; for a thread of its own.

    **Owner** one thread, but for :meth:`stop`.

    Args:
        module: ``torch.cuda``.
        driver: The driver.
        context: Of the device whose memory is read.
        scratch_bytes: Pinned host memory to copy to; allocated with the first digest.
    """

    def __init__(self, module: Any, driver: Driver, context: DeviceContext, *, scratch_bytes: int = _SCRATCH_BYTES) -> None:
        self._driver = driver
        self._context = context
        self._side = SideStream(module, driver, context)
        self._scratch_bytes = scratch_bytes
        self._scratch: HostBuffer | None = None
        self._broken = ""
        self._stopped = threading.Event()

    def __call__(self, layer: LayerLayout, ids: npt.NDArray[np.int64], scratch: npt.NDArray[np.uint8]) -> bytes:
        """16 bytes over some blocks of a layer.

        Raises:
            BackendError: a block id outside the pool, or the device has failed.
        """
        del scratch  # the host's, not pinned
        state = xxhash.xxh3_128()
        if has_blocks(layer, ids):
            for plane in sorted(layer.planes, key=lambda plane: plane.content):
                self._feed(state, plane, ids)
        return state.digest()

    def stop(self) -> None:
        """End what runs with the piece that is being copied. **Owner** any thread."""
        self._stopped.set()

    def _feed(self, state: Any, plane: Plane, ids: npt.NDArray[np.int64]) -> None:
        if self._broken:
            raise BackendError(self._broken)
        if self._scratch is None:
            with self._context.current():
                self._scratch = self._driver.pinned(self._scratch_bytes)
        scratch = self._scratch
        memory = np.frombuffer(memoryview((ctypes.c_uint8 * scratch.size).from_address(scratch.address)), np.uint8)
        # A slab that doesn't fit goes in pieces, others as many at once as fit.
        piece = min(plane.block_bytes, scratch.size)
        offsets = np.arange(0, plane.block_bytes, piece, dtype=np.int64)
        starts = (plane.base + ids[:, None] * plane.block_stride + offsets[None, :]).ravel()
        lengths = np.broadcast_to(np.minimum(piece, plane.block_bytes - offsets), (len(ids), len(offsets))).ravel()
        step = scratch.size // piece
        for lo in range(0, len(starts), step):
            length = lengths[lo : lo + step]
            src = np.empty((len(length), 3), np.uint64)
            src[:, 0], src[:, 1], src[:, 2] = starts[lo : lo + step], length, plane.device_id
            dst = src.copy()
            dst[:, 0] = scratch.address + np.concatenate(([0], np.cumsum(length[:-1])))
            self._wait(self._side.start(*merge_adjacent(src, dst)))
            state.update(memory[: int(length.sum())])

    def _wait(self, copy: RowCopy) -> None:
        deadline, pause = time.monotonic() + _COPY_DEADLINE_S, _MIN_PAUSE_S
        while not copy.done():
            now = time.monotonic()
            if self._stopped.is_set():
                deadline = min(deadline, now + _CLOSE_DEADLINE_S)
            if now > deadline:
                self._broken = "the GPU did not copy to the host in time"
                _leaked.append(self._scratch)
                raise BackendError(self._broken)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
        if self._stopped.is_set():
            raise BackendError("the backend was closed")
