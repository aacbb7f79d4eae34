# SPDX-License-Identifier: Apache-2.0
"""How a paged KV cache lies in memory, and which bytes of one side belong to which bytes of another.

Pure arithmetic over NumPy arrays: no device, no transport. A *plane* is the unit::

      base                base + block_stride
       |                   |
       v                   v
       [== block 0 ==].....[== block 1 ==].....[== block 2 ==]
       <-block_bytes->
       <---block_stride--->

A layer has one plane when K and V lie together in a block, two when they lie apart. Two layouts are paired by content
(layer name, head range, plane content), never by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvpush.core.ids import BlockTable, Rect
from kvpush.core.transport import Descriptors
from kvpush.errors import LayoutError

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """One family of equally spaced block slabs.

    Args:
        content: What a slab holds: ``kv``, ``k`` or ``v``.
        base: Address of block 0, bytes.
        block_stride: Distance from one block to the next, bytes; at least ``block_bytes``.
        block_bytes: Length of one slab; contiguous.
        device_id: Device index of the memory.
    """

    content: Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
    base: _U63
    block_stride: _Count
    block_bytes: _Count
    device_id: _Small = 0


class LayerLayout(msgspec.Struct, frozen=True, array_like=True):
    """One layer's part of the cache on one rank.

    Args:
        name: vLLM's ``kv_caches`` key, the same on both sides.
        group: Index of the KV-cache group whose block ids address it.
        num_blocks: Blocks in the pool; ids run from 0.
        block_tokens: Tokens per block.
        head_lo: First KV head held here, counted over the whole model.
        num_heads: KV heads held here.
        dtype: Element type as text, such as ``bfloat16``.
        format: How elements are ordered inside a slab, such as ``HND``; two sides with the same text can be copied
            byte by byte. Opaque formats (CPU's ISA-specific packing) carry the packing's name.
        split: What a slab may be divided by: ``none``, ``head``, ``token``, ``both``.
        planes: Where the slabs lie.
    """

    name: _Text
    group: _Small
    num_blocks: _Count
    block_tokens: _Count
    head_lo: _Small
    num_heads: _Count
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    format: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    split: Literal["none", "head", "token", "both"]
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=8)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(plane.block_bytes for plane in self.planes)

    def describe(self) -> str:
        """One line for people: what must agree between two sides."""
        planes = "+".join(f"{plane.content}:{plane.block_bytes}B" for plane in self.planes)
        return (
            f"{self.name}: group {self.group}, {self.block_tokens} tokens/block, heads "
            f"[{self.head_lo}, {self.head_lo + self.num_heads}), {self.dtype}, {self.format}, split={self.split}, {planes}"
        )


class CacheLayout(msgspec.Struct, frozen=True, array_like=True):
    """The whole cache of one rank.

    Args:
        layers: In forward order. Their positions are the layer indices of everything else in ``core``.
        num_groups: KV-cache groups; each layer's ``group`` is below it.
    """

    layers: Annotated[tuple[LayerLayout, ...], msgspec.Meta(min_length=1, max_length=4096)]
    num_groups: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1

    def check(self) -> None:
        """Refuse a layout that can't be right.

        Raises:
            LayoutError: names the layer and what is wrong with it.
        """
        seen: set[str] = set()
        for layer in self.layers:
            if layer.name in seen:
                raise LayoutError(f"layer {layer.name!r} occurs twice in the cache layout")
            seen.add(layer.name)
            if layer.group >= self.num_groups:
                raise LayoutError(f"layer {layer.name!r} is in group {layer.group} of {self.num_groups}")
            contents = [plane.content for plane in layer.planes]
            if len(set(contents)) != len(contents):
                raise LayoutError(f"layer {layer.name!r} has two planes of the same content: {contents}")
            for plane in layer.planes:
                if plane.base == 0:
                    raise LayoutError(
                        f"layer {layer.name!r} lies at address 0: the device did not give a usable address "
                        "(on Trainium set NEURON_RT_MAP_HBM=1 before the first device tensor)"
                    )
                if plane.block_stride < plane.block_bytes:
                    raise LayoutError(f"layer {layer.name!r}: blocks overlap (stride below their length)")
                if plane.base + plane.block_stride * layer.num_blocks >= 2**63:
                    raise LayoutError(f"layer {layer.name!r}: addresses leave the 63-bit range")
        empty = sorted(set(range(self.num_groups)) - {layer.group for layer in self.layers})
        if empty:
            raise LayoutError(f"KV-cache groups without a layer: {empty} of {self.num_groups}")

    @property
    def total_heads(self) -> int:
        """Upper end of the head range held here, over the whole model."""
        return max(layer.head_lo + layer.num_heads for layer in self.layers)

    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the largest group."""
        per_group = [0] * self.num_groups
        for layer in self.layers:
            per_group[layer.group] += layer.block_bytes
        return max(per_group)


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


def merge_adjacent(src: Descriptors, dst: Descriptors) -> tuple[Descriptors, Descriptors]:
    """Join neighbouring rows that continue each other in memory on both sides. Order is kept.

    Args:
        src: Shape ``[n, 3]``.
        dst: Shape ``[n, 3]``, lengths as in ``src``.
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
    if not joins.any():
        return src, dst
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joins) + 1))
    lengths = np.add.reduceat(src[:, 1], starts)
    merged_src = src[starts]
    merged_dst = dst[starts]
    merged_src[:, 1] = lengths
    merged_dst[:, 1] = lengths
    return merged_src, merged_dst


class _PlanePairs:
    """Paired planes of one group, in the producer's layer order, as columns for vectorised arithmetic.

    Args:
        columns: Shape ``[7, num_planes]``: bases, strides and devices of both sides, and the length.
        joins: Shape ``[num_planes - 1]``: whether a plane's slabs end where the next plane's begin, block by block, on both
            sides. Such planes are one as long as the range has both.
        sparse: Shape ``[num_planes + 1]``: how many planes before each have gaps between their blocks.
    """

    def __init__(
        self, columns: npt.NDArray[np.int64], joins: npt.NDArray[np.bool_] | None, sparse: npt.NDArray[np.int64] | None
    ) -> None:
        self.src_base, self.dst_base, self.src_stride, self.dst_stride, self.src_device, self.dst_device, self.length = columns
        self.columns = columns
        self.joins = joins
        self.sparse = sparse

    @classmethod
    def of(cls, rows: Sequence[tuple[Plane, Plane]]) -> _PlanePairs:
        """All planes of a group."""
        columns = np.array(
            [(s.base, d.base, s.block_stride, d.block_stride, s.device_id, d.device_id, s.block_bytes) for s, d in rows],
            np.int64,
        ).T.copy()
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
                length = np.add.reduceat(columns[6], starts)
                columns = columns[:, starts]
                columns[6] = length
                dense = bool(((columns[2] == length) & (columns[3] == length)).all())
                return _PlanePairs(columns, None, None), dense
        dense = self.sparse is None or bool(self.sparse[lo] == self.sparse[hi])
        return _PlanePairs(columns, None, None), dense


class PairPlan:
    """Which bytes of a producer rank's cache go where in a consumer rank's: made once per pair, used for every write.

    Layers that the other side doesn't hold, and heads that don't overlap, belong to other ranks and are passed over; the
    consumer makes sure that all ranks together cover everything (:meth:`coverage`).

    Args:
        src: The producer's layout.
        dst: The consumer's layout.

    Raises:
        LayoutError: the two can't be mapped; names both sides of the first difference.
    """

    def __init__(self, src: CacheLayout, dst: CacheLayout) -> None:
        src.check()
        dst.check()
        by_name = {layer.name: idx for idx, layer in enumerate(dst.layers)}
        self.src = src
        self.dst = dst
        self.num_layers = len(src.layers)
        self._dst_layer: list[int | None] = []
        rows: dict[int, list[tuple[Plane, Plane]]] = {}
        # Per group, where the planes of each layer begin among the group's: a range of layers is a range of planes.
        self._first_plane: dict[int, list[int]] = {group: [0] for group in sorted({layer.group for layer in src.layers})}
        for layer in src.layers:
            other = by_name.get(layer.name)
            if other is not None and _heads_overlap(layer, dst.layers[other]):
                _check_direct(layer, dst.layers[other])
            else:
                other = None
            self._dst_layer.append(other)
            if other is not None:
                targets = {plane.content: plane for plane in dst.layers[other].planes}
                rows.setdefault(layer.group, []).extend((plane, targets[plane.content]) for plane in layer.planes)
            for group, first in self._first_plane.items():
                first.append(len(rows.get(group, ())))
        self._stretches = self._find_stretches()
        self._planes = {group: _PlanePairs.of(pairs) for group, pairs in rows.items()}
        self._num_blocks = {
            group: tuple(
                min((layer.num_blocks for layer in side.layers if layer.group == group), default=0) for side in (src, dst)
            )
            for group in self._first_plane
        }

    def _find_stretches(self) -> list[tuple[int, int, int, int, int]]:
        """Layers ``[lo, hi)`` whose indices differ by the same offset on the other side, with the same heads."""
        found: list[tuple[int, int, int, int, int]] = []
        for idx, (layer, other) in enumerate(zip(self.src.layers, self._dst_layer, strict=True)):
            if other is None:
                continue
            rest = (other - idx, layer.head_lo, layer.head_lo + layer.num_heads)
            if found and found[-1][1] == idx and found[-1][2:] == rest:
                found[-1] = (found[-1][0], idx + 1, *rest)
            else:
                found.append((idx, idx + 1, *rest))
        return found

    def descriptors(
        self, layer_lo: int, layer_hi: int, src_blocks: BlockTable, dst_blocks: BlockTable
    ) -> tuple[Descriptors, Descriptors]:
        """The copy of some blocks of some layers as parallel descriptor arrays, coalesced where both sides allow it.

        Args:
            layer_lo: First layer, producer's index.
            layer_hi: One past the last.
            src_blocks: Producer's block ids per group, each of shape ``[n_g]``.
            dst_blocks: Consumer's, of the same shapes.

        Returns:
            Source and destination arrays of the same number of rows and the same lengths.

        Raises:
            LayoutError: a block id is out of its pool, or the shapes differ.
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
            self._check_ids(group, src_ids, dst_ids)
            if len(src_ids) == 0:
                continue
            planes, dense = all_planes.part(lo, hi)
            if dense:
                starts, lengths = runs(src_ids, dst_ids)
                src, dst = _expand(planes, src_ids[starts], dst_ids[starts], lengths)
                if _planes_touch(src, dst, len(starts)):
                    src, dst = merge_adjacent(src, dst)
            else:
                src, dst = merge_adjacent(*_expand(planes, src_ids, dst_ids, None))
            parts_src.append(src)
            parts_dst.append(dst)
        if not parts_src:
            empty = np.zeros((0, 3), np.uint64)
            return empty, empty.copy()
        if len(parts_src) == 1:
            return parts_src[0], parts_dst[0]
        return np.concatenate(parts_src), np.concatenate(parts_dst)

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
        """Bytes of one block over these layers (of the group with the most)."""
        per_group: dict[int, int] = {}
        for layer, other in zip(self.src.layers[layer_lo:layer_hi], self._dst_layer[layer_lo:layer_hi], strict=True):
            if other is None:
                continue
            per_group[layer.group] = per_group.get(layer.group, 0) + layer.block_bytes
        return max(per_group.values(), default=0)

    def _check_ids(self, group: int, src_ids: npt.NDArray[np.int64], dst_ids: npt.NDArray[np.int64]) -> None:
        if src_ids.shape != dst_ids.shape:
            raise LayoutError(f"group {group}: {len(src_ids)} source blocks against {len(dst_ids)} destination blocks")
        if len(src_ids) == 0:
            return
        for side, ids, limit in zip(("source", "destination"), (src_ids, dst_ids), self._num_blocks[group], strict=True):
            # Seen as unsigned, a negative id is a huge one.
            if ids.view(np.uint64).max() >= limit:
                low, high = int(ids.min()), int(ids.max())
                raise LayoutError(f"group {group}: {side} block ids {low}..{high} leave the pool of {limit} blocks")


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


def _planes_touch(src: Descriptors, dst: Descriptors, num_runs: int) -> bool:
    """Whether a plane's last run may continue in the next plane's first: the only way in which maximal runs still join."""
    last, following = slice(num_runs - 1, -1, num_runs), slice(num_runs, None, num_runs)
    return bool(((src[last, 0] + src[last, 1] == src[following, 0]) & (dst[last, 0] + dst[last, 1] == dst[following, 0])).any())


def _heads_overlap(src: LayerLayout, dst: LayerLayout) -> bool:
    return src.head_lo < dst.head_lo + dst.num_heads and dst.head_lo < src.head_lo + src.num_heads


def _check_direct(src: LayerLayout, dst: LayerLayout) -> None:
    """Refuse a pair of layers that can't be copied slab by slab."""
    differences = [
        what
        for what, left, right in (
            ("KV-cache group", src.group, dst.group),
            ("tokens per block", src.block_tokens, dst.block_tokens),
            ("head range", (src.head_lo, src.num_heads), (dst.head_lo, dst.num_heads)),
            ("dtype", src.dtype, dst.dtype),
            ("format", src.format, dst.format),
            (
                "planes",
                sorted((p.content, p.block_bytes) for p in src.planes),
                sorted((p.content, p.block_bytes) for p in dst.planes),
            ),
        )
        if left != right
    ]
    if differences:
        raise LayoutError(
            f"the caches can't be mapped ({', '.join(differences)} differ): producer has [{src.describe()}], "
            f"consumer has [{dst.describe()}]"
        )


def covered_volume(rects: Iterable[Rect]) -> int:
    """Number of distinct (layer, head, token) entries in a union of rectangles. Exact, overlaps counted once.

    Cost grows with the cube of the number of distinct boundaries, which is small: one rectangle per contiguous piece.
    """
    solid = [rect for rect in rects if rect.volume]
    if not solid:
        return 0
    if len(solid) == 1:
        return solid[0].volume
    layers, heads, tokens = (np.unique(np.array([(rect[axis], rect[axis + 1]) for rect in solid])) for axis in (0, 2, 4))
    grid = np.zeros((len(layers) - 1, len(heads) - 1, len(tokens) - 1), bool)
    for rect in solid:
        l0, l1 = np.searchsorted(layers, (rect.layer_lo, rect.layer_hi))
        h0, h1 = np.searchsorted(heads, (rect.head_lo, rect.head_hi))
        t0, t1 = np.searchsorted(tokens, (rect.token_lo, rect.token_hi))
        grid[l0:l1, h0:h1, t0:t1] = True
    sizes = np.diff(layers)[:, None, None] * np.diff(heads)[None, :, None] * np.diff(tokens)[None, None, :]
    return int(sizes[grid].sum())


def merge_rects(rects: list[Rect], new: Rect) -> None:
    """Add a rectangle, joining it to ones that it continues along one axis, so that lists stay short. In place."""
    joined = True
    while joined:
        joined = False
        for idx, rect in enumerate(rects):
            union = _join(rect, new)
            if union is not None:
                del rects[idx]
                new = union
                joined = True
                break
    rects.append(new)


def _join(a: Rect, b: Rect) -> Rect | None:
    """The union where two boxes differ along one axis only and touch there; None otherwise."""
    differing = [axis for axis in (0, 2, 4) if a[axis : axis + 2] != b[axis : axis + 2]]
    if len(differing) > 1:
        return None
    if not differing:
        return a
    axis = differing[0]
    if a[axis + 1] < b[axis] or b[axis + 1] < a[axis]:
        return None
    values = list(a)
    values[axis] = min(a[axis], b[axis])
    values[axis + 1] = max(a[axis + 1], b[axis + 1])
    return Rect(*values)


def blocks_for_tokens(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold this many tokens, the last one perhaps partly."""
    return -(-num_tokens // block_tokens)


def common_block_tokens(layout: CacheLayout) -> int:
    """Tokens per block of a cache in which every layer has the same.

    Raises:
        LayoutError: layers differ.
    """
    sizes = {layer.block_tokens for layer in layout.layers}
    if len(sizes) != 1:
        raise LayoutError(f"layers with different block sizes ({sorted(sizes)} tokens) can't be transferred yet")
    return sizes.pop()
