# SPDX-License-Identifier: Apache-2.0
"""Well-formed messages that nobody may send: of other peers' sessions and requests, from before, and with impossible numbers.

Nothing here is drawn at random or timed: each is sent once, and is seen to have come in before anything is judged. Good
transfers go on all the while, with their bytes compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from attacks import CURVE_GREETING, Traffic
from hostile_rig import BLOCK_TOKENS, HEADS, LAYERS, SECRET, Party, Transfer
from scenes import INSIDER, OPEN, Rogue, Scene, greeted, make_scene, welcome

from kvpush.channels.auth import Credentials
from kvpush.core import wire
from kvpush.core.events import ReceiveEnded, ReceiveStatus, SourceReleased
from kvpush.core.ids import Rect, SessionId
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.testing.contract import wait_until

MINE = 4242
CANARY = -1.0
WHOLE = (Rect(0, LAYERS, 0, HEADS, 0, 4 * BLOCK_TOKENS),)


@pytest.fixture(params=[OPEN, INSIDER])
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Blocks that a rogue may still write are kept until its lease is over: a short one."""
    yield from make_scene(request.param, monkeypatch, lease_s=2.0, idle_heartbeat_s=1.0)


@pytest.fixture
def accomplice(scene: Scene) -> Iterator[Party]:
    """Whose memory the attacker names as its own."""
    del scene
    party = Party(produce=False, consume=True)
    for cache in party.caches.values():
        cache[:] = CANARY
    yield party
    assert party.endpoint.close(30)


@pytest.fixture
def rogue(scene: Scene) -> Iterator[Rogue]:
    made = Rogue(Credentials.derive(SECRET.encode()) if scene.greeting == CURVE_GREETING else None)
    yield made
    made.close()


def register(
    transfer: Transfer, seq: int, *, session: int = MINE, request_id: str = "evil", epoch: int = 1
) -> wire.RegisterBlocks:
    return wire.RegisterBlocks(
        session,
        request_id=request_id,
        epoch=epoch,
        keys=(f"t{transfer.number}",),
        prompt_digest=transfer.digest,
        num_tokens=len(transfer.prompt),
        token_lo=0,
        blocks=(transfer.dst.astype("<i4").tobytes(),),
        seq=seq,
    )


def untouched(party: Party) -> bool:
    return all(bool((cache == CANARY).all()) for cache in party.caches.values())


class TestSomebodyElses:
    def test_sessions_at_a_producer(self, scene: Scene) -> None:
        """Every message that a consumer can send, with the honest one's session in it."""
        session = scene.hello.session
        transfer = Transfer(slot=6)
        counters = scene.producer.endpoint.submitter.counters
        ref = wire.StreamRef(transfer.name, 1)
        with Traffic(scene.producer, scene.consumer):
            transfer.announce(scene.producer)
            before = counters.hijacks
            messages = (
                register(transfer, 0, session=session),
                wire.Inquiry(session, streams=(ref,)),
                wire.Cancel(session, request_id=transfer.name, epoch=1),
                wire.Decline(session, keys=(f"t{transfer.number}",), prompt_digest=transfer.digest),
                wire.Watch(session, request_id=transfer.name, keys=(f"t{transfer.number}",), prompt_digest=transfer.digest),
                wire.HeartbeatAck(session, seq=1),
                wire.Goodbye(session, reason="not mine to say"),
                msgspec.structs.replace(scene.hello, agent_metadata=b""),
            )
            dealer = scene.dealer()
            dealer.send(*messages)
            wait_until(lambda: counters.hijacks == before + len(messages), "all are refused")
            # The request that they were about is served as if nothing had been said.
            transfer.register(scene.consumer, scene.producer.address)
            transfer.compute(scene.producer)
            transfer.finish(scene.producer, scene.consumer)
        assert SessionId(session) in scene.producer.endpoint.submitter._link_of

    def test_sessions_at_a_consumer(self, scene: Scene, rogue: Rogue) -> None:
        """A producer of its own that speaks as if it were the honest one."""
        session = scene.hello.session
        transfer, theirs = Transfer(slot=6), Transfer(slot=7)
        counters = scene.consumer.endpoint.submitter.counters
        with Traffic(scene.producer, scene.consumer):
            theirs.register(scene.consumer, rogue.address)
            peer, hello = rogue.hear(wire.Hello)
            rogue.say(peer, welcome(hello))
            # Waits for its prefill, so that there is something to lie about.
            transfer.register(scene.consumer, scene.producer.address)
            machine = scene.consumer.endpoint.submitter.consumer
            assert machine is not None
            wait_until(lambda: machine.knows(transfer.name), "the request")  # type: ignore[arg-type]
            epoch = machine._receives[transfer.name].epoch  # type: ignore[index]
            about: dict[str, Any] = {"request_id": transfer.name, "epoch": epoch}
            before = counters.hijacks
            messages = (
                wire.Commit(session, coverage=WHOLE, **about),
                wire.Failing(session, reason="a lie", **about),
                wire.Failed(session, reason="a lie", **about),
                wire.Fenced(session, **about),
                wire.Registered(session, waiting=False, **about),
                wire.Streaming(session, **about),
                wire.Quiet(session),
                wire.Heartbeat(session, seq=2**52),
                wire.Refused(session, reason="a lie", unknown=True),
                wire.Goodbye(session, reason="a lie"),
                msgspec.structs.replace(welcome(hello), session=session, seq=2**52),
            )
            rogue.say(peer, *messages)
            wait_until(lambda: counters.hijacks == before + len(messages), "all are refused")
            transfer.announce(scene.producer)
            transfer.compute(scene.producer)
            transfer.finish(scene.producer, scene.consumer)
            rogue.say(peer, wire.Goodbye(hello.session, reason="enough"))
            wait_until(lambda: theirs.name in scene.consumer.ended(ReceiveEnded), "the rogue's own request ends")
        assert scene.consumer.ended(ReceiveEnded)[theirs.name].status is ReceiveStatus.FAILED

    def test_requests_in_a_session_of_its_own(self, scene: Scene, accomplice: Party) -> None:
        """It names the request of another session: that is another request."""
        transfer = Transfer(slot=6)
        with Traffic(scene.producer, scene.consumer):
            dealer, _ = greeted(scene, accomplice)
            transfer.register(scene.consumer, scene.producer.address)
            session = SessionId(scene.hello.session)
            wait_until(lambda: transfer.name in scene.machine._sessions[session].streams, "the registration")
            for epoch in (1, 2**31 - 1):
                dealer.send(wire.Cancel(MINE, request_id=transfer.name, epoch=epoch))
                dealer.answer(wire.Fenced)
            ref = wire.StreamRef(transfer.name, 2**31 - 1)
            dealer.send(wire.Inquiry(MINE, streams=(ref,)))
            dealer.answer(wire.Fenced)
            # It guesses the transfer's name, and not its prompt.
            dealer.send(wire.Decline(MINE, keys=(f"t{transfer.number}",), prompt_digest=b"a guess"))
            dealer.send(wire.Watch(MINE, request_id="w", keys=(f"t{transfer.number}",), prompt_digest=b"a guess"))
            assert not dealer.answer(wire.Started).started
            transfer.announce(scene.producer)
            transfer.compute(scene.producer)
            transfer.finish(scene.producer, scene.consumer)
            assert untouched(accomplice)
            dealer.send(wire.Goodbye(MINE))


class TestPlayedAgain:
    def test_to_a_producer_after_the_end_of_a_transfer(self, scene: Scene, accomplice: Party) -> None:
        """In the session that it belongs to: the same answer, and not a byte."""
        transfer = Transfer(slot=6)
        with Traffic(scene.producer, scene.consumer):
            dealer, answer = greeted(scene, accomplice)
            transfer.announce(scene.producer)
            frames = [wire.HeartbeatAck(MINE, seq=answer.seq), register(transfer, answer.seq)]
            dealer.send(*frames)
            dealer.answer(wire.Registered)
            transfer.compute(scene.producer)
            dealer.answer(wire.Commit)
            wait_until(lambda: transfer.name in scene.producer.ended(SourceReleased), "the source is released")
            assert accomplice.content(transfer.dst) == scene.producer.content(transfer.src)
            for cache in accomplice.caches.values():
                cache[:] = CANARY
            # Somebody computes that prompt again under that id; only then could there be something to write.
            transfer.announce(scene.producer)
            transfer.compute(scene.producer)
            for _ in range(3):
                dealer.send(*frames)
                dealer.answer(wire.Commit)
            dealer.send(wire.Cancel(MINE, request_id="evil", epoch=1))
            dealer.answer(wire.Fenced)
            assert untouched(accomplice)
            # It is there for whoever asks for it in a session and epoch of its own.
            transfer.register(scene.consumer, scene.producer.address)
            wait_until(lambda: transfer.name in scene.consumer.ended(ReceiveEnded), "it is received")
            assert scene.consumer.ended(ReceiveEnded)[transfer.name].status is ReceiveStatus.RECEIVED
            assert scene.consumer.content(transfer.dst) == scene.producer.content(transfer.src)
            assert untouched(accomplice)
            dealer.send(wire.Goodbye(MINE))

    def test_to_a_consumer_after_the_end_of_a_transfer(self, scene: Scene, rogue: Rogue) -> None:
        """What completed one request completes no other, and none twice."""
        first, second = Transfer(slot=6), Transfer(slot=7)
        machine = scene.consumer.endpoint.submitter.consumer
        assert machine is not None
        with Traffic(scene.producer, scene.consumer):
            first.register(scene.consumer, rogue.address)
            peer, hello = rogue.hear(wire.Hello)
            rogue.say(peer, welcome(hello))
            _, registration = rogue.hear(wire.RegisterBlocks)
            about: dict[str, Any] = {"request_id": registration.request_id, "epoch": registration.epoch}
            recorded = (
                wire.Registered(hello.session, waiting=False, **about),
                wire.Streaming(hello.session, **about),
                wire.Commit(hello.session, coverage=WHOLE, **about),
                wire.Failed(hello.session, reason="or not", **about),
                wire.Fenced(hello.session, **about),
            )
            rogue.say(peer, *recorded[:3])
            wait_until(lambda: first.name in scene.consumer.ended(ReceiveEnded), "its word for it is all that there is")
            second.register(scene.consumer, rogue.address)
            _, registration = rogue.hear(wire.RegisterBlocks)
            before = machine.counters.stale_messages
            rogue.say(peer, *recorded, *recorded)
            # The same, but for the request that is open now, of an epoch that is over.
            late = [msgspec.structs.replace(message, request_id=registration.request_id) for message in recorded]
            rogue.say(peer, *late)
            wait_until(lambda: machine.counters.stale_messages >= before + 15, "none of them has an effect")
            assert second.name not in scene.consumer.ended(ReceiveEnded)
            rogue.say(peer, wire.Goodbye(hello.session, reason="enough"))
            wait_until(lambda: second.name in scene.consumer.ended(ReceiveEnded), "the second one ends")
        ended = [one for one in scene.consumer.outcomes if isinstance(one, ReceiveEnded) and one.request_id == first.name]
        assert [one.status for one in ended] == [ReceiveStatus.RECEIVED]
        assert scene.consumer.ended(ReceiveEnded)[second.name].status is ReceiveStatus.FAILED


def plane(base: int = 1 << 30, stride: int = 1 << 10, size: int = 1 << 10) -> Plane:
    return Plane("kv", base, stride, size)


def layer(name: str = "layer.0", **changes: Any) -> LayerLayout:
    fields: dict[str, Any] = {
        "group": 0, "num_blocks": 64, "block_tokens": BLOCK_TOKENS, "head_lo": 0, "num_heads": HEADS, "dtype": "float32",
        "format": "HNC", "split": "head", "planes": (plane(),),
    }  # fmt: skip
    return LayerLayout(name, **(fields | changes))


LAYOUTS = {
    "an address of 0": ((layer(planes=(plane(base=0),)),), "address 0"),
    "blocks that overlap": ((layer(planes=(plane(stride=16),)),), "overlap"),
    "more than there are addresses": ((layer(num_blocks=2**40, planes=(plane(stride=2**40, size=2**40),)),), "63-bit"),
    "a layer twice": ((layer(), layer()), "twice"),
    "a group that is none": ((layer(group=3),), "group"),
    "two planes of one content": ((layer(planes=(plane(), plane())),), "same content"),
    "blocks of no size that fits": ((layer(block_tokens=2**40),), ""),
}
COVERS = {
    "nothing": (),
    "less than nothing": (Rect(2, 0, 2, 0, 1, 0),),
    "below zero": (Rect(-(2**62), 0, -(2**62), 0, -(2**62), 0),),
    "beyond the end": (Rect(LAYERS, 2**62, 0, HEADS, 0, 1), Rect(0, LAYERS, HEADS, 2**62, 0, 1)),
    "other tokens": (Rect(0, LAYERS, 0, HEADS, 5, 6),),
    "one layer less": (Rect(0, LAYERS - 1, 0, HEADS, 0, 1),),
}
COMMITS = {
    "nothing": (),
    "less than nothing": (Rect(LAYERS, 0, HEADS, 0, 4 * BLOCK_TOKENS, 0),),
    "below zero": (Rect(-(2**62), 0, -(2**62), 0, -(2**62), 0),),
    "beyond the end": (Rect(0, LAYERS, 0, HEADS, 4 * BLOCK_TOKENS, 2**62),),
    "one token less": (Rect(0, LAYERS, 0, HEADS, 0, 4 * BLOCK_TOKENS - 1),),
    "the same half twice": (Rect(0, 1, 0, HEADS, 0, 4 * BLOCK_TOKENS),) * 2,
    "dust": tuple(Rect(n % LAYERS, n % LAYERS + 1, 0, HEADS, n, n + 1) for n in range(wire.MAX_RECTS // 2)),
}
REGISTRATIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_tokens": 0}, "don't start at a block"),
    ({"token_lo": 4 * BLOCK_TOKENS}, "don't start at a block"),
    ({"token_lo": 1}, "don't start at a block"),
    ({"num_tokens": 2**31 - 1}, "4 blocks for"),
    ({"blocks": (b"\0" * 16,) * 2}, "2 block tables for 1"),
    ({"blocks": (b"\0" * 15,)}, "a multiple of 4"),
    ({"blocks": (np.arange(60, 65, dtype="<i4").tobytes(),)}, "5 blocks for 4"),
    ({"blocks": (np.arange(61, 65, dtype="<i4").tobytes(),)}, "block 64 is outside"),
    ({"verify": True}, "a digest is asked for"),
)


class TestImpossible:
    def test_layouts(self, scene: Scene, accomplice: Party) -> None:
        with Traffic(scene.producer, scene.consumer):
            for what, (layers, complaint) in LAYOUTS.items():
                _, answer = greeted(scene, accomplice, layout=CacheLayout(layers))
                assert isinstance(answer, wire.Refused), what
                assert complaint in answer.reason, what
        assert untouched(accomplice)

    def test_rectangles_in_a_welcome(self, scene: Scene, rogue: Rogue) -> None:
        with Traffic(scene.producer, scene.consumer):
            for what, covers in COVERS.items():
                transfer = Transfer(slot=7)
                transfer.register(scene.consumer, rogue.address)
                peer, hello = rogue.hear(wire.Hello)
                rogue.say(peer, welcome(hello, covers=covers))
                self.fails(scene, transfer, what, "can't fill this cache")

    def test_rectangles_in_a_commit(self, scene: Scene, rogue: Rogue) -> None:
        transfer = Transfer(slot=7)
        with Traffic(scene.producer, scene.consumer):
            transfer.register(scene.consumer, rogue.address)
            peer, hello = rogue.hear(wire.Hello)
            rogue.say(peer, welcome(hello))
            for what, coverage in COMMITS.items():
                _, registration = rogue.hear(wire.RegisterBlocks)
                about: dict[str, Any] = {"request_id": registration.request_id, "epoch": registration.epoch}
                rogue.say(peer, wire.Commit(hello.session, coverage=coverage, **about))
                self.fails(scene, transfer, what, "entries are covered")
                transfer = Transfer(slot=7)
                transfer.register(scene.consumer, rogue.address)
            rogue.hear(wire.RegisterBlocks)
            rogue.say(peer, wire.Goodbye(hello.session, reason="enough"))
            self.fails(scene, transfer, "goodbye", "has ended the session")

    @staticmethod
    def fails(scene: Scene, transfer: Transfer, what: str, complaint: str) -> None:
        wait_until(lambda: transfer.name in scene.consumer.ended(ReceiveEnded), f"the request ends: {what}")
        ended = scene.consumer.ended(ReceiveEnded)[transfer.name]
        assert (ended.status, ended.blocks_safe) == (ReceiveStatus.FAILED, True), what
        assert complaint in str(ended.error), what

    def test_registrations(self, scene: Scene, accomplice: Party) -> None:
        transfer = Transfer(slot=6)
        with Traffic(scene.producer, scene.consumer):
            dealer, answer = greeted(scene, accomplice)
            transfer.announce(scene.producer)
            for number, (changes, complaint) in enumerate(REGISTRATIONS):
                message = register(transfer, answer.seq, request_id=f"evil-{number}")
                dealer.send(msgspec.structs.replace(message, **changes))
                assert complaint in dealer.answer(wire.Failed).reason, changes
                assert scene.machine.counters.refused_registrations == number + 1
            transfer.register(scene.consumer, scene.producer.address)
            transfer.compute(scene.producer)
            transfer.finish(scene.producer, scene.consumer)
            assert untouched(accomplice)
            dealer.send(wire.Goodbye(MINE))
