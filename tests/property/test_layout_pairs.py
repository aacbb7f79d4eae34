# SPDX-License-Identifier: Apache-2.0
"""Random pairs of cache layouts, block tables, prefix hits and chunks, on byte arrays where each (layer, K/V, head, token) has
a value of its own: what arrives is what the reference says, no byte outside is touched, no row leaves its allocation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvpush.core.coverage import covered_volume
from kvpush.core.ids import BlockTable, Rect
from kvpush.core.layout import CacheLayout, LayerLayout, Plane, blocks_for_tokens
from kvpush.core.plan import PairPlan

UNITS = (4, 2)
"""Bytes of one (K or V, head, token), by group; where K and V lie together in ``C``, twice as many."""


@dataclass(frozen=True)
class Shape:
    """How one side keeps a layer.

    Args:
        format: See ``LayerLayout``.
        apart: Planes ``k`` and ``v``.
        gap: Bytes between blocks.
        blocks_outermost: Layers lie side by side in a block.
    """

    format: str
    apart: bool
    gap: int
    blocks_outermost: bool


@dataclass
class Side:
    """One rank's cache.

    Args:
        regions: The allocations, as ranges ``[lo, hi)`` of offsets: they touch.
        tables: Block ids per group.
    """

    layout: CacheLayout
    memory: npt.NDArray[np.uint8]
    base: int
    shape: Shape
    tokens: int
    regions: list[tuple[int, int]]
    tables: list[list[int]]

    def cells(self, layer: LayerLayout, head: int, token: int, kind: int) -> npt.NDArray[np.uint8]:
        """The bytes of one (K/V, head, token) of the prompt: a plain reading of the format, one element at a time."""
        nth, token = divmod(token, self.tokens)
        block = self.tables[layer.group][nth]
        pieces, _, order = self.shape.format.rpartition("x")
        num = int(pieces or 1)
        tokens = layer.block_tokens // num
        together = not self.shape.apart and "2" not in order
        unit = UNITS[layer.group]
        sizes = {"2": 2, "H": layer.num_heads, "N": tokens, "C": 2 * unit if together else unit}
        at = 0
        for dim in order:
            at = at * sizes[dim] + {"2": kind, "H": head - layer.head_lo, "N": token % tokens, "C": 0}[dim]
        slab = layer.planes[0].block_bytes
        at += token // tokens * (slab // num)
        if together:
            at += kind * unit
        plane = layer.planes[kind if self.shape.apart else 0]
        start = plane.base - self.base + block * plane.block_stride + at
        return self.memory[start : start + unit]

    def part(self, token_lo: int, token_hi: int) -> BlockTable:
        """The ids of the blocks that hold some tokens."""
        first, stop = token_lo // self.tokens, blocks_for_tokens(token_hi, self.tokens)
        return tuple(np.array(ids[first:stop], np.int32) for ids in self.tables)

    def offsets(self, rows: npt.NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
        """Descriptors as ranges of offsets; each lies in one allocation."""
        for address, length, _ in rows.tolist():
            lo, hi = address - self.base, address - self.base + length
            assert any(low <= lo and hi <= high for low, high in self.regions), "a row runs out of its allocation"
            yield lo, hi


def side(
    shape: Shape, *, layers: int, groups: int, tokens: int, head_lo: int, heads: int, base: int, tables: list[list[int]]
) -> Side:
    """A rank. The layers of a second group lie in the same memory as the first one's, with shorter blocks."""
    contents = ("k", "v") if shape.apart else ("kv",)
    num_blocks = 1 + max(itertools.chain(*tables))
    slab = tokens * heads * UNITS[0] * 2 // len(contents)
    slabs = layers * len(contents)
    stride = slabs * slab + shape.gap if shape.blocks_outermost else slab + shape.gap
    step = slab if shape.blocks_outermost else num_blocks * stride
    size = num_blocks * stride if shape.blocks_outermost else slabs * num_blocks * stride
    layout = CacheLayout(
        tuple(
            LayerLayout(
                name=f"group.{group}.layer.{idx}",
                group=group,
                num_blocks=num_blocks,
                block_tokens=tokens,
                head_lo=head_lo,
                num_heads=heads,
                dtype="float32",
                format=shape.format,
                split="head",
                planes=tuple(
                    Plane(content, base + (idx * len(contents) + at) * step, stride, slab * UNITS[group] // UNITS[0])
                    for at, content in enumerate(contents)
                ),
            )
            for idx in range(layers)
            for group in range(groups)
        ),
        groups,
    )
    regions = [(0, size)] if shape.blocks_outermost else [(at, at + step) for at in range(0, size, step)]
    return Side(layout, np.zeros(size, np.uint8), base, shape, tokens, regions, tables)


def value(layer: LayerLayout, kind: int, head: int, token: int) -> npt.NDArray[np.uint8]:
    number = int(layer.name.rpartition(".")[2]) + 4 * layer.group
    content = 1 + number + 8 * (kind + 2 * (head + 16 * token))
    return np.frombuffer(content.to_bytes(4, "little"), np.uint8)[: UNITS[layer.group]]


def everything(layer: LayerLayout, token_lo: int, token_hi: int) -> Iterator[tuple[int, int, int]]:
    """Every head, token and K or V."""
    return itertools.product(range(layer.head_lo, layer.head_lo + layer.num_heads), range(token_lo, token_hi), range(2))


@st.composite
def shapes(draw: st.DrawFn, tokens: int, kinds_apart: bool) -> Shape:
    orders = ["HNC", "NHC"]
    apart = draw(st.booleans()) if kinds_apart else False
    if kinds_apart and not apart:
        orders = ["2HNC", "2NHC", "H2NC", "N2HC", "HN2C", "NH2C"]
    order = draw(st.sampled_from(orders))
    pieces = draw(st.sampled_from([n for n in (1, 2, 4) if tokens % n == 0]))
    text = order if pieces == 1 else f"{pieces}x{order}"
    return Shape(text, apart, draw(st.sampled_from([0, 0, 24])), draw(st.booleans()))


@dataclass
class Pairing:
    """Producer ranks and consumer ranks, and a prompt."""

    producers: list[Side]
    consumers: list[Side]
    num_tokens: int


@st.composite
def pairings(draw: st.DrawFn) -> Pairing:
    apart = draw(st.booleans())
    layers, groups, heads = draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2])), 4
    num_tokens = draw(st.integers(1, 20))
    numbers = itertools.count(1)
    sizes = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    if draw(st.booleans()):
        sizes = sizes[0], sizes[0]
    ranks: list[list[Side]] = []
    for tokens in sizes:
        shape = draw(shapes(tokens, apart))
        held = draw(st.sampled_from([1, 2, 4]))
        count = blocks_for_tokens(num_tokens, tokens)
        ids = draw(st.permutations(range(groups * count + 2)))
        tables = [ids[group * count : (group + 1) * count] for group in range(groups)]
        ranks.append(
            [
                side(
                    shape,
                    layers=layers,
                    groups=groups,
                    tokens=tokens,
                    head_lo=head_lo,
                    heads=held,
                    base=next(numbers) << 24,
                    tables=tables,
                )
                for head_lo in range(0, heads, held)
            ]
        )
    return Pairing(*ranks, num_tokens)


@given(pairings(), st.data())
def test_what_arrives_is_what_the_reference_says(pairing: Pairing, data: st.DataObject) -> None:
    producers, consumers, num_tokens = pairing.producers, pairing.consumers, pairing.num_tokens
    size, target_size = producers[0].tokens, consumers[0].tokens
    hit = target_size * data.draw(st.integers(0, (num_tokens - 1) // target_size), "blocks that decode has already")
    # Chunks end where the producer's blocks do, and with the prompt.
    ends = data.draw(st.sets(st.sampled_from([*range(size, num_tokens, size), num_tokens])), "where chunks end")
    bounds = [hit, *sorted(end for end in ends if hit < end < num_tokens), num_tokens]
    for rank in producers:
        for layer in rank.layout.layers:
            for head, token, kind in everything(layer, 0, blocks_for_tokens(num_tokens, size) * size):
                rank.cells(layer, head, token, kind)[:] = value(layer, kind, head, token)
    num_layers = len(producers[0].layout.layers)
    middle = data.draw(st.integers(0, num_layers), "layers in two parts")
    for consumer in consumers:
        consumer.memory[:] = np.random.default_rng(1).integers(128, 255, len(consumer.memory))
        before = consumer.memory.copy()
        covered: list[Rect] = []
        for producer in producers:
            plan = PairPlan(producer.layout, consumer.layout)
            assert plan.parted == (size != target_size and len(plan.mapped_layers) > 0)
            moved = 0
            for (lo, hi), (first, stop) in itertools.product(itertools.pairwise(bounds), ((0, middle), (middle, num_layers))):
                src, dst = plan.descriptors(first, stop, producer.part(lo, hi), consumer.part(lo, hi), (lo, hi))
                assert (src[:, 1] == dst[:, 1]).all()
                for (at, end), (to, until) in zip(producer.offsets(src), consumer.offsets(dst), strict=True):
                    consumer.memory[to:until] = producer.memory[at:end]
                covered += plan.coverage(first, stop, lo, hi)
                units = blocks_for_tokens(hi, plan.unit_tokens) - lo // plan.unit_tokens
                wanted = sum(plan.bytes_per_block(idx, idx + 1) for idx in range(first, stop)) * units
                assert int(src[:, 1].sum()) == wanted
                moved += wanted
            assert moved == 0 or len(plan.mapped_layers) == num_layers
        assert covered_volume(covered) == num_layers * consumer.layout.layers[0].num_heads * (num_tokens - hit)
        expected = Side(consumer.layout, before, *list(vars(consumer).values())[2:])
        for layer in consumer.layout.layers:
            for head, token, kind in everything(layer, hit, num_tokens):
                expected.cells(layer, head, token, kind)[:] = value(layer, kind, head, token)
            # What is behind the prompt in its last block is nobody's: it may come along, from the same place.
            for head, token, kind in everything(layer, num_tokens, blocks_for_tokens(num_tokens, target_size) * target_size):
                cells = consumer.cells(layer, head, token, kind)
                if (cells == value(layer, kind, head, token)).all():
                    expected.cells(layer, head, token, kind)[:] = cells
        np.testing.assert_array_equal(consumer.memory, expected.memory)
