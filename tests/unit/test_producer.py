# SPDX-License-Identifier: Apache-2.0
"""The producer's handshake, registrations and order of posting, spoken to by hand."""

from __future__ import annotations

from typing import Any

import pytest
from machines import BLOCK_BYTES, Producer, ids, layout, posted, reports, sent

from kvpush.core import wire
from kvpush.core.effects import AddPeer, CloseSession, RemovePeer
from kvpush.core.events import PeerRefused, SourceAnnounced, SourceFinished, SourceProgressed, WriteCompleted
from kvpush.core.ids import RequestId, SessionId
from kvpush.core.scheduling import SchedulingPolicy
from kvpush.errors import LocalProtocolError


@pytest.mark.parametrize(
    ("changes", "config", "named"),
    [
        ({"compat": {"model": "a", "dtype": "x"}}, {"compat": {"model": "b", "dtype": "x"}}, ["model", "'a'", "'b'"]),
        ({"compat": {}}, {"compat": {"rope": "1"}}, ["rope", "None", "'1'"]),
        ({"transport": "other"}, {}, ["'other'", "'toy'"]),
        ({"lease_s": 1.0}, {}, ["too short", "1 s"]),
        ({"layout": layout(3, base=1 << 30, dtype="bfloat16")}, {}, ["dtype", "float32", "bfloat16"]),
        ({"layout": layout(3, base=1 << 30, block_tokens=16)}, {}, ["4 tokens/block", "16 tokens/block"]),
        ({"layout": layout(3, base=1 << 30, num_heads=4)}, {}, ["heads [0, 2)", "heads [0, 4)"]),
    ],
)
def test_what_does_not_fit_is_refused_and_named(changes: dict[str, Any], config: dict[str, Any], named: list[str]) -> None:
    producer = Producer(**config)
    effects = producer.say(producer.hello(**changes))
    (refused,) = sent(effects, wire.Refused)
    for text in named:
        assert text in refused.reason
    assert not refused.unknown
    assert effects[-1] == CloseSession(SessionId(1))
    assert producer.machine.counters.refused_hellos == 1
    assert not producer.machine._sessions
    producer.connect(2, **({"compat": config["compat"]} if config else {}))
    assert producer.register(session=2)


def test_only_what_differs_is_named() -> None:
    producer = Producer(compat={"model": "a", "dtype": "x"})
    (refused,) = sent(producer.say(producer.hello(compat={"model": "b", "dtype": "x"})), wire.Refused)
    assert "dtype" not in refused.reason


def test_the_welcome_waits_for_the_transport_and_a_repeated_hello_is_welcomed_again() -> None:
    producer = Producer()
    effects = producer.say(producer.hello())
    assert [type(effect) for effect in effects] == [AddPeer]
    assert not producer.say(producer.hello()), "it is being added"
    effects = producer.connect()
    assert [m.covers for m in sent(effects, wire.Welcome)] == [((0, 3, 0, 2, 0, 1),)]
    assert len(sent(producer.say(producer.hello()), wire.Welcome)) == 1


def test_a_peer_that_the_transport_can_not_reach_is_refused() -> None:
    producer = Producer()
    producer.say(producer.hello())
    effects = producer.do(PeerRefused(SessionId(1), "no route"))
    assert [m.reason for m in sent(effects, wire.Refused)] == ["no route"]
    assert not producer.machine._sessions


def test_nothing_is_posted_before_the_first_answer_and_heartbeats_are_sent() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    assert not posted(producer.register(seq=0))
    (beat,) = sent(producer.wait(0.5), wire.Heartbeat)
    effects = producer.say(wire.HeartbeatAck(1, seq=beat.seq))
    assert len(posted(effects)) == 1
    assert sent(effects, wire.Streaming), "told before the first write can land"
    assert [type(effect).__name__ for effect in effects] == ["Send", "PostWrite"]


def test_a_silent_consumer_is_dropped() -> None:
    producer = Producer(peer_timeout_s=2.0)
    producer.connect()
    producer.register()
    effects = [effect for _ in range(6) for effect in producer.wait(0.5)]
    assert [type(e) for e in effects if isinstance(e, CloseSession | RemovePeer)] == [CloseSession, RemovePeer]
    assert producer.machine.num_streams == 0


def test_the_agent_is_forgotten_with_its_last_session() -> None:
    producer = Producer()
    producer.connect(1, agent_name="same")
    producer.connect(2, agent_name="same")
    assert not [e for e in producer.say(wire.Goodbye(1)) if isinstance(e, RemovePeer)]
    assert [e.agent_name for e in producer.say(wire.Goodbye(2)) if isinstance(e, RemovePeer)] == ["same"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"blocks": ids(10, 32)}, "outside the consumer's pool of 32"),
        ({"blocks": ids(10)}, "1 blocks for 2"),
        ({"blocks": ids(10, 11, 12)}, "3 blocks for 2"),
        ({"blocks": ids(10, 10)}, "named twice"),
        ({"blocks": (*ids(10, 11), *ids(10, 11))}, "2 block tables for 1"),
        ({"token_lo": 2, "blocks": ids(10, 11)}, "don't start at a block"),
        ({"token_lo": 8, "blocks": ids(10)}, "don't start at a block"),
    ],
)
def test_impossible_registrations_fail_for_good(fields: dict[str, Any], reason: str) -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    for _ in range(2):
        effects = producer.register(**fields)
        assert reason in sent(effects, wire.Failed)[0].reason
        assert not posted(effects)
    assert producer.machine.counters.refused_registrations == 1
    assert posted(producer.register("good"))


def test_too_many_registrations() -> None:
    producer = Producer(max_streams_per_session=2)
    producer.connect()
    producer.register("a")
    producer.register("b")
    assert "too many" in sent(producer.register("c"), wire.Failed)[0].reason


def test_negative_block_ids_are_refused() -> None:
    producer = Producer()
    producer.connect()
    assert "negative" in sent(producer.register(blocks=ids(10, -1)), wire.Failed)[0].reason


def urgent(producer: Producer, name: str, tokens: int, *, upto: int) -> list[Any]:
    producer.announce(name, keys=(name,), tokens=tokens)
    first = 100 * len(producer.machine._sources)
    producer.register(name, keys=(name,), tokens=tokens, blocks=ids(*range(first % 20, first % 20 + -(-tokens // 4))))
    return producer.progress(upto, source=name, blocks=ids(*range(-(-upto // 4))))


def test_awaited_tails_go_first_then_the_shortest() -> None:
    one = 3 * BLOCK_BYTES
    producer = Producer(policy=SchedulingPolicy("layer", max_inflight_bytes_per_peer=one, max_inflight_bytes=one))
    producer.connect()
    (blocker,) = posted(urgent(producer, "blocker", 4, upto=4))
    for name, tokens, upto in (("long", 24, 20), ("short", 24, 4), ("awaited", 8, 8), ("awaited less", 4, 4)):
        assert not posted(urgent(producer, name, tokens, upto=upto)), "no credit"
    order = []
    pending = [blocker]
    while pending:
        effects = producer.do(WriteCompleted(pending.pop(0).write_id))
        for write in posted(effects):
            stream = producer.machine._writes[write.write_id]
            order.append(stream.request_id)
            pending.append(write)
    assert list(dict.fromkeys(order)) == ["awaited less", "awaited", "short", "long"]


def test_a_starved_stream_goes_first() -> None:
    one = 3 * BLOCK_BYTES
    producer = Producer(policy=SchedulingPolicy("layer", max_inflight_bytes_per_peer=one, max_inflight_bytes=one))
    producer.connect()
    (blocker,) = posted(urgent(producer, "blocker", 4, upto=4))
    urgent(producer, "old", 24, upto=20)
    producer.now += 0.3
    urgent(producer, "awaited", 4, upto=4)
    (write,) = posted(producer.do(WriteCompleted(blocker.write_id)))
    assert producer.machine._writes[write.write_id].request_id == "old"


@pytest.mark.parametrize(
    "event",
    [
        SourceAnnounced(RequestId("x"), (), b"d", 8),
        SourceAnnounced(RequestId("x"), ("k",), b"d", 0),
        SourceAnnounced(RequestId("s"), ("t",), b"d", 8),
        SourceProgressed(RequestId("nobody"), 0, 3, 8),
        SourceProgressed(RequestId("s"), 0, 4, 8),
        SourceProgressed(RequestId("s"), 2, 2, 8),
        SourceProgressed(RequestId("s"), 0, 3, 9, (*ids(1), *ids(2))),
        SourceProgressed(RequestId("s"), 0, 3, 8, ids(1)),
        SourceFinished(RequestId("nobody")),
        WriteCompleted(77),  # type: ignore[arg-type]
    ],
)
def test_what_our_engine_must_not_say_changes_nothing(event: Any) -> None:
    producer = Producer()
    producer.announce()
    with pytest.raises(LocalProtocolError):
        producer.do(event)
    producer.connect()
    producer.register()
    assert posted(producer.progress(blocks=ids(1, 2)))


def test_a_source_that_ends_too_early_fails_its_streams() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.register()
    writes = posted(producer.progress(4, blocks=ids(1)))
    producer.do(SourceFinished(RequestId("s")))
    effects = producer.complete(writes)
    assert "finished with 4 of 8 tokens" in sent(effects, wire.Failed)[0].reason
    assert len(reports(effects)) == 1


def test_a_late_registration_is_told_what_became_of_its_source() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.register()
    writes = posted(producer.progress(blocks=ids(1, 2)))
    producer.do(SourceFinished(RequestId("s")))
    producer.complete(writes)
    assert "released already" in sent(producer.register("late"), wire.Failed)[0].reason


def test_a_rank_that_holds_nothing_wanted_commits_at_once_and_empty() -> None:
    producer = Producer(layers=[7, 8, 9])
    producer.connect()
    producer.announce()
    effects = producer.register()
    assert [m.coverage for m in sent(effects, wire.Commit)] == [()]
    producer.progress(blocks=ids(1, 2))
    assert len(reports(producer.do(SourceFinished(RequestId("s"))))) == 1


def test_a_refusal_names_everything_that_differs_and_both_values() -> None:
    p = Producer(compat={"rope_theta": "10000.0", "weights": "aa", "dtype": "float32", "only here": "1"})
    theirs = {"rope_theta": "500000.0", "weights": "bb", "dtype": "float32", "only there": "2"}
    effects = p.say(p.hello(compat=theirs))
    (refused,) = sent(effects, wire.Refused)
    assert "rope_theta: producer '10000.0', consumer '500000.0'" in refused.reason
    assert "weights: producer 'aa', consumer 'bb'" in refused.reason
    assert "only here: producer '1', consumer None" in refused.reason
    assert "only there: producer None, consumer '2'" in refused.reason
    assert "dtype" not in refused.reason
    assert p.machine.counters.refused_hellos == 1
