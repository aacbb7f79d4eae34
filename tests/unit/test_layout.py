# SPDX-License-Identifier: Apache-2.0
"""Layout arithmetic against brute force on byte arrays."""

from __future__ import annotations

import numpy as np
import pytest
from machines import layout

from kvpush.core.ids import Rect
from kvpush.core.layout import (
    CacheLayout,
    LayerLayout,
    PairPlan,
    Plane,
    blocks_for_tokens,
    common_block_tokens,
    covered_volume,
    merge_adjacent,
    merge_rects,
    runs,
)
from kvpush.errors import LayoutError
from kvpush.testing.simulation import toy_layout

NUM_BLOCKS = 12
SIZE = 32


def extent(side: CacheLayout) -> tuple[int, int]:
    low = min(plane.base for layer in side.layers for plane in layer.planes)
    high = max(plane.base + plane.block_stride * layer.num_blocks for layer in side.layers for plane in layer.planes)
    return low, high


def copy_by_descriptors(src: CacheLayout, dst: CacheLayout, layers: tuple[int, int], a: list[int], b: list[int]) -> int:
    """Do the copy on byte arrays, compare with a slab-by-slab reference, and return the number of rows."""
    rng = np.random.default_rng(5)
    src_lo, src_hi = extent(src)
    dst_lo, dst_hi = extent(dst)
    source = rng.integers(0, 256, src_hi - src_lo, np.uint8)
    target = np.zeros(dst_hi - dst_lo, np.uint8)
    expected = target.copy()
    names = {layer.name: layer for layer in dst.layers}
    for layer in src.layers[layers[0] : layers[1]]:
        other = names.get(layer.name)
        if other is None:
            continue
        planes = {plane.content: plane for plane in other.planes}
        for plane in layer.planes:
            for i, j in zip(a, b, strict=True):
                at = plane.base + i * plane.block_stride - src_lo
                to = planes[plane.content].base + j * planes[plane.content].block_stride - dst_lo
                expected[to : to + plane.block_bytes] = source[at : at + plane.block_bytes]
    src_rows, dst_rows = PairPlan(src, dst).descriptors(*layers, (np.array(a, np.int32),), (np.array(b, np.int32),))
    assert src_rows.dtype == dst_rows.dtype == np.uint64
    assert src_rows.shape == dst_rows.shape
    assert (src_rows[:, 1] == dst_rows[:, 1]).all()
    touched = np.zeros(len(target), int)
    for (from_, length, _), (to, _, _) in zip(src_rows.tolist(), dst_rows.tolist(), strict=True):
        target[to - dst_lo : to - dst_lo + length] = source[from_ - src_lo : from_ - src_lo + length]
        touched[to - dst_lo : to - dst_lo + length] += 1
    assert (target == expected).all()
    assert touched.max(initial=0) <= 1, "a byte is written twice"
    return len(src_rows)


@pytest.mark.parametrize("planes", [("kv",), ("k", "v")])
@pytest.mark.parametrize("src_outermost", [False, True], ids=["src-layers", "src-blocks"])
@pytest.mark.parametrize("dst_outermost", [False, True], ids=["dst-layers", "dst-blocks"])
@pytest.mark.parametrize("seed", range(6))
def test_descriptors_copy_exactly_what_is_asked(
    planes: tuple[str, ...], src_outermost: bool, dst_outermost: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    src = toy_layout(range(4), base=1 << 20, num_blocks=NUM_BLOCKS, planes=planes, blocks_outermost=src_outermost)
    dst = toy_layout(range(4), base=1 << 30, num_blocks=NUM_BLOCKS, planes=planes, blocks_outermost=dst_outermost)
    count = int(rng.integers(0, NUM_BLOCKS + 1))
    a = rng.permutation(NUM_BLOCKS)[:count].tolist() if seed % 2 else list(range(count))
    b = rng.permutation(NUM_BLOCKS)[:count].tolist() if seed % 3 else list(range(NUM_BLOCKS - count, NUM_BLOCKS))
    low, high = sorted(rng.integers(0, 5, 2).tolist())
    copy_by_descriptors(src, dst, (low, high), a, b)


def test_layers_outermost_gives_one_row_per_plane_and_run() -> None:
    sides = [toy_layout(range(3), base=base, num_blocks=NUM_BLOCKS) for base in (1 << 20, 1 << 30)]
    assert copy_by_descriptors(*sides, (0, 3), [0, 1, 2, 7, 8], [4, 5, 6, 1, 2]) == 3 * 2 * 2


def test_blocks_outermost_gives_one_row_per_run_where_all_layers_go() -> None:
    sides = [toy_layout(range(3), base=base, num_blocks=NUM_BLOCKS, blocks_outermost=True) for base in (1 << 20, 1 << 30)]
    assert copy_by_descriptors(*sides, (0, 3), [0, 1, 2, 7, 8], [4, 5, 6, 1, 2]) == 2
    assert copy_by_descriptors(*sides, (0, 2), [0, 1, 2, 7, 8], [4, 5, 6, 1, 2]) == 5


def test_layers_are_paired_by_name() -> None:
    src = toy_layout([2, 3], base=1 << 20, num_blocks=NUM_BLOCKS)
    dst = toy_layout([0, 1, 3, 2], base=1 << 30, num_blocks=NUM_BLOCKS)
    copy_by_descriptors(src, dst, (0, 2), [1, 4], [3, 2])
    plan = PairPlan(src, dst)
    assert plan.coverage(0, 2, 4, 9) == [Rect(3, 4, 0, 2, 4, 9), Rect(2, 3, 0, 2, 4, 9)]
    assert PairPlan(toy_layout([9], base=1 << 20, num_blocks=4), dst).coverage(0, 1, 0, 1) == []
    assert plan.bytes_per_block(0, 2) == 2 * 2 * SIZE


def test_coverage_joins_neighbouring_layers() -> None:
    plan = PairPlan(layout(4), layout(4, base=1 << 30))
    assert plan.coverage(1, 4, 0, 8) == [Rect(1, 4, 0, 2, 0, 8)]


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "message"),
    [([1, 2], [1], "2 source blocks against 1"), ([99], [1], "source block ids"), ([1], [-1], "destination block ids")],
)
def test_wrong_block_ids_are_refused(src_ids: list[int], dst_ids: list[int], message: str) -> None:
    plan = PairPlan(layout(), layout(base=1 << 30))
    with pytest.raises(LayoutError, match=message):
        plan.descriptors(0, 3, (np.array(src_ids, np.int32),), (np.array(dst_ids, np.int32),))


def changed(**fields: object) -> CacheLayout:
    import msgspec

    layer = layout(1, base=1 << 30).layers[0]
    return CacheLayout((msgspec.structs.replace(layer, **fields),))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (changed(dtype="bfloat16"), "dtype"),
        (changed(format="NHD"), "format"),
        (changed(block_tokens=8), "tokens per block"),
        (changed(num_heads=1), "head range"),
        (changed(planes=(Plane("kv", 1 << 30, 128, 128),)), "planes"),
        (changed(planes=(Plane("k", 1 << 30, 64, 64),)), "planes"),
    ],
)
def test_layouts_that_do_not_fit_are_both_named(other: CacheLayout, named: str) -> None:
    with pytest.raises(LayoutError, match=named) as caught:
        PairPlan(layout(1), other)
    assert layout(1).layers[0].describe() in caught.value.message
    assert other.layers[0].describe() in caught.value.message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (CacheLayout(layout(1).layers * 2), "twice"),
        (CacheLayout((changed(group=1).layers[0],)), "group 1 of 1"),
        (CacheLayout(layout(1).layers, 2), "without a layer"),
        (changed(planes=(Plane("k", 1, 8, 8), Plane("k", 9, 8, 8))), "same content"),
        (changed(planes=(Plane("k", 0, 8, 8),)), "address 0"),
        (changed(planes=(Plane("k", 8, 4, 8),)), "overlap"),
        (changed(planes=(Plane("k", 2**62, 2**40, 8),), num_blocks=2**40), "63-bit"),
    ],
)
def test_impossible_layouts_are_refused(wrong: CacheLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        wrong.check()


def test_different_block_sizes_in_one_cache_are_refused() -> None:
    mixed = CacheLayout((layout(1).layers[0], layout([1], block_tokens=8).layers[0]))
    with pytest.raises(LayoutError, match="different block sizes"):
        common_block_tokens(mixed)


def test_groups_have_block_tables_of_their_own() -> None:
    def side(base: int) -> CacheLayout:
        return CacheLayout(
            tuple(
                LayerLayout(f"l{n}", n % 2, NUM_BLOCKS, 4, 0, 1, "f", "HND", "none", (Plane("kv", base + n * 4096, 64, 64),))
                for n in range(4)
            ),
            2,
        )

    src, dst = PairPlan(side(1 << 20), side(1 << 30)).descriptors(
        0,
        4,
        (np.array([1, 2], np.int32), np.array([5], np.int32)),
        (np.array([3, 4], np.int32), np.array([6], np.int32)),
    )
    got = sorted(zip((src[:, 0] - (1 << 20)).tolist(), (dst[:, 0] - (1 << 30)).tolist(), src[:, 1].tolist(), strict=True))
    assert got == sorted(
        [
            (64, 192, 128),
            (2 * 4096 + 64, 2 * 4096 + 192, 128),
            (4096 + 320, 4096 + 384, 64),
            (3 * 4096 + 320, 3 * 4096 + 384, 64),
        ]
    )


@pytest.mark.parametrize("seed", range(20))
def test_runs_and_merge_adjacent_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 20))
    first, second = rng.integers(0, 6, count), rng.integers(0, 6, count)
    if seed % 2:
        first, second = np.cumsum(rng.integers(1, 3, count)), np.cumsum(rng.integers(1, 3, count))
    expected: list[list[int]] = []
    for k in range(count):
        if k and first[k] == first[k - 1] + 1 and second[k] == second[k - 1] + 1:
            expected[-1][1] += 1
        else:
            expected.append([k, 1])
    starts, lengths = runs(first.astype(np.int64), second.astype(np.int64))
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == [tuple(pair) for pair in expected]

    def rows(ids: np.ndarray) -> np.ndarray:
        return np.stack([ids * 8 + 1000, np.full(count, 8), np.zeros(count, int)], axis=1).astype(np.uint64)

    src, dst = merge_adjacent(rows(first), rows(second))
    want = [(int(first[k]) * 8 + 1000, int(second[k]) * 8 + 1000, n * 8) for k, n in expected]
    assert list(zip(src[:, 0].tolist(), dst[:, 0].tolist(), src[:, 1].tolist(), strict=True)) == want


def test_devices_are_never_joined() -> None:
    src = np.array([[0, 8, 0], [8, 8, 1]], np.uint64)
    assert len(merge_adjacent(src, src)[0]) == 2


@pytest.mark.parametrize("seed", range(40))
def test_volume_and_merging_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = np.zeros((5, 5, 5), bool)
    merged: list[Rect] = []
    plain: list[Rect] = []
    for _ in range(int(rng.integers(0, 12))):
        bounds = rng.integers(0, 6, 6) if seed % 4 else np.sort(rng.integers(0, 6, (3, 2))).ravel()
        rect = Rect(*bounds.tolist())
        grid[rect[0] : max(rect[0], rect[1]), rect[2] : max(rect[2], rect[3]), rect[4] : max(rect[4], rect[5])] = True
        plain.append(rect)
        merge_rects(merged, rect)
        assert covered_volume(merged) == covered_volume(plain) == int(grid.sum())
    assert len(merged) <= len(plain)


def test_pieces_of_a_prompt_merge_into_one() -> None:
    merged: list[Rect] = []
    pieces = [Rect(layer, layer + 1, 0, 2, token, token + 16) for token in range(0, 64, 16) for layer in range(4)]
    for piece in np.random.default_rng(1).permutation(len(pieces)):
        merge_rects(merged, pieces[piece])
    assert covered_volume(merged) == 4 * 2 * 64
    in_order: list[Rect] = []
    for rect in pieces:
        merge_rects(in_order, rect)
    assert in_order == [Rect(0, 4, 0, 2, 0, 64)]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for_tokens(tokens, 4) == blocks
