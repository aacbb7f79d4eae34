# SPDX-License-Identifier: Apache-2.0
"""Staging: scattered blocks travel as one run of bytes, and are scattered again where they arrive.

On some transports (TCP is one) a descriptor costs more than its bytes. There the producer packs the blocks of a write into a
*slot* of its own memory, writes that to a slot of the consumer's in one piece, and says so (:class:`~kvpush.core.wire.Staged`).
The consumer unpacks it into the blocks of the request, and says that the slot is free (``Unpacked``). Only then the write has
ended for the producer's machine, so that everything that holds for writes holds for staged ones: leases, fences, commits.

A slot holds *frames*, one per position in the block table; a frame holds the slabs of that block of every layer in a range, in
the consumer's order of layers and planes::

    slot  [frame 0                          ][frame 1                          ] ...
          [layer lo: k][v][layer lo+1: k][v].[layer lo: k][v] ...

Both sides derive the copy from their own layout and this one, by the same arithmetic as any other pair of layouts
(:class:`~kvpush.core.plan.PairPlan`): slabs that look different inside are rearranged on the way into the slot.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvpush.core.ids import BlockTable
from kvpush.core.layout import CacheLayout, Plane
from kvpush.core.plan import PairPlan
from kvpush.core.transport import Descriptors

SLOT_BYTES = 2 << 20
"""Long enough that a descriptor costs nothing beside it, short enough that packing one keeps the submitter for 0.5 ms."""
SLOTS_PER_SESSION = 4
_ORIGIN = 1 << 40
"""Where the slot of a packed layout lies; real addresses are put in its place. Any that the layout accepts would do."""
_ELSEWHERE = 1 << 61
_MOST_FRAMES = 1 << 20
_MOST_PLANS = 64


@dataclass(frozen=True, slots=True)
class StagingArea:
    """Slots side by side in one registered region.

    Args:
        address: First byte of slot 0.
        device_id: Device of the memory.
        slot_bytes: Length of a slot.
        num_slots: How many.
    """

    address: int
    device_id: int
    slot_bytes: int
    num_slots: int

    def slot(self, index: int) -> int:
        """Address of a slot."""
        return self.address + index * self.slot_bytes

    def part(self, index: int, num_slots: int) -> StagingArea:
        """The area's ``index``-th share of ``num_slots`` slots each."""
        return StagingArea(self.slot(index * num_slots), self.device_id, self.slot_bytes, num_slots)


class Frames:
    """The packed form of a consumer's blocks.

    Args:
        layout: The consumer's.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._offsets: list[int] = [0, *itertools.accumulate(layer.block_bytes for layer in layout.layers)]

    def frame_bytes(self, layer_lo: int, layer_hi: int) -> int:
        """Bytes of one block of all layers of a range, whatever their groups."""
        return self._offsets[layer_hi] - self._offsets[layer_lo]

    def packed(self, layer_lo: int, layer_hi: int) -> CacheLayout:
        """The slot as a cache whose block ids are frame numbers. Layers outside of the range lie elsewhere, out of the way:
        the layout names them all the same, so that indices and groups are those of the real one."""
        frame = self.frame_bytes(layer_lo, layer_hi)
        layers = []
        for idx, layer in enumerate(self.layout.layers):
            offset = self._offsets[idx]
            planes = []
            for plane in layer.planes:
                if layer_lo <= idx < layer_hi:
                    at, stride = _ORIGIN + offset - self._offsets[layer_lo], frame
                else:
                    at, stride = _ELSEWHERE + offset * _MOST_FRAMES, plane.block_bytes
                planes.append(Plane(plane.content, at, stride, plane.block_bytes))
                offset += plane.block_bytes
            layers.append(msgspec.structs.replace(layer, num_blocks=_MOST_FRAMES, planes=tuple(planes)))
        return CacheLayout(tuple(layers), self.layout.num_groups)


class Packer:
    """Rows that copy a producer's blocks into a slot.

    Args:
        src: The producer's layout.
        frames: The consumer's.
    """

    def __init__(self, src: CacheLayout, frames: Frames) -> None:
        self._src = src
        self._frames = frames
        self._plans: dict[tuple[int, int], PairPlan] = {}

    def rows(
        self, layers: tuple[int, int], into: tuple[int, int], blocks: BlockTable, area: StagingArea, slot: int
    ) -> tuple[Descriptors, Descriptors]:
        """Source and slot rows of some blocks.

        Args:
            layers: Range of layers, producer's indices.
            into: The same layers in the consumer's.
            blocks: Producer's block ids per group; frame i takes the i-th.
            area: Where the slot is.
            slot: Its index.
        """
        plan = _known(self._plans, into)
        if plan is None:
            plan = self._plans[into] = PairPlan(self._src, self._frames.packed(*into))
        src, dst = plan.descriptors(*layers, blocks, _frame_numbers(blocks))
        return src, _placed(dst, area, slot)


class Unpacker:
    """Rows that copy a slot into a consumer's blocks.

    Args:
        layout: The consumer's.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._frames = Frames(layout)
        self._plans: dict[tuple[int, int], PairPlan] = {}

    def rows(
        self, layer_lo: int, layer_hi: int, blocks: BlockTable, area: StagingArea, slot: int
    ) -> tuple[Descriptors, Descriptors]:
        """Slot and destination rows.

        Args:
            blocks: Block ids per group; the i-th is filled from frame i.
        """
        layers = layer_lo, layer_hi
        plan = _known(self._plans, layers)
        if plan is None:
            # Layers that share their memory have a frame each; that the producer's share theirs, the handshake has seen to.
            plan = self._plans[layers] = PairPlan(self._frames.packed(*layers), self._layout, same_content=True)
        src, dst = plan.descriptors(*layers, _frame_numbers(blocks), blocks)
        return _placed(src, area, slot), dst


class Shares:
    """Which consumer session may write to which share of the staging area.

    Args:
        area: All of it.
        slots_per_share: Slots that a session gets.
    """

    def __init__(self, area: StagingArea, slots_per_share: int) -> None:
        self._area = area
        self._slots = slots_per_share
        self._free_from: dict[int, float] = dict.fromkeys(range(area.num_slots // slots_per_share), float("-inf"))
        """Shares that nobody has, and when nothing can land in them any more."""

    def take(self, now: float) -> tuple[int, StagingArea] | None:
        """A share that nothing writes to; None where there is none."""
        for index, safe_at in self._free_from.items():
            if safe_at <= now:
                del self._free_from[index]
                return index, self._area.part(index, self._slots)
        return None

    def give(self, index: int, safe_at: float) -> None:
        """A session has ended.

        Args:
            safe_at: When its producer can't write any more.
        """
        self._free_from[index] = safe_at

    @property
    def num_free(self) -> int:
        """Shares that nobody has, safe or not."""
        return len(self._free_from)


def _known(plans: dict[tuple[int, int], PairPlan], layers: tuple[int, int]) -> PairPlan | None:
    """A plan that was made before. Ranges of layers repeat; should they not, old plans are forgotten."""
    if len(plans) > _MOST_PLANS and layers not in plans:
        plans.clear()
    return plans.get(layers)


def _frame_numbers(blocks: BlockTable) -> BlockTable:
    numbers: npt.NDArray[np.int32] = np.arange(max((len(ids) for ids in blocks), default=0), dtype=np.int32)
    return tuple(numbers[: len(ids)] for ids in blocks)


def _placed(rows: Descriptors, area: StagingArea, slot: int) -> Descriptors:
    """Rows of a packed layout, in the slot where they really are."""
    moved = rows.astype(np.int64)
    moved[:, 0] += area.slot(slot) - _ORIGIN
    moved[:, 2] = area.device_id
    return moved.astype(np.uint64)
