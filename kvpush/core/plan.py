# SPDX-License-Identifier: Apache-2.0
"""Which bytes of one side's cache belong to which bytes of another's.

Pure arithmetic over NumPy arrays: no device, no transport. Two layouts are paired by content (layer name, head range, K or V,
token), never by position. Where both sides say how the elements of a slab are ordered, slabs need not look alike, nor have the
same number of tokens (:mod:`kvpush.core.slabs`): what is contiguous on both sides is copied in one piece.

No row runs from one registered range of memory into another: planes are joined only where they lie in one for certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvpush.core.ids import BlockTable, Rect
from kvpush.core.layout import CacheLayout, LayerLayout, Plane, blocks_for_tokens, plane_hull
from kvpush.core.slabs import SlabMap, common_heads, even_tokens, map_slabs, shape_of
from kvpush.core.transport import Descriptors
from kvpush.errors import LayoutError

_MOST_PIECES = 1 << 18


def runs(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split two parallel block-id lists into stretches that ascend by one on *both* sides.

    Args:
        first: Block ids, shape ``[n]``.
        second: Block ids, shape ``[n]``.

    Returns:
        Start positions and lengths, both of shape ``[num_runs]``.
    """
    n = len(first)
    if n == 0:
        empty = np.zeros(0, np.int64)
        return empty, empty
    breaks = ((first[1:] - first[:-1] != 1) | (second[1:] - second[:-1] != 1)).nonzero()[0]
    bounds = np.empty(len(breaks) + 2, np.int64)
    bounds[0], bounds[-1] = 0, n
    np.add(breaks, 1, out=bounds[1:-1])
    return bounds[:-1], bounds[1:] - bounds[:-1]


def merge_adjacent(
    src: Descriptors, dst: Descriptors, region: npt.NDArray[np.int64] | None = None
) -> tuple[Descriptors, Descriptors]:
    """Join neighbouring rows that continue each other in memory on both sides. Order is kept.

    Args:
        src: Shape ``[n, 3]``.
        dst: Shape ``[n, 3]``, lengths as in ``src``.
        region: Shape ``[n]``: rows with different numbers are not joined. None: all lie in one region.
    """
    n = len(src)
    if n < 2:
        return src, dst
    joins = (
        (src[:-1, 0] + src[:-1, 1] == src[1:, 0])
        & (dst[:-1, 0] + dst[:-1, 1] == dst[1:, 0])
        & (src[:-1, 2] == src[1:, 2])
        & (dst[:-1, 2] == dst[1:, 2])
    )
    if region is not None:
        joins &= region[:-1] == region[1:]
    if not joins.any():
        return src, dst
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joins) + 1))
    lengths = np.add.reduceat(src[:, 1], starts)
    merged_src = src[starts]
    merged_dst = dst[starts]
    merged_src[:, 1] = lengths
    merged_dst[:, 1] = lengths
    return merged_src, merged_dst


_Row = tuple[int, int, int, int, int, int, int, int]
"""Bases, strides and devices of both sides, region, length: a pair of planes."""


class _PlanePairs:
    """Paired planes of one group, in the producer's layer order, as columns for vectorised arithmetic.

    Args:
        columns: Shape ``[8, num_planes]``: bases, strides and devices of both sides, the region and the length. Planes of one
            region lie in one registered range on each side.
        joins: Shape ``[num_planes - 1]``: whether a plane's slabs end where the next plane's begin, block by block, on both
            sides. Such planes are one as long as the range has both.
        sparse: Shape ``[num_planes + 1]``: how many planes before each have gaps between their blocks.
    """

    def __init__(
        self, columns: npt.NDArray[np.int64], joins: npt.NDArray[np.bool_] | None, sparse: npt.NDArray[np.int64] | None
    ) -> None:
        self.src_base, self.dst_base, self.src_stride, self.dst_stride, self.src_device, self.dst_device = columns[:6]
        self.region, self.length = columns[6:]
        self.columns = columns
        self.joins = joins
        self.sparse = sparse

    @classmethod
    def of(cls, rows: Sequence[_Row]) -> _PlanePairs:
        """All planes of a group."""
        columns = np.array(rows, np.int64).T.copy()
        src_base, dst_base, *same, length = columns
        joins = (src_base[:-1] + length[:-1] == src_base[1:]) & (dst_base[:-1] + length[:-1] == dst_base[1:])
        for column in same:
            joins &= column[:-1] == column[1:]
        gaps = (columns[2] != length) | (columns[3] != length)
        return cls(columns, joins if joins.any() else None, np.concatenate(([0], np.cumsum(gaps))) if gaps.any() else None)

    def part(self, lo: int, hi: int) -> tuple[_PlanePairs, bool]:
        """The planes ``[lo, hi)``, joined ones as one, and whether none of them has gaps between its blocks."""
        columns = self.columns[:, lo:hi]
        if self.joins is not None:
            starts = np.flatnonzero(~self.joins[lo : hi - 1]) + 1
            if len(starts) < hi - lo - 1:
                starts = np.concatenate((np.zeros(1, np.int64), starts))
                length = np.add.reduceat(columns[7], starts)
                columns = columns[:, starts]
                columns[7] = length
                dense = bool(((columns[2] == length) & (columns[3] == length)).all())
                return _PlanePairs(columns, None, None), dense
        dense = self.sparse is None or bool(self.sparse[lo] == self.sparse[hi])
        return _PlanePairs(columns, None, None), dense

    def regions(self) -> npt.NDArray[np.int64] | None:
        """Each plane's region; None where all have the same."""
        return self.region if (self.region != self.region[0]).any() else None


class _Parts:
    """How far into its slab each part of a block lies, for the planes of one group.

    Args:
        maps: Per paired layer, in the planes' order.
    """

    def __init__(self, maps: Sequence[SlabMap]) -> None:
        self.src = np.concatenate([np.broadcast_to(m.src_steps, (len(m.pieces), len(m.src_steps))) for m in maps])
        self.dst = np.concatenate([np.broadcast_to(m.dst_steps, (len(m.pieces), len(m.dst_steps))) for m in maps])


class PairPlan:
    """Which bytes of a producer rank's cache go where in a consumer rank's: made once per pair, used for every write.

    Layers that the other side doesn't hold, and heads that don't overlap, belong to other ranks and are passed over; the
    consumer makes sure that all ranks together cover everything (:meth:`coverage`).

    Args:
        src: The producer's layout.
        dst: The consumer's layout.
        same_content: What goes to layers of ``dst`` that are one place is the same, though it lies apart in ``src``.

    Raises:
        LayoutError: the two can't be mapped; names both sides of the first difference.
    """

    def __init__(self, src: CacheLayout, dst: CacheLayout, *, same_content: bool = False) -> None:
        src.check()
        dst.check()
        by_name = {layer.name: idx for idx, layer in enumerate(dst.layers)}
        self.src = src
        self.dst = dst
        self.num_layers = len(src.layers)
        self._dst_layer: list[int | None] = []
        for layer in src.layers:
            other = by_name.get(layer.name)
            self._dst_layer.append(None if other is None or not _heads_overlap(layer, dst.layers[other]) else other)
        self.parted = False
        """Blocks of the two sides have different numbers of tokens, and are copied in parts."""
        self.unit_tokens = src.layers[0].block_tokens
        """Tokens of what is copied at least: of a block, or, where the sizes differ, of a part that fits in both."""
        self._block_tokens = (self.unit_tokens, self.unit_tokens)
        """Of both sides, where they differ."""
        self._choose_unit()
        if not same_content:
            self._check_shared_memory()
        self._layer_bytes: list[int] = []
        self.way: Literal["direct", "scatter"] = "direct"
        """``direct``: whole slabs, or contiguous parts of them. ``scatter``: slabs differ inside, a block takes more rows."""
        self.alike = not self.parted
        """Blocks are copied whole, and their bytes are in the same order on both sides."""
        regions = _Regions(src), _Regions(dst)
        map_of: dict[tuple[object, ...], SlabMap] = {}
        num_pieces = 0
        rows: dict[int, list[_Row]] = {}
        maps: dict[int, list[SlabMap]] = {}
        # Per group, where the planes of each layer begin among the group's: a range of layers is a range of planes.
        self._first_plane: dict[int, list[int]] = {group: [0] for group in sorted({layer.group for layer in src.layers})}
        for layer, other in zip(src.layers, self._dst_layer, strict=True):
            if other is None:
                self._layer_bytes.append(0)
            else:
                target = dst.layers[other]
                shapes = shape_of(layer), shape_of(target)
                if shapes not in map_of:
                    map_of[shapes] = map_slabs(layer, target, self.unit_tokens if self.parted else None)
                mapped = map_of[shapes]
                num_pieces += len(mapped.pieces) * max(len(mapped.src_steps), len(mapped.dst_steps))
                if num_pieces > _MOST_PIECES:
                    raise LayoutError(
                        f"the caches differ so much inside their blocks that one block of all layers would take more than "
                        f"{_MOST_PIECES} pieces: choose the same KV-cache layout and block size on both sides (producer has "
                        f"[{layer.describe()}], consumer has [{target.describe()}])"
                    )
                rows.setdefault(layer.group, []).extend(_rows_of(layer, target, mapped, regions))
                maps.setdefault(layer.group, []).append(mapped)
                self._layer_bytes.append(sum(piece.num_bytes for piece in mapped.pieces))
                self.alike &= shapes[0] == shapes[1]
                if len(mapped.pieces) > max(len(layer.planes), len(target.planes)):
                    self.way = "scatter"
            for group, first in self._first_plane.items():
                first.append(len(rows.get(group, ())))
        self._stretches = self._find_stretches()
        self._planes = {group: _PlanePairs.of(pairs) for group, pairs in rows.items()}
        self._parts = {group: _Parts(found) for group, found in maps.items()} if self.parted else {}
        self._num_blocks = {
            group: tuple(
                min((layer.num_blocks for layer in side.layers if layer.group == group), default=0) for side in (src, dst)
            )
            for group in self._first_plane
        }

    def _pairs(self) -> list[tuple[LayerLayout, LayerLayout]]:
        found = zip(self.src.layers, self._dst_layer, strict=True)
        return [(layer, self.dst.layers[other]) for layer, other in found if other is not None]

    def _choose_unit(self) -> None:
        pairs = self._pairs()
        uneven = next((pair for pair in pairs if pair[0].block_tokens != pair[1].block_tokens), None)
        if uneven is None:
            return
        sizes = {(layer.block_tokens, other.block_tokens) for layer, other in pairs}
        if len(sizes) > 1:
            raise LayoutError(
                "the caches can't be mapped (tokens per block differ, and not for all layers alike: choose the same block size "
                f"on both sides): producer has [{uneven[0].describe()}], consumer has [{uneven[1].describe()}]"
            )
        self.parted = True
        (self._block_tokens,) = sizes
        self.unit_tokens = math.gcd(*(even_tokens(layer) for pair in pairs for layer in pair))

    def _check_shared_memory(self) -> None:
        """Layers under one address at the consumer must be so at the producer too: it would get the bytes of either."""
        seen: dict[object, LayerLayout] = {}
        for layer, other in self._pairs():
            first = seen.setdefault((other.group, other.planes), layer)
            if first.planes != layer.planes:
                raise LayoutError(
                    f"the caches can't be mapped: the consumer has {first.name} and {layer.name} in one place, the producer "
                    f"hasn't: producer has [{layer.describe()}], consumer has [{other.describe()}]"
                )

    def _find_stretches(self) -> list[tuple[int, int, int, int, int]]:
        """Layers ``[lo, hi)`` whose indices differ by the same offset on the other side, with the same heads."""
        found: list[tuple[int, int, int, int, int]] = []
        for idx, (layer, other) in enumerate(zip(self.src.layers, self._dst_layer, strict=True)):
            if other is None:
                continue
            rest = (other - idx, *common_heads(layer, self.dst.layers[other]))
            if found and found[-1][1] == idx and found[-1][2:] == rest:
                found[-1] = (found[-1][0], idx + 1, *rest)
            else:
                found.append((idx, idx + 1, *rest))
        return found

    def descriptors(
        self,
        layer_lo: int,
        layer_hi: int,
        src_blocks: BlockTable,
        dst_blocks: BlockTable,
        tokens: tuple[int, int] | None = None,
    ) -> tuple[Descriptors, Descriptors]:
        """The copy of some blocks of some layers as parallel descriptor arrays, coalesced where both sides allow it.

        Args:
            layer_lo: First layer, producer's index.
            layer_hi: One past the last.
            src_blocks: Producer's block ids per group, each of shape ``[n_g]``.
            dst_blocks: Consumer's, of the same shapes where block sizes are equal.
            tokens: Needed where block sizes differ: which tokens ``[lo, hi)`` go, ``lo`` a multiple of :attr:`unit_tokens`. The
                tables are of the blocks that hold them. Up to the next multiple of it, what is behind ``hi`` goes too.

        Returns:
            Source and destination arrays of the same number of rows and the same lengths.

        Raises:
            LayoutError: a block id is out of its pool, or the shapes are not as they must be.
        """
        parts_src: list[Descriptors] = []
        parts_dst: list[Descriptors] = []
        for group, all_planes in self._planes.items():
            first = self._first_plane[group]
            lo, hi = first[layer_lo], first[layer_hi]
            if lo == hi:
                continue
            src_ids = np.asarray(src_blocks[group], np.int64)
            dst_ids = np.asarray(dst_blocks[group], np.int64)
            if self.parted:
                src, dst = self._rows_of_parts(group, lo, hi, src_ids, dst_ids, tokens)
                parts_src.append(src)
                parts_dst.append(dst)
                continue
            self._check_ids(group, src_ids, dst_ids)
            if len(src_ids) == 0:
                continue
            planes, dense = all_planes.part(lo, hi)
            if dense:
                starts, lengths = runs(src_ids, dst_ids)
                # Runs are as long as can be: where two planes only touch, they may lie in two regions.
                src, dst = _expand(planes, src_ids[starts], dst_ids[starts], lengths)
            else:
                regions = planes.regions()
                regions = None if regions is None else np.tile(regions, len(src_ids))
                src, dst = merge_adjacent(*_expand(planes, src_ids, dst_ids, None), regions)
            parts_src.append(src)
            parts_dst.append(dst)
        if not parts_src:
            empty = np.zeros((0, 3), np.uint64)
            return empty, empty.copy()
        if len(parts_src) == 1:
            return parts_src[0], parts_dst[0]
        return np.concatenate(parts_src), np.concatenate(parts_dst)

    def _rows_of_parts(
        self,
        group: int,
        lo: int,
        hi: int,
        src_ids: npt.NDArray[np.int64],
        dst_ids: npt.NDArray[np.int64],
        tokens: tuple[int, int] | None,
    ) -> tuple[Descriptors, Descriptors]:
        """The rows for the planes ``[lo, hi)`` where blocks are copied in parts: first one for each plane and part."""
        if tokens is None or tokens[0] % self.unit_tokens or not 0 <= tokens[0] <= tokens[1]:
            raise LayoutError(
                f"blocks of different sizes are copied from a multiple of {self.unit_tokens} tokens, not {tokens}"
            )
        planes, steps = self._planes[group], self._parts[group]
        parts = np.arange(tokens[0] // self.unit_tokens, blocks_for_tokens(tokens[1], self.unit_tokens))
        limits = self._num_blocks[group]
        sides = []
        for name, ids, limit, block_tokens, into, base, stride, device in (
            ("source", src_ids, limits[0], self._block_tokens[0], steps.src, *planes.columns[0:6:2]),
            ("destination", dst_ids, limits[1], self._block_tokens[1], steps.dst, *planes.columns[1:6:2]),
        ):
            first = tokens[0] // block_tokens
            expected = blocks_for_tokens(tokens[1], block_tokens) - first if len(parts) else 0
            if len(ids) != expected:
                raise LayoutError(f"group {group}: {len(ids)} {name} blocks for {expected}")
            _check_pool(group, name, ids, limit)
            per_block = block_tokens // self.unit_tokens
            block, part = np.divmod(parts - first * per_block, per_block)
            rows = np.empty((hi - lo, len(parts), 3), np.int64)
            np.multiply(stride[lo:hi, None], ids[block], out=rows[:, :, 0])
            rows[:, :, 0] += base[lo:hi, None] + into[lo:hi][:, part]
            rows[:, :, 1] = planes.length[lo:hi, None]
            rows[:, :, 2] = device[lo:hi, None]
            sides.append(rows.reshape(-1, 3).view(np.uint64))
        src, dst = sides
        # What continues the other on both sides does so at the source: then it is its neighbour in the order of addresses.
        order = np.argsort(src[:, 0], kind="stable")
        return merge_adjacent(src[order], dst[order], np.repeat(planes.region[lo:hi], len(parts))[order])

    @property
    def mapped_layers(self) -> tuple[int, ...]:
        """The producer's layers that the consumer holds too, in the *consumer's* order."""
        pairs = [(other, idx) for idx, other in enumerate(self._dst_layer) if other is not None]
        return tuple(idx for _, idx in sorted(pairs))

    def whole_layers(self, layer_lo: int, layer_hi: int) -> tuple[int, int] | None:
        """The consumer's indices of some of the producer's layers, where they follow one another there too, and this side fills
        every byte of their blocks; None where it doesn't."""
        if not layer_lo < layer_hi:
            return None
        first = self._dst_layer[layer_lo]
        if first is None:
            return None
        for idx in range(layer_lo, layer_hi):
            other = self._dst_layer[idx]
            if other is None or other - first != idx - layer_lo:
                return None
            if (
                self._layer_bytes[idx] != self.dst.layers[other].block_bytes
                or self.src.layers[idx].block_tokens != self.dst.layers[other].block_tokens
            ):
                return None
        return first, first + layer_hi - layer_lo

    def coverage(self, layer_lo: int, layer_hi: int, token_lo: int, token_hi: int) -> list[Rect]:
        """What such a copy covers, in the consumer's terms (layers by its indices, heads over the model)."""
        rects: list[Rect] = []
        for lo, hi, offset, head_lo, head_hi in self._stretches:
            first, stop = max(lo, layer_lo) + offset, min(hi, layer_hi) + offset
            if first >= stop:
                continue
            last = rects[-1] if rects else None
            if last and last.layer_hi == first and (last.head_lo, last.head_hi) == (head_lo, head_hi):
                rects[-1] = last._replace(layer_hi=stop)
            else:
                rects.append(Rect(first, stop, head_lo, head_hi, token_lo, token_hi))
        return rects

    def bytes_per_block(self, layer_lo: int, layer_hi: int) -> int:
        """Bytes of one block over these layers (of the group with the most); where block sizes differ, of ``unit_tokens``."""
        per_group: dict[int, int] = {}
        for layer, num_bytes in zip(self.src.layers[layer_lo:layer_hi], self._layer_bytes[layer_lo:layer_hi], strict=True):
            per_group[layer.group] = per_group.get(layer.group, 0) + num_bytes
        return max(per_group.values(), default=0)

    def _check_ids(self, group: int, src_ids: npt.NDArray[np.int64], dst_ids: npt.NDArray[np.int64]) -> None:
        if src_ids.shape != dst_ids.shape:
            raise LayoutError(f"group {group}: {len(src_ids)} source blocks against {len(dst_ids)} destination blocks")
        for side, ids, limit in zip(("source", "destination"), (src_ids, dst_ids), self._num_blocks[group], strict=True):
            _check_pool(group, side, ids, limit)


def _check_pool(group: int, side: str, ids: npt.NDArray[np.int64], limit: int) -> None:
    # Seen as unsigned, a negative id is a huge one.
    if len(ids) and ids.view(np.uint64).max() >= limit:
        low, high = int(ids.min()), int(ids.max())
        raise LayoutError(f"group {group}: {side} block ids {low}..{high} leave the pool of {limit} blocks")


class _Regions:
    """Which planes of a cache lie in one registered range for certain: those whose extents overlap. What only touches may be
    two allocations, registered apart.

    Args:
        layout: One side's.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._number: dict[tuple[int, int, int], int] = {}
        end, device, number = 0, -1, -1
        for extent in sorted({_extent(layer, plane) for layer in layout.layers for plane in layer.planes}):
            if extent[0] != device or extent[1] >= end:
                number += 1
            end = max(extent[2], end) if extent[0] == device else extent[2]
            device = extent[0]
            self._number[extent] = number

    def of(self, layer: LayerLayout, plane: Plane) -> int:
        """A plane's region, a number below ``2**15``."""
        return self._number[_extent(layer, plane)]


def _extent(layer: LayerLayout, plane: Plane) -> tuple[int, int, int]:
    return (plane.device_id, *plane_hull(layer, plane))


def _rows_of(src: LayerLayout, dst: LayerLayout, mapped: SlabMap, regions: tuple[_Regions, _Regions]) -> list[_Row]:
    """Each piece as a pair of planes of its own."""
    rows = []
    for piece in mapped.pieces:
        a, b = src.planes[piece.src_plane], dst.planes[piece.dst_plane]
        region = regions[0].of(src, a) << 32 | regions[1].of(dst, b)
        bases = a.base + piece.src_offset, b.base + piece.dst_offset
        rows.append((*bases, a.block_stride, b.block_stride, a.device_id, b.device_id, region, piece.num_bytes))
    return rows


def _expand(
    planes: _PlanePairs,
    src_first: npt.NDArray[np.int64],
    dst_first: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64] | None,
) -> tuple[Descriptors, Descriptors]:
    """Outer product of planes and runs: rows plane by plane, or block by block where no lengths are given."""
    shape = (len(planes.length), len(src_first))
    # Filled in place: temporaries of this size cost more than the arithmetic.
    if lengths is None:
        src, dst = np.empty((shape[1], shape[0], 3), np.int64), np.empty((shape[1], shape[0], 3), np.int64)
        src_view, dst_view = src.transpose(1, 0, 2), dst.transpose(1, 0, 2)
        src_view[:, :, 1] = planes.length[:, None]
    else:
        src_view = src = np.empty((*shape, 3), np.int64)
        dst_view = dst = np.empty((*shape, 3), np.int64)
        np.multiply(planes.length[:, None], lengths, out=src_view[:, :, 1])
    dst_view[:, :, 1] = src_view[:, :, 1]
    for view, base, stride, device, ids in (
        (src_view, planes.src_base, planes.src_stride, planes.src_device, src_first),
        (dst_view, planes.dst_base, planes.dst_stride, planes.dst_device, dst_first),
    ):
        np.multiply(stride[:, None], ids, out=view[:, :, 0])
        view[:, :, 0] += base[:, None]
        view[:, :, 2] = device[:, None]
    return src.reshape(-1, 3).view(np.uint64), dst.reshape(-1, 3).view(np.uint64)


def _heads_overlap(src: LayerLayout, dst: LayerLayout) -> bool:
    lo, hi = common_heads(src, dst)
    return lo < hi
