# SPDX-License-Identifier: Apache-2.0
"""How the bytes of one block of a layer map to another side's: pieces that are contiguous on both.

A layer's ``format`` says where each (K or V, head, token) of a block lies. Where both sides say so, their slabs need not look
alike, and blocks of different sizes are cut into parts of as many tokens as fit in both: every part of a side looks like every
other one, only further into its block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpush.core.layout import LayerLayout
from kvpush.errors import LayoutError

_FORMAT = re.compile(r"(?:([1-9]\d{0,3})x)?([2HN]{0,3})C")
_MOST_ATOMS = 1 << 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a block, or of a part of one, that are contiguous on both sides: which plane, and how far into its slab."""

    src_plane: int
    src_offset: int
    dst_plane: int
    dst_offset: int
    num_bytes: int


class SlabMap(NamedTuple):
    """How a layer's blocks map to another one's.

    Args:
        pieces: Of a whole block; where blocks are cut into parts, of the first one.
        src_steps: How far into its slab each part of a block of the producer's lies, bytes, shape ``[num_parts]``; ``[0]``
            where blocks aren't cut.
        dst_steps: The same for the consumer's, which may have another number of parts.
    """

    pieces: list[Piece]
    src_steps: npt.NDArray[np.int64]
    dst_steps: npt.NDArray[np.int64]


def common_heads(src: LayerLayout, dst: LayerLayout) -> tuple[int, int]:
    """The heads ``[lo, hi)`` that both hold; ``lo >= hi`` where there are none."""
    return max(src.head_lo, dst.head_lo), min(src.head_lo + src.num_heads, dst.head_lo + dst.num_heads)


def shape_of(layer: LayerLayout) -> tuple[object, ...]:
    """Everything of a layer but its name and where it lies: layers that agree in it are mapped alike."""
    planes = tuple((plane.content, plane.block_bytes) for plane in layer.planes)
    return (layer.group, layer.block_tokens, layer.head_lo, layer.num_heads, layer.dtype, layer.format, layer.split, planes)


def even_tokens(layer: LayerLayout) -> int:
    """Tokens of a block whose places are evenly spaced: of a kernel block, where a block has several."""
    match = _FORMAT.fullmatch(layer.format)
    pieces = int(match[1] or 1) if match else 1
    tokens, rest = divmod(layer.block_tokens, pieces)
    return layer.block_tokens if rest else tokens


def map_slabs(src: LayerLayout, dst: LayerLayout, part_tokens: int | None = None) -> SlabMap:
    """How the slabs of two layers map to one another; pieces are in the order of the source's memory.

    Args:
        part_tokens: Cut the blocks of both sides into parts of so many tokens, a divisor of both :func:`even_tokens`. None:
            blocks are mapped whole.

    Raises:
        LayoutError: they don't; names both.
    """
    differences = [
        what
        for what, left, right in (("KV-cache group", src.group, dst.group), ("dtype", src.dtype, dst.dtype))
        if left != right
    ]
    if part_tokens is None and src.block_tokens != dst.block_tokens:
        differences.append("tokens per block")
    slabs = [sorted((p.content, p.block_bytes) for p in layer.planes) for layer in (src, dst)]
    heads = [(layer.head_lo, layer.num_heads) for layer in (src, dst)]
    whole = np.zeros(1, np.int64)
    same = src.format == dst.format and heads[0] == heads[1] and slabs[0] == slabs[1]
    if not differences and part_tokens is None and same:
        targets = {plane.content: idx for idx, plane in enumerate(dst.planes)}
        pieces = [Piece(idx, 0, targets[plane.content], 0, plane.block_bytes) for idx, plane in enumerate(src.planes)]
        return SlabMap(pieces, whole, whole)
    advice = ""
    if not differences:
        from_, to = _Atoms.of(src), _Atoms.of(dst)
        if from_ is not None and to is not None and from_.like(to):
            lo, hi = common_heads(src, dst)
            pieces = _join_atoms(from_.of_heads(lo, hi, part_tokens), to.of_heads(lo, hi, part_tokens))
            if part_tokens is None:
                return SlabMap(pieces, whole, whole)
            return SlabMap(pieces, from_.steps(part_tokens), to.steps(part_tokens))
        differing = {
            "tokens per block": part_tokens is not None,
            "head range": heads[0] != heads[1],
            "format": src.format != dst.format,
            "planes": slabs[0] != slabs[1] and part_tokens is None,
        }
        differences = [what for what, differs in differing.items() if differs]
        opaque = [layer.format for layer, atoms in ((src, from_), (dst, to)) if atoms is None]
        if part_tokens is not None:
            advice = (
                f", and blocks of format {' or '.join(sorted(set(opaque)))} can't be divided by tokens" if opaque else ""
            ) + ": choose the same block size on both sides"
    raise LayoutError(
        f"the caches can't be mapped ({', '.join(differences)} differ{advice}): producer has [{src.describe()}], "
        f"consumer has [{dst.describe()}]"
    )


class _Atoms:
    """Where each (K or V, head, token) of a block lies.

    Args:
        kinds: ``("k", "v")``, or ``("kv",)`` where the two can't be told apart.
        planes: Index of the plane of each kind.
        offsets: Bytes from the beginning of the slab, shape ``[num_kinds, num_heads, block_tokens]``.
        num_bytes: Length of each.
        head_lo: First head.
    """

    def __init__(
        self, kinds: tuple[str, ...], planes: list[int], offsets: npt.NDArray[np.int64], num_bytes: int, head_lo: int
    ) -> None:
        self.kinds, self.planes, self.offsets, self.num_bytes, self.head_lo = kinds, planes, offsets, num_bytes, head_lo

    @classmethod
    def of(cls, layer: LayerLayout) -> _Atoms | None:
        """Read a layer's format; None where it is opaque, or contradicts its numbers."""
        match = _FORMAT.fullmatch(layer.format)
        if match is None or layer.split == "none" or len(set(match[2])) != len(match[2]):
            return None
        pieces, order = int(match[1] or 1), match[2]
        contents = [plane.content for plane in layer.planes]
        kinds: tuple[str, ...]
        if sorted(contents) == ["k", "v"] and "2" not in order:
            kinds, planes = ("k", "v"), [contents.index("k"), contents.index("v")]
        elif contents == ["kv"] and "2" in order:
            kinds, planes = ("k", "v"), [0, 0]
        elif len(contents) == 1 and "2" not in order:
            kinds, planes = (contents[0],), [0]
        else:
            return None
        tokens, rest = divmod(layer.block_tokens, pieces)
        extent = {"2": 2, "H": layer.num_heads, "N": tokens}
        missing = [dim for dim in "HN" if dim not in order and extent[dim] != 1]
        slab = layer.planes[0].block_bytes
        count = pieces * int(np.prod([extent[dim] for dim in order], dtype=object))
        if rest or missing or pieces < 1 or not 0 < count <= _MOST_ATOMS or slab % count:
            return None
        if any(plane.block_bytes != slab for plane in layer.planes):
            return None
        stride, step = {}, slab // count
        for dim in reversed(order):
            stride[dim], step = step, step * extent[dim]
        token = np.arange(layer.block_tokens)
        in_piece = token // tokens * (slab // pieces) + token % tokens * stride.get("N", 0)
        head = np.arange(layer.num_heads) * stride.get("H", 0)
        kind = np.arange(len(kinds)) * stride.get("2", 0)
        offsets = kind[:, None, None] + head[None, :, None] + in_piece[None, None, :]
        return cls(kinds, planes, offsets, slab // count, layer.head_lo)

    def like(self, other: _Atoms) -> bool:
        """Whether both have the same kinds of atoms."""
        return self.kinds == other.kinds and self.num_bytes == other.num_bytes

    def of_heads(self, head_lo: int, head_hi: int, num_tokens: int | None) -> tuple[npt.NDArray[np.int64], int]:
        """Planes and offsets of some heads' first tokens, shape ``[2, n]``, in the order kind, head, token; and each one's
        bytes."""
        offsets = self.offsets[:, head_lo - self.head_lo : head_hi - self.head_lo, :num_tokens]
        planes = np.broadcast_to(np.array(self.planes)[:, None, None], offsets.shape)
        return np.stack([planes.ravel(), offsets.ravel()]), self.num_bytes

    def steps(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """How far from the first token every ``num_tokens``-th one lies: the same for all kinds and heads."""
        steps: npt.NDArray[np.int64] = self.offsets[0, 0, ::num_tokens] - self.offsets[0, 0, 0]
        return steps


def _join_atoms(src: tuple[npt.NDArray[np.int64], int], dst: tuple[npt.NDArray[np.int64], int]) -> list[Piece]:
    """Parallel atoms, in the order of the source's memory, joined where both sides go on."""
    num_bytes = src[1]
    order = np.lexsort((src[0][1], src[0][0]))
    from_, to = src[0][:, order], dst[0][:, order]
    goes_on = (from_[0, 1:] == from_[0, :-1]) & (to[0, 1:] == to[0, :-1])
    goes_on &= (from_[1, 1:] - from_[1, :-1] == num_bytes) & (to[1, 1:] - to[1, :-1] == num_bytes)
    starts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    lengths = np.diff(np.concatenate((starts, [from_.shape[1]]))) * num_bytes
    columns = (from_[0, starts], from_[1, starts], to[0, starts], to[1, starts], lengths)
    return [Piece(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
