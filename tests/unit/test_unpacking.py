# SPDX-License-Identifier: Apache-2.0
"""The consumer's half of staging: what is unpacked, once and in bounds, and that no block is given away before it has ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import BLOCK_BYTES, Consumer, ids, reports, sent

from kvpush.core import wire
from kvpush.core.effects import CloseSession, Effect, StartUnpack
from kvpush.core.events import BlocksSafe, ReceiveAborted, ReceiveEnded, ReceiveStatus, SessionLost, UnpackEnded
from kvpush.core.ids import Rect, RequestId, SessionId
from kvpush.core.staging import StagingArea
from kvpush.errors import LocalProtocolError, PeerLost, RemoteProtocolError, TransferCancelled

SLOT_BYTES = 4096
AREA = StagingArea(1 << 40, 0, SLOT_BYTES, 8)
ALL = Rect(0, 3, 0, 2, 0, 8)


def connected(**config: Any) -> Consumer:
    """A consumer with one receive of two blocks, on which bytes may land."""
    consumer = Consumer(staging=AREA, slots_per_session=4, **config)
    consumer.request()
    consumer.welcome()
    consumer.part(wire.Streaming)
    return consumer


def staged(consumer: Consumer, tag: int = 1, **fields: Any) -> list[Effect]:
    values = {"tag": tag, "slot": 0, "layer_lo": 0, "layer_hi": 3, "block_lo": 0, "block_hi": 2} | fields
    return consumer.part(wire.Staged, **values)


def unpacks(effects: list[Effect]) -> list[StartUnpack]:
    return [effect for effect in effects if isinstance(effect, StartUnpack)]


def answers(effects: list[Effect]) -> list[tuple[int, str]]:
    return [(message.tag, message.error) for message in sent(effects, wire.Unpacked)]


def test_sessions_are_offered_shares_of_their_own() -> None:
    consumer = Consumer(staging=AREA, slots_per_session=4)
    hellos = [sent(consumer.request(f"r{n}", peer=("prefill", 5000 + n)), wire.Hello)[0] for n in range(3)]  # type: ignore[arg-type]
    assert [hello.staging for hello in hellos] == [
        wire.StagingOffer(AREA.address, 0, SLOT_BYTES, 4),
        wire.StagingOffer(AREA.address + 4 * SLOT_BYTES, 0, SLOT_BYTES, 4),
        None,
    ]
    assert sent(Consumer().request(), wire.Hello)[0].staging is None


def test_what_was_staged_is_unpacked_into_the_registered_blocks_and_then_acknowledged() -> None:
    consumer = connected()
    effects = staged(consumer, slot=2, layer_lo=1, block_lo=1)
    (unpack,) = unpacks(effects)
    assert not answers(effects)
    assert (unpack.area, unpack.slot, unpack.layer_lo, unpack.layer_hi) == (AREA.part(0, 4), 2, 1, 3)
    assert np.array_equal(unpack.blocks[0], ids(11)[0])
    assert answers(consumer.do(UnpackEnded(unpack.unpack_id))) == [(1, "")]
    (ended,) = reports(consumer.part(wire.Commit, coverage=(ALL,)))
    assert isinstance(ended, ReceiveEnded)
    assert ended.status is ReceiveStatus.RECEIVED
    assert consumer.machine.counters.unpacked == 1


def test_said_again_it_is_unpacked_once() -> None:
    consumer = connected()
    (unpack,) = unpacks(staged(consumer))
    effects = staged(consumer)
    assert not unpacks(effects)
    assert not answers(effects), "still running"
    consumer.do(UnpackEnded(unpack.unpack_id))
    for _ in range(2):
        effects = staged(consumer)
        assert not unpacks(effects)
        assert answers(effects) == [(1, "")]
    (unpack,) = unpacks(staged(consumer, tag=5))
    effects = staged(consumer, tag=3)
    assert not unpacks(effects)
    assert not answers(effects), "older than what is in the slot"
    effects = staged(consumer, tag=1)
    assert not unpacks(effects)
    assert not answers(effects)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_lo": 2, "layer_hi": 2},
        {"layer_lo": 2, "layer_hi": 4},
        {"block_lo": 1, "block_hi": 1},
        {"block_lo": 1, "block_hi": 3},
        {"block_lo": 2**31 - 2, "block_hi": 2**31 - 1},
    ],
)
def test_what_leaves_the_registration_is_refused(wrong: dict[str, int]) -> None:
    consumer = connected()
    effects = staged(consumer, **wrong)
    assert not unpacks(effects)
    ((tag, error),) = answers(effects)
    assert tag == 1
    assert "that can't be" in error
    assert sent(effects, wire.Cancel)
    (ended,) = reports(consumer.part(wire.Fenced))
    assert isinstance(ended, ReceiveEnded)
    assert isinstance(ended.error, RemoteProtocolError)


def test_more_than_a_slot_holds_is_refused() -> None:
    consumer = Consumer(staging=StagingArea(1 << 40, 0, 3 * BLOCK_BYTES, 4), slots_per_session=4)
    consumer.request()
    consumer.welcome()
    consumer.part(wire.Streaming)
    assert not unpacks(staged(consumer))
    consumer = Consumer(staging=StagingArea(1 << 40, 0, 6 * BLOCK_BYTES, 4), slots_per_session=4)
    consumer.request()
    consumer.welcome()
    consumer.part(wire.Streaming)
    assert unpacks(staged(consumer))


@pytest.mark.parametrize("offered", [True, False])
def test_a_slot_that_was_not_offered_ends_the_session(offered: bool) -> None:
    consumer = connected() if offered else Consumer()
    if not offered:
        consumer.request()
        consumer.welcome()
    effects = staged(consumer, slot=4)
    assert not unpacks(effects)
    assert [effect.session for effect in effects if isinstance(effect, CloseSession)] == [1]
    (ended,) = reports(effects)
    assert isinstance(ended, ReceiveEnded)
    assert isinstance(ended.error, PeerLost)


def test_a_slot_in_use_can_not_be_used_again() -> None:
    consumer = connected()
    (unpack,) = unpacks(staged(consumer))
    effects = staged(consumer, tag=2)
    assert not unpacks(effects)
    assert [effect.session for effect in effects if isinstance(effect, CloseSession)] == [1]
    assert not answers(consumer.do(UnpackEnded(unpack.unpack_id))), "nobody listens any more"


@pytest.mark.parametrize("how", ["stranger", "older", "given up", "committed"])
def test_for_a_receive_that_is_over_nothing_is_unpacked(how: str) -> None:
    """The producer gets its slot back, and hears of the end by other messages."""
    consumer = connected()
    if how == "given up":
        consumer.do(ReceiveAborted(RequestId("r")))
    elif how == "committed":
        consumer.part(wire.Commit, coverage=(ALL,))
    effects = staged(consumer, request_id="other") if how == "stranger" else staged(consumer, epoch=2 if how == "older" else 1)
    assert not unpacks(effects)
    assert answers(effects) == [(1, "")]


def test_blocks_of_an_aborted_receive_wait_for_the_copy() -> None:
    consumer = connected()
    (unpack,) = unpacks(staged(consumer))
    assert not reports(consumer.do(ReceiveAborted(RequestId("r"))))
    assert not reports(consumer.part(wire.Fenced)), "nothing is in flight, but the slot is being copied"
    (ended,) = reports(consumer.do(UnpackEnded(unpack.unpack_id)))
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.CANCELLED, True)


def test_a_lost_producer_does_not_make_them_safe_before_the_copy_has_ended() -> None:
    consumer = connected(lease_s=10.0)
    (unpack,) = unpacks(staged(consumer))
    (ended,) = reports(consumer.do(SessionLost(SessionId(1), "cut")))
    assert isinstance(ended, ReceiveEnded)
    assert not ended.blocks_safe
    for _ in range(5):
        assert not reports(consumer.wait(10.0))
        due = consumer.machine.next_deadline()
        assert due is not None
        assert due > consumer.now, "nothing that is due again at once"
    assert reports(consumer.do(UnpackEnded(unpack.unpack_id))) == [BlocksSafe(RequestId("r"))]


def test_a_copy_that_fails_fails_the_receive() -> None:
    consumer = connected()
    (unpack,) = unpacks(staged(consumer))
    effects = consumer.do(UnpackEnded(unpack.unpack_id, "no memory"))
    assert answers(effects) == [(1, "no memory")]
    (ended,) = reports(consumer.part(wire.Fenced))
    assert isinstance(ended, ReceiveEnded)
    assert isinstance(ended.error, TransferCancelled)
    assert "no memory" in ended.error.message


def test_a_commit_of_what_is_being_unpacked_is_a_lie() -> None:
    consumer = connected()
    (unpack,) = unpacks(staged(consumer))
    (ended,) = reports(consumer.part(wire.Commit, coverage=(ALL,)))
    assert isinstance(ended, ReceiveEnded)
    assert isinstance(ended.error, RemoteProtocolError)
    assert not ended.blocks_safe
    assert reports(consumer.do(UnpackEnded(unpack.unpack_id))) == [BlocksSafe(RequestId("r"))]


def test_a_share_is_offered_again_when_nothing_can_land_in_it() -> None:
    consumer = Consumer(staging=StagingArea(1 << 40, 0, SLOT_BYTES, 4), slots_per_session=4, lease_s=10.0)
    consumer.request("a")
    consumer.welcome(retry_window_s=5.0)
    consumer.do(SessionLost(SessionId(1), "cut"))
    (hello,) = sent(consumer.request("b"), wire.Hello)
    assert hello.staging is None, "the lost one may write to it"
    consumer.do(SessionLost(SessionId(2), "cut"))
    consumer.wait(15.0)
    (hello,) = sent(consumer.request("c"), wire.Hello)
    assert hello.staging is not None
    consumer.welcome(3)
    consumer.say(wire.Goodbye(3, reason="stopped"))
    (hello,) = sent(consumer.request("d"), wire.Hello)
    assert hello.staging is not None, "a goodbye is a fence"


def test_the_end_of_an_unknown_copy_is_our_own_fault() -> None:
    consumer = connected()
    (unpack,) = unpacks(staged(consumer))
    consumer.do(UnpackEnded(unpack.unpack_id))
    with pytest.raises(LocalProtocolError, match="ended twice"):
        consumer.machine.handle(UnpackEnded(unpack.unpack_id), consumer.now)
