# SPDX-License-Identifier: Apache-2.0
"""What writes cost: rate by block size and order, posting, latency, and layouts that differ inside a block."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvpush.backends.base import Capability
from kvpush.bench.backends.case import Axes, Bench, Case, Effort, LeftOut, copying
from kvpush.bench.backends.ends import PIECE_BYTES, Ends, Place, rows
from kvpush.bench.backends.results import Result
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.plan import PairPlan
from kvpush.core.staging import SLOT_BYTES
from kvpush.core.transport import Descriptors

__all__ = ["LAYOUTS", "POST_COST", "SMALL_WRITE", "STAGING", "WRITE_BANDWIDTH"]

_ROW_BYTES, _ROW_STEP = 64, 256
"""Of what is posted: short, and apart, so that nothing can be joined."""
_HEADS, _TOKENS, _CONTENT_BYTES = 8, 16, 512
"""Of a block of the layouts: 64 KiB; K and V of a head and token are 128 elements of 2 bytes each."""
_INNER = {"direct": "HNC", "scatter": "NHC"}
"""Format of the target's blocks, where the source's are ``HNC``. Another way to lay bytes out is a line here."""

Piece = tuple[Descriptors, Descriptors]
"""One write: rows of the source and of the target."""


def _ids(rng: np.random.Generator, count: int, *, in_order: bool = False) -> npt.NDArray[np.int32]:
    """Every block once."""
    return np.arange(count, dtype=np.int32) if in_order else rng.permutation(count).astype(np.int32)


def _planned(plan: PairPlan, of_source: npt.NDArray[np.int32], of_target: npt.NDArray[np.int32]) -> list[Piece]:
    """All blocks in writes of :data:`PIECE_BYTES`, as the submitter plans them."""
    step = max(PIECE_BYTES // plan.bytes_per_block(0, 1), 1)
    starts = range(0, len(of_source), step)
    return [plan.descriptors(0, 1, (of_source[at : at + step],), (of_target[at : at + step],)) for at in starts]


def _pieces(src: Descriptors, dst: Descriptors) -> list[Piece]:
    """Rows in writes of about :data:`PIECE_BYTES` at most, as the submitter cuts them."""
    step = max(PIECE_BYTES * len(src) // int(src[:, 1].sum()), 1)
    return [(src[start : start + step], dst[start : start + step]) for start in range(0, len(src), step)]


def _bandwidth_axes(effort: Effort) -> Sequence[Axes]:
    return [
        {"block_bytes": block_bytes, "fragmented": fragmented, "coalesced": coalesced}
        for block_bytes in effort.block_bytes
        for fragmented, coalesced in ((False, True), (False, False), (True, False))
    ]


def _bandwidth(ends: Ends, result: Result, effort: Effort) -> Case:
    """All of the memory. In order as one run, in order block by block, and block by block in random order on both sides."""
    assert result.block_bytes is not None
    total, block_bytes = ends.num_bytes, result.block_bytes
    count = total // block_bytes
    rng = np.random.default_rng(block_bytes)
    of_source, of_target = (_ids(rng, count, in_order=not result.fragmented) for _ in range(2))
    if result.coalesced:
        plan = PairPlan(*(_pool(place, count, block_bytes) for place in (ends.here, ends.there)))
        pieces = _planned(plan, of_source, of_target)
    else:
        from_, to = (ids.astype(np.int64) * block_bytes for ids in (of_source, of_target))
        pieces = _pieces(rows(ends.here, from_, block_bytes), rows(ends.there, to, block_bytes))
    expected = np.empty((count, block_bytes), np.uint8)
    expected[of_target] = ends.content.reshape(count, block_bytes)[of_source]
    ends.target.clear()
    return Case(
        msgspec.structs.replace(result, num_bytes=total, descriptors=sum(len(src) for src, _ in pieces)),
        run=lambda: ends.write(pieces),
        rounds=effort.rounds,
        is_rate=True,
        limit=copying(ends),
        check=lambda: ends.expect(expected),
    )


def _pool(place: Place, num_blocks: int, block_bytes: int, inner: str = "HNC") -> CacheLayout:
    """One layer's cache: blocks one after another from the beginning of a memory."""
    plane = Plane("kv", place.address, block_bytes, block_bytes, place.device_id)
    split = "head" if inner.startswith("H") else "token"
    return CacheLayout(
        (LayerLayout("layer", 0, num_blocks, _TOKENS, 0, _HEADS, "bfloat16", inner, split, (plane,)),)  # type: ignore[arg-type]
    )


def _layouts(ends: Ends, result: Result, effort: Effort) -> Case:
    """Blocks in random order on both sides, between caches whose blocks are ordered alike or differently inside."""
    assert result.layout is not None
    block_bytes = _HEADS * _TOKENS * _CONTENT_BYTES
    count = ends.num_bytes // block_bytes
    inner = _INNER[result.layout]
    plan = PairPlan(_pool(ends.here, count, block_bytes), _pool(ends.there, count, block_bytes, inner))
    assert plan.way == result.layout
    rng = np.random.default_rng(3)
    of_source, of_target = (_ids(rng, count) for _ in range(2))
    pieces = _planned(plan, of_source, of_target)
    blocks = ends.content.reshape(count, _HEADS, _TOKENS, _CONTENT_BYTES)[of_source]
    expected = np.empty((count, block_bytes), np.uint8)
    expected[of_target] = (blocks if inner == "HNC" else blocks.transpose(0, 2, 1, 3)).reshape(count, block_bytes)
    ends.target.clear()
    return Case(
        msgspec.structs.replace(
            result, num_bytes=ends.num_bytes, block_bytes=block_bytes, descriptors=sum(len(src) for src, _ in pieces)
        ),
        run=lambda: ends.write(pieces),
        rounds=max(effort.rounds // 2, 1),
        is_rate=True,
        limit=copying(ends),
        check=lambda: ends.expect(expected),
    )


def _staging(ends: Ends, result: Result, effort: Effort) -> Case:
    """Random order on both sides. Blocks of 4 KiB are alike inside, those of 64 KiB have heads and tokens the other way."""
    if Capability.STAGING not in ends.plugin.info.capabilities:
        raise LeftOut("it declares no staging")
    assert result.block_bytes is not None
    block_bytes = result.block_bytes
    alike = block_bytes < 64 << 10
    count = ends.num_bytes // block_bytes
    heads, content = (1, block_bytes // _TOKENS) if alike else (_HEADS, _CONTENT_BYTES)
    src, dst = _pool(ends.here, count, block_bytes), _pool(ends.there, count, block_bytes, "HNC" if alike else "NHC")
    rng = np.random.default_rng(5)
    of_source, of_target = (_ids(rng, count) for _ in range(2))
    plan = PairPlan(src, dst)
    assert plan.way == ("direct" if alike else "scatter")
    blocks = ends.content.reshape(count, heads, _TOKENS, content)[of_source]
    expected = np.empty((count, block_bytes), np.uint8)
    expected[of_target] = (blocks if alike else blocks.transpose(0, 2, 1, 3)).reshape(count, block_bytes)
    ends.target.clear()
    if result.layout == "staged":
        run = ends.staged(src, dst, of_source, of_target)
        descriptors = -(-count // (SLOT_BYTES // block_bytes))
    else:
        pieces = _planned(plan, of_source, of_target)
        run = functools.partial(ends.write, pieces)
        descriptors = sum(len(rows) for rows, _ in pieces)
    return Case(
        msgspec.structs.replace(result, num_bytes=ends.num_bytes, descriptors=descriptors),
        run=run,
        rounds=max(effort.rounds // 2, 1),
        is_rate=True,
        limit=copying(ends),
        check=lambda: ends.expect(expected),
    )


def _post_axes(effort: Effort) -> Sequence[Axes]:
    return [{"descriptors": count} for count in (1, 16, 256, 4096)]


def _post(ends: Ends, result: Result, effort: Effort) -> Case:
    """The call alone: what the submitter pays for a write besides its bytes."""
    assert result.descriptors is not None
    starts = np.arange(result.descriptors) * _ROW_STEP
    src, dst = rows(ends.here, starts, _ROW_BYTES), rows(ends.there, starts, _ROW_BYTES)
    ends.target.clear()

    def check() -> None:
        ends.settle()
        ends.expect(_only(ends, starts, _ROW_BYTES))

    return Case(
        msgspec.structs.replace(result, num_bytes=_ROW_BYTES * result.descriptors),
        run=lambda: ends.post(src, dst),
        rounds=max(effort.short_rounds // 4, 1),
        prepare=ends.settle,
        check=check,
    )


def _small_axes(effort: Effort) -> Sequence[Axes]:
    return [{"num_bytes": size} for size in (64, 4 << 10, 64 << 10)]


def _small(ends: Ends, result: Result, effort: Effort) -> Case:
    """From the call that posts to the completion, both ends polling."""
    assert result.num_bytes is not None
    start = np.zeros(1, np.int64)
    piece = rows(ends.here, start, result.num_bytes), rows(ends.there, start, result.num_bytes)
    ends.target.clear()
    return Case(
        result,
        run=lambda: ends.write([piece]),
        rounds=effort.short_rounds,
        check=lambda: ends.expect(_only(ends, start, piece[0][0, 1])),
    )


def _only(ends: Ends, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint8]:
    """Zeros, with some ranges of the source's content in their places."""
    expected = np.zeros(ends.num_bytes, np.uint8)
    for start in starts.tolist():
        part = slice(start, start + int(length))
        expected[part] = ends.content[part]
    return expected


WRITE_BANDWIDTH = Bench("Rate of writes, by block size and order", _bandwidth_axes, _bandwidth)
_STAGED: Sequence[Axes] = [
    {"block_bytes": size, "layout": way}
    for size, without in ((4 << 10, "direct"), (64 << 10, "scatter"))
    for way in (without, "staged")
]
STAGING = Bench("Blocks in random order, by descriptors and through slots", lambda _: _STAGED, _staging)
LAYOUTS = Bench("Blocks ordered alike and differently inside", lambda _: [{"layout": way} for way in _INNER], _layouts)
POST_COST = Bench("Posting: the call alone, rows of 64 bytes that don't touch", _post_axes, _post)
SMALL_WRITE = Bench("Small writes, from the post to the completion", _small_axes, _small)
