# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the unit tests: small layouts, and machines that are spoken to by hand."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import numpy as np

from kvpush.core import wire
from kvpush.core.consumer import ConsumerConfig, ConsumerMachine
from kvpush.core.effects import Effect, PostWrite, Report, Send
from kvpush.core.events import (
    MessageReceived,
    Outcome,
    PeerAdded,
    ReceiveRequested,
    SourceAnnounced,
    SourceProgressed,
    WriteCompleted,
)
from kvpush.core.ids import AgentName, BlockTable, EngineId, PeerAddress, RequestId, SessionId
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import SchedulingPolicy

BLOCK_TOKENS = 4
BLOCK_BYTES = 64
ADDRESS = PeerAddress("prefill", 5000)
T = TypeVar("T")


def layout(
    layers: range | list[int] | int = 3,
    *,
    num_blocks: int = 32,
    base: int = 1 << 20,
    head_lo: int = 0,
    num_heads: int = 2,
    block_tokens: int = BLOCK_TOKENS,
    **changes: Any,
) -> CacheLayout:
    """Layers-outermost, K and V together."""
    numbers = range(layers) if isinstance(layers, int) else layers
    return CacheLayout(
        tuple(
            LayerLayout(
                name=f"layer.{number}",
                group=0,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                head_lo=head_lo,
                num_heads=num_heads,
                dtype=changes.get("dtype", "float32"),
                format="HND",
                split="none",
                planes=(Plane("kv", base + number * (1 << 16), BLOCK_BYTES, BLOCK_BYTES),),
            )
            for number in numbers
        )
    )


def ids(*numbers: int) -> BlockTable:
    return (np.array(numbers, np.int32),)


def sent(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def posted(effects: list[Effect]) -> list[PostWrite]:
    return [effect for effect in effects if isinstance(effect, PostWrite)]


def reports(effects: list[Effect]) -> list[Outcome]:
    return [effect.outcome for effect in effects if isinstance(effect, Report)]


class Producer:
    """A producer machine, its clock, and one or several consumers that are played by the test."""

    def __init__(self, *, layers: Any = 3, policy: SchedulingPolicy | None = None, **config: Any) -> None:
        self.now = 100.0
        self.machine = ProducerMachine(
            ProducerConfig(
                EngineId("p"),
                AgentName("p-agent"),
                "toy",
                policy=policy or SchedulingPolicy(granularity="layer"),
                **({"digest_scheme": "toy-digest"} | config),
            ),
            layout(layers),
        )
        self.seq: dict[int, int] = {}

    def do(self, event: Any) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        return self._checked(effects)

    def say(self, message: wire.Message) -> list[Effect]:
        return self.do(MessageReceived(SessionId(message.session), message))

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self._checked(self.machine.on_deadline(self.now))

    def shutdown(self) -> list[Effect]:
        return self._checked(self.machine.shutdown(self.now))

    def _checked(self, effects: list[Effect]) -> list[Effect]:
        self.machine.check()
        for message in [*sent(effects, wire.Welcome), *sent(effects, wire.Heartbeat)]:
            self.seq[message.session] = message.seq
        return effects

    def connect(self, session: int = 1, *, layers: Any = 3, lease_s: float = 10.0, **changes: Any) -> list[Effect]:
        effects = self.say(self.hello(session, layers=layers, lease_s=lease_s, **changes))
        return effects + self.do(PeerAdded(SessionId(session)))

    @staticmethod
    def hello(session: int = 1, *, layers: Any = 3, lease_s: float = 10.0, **changes: Any) -> wire.Hello:
        fields: dict[str, Any] = {
            "engine_id": "c",
            "agent_name": f"c-agent-{session}",
            "agent_metadata": b"m",
            "transport": "toy",
            "layout": layout(layers, base=1 << 30),
            "compat": {},
            "lease_s": lease_s,
        }
        return wire.Hello(session, **(fields | changes))

    def register(self, request_id: str = "r", **fields: Any) -> list[Effect]:
        return self.say(self.registration(request_id, **fields))

    def registration(
        self,
        request_id: str = "r",
        *,
        session: int = 1,
        epoch: int = 1,
        keys: tuple[str, ...] = ("t",),
        digest: bytes = b"d",
        tokens: int = 8,
        token_lo: int = 0,
        blocks: BlockTable | None = None,
        seq: int | None = None,
        verify: bool = False,
    ) -> wire.RegisterBlocks:
        count = -(-tokens // BLOCK_TOKENS) - token_lo // BLOCK_TOKENS
        return wire.RegisterBlocks(
            session,
            request_id=request_id,
            epoch=epoch,
            keys=keys,
            prompt_digest=digest,
            num_tokens=tokens,
            token_lo=token_lo,
            blocks=wire.pack_blocks(blocks or ids(*range(10, 10 + count))),
            seq=self.seq[session] if seq is None else seq,
            verify=verify,
        )

    def announce(
        self, source: str = "s", *, keys: tuple[str, ...] = ("t",), digest: bytes = b"d", tokens: int = 8
    ) -> list[Effect]:
        return self.do(SourceAnnounced(RequestId(source), keys, digest, tokens))

    def progress(
        self, token_hi: int = 8, *, source: str = "s", layers: tuple[int, int] = (0, 3), blocks: BlockTable | None = None
    ) -> list[Effect]:
        return self.do(SourceProgressed(RequestId(source), *layers, token_hi, blocks))

    def complete(self, writes: list[PostWrite]) -> list[Effect]:
        return [effect for write in writes for effect in self.do(WriteCompleted(write.write_id))]


class Consumer:
    """A consumer machine, its clock, and one or several producer ranks that are played by the test."""

    def __init__(self, *, layers: Any = 3, **config: Any) -> None:
        self.now = 500.0
        numbers = itertools.count(1)
        fields: dict[str, Any] = {"announce_timeout_s": 30.0} | config
        self.machine = ConsumerMachine(
            ConsumerConfig(EngineId("c"), AgentName("c-agent"), "toy", b"m", **fields),
            layout(layers, base=1 << 30),
            lambda: next(numbers),
        )

    def do(self, event: Any) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        return effects

    def say(self, message: wire.Message) -> list[Effect]:
        return self.do(MessageReceived(SessionId(message.session), message))

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        effects = self.machine.on_deadline(self.now)
        self.machine.check()
        return effects

    def request(
        self,
        request_id: str = "r",
        *,
        tokens: int = 8,
        token_lo: int = 0,
        peer: PeerAddress = ADDRESS,
        keys: tuple[str, ...] = ("t",),
        blocks: BlockTable | None = None,
    ) -> list[Effect]:
        count = -(-tokens // BLOCK_TOKENS) - token_lo // BLOCK_TOKENS
        return self.do(
            ReceiveRequested(RequestId(request_id), peer, keys, b"d", tokens, token_lo, blocks or ids(*range(10, 10 + count)))
        )

    def welcome(
        self, session: int = 1, *, covers: Any = None, endpoints: Any = (), seq: int = 1, retry_window_s: float = 1.0
    ) -> list[Effect]:
        from kvpush.core.ids import Rect

        return self.say(
            wire.Welcome(
                session,
                engine_id="p",
                agent_name="p-agent",
                endpoints=endpoints,
                covers=covers if covers is not None else (Rect(0, 3, 0, 2, 0, 1),),
                seq=seq,
                heartbeat_s=0.5,
                idle_heartbeat_s=3.0,
                retry_window_s=retry_window_s,
            )
        )

    def part(self, kind: Any, request_id: str = "r", *, session: int = 1, epoch: int = 1, **fields: Any) -> list[Effect]:
        return self.say(kind(session, request_id=request_id, epoch=epoch, **fields))
