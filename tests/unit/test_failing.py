# SPDX-License-Identifier: Apache-2.0
"""Promise 3: a side that gives up says so in the same step, also while writes are in flight; and every quarantine ends."""

from __future__ import annotations

import pytest
from machines import Consumer, Producer, ids, posted, reports, sent

from kvpush.core import wire
from kvpush.core.effects import CloseSession, Effect, RemovePeer
from kvpush.core.events import (
    BlocksSafe,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveStatus,
    SourceAborted,
    SourceReleased,
    WriteCompleted,
    WriteErrored,
)
from kvpush.core.ids import RequestId, WriteId


def streaming(producer: Producer) -> list[WriteId]:
    """Three writes in flight, one for each layer."""
    producer.connect()
    producer.announce()
    producer.register()
    effects = producer.progress(blocks=ids(1, 2), layers=(0, 1))
    effects += producer.progress(layers=(1, 2)) + producer.progress(layers=(2, 3))
    return [write.write_id for write in posted(effects)]


def beat(producer: Producer, seconds: float, *sessions: int) -> list[Effect]:
    """Time passes; the consumers answer."""
    effects: list[Effect] = []
    for _ in range(int(seconds / 0.5)):
        effects += producer.wait(0.5)
        for session in sessions:
            producer.say(wire.HeartbeatAck(session, seq=producer.seq[session]))
    return effects


def abort(producer: Producer, writes: list[WriteId]) -> list[Effect]:
    return producer.do(SourceAborted(RequestId("s"), "client gone"))


def fail_one(producer: Producer, writes: list[WriteId]) -> list[Effect]:
    return producer.do(WriteErrored(writes.pop(), "planted"))


def wait_for_ever(producer: Producer, writes: list[WriteId]) -> list[Effect]:
    return beat(producer, 10.0, 1)


GIVING_UP = {"aborted": abort, "a write failed": fail_one, "a write is stuck": wait_for_ever}


@pytest.mark.parametrize("why", list(GIVING_UP))
def test_a_producer_that_gives_up_says_so_at_once(why: str) -> None:
    producer = Producer(write_timeout_s=8.0)
    writes = streaming(producer)
    effects = GIVING_UP[why](producer, writes)
    assert [(m.request_id, m.epoch) for m in sent(effects, wire.Failing)] == [("r", 1)]
    assert not sent(effects, wire.Failed), "it is not fenced"
    # A consumer that has not heard it and asks again gets the same answer.
    assert [m.request_id for m in sent(producer.register(), wire.Failing)] == ["r"]
    for write_id in writes[:-1]:
        assert not sent(producer.do(WriteCompleted(write_id)), wire.Failed)
    assert len(sent(producer.do(WriteCompleted(writes[-1])), wire.Failed)) == 1


def test_who_has_cancelled_is_told_of_the_fence_only() -> None:
    producer = Producer()
    writes = streaming(producer)
    effects = producer.say(wire.Cancel(1, request_id="r", epoch=1))
    effects += producer.do(SourceAborted(RequestId("s"), "client gone"))
    assert not sent(effects, wire.Failing)
    for write_id in writes:
        effects += producer.do(WriteCompleted(write_id))
    assert len(sent(effects, wire.Fenced)) == 1


def _receiving(consumer: Consumer) -> None:
    consumer.request()
    consumer.welcome()
    consumer.part(wire.Streaming)


def test_a_failing_transfer_is_reported_at_once_and_its_blocks_later() -> None:
    consumer = Consumer()
    _receiving(consumer)
    effects = consumer.part(wire.Failing, reason="client gone")
    (ended,) = reports(effects)
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.FAILED, False)
    assert "client gone" in str(ended.error)
    assert consumer.machine.expects_writes, "what is in flight has to land before the fence can come"
    assert not reports(consumer.part(wire.Failing, reason="client gone"))
    assert not reports(consumer.do(ReceiveAborted(RequestId("r"))))
    assert reports(consumer.part(wire.Failed, reason="client gone")) == [BlocksSafe(RequestId("r"))]
    assert consumer.machine.num_receives == 0


def test_a_receive_that_waits_for_fences_is_reported_when_one_of_them_is_far() -> None:
    consumer = Consumer()
    _receiving(consumer)
    assert not reports(consumer.do(ReceiveAborted(RequestId("r"))))
    assert not reports(consumer.part(wire.Failing, reason="x")), "an abort is reported when the blocks are safe, never sooner"
    (ended,) = reports(consumer.part(wire.Fenced))
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.CANCELLED, True)


def test_a_stuck_write_costs_the_connection_so_that_the_quarantine_ends() -> None:
    producer = Producer(write_timeout_s=8.0)
    producer.connect(1, agent_name="c-agent")
    producer.connect(2, agent_name="c-agent")
    producer.announce()
    producer.register()
    writes = posted(producer.progress(blocks=ids(1, 2)))
    assert sent(beat(producer, 9.0, 1, 2), wire.Failing)
    effects = beat(producer, 9.0, 1, 2)
    goodbyes = sent(effects, wire.Goodbye)
    assert sorted((m.session, m.fenced) for m in goodbyes) == [(1, False), (2, False)], "all sessions over that connection"
    assert [(e.agent_name, e.cut) for e in effects if isinstance(e, RemovePeer)] == [("c-agent", True)]
    assert sorted(e.session for e in effects if isinstance(e, CloseSession)) == [1, 2]
    # The source is read for as long as the transport says so.
    assert not reports(producer.do(SourceAborted(RequestId("s"), "x")))
    # The consumer comes back over a new connection meanwhile; the old one's end must not take it away.
    producer.connect(3, agent_name="c-agent")
    effects = [effect for write in writes for effect in producer.do(WriteErrored(write.write_id, "the peer was removed"))]
    assert [type(outcome) for outcome in reports(effects)] == [SourceReleased]
    assert not [e for e in effects if isinstance(e, RemovePeer)]
    assert producer.machine.num_streams == 0
    assert [s.session_id for s in producer.machine._sessions.values()] == [3]


def test_a_connection_is_cut_when_its_lease_ends_with_writes_in_flight() -> None:
    producer = Producer()
    writes = streaming(producer)
    lost = producer.wait(0.5) + producer.wait(1.0) + producer.wait(1.0) + producer.wait(1.0)
    assert sent(lost, wire.Goodbye), "no answer to a heartbeat"
    assert not [e for e in lost if isinstance(e, RemovePeer)], "they may complete while the lease lasts"
    assert [e.cut for e in producer.wait(6.6) if isinstance(e, RemovePeer)] == [True]
    for write_id in writes:
        assert not sent(producer.do(WriteErrored(write_id, "the peer was removed")), wire.Failed)
    assert not producer.machine._sessions


def test_a_producer_that_was_frozen_cuts_before_anything_moves_again() -> None:
    producer = Producer()
    streaming(producer)
    producer.now += 11.0
    assert [e.cut for e in producer.machine.cut_overdue(producer.now) if isinstance(e, RemovePeer)] == [True]


def test_a_write_that_failed_and_may_still_land_is_no_fence() -> None:
    producer = Producer()
    writes = streaming(producer)
    producer.register("other", keys=("another",))
    effects = producer.do(WriteErrored(writes[0], "connection reset", may_land=True))
    assert not sent(effects, wire.Failed)
    assert [m.fenced for m in sent(effects, wire.Goodbye)] == [False]
    assert [e.cut for e in effects if isinstance(e, RemovePeer)] == [True]
    for write_id in writes[1:]:
        effects = producer.do(WriteErrored(write_id, "the peer was removed", may_land=True))
        assert not sent(effects, wire.Failed)
    assert not producer.machine._sessions


def test_an_unfenced_goodbye_leaves_blocks_in_quarantine_for_the_lease_and_the_retry_window() -> None:
    consumer = Consumer(lease_s=10.0, retry_window_s=1.0)
    _receiving(consumer)
    (ended,) = reports(consumer.say(wire.Goodbye(1, reason="a write is stuck", fenced=False)))
    assert isinstance(ended, ReceiveEnded)
    assert not ended.blocks_safe
    assert "a write is stuck" in str(ended.error)
    assert consumer.machine.expects_writes, "bytes that are here already must land before the blocks are given away"
    assert not reports(consumer.wait(10.9))
    assert reports(consumer.wait(0.2)) == [BlocksSafe(RequestId("r"))]
    assert not consumer.machine.expects_writes
