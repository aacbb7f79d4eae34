# SPDX-License-Identifier: Apache-2.0
"""A prefill that computes and pushes over a link of a known rate, in simulated time: what a scheduling policy is worth.

The link moves writes one after another. Posting a write takes the submitter ``overhead_s``; on a host whose cores are all busy
that time is the prefill's, so what is computed afterwards comes later by as much. Deterministic.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvpush.core import wire
from kvpush.core.effects import Effect, PostWrite, Send
from kvpush.core.events import MessageReceived, PeerAdded, SourceAnnounced, SourceFinished, SourceProgressed, WriteCompleted
from kvpush.core.ids import AgentName, BlockTable, EngineId, RequestId, SessionId
from kvpush.core.layout import CacheLayout
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import SchedulingPolicy
from kvpush.testing.simulation import toy_layout

BLOCK_TOKENS = 16
NUM_BLOCKS = 8192


@dataclass(frozen=True)
class Case:
    """A model, a prompt and a link.

    Args:
        layers: Number of layers.
        block_bytes: Bytes of one block of one layer.
        chunk_tokens: Tokens of a chunk of prefill.
        layer_s: Seconds that a layer of a full chunk takes to compute.
        rate: Bytes a second.
        overhead_s: Seconds that posting a write takes.
    """

    layers: int = 16
    block_bytes: int = 32 << 10
    chunk_tokens: int = 512
    layer_s: float = 5e-3
    rate: float = 1e9
    overhead_s: float = 100e-6

    def layout(self, base: int) -> CacheLayout:
        return toy_layout(
            range(self.layers),
            base=base,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.block_bytes,
            planes=("kv",),
        )

    def transfer_s(self, tokens: int) -> float:
        """How long the link needs for a prompt."""
        return -(-tokens // BLOCK_TOKENS) * self.block_bytes * self.layers / self.rate


@dataclass
class Request:
    """What became of one prompt. Times in seconds."""

    tokens: int
    computed_at: float = float("inf")
    committed_at: float = float("inf")
    num_writes: int = 0

    @property
    def exposed_s(self) -> float:
        return self.committed_at - self.computed_at


@dataclass
class LinkRun:
    """A producer, its link, and its clock."""

    case: Case
    policy: SchedulingPolicy
    now: float = 100.0
    requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._link_free = self._submitter_free = self.now
        self._stolen_s = 0.0
        self._seq = 0
        config = ProducerConfig(EngineId("p"), AgentName("p-agent"), "toy", policy=self.policy)
        self.machine = ProducerMachine(config, self.case.layout(1 << 40))
        hello = wire.Hello(
            1,
            engine_id="c",
            agent_name="c-agent",
            agent_metadata=b"m",
            transport="toy",
            layout=self.case.layout(1 << 50),
            compat={},
            lease_s=10.0,
        )
        self._do(MessageReceived(SessionId(1), hello))
        self._do(PeerAdded(SessionId(1)))

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._queue, (when, next(self._numbers), what))

    def arrive(self, name: str, tokens: int, *, computed: bool = False) -> Request:
        """A request comes now, registered by decode at once, and is computed alone, chunk by chunk.

        Args:
            computed: All of its prompt is final at once, as after a prefix hit.
        """
        request = self.requests[name] = Request(tokens)
        blocks = -(-tokens // BLOCK_TOKENS)
        self._do(SourceAnnounced(RequestId(name), (name,), name.encode(), tokens))
        register = wire.RegisterBlocks(
            1,
            request_id=name,
            epoch=1,
            keys=(name,),
            prompt_digest=name.encode(),
            num_tokens=tokens,
            token_lo=0,
            blocks=wire.pack_blocks((np.arange(blocks, dtype=np.int32),)),
            seq=self._seq,
        )
        self._do(MessageReceived(SessionId(1), register))
        if computed:
            self._progress(name, 0, self.case.layers, 0, tokens)
            self._computed(name)
        else:
            self.at(self.now, lambda: self._chunk(name, 0))
        return request

    def _chunk(self, name: str, token_lo: int) -> None:
        token_hi = min(token_lo + self.case.chunk_tokens, self.requests[name].tokens)
        layer_s = self.case.layer_s * (token_hi - token_lo) / self.case.chunk_tokens
        self.at(self.now + layer_s, lambda: self._layer(name, 0, 0, 0, token_lo, token_hi, layer_s, self._stolen_s))

    def _layer(
        self, name: str, told: int, idx: int, untold_bytes: int, token_lo: int, token_hi: int, layer_s: float, stolen_s: float
    ) -> None:
        if self._stolen_s > stolen_s:
            # What the submitter took meanwhile.
            self.at(
                self.now + self._stolen_s - stolen_s,
                lambda now=self._stolen_s: self._layer(name, told, idx, untold_bytes, token_lo, token_hi, layer_s, now),
            )
            return
        untold_bytes += -(-(token_hi - token_lo) // BLOCK_TOKENS) * self.case.block_bytes
        idx += 1
        last = idx == self.case.layers
        if last or untold_bytes >= self.machine.worthwhile_bytes:
            self._progress(name, told, idx, token_lo, token_hi)
            told, untold_bytes = idx, 0
        if not last:
            self.at(
                self.now + layer_s,
                lambda: self._layer(name, told, idx, untold_bytes, token_lo, token_hi, layer_s, stolen_s),
            )
        elif token_hi < self.requests[name].tokens:
            self._chunk(name, token_hi)
        else:
            self._computed(name)

    def _progress(self, name: str, layer_lo: int, layer_hi: int, token_lo: int, token_hi: int) -> None:
        new: BlockTable | None = None
        if layer_lo == 0:
            new = (np.arange(token_lo // BLOCK_TOKENS, -(-token_hi // BLOCK_TOKENS), dtype=np.int32),)
        self._do(SourceProgressed(RequestId(name), layer_lo, layer_hi, token_hi, new))

    def _computed(self, name: str) -> None:
        self.requests[name].computed_at = self.now
        self._do(SourceFinished(RequestId(name)))

    def run(self, seconds: float = 1000.0) -> None:
        """Until nothing happens any more but heartbeats, or for a time."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            due = self.machine.next_deadline()
            if due is not None and due < self._queue[0][0]:
                self.now = max(self.now, due)
                self._perform(self.machine.on_deadline(self.now))
                continue
            when, _, what = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            what()

    def _do(self, event: object) -> None:
        self._perform(self.machine.handle(event, self.now))  # type: ignore[arg-type]

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, PostWrite):
                self._post(effect)
            elif isinstance(effect, Send):
                self._heard(effect.message)

    def _post(self, write: PostWrite) -> None:
        overhead_s = self.case.overhead_s
        self._submitter_free = max(self._submitter_free, self.now) + overhead_s
        self._stolen_s += overhead_s
        self._link_free = max(self._link_free, self._submitter_free) + write.num_bytes / self.case.rate
        self.requests[self.machine._writes[write.write_id].request_id].num_writes += 1
        self.at(self._link_free, lambda: self._do(WriteCompleted(write.write_id, overhead_s)))

    def _heard(self, message: wire.Message) -> None:
        if isinstance(message, wire.Welcome | wire.Heartbeat):
            self._seq = message.seq
            self.at(self.now, lambda: self._do(MessageReceived(SessionId(1), wire.HeartbeatAck(1, seq=message.seq))))
        elif isinstance(message, wire.Commit):
            self.requests[message.request_id].committed_at = self.now
        elif isinstance(message, wire.Failed | wire.Refused):
            raise AssertionError(message)
