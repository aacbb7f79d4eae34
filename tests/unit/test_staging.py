# SPDX-License-Identifier: Apache-2.0
"""Packed blocks: their geometry, who may use which slots, the way of a staged write through them, and which way is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machines import BLOCK_BYTES, layout

from kvpush.backends._host_copy import copy_rows
from kvpush.core import wire
from kvpush.core.effects import PostWrite
from kvpush.core.ids import AgentName, Epoch, RequestId, SessionId, WriteId
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.plan import PairPlan
from kvpush.core.staged_writes import EndedWrite, StagedWrites, WayEstimate
from kvpush.core.staging import Frames, Packer, Shares, StagingArea, Unpacker
from kvpush.core.transport import Descriptors, WriteStatus
from kvpush.errors import BackendError, TransportError

AREA = StagingArea(1 << 30, 0, 4096, 4)
FIRST_TOKEN = 1 << 62


# --- geometry ---------------------------------------------------------------------------------------------------------


class Cache:
    """Real bytes under a layout: layers of several groups, K and V apart or together, heads or tokens outermost."""

    def __init__(self, formats: list[tuple[str, int]], *, apart: bool, num_blocks: int, seed: int) -> None:
        tokens, heads, unit = 4, 2, 8
        slab = tokens * heads * unit * (1 if apart else 2)
        contents = ("k", "v") if apart else ("kv",)
        self.memory = np.random.default_rng(seed).integers(
            0, 256, (len(formats), len(contents), num_blocks, slab + 24), np.uint8
        )
        base = self.memory.ctypes.data
        step = self.memory.strides
        self.layout = CacheLayout(
            tuple(
                LayerLayout(
                    f"layer.{idx}", group, num_blocks, tokens, 0, heads, "float32", text, "both",
                    tuple(
                        Plane(content, base + idx * step[0] + nr * step[1], slab + 24, slab)
                        for nr, content in enumerate(contents)
                    ),
                )
                for idx, (text, group) in enumerate(formats)
            ),
            1 + max(group for _, group in formats),
        )  # fmt: skip


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("layers", [(0, 4), (1, 3), (3, 4)])
@pytest.mark.parametrize("orders", [("HNC", "HNC"), ("HNC", "NHC")], ids=["alike", "differing"])
def test_packed_and_unpacked_is_copied(apart: bool, layers: tuple[int, int], orders: tuple[str, str]) -> None:
    """By slots it is the same copy as block by block, for two groups with block tables of their own; and no byte besides."""
    groups = [0, 1, 0, 1]
    src = Cache([(orders[0], group) for group in groups], apart=apart, num_blocks=9, seed=1)
    dst = Cache([(orders[1], group) for group in groups], apart=apart, num_blocks=7, seed=2)
    rng = np.random.default_rng(3)
    src_blocks = tuple(rng.permutation(9)[:5].astype(np.int32) for _ in range(2))
    dst_blocks = tuple(rng.permutation(7)[:5].astype(np.int32) for _ in range(2))
    before = dst.memory.copy()
    copy_rows(*PairPlan(src.layout, dst.layout).descriptors(*layers, src_blocks, dst_blocks))
    want = dst.memory.copy()
    dst.memory[:] = before

    frames = Frames(dst.layout)
    slots = np.zeros(3 * 4096, np.uint8)
    area = StagingArea(slots.ctypes.data, 0, 4096, 3)
    num_bytes = frames.frame_bytes(*layers) * 5
    assert num_bytes <= area.slot_bytes
    rows = Packer(src.layout, frames).rows(layers, layers, src_blocks, area, 1)
    assert int(rows[1][:, 1].sum()) == num_bytes
    copy_rows(*rows)
    assert not slots[:4096].any()
    assert not slots[4096 + num_bytes :].any(), "a frame follows the other, and nothing comes behind the last"
    copy_rows(*Unpacker(dst.layout).rows(*layers, dst_blocks, area, 1))
    assert np.array_equal(dst.memory, want)


def test_layers_that_share_their_memory_are_packed_and_unpacked() -> None:
    """As vLLM's layers that share a KV cache do, on both sides."""

    def sharing(memory: np.ndarray[Any, Any]) -> CacheLayout:
        planes = (Plane("kv", memory.ctypes.data, 64, 64),)
        names = ("layer.0", "layer.1")
        return CacheLayout(tuple(LayerLayout(name, 0, 9, 4, 0, 2, "float32", "HND", "none", planes) for name in names))

    here, there = np.random.default_rng(1).integers(0, 256, (2, 9, 64), np.uint8)
    slots = np.zeros(4096, np.uint8)
    area = StagingArea(slots.ctypes.data, 0, 4096, 1)
    blocks, into = (np.array([5, 2], np.int32),), (np.array([1, 7], np.int32),)
    plan = PairPlan(sharing(here), sharing(there))
    for layers in ((0, 1), (0, 2), (1, 2)):
        there[:] = 0
        assert plan.whole_layers(*layers) == layers
        copy_rows(*Packer(plan.src, Frames(plan.dst)).rows(layers, layers, blocks, area, 0))
        copy_rows(*Unpacker(plan.dst).rows(*layers, into, area, 0))
        assert np.array_equal(there[into[0]], here[blocks[0]])
        assert not there[[0, 2, 3, 4, 5, 6, 8]].any()


def test_shares_are_had_by_one_and_come_back_when_they_are_safe() -> None:
    shares = Shares(StagingArea(1000, 3, 10, 7), 2)
    taken = [shares.take(0.0) for _ in range(4)]
    assert taken == [(idx, StagingArea(1000 + idx * 20, 3, 10, 2)) for idx in range(3)] + [None]
    shares.give(1, safe_at=5.0)
    assert shares.take(4.9) is None
    assert shares.take(5.0) == taken[1]
    assert shares.num_free == 0


# --- staged writes ----------------------------------------------------------------------------------------------------


class Slots:
    """Staged writes over a transport, a copy and a machine that are played by the test."""

    def __init__(self, *, slots: int = 2, local: int = 4, slot_bytes: int = 4 * BLOCK_BYTES * 3, mode: Any = "on") -> None:
        self.now = 0.0
        self.sent: list[wire.Staged] = []
        self.posted: dict[int, tuple[Descriptors, Descriptors]] = {}
        self.allowed: bool | None = True
        self.refuse: str = ""
        self.broken_copy: str = ""
        self.copies: list[bool] = []
        self.instant = True
        self.offer = wire.StagingOffer(1 << 40, 0, slot_bytes, slots)
        self.plan = PairPlan(layout(), layout(base=1 << 30))
        self.staged = StagedWrites(
            layout(), StagingArea(1 << 35, 0, slot_bytes, local), self, self.copy, self.say, lambda _, now: self.allowed, mode  # type: ignore[arg-type]
        )  # fmt: skip

    def copy(self, src: Descriptors, dst: Descriptors) -> Callable[[], bool]:
        assert int(src[:, 1].sum()) == int(dst[:, 1].sum())
        if self.broken_copy:
            raise BackendError(self.broken_copy)
        self.copies.append(self.instant)
        number = len(self.copies) - 1
        return lambda: self.copies[number]

    def say(self, message: wire.Message) -> None:
        assert isinstance(message, wire.Staged)
        self.sent.append(message)

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        if self.refuse:
            raise TransportError(self.refuse)
        assert token not in self.posted
        self.posted[token] = (src, dst)

    def effect(self, number: int = 1, *, blocks: int = 8, session: int = 7) -> PostWrite:
        ids = (np.arange(blocks, dtype=np.int32),)
        return PostWrite(
            WriteId(number), AgentName("c"), self.plan, 0, 3, ids, ids, (0, 4 * blocks), 3 * blocks * BLOCK_BYTES,
            SessionId(session), RequestId("r"), Epoch(1), 10, self.offer,
        )  # fmt: skip

    def write(self, number: int = 1, *, blocks: int = 8, rows: int = 999, session: int = 7) -> bool:
        taken = self.take(number, blocks=blocks, rows=rows, session=session)
        self.advance(self.now)
        return taken

    def take(self, number: int, *, blocks: int = 8, rows: int = 999, session: int = 7) -> bool:
        """A write, and others of the same turn may follow."""
        return self.staged.take(self.effect(number, blocks=blocks, session=session), rows, self.now)

    def advance(self, now: float) -> None:
        """As often as is asked for."""
        self.staged.advance(now)
        for _ in range(100):
            if self.staged.next_deadline() != float("-inf") or self.staged._ended:
                return
            self.staged.advance(now)
        raise AssertionError("it asks to be called again and again")

    def land(self, *, ok: bool = True, may_land: bool = False) -> None:
        for token in list(self.posted):
            del self.posted[token]
            status = WriteStatus.DONE if ok else WriteStatus.FAILED
            assert self.staged.completed(token, status, "" if ok else "cut", may_land=may_land, now=self.now)
        self.advance(self.now)

    def unpack(self, *, error: str = "") -> None:
        for message in self.sent:
            self.staged.unpacked(wire.Unpacked(message.session, tag=message.tag, error=error), self.now)
        self.sent.clear()
        self.advance(self.now)

    def ended(self) -> list[EndedWrite]:
        return self.staged.take_ended()


def test_a_write_ends_when_its_last_piece_is_unpacked() -> None:
    slots = Slots()
    assert slots.write(blocks=10)
    assert len(slots.posted) == 2, "as many as there are slots"
    assert not slots.ended()
    seen: list[tuple[int, int, int]] = []
    for _ in range(2):
        slots.land()
        assert not slots.posted
        assert not slots.ended(), "landed is not unpacked"
        seen += [(message.block_lo, message.block_hi, message.slot) for message in slots.sent]
        slots.unpack()
    assert slots.ended() == [EndedWrite(WriteId(1), None, False)]
    assert [(lo, hi) for lo, hi, _ in seen] == [(10, 14), (14, 18), (18, 20)]
    assert seen[0][2] != seen[1][2]


def test_one_piece_is_packed_at_a_time() -> None:
    """Packing takes the submitter's time: before the next piece it looks what has become of those before."""
    slots = Slots(slots=3)
    slots.instant = False
    assert slots.staged.take(slots.effect(blocks=20), 999, 0.0)
    assert not slots.copies, "not by whoever posts: there may be more to post"
    for count in (1, 2, 3):
        assert slots.staged.next_deadline() == float("-inf"), "at once"
        slots.staged.advance(0.0)
        assert len(slots.copies) == count
    assert slots.staged.next_deadline() is None, "no slot is free: nothing to be done but wait for a copy"
    slots.staged.advance(0.0)
    assert len(slots.copies) == 3


def test_peers_take_turns_where_our_own_slots_are_few() -> None:
    slots = Slots(slots=4, local=1)
    for number in (1, 2, 3):
        assert slots.staged.take(slots.effect(number, blocks=20, session=10 + number), 999, 0.0)
    served = []
    for _ in range(9):
        slots.advance(0.0)
        slots.land()
        served.append(slots.sent[-1].session)
        slots.unpack()
    assert sorted(served[:3]) == sorted(served[3:6]) == sorted(served[6:]) == [11, 12, 13]


def test_pieces_go_where_they_are_said_to_be() -> None:
    slots = Slots()
    slots.write(blocks=8)
    places = [(int(dst[0, 0]), int(dst[0, 1])) for _, dst in slots.posted.values()]
    slots.land()
    assert places == [(slots.offer.address + m.slot * slots.offer.slot_bytes, slots.offer.slot_bytes) for m in slots.sent]


def test_nothing_is_posted_while_the_lease_does_not_allow_it() -> None:
    slots = Slots()
    slots.allowed = None
    slots.write()
    slots.advance(0.5)
    assert not slots.posted
    slots.allowed = True
    slots.advance(1.0)
    assert len(slots.posted) == 2


def test_nothing_is_posted_for_a_transfer_that_is_given_up() -> None:
    """Neither what is queued nor what has been packed meanwhile; what has landed is waited for."""
    slots = Slots(slots=3)
    slots.write(blocks=20)
    slots.land()
    slots.instant = False
    for message in slots.sent[:1]:
        slots.staged.unpacked(wire.Unpacked(7, tag=message.tag), slots.now)
    slots.advance(0.0)
    assert slots.staged.awaits_copy
    slots.allowed = False
    slots.copies = [True] * len(slots.copies)
    slots.advance(0.0)
    assert not slots.posted
    assert not slots.staged.awaits_copy
    assert not slots.ended(), "two pieces are not unpacked yet"
    slots.unpack()
    (ended,) = slots.ended()
    assert ended.error == "not posted: its transfer has been given up"
    slots.allowed, slots.instant = True, True
    assert slots.write(2)
    assert len(slots.posted) == 2, "every slot came back"


def test_a_copy_is_waited_for() -> None:
    slots = Slots()
    slots.instant = False
    slots.write(blocks=4)
    slots.advance(0.0)
    assert slots.staged.awaits_copy
    assert not slots.posted
    slots.copies[0] = True
    slots.advance(0.0)
    assert len(slots.posted) == 1


@pytest.mark.parametrize("fault", ["copy", "post", "landing", "unpacking", "gone"])
def test_a_fault_ends_the_write_once_and_gives_the_slots_back(fault: str) -> None:
    slots = Slots()
    if fault == "copy":
        slots.broken_copy = "no memory"
    if fault == "post":
        slots.refuse = "no way"
    slots.write(blocks=20)
    if fault == "landing":
        slots.land(ok=False)
    else:
        slots.land()
    if fault == "gone":
        slots.staged.close_session(SessionId(7), slots.now)
    slots.unpack(error="broken" if fault == "unpacking" else "")
    (ended,) = slots.ended()
    assert ended.write_id == 1
    assert ended.error
    assert not ended.may_land
    slots.broken_copy = slots.refuse = ""
    assert slots.write(2, blocks=8)
    assert len(slots.posted) == 2
    slots.land()
    slots.unpack()
    assert slots.ended() == [EndedWrite(WriteId(2), None, False)]


def test_what_may_still_land_keeps_its_slot() -> None:
    slots = Slots()
    slots.write(blocks=8)
    slots.land(ok=False, may_land=True)
    assert slots.ended() == [EndedWrite(WriteId(1), "cut", True)]
    slots.write(2)
    assert not slots.posted, "both slots may still be written to"


def test_a_session_that_ends_waits_for_what_the_transport_has() -> None:
    slots = Slots()
    slots.write(blocks=20)
    slots.staged.close_session(SessionId(7), slots.now)
    assert not slots.ended(), "two pieces are in flight: they read our memory"
    slots.land()
    (ended,) = slots.ended()
    assert ended.error == "its consumer has gone"
    assert not slots.sent, "nobody is told"


def test_an_announcement_that_is_not_answered_is_said_again() -> None:
    slots = Slots()
    slots.write(blocks=4)
    slots.land()
    first = list(slots.sent)
    assert slots.staged.next_deadline() == 1.0
    slots.advance(0.9)
    assert slots.sent == first
    slots.advance(1.0)
    assert slots.sent == first * 2
    slots.unpack()
    assert [ended.error for ended in slots.ended()] == [None]
    assert slots.staged.next_deadline() is None


def test_answers_that_nobody_waits_for_are_nothing() -> None:
    slots = Slots()
    slots.write(blocks=4)
    slots.staged.unpacked(wire.Unpacked(7, tag=1), slots.now)
    slots.staged.unpacked(wire.Unpacked(8, tag=1), slots.now)
    slots.staged.unpacked(wire.Unpacked(7, tag=2**50), slots.now)
    assert not slots.ended()
    slots.land()
    slots.staged.unpacked(wire.Unpacked(8, tag=slots.sent[0].tag), slots.now)
    assert not slots.ended(), "another session's answer"
    slots.unpack()
    assert len(slots.ended()) == 1


def test_what_cannot_be_staged_is_left_to_the_caller() -> None:
    slots = Slots(mode="auto")
    assert not slots.write(rows=3)
    assert not Slots(slot_bytes=BLOCK_BYTES).write(), "a frame is longer than a slot"
    other = Slots()
    other.plan = PairPlan(layout(), layout([1, 2, 3], base=1 << 30))
    assert not other.write(), "the consumer has other layers"


def test_the_end_of_a_write_that_failed_at_once_is_due_at_once() -> None:
    slots = Slots()
    slots.broken_copy = "no memory"
    slots.write()
    due = slots.staged.next_deadline()
    assert due is not None, "nobody would ask before something else happens"
    assert due <= slots.now
    assert slots.ended()
    assert slots.staged.next_deadline() is None


@pytest.mark.parametrize("fault", ["packing", "unpacking"])
def test_staging_that_does_not_work_is_left_off(fault: str) -> None:
    """Else every transfer would fail of the trial: its cost is never known."""
    slots = Slots(mode="auto", slot_bytes=1 << 22)
    slots.plan = PairPlan(layout(num_blocks=512), layout(num_blocks=512, base=1 << 30))
    slots.staged._layout = layout(num_blocks=512)
    assert not slots.write(1, blocks=500), "direct is measured first"
    slots.now += 0.01
    slots.staged.direct_ended(WriteId(1), slots.now, ok=True)
    if fault == "packing":
        slots.broken_copy = "no memory"
    assert slots.write(2, blocks=500)
    if fault == "unpacking":
        slots.land()
        slots.unpack(error="no memory")
    (ended,) = slots.ended()
    assert ended.error
    for number in range(3, 200):
        assert not slots.write(number, blocks=500)
        slots.now += 0.01
        slots.staged.direct_ended(WriteId(number), slots.now, ok=True)
    assert slots.write(200, blocks=500, session=8) is False, "another peer is measured by itself"
    slots.now += 0.01
    slots.staged.direct_ended(WriteId(200), slots.now, ok=True)
    slots.broken_copy = ""
    assert slots.write(201, blocks=500, session=8)


@pytest.mark.parametrize("in_one_turn", [False, True], ids=["turn by turn", "in one turn"])
def test_a_link_that_stalls_does_not_hold_up_the_others(in_one_turn: bool) -> None:
    """Slots to pack into are everybody's. Where all are with a peer that takes nothing, others are written to directly."""
    slots = Slots(mode="auto", slot_bytes=1 << 22, local=1)
    slots.plan = PairPlan(layout(num_blocks=512), layout(num_blocks=512, base=1 << 30))
    slots.staged._layout = layout(num_blocks=512)
    for session in (7, 8):
        assert not slots.write(session, blocks=500, session=session), "direct is measured first"
        slots.now += 0.01
        slots.staged.direct_ended(WriteId(session), slots.now, ok=True)
    begin = slots.take if in_one_turn else slots.write
    assert begin(1, blocks=500, session=7)
    assert not begin(2, blocks=500, session=8)
    slots.advance(slots.now)
    slots.now += 0.01
    slots.staged.direct_ended(WriteId(2), slots.now, ok=True)
    slots.land()
    assert slots.write(3, blocks=500, session=8)


def test_stalled_peers_leave_a_healthy_one_its_own_way() -> None:
    """As many peers as fill all our slots take nothing, and a third one's write is posted in the same turn as theirs."""
    slots = Slots(mode="auto", slots=4, local=8, slot_bytes=BLOCK_BYTES * 3 * 64)
    slots.plan = PairPlan(layout(num_blocks=1024), layout(num_blocks=1024, base=1 << 30))
    slots.staged._layout = layout(num_blocks=1024)
    for session in (7, 8, 9):
        assert not slots.take(session, blocks=640, session=session)
        slots.now += 0.01
        slots.staged.direct_ended(WriteId(session), slots.now, ok=True)
    assert [slots.take(10 + session, blocks=640, session=session) for session in (7, 8, 9)] == [True, True, False]


def test_only_the_first_write_of_a_turn_tries_what_may_not_work() -> None:
    slots = Slots(mode="auto", slot_bytes=1 << 22)
    slots.plan = PairPlan(layout(num_blocks=512), layout(num_blocks=512, base=1 << 30))
    slots.staged._layout = layout(num_blocks=512)
    assert not slots.take(1, blocks=500)
    slots.now += 0.01
    slots.staged.direct_ended(WriteId(1), slots.now, ok=True)
    slots.broken_copy = "no memory"
    assert [slots.take(number, blocks=500) for number in (2, 3, 4)] == [True, False, False]
    assert [ended.write_id for ended in slots.ended()] == [2]


# --- which way --------------------------------------------------------------------------------------------------------


def run(ways: WayEstimate, costs: dict[bool, float], now: float, count: int) -> tuple[list[bool], float]:
    """Writes of 1 MiB, one after the other, each as slow as its way is."""
    taken = []
    for _ in range(count):
        staged = ways.choose(now)
        ways.started(1 << 20, now, staged=staged)
        now += costs[staged] * (1 << 20)
        ways.ended(1 << 20, now, ok=True)
        taken.append(staged)
    return taken, now


def test_the_faster_way_is_taken_after_both_were_measured() -> None:
    taken, _ = run(WayEstimate(), {False: 2e-9, True: 0.8e-9}, 0.0, 50)
    assert taken == [False, True] + [True] * 48
    taken, _ = run(WayEstimate(), {False: 1e-9, True: 2e-9}, 0.0, 50)
    assert taken == [False, True] + [False] * 48


def test_staging_is_not_tried_where_its_copies_alone_take_longer() -> None:
    taken, _ = run(WayEstimate(), {False: 0.2e-9, True: 0.1e-9}, 0.0, 200)
    assert not any(taken)


def test_the_other_way_is_tried_again() -> None:
    ways = WayEstimate()
    taken, now = run(ways, {False: 2e-9, True: 1e-9}, 0.0, 20)
    assert all(taken[1:])
    taken, _ = run(ways, {False: 0.5e-9, True: 1e-9}, now, 200)
    assert sum(taken[100:]) <= 2, "the link has changed"


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("costs", [(2e-9, 0.8e-9), (1e-9, 2e-9), (200e-9, 40e-9), (40e-9, 200e-9)])
def test_a_link_that_is_never_idle_is_measured_too(costs: tuple[float, float], depth: int) -> None:
    """Some writes are always in flight, and leave the link one after the other; half way the faster way becomes the slower."""
    for again in (False, True):
        ways, now, free = WayEstimate(), 0.0, 0.0
        flying: list[float] = []
        taken: list[bool] = []
        for number in range(6000):
            if len(flying) == depth:
                now = flying.pop(0)
                ways.ended(1 << 20, now, ok=True)
            taken.append(ways.choose(now))
            ways.started(1 << 20, now, staged=taken[-1])
            turned = again and number >= 3000
            free = max(free, now) + costs[taken[-1] ^ turned] * (1 << 20)
            flying.append(free)
        better = (costs[1] < costs[0]) ^ again
        assert taken[-1000:].count(better) > 800


def test_windows_in_which_both_ways_were_taken_say_nothing() -> None:
    ways = WayEstimate()
    ways.choose(0.0)
    ways.started(1 << 20, 0.0, staged=False)
    ways.started(1 << 20, 0.0, staged=True)
    ways.ended(1 << 20, 0.01, ok=True)
    ways.ended(1 << 20, 0.02, ok=True)
    assert not ways.cost
    ways.started(1 << 20, 0.03, staged=False)
    ways.ended(1 << 20, 0.04, ok=False)
    assert not ways.cost, "a failure's time is no rate"
