# SPDX-License-Identifier: Apache-2.0
"""Event sequences that once broke the consumer."""

from __future__ import annotations

import pytest
from machines import ADDRESS, Consumer, reports, sent

from kvpush.core import wire
from kvpush.core.effects import OpenSession
from kvpush.core.events import ReceiveAborted, ReceiveStatus
from kvpush.core.ids import Rect, RequestId


def test_deadlines_of_one_turn_may_settle_one_another() -> None:
    consumer = Consumer(handshake_timeout_s=3.0, announce_timeout_s=3.0)
    consumer.request()
    outcomes = reports(consumer.wait(1000.0))
    assert len(outcomes) == 1


def test_session_and_safe_and_receive_deadlines_in_one_turn() -> None:
    consumer = Consumer()
    consumer.request()
    consumer.welcome()
    consumer.part(wire.Streaming)
    outcomes = reports(consumer.wait(1000.0))
    outcomes += reports(consumer.wait(1000.0))
    assert [type(o).__name__ for o in outcomes] in (["ReceiveEnded"], ["ReceiveEnded", "BlocksSafe"])


def test_a_handshake_deadline_of_a_dropped_peer_leaves_the_new_one_alone() -> None:
    consumer = Consumer()
    consumer.request()
    old = consumer.machine._peers[ADDRESS]
    consumer.wait(3.0)
    assert [type(e) for e in consumer.request("second")][:1] == [OpenSession]
    assert consumer.machine._peers[ADDRESS] is not old
    consumer.welcome(2)
    consumer.part(wire.Commit, "second", session=2, epoch=2, coverage=(Rect(0, 3, 0, 2, 0, 8),))
    assert consumer.machine.counters.received == 1


@pytest.mark.parametrize(
    "coverage",
    [
        (Rect(0, 3, 0, 1, 0, 8), Rect(0, 3, 2, 3, 0, 8)),
        (Rect(0, 3, 0, 2, 0, 4), Rect(3, 6, 0, 2, 0, 4)),
        (Rect(0, 3, 0, 2, 0, 4), Rect(0, 3, 0, 2, 8, 12)),
        (Rect(0, 3, -2, 0, 0, 8),),
    ],
)
def test_coverage_outside_of_what_is_wanted_does_not_count(coverage: tuple[Rect, ...]) -> None:
    consumer = Consumer()
    consumer.request()
    consumer.welcome()
    outcomes = reports(consumer.part(wire.Commit, coverage=coverage))
    assert [o.status for o in outcomes] == [ReceiveStatus.FAILED]


def test_head_range_above_zero_is_counted_where_it_is() -> None:
    from machines import layout

    consumer = Consumer()
    consumer.machine.__init__(consumer.machine.config, layout(3, head_lo=4), lambda: 1)  # type: ignore[misc]
    consumer.request()
    # As many heads, but others.
    effects = consumer.welcome(covers=(Rect(0, 3, 0, 2, 0, 1),))
    assert [o.status for o in reports(effects)] == [ReceiveStatus.FAILED]
    assert not sent(effects, wire.RegisterBlocks)


def test_abort_while_fencing_turns_a_failure_into_a_cancellation() -> None:
    consumer = Consumer()
    consumer.request()
    consumer.welcome()
    consumer.part(wire.Streaming)
    consumer.do(ReceiveAborted(RequestId("r")))
    assert not reports(consumer.wait(0.6))
    outcomes = reports(consumer.part(wire.Fenced))
    assert [(o.status, o.blocks_safe) for o in outcomes] == [(ReceiveStatus.CANCELLED, True)]


def test_a_rank_with_copies_of_another_one_is_told_that_nobody_comes() -> None:
    consumer = Consumer()
    consumer.request()
    effects = consumer.welcome(endpoints=(wire.Endpoint(0, "", 5000), wire.Endpoint(1, "", 5001), wire.Endpoint(2, "", 5002)))
    assert len([e for e in effects if isinstance(e, OpenSession)]) == 2
    consumer.welcome(2)
    effects = consumer.welcome(3, covers=())
    assert [m.session for m in sent(effects, wire.RegisterBlocks)] == [1]
    assert [m.session for m in sent(effects, wire.Decline)] == [2], "and one that holds nothing of ours hears nothing"
