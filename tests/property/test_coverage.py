# SPDX-License-Identifier: Apache-2.0
"""What a union of rectangles covers, in whatever order its pieces come, against a plain set of their entries."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.core.coverage import covered_volume, merge_rects
from kvpush.core.ids import Rect

Entries = set[tuple[int, int, int]]
SIDE = 5

edges = st.integers(-1, SIDE)
rects = st.builds(Rect, edges, edges, edges, edges, edges, edges)
"""Empty and inverted ones among them: both count for nothing."""


def entries(pieces: list[Rect]) -> Entries:
    found: Entries = set()
    for piece in pieces:
        sides = itertools.pairwise(piece)
        found.update(itertools.product(*(range(lo, hi) for lo, hi in itertools.islice(sides, 0, None, 2))))
    return found


def merged(pieces: list[Rect]) -> list[Rect]:
    found: list[Rect] = []
    for piece in pieces:
        merge_rects(found, piece)
    return found


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Rect, list[Rect]]:
    """A box, and the pieces that planes cut it into, in any order: what ranks and chunks send of one transfer."""
    cuts = [sorted({0, SIDE, *draw(st.lists(st.integers(1, SIDE - 1), max_size=3))}) for _ in range(3)]
    stretches = [list(itertools.pairwise(cut)) for cut in cuts]
    pieces = [Rect(*layers, *heads, *tokens) for layers, heads, tokens in itertools.product(*stretches)]
    return Rect(0, SIDE, 0, SIDE, 0, SIDE), draw(st.permutations(pieces))


@settings(max_examples=500, deadline=None)
@given(st.lists(rects, max_size=12).flatmap(lambda pieces: st.tuples(st.just(pieces), st.permutations(pieces))))
def test_merging_in_any_order_keeps_every_entry_and_adds_none(orders: tuple[list[Rect], list[Rect]]) -> None:
    reference = entries(orders[0])
    for pieces in orders:
        found = merged(pieces)
        assert entries(found) == reference
        assert covered_volume(found) == covered_volume(pieces) == len(reference)
        assert len(found) <= len(pieces)
        assert len(set(found)) == len(found)


@settings(max_examples=300, deadline=None)
@given(partitions(), st.data())
def test_a_transfer_is_complete_with_its_last_piece_and_not_before(cut: tuple[Rect, list[Rect]], data: st.DataObject) -> None:
    whole, pieces = cut
    found: list[Rect] = []
    so_far = 0
    for piece in pieces:
        assert covered_volume(found) == so_far < whole.volume
        merge_rects(found, piece)
        # Said again, as by a rank that repeats its commit: nothing changes.
        merge_rects(found, data.draw(st.sampled_from(pieces[: pieces.index(piece) + 1])))
        so_far += piece.volume
    assert covered_volume(found) == whole.volume
    assert entries(found) == entries([whole])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted), st.randoms(use_true_random=False))
def test_chunks_of_one_rank_end_as_one_piece_in_any_order(stops: list[int], random: object) -> None:
    """The list that a consumer keeps for a request stays short however many writes there were."""
    pieces = [Rect(0, 4, 0, 2, lo, hi) for lo, hi in itertools.pairwise([0, *stops])]
    random.shuffle(pieces)  # type: ignore[attr-defined]
    assert merged(pieces) == [Rect(0, 4, 0, 2, 0, stops[-1])]
