# SPDX-License-Identifier: Apache-2.0
"""What the benches share: layouts, block tables, and worlds of live machines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvpush.core import wire
from kvpush.core.consumer import ConsumerConfig, ConsumerMachine
from kvpush.core.effects import Effect, PostWrite, Send
from kvpush.core.events import (
    MessageReceived,
    PeerAdded,
    ReceiveRequested,
    SourceAnnounced,
    SourceProgressed,
)
from kvpush.core.ids import AgentName, BlockTable, EngineId, PeerAddress, Rect, RequestId, SessionId
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import SchedulingPolicy

BLOCK_TOKENS = 16
T = TypeVar("T")


def cache_layout(
    num_layers: int,
    num_blocks: int,
    *,
    block_bytes: int = 32 << 10,
    base: int = 1 << 32,
    blocks_outermost: bool = False,
    contents: Sequence[str] = ("kv",),
) -> CacheLayout:
    """Layers one after another, or the layers of a block side by side in it. ``block_bytes`` counts one layer's planes."""
    slab = block_bytes // len(contents)
    layers = []
    for layer in range(num_layers):
        planes = []
        for idx, content in enumerate(contents):
            number = layer * len(contents) + idx
            if blocks_outermost:
                planes.append(Plane(content, base + number * slab, slab * len(contents) * num_layers, slab))
            else:
                # A gap, so that the end of one layer doesn't join the start of the next.
                planes.append(Plane(content, base + number * (slab * num_blocks + 4096), slab, slab))
        layers.append(
            LayerLayout(f"layer.{layer}", 0, num_blocks, BLOCK_TOKENS, 0, 8, "bfloat16", "HND", "none", tuple(planes))
        )
    return CacheLayout(tuple(layers))


def scattered(count: int, seed: int = 1) -> npt.NDArray[np.int32]:
    """Ids below ``2 * count`` of which no two neighbours follow each other."""
    return (np.random.default_rng(seed).permutation(count) * 2).astype(np.int32)


def sent(effects: Sequence[Effect], kind: type[T]) -> list[T]:
    """The messages of one kind among the effects."""
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def posted(effects: Sequence[Effect]) -> list[PostWrite]:
    """The writes among the effects."""
    return [effect for effect in effects if isinstance(effect, PostWrite)]


class ProducerWorld:
    """A producer machine whose consumers are played here: they answer every heartbeat at once.

    Args:
        num_peers: Consumers; transfers go to them in turn.
        num_layers: Of the cache.
        num_tokens: Of every prompt.
        policy: Scheduling.
    """

    def __init__(
        self, *, num_peers: int, num_layers: int = 32, num_tokens: int = 512, policy: SchedulingPolicy | None = None
    ) -> None:
        self.now = 100.0
        self.num_layers = num_layers
        self.num_tokens = num_tokens
        self.num_events = 0
        self.blocks: BlockTable = (np.arange(-(-num_tokens // BLOCK_TOKENS), dtype=np.int32),)
        self.packed = wire.pack_blocks(self.blocks)
        self.num_peers = 0
        self.seq: dict[int, int] = {}
        self.machine = ProducerMachine(
            ProducerConfig(EngineId("p"), AgentName("p"), "toy", policy=policy or SchedulingPolicy()),
            cache_layout(num_layers, 4096),
        )
        self.layout = cache_layout(num_layers, 4096, base=1 << 44)
        for _ in range(num_peers):
            self.connect()

    def do(self, event: object) -> list[Effect]:
        """One event; heartbeats in its effects are answered."""
        self.num_events += 1
        effects = self.machine.handle(event, self.now)  # type: ignore[arg-type]
        self._answer(effects)
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass; what is due is done and counted as one event."""
        self.now += seconds
        self.num_events += 1
        effects = self.machine.on_deadline(self.now)
        self._answer(effects)
        return effects

    def _answer(self, effects: Sequence[Effect]) -> None:
        for message in sent(effects, wire.Welcome):
            self.seq[message.session] = message.seq
        for beat in sent(effects, wire.Heartbeat):
            self.seq[beat.session] = beat.seq
            self.do(MessageReceived(SessionId(beat.session), wire.HeartbeatAck(beat.session, seq=beat.seq)))

    def connect(self) -> SessionId:
        """One more consumer says hello."""
        self.num_peers += 1
        session = self.num_peers
        hello = wire.Hello(
            session,
            engine_id="c",
            agent_name=f"c-{session}",
            agent_metadata=b"m",
            transport="toy",
            layout=self.layout,
            compat={},
            lease_s=60.0,
        )
        self.do(MessageReceived(SessionId(session), hello))
        self.do(PeerAdded(SessionId(session)))
        return SessionId(session)

    def register(self, number: int) -> list[Effect]:
        """Transfer ``number`` is registered by its consumer."""
        session = 1 + number % self.num_peers
        message = wire.RegisterBlocks(
            session,
            request_id=f"d-{number}",
            epoch=number + 1,
            keys=(f"t-{number}",),
            prompt_digest=b"digest",
            num_tokens=self.num_tokens,
            token_lo=0,
            blocks=self.packed,
            seq=self.seq[session],
        )
        return self.do(MessageReceived(SessionId(session), message))

    def announce(self, number: int) -> list[Effect]:
        """Its source is seen."""
        return self.do(SourceAnnounced(RequestId(f"s-{number}"), (f"t-{number}",), b"digest", self.num_tokens))

    def progress(self, number: int, layer_lo: int, layer_hi: int, token_hi: int, *, blocks: bool = False) -> list[Effect]:
        """Some of it is computed; ``blocks``: its whole block table comes along."""
        table = self.blocks if blocks else None
        return self.do(SourceProgressed(RequestId(f"s-{number}"), layer_lo, layer_hi, token_hi, table))


class ConsumerWorld:
    """A consumer machine whose producers are played here, one rank each unless told otherwise."""

    def __init__(self, *, num_peers: int, num_layers: int = 32, num_tokens: int = 512, num_ranks: int = 1) -> None:
        self.now = 500.0
        self.num_layers = num_layers
        self.num_tokens = num_tokens
        self.num_ranks = num_ranks
        self.num_events = 0
        self.num_peers = num_peers
        self.blocks: BlockTable = (np.arange(-(-num_tokens // BLOCK_TOKENS), dtype=np.int32),)
        numbers = itertools.count(1)
        self.machine = ConsumerMachine(
            ConsumerConfig(EngineId("c"), AgentName("c"), "toy", b"m", announce_timeout_s=600.0),
            cache_layout(num_layers, 4096),
            lambda: next(numbers),
        )
        self.registered: dict[str, wire.RegisterBlocks] = {}

    def do(self, event: object) -> list[Effect]:
        """One event; handshakes in its effects are answered, registrations kept."""
        self.num_events += 1
        effects = self.machine.handle(event, self.now)  # type: ignore[arg-type]
        for hello in sent(effects, wire.Hello):
            self._welcome(hello.session)
        for message in sent(effects, wire.RegisterBlocks):
            self.registered[message.request_id] = message
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass; what is due is done and counted as one event."""
        self.now += seconds
        self.num_events += 1
        return self.machine.on_deadline(self.now)

    def say(self, message: wire.Message) -> list[Effect]:
        """A producer speaks."""
        return self.do(MessageReceived(SessionId(message.session), message))

    def _welcome(self, session: int) -> None:
        # Session numbers count up: the ranks of one instance come one after another.
        first = session - (session - 1) % self.num_ranks
        rank = session - first
        lo, hi = (self.num_layers * at // self.num_ranks for at in (rank, rank + 1))
        port = 5000
        self.say(
            wire.Welcome(
                session,
                engine_id=f"p-{first}",
                agent_name=f"p-{session}",
                endpoints=tuple(wire.Endpoint(rank, "", port + rank) for rank in range(self.num_ranks)),
                covers=(Rect(lo, hi, 0, 8, 0, 1),),
                seq=1,
                heartbeat_s=0.5,
                idle_heartbeat_s=3.0,
                retry_window_s=1.0,
            )
        )

    def request(self, number: int) -> list[Effect]:
        """Our engine wants transfer ``number``."""
        peer = PeerAddress(f"prefill-{number % self.num_peers}", 5000)
        return self.do(
            ReceiveRequested(RequestId(f"d-{number}"), peer, (f"t-{number}",), b"digest", self.num_tokens, 0, self.blocks)
        )

    def streaming(self, number: int) -> list[Effect]:
        """Its producer begins to write."""
        of = self.registered[f"d-{number}"]
        return self.say(wire.Streaming(of.session, request_id=of.request_id, epoch=of.epoch))

    def commit(self, number: int) -> list[Effect]:
        """Its (only) producer rank commits all of it."""
        of = self.registered[f"d-{number}"]
        whole = (Rect(0, self.num_layers, 0, 8, 0, self.num_tokens),)
        return self.say(wire.Commit(of.session, request_id=of.request_id, epoch=of.epoch, coverage=whole))
