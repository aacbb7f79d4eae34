# SPDX-License-Identifier: Apache-2.0
"""Staged writes between the two ends: blocks are packed into a slot, written as one row, and unpacked where they have arrived.

As the submitters do it (:mod:`kvpush.core.staged_writes`), without sessions, leases or messages that get lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvpush.backends.base import Backend, Capability, RunningCopy
from kvpush.core.ids import BlockTable
from kvpush.core.layout import CacheLayout
from kvpush.core.staging import SLOT_BYTES, SLOTS_PER_SESSION, Frames, Packer, StagingArea, Unpacker
from kvpush.core.transport import Descriptors

__all__ = ["Incoming", "Outgoing", "area_of", "expectation"]

_LAYERS = (0, 1)


def area_of(backend: Backend) -> StagingArea | None:
    """Slots of an end, registered; None where the backend doesn't stage. Before its metadata is asked for."""
    if Capability.STAGING not in backend.info.capabilities:
        return None
    region = backend.staging_region(SLOT_BYTES * SLOTS_PER_SESSION)
    backend.transport.register_memory([region])
    return StagingArea(region.address, region.device_id, SLOT_BYTES, SLOTS_PER_SESSION)


class Incoming:
    """The target's part.

    Args:
        backend: Its working half.
        area: Its slots.
    """

    def __init__(self, backend: Backend, area: StagingArea) -> None:
        self._backend = backend
        self.area = area
        self._unpacker: Unpacker | None = None
        self._blocks = np.empty(0, np.int32)
        self._running: dict[int, RunningCopy] = {}

    def expect(self, layout: Mapping[str, Any], blocks: list[int]) -> None:
        """From now on slots hold these blocks of such a cache, in this order."""
        self._unpacker = Unpacker(msgspec.convert(layout, CacheLayout))
        self._blocks = np.array(blocks, np.int32)

    def unpack(self, slot: int, lo: int, hi: int) -> None:
        """Begin: a slot has the blocks ``lo`` to ``hi`` of the order."""
        assert self._unpacker is not None
        rows = self._unpacker.rows(*_LAYERS, (self._blocks[lo:hi],), self.area, slot)
        self._running[slot] = self._backend.start_copy(*rows)

    def ended(self) -> list[int]:
        """Slots that have become free since the last call."""
        found = [slot for slot, copy in self._running.items() if copy.done()]
        for slot in found:
            del self._running[slot]
        return found


class Outgoing:
    """The source's part: one batch of blocks after another.

    Args:
        backend: The source's working half.
        mine: Its slots.
        theirs: The target's.
        src: The source's cache.
        dst: The target's.
        blocks: Ids at the source, in the order that the target expects.
    """

    def __init__(
        self, backend: Backend, mine: StagingArea, theirs: StagingArea, src: CacheLayout, dst: CacheLayout, blocks: BlockTable
    ) -> None:
        self._backend = backend
        self._mine = mine
        self._theirs = theirs
        frames = Frames(dst)
        self._frame_bytes = frames.frame_bytes(*_LAYERS)
        self._packer = Packer(src, frames)
        (self._blocks,) = blocks

    def run(
        self,
        post: Callable[[int, Descriptors, Descriptors], None],
        arrived: Callable[[], list[int]],
        unpack: Callable[[int, int, int], None],
        unpacked: Callable[[], list[int]],
        limit: float,
    ) -> None:
        """Send all blocks once, through as many slots at a time as there are.

        Args:
            post: Posts the write of a slot.
            arrived: Slots whose write has ended since the last call.
            unpack: Tells the target to unpack a slot, and which part of the blocks it holds.
            unpacked: Slots that the target is done with since the last call.
            limit: When to give up, on the clock of :func:`time.monotonic`.

        Raises:
            TimeoutError: it is not over by then.
        """
        step = self._mine.slot_bytes // self._frame_bytes
        free = list(range(self._mine.num_slots))
        packing: dict[int, RunningCopy] = {}
        held: dict[int, tuple[int, int]] = {}
        at = 0
        while at < len(self._blocks) or held:
            if free and at < len(self._blocks):
                slot, hi = free.pop(), min(at + step, len(self._blocks))
                rows = self._packer.rows(_LAYERS, _LAYERS, (self._blocks[at:hi],), self._mine, slot)
                packing[slot] = self._backend.start_copy(*rows)
                held[slot] = at, hi
                at = hi
            for slot in [slot for slot, copy in packing.items() if copy.done()]:
                del packing[slot]
                lo, hi = held[slot]
                post(slot, self._row(self._mine, slot, hi - lo), self._row(self._theirs, slot, hi - lo))
            for slot in arrived():
                unpack(slot, *held[slot])
            for slot in unpacked():
                del held[slot]
                free.append(slot)
            if time.monotonic() > limit:
                raise TimeoutError(f"{len(held)} slots were not over in time")

    def _row(self, area: StagingArea, slot: int, num_frames: int) -> Descriptors:
        return np.array([(area.slot(slot), num_frames * self._frame_bytes, area.device_id)], np.uint64)


def expectation(dst: CacheLayout, blocks: npt.NDArray[np.int32]) -> dict[str, Any]:
    """What :meth:`Incoming.expect` is told, as it goes to another process."""
    return {"layout": msgspec.to_builtins(dst), "blocks": blocks.tolist()}
