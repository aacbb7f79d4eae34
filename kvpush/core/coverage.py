# SPDX-License-Identifier: Apache-2.0
"""Rectangles of (layer, head, token): what a copy covers, and how much a union of them is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvpush.core.ids import Rect


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
