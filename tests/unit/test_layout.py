# SPDX-License-Identifier: Apache-2.0
"""Layout arithmetic against brute force on byte arrays."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from machines import layout

from kvpush.core.coverage import covered_volume, merge_rects
from kvpush.core.ids import Rect
from kvpush.core.layout import CacheLayout, LayerLayout, Plane, blocks_for_tokens, common_block_tokens, plane_hull
from kvpush.core.plan import PairPlan, merge_adjacent, runs
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


def open_layer(format: str, planes: tuple[Plane, ...], *, heads: int = 2, tokens: int = 4, head_lo: int = 0) -> CacheLayout:
    return CacheLayout((LayerLayout("l", 0, NUM_BLOCKS, tokens, head_lo, heads, "f", format, "head", planes),))


def one_slab(num_bytes: int, *contents: str) -> tuple[Plane, ...]:
    return tuple(Plane(content, (1 << 20) + idx * 4096, num_bytes, num_bytes) for idx, content in enumerate(contents))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        pytest.param(open_layer("HNC", one_slab(64, "kv")), open_layer("HNC", one_slab(32, "k", "v")), id="kv-not-parted"),
        pytest.param(open_layer("HNC", one_slab(64, "kv")), open_layer("NHC", one_slab(128, "kv")), id="other-head-size"),
        pytest.param(open_layer("HNC", one_slab(63, "kv")), open_layer("NHC", one_slab(63, "kv")), id="not-divisible"),
        pytest.param(open_layer("HCN", one_slab(64, "kv")), open_layer("NHC", one_slab(64, "kv")), id="content-not-innermost"),
        pytest.param(open_layer("NC", one_slab(64, "kv")), open_layer("NHC", one_slab(64, "kv")), id="heads-not-named"),
        pytest.param(open_layer("0xHNC", one_slab(64, "kv")), open_layer("NHC", one_slab(64, "kv")), id="no-pieces"),
        pytest.param(open_layer("3xHNC", one_slab(64, "kv")), open_layer("NHC", one_slab(64, "kv")), id="uneven-pieces"),
        pytest.param(open_layer("HHC", one_slab(64, "kv")), open_layer("NHC", one_slab(64, "kv")), id="twice-the-same"),
        pytest.param(open_layer("2HNC", one_slab(64, "k", "v")), open_layer("HNC", one_slab(64, "k", "v")), id="k-v-twice"),
        pytest.param(open_layer("HNC", one_slab(64, "k", "x")), open_layer("NHC", one_slab(64, "k", "x")), id="unknown"),
        pytest.param(
            open_layer("HNC", one_slab(1 << 21, "kv"), heads=1 << 10, tokens=1 << 10),
            open_layer("NHC", one_slab(1 << 21, "kv"), heads=1 << 10, tokens=1 << 10),
            id="too-many-pieces",
        ),
    ],
)
def test_formats_that_can_not_be_mapped_are_refused_with_both_named(src: CacheLayout, dst: CacheLayout) -> None:
    with pytest.raises(LayoutError, match="can't be mapped") as caught:
        PairPlan(src, dst)
    assert src.layers[0].describe() in caught.value.message
    assert dst.layers[0].describe() in caught.value.message


def test_a_cache_of_very_many_pieces_is_refused_in_good_time() -> None:
    def side(format: str) -> CacheLayout:
        one = open_layer(format, one_slab(1 << 17, "kv"), heads=256, tokens=128).layers[0]
        return CacheLayout(tuple(msgspec.structs.replace(one, name=f"l{idx}") for idx in range(64)))

    with pytest.raises(LayoutError, match="choose the same KV-cache layout"):
        PairPlan(side("HNC"), side("NHC"))


def test_heads_of_a_head_major_slab_are_taken_in_one_piece() -> None:
    whole = open_layer("HNC", one_slab(64, "k", "v"), heads=4)
    part = open_layer("HNC", one_slab(32, "k", "v"), heads=2, head_lo=2)
    plan = PairPlan(whole, part)
    assert plan.way == "direct"
    src, dst = plan.descriptors(0, 1, (np.array([3], np.int32),), (np.array([5], np.int32),))
    assert src[:, :2].tolist() == [[(1 << 20) + 3 * 64 + 32, 32], [(1 << 20) + 4096 + 3 * 64 + 32, 32]]
    assert dst[:, :2].tolist() == [[(1 << 20) + 5 * 32, 32], [(1 << 20) + 4096 + 5 * 32, 32]]
    assert plan.coverage(0, 1, 0, 4) == [Rect(0, 1, 2, 4, 0, 4)]
    assert plan.bytes_per_block(0, 1) == 64
    assert PairPlan(part, open_layer("HNC", one_slab(32, "k", "v"), heads=2)).coverage(0, 1, 0, 4) == []


def test_blocks_of_different_sizes_are_copied_in_parts() -> None:
    src = open_layer("NHC", one_slab(48 * 8, "kv"), tokens=48, heads=1)
    dst = open_layer("NHC", one_slab(32 * 8, "kv"), tokens=32, heads=1)
    plan = PairPlan(src, dst)
    assert (plan.parted, plan.unit_tokens, plan.bytes_per_block(0, 1), plan.alike) == (True, 16, 16 * 8, False)
    # Tokens 32 to 90: the last third of the producer's block 5, all of block 2; what is behind 90 goes up to 96.
    src_rows, dst_rows = plan.descriptors(0, 1, (np.array([5, 2], np.int32),), (np.array([7, 3], np.int32),), (32, 90))
    base = 1 << 20
    assert (src_rows[:, :2] - np.array([base, 0], np.uint64)).tolist() == [
        [2 * 384, 128],
        [2 * 384 + 128, 256],
        [5 * 384 + 256, 128],
    ]
    assert (dst_rows[:, 0] - np.uint64(base)).tolist() == [7 * 256 + 128, 3 * 256, 7 * 256]
    assert [len(rows) for rows in plan.descriptors(0, 1, *[(np.zeros(0, np.int32),)] * 2, (32, 32))] == [0, 0]
    one = (np.array([5], np.int32),)
    for tables, tokens, message in (
        ((one, one), None, "multiple of 16"),
        ((one, one), (8, 16), "multiple of 16"),
        ((one, one), (0, 33), "1 destination blocks for 2"),
        ((one, one), (32, 64), "1 source blocks for 2"),
        (((np.array([99], np.int32),), one), (0, 16), "source block ids"),
        ((one, (np.array([-1], np.int32),)), (0, 16), "destination block ids"),
    ):
        with pytest.raises(LayoutError, match=message):
            plan.descriptors(0, 1, *tables, tokens)


def test_parts_fit_in_the_kernel_blocks_of_both() -> None:
    src = open_layer("2xNHC", one_slab(64 * 8, "kv"), tokens=64, heads=1)
    dst = open_layer("NHC", one_slab(48 * 8, "kv"), tokens=48, heads=1)
    assert PairPlan(src, dst).unit_tokens == 16


def test_blocks_of_different_sizes_that_can_not_be_divided_are_refused() -> None:
    src = open_layer("NHC", one_slab(512, "kv"), tokens=8)
    opaque = open_layer("NHC:cpu_attn-amx", one_slab(256, "kv"))
    with pytest.raises(LayoutError, match=r"NHC:cpu_attn-amx can't be divided by tokens: choose the same block size") as caught:
        PairPlan(src, opaque)
    assert src.layers[0].describe() in caught.value.message
    assert opaque.layers[0].describe() in caught.value.message
    with pytest.raises(LayoutError, match="tokens per block differ: choose the same block size on both sides"):
        PairPlan(src, open_layer("NHC", one_slab(128, "kv")))
    mixed = [msgspec.structs.replace(layer, name="m") for layer in open_layer("NHC", one_slab(512, "kv"), tokens=8).layers]
    mixed = [msgspec.structs.replace(layer, planes=(Plane("kv", 1 << 25, 512, 512),)) for layer in mixed]
    even = [msgspec.structs.replace(layer, name="m") for layer in open_layer("NHC", one_slab(256, "kv")).layers]
    even = [msgspec.structs.replace(layer, planes=(Plane("kv", 1 << 25, 256, 256),)) for layer in even]
    other = open_layer("NHC", one_slab(512, "kv"), tokens=8)
    with pytest.raises(LayoutError, match="not for all layers alike"):
        PairPlan(CacheLayout((*src.layers, *mixed)), CacheLayout((*other.layers, *even)))


def test_layers_in_one_place_must_be_so_on_both_sides() -> None:
    one = Plane("kv", 1 << 20, 64, 64)
    sharing = CacheLayout(tuple(LayerLayout(name, 0, 4, 4, 0, 1, "f", "HND", "none", (one,)) for name in ("l0", "l1")))
    ids = (np.array([1, 2], np.int32),)
    assert int(PairPlan(sharing, sharing).descriptors(0, 2, ids, ids)[0][:, 1].sum()) == 2 * 2 * 64
    assert int(PairPlan(sharing, apart(1 << 30, [0, 256], 64)).descriptors(0, 2, ids, ids)[0][:, 1].sum()) == 2 * 2 * 64
    with pytest.raises(LayoutError, match="l0 and l1 in one place"):
        PairPlan(apart(1 << 30, [0, 256], 64), sharing)


def test_groups_may_lie_in_the_same_memory() -> None:
    """As vLLM's layers of a hybrid model: a page is one group's or the other's, and each sees it in its own way."""

    def side(base: int) -> CacheLayout:
        return CacheLayout(
            tuple(
                LayerLayout(f"l{n}", n % 2, 4, 4, 0, 1, "f", "HND", "none", (Plane("kv", base + n // 2 * 256, 64, size),))
                for n, size in enumerate((64, 40, 64, 40))
            ),
            2,
        )

    side(1 << 20).check()
    src, dst = PairPlan(side(1 << 20), side(1 << 30)).descriptors(
        0, 4, (np.array([0, 1], np.int32), np.array([2, 3], np.int32)), (np.array([2, 3], np.int32), np.array([0, 1], np.int32))
    )
    got = sorted(zip((src[:, 0] - (1 << 20)).tolist(), (dst[:, 0] - (1 << 30)).tolist(), src[:, 1].tolist(), strict=True))
    second = [(128, 0, 40), (192, 64, 40)]
    assert got == [(0, 128, 128), *second, (256, 384, 128), *((at + 256, to + 256, size) for at, to, size in second)]


@pytest.mark.parametrize(
    ("planes", "same_group", "wrong"),
    [
        pytest.param([(0, 64, 64), (256, 64, 64)], True, False, id="touching"),
        pytest.param([(0, 128, 64), (64, 128, 64)], True, False, id="interleaved"),
        pytest.param([(0, 128, 64), (64 + 128, 128, 64)], True, False, id="interleaved-and-shifted"),
        pytest.param([(32, 128, 64), (96, 128, 64)], True, False, id="over-the-stride-s-end"),
        pytest.param([(0, 64, 64), (0, 64, 64)], True, False, id="one-and-the-same"),
        pytest.param([(0, 64, 64), (0, 64, 40)], True, True, id="same-base"),
        pytest.param([(0, 64, 64), (0, 64, 40)], False, False, id="same-base-of-two-groups"),
        pytest.param([(0, 128, 64), (32, 128, 64)], True, True, id="half"),
        pytest.param([(0, 64, 64), (192, 64, 64)], True, True, id="last-and-first"),
        pytest.param([(0, 128, 64), (96, 128, 64)], True, True, id="over-the-stride-s-end-too-far"),
        pytest.param([(0, 128, 64), (64, 64, 64)], True, True, id="other-stride"),
        pytest.param([(0, 128, 64), (448, 64, 64)], True, False, id="other-stride-behind"),
        pytest.param([(0, 512, 64), (64, 128, 64), (576, 128, 32)], True, True, id="other-stride-in-an-old-one"),
    ],
)
def test_layers_of_one_group_that_overlap_are_refused(
    planes: list[tuple[int, int, int]], same_group: bool, wrong: bool
) -> None:
    layers = tuple(
        LayerLayout(f"l{n}", 0 if same_group else n, 4, 4, 0, 1, "f", "HND", "none", (Plane("kv", 4096 + at, stride, size),))
        for n, (at, stride, size) in enumerate(planes)
    )
    found = CacheLayout(layers, 1 if same_group else len(layers))
    if wrong:
        with pytest.raises(LayoutError, match="overlap in memory"):
            found.check()
    else:
        found.check()


@pytest.mark.parametrize("seed", range(200))
def test_overlaps_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stride = int(rng.integers(2, 9))
    layers, taken, overlap = [], set(), False
    for n in range(int(rng.integers(1, 5))):
        base, size, count = 100 + int(rng.integers(0, 30)), int(rng.integers(1, stride // 2 + 1)), int(rng.integers(1, 4))
        layers.append(LayerLayout(f"l{n}", 0, count, 4, 0, 1, "f", "HND", "none", (Plane("kv", base, stride, size),)))
        bytes_ = {base + idx * stride + at for idx in range(count) for at in range(size)}
        if any((layer.num_blocks, layer.planes) == (count, layers[-1].planes) for layer in layers[:-1]):
            continue
        overlap |= bool(bytes_ & taken)
        taken |= bytes_
    if overlap:
        with pytest.raises(LayoutError, match="overlap in memory"):
            CacheLayout(tuple(layers)).check()
    else:
        CacheLayout(tuple(layers)).check()


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


def apart(base: int, offsets: list[int], stride: int) -> CacheLayout:
    """Layers of 4 blocks of 64 bytes in an allocation each."""
    return CacheLayout(
        tuple(
            LayerLayout(f"l{idx}", 0, 4, 4, 0, 1, "f", "HND", "none", (Plane("kv", base + offset, stride, 64),))
            for idx, offset in enumerate(offsets)
        )
    )


@pytest.mark.parametrize(
    ("offsets", "stride", "ids"),
    [
        pytest.param([0, 256, 512], 64, [0, 1, 2, 3], id="one-after-the-other"),
        pytest.param([448, 0], 128, [3, 0], id="blocks-with-gaps"),
    ],
)
def test_no_row_runs_from_one_allocation_into_the_next(offsets: list[int], stride: int, ids: list[int]) -> None:
    """They touch, as the allocator gave one after the other; device memory is registered one by one."""
    src, dst = (apart(base, offsets, stride) for base in (1 << 20, 1 << 30))
    table = (np.array(ids, np.int32),)
    for side, rows in zip((src, dst), PairPlan(src, dst).descriptors(0, len(offsets), table, table), strict=True):
        assert int(rows[:, 1].sum()) == len(ids) * len(offsets) * 64
        extents = [plane_hull(layer, plane) for layer in side.layers for plane in layer.planes]
        for at, length, _ in rows.tolist():
            assert sum(lo <= at and at + length <= hi for lo, hi in extents) == 1


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
