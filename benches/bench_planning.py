# SPDX-License-Identifier: Apache-2.0
"""Planning: from block tables to descriptors, 1,000,000 (layer, block) pairs at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from common import BLOCK_TOKENS, cache_layout, scattered

from kvpush.core.coverage import covered_volume, merge_rects
from kvpush.core.ids import Rect
from kvpush.core.plan import PairPlan, merge_adjacent, runs
from kvpush.testing.simulation import toy_layout

LAYERS = 32
BLOCKS = 31_250
PAIRS = LAYERS * BLOCKS
BLOCK_BYTES = 4096

SHAPES = [
    pytest.param(outermost, order, id=f"layers={LAYERS}-blocks={BLOCKS}-outermost={outermost}-order={order}")
    for outermost in ("layers", "blocks")
    for order in ("contiguous", "fragmented")
]


def plan_of(outermost: str, num_blocks: int = 2 * BLOCKS, num_layers: int = LAYERS) -> PairPlan:
    def side(base: int) -> Any:
        return cache_layout(num_layers, num_blocks, block_bytes=BLOCK_BYTES, base=base, blocks_outermost=outermost == "blocks")

    return PairPlan(side(1 << 32), side(1 << 44))


def block_ids(order: str, count: int = BLOCKS) -> npt.NDArray[np.int32]:
    return scattered(count) if order == "fragmented" else np.arange(count, dtype=np.int32)


def block_by_block(plan: PairPlan, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]) -> Any:
    """What coalescing is measured against: one descriptor for each layer and block, in a loop."""
    src_rows, dst_rows = [], []
    for ours, theirs in zip(plan.src.layers, plan.dst.layers, strict=True):
        a, b = ours.planes[0], theirs.planes[0]
        for i, j in zip(src.tolist(), dst.tolist(), strict=True):
            src_rows.append((a.base + i * a.block_stride, a.block_bytes, 0))
            dst_rows.append((b.base + j * b.block_stride, b.block_bytes, 0))
    return np.array(src_rows, np.uint64), np.array(dst_rows, np.uint64)


@pytest.mark.parametrize(("outermost", "order"), SHAPES)
def bench_descriptors(benchmark: Any, outermost: str, order: str) -> None:
    plan, ids = plan_of(outermost), block_ids(order)
    src, dst = benchmark.pedantic(plan.descriptors, args=(0, LAYERS, (ids,), (ids,)), rounds=5, warmup_rounds=1)
    expected = {
        ("layers", "contiguous"): LAYERS,
        ("layers", "fragmented"): PAIRS,
        ("blocks", "contiguous"): 1,
        ("blocks", "fragmented"): BLOCKS,
    }
    assert len(src) == len(dst) == expected[outermost, order]
    assert int(src[:, 1].sum()) == PAIRS * BLOCK_BYTES
    note(benchmark, len(src), PAIRS)


@pytest.mark.parametrize(("outermost", "order"), SHAPES)
def bench_reference_block_by_block(benchmark: Any, outermost: str, order: str) -> None:
    """A thirty-second of the pairs: the loop is slow. Compare ``ns_per_pair``."""
    plan, ids = plan_of(outermost), block_ids(order, BLOCKS // 32)
    src, dst = benchmark.pedantic(block_by_block, args=(plan, ids, ids), rounds=3, warmup_rounds=1)
    coalesced = plan.descriptors(0, LAYERS, (ids,), (ids,))
    assert int(src[:, 1].sum()) == int(coalesced[0][:, 1].sum())
    order_by_address = np.argsort(src[:, 0])
    merged, _ = merge_adjacent(src[order_by_address], dst[order_by_address])
    ours = coalesced[0][np.argsort(coalesced[0][:, 0])]
    assert (merge_adjacent(ours, ours)[0] == merged).all()
    note(benchmark, len(src), LAYERS * len(ids))


@pytest.mark.parametrize("layers", [1, 32, 80], ids=lambda n: f"layers={n}-blocks=128-order=contiguous")
def bench_one_write(benchmark: Any, layers: int) -> None:
    """One write as the machine posts it: a chunk of 2,048 tokens in one, some, or all layers."""
    plan, ids = plan_of("layers", 4096, 80), np.arange(128, dtype=np.int32)
    src, _ = benchmark(plan.descriptors, 0, layers, (ids,), (ids,))
    assert len(src) == layers
    note(benchmark, len(src), layers * 128)


@pytest.mark.parametrize("sizes", [(64, 16), (16, 64), (48, 32)], ids=lambda sizes: f"sizes={sizes[0]}-{sizes[1]}")
@pytest.mark.parametrize("order", ["contiguous", "fragmented"], ids=lambda order: f"order={order}")
def bench_one_write_of_other_block_sizes(benchmark: Any, sizes: tuple[int, int], order: str) -> None:
    """A chunk of 1,536 tokens in 80 layers, 256 bytes a token and layer, where blocks are copied in parts."""
    src, dst = (
        toy_layout(
            range(80),
            base=base,
            num_blocks=1024,
            block_tokens=size,
            block_bytes=256 * size,
            planes=("kv",),
            by_token=True,
        )
        for size, base in zip(sizes, (1 << 32, 1 << 44), strict=True)
    )
    plan, tokens = PairPlan(src, dst), 1536
    ids = [block_ids(order, tokens // size) for size in sizes]
    rows, _ = benchmark(plan.descriptors, 0, 80, (ids[0],), (ids[1],), (0, tokens))
    assert int(rows[:, 1].sum()) == 80 * tokens * 256
    # Both sides go on only within a block, where ids are scattered: every boundary of either begins a row.
    bounds = {at for size in sizes for at in range(0, tokens, size)}
    assert len(rows) == 80 * (1 if order == "contiguous" else len(bounds))
    note(benchmark, len(rows), 80 * len(bounds))


@pytest.mark.parametrize("order", ["contiguous", "fragmented"], ids=lambda order: f"blocks={BLOCKS}-order={order}")
def bench_runs(benchmark: Any, order: str) -> None:
    ids = block_ids(order).astype(np.int64)
    starts, lengths = benchmark(runs, ids, ids)
    assert len(starts) == (1 if order == "contiguous" else BLOCKS)
    assert int(lengths.sum()) == BLOCKS
    note(benchmark, len(starts), BLOCKS)


@pytest.mark.parametrize("order", ["contiguous", "fragmented"], ids=lambda order: f"rows={PAIRS}-order={order}")
def bench_merge_adjacent(benchmark: Any, order: str) -> None:
    rows = np.empty((PAIRS, 3), np.uint64)
    rows[:, 0] = (1 << 32) + np.arange(PAIRS) * BLOCK_BYTES * (1 if order == "contiguous" else 2)
    rows[:, 1], rows[:, 2] = BLOCK_BYTES, 0
    src, _ = benchmark.pedantic(merge_adjacent, args=(rows, rows), rounds=5, warmup_rounds=1)
    assert len(src) == (1 if order == "contiguous" else PAIRS)
    note(benchmark, len(src), PAIRS)


@pytest.mark.parametrize("order", ["in-order", "random"])
@pytest.mark.parametrize("layers", [32, 80], ids=lambda n: f"layers={n}-chunks=8")
def bench_coverage(benchmark: Any, layers: int, order: str) -> None:
    """Every layer of every chunk completes on its own: merged as it comes, counted at the end."""
    pieces = [Rect(layer, layer + 1, 0, 8, chunk * 512, chunk * 512 + 512) for chunk in range(8) for layer in range(layers)]
    if order == "random":
        pieces = [pieces[at] for at in np.random.default_rng(1).permutation(len(pieces))]

    def merge() -> int:
        merged: list[Rect] = []
        for piece in pieces:
            merge_rects(merged, piece)
        return covered_volume(merged)

    assert benchmark.pedantic(merge, rounds=3, warmup_rounds=1) == layers * 8 * 8 * 512
    note(benchmark, 0, len(pieces))


def bench_covered_volume(benchmark: Any) -> None:
    """The most that a peer may send: 128 rectangles without a common boundary."""
    rects = [Rect(at, at + 2, 0, 8, BLOCK_TOKENS * at, BLOCK_TOKENS * (at + 2)) for at in range(128)]
    assert benchmark(covered_volume, rects) == 128 * 2 * 8 * 32 - 127 * 8 * 16
    note(benchmark, 0, 128)


def note(benchmark: Any, descriptors: int, pairs: int) -> None:
    benchmark.extra_info |= {"descriptors": descriptors, "pairs": pairs, "bytes": pairs * BLOCK_BYTES}
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_pair"] = benchmark.stats.stats.median / pairs * 1e9
