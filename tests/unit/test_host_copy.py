# SPDX-License-Identifier: Apache-2.0
"""Rows of host memory are copied as told, whatever their lengths, order and alignment, and nothing besides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush.backends._host_copy import copy_rows
from kvpush.core.transport import Descriptors

SIZE = 4096


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Source offsets, destination offsets that don't overlap, lengths."""
    uniform = draw(st.booleans())
    count = draw(st.integers(0, 24))
    length = draw(st.integers(0, 96))
    lengths = [length if uniform else draw(st.integers(0, 96)) for _ in range(count)]
    gap = draw(st.sampled_from([0, 0, 1, 64]))
    at, places = draw(st.integers(0, 64)), []
    for one in lengths:
        places.append(at)
        at += one + gap
    sources = [
        draw(st.integers(0, (SIZE - one) // max(one, 1))) * one if uniform else draw(st.integers(0, SIZE - 96))
        for one in lengths
    ]
    if uniform and draw(st.booleans()):
        sources = draw(st.permutations(places))
    order = draw(st.permutations(range(count)))
    return [sources[idx] for idx in order], [places[idx] for idx in order], [lengths[idx] for idx in order]


def rows(memory: np.ndarray, offsets: list[int], lengths: list[int]) -> Descriptors:
    base = memory.ctypes.data
    return np.array([(base + at, length, 0) for at, length in zip(offsets, lengths, strict=True)], np.uint64).reshape(-1, 3)


@given(spans(), st.booleans())
def test_rows_are_copied_and_nothing_besides(given_spans: tuple[list[int], list[int], list[int]], back: bool) -> None:
    sources, places, lengths = given_spans
    src = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    dst = np.zeros(SIZE, np.uint8)
    if back and len(set(sources)) == len(sources) and sorted(sources) == sorted(places):
        sources, places = places, sources
    want = dst.copy()
    for at, to, length in zip(sources, places, lengths, strict=True):
        want[to : to + length] = src[at : at + length]
    copy_rows(rows(src, sources, lengths), rows(dst, places, lengths))
    assert np.array_equal(dst, want)


@pytest.mark.parametrize("repeated", [True, False])
def test_a_source_may_be_read_twice(repeated: bool) -> None:
    """As many rows as the grid has items, and yet no run: it must not be taken for one."""
    src, dst = np.arange(5 * 8, dtype=np.uint8), np.zeros(9 * 8, np.uint8)
    sources = [0, 8, 8, 32, 0] if repeated else [0, 8, 16, 32, 24]
    places = [64, 0, 16, 32, 48]
    copy_rows(rows(src, sources, [8] * 5), rows(dst, places, [8] * 5))
    for at, to in zip(sources, places, strict=True):
        assert np.array_equal(dst[to : to + 8], src[at : at + 8])


def test_rows_that_do_not_pair_are_refused() -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="don't pair"):
        copy_rows(rows(memory, [0], [8]), rows(memory, [8], [4]))
    with pytest.raises(ValueError, match="don't pair"):
        copy_rows(rows(memory, [0], [8]), rows(memory, [8, 16], [8, 8]))
    assert not memory.any()
