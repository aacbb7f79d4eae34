# SPDX-License-Identifier: Apache-2.0
"""Event sequences that once broke the producer."""

from __future__ import annotations

from machines import Producer, ids, layout, posted, reports, sent

from kvpush.core import wire
from kvpush.core.effects import Effect
from kvpush.core.events import PeerAdded, SessionLost, SourceAborted, SourceFinished, SourceReleased
from kvpush.core.ids import Rect, RequestId, SessionId
from kvpush.core.producer import _Stream
from kvpush.core.scheduling import SchedulingPolicy


def streaming(producer: Producer) -> list[Effect]:
    producer.connect()
    producer.announce()
    producer.register()
    return producer.progress(blocks=ids(1, 2))


def test_finished_before_the_last_write_completes_is_released_once() -> None:
    producer = Producer()
    writes = posted(streaming(producer))
    producer.do(SourceFinished(RequestId("s")))
    outcomes = reports(producer.complete(writes))
    assert [type(o) for o in outcomes] == [SourceReleased]
    assert outcomes[0].num_streams == 1
    assert producer.machine.num_sources == 0


def test_abort_with_an_idle_stream_is_released_once() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.register()
    effects = producer.do(SourceAborted(RequestId("s"), "client gone"))
    assert [m.reason for m in sent(effects, wire.Failed)] == ["the producer gave up: client gone"]
    assert len(reports(effects)) == 1


def test_a_joined_registration_waits_no_longer_for_its_key() -> None:
    producer = Producer()
    producer.connect()
    producer.register()
    producer.announce("s")
    # The client uses the same id again, for another prompt, while the first is still streaming.
    effects = producer.announce("again", digest=b"other")
    assert not sent(effects, wire.Failed)
    producer.announce("and again")
    assert producer.machine.num_streams == 1


def test_deadlines_of_one_turn_may_settle_one_another() -> None:
    producer = Producer(announce_timeout_s=30.0)
    producer.connect()
    producer.register()
    # A long pause of the process: the session's and the stream's deadline are due in the same turn.
    effects = producer.wait(1000.0)
    effects += producer.wait(1000.0)
    assert producer.machine.num_streams == 0


def test_source_deadline_and_session_loss_in_one_turn() -> None:
    producer = Producer(source_timeout_s=50.0)
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    producer.do(SourceFinished(RequestId("s")))
    outcomes = reports(producer.wait(50.0))
    assert len(outcomes) == 1
    assert outcomes[0].error is not None


def test_streams_whose_prompt_is_final_are_awaited() -> None:
    producer = Producer(policy=SchedulingPolicy(granularity="request"))
    producer.connect()
    producer.announce()
    producer.register()
    stream: _Stream = producer.machine._sessions[SessionId(1)].streams[RequestId("r")]
    assert not stream.awaited
    producer.progress(4, blocks=ids(1, 2))
    assert not stream.awaited
    producer.progress(8)
    assert stream.awaited


def test_a_late_cancel_of_an_older_epoch_does_not_revive_a_newer_one() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.register(epoch=5)
    writes = posted(producer.progress(blocks=ids(1, 2)))
    assert sent(producer.complete(writes), wire.Commit)
    producer.say(wire.Cancel(1, request_id="r", epoch=3))
    effects = producer.register(epoch=5)
    assert sent(effects, wire.Commit), "a repeated registration is answered with the commit again"
    assert not posted(effects)


def test_no_write_after_goodbye() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    assert sent(producer.shutdown(), wire.Goodbye)
    effects = producer.register()
    assert not posted(effects)
    assert sent(effects, wire.Refused)


def test_goodbye_waits_for_writes_in_flight() -> None:
    producer = Producer()
    writes = posted(streaming(producer))
    effects = producer.shutdown()
    assert not sent(effects, wire.Goodbye)
    assert not posted(producer.register("another"))
    effects = producer.complete(writes)
    assert [type(m) for m in sent(effects, object)] == [wire.Failed, wire.Goodbye]


def test_shutdown_reports_ended_sources() -> None:
    producer = Producer()
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    producer.do(SourceFinished(RequestId("s")))
    producer.announce("late", keys=("u",))
    assert len(reports(producer.shutdown())) == 1
    producer.progress(source="late", blocks=ids(3, 4))
    assert len(reports(producer.do(SourceFinished(RequestId("late"))))) == 1


def test_session_lost_with_writes_in_flight_keeps_the_source_pinned() -> None:
    producer = Producer()
    writes = posted(streaming(producer))
    producer.do(SourceFinished(RequestId("s")))
    assert not reports(producer.do(SessionLost(SessionId(1), "gone")))
    assert len(reports(producer.complete(writes))) == 1


def test_a_group_without_layers_is_refused_at_the_handshake() -> None:
    from kvpush.core.layout import CacheLayout

    producer = Producer()
    odd = CacheLayout(layout(3).layers, num_groups=2)
    effects = producer.say(Producer.hello(layout=odd))
    assert "without a layer" in sent(effects, wire.Refused)[0].reason


def test_a_commit_is_short_whatever_order_its_writes_complete_in() -> None:
    import random

    tokens, layers = 1200, 12
    producer = Producer(layers=layers)
    producer.machine = type(producer.machine)(producer.machine.config, layout(layers, num_blocks=400))
    producer.connect(layout=layout(layers, num_blocks=400, base=1 << 30))
    producer.announce(tokens=tokens)
    producer.register(tokens=tokens, blocks=ids(*range(300)))
    writes = []
    chance = random.Random(3)
    done = [0] * layers
    producer.progress(0, layers=(0, layers), blocks=ids(*range(300)))
    while min(done) < tokens:
        low = chance.randrange(layers)
        high = chance.randint(low + 1, layers)
        upto = min(tokens, max(done[low:high]) + 4 * chance.randint(1, 3))
        done[low:high] = [max(upto, d) for d in done[low:high]]
        writes += posted(producer.progress(upto, layers=(low, high)))
    chance.shuffle(writes)
    commits = sent(producer.complete(writes), wire.Commit)
    assert [commit.coverage for commit in commits] == [(Rect(0, layers, 0, 2, 0, tokens),)]


def test_a_recorded_registration_is_worth_nothing_in_a_later_session() -> None:
    firsts = iter([5_000, 900])
    producer = Producer(first_seq=lambda: next(firsts))
    producer.connect()
    recorded = [producer.hello(), producer.registration("r")]
    assert producer.seq[1] == 5_001
    producer.say(wire.Goodbye(1))
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    # Somebody plays the session again: the transport still knows the consumer, whose blocks are others' by now.
    producer.say(recorded[0])
    producer.do(PeerAdded(SessionId(1)))
    effects = producer.say(recorded[1])
    assert effects == []
    assert (producer.machine.num_streams, producer.machine.counters.refused_registrations) == (0, 1)
    producer.say(wire.HeartbeatAck(1, seq=5_001))
    assert not posted(producer.register("later", seq=0)), "no lease has been granted"
    assert posted(producer.say(wire.HeartbeatAck(1, seq=901)))
