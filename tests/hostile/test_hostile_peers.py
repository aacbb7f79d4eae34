# SPDX-License-Identifier: Apache-2.0
"""Attacks on a producer, and on a consumer by a rogue producer, while two honest endpoints go on with right bytes.

*Open* is an endpoint without authentication, *insider* one that the attacker has the secret of, *stranger* one that it has not.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from attacks import CURVE_GREETING, NULL_GREETING, READY, Dealer, Traffic, dealers, drained, forged, long_frame, raw
from hostile_rig import SECRET, Party, Transfer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scenes import INSIDER, OPEN, STRANGER, Rogue, Scene, greeted, make_scene, welcome

from kvpush.channels.auth import Credentials
from kvpush.core import wire
from kvpush.core.events import ReceiveEnded, ReceiveStatus, SourceAborted
from kvpush.core.ids import Rect, RequestId, SessionId
from kvpush.testing.contract import wait_until

_MIB = 1024 * 1024
few = settings(
    max_examples=250,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""Nothing to shrink: an attack is the sum of its frames."""


@pytest.fixture(params=[OPEN, INSIDER])
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    yield from make_scene(request.param, monkeypatch)


@pytest.fixture(params=[OPEN, INSIDER, STRANGER])
def any_scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    yield from make_scene(request.param, monkeypatch)


@pytest.fixture(params=[OPEN, INSIDER])
def narrow_scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    yield from make_scene(request.param, monkeypatch, max_messages_per_s=2000)


class TestConnections:
    def test_random_bytes_over_tcp(self, any_scene: Scene) -> None:
        rng = random.Random(0)
        with Traffic(any_scene.producer, any_scene.consumer):
            for greeting in (b"", any_scene.greeting, any_scene.greeting + READY):
                for _ in range(30):
                    with raw(any_scene.producer.address, greeting) as connection:
                        connection.sendall(rng.randbytes(rng.randrange(1, 3000)))

    def test_half_open_ones_are_closed(self, any_scene: Scene) -> None:
        """Nothing, a byte, a signature, a whole greeting, and then silence."""
        with Traffic(any_scene.producer, any_scene.consumer), ExitStack() as stack:
            silent = [
                stack.enter_context(raw(any_scene.producer.address, any_scene.greeting[:told]))
                for told in (0, 1, 10, 64)
                for _ in range(50)
            ]
            wait_until(lambda: all(drained(one) for one in silent), "all 200 are closed from the other side", pause_s=0.05)

    @pytest.mark.parametrize("num_bytes", [8 * _MIB + 100, 2**31, 2**62, 2**64 - 1])
    def test_huge_declared_lengths(self, any_scene: Scene, num_bytes: int) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Traffic(any_scene.producer, any_scene.consumer), ExitStack() as stack:
            sent = []
            for command in (False, True):
                for greeting in (any_scene.greeting, any_scene.greeting + READY):
                    one = stack.enter_context(raw(any_scene.producer.address, greeting))
                    one.sendall(long_frame(num_bytes, command=command))
                    sent.append(one)
            wait_until(lambda: all(drained(one) for one in sent), "they are closed", pause_s=0.01)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB

    def test_a_flood_of_handshakes(self, any_scene: Scene) -> None:
        producer = any_scene.producer
        with Traffic(producer, any_scene.consumer), dealers(producer.address, None) as without_secret:
            for number in range(300):
                dealer = any_scene.dealer() if number % 2 else without_secret()
                dealer.send(wire.HeartbeatAck(number + 1, seq=1))
        assert producer.endpoint.submitter.counters.hijacks == 0


class TestFrames:
    def test_random_bytes(self, scene: Scene) -> None:
        rng = random.Random(1)
        with Traffic(scene.producer, scene.consumer):
            for number in range(100):
                dealer = scene.dealer()
                prefix = (b"", b"KVP", scene.recorded[0][:4], scene.recorded[0][:8])[number % 4]
                dealer.send(prefix + rng.randbytes(rng.randrange(300)))
                dealer.send(prefix + rng.randbytes(rng.randrange(300)))
            counters = scene.producer.endpoint.submitter.counters
            wait_until(lambda: counters.bad_frames >= 100, "they are refused")

    def test_any_fields(self, scene: Scene) -> None:
        sessions = st.sampled_from([*range(1, 30), scene.hello.session])
        hello = scene.hello
        frames = forged(
            scene.recorded,
            session=sessions,
            layout=st.just(hello.layout),
            compat=st.just(hello.compat),
            transport=st.just(hello.transport),
            agent_name=st.sampled_from([hello.agent_name, "somebody"]),
            agent_metadata=st.just(hello.agent_metadata),
            lease_s=st.just(hello.lease_s),
            request_id=st.sampled_from(["r0", "r1", "x"]),
            seq=st.integers(0, 5),
        )
        current: list[Dealer] = [scene.dealer()]

        @few
        @given(st.lists(frames, min_size=1, max_size=8))
        def attack(batch: list[bytes]) -> None:
            if current[0].disconnected:
                current[0] = scene.dealer()
            current[0].send(*batch)

        before = scene.producer.endpoint.submitter.counters.messages_in
        with Traffic(scene.producer, scene.consumer):
            attack()
            wait_until(lambda: scene.producer.endpoint.submitter.counters.messages_in > before + 200, "they have come in")

    def test_a_flood_from_one_link_costs_it_the_connection(self, narrow_scene: Scene) -> None:
        producer = narrow_scene.producer
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Traffic(producer, narrow_scene.consumer):
            for payload in (wire.encode(wire.HeartbeatAck(9, seq=1)), wire.encode(wire.Goodbye(9, reason="x" * 4000))):
                dealer, before = narrow_scene.dealer(), producer.channel.counters.flooders

                def flood(dealer: Dealer = dealer, payload: bytes = payload, before: int = before) -> bool:
                    for _ in range(1000):
                        if not dealer.send(payload):
                            break
                    dealer.drain()
                    return producer.channel.counters.flooders > before and dealer.disconnected

                wait_until(flood, "the flooder is disconnected")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 256 * 1024  # KiB

    def test_sessions_upon_sessions_on_one_link(self, scene: Scene) -> None:
        with Traffic(scene.producer, scene.consumer):
            dealer = scene.dealer()
            for number in range(200):
                dealer.send(msgspec.structs.replace(scene.hello, session=1000 + number))
            submitter = scene.producer.endpoint.submitter
            wait_until(lambda: dealer.disconnected or scene.machine.counters.refused_hellos >= 180, "most are refused")
            assert len(submitter._link_of) <= 20


class TestSessions:
    def test_somebody_elses_session(self, scene: Scene) -> None:
        session = scene.hello.session
        counters = scene.producer.endpoint.submitter.counters
        before = counters.hijacks
        with Traffic(scene.producer, scene.consumer):
            dealer = scene.dealer()
            for request_id in ("r0", "r1", "r2"):
                dealer.send(wire.Cancel(session, request_id=request_id, epoch=1))
                dealer.send(wire.HeartbeatAck(session, seq=1))
            dealer.send(wire.Goodbye(session, reason="not mine to say"))
            dealer.send(msgspec.structs.replace(scene.hello, agent_metadata=b""))
            wait_until(lambda: counters.hijacks == before + 8, "all are refused")
            assert SessionId(session) in scene.producer.endpoint.submitter._link_of

    def test_a_recorded_session_while_it_lives(self, scene: Scene) -> None:
        counters = scene.producer.endpoint.submitter.counters
        recorded = list(scene.recorded)
        before = counters.hijacks
        with Traffic(scene.producer, scene.consumer):
            dealer = scene.dealer()
            dealer.send(*recorded)
            wait_until(lambda: counters.hijacks == before + len(recorded), "all are refused")

    def test_a_recorded_session_after_it(self, scene: Scene) -> None:
        """Its frames are played again once its session is over, when somebody computes that prompt again under that id."""
        victim = Party(produce=False, consume=True)
        try:
            recorded: list[bytes] = []
            send = victim.channel.send
            victim.channel.send = lambda link, data: (recorded.append(data), send(link, data))[1]  # type: ignore[method-assign]
            transfer = Transfer(slot=5)
            transfer.run(scene.producer, victim)
            hello = next(m for m in map(wire.decode, recorded) if isinstance(m, wire.Hello))
            register = [m for m in map(wire.decode, recorded) if isinstance(m, wire.RegisterBlocks)]
            assert register
            submitter = scene.producer.endpoint.submitter
            # The victim's side of the session ends; its transport lives on, with the same memory.
            link = victim.endpoint.submitter._link_of[SessionId(hello.session)]
            victim.channel.send(link, wire.encode(wire.Goodbye(hello.session, reason="over")))
            wait_until(lambda: SessionId(hello.session) not in submitter._link_of, "the session is over")
            for cache in victim.caches.values():
                cache[:] = -1.0

            transfer.announce(scene.producer)
            dealer = scene.dealer()
            dealer.send(hello)
            welcome = dealer.answer(wire.Welcome)
            dealer.send(*(frame for frame in recorded if not isinstance(wire.decode(frame), wire.Hello | wire.Goodbye)))
            wait_until(lambda: scene.machine.counters.refused_registrations >= len(register), "the recording is refused")
            assert scene.machine.num_streams == 0
            assert welcome.seq not in {message.seq for message in register}
            scene.producer.endpoint.submit(SourceAborted(RequestId(transfer.name), "nobody comes for it"))
            for cache in victim.caches.values():
                assert (cache == -1.0).all()
            dealer.send(wire.Goodbye(hello.session))
        finally:
            assert victim.endpoint.close(30)


class TestRegistrations:
    @pytest.fixture
    def accomplice(self, scene: Scene) -> Iterator[Party]:
        del scene
        party = Party(produce=False, consume=True)
        yield party
        assert party.endpoint.close(30)

    @pytest.mark.parametrize(
        ("blocks", "complaint"),
        [
            ([0, 1, 2, 64], "block 64 is outside"),
            ([0, 1, 2, 2**31 - 1], "is outside"),
            ([0, 1, 2, -1], "negative block id"),
            ([0, 1, 2, 2], "named twice"),
            ([0, 1, 2], "3 blocks for 4"),
            ([0, 1, 2, 3, 4], "5 blocks for 4"),
            ([], "0 blocks for 4"),
        ],
    )
    def test_blocks_that_can_not_be(self, scene: Scene, accomplice: Party, blocks: list[int], complaint: str) -> None:
        with Traffic(scene.producer, scene.consumer):
            transfer = Transfer(slot=6)
            dealer, welcome = greeted(scene, accomplice)
            transfer.announce(scene.producer)
            register = wire.RegisterBlocks(
                4242,
                request_id="evil",
                epoch=1,
                keys=(f"t{transfer.number}",),
                prompt_digest=transfer.digest,
                num_tokens=len(transfer.prompt),
                token_lo=0,
                blocks=(b"".join(block.to_bytes(4, "little", signed=True) for block in blocks),),
                seq=welcome.seq,
            )
            dealer.send(register)
            assert complaint in dealer.answer(wire.Failed).reason
            # The source is still there for whoever it is meant for.
            transfer.register(scene.consumer, scene.producer.address)
            transfer.compute(scene.producer)
            transfer.finish(scene.producer, scene.consumer)
            dealer.send(wire.Goodbye(4242))

    def test_another_prompts_kv_is_not_to_be_had(self, scene: Scene, accomplice: Party) -> None:
        with Traffic(scene.producer, scene.consumer):
            transfer = Transfer(slot=6)
            dealer, welcome = greeted(scene, accomplice)
            transfer.announce(scene.producer)
            dealer.send(
                wire.RegisterBlocks(
                    4242,
                    request_id="evil",
                    epoch=1,
                    keys=(f"t{transfer.number}",),
                    prompt_digest=b"a guess",
                    num_tokens=len(transfer.prompt),
                    token_lo=0,
                    blocks=(transfer.dst.astype("<i4").tobytes(),),
                    seq=welcome.seq,
                )
            )
            dealer.answer(wire.Failed, wire.Registered)
            transfer.register(scene.consumer, scene.producer.address)
            transfer.compute(scene.producer)
            transfer.finish(scene.producer, scene.consumer)
            assert not any(cache.any() for cache in accomplice.caches.values())
            dealer.send(wire.Goodbye(4242))

    def test_memory_of_somebody_else(self, scene: Scene, accomplice: Party) -> None:
        """The attacker's metadata under the honest consumer's name: its block ids would mean the honest one's memory."""
        with Traffic(scene.producer, scene.consumer):
            _dealer, answer = greeted(scene, accomplice, agent_name=scene.hello.agent_name)
            assert isinstance(answer, wire.Refused)
            assert "calls itself" in answer.reason
            _, answer = greeted(scene, accomplice, agent_name="nobody")
            assert isinstance(answer, wire.Refused)


class TestRogueProducer:
    @pytest.fixture(params=[OPEN, INSIDER])
    def scene(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
        """Blocks that a rogue may still write are kept until its lease is over: a short one."""
        yield from make_scene(request.param, monkeypatch, lease_s=2.0, idle_heartbeat_s=1.0)

    @pytest.fixture
    def rogue(self, scene: Scene) -> Iterator[Rogue]:
        rogue = Rogue(Credentials.derive(SECRET.encode()) if scene.greeting == CURVE_GREETING else None)
        yield rogue
        rogue.close()

    def fails(self, scene: Scene, rogue: Rogue, *answers: Callable[[Any], wire.Message | bytes]) -> str:
        """What becomes of a request whose producer answers the handshake so."""
        transfer = Transfer(slot=7)
        before = scene.consumer.content(transfer.dst)
        with Traffic(scene.producer, scene.consumer):
            transfer.register(scene.consumer, rogue.address)
            peer, hello = rogue.hear(wire.Hello)
            rogue.say(peer, *(answer(hello) for answer in answers))
            wait_until(lambda: transfer.name in scene.consumer.ended(ReceiveEnded), "the request ends")
        ended = scene.consumer.ended(ReceiveEnded)[transfer.name]
        assert ended.status is ReceiveStatus.FAILED
        assert ended.error is not None
        assert scene.consumer.content(transfer.dst) == before
        return str(ended.error.message)

    def test_it_sends_the_consumer_elsewhere(self, scene: Scene, rogue: Rogue) -> None:
        """The ranks that a producer names are addresses as well: the same rules hold for them."""
        elsewhere = (wire.Endpoint(0, "127.0.0.1", rogue.address.port), wire.Endpoint(1, "203.0.113.7", 22))
        if scene.greeting == NULL_GREETING:
            error = self.fails(scene, rogue, lambda hello: welcome(hello, endpoints=elsewhere))
            assert "no secret is set here" in error
            assert scene.consumer.channel.counters.refused_producers == 1
        else:
            error = self.fails(scene, rogue, lambda hello: welcome(hello, endpoints=elsewhere))
            assert "203.0.113.7" in error

    def test_it_talks_nonsense(self, scene: Scene, rogue: Rogue) -> None:
        rng = random.Random(3)
        error = self.fails(scene, rogue, welcome, lambda hello: b"KVP" + rng.randbytes(100))
        assert "protocol" in error

    def test_it_speaks_as_a_consumer(self, scene: Scene, rogue: Rogue) -> None:
        assert "unexpected Hello" in self.fails(scene, rogue, welcome, lambda hello: hello)

    def test_it_commits_what_was_never_written(self, scene: Scene, rogue: Rogue) -> None:
        """Its word for it is all that a consumer has; what it may not do is cover what isn't wanted, or with wild numbers."""
        transfer = Transfer(slot=7)
        with Traffic(scene.producer, scene.consumer):
            transfer.register(scene.consumer, rogue.address)
            peer, hello = rogue.hear(wire.Hello)
            rogue.say(peer, welcome(hello))
            _, register = rogue.hear(wire.RegisterBlocks)
            wild = tuple(Rect(-(2**62), 2**62, -(2**62), 2**62, number * 16, number * 16 + 16) for number in range(2))
            for epoch, request_id in ((register.epoch + 1, register.request_id), (register.epoch, "somebody else's")):
                rogue.say(peer, wire.Commit(hello.session, request_id=request_id, epoch=epoch, coverage=wild))
            rogue.say(peer, wire.Commit(hello.session, request_id=register.request_id, epoch=register.epoch, coverage=wild))
            wait_until(lambda: transfer.name in scene.consumer.ended(ReceiveEnded), "the request ends")
        ended = scene.consumer.ended(ReceiveEnded)[transfer.name]
        assert ended.status is ReceiveStatus.FAILED
        assert "entries are covered" in str(ended.error)

    def test_it_floods(self, scene: Scene, rogue: Rogue, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scene.consumer.channel, "_max_messages_per_s", 2000)
        transfer = Transfer(slot=7)
        with Traffic(scene.producer, scene.consumer):
            transfer.register(scene.consumer, rogue.address)
            peer, hello = rogue.hear(wire.Hello)
            beat = wire.encode(wire.Heartbeat(hello.session, seq=5))

            def left() -> bool:
                for _ in range(1000):
                    rogue.say(peer, beat)
                return scene.consumer.channel.counters.flooders > 0

            wait_until(left, "the consumer leaves")
            wait_until(lambda: transfer.name in scene.consumer.ended(ReceiveEnded), "the request ends")
        assert scene.consumer.ended(ReceiveEnded)[transfer.name].status is ReceiveStatus.FAILED
