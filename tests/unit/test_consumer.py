# SPDX-License-Identifier: Apache-2.0
"""The consumer's sessions, coverage over several ranks, and when its blocks are safe; spoken to by hand."""

from __future__ import annotations

from typing import Any

import pytest
from machines import ADDRESS, Consumer, ids, layout, reports, sent

from kvpush.core import wire
from kvpush.core.consumer import ConsumerMachine
from kvpush.core.effects import CloseSession, OpenSession, StartVisibilityFence
from kvpush.core.events import (
    BlocksSafe,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveStatus,
    SessionLost,
    TransferDeclined,
    VisibilityReached,
)
from kvpush.core.ids import Epoch, PeerAddress, Rect, RequestId, SessionId
from kvpush.errors import LocalProtocolError, PeerLost, TransferRejected

LOW, HIGH = Rect(0, 2, 0, 2, 0, 8), Rect(2, 3, 0, 2, 0, 8)
ENDPOINTS = (wire.Endpoint(0, "", 5000), wire.Endpoint(1, "", 5001))


def cover(rect: Rect) -> Rect:
    return rect._replace(token_lo=0, token_hi=1)


def two_ranks(**config: Any) -> Consumer:
    consumer = Consumer(**config)
    consumer.request()
    effects = consumer.welcome(covers=(cover(LOW),), endpoints=ENDPOINTS)
    assert [e.address for e in effects if isinstance(e, OpenSession)] == [PeerAddress("prefill", 5001)]
    assert not sent(effects, wire.RegisterBlocks), "not before all ranks have answered"
    effects = consumer.welcome(2, covers=(cover(HIGH),))
    assert [m.session for m in sent(effects, wire.RegisterBlocks)] == [1, 2]
    return consumer


def test_complete_is_what_all_ranks_have_covered() -> None:
    consumer = two_ranks()
    assert not reports(consumer.part(wire.Commit, session=1, coverage=(LOW,)))
    (ended,) = reports(consumer.part(wire.Commit, session=2, coverage=(HIGH,)))
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe, ended.num_tokens) == (ReceiveStatus.RECEIVED, True, 8)
    assert not consumer.machine.expects_writes


@pytest.mark.parametrize("second", [(LOW,), (), (HIGH._replace(token_hi=4),), (HIGH._replace(head_hi=1),)])
def test_a_gap_is_a_failure(second: tuple[Rect, ...]) -> None:
    consumer = two_ranks()
    consumer.part(wire.Commit, session=1, coverage=(LOW,))
    (ended,) = reports(consumer.part(wire.Commit, session=2, coverage=second))
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.FAILED, True)
    assert ended.error is not None
    assert "of 48" in ended.error.message


def test_one_commit_twice_is_not_two() -> None:
    consumer = two_ranks()
    for _ in range(2):
        assert not reports(consumer.part(wire.Commit, session=1, coverage=(LOW, HIGH)))
    assert consumer.machine.counters.stale_messages == 1


def test_a_failed_rank_cancels_the_other_one() -> None:
    consumer = two_ranks()
    consumer.part(wire.Streaming, session=1)
    effects = consumer.part(wire.Failed, session=2, reason="x")
    assert [m.session for m in sent(effects, wire.Cancel)] == [1]
    assert not reports(effects)
    (ended,) = reports(consumer.part(wire.Fenced, session=1))
    assert isinstance(ended, ReceiveEnded)
    assert isinstance(ended.error, TransferRejected)
    assert ended.error.story


def test_a_lost_rank_takes_the_instance_with_it_and_leases_decide() -> None:
    consumer = two_ranks(lease_s=10.0, retry_window_s=1.0)
    consumer.part(wire.Commit, session=1, coverage=(LOW,))
    effects = consumer.do(SessionLost(SessionId(2), "gone"))
    (ended,) = reports(effects)
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.FAILED, False), "at once, without waiting for the quarantine"
    assert sorted(e.session for e in effects if isinstance(e, CloseSession)) == [1, 2]
    assert consumer.machine.expects_writes is False or consumer.machine.num_receives == 1
    assert not reports(consumer.wait(10.99))
    assert [type(o) for o in reports(consumer.wait(0.01))] == [BlocksSafe]


def test_every_answer_prolongs_what_must_be_waited_for() -> None:
    consumer = Consumer(lease_s=10.0, retry_window_s=1.0, peer_timeout_s=100.0)
    consumer.request()
    consumer.welcome()
    consumer.now += 3.0
    assert sent(consumer.say(wire.Heartbeat(1, seq=7)), wire.HeartbeatAck)[0].seq == 7
    assert len(reports(consumer.do(SessionLost(SessionId(1), "gone")))) == 1
    assert not reports(consumer.wait(10.9))
    assert len(reports(consumer.wait(0.2))) == 1


def test_a_producer_whose_transport_takes_longer_is_waited_for_as_long() -> None:
    consumer = Consumer(lease_s=10.0, retry_window_s=1.0)
    assert consumer.machine.longest_unsafe_s == 11.0
    consumer.request()
    consumer.welcome(retry_window_s=30.0)
    assert consumer.machine.longest_unsafe_s == 40.0, "after a crash of ours, too"
    assert len(reports(consumer.do(SessionLost(SessionId(1), "gone")))) == 1
    assert not reports(consumer.wait(39.9))
    assert [type(o) for o in reports(consumer.wait(0.2))] == [BlocksSafe]


def test_a_producer_whose_transport_is_faster_changes_nothing() -> None:
    consumer = Consumer(lease_s=10.0, retry_window_s=1.0)
    consumer.request()
    consumer.welcome(retry_window_s=0.0)
    consumer.do(SessionLost(SessionId(1), "gone"))
    assert not reports(consumer.wait(10.9))
    assert [type(o) for o in reports(consumer.wait(0.2))] == [BlocksSafe]


def test_a_goodbye_is_a_fence_for_its_own_rank_only() -> None:
    consumer = two_ranks()
    effects = consumer.say(wire.Goodbye(1))
    assert [o.blocks_safe for o in reports(effects) if isinstance(o, ReceiveEnded)] == [False]
    single = Consumer()
    single.request()
    single.welcome()
    effects = single.say(wire.Goodbye(1))
    assert [o.blocks_safe for o in reports(effects) if isinstance(o, ReceiveEnded)] == [True]


def test_an_abort_before_the_handshake_is_safe_at_once() -> None:
    consumer = Consumer()
    consumer.request()
    (ended,) = reports(consumer.do(ReceiveAborted(RequestId("r"))))
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.CANCELLED, True)
    assert not sent(consumer.welcome(), wire.RegisterBlocks)


def test_ranks_of_two_instances_are_not_mixed() -> None:
    consumer = Consumer()
    consumer.request()
    consumer.welcome(covers=(cover(LOW),), endpoints=ENDPOINTS)
    effects = consumer.say(
        wire.Welcome(
            2,
            engine_id="another",
            agent_name="x",
            endpoints=(),
            covers=(cover(HIGH),),
            seq=1,
            heartbeat_s=0.5,
            idle_heartbeat_s=3.0,
            retry_window_s=1.0,
        )
    )
    (ended,) = reports(effects)
    assert isinstance(ended, ReceiveEnded)
    assert ended.error is not None
    assert "another instance" in ended.error.message


def test_a_producer_that_can_not_fill_the_cache_is_refused_at_the_handshake() -> None:
    consumer = Consumer()
    consumer.request()
    (ended,) = reports(consumer.welcome(covers=(cover(LOW),)))
    assert isinstance(ended, ReceiveEnded)
    assert ended.error is not None
    assert "4 of 6" in ended.error.message


@pytest.mark.parametrize(("unknown", "kind"), [(True, PeerLost), (False, TransferRejected)])
def test_refused(unknown: bool, kind: type[Exception]) -> None:
    consumer = Consumer()
    consumer.request()
    (ended,) = reports(consumer.say(wire.Refused(1, reason="because", unknown=unknown)))
    assert isinstance(ended, ReceiveEnded)
    assert isinstance(ended.error, kind)
    # The next request tries again, with a session of its own.
    assert [e.session for e in consumer.request("next") if isinstance(e, OpenSession)] == [2]


def test_one_session_serves_all_requests_to_a_peer() -> None:
    consumer = Consumer()
    consumer.request("a")
    assert not [e for e in consumer.request("b") if isinstance(e, OpenSession)]
    assert [m.request_id for m in sent(consumer.welcome(), wire.RegisterBlocks)] == ["a", "b"]
    assert [m.epoch for m in sent(consumer.request("c"), wire.RegisterBlocks)] == [3]


def test_registrations_are_repeated_until_they_are_answered_for_good() -> None:
    consumer = Consumer(retry_s=1.0, peer_timeout_s=100.0)
    consumer.request()
    consumer.welcome()
    (again,) = sent(consumer.wait(1.0), wire.RegisterBlocks)
    assert again.epoch == 1
    consumer.part(wire.Commit, coverage=(LOW, HIGH))
    assert not sent(consumer.wait(5.0), wire.RegisterBlocks)


def test_cancels_are_repeated_until_they_are_answered() -> None:
    consumer = Consumer(retry_s=1.0, peer_timeout_s=100.0)
    consumer.request()
    consumer.welcome()
    assert sent(consumer.do(ReceiveAborted(RequestId("r"))), wire.Cancel)
    assert sent(consumer.wait(1.0), wire.Cancel)
    assert sent(consumer.wait(1.0), wire.Cancel)
    assert reports(consumer.part(wire.Fenced))
    assert not sent(consumer.wait(5.0), wire.Cancel)


def test_the_visibility_fence_comes_before_the_report() -> None:
    consumer = Consumer(needs_visibility_fence=True)
    consumer.request()
    consumer.welcome()
    effects = consumer.part(wire.Commit, coverage=(LOW, HIGH))
    assert [e.epoch for e in effects if isinstance(e, StartVisibilityFence)] == [1]
    assert not reports(effects)
    assert not reports(consumer.do(VisibilityReached(RequestId("r"), Epoch(0))))
    assert len(reports(consumer.do(VisibilityReached(RequestId("r"), Epoch(1))))) == 1


def test_a_lost_peer_does_not_matter_once_all_has_arrived() -> None:
    consumer = Consumer(needs_visibility_fence=True)
    consumer.request()
    consumer.welcome()
    consumer.part(wire.Commit, coverage=(LOW, HIGH))
    assert not reports(consumer.do(SessionLost(SessionId(1), "gone")))
    (ended,) = reports(consumer.do(VisibilityReached(RequestId("r"), Epoch(1))))
    assert isinstance(ended, ReceiveEnded)
    assert ended.status is ReceiveStatus.RECEIVED


def test_declines_wait_for_the_handshake_and_go_to_every_rank() -> None:
    consumer = Consumer()
    decline = TransferDeclined(ADDRESS, ("t",), b"d")
    assert [type(e) for e in consumer.do(decline)][:1] == [OpenSession]
    assert not sent(consumer.welcome(covers=(cover(LOW),), endpoints=ENDPOINTS), wire.Decline)
    assert [m.session for m in sent(consumer.welcome(2, covers=(cover(HIGH),)), wire.Decline)] == [1, 2]
    assert [m.session for m in sent(consumer.do(decline), wire.Decline)] == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"token_lo": 2, "blocks": ids(1, 2)},
        {"token_lo": 8, "blocks": ids(1)},
        {"blocks": ids(1)},
        {"blocks": (*ids(1, 2), *ids(1, 2))},
        {"keys": ()},
    ],
)
def test_what_our_engine_must_not_ask_changes_nothing(fields: dict[str, Any]) -> None:
    consumer = Consumer()
    with pytest.raises(LocalProtocolError):
        consumer.request(**fields)
    assert consumer.machine.num_receives == 0
    assert consumer.machine.next_deadline() is None
    assert sent(consumer.request(), wire.Hello)


def test_farewell_closes_every_session() -> None:
    consumer = two_ranks()
    consumer.machine.shutdown(consumer.now)
    consumer.part(wire.Fenced, session=1)
    consumer.part(wire.Fenced, session=2)
    assert consumer.machine.num_receives == 0
    effects = consumer.machine.farewell()
    assert [m.session for m in sent(effects, wire.Goodbye)] == [1, 2]
    assert [e.session for e in effects if isinstance(e, CloseSession)] == [1, 2]


def test_an_impossible_layout_of_our_own_is_refused_at_once() -> None:
    from kvpush.core.layout import CacheLayout
    from kvpush.errors import LayoutError

    with pytest.raises(LayoutError, match="twice"):
        ConsumerMachine(Consumer().machine.config, CacheLayout(layout(1).layers * 2), lambda: 1)
