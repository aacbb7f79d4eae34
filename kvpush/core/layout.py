# SPDX-License-Identifier: Apache-2.0
"""How a paged KV cache lies in memory.

A *plane* is the unit::

      base                base + block_stride
       |                   |
       v                   v
       [== block 0 ==].....[== block 1 ==].....[== block 2 ==]
       <-block_bytes->
       <---block_stride--->

A layer has one plane when K and V lie together in a block, two when they lie apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

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
        format: How elements are ordered inside a slab, from the outermost dimension: letters of ``2`` (K, then V), ``H`` head,
            ``N`` token, ``C`` content of one head and token; ``2xHNC`` is two such pieces side by side, each with half of the
            tokens. Two sides with the same text can be copied byte by byte. Opaque formats (CPU's ISA-specific packing) carry
            the packing's name.
        split: What a slab may be divided by in contiguous parts: ``head``, ``token``, ``both``; ``none`` where it can't be
            divided at all.
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
        for group in range(self.num_groups):
            _check_apart(layer for layer in self.layers if layer.group == group)
        empty = sorted(set(range(self.num_groups)) - {layer.group for layer in self.layers})
        if empty:
            raise LayoutError(f"KV-cache groups without a layer: {empty} of {self.num_groups}")

    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the largest group."""
        per_group = [0] * self.num_groups
        for layer in self.layers:
            per_group[layer.group] += layer.block_bytes
        return max(per_group)


def plane_hull(layer: LayerLayout, plane: Plane) -> tuple[int, int]:
    """The addresses ``[lo, hi)`` from the first block of a plane to its last one."""
    return plane.base, plane.base + plane.block_stride * (layer.num_blocks - 1) + plane.block_bytes


def _check_apart(layers: Iterable[LayerLayout]) -> None:
    """Refuse layers of one group whose memory overlaps: any two of their blocks may be in use at once. Two layers may be one
    and the same memory (vLLM's layers that share a KV cache); and groups may share theirs, as the engine sees to it that a
    block belongs to one of them at a time.

    Raises:
        LayoutError: names two layers.
    """
    known: set[tuple[int, Plane]] = set()
    by_stride: dict[tuple[int, int], list[tuple[LayerLayout, Plane]]] = {}
    hulls: list[tuple[int, int, int, int, str]] = []
    for layer in layers:
        for plane in layer.planes:
            if (layer.num_blocks, plane) in known:
                continue
            known.add((layer.num_blocks, plane))
            by_stride.setdefault((plane.device_id, plane.block_stride), []).append((layer, plane))
            hulls.append((plane.device_id, *plane_hull(layer, plane), plane.block_stride, layer.name))
    for (_, stride), planes in by_stride.items():
        _check_slots(planes, stride)
    # With different strides there is no order in which blocks could keep out of each other's way: not even extents may meet.
    # Of those that have begun, the one that ends last, and the one that does among those of other strides.
    hulls.sort()
    last: tuple[int, int, str] | None = None
    other: tuple[int, int, str] | None = None
    device = -1
    for device_id, lo, hi, stride, name in hulls:
        if device_id != device:
            device, last, other = device_id, None, None
        for end in (last, other):
            if end is not None and end[1] != stride and end[0] > lo:
                raise LayoutError(f"layers {end[2]!r} and {name!r} of one group overlap in memory, with different strides")
        mine = (hi, stride, name)
        if last is None or hi > last[0]:
            last, other = mine, (other if last is None or last[1] == stride else last)
        elif stride != last[1] and (other is None or hi > other[0]):
            other = mine


def _check_slots(planes: list[tuple[LayerLayout, Plane]], stride: int) -> None:
    """The same for planes of one stride. Each is a rectangle: where its blocks begin and end within a stride, and how many
    strides from address 0 they lie. No two rectangles may meet."""
    edges: list[tuple[int, int, int, int, str]] = []
    for layer, plane in planes:
        row, lo = divmod(plane.base, stride)
        hi = lo + plane.block_bytes
        for begin, end, first in ((lo, min(hi, stride), row), (0, hi - stride, row + 1)):
            if begin < end:
                edges.append((begin, 1, first, first + layer.num_blocks, layer.name))
                edges.append((end, 0, first, first + layer.num_blocks, layer.name))
    edges.sort()
    open_: list[tuple[int, int, str]] = []
    for _, opens, first, stop, name in edges:
        at = bisect.bisect_left(open_, (first, stop, name))
        if not opens:
            del open_[at]
            continue
        for neighbour in open_[max(0, at - 1) : at + 1]:
            if neighbour[0] < stop and first < neighbour[1]:
                raise LayoutError(f"layers {neighbour[2]!r} and {name!r} of one group overlap in memory")
        open_.insert(at, (first, stop, name))


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
