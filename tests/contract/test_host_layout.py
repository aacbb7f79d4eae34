# SPDX-License-Identifier: Apache-2.0
"""The layout adapter for host memory: what it says is checked against what NumPy says."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from kvpush.backends._host_layout import host_layout
from kvpush.backends.base import CacheView
from kvpush.core.plan import PairPlan
from kvpush.errors import LayoutError
from kvpush.testing.contract import host_view


def block_bytes(view: CacheView, block: int) -> bytes:
    (layer,) = host_layout([view]).layers
    return b"".join(ctypes.string_at(plane.base + plane.block_stride * block, plane.block_bytes) for plane in layer.planes)


@pytest.mark.parametrize(
    ("shape", "order", "memory_order", "blocks", "tokens", "padding", "text", "contents", "split"),
    [
        ((8, 2, 4, 6), "BHNC", None, 8, 4, 0, "HNC", ["kv"], "head"),
        ((8, 2, 4, 6), "BHNC", "BNHC", 8, 4, 0, "NHC", ["kv"], "token"),
        ((8, 4, 2, 6), "BNHC", None, 8, 4, 0, "NHC", ["kv"], "token"),
        ((8, 2, 4, 6), "BHNC", None, 8, 4, 10, "HNC", ["kv"], "head"),
        ((8, 2, 4, 6), "BHNC", None, 4, 8, 0, "2xHNC", ["kv"], "token"),
        ((2, 8, 2, 4, 6), "2BHNC", None, 8, 4, 0, "HNC", ["k", "v"], "head"),
        ((2, 8, 2, 4, 6), "2BHNC", None, 2, 16, 0, "4xHNC", ["k", "v"], "token"),
        ((2, 8, 2, 4, 6), "2BHNC", "B2HNC", 8, 4, 0, "HNC", ["k", "v"], "head"),
        ((8, 2, 2, 4, 6), "B2HNC", None, 8, 4, 0, "2HNC", ["kv"], "head"),
        ((8, 4, 6), "BNC", None, 8, 4, 0, "NC", ["kv"], "token"),
        ((8, 1, 4, 6), "BHNC", "BNHC", 8, 4, 0, "HNC", ["kv"], "head"),
    ],
)
def test_layouts(
    shape: tuple[int, ...],
    order: str,
    memory_order: str | None,
    blocks: int,
    tokens: int,
    padding: int,
    text: str,
    contents: list[str],
    split: str,
) -> None:
    heads = shape[order.index("H")] if "H" in order else 1
    view, array = host_view(
        shape, order, num_blocks=blocks, block_tokens=tokens, num_heads=heads, memory_order=memory_order, padding=padding
    )
    array[...] = np.arange(array.size, dtype=np.uint16).reshape(array.shape)
    (layer,) = host_layout([view]).layers
    assert (layer.format, layer.split, [plane.content for plane in layer.planes]) == (text, split, contents)
    assert (layer.num_blocks, layer.block_tokens) == (blocks, tokens)
    assert layer.block_bytes * blocks == array.size * 2
    ratio = array.shape[order.index("B")] // blocks
    for block in range(blocks):
        mine = array.take(range(block * ratio, (block + 1) * ratio), axis=order.index("B"))
        assert sorted(np.frombuffer(block_bytes(view, block), np.uint16).tolist()) == sorted(mine.ravel().tolist())


def test_element_order_inside_a_block_is_the_text_s() -> None:
    view, array = host_view((3, 2, 4, 6), "BHNC", num_blocks=3, block_tokens=4, num_heads=2, memory_order="BNHC")
    array[...] = np.arange(array.size, dtype=np.uint16).reshape(array.shape)
    found = np.frombuffer(block_bytes(view, 1), np.uint16).reshape(4, 2, 6)  # NHC
    np.testing.assert_array_equal(found, array[1].transpose(1, 0, 2))


def test_tagged_formats_are_opaque() -> None:
    view, _keep = host_view((3, 2, 4, 6), "BHNC", num_blocks=3, block_tokens=4, num_heads=2, tag="cpu_attn-amx")
    (layer,) = host_layout([view]).layers
    assert (layer.format, layer.split) == ("HNC:cpu_attn-amx", "none")


def test_different_tags_do_not_pair_and_different_orders_take_more_rows() -> None:
    def one(**options: str) -> CacheView:
        return host_view((3, 2, 4, 6), "BHNC", num_blocks=3, block_tokens=4, num_heads=2, **options)[0]  # type: ignore[arg-type]

    plain = host_layout([one()])
    with pytest.raises(LayoutError, match="format"):
        PairPlan(plain, host_layout([one(tag="cpu_attn-amx")]))
    ids = (np.array([0, 2], np.int32),)
    same, turned = PairPlan(plain, host_layout([one()])), PairPlan(plain, host_layout([one(memory_order="BNHC")]))
    assert (same.way, len(same.descriptors(0, 1, ids, ids)[0])) == ("direct", 2)
    assert (turned.way, len(turned.descriptors(0, 1, ids, ids)[0])) == ("scatter", 2 * 2 * 4)


def test_groups_are_counted() -> None:
    first, _a = host_view((3, 2, 4, 6), "BHNC", num_blocks=3, block_tokens=4, num_heads=2)
    second, _b = host_view((3, 2, 4, 6), "BHNC", name="x", group=1, num_blocks=3, block_tokens=4, num_heads=2)
    assert host_layout([first, second]).num_groups == 2


def test_refusals_name_the_layer_and_the_reason() -> None:
    view, _keep = host_view((8, 2, 4, 6), "BHNC", num_blocks=8, block_tokens=4, num_heads=2)
    padded, _keep2 = host_view((8, 2, 4, 6), "BHNC", num_blocks=4, block_tokens=8, num_heads=2, padding=3)
    cases = [
        (replace(view, device_type="cuda"), "device type"),
        (replace(view, order="BHN"), "order"),
        (replace(view, order="BHNX"), "order"),
        (replace(view, order="HHNC"), "order"),
        (replace(view, strides=(96, 48, 24, 4)), "dimension C"),
        (replace(view, strides=(96, 48, 12, -2)), "can't be right"),
        (replace(view, strides=(48, 48, 12, 2)), "overlap"),
        (replace(view, num_blocks=3), "no multiple"),
        (replace(view, num_blocks=16), "no multiple"),
        (replace(view, block_tokens=5), "tokens"),
        (replace(view, num_heads=4), "heads"),
        (replace(view, address=view.address + 2), "region"),
        (replace(view, order="2HNC"), "order"),
        (replace(view, order="B2NC", shape=(8, 3, 4, 6)), "extent 3"),
        (padded, "adjacent"),
    ]
    for broken, why in cases:
        with pytest.raises(LayoutError, match=why) as caught:
            host_layout([broken])
        assert "layer.0" in caught.value.message
    with pytest.raises(LayoutError, match="address 0"):
        host_layout([replace(view, address=0, region=replace(view.region, address=0))])
    with pytest.raises(LayoutError, match="no KV cache"):
        host_layout([])
