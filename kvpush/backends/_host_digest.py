# SPDX-License-Identifier: Apache-2.0
"""Digests of cache blocks in host memory: what was sent and what arrived, compared layer by layer.

XXH3 with 128 bits. It finds faults (a flipped bit, a block that went elsewhere, a write that never landed although its
completion says so), at memory speed. It is no cryptographic hash: whoever can choose the bytes can choose a collision.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvpush.core.ids import BlockTable
from kvpush.core.layout import LayerLayout, Plane
from kvpush.errors import BackendError

SCHEME = "xxh3-128:slabs"
"""Per layer: XXH3-128 over its planes by content name, of each the slabs of the blocks in token order, as they lie."""

INLINE_BYTES = 256 << 10
INLINE_LAYERS = 8
"""Less than this is hashed by the caller, in about 100 microseconds: handing it to a thread and back takes longer."""
CLOSE_S = 5.0
"""How long :meth:`HostDigester.close` waits for the layer that is being hashed."""
_RUN_BYTES = 128 << 10
"""Stretches of at least this are hashed where they lie; xxhash lets go of the GIL above 64 KiB. Shorter ones are gathered
first: hashed one by one they would hold the engine thread up, a few microseconds thousands of times."""
_GATHER_BYTES = 1 << 20

LayerDigest = Callable[[LayerLayout, npt.NDArray[np.int64], npt.NDArray[np.uint8]], bytes]
"""Digest of some blocks of a layer: see :func:`digest_layer`."""


class HostDigest:
    """A digest that is being computed; satisfies :class:`kvpush.backends.base.RunningDigest`.

    Args:
        layers: As laid out in this process.
        blocks: Per group, block ids in token order.
        keepalive: Whatever owns the memory; held until the digest has ended.
        digest: How a layer is read; :func:`digest_layer` by default.
    """

    def __init__(
        self,
        layers: Sequence[LayerLayout],
        blocks: BlockTable,
        keepalive: object,
        digest: LayerDigest | None = None,
    ) -> None:
        self._digest = digest or digest_layer
        self._layers = layers
        self._ids = [np.asarray(ids, np.int64) for ids in blocks]
        self._keepalive = keepalive
        self._found: list[bytes] = []
        self._done = False
        self._error: BackendError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(layer.block_bytes * len(self._ids[layer.group]) for layer in self._layers)

    def poll(self) -> tuple[bytes, ...] | None:
        """The digests, one per layer; None while it runs. Never blocks.

        Raises:
            BackendError: it can't be computed.
        """
        if not self._done:
            return None
        if self._error is not None:
            raise self._error
        return tuple(self._found)

    def advance(self, scratch: npt.NDArray[np.uint8]) -> bool:
        """Hash one more layer. Whether there is more to do. Never raises."""
        try:
            if len(self._found) < len(self._layers):
                layer = self._layers[len(self._found)]
                self._found.append(self._digest(layer, self._ids[layer.group], scratch))
            if len(self._found) < len(self._layers):
                return True
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this digest's, not the thread's
            self.fail(error if isinstance(error, BackendError) else BackendError(f"{type(error).__name__}: {error}"))
            return False
        self._done = True
        self._keepalive = None
        return False

    def fail(self, error: BackendError) -> None:
        """End it without a result."""
        self._error = error
        self._done = True
        self._keepalive = None


class HostDigester:
    """Computes digests on one thread of its own, started with the first that is worth it.

    Layers of several digests take turns, so that a short prompt does not wait for a long one.

    **Owner** the submitter thread, but for :meth:`close`.

    Args:
        digest: How a layer is read; :func:`digest_layer` by default.
        inline: Small ones may be computed by the caller. False where that could wait for a device.
    """

    def __init__(self, digest: LayerDigest | None = None, *, inline: bool = True) -> None:
        self._digest = digest
        self._inline = inline
        self._jobs: deque[HostDigest] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._scratch = scratch_memory()

    def start(self, layers: Sequence[LayerLayout], blocks: BlockTable, keepalive: object = None) -> HostDigest:
        """Begin a digest; a small one has ended when this returns, if that is allowed.

        Raises:
            BackendError: after :meth:`close`.
        """
        if self._closed:
            raise BackendError("the backend is closed")
        job = HostDigest(layers, blocks, keepalive, self._digest)
        if self._inline and job.num_bytes < INLINE_BYTES and len(layers) <= INLINE_LAYERS:
            while job.advance(self._scratch):
                pass
            return job
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpush-digest", daemon=True)
                self._thread.start()
            self._changed.notify()
        return job

    def _run(self) -> None:
        scratch = scratch_memory()
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._jobs.popleft()
            if job.advance(scratch):
                with self._changed:
                    self._jobs.append(job)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Let the layer that is being hashed end, and forget the rest. Idempotent. **Owner** any thread; blocks for at most
        ``timeout_s``.

        Returns:
            Whether nothing reads the cache any more.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        while self._jobs:
            self._jobs.popleft().fail(BackendError("the backend was closed"))
        return True


def scratch_memory() -> npt.NDArray[np.uint8]:
    """What :func:`digest_layer` gathers into."""
    return np.empty(_GATHER_BYTES, np.uint8)


def digest_layer(layer: LayerLayout, ids: npt.NDArray[np.int64], scratch: npt.NDArray[np.uint8]) -> bytes:
    """16 bytes over some blocks of a layer, as :data:`SCHEME` says.

    Args:
        ids: Block ids in token order, shape ``[n]``.
        scratch: Shape ``[_GATHER_BYTES]``; overwritten.

    Raises:
        BackendError: a block id outside the pool.
    """
    state = xxhash.xxh3_128()
    if not has_blocks(layer, ids):
        return state.digest()
    for plane in sorted(layer.planes, key=lambda plane: plane.content):
        _feed(state, plane, layer.num_blocks, ids, scratch)
    return state.digest()


def has_blocks(layer: LayerLayout, ids: npt.NDArray[np.int64]) -> bool:
    """Whether there are any.

    Raises:
        BackendError: a block id outside the pool.
    """
    if len(ids) == 0:
        return False
    if int(ids.min()) < 0 or int(ids.max()) >= layer.num_blocks:
        raise BackendError(
            f"layer {layer.name!r}: block ids {int(ids.min())}..{int(ids.max())} leave the pool of {layer.num_blocks}"
        )
    return True


def _feed(state: Any, plane: Plane, num_blocks: int, ids: npt.NDArray[np.int64], scratch: npt.NDArray[np.uint8]) -> None:
    slab, stride = plane.block_bytes, plane.block_stride
    length = stride * (num_blocks - 1) + slab
    memory = np.frombuffer(memoryview((ctypes.c_char * length).from_address(plane.base)), np.uint8)
    if slab >= _RUN_BYTES:
        for first in (ids * stride).tolist():
            state.update(memory[first : first + slab])
        return
    if stride == slab:
        breaks = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
        if len(ids) * slab >= _RUN_BYTES * (len(breaks) + 1):
            starts = [0, *breaks.tolist()]
            for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
                first = int(ids[start]) * slab
                state.update(memory[first : first + (stop - start) * slab])
            return
    rows = len(scratch) // slab
    step, odd = divmod(stride, slab)
    for start in range(0, len(ids), rows):
        part = ids[start : start + rows]
        if odd:
            slabs = np.lib.stride_tricks.as_strided(memory, (num_blocks, slab), (stride, 1), writeable=False)
            gathered = slabs[part]
        else:
            # Seen as one array of slabs, other planes' between ours: take() would copy anything that isn't contiguous first.
            # In range as checked; "clip" is what lets it write to `out` without a copy of its own.
            gathered = scratch[: len(part) * slab].reshape(-1, slab)
            np.take(memory.reshape(-1, slab), part * step, axis=0, out=gathered, mode="clip")
        state.update(gathered)
