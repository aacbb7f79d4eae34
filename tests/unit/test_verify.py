# SPDX-License-Identifier: Apache-2.0
"""What arrived is what was sent: digests on both sides, between all writes and the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from machines import ADDRESS, BLOCK_BYTES, Consumer, Producer, ids, layout, posted, reports, sent

from kvpush.core import wire
from kvpush.core.digest import in_sample
from kvpush.core.effects import Effect, StartDigest
from kvpush.core.events import (
    DigestFailed,
    DigestReady,
    MessageReceived,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveStatus,
    SessionLost,
    SourceAnnounced,
    SourceFinished,
    SourcePreempted,
    SourceReleased,
)
from kvpush.core.ids import AgentName, DigestId, EngineId, Rect, RequestId, SessionId
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.errors import IntegrityError, KvPushError, LocalProtocolError
from kvpush.testing.simulation import InvariantBroken, World, WorldConfig

SCHEME = "toy-digest"
DIGESTS = (b"0", b"1", b"2")
LOW, HIGH = Rect(0, 2, 0, 2, 0, 8), Rect(2, 3, 0, 2, 0, 8)


def asked(effects: list[Effect]) -> list[StartDigest]:
    return [effect for effect in effects if isinstance(effect, StartDigest)]


# --- the producer -------------------------------------------------------------------------------------------------------


def streaming(**hello: Any) -> Producer:
    producer = Producer()
    producer.connect(digest=SCHEME, **hello)
    return producer


def written(producer: Producer, *, tokens: int = 8, token_lo: int = 0) -> list[Effect]:
    """Announced, registered, computed and written: the effects of the last completion."""
    producer.announce(tokens=tokens)
    producer.register(tokens=tokens, token_lo=token_lo, verify=True)
    return producer.complete(posted(producer.progress(tokens, blocks=ids(5, 3, 7)[:1])))


def ready(producer: Producer, digest_id: int = 1, digests: tuple[bytes, ...] = DIGESTS) -> list[Effect]:
    return producer.do(DigestReady(DigestId(digest_id), digests))


def test_the_commit_waits_for_the_digest_and_carries_it() -> None:
    producer = streaming()
    effects = written(producer)
    assert not sent(effects, wire.Commit)
    (digest,) = asked(effects)
    assert digest.for_producer
    assert digest.layers == (0, 1, 2)
    assert digest.blocks[0].tolist() == [5, 3]
    (commit,) = sent(ready(producer), wire.Commit)
    assert commit.digests == DIGESTS
    assert commit.digest_hi == 8
    assert producer.machine.counters.streams_done == 1


def test_nobody_pays_who_has_not_asked() -> None:
    producer = streaming()
    producer.announce()
    producer.register()
    effects = producer.complete(posted(producer.progress(8, blocks=ids(1, 2))))
    assert not asked(effects)
    (commit,) = sent(effects, wire.Commit)
    assert commit.digests == ()


@pytest.mark.parametrize(
    ("tokens", "token_lo", "grows", "blocks", "digest_hi"),
    [
        (10, 0, False, [5, 3, 7], 10),
        (10, 4, False, [3, 7], 10),
        (10, 0, True, [5, 3], 8),
        (10, 8, True, [], 8),
        (8, 4, True, [3], 8),
    ],
)
def test_what_is_digested(tokens: int, token_lo: int, grows: bool, blocks: list[int], digest_hi: int) -> None:
    """From the first token wanted; without a last block that the engine may go on writing to."""
    producer = streaming()
    producer.do(SourceAnnounced(RequestId("s"), ("t",), b"d", tokens, grows))
    producer.register(tokens=tokens, token_lo=token_lo, verify=True)
    (digest,) = asked(producer.complete(posted(producer.progress(tokens, blocks=ids(5, 3, 7)))))
    assert digest.blocks[0].tolist() == blocks
    (commit,) = sent(ready(producer), wire.Commit)
    assert commit.digest_hi == digest_hi


def test_layers_are_digested_in_the_consumers_order() -> None:
    producer = streaming(layers=[2, 5, 0])
    (digest,) = asked(written(producer))
    assert digest.layers == (2, 0)
    (commit,) = sent(ready(producer, digests=(b"2", b"0")), wire.Commit)
    assert sorted((rect.layer_lo, rect.layer_hi) for rect in commit.coverage) == [(0, 1), (2, 3)]


def test_a_preemption_makes_a_digest_void() -> None:
    producer = streaming()
    written(producer)
    producer.do(SourcePreempted(RequestId("s")))
    assert not sent(ready(producer), wire.Commit), "a digest of blocks that were taken away"
    writes = posted(producer.progress(8, blocks=ids(8, 9)))
    assert sum(write.num_bytes for write in writes) == 2 * 3 * BLOCK_BYTES, "all of it is written again"
    (digest,) = asked(producer.complete(writes))
    assert digest.blocks[0].tolist() == [8, 9]
    (commit,) = sent(ready(producer, 2, (b"a", b"b", b"c")), wire.Commit)
    assert commit.digests == (b"a", b"b", b"c")


def test_a_void_digest_that_ends_late_commits_nothing() -> None:
    producer = streaming()
    written(producer)
    producer.do(SourcePreempted(RequestId("s")))
    producer.complete(posted(producer.progress(8, blocks=ids(8, 9))))
    assert not sent(ready(producer, 1), wire.Commit)
    assert sent(ready(producer, 2), wire.Commit)


GIVE_UPS: dict[str, Callable[[Producer], list[Effect]]] = {
    "cancelled": lambda p: p.say(wire.Cancel(1, request_id="r", epoch=1)),
    "consumer gone": lambda p: p.do(SessionLost(SessionId(1), "gone")),
    "deadline": lambda p: [*p.wait(29.9), *p.say(wire.HeartbeatAck(1, seq=p.seq[1])), *p.wait(0.2)],
}


@pytest.mark.parametrize("what", GIVE_UPS)
def test_source_blocks_are_held_until_the_digest_has_ended(what: str) -> None:
    producer = Producer(peer_timeout_s=1000.0, idle_heartbeat_s=1000.0, heartbeat_s=1000.0)
    producer.connect(digest=SCHEME, lease_s=5000.0)
    written(producer)
    effects = producer.do(SourceFinished(RequestId("s")))
    effects += GIVE_UPS[what](producer)
    if what == "cancelled":
        assert sent(effects, wire.Fenced), "nothing is in flight: the consumer needn't wait for our digest"
    if what == "deadline":
        assert "digest" in sent(effects, wire.Failed)[0].reason
    assert producer.machine.num_streams == 0
    assert not reports(effects), "released while a digest reads the blocks"
    (released,) = reports(ready(producer))
    assert isinstance(released, SourceReleased)
    assert released.num_streams == 0


def test_a_digest_that_fails_fails_the_stream() -> None:
    producer = streaming()
    written(producer)
    (failed,) = sent(producer.do(DigestFailed(DigestId(1), "no memory")), wire.Failed)
    assert "no memory" in failed.reason


def test_each_stream_of_a_source_is_digested() -> None:
    producer = streaming()
    producer.announce()
    producer.register("one", verify=True)
    producer.register("two", token_lo=4, verify=True, blocks=ids(20))
    producer.register("three")
    effects = producer.complete(posted(producer.progress(8, blocks=ids(1, 2))))
    assert [m.request_id for m in sent(effects, wire.Commit)] == ["three"]
    assert sorted(tuple(digest.blocks[0].tolist()) for digest in asked(effects)) == [(1, 2), (2,)]
    assert len(sent(ready(producer, 1) + ready(producer, 2), wire.Commit)) == 2


def test_a_repeated_registration_during_a_digest_is_answered() -> None:
    producer = streaming()
    written(producer)
    effects = producer.register(verify=True)
    assert sent(effects, wire.Streaming) or sent(effects, wire.Registered)
    assert not asked(effects)


def test_an_unknown_digest_is_our_own_fault() -> None:
    producer = streaming()
    written(producer)
    ready(producer)
    for digest_id in (1, 7):
        with pytest.raises(LocalProtocolError):
            ready(producer, digest_id)


@pytest.mark.parametrize("ours", ["other-digest", ""])
def test_kinds_of_digests_must_agree(ours: str) -> None:
    producer = Producer(digest_scheme=ours)
    (refused,) = sent(producer.say(producer.hello(digest=SCHEME)), wire.Refused)
    assert SCHEME in refused.reason
    assert (ours or "can't compute") in refused.reason
    assert sent(Producer(digest_scheme=ours).connect(), wire.Welcome), "who verifies nothing needs no digests"


def test_a_digest_needs_a_handshake_that_names_it() -> None:
    producer = Producer()
    producer.connect()
    (failed,) = sent(producer.register(verify=True), wire.Failed)
    assert "digest" in failed.reason


# --- the consumer -------------------------------------------------------------------------------------------------------


def verifier(**config: Any) -> Consumer:
    return Consumer(**({"verify": "all", "digest_scheme": SCHEME} | config))


def arrived(consumer: Consumer, digests: tuple[bytes, ...] = DIGESTS, **fields: Any) -> list[Effect]:
    """Requested, and committed by the only rank."""
    consumer.request()
    consumer.welcome()
    return consumer.part(wire.Commit, coverage=(LOW, HIGH), digests=digests, **{"digest_hi": 8} | fields)


def compared(consumer: Consumer, digests: tuple[bytes, ...] = DIGESTS) -> ReceiveEnded:
    (ended,) = reports(consumer.do(DigestReady(DigestId(1), digests)))
    assert isinstance(ended, ReceiveEnded)
    return ended


def failure(ended: ReceiveEnded) -> KvPushError:
    assert ended.status is ReceiveStatus.FAILED
    assert ended.blocks_safe
    assert ended.error is not None
    return ended.error


def test_what_is_asked_for() -> None:
    consumer = verifier()
    effects = consumer.request()
    assert [m.digest for m in sent(effects, wire.Hello)] == [SCHEME]
    assert [m.verify for m in sent(consumer.welcome(), wire.RegisterBlocks)] == [True]
    assert [m.verify for m in sent(consumer.wait(1.0), wire.RegisterBlocks)] == [True], "a repeated one asks for it too"


def test_nothing_is_asked_for_by_default() -> None:
    consumer = Consumer(digest_scheme=SCHEME)
    assert [m.digest for m in sent(consumer.request(), wire.Hello)] == [""]
    assert [m.verify for m in sent(consumer.welcome(), wire.RegisterBlocks)] == [False]
    effects = consumer.part(wire.Commit, coverage=(LOW, HIGH))
    assert [o.status for o in reports(effects) if isinstance(o, ReceiveEnded)] == [ReceiveStatus.RECEIVED]


def test_it_is_compared_before_it_is_reported() -> None:
    consumer = verifier()
    effects = arrived(consumer)
    assert not reports(effects)
    (digest,) = asked(effects)
    assert not digest.for_producer
    assert digest.layers == (0, 1, 2)
    assert digest.blocks[0].tolist() == [10, 11]
    assert compared(consumer).status is ReceiveStatus.RECEIVED
    assert consumer.machine.counters.verified == 1
    assert consumer.machine.counters.integrity_errors == 0


@pytest.mark.parametrize("wrong", range(3))
def test_a_difference_is_an_integrity_error_that_names_the_layer(wrong: int) -> None:
    consumer = verifier()
    arrived(consumer)
    digests = tuple(b"X" if idx >= wrong else digest for idx, digest in enumerate(DIGESTS))
    error = failure(compared(consumer, digests))
    assert isinstance(error, IntegrityError)
    assert f"layer.{wrong};" in error.message
    assert f"{3 - wrong} of 3 layers" in error.message
    assert str(ADDRESS) in error.message
    assert error.story
    assert consumer.machine.counters.integrity_errors == 1
    assert consumer.machine.counters.verified == 0
    assert consumer.machine.counters.failed == 1


def test_an_unfinished_last_block_is_left_out() -> None:
    consumer = verifier()
    consumer.request(tokens=10, token_lo=4)
    consumer.welcome()
    whole = (Rect(0, 3, 0, 2, 4, 10),)
    (digest,) = asked(consumer.part(wire.Commit, coverage=whole, digests=DIGESTS, digest_hi=8))
    assert digest.blocks[0].tolist() == [10]
    assert compared(consumer).status is ReceiveStatus.RECEIVED


def two_ranks(tokens: int = 8) -> Consumer:
    consumer = verifier()
    consumer.request(tokens=tokens)
    endpoints = (wire.Endpoint(0, "prefill", 5000), wire.Endpoint(1, "prefill", 5001))
    consumer.welcome(covers=(LOW._replace(token_hi=1),), endpoints=endpoints)
    consumer.welcome(2, covers=(HIGH._replace(token_hi=1),))
    return consumer


def test_every_rank_is_compared() -> None:
    consumer = two_ranks()
    assert not asked(consumer.part(wire.Commit, session=2, coverage=(HIGH,), digests=(b"2",), digest_hi=8))
    (digest,) = asked(consumer.part(wire.Commit, session=1, coverage=(LOW,), digests=(b"0", b"1"), digest_hi=8))
    assert digest.layers == (0, 1, 2)
    assert "prefill:5001" in failure(compared(consumer, (b"0", b"1", b"X"))).message


@pytest.mark.parametrize(
    ("digests", "digest_hi"),
    [((), 0), ((), 8), (DIGESTS[:2], 8), ((*DIGESTS, b"3"), 8), (DIGESTS, 0), (DIGESTS, 7), (DIGESTS, 12)],
)
def test_a_commit_without_proper_digests_is_not_believed(digests: tuple[bytes, ...], digest_hi: int) -> None:
    consumer = verifier()
    effects = arrived(consumer, digests, digest_hi=digest_hi)
    assert not asked(effects)
    (ended,) = reports(effects)
    assert isinstance(ended, ReceiveEnded)
    assert "digests that were asked for" in failure(ended).message
    assert consumer.machine.counters.integrity_errors == 0


def test_ranks_that_differ_in_how_far_they_have_digested_are_not_believed() -> None:
    consumer = two_ranks(tokens=10)
    consumer.part(wire.Commit, session=1, coverage=(LOW._replace(token_hi=10),), digests=(b"0", b"1"), digest_hi=8)
    effects = consumer.part(wire.Commit, session=2, coverage=(HIGH._replace(token_hi=10),), digests=(b"2",), digest_hi=10)
    (ended,) = reports(effects)
    assert isinstance(ended, ReceiveEnded)
    failure(ended)


def test_an_abort_does_not_wait_for_the_digest() -> None:
    consumer = verifier()
    arrived(consumer)
    (ended,) = reports(consumer.do(ReceiveAborted(RequestId("r"))))
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.CANCELLED, True)
    # Its blocks may hold anything by now.
    assert not consumer.do(DigestReady(DigestId(1), (b"X",) * 3))
    assert consumer.machine.counters.integrity_errors == 0


def test_a_lost_producer_does_not_matter_once_all_has_arrived() -> None:
    consumer = verifier()
    arrived(consumer)
    assert not reports(consumer.do(SessionLost(SessionId(1), "gone")))
    assert compared(consumer).status is ReceiveStatus.RECEIVED


@pytest.mark.parametrize("how", ["failed", "late"])
def test_a_digest_that_can_not_be_had_fails_the_request(how: str) -> None:
    consumer = verifier()
    arrived(consumer)
    if how == "failed":
        effects = consumer.do(DigestFailed(DigestId(1), "no memory"))
    else:
        consumer.do(SessionLost(SessionId(1), "gone"))
        effects = consumer.wait(consumer.machine.config.digest_timeout_s)
    (ended,) = reports(effects)
    assert isinstance(ended, ReceiveEnded)
    assert "digest of what has arrived" in failure(ended).message
    if how == "late":
        assert not consumer.do(DigestReady(DigestId(1), DIGESTS))


def test_an_unknown_digest_is_our_own_fault_here_too() -> None:
    with pytest.raises(LocalProtocolError):
        verifier().do(DigestReady(DigestId(1), DIGESTS))


# --- samples ------------------------------------------------------------------------------------------------------------


def test_a_sample_is_a_share_of_the_transfers() -> None:
    keys = [f"transfer-{number}" for number in range(20_000)]
    for share in (0.01, 0.05, 0.5):
        chosen = sum(in_sample(key, share) for key in keys)
        assert abs(chosen / len(keys) - share) < 0.01
    assert all(in_sample(key, 1.0) for key in keys)
    assert {key for key in keys if in_sample(key, 0.05)} <= {key for key in keys if in_sample(key, 0.2)}


def test_the_sample_is_drawn_by_the_transfer() -> None:
    def chosen(consumer: Consumer, key: str) -> bool:
        consumer.request(key, keys=(key, "another"))
        (message,) = sent(consumer.welcome(), wire.RegisterBlocks) or sent(consumer.wait(1.0), wire.RegisterBlocks)[-1:]
        return message.verify

    keys = [f"t{number}" for number in range(40)]
    first = [chosen(verifier(verify="sample", verify_sample_share=0.5), key) for key in keys]
    again = [chosen(verifier(verify="sample", verify_sample_share=0.5), key) for key in keys]
    assert first == again
    assert first == [in_sample(key, 0.5) for key in keys]
    assert 5 < sum(first) < 35


# --- both ---------------------------------------------------------------------------------------------------------------


def transfer(spoil: bool, **config: Any) -> World:
    world = World(WorldConfig(num_layers=4, **config))
    world.request(0, "r", key="t", prompt=3)
    world.announce(0, "s", key="t", prompt=3)
    world.settle()
    world.compute(0, "s")
    assert world.writes
    if spoil:
        assert world.spoil(world.writes[-1], 2)
    world.finish(0, "s")
    world.settle()
    return world


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fence", [True, False])
def test_verified_transfers(ranks: int, fence: bool) -> None:
    world = transfer(False, verify="all", num_ranks=ranks, needs_visibility_fence=fence)
    assert world.statuses == [("r", ReceiveStatus.RECEIVED)]
    assert world.decodes[0].machine.counters.verified == 1
    world.drain()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fence", [True, False])
def test_a_write_that_lies_is_found(ranks: int, fence: bool) -> None:
    world = transfer(True, verify="all", num_ranks=ranks, needs_visibility_fence=fence)
    assert world.statuses == [("r", ReceiveStatus.FAILED)]
    assert world.decodes[0].machine.counters.integrity_errors == 1
    world.drain()


def test_a_write_that_lies_is_not_found_without() -> None:
    """That the test above can fail: the world itself sees what was received."""
    with pytest.raises(InvariantBroken, match="I8"):
        transfer(True, verify="off")


def test_layouts_say_which_layers_they_share() -> None:
    from kvpush.core.plan import PairPlan

    assert PairPlan(layout([4, 1, 2]), layout([0, 2, 1])).mapped_layers == (2, 1)
    assert PairPlan(layout([0]), layout([1])).mapped_layers == ()


def test_caches_that_are_not_alike_byte_for_byte_are_not_verified_but_refused() -> None:
    def side(base: int, heads: int) -> CacheLayout:
        plane = Plane("kv", base, 32 * heads, 32 * heads)
        return CacheLayout((LayerLayout("l", 0, 8, 4, 0, heads, "float32", "HNC", "head", (plane,)),))

    machine = ProducerMachine(ProducerConfig(EngineId("p"), AgentName("p"), "toy", digest_scheme="x"), side(1 << 20, 4))
    for session, heads, digest, welcome in ((1, 4, "x", True), (2, 2, "", True), (3, 2, "x", False)):
        hello = Producer.hello(session, layout=side(1 << 30, heads), digest=digest)
        effects = machine.handle(MessageReceived(SessionId(session), hello), 1.0)
        assert (not sent(effects, wire.Refused)) is welcome
        if not welcome:
            assert "verify=off" in sent(effects, wire.Refused)[0].reason
