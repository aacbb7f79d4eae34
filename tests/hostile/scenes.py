# SPDX-License-Identifier: Apache-2.0
"""Two honest endpoints and an attacker beside them: a socket of its own towards the producer, or a producer of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq
from attacks import CURVE_GREETING, NULL_GREETING, Dealer, dealers, take
from hostile_rig import SECRET, Party, Transfer, parties

from kvpush.channels.auth import Credentials
from kvpush.core import wire
from kvpush.core.ids import PeerAddress, Rect
from kvpush.testing.contract import wait_until

OPEN, INSIDER, STRANGER = "open", "insider", "stranger"


@dataclass
class Scene:
    producer: Party
    consumer: Party
    recorded: list[bytes]
    """What the honest consumer has said so far."""
    greeting: bytes
    dealer: Callable[[], Dealer]

    @property
    def hello(self) -> wire.Hello:
        found = [message for message in map(wire.decode, self.recorded) if isinstance(message, wire.Hello)]
        return found[-1]

    @property
    def machine(self) -> Any:
        assert self.producer.endpoint.submitter.producer is not None
        return self.producer.endpoint.submitter.producer


def make_scene(mode: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Scene]:
    if mode != OPEN:
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
    theirs = {OPEN: None, INSIDER: SECRET, STRANGER: SECRET + " or so"}[mode]
    credentials = Credentials.derive(theirs.encode()) if theirs is not None else None
    with ExitStack() as stack:
        producer, consumer = stack.enter_context(parties(handshake_timeout_s=1.0, **options))
        dealer = stack.enter_context(dealers(producer.address, credentials))
        recorded: list[bytes] = []
        send = consumer.channel.send

        def recording(link: Any, data: bytes) -> bool:
            recorded.append(data)
            return send(link, data)

        monkeypatch.setattr(consumer.channel, "send", recording)
        Transfer().run(producer, consumer)
        yield Scene(producer, consumer, recorded, NULL_GREETING if mode == OPEN else CURVE_GREETING, dealer)
        # Whatever has happened: what is honest goes on, and the rest comes to an end.
        for slot in range(3):
            Transfer(slot=slot).run(producer, consumer)
        machine = producer.endpoint.submitter.producer
        assert machine is not None
        wait_until(lambda: machine.num_streams == machine.num_sources == machine.num_in_flight == 0, "nothing is left over")
        wait_until(lambda: len(machine.agents) == 1, f"sessions but the honest one's are forgotten: {machine.agents}")
        wait_until(lambda: len(producer.endpoint.submitter._sessions_of) == 1, "links but the honest one carry no session")
        _idle(producer, consumer)


def _idle(*both: Party) -> None:
    """They sleep: a thread that spins takes tens of thousands of turns in this time, one that polls a thousand. New connections
    are polled for a moment first."""
    deadline = time.monotonic() + 10
    while True:
        before = [party.endpoint.submitter.counters.steps for party in both]
        time.sleep(0.2)
        turns = [party.endpoint.submitter.counters.steps - steps for party, steps in zip(both, before, strict=True)]
        if max(turns) < 50:
            return
        assert time.monotonic() < deadline, f"still busy: {turns} turns in 0.2 s"


class Rogue:
    """A producer that says what the test wants."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        if credentials is not None:
            self.socket.curve_server = True
            self.socket.curve_publickey = credentials.server_public
            self.socket.curve_secretkey = credentials.server_secret
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = PeerAddress("127.0.0.1", int(str(self.socket.last_endpoint.decode()).rstrip("\0").rsplit(":", 1)[1]))

    def hear(self, kind: type[Any]) -> tuple[bytes, Any]:
        found: list[tuple[bytes, Any]] = []

        def there() -> bool:
            frames = take(self.socket, 10)
            if frames is None:
                return False
            peer, frame = frames
            found.append((peer, wire.decode(frame)))
            return isinstance(found[-1][1], kind)

        wait_until(there, f"a {kind.__name__}")
        return found[-1]

    def say(self, peer: bytes, *frames: wire.Message | bytes) -> None:
        for frame in frames:
            self.socket.send_multipart((peer, frame if isinstance(frame, bytes) else wire.encode(frame)))

    def close(self) -> None:
        self._zap.close(0)
        self.socket.close(0)
        self._context.term()


def welcome(hello: wire.Hello, **changes: Any) -> wire.Welcome:
    layers = len(hello.layout.layers)
    heads = hello.layout.layers[0].num_heads
    fields: dict[str, Any] = {
        "engine_id": "rogue",
        "agent_name": "rogue-0",
        "endpoints": (),
        "covers": (Rect(0, layers, 0, heads, 0, 1),),
        "seq": 1,
        "heartbeat_s": 0.5,
        "idle_heartbeat_s": 3.0,
        "retry_window_s": 1.0,
    }
    return wire.Welcome(hello.session, **(fields | changes))


def greeted(scene: Scene, accomplice: Party, **changes: Any) -> tuple[Dealer, wire.Welcome]:
    """A session of the attacker's own, with memory of its own."""
    machine = accomplice.endpoint.submitter.consumer
    assert machine is not None
    hello = msgspec.structs.replace(
        scene.hello,
        session=4242,
        engine_id="mallory",
        agent_name=machine.config.agent_name,
        agent_metadata=machine.config.metadata,
        layout=machine.layout,
    )
    dealer = scene.dealer()
    dealer.send(msgspec.structs.replace(hello, **changes))
    return dealer, dealer.answer(wire.Welcome, wire.Refused)
