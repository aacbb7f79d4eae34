# SPDX-License-Identifier: Apache-2.0
"""The consumer polls its transport only while something may be landing."""

from __future__ import annotations

from machines import Consumer, Producer, ids, posted, sent

from kvpush.core import wire
from kvpush.core.effects import OpenSession
from kvpush.core.ids import PeerAddress


def test_the_producer_says_quiet_between_chunks_and_streaming_again() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.register()
    effects = producer.progress(4, blocks=ids(1))
    assert len(sent(effects, wire.Streaming)) == 1
    effects = producer.complete(posted(effects))
    assert not sent(effects, wire.Quiet)
    assert len(sent(producer.wait(0.006), wire.Quiet)) == 1
    assert not sent(producer.wait(0.1), wire.Quiet)
    # A repeated registration is not told that writes may land.
    again = producer.register()
    assert sent(again, wire.Registered)
    assert not sent(again, wire.Streaming)
    effects = producer.progress(8, blocks=ids(2))
    assert len(sent(effects, wire.Streaming)) == 1
    assert len(sent(producer.complete(posted(effects)), wire.Commit)) == 1


def test_writes_that_follow_closely_need_no_messages() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.register()
    producer.complete(posted(producer.progress(4, blocks=ids(1))))
    producer.wait(0.003)
    effects = producer.progress(8, blocks=ids(2))
    assert not sent(effects, wire.Streaming)
    assert not sent(producer.wait(0.003), wire.Quiet)
    producer.complete(posted(effects))


def test_the_consumer_expects_writes_while_the_session_is_active() -> None:
    consumer = Consumer()
    consumer.request()
    consumer.welcome()
    machine = consumer.machine
    assert not machine.expects_writes
    consumer.say(wire.Streaming(1, request_id="r", epoch=1))
    assert machine.expects_writes
    consumer.say(wire.Quiet(1))
    assert not machine.expects_writes
    consumer.say(wire.Streaming(1, request_id="r", epoch=1))
    assert machine.expects_writes
    consumer.say(wire.Goodbye(1))
    assert not machine.expects_writes


def test_an_idle_session_beats_slowly() -> None:
    producer = Producer(heartbeat_s=0.5, idle_heartbeat_s=3.0)
    producer.connect()
    beats = []
    for _ in range(100):
        for beat in sent(producer.wait(0.1), wire.Heartbeat):
            beats.append(producer.now)
            producer.say(wire.HeartbeatAck(1, seq=beat.seq))
    assert len(beats) <= 5


def test_an_idle_session_without_answers_is_lost_in_time() -> None:
    producer = Producer(heartbeat_s=0.5, idle_heartbeat_s=3.0, peer_timeout_s=2.0)
    producer.connect()
    producer.say(wire.HeartbeatAck(1, seq=producer.seq[1]))
    for _ in range(80):
        producer.wait(0.1)
    assert producer.machine.counters.sessions_lost == 1


def test_the_consumer_polls_as_the_producers_say_but_never_too_rarely() -> None:
    consumer = Consumer()
    consumer.request()
    consumer.welcome()
    machine = consumer.machine
    assert machine.poll_s == 0.0
    consumer.say(wire.Streaming(1, request_id="r", epoch=1, poll_s=0.004))
    assert machine.poll_s == 0.004
    consumer.say(wire.Quiet(1))
    consumer.say(wire.Streaming(1, request_id="r", epoch=1, poll_s=3600.0))
    assert machine.poll_s == 0.01
    effects = consumer.request("r2", peer=PeerAddress("other", 5000))
    (opened,) = [effect for effect in effects if isinstance(effect, OpenSession)]
    (registration,) = sent(consumer.welcome(opened.session), wire.RegisterBlocks)
    consumer.say(wire.Streaming(opened.session, request_id="r2", epoch=registration.epoch, poll_s=0.001))
    assert machine.poll_s == 0.001, "the fastest of them"
    consumer.say(wire.Quiet(opened.session))
    assert machine.poll_s == 0.01
