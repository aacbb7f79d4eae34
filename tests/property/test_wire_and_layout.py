# SPDX-License-Identifier: Apache-2.0
"""Any bytes decode or are refused; generated messages come back as they were; any block tables are copied exactly."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpush.core import wire
from kvpush.core.coverage import covered_volume, merge_rects
from kvpush.core.ids import Rect
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.plan import PairPlan, merge_adjacent, runs
from kvpush.errors import LayoutError, RemoteProtocolError
from kvpush.testing.simulation import Cell, ToyMemory, toy_layout

CI = settings(derandomize=True, database=None, deadline=None, max_examples=150)

INTEGERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 70_000)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)
NAMES = sorted(kind.__name__ for kind in wire.Message.__args__)
FIELDS = sorted({field for kind in wire.Message.__args__ for field in kind.__struct_fields__})

TEXT = st.text(min_size=1, max_size=20)
BLOB = st.binary(max_size=40)
SMALL = st.integers(0, 2**16 - 1)
RECTS = st.lists(st.builds(Rect, *[st.integers(-(2**63), 2**63 - 1)] * 6), max_size=5).map(tuple)
LAYERS = st.builds(
    LayerLayout,
    name=TEXT,
    group=st.integers(0, 2**20),
    num_blocks=st.integers(1, 2**40),
    block_tokens=st.integers(1, 2**40),
    head_lo=st.integers(0, 2**20),
    num_heads=st.integers(1, 2**40),
    dtype=TEXT,
    format=TEXT,
    split=st.sampled_from(["none", "head", "token", "both"]),
    planes=st.lists(
        st.builds(
            Plane,
            st.text(min_size=1, max_size=16),
            st.integers(0, 2**63 - 1),
            st.integers(1, 2**40),
            st.integers(1, 2**40),
            st.integers(0, 2**20),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
LAYOUTS = st.builds(CacheLayout, st.lists(LAYERS, min_size=1, max_size=4).map(tuple), st.integers(1, 64))
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "session": st.integers(1, 2**63 - 1),
    "engine_id": TEXT,
    "agent_name": TEXT,
    "agent_metadata": BLOB,
    "transport": TEXT,
    "layout": LAYOUTS,
    "compat": st.dictionaries(TEXT, TEXT, max_size=4),
    "lease_s": st.floats(0, 86400),
    "heartbeat_s": st.floats(0, 86400),
    "poll_s": st.floats(0, 86400),
    "idle_heartbeat_s": st.floats(0, 86400),
    "retry_window_s": st.floats(0, 86400),
    "fenced": st.booleans(),
    "endpoints": st.lists(
        st.builds(wire.Endpoint, st.integers(0, 65535), st.text(max_size=20), st.integers(1, 65535)), max_size=4
    ).map(tuple),
    "covers": RECTS,
    "coverage": RECTS,
    "seq": st.integers(0, 2**53),
    "reason": st.text(max_size=30),
    "unknown": st.booleans(),
    "started": st.booleans(),
    "waiting": st.booleans(),
    "request_id": TEXT,
    "epoch": st.integers(0, 2**31 - 1),
    "keys": st.lists(TEXT, min_size=1, max_size=8).map(tuple),
    "prompt_digest": st.binary(max_size=64),
    "num_tokens": st.integers(0, 2**31 - 1),
    "token_lo": st.integers(0, 2**31 - 1),
    "verify": st.booleans(),
    "digest": st.text(max_size=64),
    "digests": st.lists(st.binary(min_size=1, max_size=64), max_size=4).map(tuple),
    "digest_hi": st.integers(0, 2**31 - 1),
    "blocks": st.lists(BLOB, min_size=1, max_size=4).map(tuple),
    "staging": st.none()
    | st.builds(
        wire.StagingOffer, st.integers(1, 2**63 - 1), st.integers(0, 2**20), st.integers(1, 2**32), st.integers(1, 4096)
    ),
    "tag": st.integers(0, 2**53),
    "slot": SMALL,
    "layer_lo": SMALL,
    "layer_hi": SMALL,
    "block_lo": st.integers(0, 2**31 - 1),
    "block_hi": st.integers(0, 2**31 - 1),
    "error": st.text(max_size=30),
}
REFS = st.lists(st.builds(wire.StreamRef, TEXT, st.integers(0, 2**31 - 1)), max_size=4).map(tuple)
STANDINGS = st.lists(
    st.builds(wire.StreamStanding, TEXT, st.integers(0, 2**31 - 1), st.booleans(), st.integers(0, 2**53)), max_size=4
).map(tuple)
ONLY_IN: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (wire.Inquiry, "streams"): REFS,
    (wire.Standing, "streams"): STANDINGS,
}
MESSAGES = st.sampled_from(wire.Message.__args__).flatmap(
    lambda kind: st.fixed_dictionaries(
        {field: ONLY_IN[kind, field] if (kind, field) in ONLY_IN else BY_NAME[field] for field in kind.__struct_fields__}
    ).map(lambda f: kind(**f))
)


def decodes_or_is_refused(frame: bytes) -> None:
    try:
        message = wire.decode(frame)
    except RemoteProtocolError:
        return
    assert isinstance(message, wire.Message)


@CI
@given(st.binary(max_size=300))
@example(b"")
@example(b"KVP\x01")
@example(b"KVP\x01\xc1")
@example(b"KVP\x01\xdf\xff\xff\xff\xff")
def test_any_bytes(data: bytes) -> None:
    decodes_or_is_refused(data)
    decodes_or_is_refused(b"KVP\x01" + data)


@CI
@given(ANYTHING)
def test_any_messagepack(value: Any) -> None:
    decodes_or_is_refused(b"KVP\x01" + msgspec.msgpack.encode(value))


@CI
@given(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=12))
def test_any_fields_of_a_known_message(name: str, fields: dict[str, Any]) -> None:
    decodes_or_is_refused(b"KVP\x01" + msgspec.msgpack.encode({"type": name, **fields}))


@CI
@given(MESSAGES)
def test_round_trip(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@CI
@given(MESSAGES, st.data())
def test_damaged_messages(message: wire.Message, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_is_refused(bytes(frame))


@CI
@given(LAYOUTS, LAYOUTS)
def test_any_two_layouts_are_paired_or_refused(src: CacheLayout, dst: CacheLayout) -> None:
    try:
        plan = PairPlan(src, dst)
    except LayoutError:
        return
    covered = plan.coverage(0, plan.num_layers, 0, 1)
    assert covered_volume(covered) <= sum(layer.num_heads for layer in dst.layers)


TABLES = st.integers(0, 10).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 11), min_size=n, max_size=n, unique=True)] * 2)
)


@CI
@given(
    TABLES,
    st.booleans(),
    st.booleans(),
    st.sampled_from([("kv",), ("k", "v")]),
    st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    st.data(),
)
def test_descriptors_cover_exactly_what_is_asked(
    tables: tuple[list[int], list[int]],
    src_outermost: bool,
    dst_outermost: bool,
    planes: tuple[str, ...],
    src_layers: list[int],
    dst_layers: list[int],
    data: st.DataObject,
) -> None:
    src = toy_layout(src_layers, base=1 << 20, num_blocks=12, planes=planes, blocks_outermost=src_outermost)
    dst = toy_layout(dst_layers, base=1 << 30, num_blocks=12, planes=planes, blocks_outermost=dst_outermost)
    low = data.draw(st.integers(0, len(src_layers)))
    high = data.draw(st.integers(low, len(src_layers)))
    a, b = (np.array(ids, np.int32) for ids in tables)
    src_rows, dst_rows = PairPlan(src, dst).descriptors(low, high, (a,), (b,))
    pairs = list(zip(ToyMemory(src).cells(src_rows), ToyMemory(dst).cells(dst_rows), strict=True))
    wanted = {
        (Cell(f"layer.{layer}", plane, i), Cell(f"layer.{layer}", plane, j))
        for layer in src_layers[low:high]
        if layer in dst_layers
        for plane in planes
        for i, j in zip(*tables, strict=True)
    }
    assert len(pairs) == len(wanted)
    assert set(pairs) == wanted
    again = merge_adjacent(src_rows, dst_rows)
    assert len(again[0]) == len(src_rows), "something could have been joined"
    if not src_outermost and not dst_outermost:
        starts, _ = runs(a.astype(np.int64), b.astype(np.int64))
        used = len([layer for layer in src_layers[low:high] if layer in dst_layers])
        assert len(src_rows) == len(starts) * used * len(planes)


SMALL = st.builds(Rect, *[st.integers(0, 5)] * 6)


@CI
@given(st.lists(SMALL, max_size=10))
def test_volume_of_any_rectangles(rects: list[Rect]) -> None:
    grid = np.zeros((5, 5, 5), bool)
    merged: list[Rect] = []
    for rect in rects:
        if rect.volume:
            grid[rect.layer_lo : rect.layer_hi, rect.head_lo : rect.head_hi, rect.token_lo : rect.token_hi] = True
        merge_rects(merged, rect)
    assert covered_volume(rects) == covered_volume(merged) == int(grid.sum())
