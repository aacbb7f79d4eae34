# SPDX-License-Identifier: Apache-2.0
"""A request that has no destination blocks yet learns when its prefill starts."""

from __future__ import annotations

import pytest
from machines import ADDRESS, Consumer, Producer, ids, reports, sent

from kvpush.core import wire
from kvpush.core.events import SourceAborted, SourceStarted, StartAwaitCancelled, StartAwaited
from kvpush.core.ids import RequestId
from kvpush.errors import LocalProtocolError


def watch(keys: tuple[str, ...] = ("t",), digest: bytes = b"d", request_id: str = "r") -> wire.Watch:
    return wire.Watch(1, request_id=request_id, keys=keys, prompt_digest=digest)


def awaited(request_id: str = "r") -> StartAwaited:
    return StartAwaited(RequestId(request_id), ADDRESS, ("t",), b"d")


def test_the_producer_says_when_the_first_progress_comes() -> None:
    producer = Producer()
    producer.connect()
    assert [m.started for m in sent(producer.say(watch()), wire.Started)] == [False]
    producer.announce()
    assert [m.started for m in sent(producer.say(watch()), wire.Started)] == [False]
    assert [m.started for m in sent(producer.progress(4, blocks=ids(1)), wire.Started)] == [True]
    assert not sent(producer.progress(8, blocks=ids(2)), wire.Started)
    assert [m.started for m in sent(producer.say(watch()), wire.Started)] == [True]


def test_another_prompt_is_another_matter() -> None:
    producer = Producer()
    producer.connect()
    producer.say(watch(digest=b"other"))
    producer.announce()
    assert not sent(producer.progress(4, blocks=ids(1)), wire.Started)


def test_an_aborted_source_ends_the_wait() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.say(watch())
    effects = producer.do(SourceAborted(RequestId("s"), "gone"))
    assert [m.started for m in sent(effects, wire.Started)] == [True]
    assert [m.started for m in sent(producer.say(watch()), wire.Started)] == [True]


def test_the_consumer_asks_after_the_handshake_and_reports_once() -> None:
    consumer = Consumer()
    consumer.do(awaited())
    assert [m.request_id for m in sent(consumer.welcome(), wire.Watch)] == ["r"]
    assert not reports(consumer.say(wire.Started(1, request_id="r", started=False)))
    assert not sent(consumer.wait(1.1), wire.Watch), "answered: heartbeats say that the producer lives"
    consumer.say(wire.Heartbeat(1, seq=2))
    outcomes = reports(consumer.say(wire.Started(1, request_id="r", started=True)))
    assert outcomes == [SourceStarted(RequestId("r"))]
    assert not reports(consumer.say(wire.Started(1, request_id="r", started=True)))
    assert not sent(consumer.wait(5.0), wire.Watch)


def test_a_watch_twice_is_refused() -> None:
    consumer = Consumer()
    consumer.do(awaited())
    with pytest.raises(LocalProtocolError):
        consumer.do(awaited())


def test_a_dead_producer_ends_every_watch() -> None:
    consumer = Consumer(peer_timeout_s=2.0)
    consumer.do(awaited("a"))
    consumer.do(awaited("b"))
    consumer.welcome()
    outcomes = [outcome for _ in range(4) for outcome in reports(consumer.wait(1.05))]
    assert sorted(o.request_id for o in outcomes) == ["a", "b"]


def test_a_producer_that_never_answers_the_handshake_ends_the_watch() -> None:
    consumer = Consumer(handshake_timeout_s=3.0)
    consumer.do(awaited())
    assert reports(consumer.wait(3.1)) == [SourceStarted(RequestId("r"))]


def test_a_queueing_producer_is_waited_for_while_it_answers() -> None:
    consumer = Consumer(transfer_timeout_s=300.0)
    consumer.do(awaited())
    consumer.welcome()
    asked = 0
    for seq in range(100):
        effects = consumer.wait(1.05)
        assert not reports(effects)
        for _ in sent(effects, wire.Watch):
            asked += 1
            consumer.say(wire.Started(1, request_id="r", started=False))
        consumer.say(wire.Heartbeat(1, seq=seq))
    assert 5 < asked < 20, "again from time to time, should the producer have had to forget it"


def only_the_session_is_left(consumer: Consumer) -> bool:
    return {kind for kind, _ in consumer.machine._deadlines._when} == {"session"}


def called_off(request_id: str = "r") -> StartAwaitCancelled:
    return StartAwaitCancelled(RequestId(request_id))


def test_a_watch_that_is_called_off_asks_no_more_and_reports_nothing() -> None:
    consumer = Consumer()
    consumer.do(awaited("gone"))
    consumer.do(awaited("stays"))
    consumer.welcome()
    assert not consumer.do(called_off("gone"))
    assert [m.request_id for m in sent(consumer.wait(1.1), wire.Watch)] == ["stays"]
    # The producer's answer comes too late.
    assert not reports(consumer.say(wire.Started(1, request_id="gone", started=True)))
    assert reports(consumer.say(wire.Started(1, request_id="stays", started=True))) == [SourceStarted(RequestId("stays"))]
    assert only_the_session_is_left(consumer)


def test_a_watch_that_is_called_off_before_the_handshake_is_never_sent() -> None:
    consumer = Consumer()
    consumer.do(awaited())
    consumer.do(called_off())
    assert not sent(consumer.welcome(), wire.Watch)
    assert only_the_session_is_left(consumer)


def test_a_watch_that_is_called_off_is_not_reported_when_the_producer_dies() -> None:
    consumer = Consumer(handshake_timeout_s=3.0)
    consumer.do(awaited())
    consumer.do(called_off())
    assert not reports(consumer.wait(3.1))


def test_calling_off_what_has_been_answered_changes_nothing() -> None:
    consumer = Consumer()
    consumer.do(awaited())
    consumer.welcome()
    consumer.say(wire.Started(1, request_id="r", started=True))
    assert not consumer.do(called_off())
    # The id may be watched anew.
    assert len(sent(consumer.do(awaited()), wire.Watch)) == 1
