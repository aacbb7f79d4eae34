# SPDX-License-Identifier: Apache-2.0
"""A toy world around the real machines: engines, memory, links and writes that misbehave exactly when they are told to.

Nothing here has a thread, sleeps or draws random numbers. Whoever drives a :class:`World` (a unit test, a Hypothesis state
machine, a plugin author) decides what happens next: which message is delivered, lost or repeated, which write lands or fails,
who is frozen or killed, how far the clock moves. After every step the world checks its machines and the invariants I1 to I8::

    world = World()
    world.request(0, "r", key="t", prompt=1)      # decode side: register destination blocks
    world.announce(0, "s", key="t", prompt=1)     # prefill side: the request has been seen
    world.compute(0, "s")                         # ... and computed
    world.finish(0, "s")
    world.run(1.0)                                # everything healthy for a second
    assert world.statuses == [("r", ReceiveStatus.RECEIVED)]

Worst cases are built in: a write reads its source when it lands, not when it is posted; blocks that are freed are overwritten
at once and handed out again first; every node's clock has an offset of its own. A write may land for as long as its producer
runs and has not cut the connection; and after that (dead, frozen, cut) until lease and retry window are over.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from kvpush.core import wire
from kvpush.core.consumer import ConsumerConfig, ConsumerMachine
from kvpush.core.effects import (
    AddPeer,
    CloseSession,
    Effect,
    OpenSession,
    PostWrite,
    RemovePeer,
    Report,
    Send,
    StartDigest,
    StartUnpack,
    StartVisibilityFence,
)
from kvpush.core.events import (
    BlocksSafe,
    ConsumerEvent,
    DigestFailed,
    DigestReady,
    MessageReceived,
    PeerAdded,
    PeerRefused,
    ProducerEvent,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SessionLost,
    SourceAborted,
    SourceAnnounced,
    SourceFinished,
    SourcePreempted,
    SourceProgressed,
    SourceReleased,
    TransferDeclined,
    UnpackEnded,
    VisibilityFailed,
    VisibilityReached,
    WriteCompleted,
    WriteErrored,
)
from kvpush.core.ids import AgentName, BlockTable, EngineId, Epoch, PeerAddress, RequestId, SessionId, WriteId
from kvpush.core.layout import CacheLayout, LayerLayout, Plane, blocks_for_tokens, common_block_tokens
from kvpush.core.lease import HeldLease
from kvpush.core.producer import ProducerConfig, ProducerMachine, StreamState
from kvpush.core.scheduling import Granularity, SchedulingPolicy
from kvpush.core.staged_writes import StagedWrites
from kvpush.core.staging import StagingArea, Unpacker
from kvpush.core.transport import Descriptors, WriteStatus
from kvpush.errors import TransportError

__all__ = ["FakeClock", "InvariantBroken", "SimulatedLink", "ToyMemory", "World", "WorldConfig", "toy_layout"]


class InvariantBroken(AssertionError):
    """One of the invariants I1 to I8 does not hold; the message names it and ends with what had happened."""


class FakeClock:
    """Seconds that only move when told to.

    Args:
        start: First value.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on; never back."""
        if seconds < 0:
            raise ValueError("a monotonic clock doesn't go back")
        self._now += seconds


# --- memory -----------------------------------------------------------------------------------------------------------


class Owner(NamedTuple):
    """Who holds a destination block: one epoch of one receive."""

    request_id: RequestId
    epoch: Epoch


class Cell(NamedTuple):
    """One block of one plane of one layer, or one part of it: what a toy memory can tell apart."""

    layer: str
    content: str
    block: int
    part: int = 0


class Value(NamedTuple):
    """What a cell holds: so many tokens of the prompt, counted in cells; ``num_tokens`` are filled in."""

    prompt: object
    layer: str
    content: str
    cell_idx: int
    num_tokens: int


_SLOTS_AT = 0x9000_0000
"""Where the staging area of each node lies: each has an address space of its own."""
GARBAGE = Value("garbage", "", "", -1, 0)


def toy_layout(
    layers: Iterable[int],
    *,
    base: int,
    num_blocks: int,
    block_tokens: int = 4,
    block_bytes: int = 32,
    planes: Sequence[str] = ("k", "v"),
    blocks_outermost: bool = False,
    by_token: bool = False,
) -> CacheLayout:
    """A small cache layout.

    Args:
        layers: Numbers of the layers held.
        base: First address.
        blocks_outermost: All planes of all layers of a block lie together, instead of all blocks of a plane.
        by_token: Blocks can be divided by tokens.
    """
    numbers = list(layers)
    count = len(numbers) * len(planes)
    stride = block_bytes * count if blocks_outermost else block_bytes
    step = block_bytes if blocks_outermost else block_bytes * (num_blocks + 1)
    bases = iter(range(base, base + step * count, step))
    return CacheLayout(
        tuple(
            LayerLayout(
                name=f"layer.{number}",
                group=0,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                head_lo=0,
                num_heads=2,
                dtype="float32",
                format="NHC" if by_token else "HND",
                split="token" if by_token else "none",
                planes=tuple(Plane(content, next(bases), stride, block_bytes) for content in planes),
            )
            for number in numbers
        )
    )


class ToyMemory:
    """The cache of one rank, and the allocator over it.

    Args:
        layout: Where everything lies; descriptors are resolved by address, so wrong arithmetic shows.
        cell_tokens: Tokens of a cell. 0: of a block.
    """

    def __init__(self, layout: CacheLayout, cell_tokens: int = 0) -> None:
        self.layout = layout
        self.cell_tokens = cell_tokens or common_block_tokens(layout)
        self.owner: dict[int, Owner] = {}
        self.alive = True
        self.slots: dict[int, Value] = {}
        """Staging memory: what a packed cell at an address holds."""
        self._values: dict[Cell, Value] = {}
        self._at: dict[int, tuple[Cell, int]] = {}
        for layer in layout.layers:
            for plane in layer.planes:
                parts = layer.block_tokens // self.cell_tokens
                num_bytes = plane.block_bytes // parts
                for block, part in itertools.product(range(layer.num_blocks), range(parts)):
                    address = plane.base + block * plane.block_stride + part * num_bytes
                    self._at[address] = (Cell(layer.name, plane.content, block, part), num_bytes)

    def cells(self, descriptors: Descriptors) -> list[Cell]:
        """The cells that descriptors name, in order.

        Raises:
            InvariantBroken: they don't cover whole cells.
        """
        found = []
        for address, length, _ in descriptors.tolist():
            while length > 0:
                entry = self._at.get(address)
                if entry is None or entry[1] > length:
                    raise InvariantBroken(f"I8: address {address:#x}, {length} bytes, is no cell")
                found.append(entry[0])
                address += entry[1]
                length -= entry[1]
        return found

    def spread(self, descriptors: Descriptors) -> list[tuple[Cell, int]]:
        """Likewise, each with its length."""
        return [(cell, self._at[self.address(cell)][1]) for cell in self.cells(descriptors)]

    def address(self, cell: Cell) -> int:
        """Where a cell lies."""
        layer = next(layer for layer in self.layout.layers if layer.name == cell.layer)
        plane = next(plane for plane in layer.planes if plane.content == cell.content)
        return plane.base + cell.block * plane.block_stride

    def read(self, cell: Cell) -> Value:
        """What is in a cell now."""
        return self._values.get(cell, GARBAGE)

    def write(self, cell: Cell, value: Value) -> None:
        """Fill a cell."""
        self._values[cell] = value

    def compute(
        self, layers: Sequence[LayerLayout], blocks: Sequence[int], prompt: object, token_lo: int, token_hi: int
    ) -> None:
        """Fill the cells that hold the tokens ``[token_lo, token_hi)`` as the model would."""
        size = self.cell_tokens
        for layer in layers:
            for idx in range(token_lo // size, blocks_for_tokens(token_hi, size)):
                block, part = self.place(idx)
                for plane in layer.planes:
                    value = Value(prompt, layer.name, plane.content, idx, min(size, token_hi - idx * size))
                    self.write(Cell(layer.name, plane.content, blocks[block], part), value)

    def place(self, idx: int) -> tuple[int, int]:
        """In which block of a table a prompt's cell lies, and where there."""
        return divmod(idx, common_block_tokens(self.layout) // self.cell_tokens)

    def digest(self, layer: LayerLayout, blocks: Iterable[int]) -> bytes:
        """Of what some blocks of a layer hold now."""
        state = hashlib.blake2b(digest_size=8)
        for content in sorted(plane.content for plane in layer.planes):
            for block in blocks:
                state.update(repr(self.read(Cell(layer.name, content, block))).encode())
        return state.digest()

    def scribble(self, blocks: Iterable[int]) -> None:
        """Somebody else uses these blocks now."""
        for block in blocks:
            for layer in self.layout.layers:
                for plane in layer.planes:
                    for part in range(layer.block_tokens // self.cell_tokens):
                        self._values.pop(Cell(layer.name, plane.content, block, part), None)


class Pool:
    """A block allocator that hands out the most recently freed blocks first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))[::-1]

    def take(self, count: int) -> list[int] | None:
        """Blocks, or None when there aren't enough."""
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back."""
        self.free.extend(blocks)

    @property
    def all_free(self) -> bool:
        """Nothing is out, and nothing came back twice."""
        return sorted(self.free) == list(range(self.num_blocks))


# --- links ------------------------------------------------------------------------------------------------------------

Direction = Literal["to_producer", "to_consumer"]
DIRECTIONS: tuple[Direction, Direction] = ("to_producer", "to_consumer")


class SimulatedLink:
    """One session's conversation: two queues of frames. In order unless :meth:`swap` is used; None in a queue says that the
    other end has closed.

    Args:
        session: Whose link it is.
        consumer: The end that connected.
        producer: The end that was connected to; None: nobody listens there.
    """

    def __init__(self, session: SessionId, consumer: ConsumerNode, producer: ProducerNode | None) -> None:
        self.session = session
        self.consumer = consumer
        self.producer = producer
        self.queues: dict[Direction, deque[bytes | None]] = {direction: deque() for direction in DIRECTIONS}
        self.open: dict[Direction, bool] = dict.fromkeys(DIRECTIONS, True)
        """Whether the end that a direction leads to still listens."""
        self.past: dict[Direction, deque[bytes]] = {direction: deque(maxlen=24) for direction in DIRECTIONS}
        """What has been delivered lately."""
        self.held: set[Direction] = set()
        """Nothing arrives in these directions; what is sent waits."""
        self.gone = False
        """Everything is lost, and nobody is told."""

    @property
    def partitioned(self) -> bool:
        """Nothing arrives at either end."""
        return len(self.held) == len(DIRECTIONS)

    @partitioned.setter
    def partitioned(self, both: bool) -> None:
        self.held = set(DIRECTIONS) if both else set()

    def send(self, direction: Direction, frame: bytes | None) -> None:
        """Queue a frame."""
        if not self.gone:
            self.queues[direction].append(frame)

    def close(self, end: Direction) -> None:
        """The end that ``end`` leads to stops listening; the other one hears of it after what was sent before."""
        if self.open[end]:
            self.open[end] = False
            self.queues[end].clear()
            self.send("to_consumer" if end == "to_producer" else "to_producer", None)

    def drop(self, direction: Direction, idx: int) -> None:
        """Lose a message, as a full queue does."""
        if self.queues[direction][idx] is not None:
            del self.queues[direction][idx]

    def duplicate(self, direction: Direction, idx: int) -> None:
        """Deliver a message once more, after everything that is queued now."""
        frame = self.queues[direction][idx]
        if frame is not None:
            self.queues[direction].append(frame)

    def replay(self, direction: Direction) -> None:
        """Deliver the messages of the past once more: what a broken network or an attacker on the path does."""
        if not self.gone and self.open[direction]:
            self.queues[direction].extend(self.past[direction])

    def swap(self, direction: Direction, idx: int) -> None:
        """Let a message overtake the one before it: what TCP never does."""
        queue = self.queues[direction]
        if idx > 0 and queue[idx] is not None and queue[idx - 1] is not None:
            queue[idx - 1], queue[idx] = queue[idx], queue[idx - 1]

    def lose_silently(self) -> None:
        """The path is gone and nobody is told."""
        self.gone = True
        for queue in self.queues.values():
            queue.clear()


# --- nodes ------------------------------------------------------------------------------------------------------------


@dataclass
class ToyWrite:
    """One posted write."""

    write_id: WriteId
    node: ProducerNode
    memory: ToyMemory
    effect: PostWrite
    owner: Owner
    source_id: RequestId
    src_cells: list[Cell]
    dst_cells: list[Cell]
    lease: HeldLease
    posted_until: float
    """World time at which the posting itself has ended: it may take most of the lease's guard."""
    retry_window_s: float
    packed: tuple[int, int, int] | None = None
    """A staged one: from where here to where there, and how many bytes of slots."""
    landed: bool = False
    cut: bool = False
    over_at: float | None = None
    """World time after which it can't land any more; None while its producer runs and holds the connection."""

    def leave(self) -> None:
        """Its producer is dead, frozen, or has closed the connection: what has left is on its own."""
        if self.over_at is None:
            last_valid = (self.lease.ends_at - self.node.offset) / self.node.rate
            # Just before: the offsets of the nodes' clocks cost the last bits.
            self.over_at = max(last_valid, self.node.world.clock(), self.posted_until) + self.retry_window_s - 1e-6

    def may_land(self, now: float) -> bool:
        """Whether it can land at this world time."""
        return not self.landed and (self.over_at is None or now < self.over_at)

    @property
    def dst_blocks(self) -> set[int]:
        """Blocks of the consumer that it touches."""
        return {cell.block for cell in self.dst_cells}


class _Node:
    def __init__(self, world: World, name: str, offset: float, layout: CacheLayout) -> None:
        self.world = world
        self.rate = next(world.rates)
        self.name = name
        self.offset = offset
        self.memory = ToyMemory(layout, world.config.cell_tokens)
        self.alive = True
        self.frozen = False
        self.todo: deque[Effect] = deque()
        self.performing = False
        self.digests: list[StartDigest] = []
        self.late: list[ProducerEvent | ConsumerEvent] = []
        """What happened while it was frozen."""

    @property
    def now(self) -> float:
        """This node's own clock."""
        return self.world.clock() * self.rate + self.offset

    @property
    def running(self) -> bool:
        """Neither dead nor frozen."""
        return self.alive and not self.frozen


class ProducerNode(_Node):
    """One rank of a prefill instance."""

    def __init__(self, world: World, name: str, offset: float, layout: CacheLayout, config: ProducerConfig) -> None:
        super().__init__(world, name, offset, layout)
        self.machine = ProducerMachine(config, layout)
        self.writes: dict[WriteId, ToyWrite] = {}
        self.staged = StagedWrites(
            layout,
            StagingArea(_SLOTS_AT, 0, world.config.slot_bytes, 3),
            _PostsToTheWorld(self),  # type: ignore[arg-type]
            self._pack,
            lambda message: world._send(self, message),
            self._may_post_now,
            "on",
        )
        self.asked = WriteId(0)
        """The write that was last asked for whether it may be posted."""
        self.adding: list[SessionId] = []
        self.fenced: set[tuple[SessionId, RequestId, Epoch]] = set()
        """Streams for which the end has been said, or asked for: nothing may be posted."""

    def _may_post_now(self, write_id: WriteId, now: float) -> bool | None:
        self.asked = write_id
        return self.machine.may_post_now(write_id, now)

    def _pack(self, src: Descriptors, dst: Descriptors) -> Callable[[], bool]:
        """Copy blocks into a slot, at once."""
        for source, target in zip(src, dst, strict=True):
            at = int(target[0])
            for cell, num_bytes in self.memory.spread(source.reshape(1, 3)):
                self.memory.slots[at] = self.memory.read(cell)
                at += num_bytes
        return lambda: True


class _PostsToTheWorld:
    """What a node's staged writes have for a transport."""

    def __init__(self, node: ProducerNode) -> None:
        self._node = node

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        """Post the write of one slot."""
        self._node.world._post_packed(self._node, WriteId(token), int(src[0, 0]), int(dst[0, 0]), int(src[0, 1]))


class Unpacking(NamedTuple):
    """A slot that is being copied into blocks."""

    effect: StartUnpack
    owners: dict[int, Owner]
    """Who held the blocks when it began."""


class ConsumerNode(_Node):
    """A decode instance."""

    def __init__(
        self,
        world: World,
        name: str,
        offset: float,
        layout: CacheLayout,
        config: ConsumerConfig,
        new_session: Callable[[], int],
    ) -> None:
        super().__init__(world, name, offset, layout)
        self.machine = ConsumerMachine(config, layout, new_session)
        self.pool = Pool(layout.layers[0].num_blocks)
        self.receives: dict[RequestId, ToyReceive] = {}
        self.fences: list[tuple[RequestId, Epoch]] = []
        self.unpacker = Unpacker(layout)
        self.unpacking: list[Unpacking] = []


@dataclass
class ToyReceive:
    """One request of a decode engine."""

    request_id: RequestId
    epoch: Epoch
    prompt: int
    num_tokens: int
    token_lo: int
    blocks: list[int]
    reported: bool = False


@dataclass
class ToySource:
    """One request of a prefill engine."""

    source_id: RequestId
    prompt: int
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    chunk_hi: int = 0
    chunk_layer: int = 0
    ended: bool = False
    held_by: set[str] = field(default_factory=set)
    """Ranks that have not released it."""


class Prefill:
    """A prefill instance: one scheduler and block pool, one or several ranks."""

    def __init__(self, ranks: list[ProducerNode], num_blocks: int) -> None:
        self.ranks = ranks
        self.pool = Pool(num_blocks)
        self.sources: dict[RequestId, ToySource] = {}
        self.stopping = False

    @property
    def running(self) -> bool:
        """All ranks run."""
        return all(rank.running for rank in self.ranks)


# --- the world --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldConfig:
    """What a world is made of. Times in seconds, short ones so that simulated storms end soon.

    Args:
        num_ranks: Ranks of each prefill instance; they share the layers.
        consumer_block_tokens: Tokens of the consumers' blocks, where they have another size. 0: as the producers'.
        num_shares: Sessions that each decode instance can offer two staging slots to; 0: no write is staged.
        slot_bytes: Length of a slot.
        prompt_tokens: Tokens of each prompt; its number is its position.
        clock_rates: How fast the clocks of the nodes run, one after the other in turn.
    """

    num_producers: int = 1
    num_ranks: int = 1
    num_consumers: int = 1
    num_layers: int = 2
    num_blocks: int = 16
    block_tokens: int = 4
    consumer_block_tokens: int = 0
    blocks_outermost: bool = False
    granularity: Granularity = "layer"
    max_write_bytes: int = 8 << 20
    max_inflight_bytes: int = 256 << 20
    needs_visibility_fence: bool = False
    num_shares: int = 0
    slot_bytes: int = 4096
    verify: Literal["off", "sample", "all"] = "off"
    prompt_tokens: tuple[int, ...] = (3, 8, 13, 17)
    retry_window_s: float = 1.0
    lease_s: float = 4.0
    lease_guard_s: float = 0.5
    heartbeat_s: float = 0.5
    idle_heartbeat_s: float = 3.0
    peer_timeout_s: float = 2.0
    handshake_timeout_s: float = 3.0
    announce_timeout_s: float = 8.0
    transfer_timeout_s: float = 20.0
    source_timeout_s: float = 15.0
    write_timeout_s: float = 5.0
    fence_timeout_s: float = 0.5
    fence_give_up_s: float = 6.0
    visibility_timeout_s: float = 5.0
    inquiry_s: float = 2.0
    clock_rates: tuple[float, ...] = (1.0,)

    @property
    def target_tokens(self) -> int:
        """Tokens of the consumers' blocks."""
        return self.consumer_block_tokens or self.block_tokens

    @property
    def cell_tokens(self) -> int:
        """Tokens of what a memory can tell apart: what fits in the blocks of both sides."""
        return math.gcd(self.block_tokens, self.target_tokens)

    def layout(self, layers: Iterable[int], block_tokens: int, base: int, *, blocks_outermost: bool = False) -> CacheLayout:
        """The cache of one rank, 8 bytes a token and plane."""
        return toy_layout(
            layers,
            base=base,
            num_blocks=self.num_blocks,
            block_tokens=block_tokens,
            block_bytes=8 * block_tokens,
            blocks_outermost=blocks_outermost,
            by_token=self.block_tokens != self.target_tokens,
        )

    @property
    def bound_s(self) -> float:
        """Longer than anything takes to end once faults have stopped."""
        return 3 * (
            self.announce_timeout_s
            + self.transfer_timeout_s
            + self.source_timeout_s
            + self.write_timeout_s
            + self.fence_give_up_s
            + self.lease_s
            + self.retry_window_s
        )


class World:
    """Producers, consumers, and everything between them. Every method is one step; see the module's docstring.

    Args:
        config: What it is made of.
    """

    def __init__(self, config: WorldConfig | None = None) -> None:
        self.config = config or WorldConfig()
        self.clock = FakeClock()
        self.links: list[SimulatedLink] = []
        self.zombies: list[ToyWrite] = []
        self.failing_posts = 0
        """So many of the next posts fail."""
        self.slow_fences = False
        """Visibility fences and copies out of slots end when they are told to, and not of themselves in :meth:`settle`."""
        self.broken = False
        """An invariant was found broken."""
        self.statuses: list[tuple[RequestId, ReceiveStatus]] = []
        self.releases: list[tuple[RequestId, int]] = []
        self.log: deque[str] = deque(maxlen=200)
        self.rates = itertools.cycle(self.config.clock_rates)
        self._sessions = itertools.count(1)
        self._born = itertools.count(1)
        self.prefills = [self._new_prefill(idx) for idx in range(self.config.num_producers)]
        self.decodes = [self._new_decode(idx) for idx in range(self.config.num_consumers)]

    # --- making ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def address(producer: int, rank: int = 0) -> PeerAddress:
        """Where a rank of a prefill instance listens, over restarts."""
        return PeerAddress(f"prefill-{producer}", 5000 + rank)

    def _new_prefill(self, idx: int) -> Prefill:
        config = self.config
        born = next(self._born)
        endpoints = tuple(wire.Endpoint(rank, *self.address(idx, rank)) for rank in range(config.num_ranks))
        ranks = []
        for rank in range(config.num_ranks):
            low = config.num_layers * rank // config.num_ranks
            high = config.num_layers * (rank + 1) // config.num_ranks
            layout = config.layout(
                range(low, high), config.block_tokens, 0x10000 * born, blocks_outermost=config.blocks_outermost
            )
            name = f"prefill-{idx}.{rank}-{born}"
            machine_config = ProducerConfig(
                EngineId(f"prefill-{idx}-{born}"),
                AgentName(name),
                "toy",
                endpoints=endpoints,
                lease_guard_s=config.lease_guard_s,
                heartbeat_s=config.heartbeat_s,
                idle_heartbeat_s=config.idle_heartbeat_s,
                peer_timeout_s=config.peer_timeout_s,
                announce_timeout_s=config.announce_timeout_s,
                source_timeout_s=config.source_timeout_s,
                write_timeout_s=config.write_timeout_s,
                retry_window_s=config.retry_window_s,
                digest_scheme="toy-digest",
                policy=SchedulingPolicy(
                    config.granularity,
                    min_write_bytes=256,
                    max_write_bytes=config.max_write_bytes,
                    max_inflight_bytes=config.max_inflight_bytes,
                    max_inflight_bytes_per_peer=config.max_inflight_bytes,
                ),
            )
            ranks.append(ProducerNode(self, name, 10_000.0 * born + rank, layout, machine_config))
        return Prefill(ranks, config.num_blocks)

    def _new_decode(self, idx: int) -> ConsumerNode:
        config = self.config
        born = next(self._born)
        name = f"decode-{idx}-{born}"
        layout = config.layout(range(config.num_layers), config.target_tokens, 0x10000 * born + 0x7000_0000)
        machine_config = ConsumerConfig(
            EngineId(f"decode-{idx}"),
            AgentName(name),
            "toy",
            b"metadata",
            # Of two, one knows only from its producers how long their transports take.
            retry_window_s=config.retry_window_s if idx == 0 else 0.0,
            needs_visibility_fence=config.needs_visibility_fence,
            staging=StagingArea(_SLOTS_AT, 0, config.slot_bytes, 2 * config.num_shares) if config.num_shares else None,
            slots_per_session=2,
            verify=config.verify,
            verify_sample_share=0.5,
            digest_scheme="toy-digest",
            digest_timeout_s=config.transfer_timeout_s,
            lease_s=config.lease_s,
            peer_timeout_s=config.peer_timeout_s,
            handshake_timeout_s=config.handshake_timeout_s,
            announce_timeout_s=config.announce_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
            fence_timeout_s=config.fence_timeout_s,
            fence_give_up_s=config.fence_give_up_s,
            visibility_timeout_s=config.visibility_timeout_s,
            inquiry_s=config.inquiry_s,
        )
        return ConsumerNode(self, name, -10_000.0 * born, layout, machine_config, lambda: next(self._sessions))

    @property
    def nodes(self) -> list[ProducerNode | ConsumerNode]:
        """Everybody alive."""
        return [*(rank for prefill in self.prefills for rank in prefill.ranks), *self.decodes]

    @property
    def writes(self) -> list[ToyWrite]:
        """Writes that have not been reported to their producers, oldest first."""
        return [write for prefill in self.prefills for rank in prefill.ranks for write in rank.writes.values()]

    def _broken(self, what: str) -> InvariantBroken:
        self.broken = True
        return InvariantBroken("\n".join([what, "What happened before:", *self.log]))

    def _note(self, what: str) -> None:
        self.log.append(f"{self.clock():.2f} {what}")

    # --- the decode engine ----------------------------------------------------------------------------------------------

    def request(self, consumer: int, request_id: str, *, key: str, prompt: int, token_lo: int = 0, producer: int = 0) -> bool:
        """Allocate destination blocks and register them. False: no room, frozen, or the id is in use."""
        node = self.decodes[consumer]
        name = RequestId(request_id)
        num_tokens = self.config.prompt_tokens[prompt]
        size = self.config.target_tokens
        token_lo = min(token_lo, num_tokens - 1) // size * size
        if not node.running or name in node.receives:
            return False
        blocks = node.pool.take(blocks_for_tokens(num_tokens, size) - token_lo // size)
        if blocks is None:
            return False
        self._note(f"{node.name} requests {name}: key {key}, prompt {prompt}, tokens {token_lo}.., blocks {blocks}")
        event = ReceiveRequested(name, self.address(producer), (key,), _digest(prompt), num_tokens, token_lo, _table(blocks))
        epoch = Epoch(node.machine._epoch + 1)
        node.receives[name] = ToyReceive(name, epoch, prompt, num_tokens, token_lo, blocks)
        for block in blocks:
            node.memory.owner[block] = Owner(name, epoch)
        self._handle(node, event)
        return True

    def abort_receive(self, consumer: int, request_id: str) -> None:
        """The decode engine's client has gone."""
        node = self.decodes[consumer]
        if node.running:
            self._note(f"{node.name} aborts {request_id}")
            self._handle(node, ReceiveAborted(RequestId(request_id)))

    def decline(self, consumer: int, *, key: str, prompt: int, producer: int = 0) -> None:
        """The decode engine has the whole prompt cached."""
        node = self.decodes[consumer]
        if node.running:
            self._note(f"{node.name} declines {key}")
            self._handle(node, TransferDeclined(self.address(producer), (key,), _digest(prompt)))

    def end_digest(self, node: ProducerNode | ConsumerNode, *, ok: bool = True, idx: int = 0) -> None:
        """A digest ends, of what the memory holds by now, or fails."""
        if not node.running or not node.digests:
            return
        asked = node.digests.pop(idx % len(node.digests))
        self._note(f"{node.name}: digest {asked.digest_id} ends, ok: {ok}")
        layers = [node.memory.layout.layers[layer] for layer in asked.layers]
        found = tuple(node.memory.digest(layer, asked.blocks[0].tolist()) for layer in layers)
        self._handle(node, DigestReady(asked.digest_id, found) if ok else DigestFailed(asked.digest_id, "planted"))

    def spoil(self, write: ToyWrite, cell: int = 0) -> bool:
        """A write lands, but for one of its cells, which gets something else; it will say that it is complete. Only digests
        find out."""
        if not write.dst_cells or not self.land(write):
            return False
        if write.landed and write.memory.alive:
            wrong = write.dst_cells[cell % len(write.dst_cells)]
            self._note(f"write {write.write_id} of {write.owner} spoils {wrong}")
            write.memory.write(wrong, GARBAGE)
        return True

    def end_visibility_fence(self, consumer: int, *, ok: bool = True) -> None:
        """The oldest visibility fence ends, or fails."""
        node = self.decodes[consumer]
        if node.running and node.fences:
            fence = node.fences.pop(0)
            self._handle(node, VisibilityReached(*fence) if ok else VisibilityFailed(*fence, "planted"))

    def end_unpack(self, consumer: int, *, ok: bool = True, idx: int = 0) -> None:
        """A copy out of a slot is made, of what the slot holds by now, or fails."""
        node = self.decodes[consumer]
        if not node.running or not node.unpacking:
            return
        effect, owners = node.unpacking.pop(idx % len(node.unpacking))
        rows = node.unpacker.rows(effect.layer_lo, effect.layer_hi, effect.blocks, effect.area, effect.slot)
        for source, target in zip(*rows, strict=True) if ok else ():
            at = int(source[0])
            for cell, num_bytes in node.memory.spread(target.reshape(1, 3)):
                if node.memory.owner.get(cell.block) != owners[cell.block]:
                    raise self._broken(f"I1: what {owners[cell.block]} was sent is unpacked into block {cell.block} of another")
                node.memory.write(cell, node.memory.slots.get(at, GARBAGE))
                at += num_bytes
        self._note(f"{node.name}: copy {effect.unpack_id} ends, ok: {ok}")
        self._handle(node, UnpackEnded(effect.unpack_id, "" if ok else "planted"))

    # --- the prefill engine ---------------------------------------------------------------------------------------------

    def announce(self, producer: int, source_id: str, *, key: str, prompt: int) -> bool:
        """A prefill leg has come. False: not running, or the id is in use."""
        prefill = self.prefills[producer]
        name = RequestId(source_id)
        if not prefill.running or prefill.stopping or name in prefill.sources:
            return False
        num_tokens = self.config.prompt_tokens[prompt]
        source = ToySource(name, prompt, num_tokens, held_by={rank.name for rank in prefill.ranks})
        prefill.sources[name] = source
        self._note(f"prefill {producer} announces {name}: key {key}, prompt {prompt}")
        for rank in prefill.ranks:
            self._handle(rank, SourceAnnounced(name, (key,), _digest(prompt), num_tokens))
        return True

    def compute(self, producer: int, source_id: str, *, tokens: int | None = None, layers: int | None = None) -> bool:
        """Compute some layers of the current chunk, or start the next one. Defaults: everything that is left.

        Returns:
            False when there is nothing to compute, or no room.
        """
        prefill = self.prefills[producer]
        source = prefill.sources.get(RequestId(source_id))
        num_layers = min(len(rank.machine.layout.layers) for rank in prefill.ranks)
        if source is None or source.ended or not prefill.running or source.computed >= source.num_tokens:
            return False
        new: list[int] | None = None
        if source.chunk_layer == 0:
            source.chunk_hi = source.num_tokens if tokens is None else min(source.computed + tokens, source.num_tokens)
            missing = blocks_for_tokens(source.chunk_hi, self.config.block_tokens) - len(source.blocks)
            new = prefill.pool.take(max(0, missing))
            if new is None:
                return False
            source.blocks += new
        low = source.chunk_layer
        high = num_layers if layers is None else min(low + layers, num_layers)
        self._note(f"prefill {producer} computes {source_id}: layers {low}..{high} to token {source.chunk_hi}, new {new}")
        for rank in prefill.ranks:
            # Ranks may hold different numbers of layers: what one has more of comes with the last.
            stop = len(rank.machine.layout.layers) if high == num_layers else high
            own = rank.machine.layout.layers[low:stop]
            rank.memory.compute(own, source.blocks, source.prompt, source.computed, source.chunk_hi)
            table = _table(new) if new is not None else None
            self._handle(rank, SourceProgressed(source.source_id, low, stop, source.chunk_hi, table))
        source.chunk_layer = high
        if high == num_layers:
            source.computed, source.chunk_layer = source.chunk_hi, 0
        return True

    def preempt(self, producer: int, source_id: str) -> None:
        """The prefill engine takes the blocks away, and overwrites them at once."""
        prefill = self.prefills[producer]
        source = prefill.sources.get(RequestId(source_id))
        if source is None or source.ended or not prefill.running:
            return
        self._note(f"prefill {producer} preempts {source_id}")
        blocks, source.blocks = source.blocks, []
        source.computed = source.chunk_hi = source.chunk_layer = 0
        for rank in prefill.ranks:
            rank.memory.scribble(blocks)
            self._handle(rank, SourcePreempted(source.source_id))
        prefill.pool.give(blocks)

    def finish(self, producer: int, source_id: str, *, early: bool = False) -> None:
        """The prefill engine is done with a request. ``early``: although it has not computed all of it."""
        prefill = self.prefills[producer]
        source = prefill.sources.get(RequestId(source_id))
        if source is None or source.ended or not prefill.running or (source.computed < source.num_tokens and not early):
            return
        self._note(f"prefill {producer} finishes {source_id}")
        source.ended = True
        for rank in prefill.ranks:
            self._handle(rank, SourceFinished(source.source_id))

    def abort_source(self, producer: int, source_id: str) -> None:
        """The prefill engine's client has gone."""
        prefill = self.prefills[producer]
        source = prefill.sources.get(RequestId(source_id))
        if source is None or source.ended or not prefill.running:
            return
        self._note(f"prefill {producer} aborts {source_id}")
        source.ended = True
        for rank in prefill.ranks:
            self._handle(rank, SourceAborted(source.source_id, "client gone"))

    # --- the network ----------------------------------------------------------------------------------------------------

    def deliver(self, link: SimulatedLink, direction: Direction) -> bool:
        """Hand over the oldest message of a queue. False: none, or its reader does not run."""
        queue = link.queues[direction]
        node = link.producer if direction == "to_producer" else link.consumer
        if not queue or direction in link.held or (node is not None and node.alive and node.frozen):
            return False
        frame = queue.popleft()
        if node is None or not node.alive or not link.open[direction]:
            return True
        if frame is None:
            self._note(f"{node.name} hears that session {link.session} is closed")
            link.open[direction] = False
            self._handle(node, SessionLost(link.session, "closed by the other side"))
            return True
        link.past[direction].append(frame)
        message = wire.decode(frame)
        self._note(f"{node.name} gets {message!r}"[:160])
        if isinstance(message, wire.Cancel) and isinstance(node, ProducerNode):
            node.fenced.add((link.session, RequestId(message.request_id), Epoch(message.epoch)))
        if isinstance(message, wire.Unpacked) and isinstance(node, ProducerNode):
            node.staged.unpacked(message, node.now)
            self._advance_staged(node)
        self._handle(node, MessageReceived(link.session, message))
        return True

    def break_link(self, link: SimulatedLink, heard_by: Iterable[Direction] = DIRECTIONS) -> None:
        """A link breaks; only the given ends are told, after what they were sent before."""
        self._note(f"link of session {link.session} breaks, told: {list(heard_by)}")
        for direction in heard_by:
            link.send(direction, None)
        for direction in DIRECTIONS:
            if direction not in heard_by:
                link.queues[direction].clear()
        link.gone = True

    def answer_add_peer(self, rank: ProducerNode, *, ok: bool = True) -> None:
        """The transport answers the oldest ``AddPeer``."""
        if rank.running and rank.adding:
            session = rank.adding.pop(0)
            self._handle(rank, PeerAdded(session) if ok else PeerRefused(session, "unreachable"))

    # --- writes ---------------------------------------------------------------------------------------------------------

    def land(self, write: ToyWrite, *, cells: int | None = None) -> bool:
        """Copy what the source holds *now*. False: it is too late, or done already.

        Args:
            cells: Only so many of them; for writes that fail midway.
        """
        if not write.may_land(self.clock()):
            return False
        write.landed = cells is None
        if not write.memory.alive:
            return False
        if write.packed is not None:
            self._land_packed(write, write.packed, cells)
        for src, dst in list(zip(write.src_cells, write.dst_cells, strict=True))[:cells]:
            if write.memory.owner.get(dst.block) != write.owner:
                holder = write.memory.owner.get(dst.block)
                raise self._broken(f"I1: a write of {write.owner} lands in block {dst.block}, which belongs to {holder}")
            write.memory.write(dst, write.node.memory.read(src) if write.node.alive else GARBAGE)
        return True

    def _land_packed(self, write: ToyWrite, packed: tuple[int, int, int], cells: int | None) -> None:
        src, dst, num_bytes = packed
        for node in self.decodes:
            for session in node.machine._sessions.values():
                area = session.share[1] if session.share is not None else None
                if node.memory is not write.memory or area is None or session.session_id == write.effect.session:
                    continue
                if area.address <= dst < area.slot(area.num_slots):
                    raise self._broken(f"I1: a write of {write.owner} lands in a slot of session {session.session_id}")
        there = sorted(at for at in write.node.memory.slots if src <= at < src + num_bytes)
        for at in there[:cells]:
            write.memory.slots[dst + at - src] = write.node.memory.slots[at] if write.node.alive else GARBAGE

    def _advance_staged(self, node: ProducerNode) -> None:
        """Let a node's staged writes go on as far as they can without time passing, and tell its machine which have ended."""
        while True:
            if node.running:
                node.staged.advance(node.now)
            for write_id, error, may_land in node.staged.take_ended():
                event = WriteCompleted(write_id) if error is None else WriteErrored(write_id, error, may_land=may_land)
                self._handle(node, event)
            if not node.running or node.staged.next_deadline() != float("-inf"):
                return

    def end_write(self, write: ToyWrite, *, ok: bool = True, partly: int = 0, lingers: bool = False) -> None:
        """A write ends: it lands and its producer is told so, or it fails, perhaps after some of it has landed.

        Args:
            lingers: It fails, and some of it is still under way. So does every write of a connection that was cut.
        """
        node = write.node
        if not node.alive or node.frozen or node.writes.pop(write.write_id, None) is None:
            return
        if ok and not write.cut and not lingers and (write.landed or self.land(write)):
            self._note(f"{node.name}: write {write.write_id} of {write.owner} completes")
            self._say_ended(write, None)
            return
        self.land(write, cells=partly)
        may_land = write.cut or lingers
        if may_land and not write.landed:
            write.leave()
            self.zombies.append(write)
        self._note(f"{node.name}: write {write.write_id} of {write.owner} fails, may land: {may_land}")
        self._say_ended(write, "planted", may_land=may_land)

    def _say_ended(self, write: ToyWrite, error: str | None, *, may_land: bool = False) -> None:
        node = write.node
        if write.packed is not None:
            status = WriteStatus.DONE if error is None else WriteStatus.FAILED
            node.staged.completed(write.write_id, status, error or "", may_land=may_land, now=node.now)
            self._advance_staged(node)
        elif error is None:
            self._handle(node, WriteCompleted(write.write_id))
        else:
            self._handle(node, WriteErrored(write.write_id, error, may_land=may_land))

    # --- time, and worse ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let everybody who runs do what is due."""
        for node in self.nodes:
            if node.running:
                due = node.machine.next_deadline()
                if due is not None and due <= node.now:
                    self._perform(node, node.machine.on_deadline(node.now))
                    self._check(node)
                if isinstance(node, ProducerNode):
                    self._advance_staged(node)

    def advance(self, seconds: float) -> None:
        """Only time passes: no message, no write. Deadlines are met by those who run."""
        self._note(f"{seconds:g} s pass")
        end = self.clock() + seconds
        while self.clock() < end:
            self.clock.advance(min(end - self.clock(), self._next_wait()))
            self._bury_zombies()
            self.tick()

    def _next_wait(self) -> float:
        """Until the next deadline of anybody who runs."""
        waits = [float("inf")]
        for node in self.nodes:
            if not node.running:
                continue
            dues = [node.machine.next_deadline()]
            if isinstance(node, ProducerNode):
                dues.append(node.staged.next_deadline())
            for due in (due for due in dues if due is not None):
                waits.append(max((due - node.now) / node.rate, 1e-6))
        return min(waits)

    def _bury_zombies(self) -> None:
        self.zombies = [write for write in self.zombies if write.may_land(self.clock())]

    def freeze(self, node: ProducerNode | ConsumerNode) -> None:
        """Stop a process (SIGSTOP, a long collection, a paging storm). Its writes go on."""
        self._note(f"{node.name} freezes")
        node.frozen = True
        if isinstance(node, ProducerNode):
            for write in node.writes.values():
                write.leave()

    def thaw(self, node: ProducerNode | ConsumerNode) -> None:
        """Continue it: what happened meanwhile comes first, before it looks at its deadlines."""
        self._note(f"{node.name} thaws")
        node.frozen = False
        if isinstance(node, ProducerNode):
            self._perform(node, node.machine.cut_overdue(node.now))
            for write in node.writes.values():
                if not write.cut:
                    write.over_at = None
            self._check(node)
        late, node.late = node.late, []
        for event in late:
            self._handle(node, event)

    def stop_producer(self, producer: int) -> None:
        """Shut an instance down in good order: nothing new is posted; what is in flight goes on. Restart it afterwards."""
        prefill = self.prefills[producer]
        if not prefill.running or prefill.stopping:
            return
        self._note(f"prefill {producer} shuts down")
        prefill.stopping = True
        for rank in prefill.ranks:
            self._perform(rank, rank.machine.shutdown(rank.now))
            self._check(rank)

    def stop_consumer(self, consumer: int) -> None:
        """Cancel every receive of a decode instance, as at its shutdown."""
        node = self.decodes[consumer]
        if node.running:
            self._note(f"{node.name} shuts down")
            self._perform(node, node.machine.shutdown(node.now))
            self._check(node)
            if not node.machine.num_receives:
                self._perform(node, node.machine.farewell())
                self.restart_consumer(consumer)

    def restart_producer(self, producer: int, links: Literal["closed", "silent", "reconnected"] = "closed") -> None:
        """Kill all ranks of an instance and start it again on the same addresses. Posted writes may still land."""
        old = self.prefills[producer]
        self._note(f"prefill {producer} is killed and started again, links {links}")
        for rank in old.ranks:
            rank.alive = False
            for write in rank.writes.values():
                write.leave()
            self.zombies += [write for write in rank.writes.values() if not write.landed]
            rank.writes.clear()
        new = self._new_prefill(producer)
        self.prefills[producer] = new
        for link in self.links:
            if link.producer in old.ranks:
                rank_idx = old.ranks.index(link.producer)
                for queue in link.queues.values():
                    queue.clear()
                if links == "reconnected":
                    link.producer = new.ranks[rank_idx]
                    link.open["to_producer"] = True
                elif links == "closed":
                    link.close("to_producer")
                else:
                    link.lose_silently()

    def restart_consumer(self, consumer: int, links: Literal["closed", "silent"] = "closed") -> None:
        """Kill a decode instance and start it again: its memory and its requests are gone."""
        old = self.decodes[consumer]
        self._note(f"decode {consumer} is killed and started again, links {links}")
        old.alive = False
        old.memory.alive = False
        self.decodes[consumer] = self._new_decode(consumer)
        for link in self.links:
            if link.consumer is old:
                if links == "closed":
                    link.close("to_consumer")
                else:
                    link.lose_silently()

    # --- running --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Deliver every message and complete every write until nothing moves, without time passing."""
        moved = True
        while moved:
            moved = False
            for prefill in self.prefills:
                for rank in prefill.ranks:
                    while rank.running and rank.adding:
                        self.answer_add_peer(rank)
                        moved = True
            for link in list(self.links):
                for direction in DIRECTIONS:
                    while self.deliver(link, direction):
                        moved = True
            for write in self.writes:
                if write.node.running:
                    self.end_write(write)
                    moved = True
            for idx, node in enumerate(self.decodes):
                while node.running and node.fences and not self.slow_fences:
                    self.end_visibility_fence(idx)
                    moved = True
                while node.running and node.unpacking and not self.slow_fences:
                    self.end_unpack(idx)
                    moved = True
            for one in self.nodes:
                while one.running and one.digests:
                    self.end_digest(one)
                    moved = True
        self.links = [link for link in self.links if any(link.open.values()) and not self._is_dead(link)]

    @staticmethod
    def _is_dead(link: SimulatedLink) -> bool:
        return not any(link.queues.values()) and (
            not link.consumer.alive or (link.gone and (link.producer is None or not link.producer.alive))
        )

    def run(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Let this much time pass with everything healthy that is not partitioned, frozen or dead.

        Args:
            until: Stop as soon as this holds.

        Returns:
            Whether ``until`` held.
        """
        end = self.clock() + seconds
        while True:
            self.settle()
            if until():
                return True
            now = self.clock()
            if now >= end:
                return False
            self.clock.advance(min(end - now, self._next_wait()))
            self._bury_zombies()
            self.tick()

    def end_faults(self) -> None:
        """Everybody runs, and nothing is partitioned any more. What was lost stays lost."""
        self._note("faults end")
        for node in self.nodes:
            if node.frozen:
                self.thaw(node)
        for link in self.links:
            link.partitioned = False
        self.failing_posts = 0
        self.slow_fences = False

    @property
    def quiet(self) -> bool:
        """No engine has anything open."""
        return not any(prefill.sources for prefill in self.prefills) and not any(node.receives for node in self.decodes)

    def drain(self) -> None:
        """End all faults, let the engines finish what they have begun, and check that nothing is left.

        Raises:
            InvariantBroken: something does not end within :attr:`WorldConfig.bound_s`, or something is left.
        """
        self.end_faults()
        for idx, prefill in enumerate(self.prefills):
            for source in list(prefill.sources.values()):
                while not source.ended and source.computed < source.num_tokens:
                    if not self.compute(idx, source.source_id):
                        self.abort_source(idx, source.source_id)
                self.finish(idx, source.source_id)
        if not self.run(self.config.bound_s, until=lambda: self.quiet):
            left = [name for prefill in self.prefills for name in prefill.sources]
            left += [name for node in self.decodes for name in node.receives]
            raise self._broken(f"I4, I5: {left} have not ended within {self.config.bound_s:g} s")
        self.run(2 * (self.config.peer_timeout_s + self.config.idle_heartbeat_s) + self.config.bound_s / 8)
        self._check_nothing_left()
        self._check_it_works()
        self._check_nothing_left()

    def _check_it_works(self) -> None:
        """After every storm: a transfer from each instance to each, at the first try."""
        for producer, prefill in enumerate(self.prefills):
            if prefill.stopping:
                self.restart_producer(producer)
                self.settle()
            for consumer in range(len(self.decodes)):
                name = f"afterwards {producer} {consumer}"
                self.request(consumer, name, key=name, prompt=0, producer=producer)
                self.announce(producer, name, key=name, prompt=0)
                self.run(1.0)
                self.compute(producer, name)
                self.finish(producer, name)
                self.run(self.config.bound_s, until=lambda: self.quiet)
                if self.statuses[-1:] != [(RequestId(name), ReceiveStatus.RECEIVED)]:
                    raise self._broken(f"{name}: after everything has ended well, a transfer is {self.statuses[-1:]}")
        self.run(self.config.inquiry_s + 1.0)

    def _check_nothing_left(self) -> None:
        left: list[str] = []
        for prefill in self.prefills:
            if not prefill.pool.all_free:
                left.append(f"source blocks, free are {sorted(prefill.pool.free)}")
            for rank in prefill.ranks:
                machine = rank.machine
                for what, count in (
                    ("sources", machine.num_sources),
                    ("streams", machine.num_streams),
                    ("writes", machine.num_in_flight),
                    ("bytes of credit", machine._credit.total),
                    ("credited peers", len(machine._credit._per_peer)),
                    ("postable streams", len(machine._postable)),
                    ("findable keys", len(machine._rendezvous._sources)),
                    ("waiting keys", len(machine._rendezvous._waiters)),
                    ("digests", len(machine._digests)),
                    ("staged writes", len(rank.staged._writing) + len(rank.staged._copying)),
                    ("slots", 3 - len(rank.staged._local)),
                    ("pieces not unpacked", sum(len(peer.awaiting) for peer in rank.staged._peers.values())),
                    ("queued writes", sum(len(peer.queue) for peer in rank.staged._peers.values())),
                    ("connections that could be cut", len(machine._writing)),
                    ("deadlines beyond one per session", len(machine._deadlines) - len(machine._sessions)),
                ):
                    if count:
                        left.append(f"{rank.name}: {count} {what}")
        for node in self.decodes:
            if not node.pool.all_free or node.memory.owner:
                left.append(f"{node.name}: destination blocks, free are {sorted(node.pool.free)}")
            consumer = node.machine
            for what, count in (
                ("receives", consumer.num_receives),
                ("writable receives", len(consumer._writable)),
                ("digests", len(consumer._digests)),
                ("copies", len(consumer._unpacks) + len(node.unpacking)),
                ("shares of the staging area", self.config.num_shares - _shares_known(consumer)),
                ("deadlines beyond one per session", len(consumer._deadlines) - len(consumer._sessions)),
                ("receives of lost producers", len(consumer._lost)),
                ("sessions too many", max(0, len(consumer._sessions) - self.config.num_producers * self.config.num_ranks)),
                ("peers' receives", sum(len(peer.receives) for peer in consumer._peers.values())),
                ("sessions' receives", sum(len(session.receives) for session in consumer._sessions.values())),
            ):
                if count:
                    left.append(f"{node.name}: {count} {what}")
        if left:
            raise self._broken("left behind: " + "; ".join(left))

    # --- effects --------------------------------------------------------------------------------------------------------

    def _handle(self, node: ProducerNode | ConsumerNode, event: ProducerEvent | ConsumerEvent) -> None:
        if node.frozen:
            node.late.append(event)
            return
        self._perform(node, node.machine.handle(event, node.now))  # type: ignore[arg-type]
        self._check(node)

    @staticmethod
    def _check(node: ProducerNode | ConsumerNode) -> None:
        node.machine.check()

    def _perform(self, node: ProducerNode | ConsumerNode, effects: Sequence[Effect]) -> None:
        """As the submitter does it: in order, and what comes of an effect after what was asked for before."""
        node.todo.extend(effects)
        if node.performing:
            return
        node.performing = True
        try:
            while node.todo:
                self._perform_one(node, node.todo.popleft())
        finally:
            node.performing = False

    def _perform_one(self, node: ProducerNode | ConsumerNode, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(node, effect.message)
        elif isinstance(effect, Report):
            self._report(node, effect)
        elif isinstance(effect, CloseSession):
            self._close(node, effect.session)
        elif isinstance(effect, StartDigest):
            if effect.for_producer != isinstance(node, ProducerNode):
                raise self._broken(f"{node.name} asks for a digest that the other machine would get")
            node.digests.append(effect)
        elif isinstance(node, ProducerNode):
            if isinstance(effect, PostWrite):
                self._try_to_post(node, effect)
            elif isinstance(effect, AddPeer):
                node.adding.append(effect.session)
            elif isinstance(effect, RemovePeer):
                self._remove_peer(node, effect)
        elif isinstance(effect, OpenSession):
            self.links.append(SimulatedLink(effect.session, node, self._listener(effect.address)))
        elif isinstance(effect, StartVisibilityFence):
            node.fences.append((effect.request_id, effect.epoch))
        elif isinstance(effect, StartUnpack):
            blocks = effect.blocks[0].tolist()
            node.unpacking.append(Unpacking(effect, {block: node.memory.owner[block] for block in blocks}))

    def _try_to_post(self, node: ProducerNode, effect: PostWrite) -> None:
        if not node.machine.may_post(effect.write_id):
            self._handle(node, WriteErrored(effect.write_id, "not posted"))
        elif self.failing_posts:
            self.failing_posts -= 1
            self._note(f"{node.name}: posting write {effect.write_id} fails")
            self._handle(node, WriteErrored(effect.write_id, "the post failed"))
        elif node.staged.take(effect, 0, node.now):
            self._advance_staged(node)
        else:
            self._post(node, effect)

    def _remove_peer(self, node: ProducerNode, effect: RemovePeer) -> None:
        for write in node.writes.values():
            if write.effect.agent_name == effect.agent_name and not write.cut:
                if not effect.cut:
                    raise self._broken(f"I1: {effect.agent_name} is removed while write {write.write_id} is in flight")
                write.cut = True
                write.leave()

    def _listener(self, address: PeerAddress) -> ProducerNode | None:
        for idx, prefill in enumerate(self.prefills):
            for rank, node in enumerate(prefill.ranks):
                if self.address(idx, rank) == address:
                    return node
        return None

    def _link(self, node: ProducerNode | ConsumerNode, session: SessionId) -> SimulatedLink | None:
        for link in self.links:
            if link.session == session and node in (link.producer, link.consumer):
                return link
        return None

    def _send(self, node: ProducerNode | ConsumerNode, message: wire.Message) -> None:
        link = self._link(node, SessionId(message.session))
        if isinstance(message, wire.Commit | wire.Failed | wire.Fenced) and isinstance(node, ProducerNode):
            self._say_end(node, message)
        if isinstance(message, wire.Goodbye) and message.fenced and isinstance(node, ProducerNode):
            for write_id, stream in node.machine._writes.items():
                if stream.session.session_id == message.session:
                    raise self._broken(f"I1: goodbye to session {message.session} while write {write_id} is in flight")
        if link is not None:
            link.send("to_consumer" if isinstance(node, ProducerNode) else "to_producer", wire.encode(message))

    def _say_end(self, node: ProducerNode, message: wire.Commit | wire.Failed | wire.Fenced) -> None:
        key = SessionId(message.session), RequestId(message.request_id), Epoch(message.epoch)
        node.fenced.add(key)
        for write in node.writes.values():
            stream = node.machine._writes.get(write.effect.write_id)
            if stream is not None and (stream.session.session_id, stream.request_id) == key[:2] and stream.epoch <= key[2]:
                raise self._broken(f"I1: {type(message).__name__} of {key} while write {write.write_id} is in flight")

    def _close(self, node: ProducerNode | ConsumerNode, session: SessionId) -> None:
        link = self._link(node, session)
        if link is not None:
            link.close("to_producer" if isinstance(node, ProducerNode) else "to_consumer")
        if isinstance(node, ProducerNode):
            node.staged.close_session(session, node.now)
            self._advance_staged(node)

    def _post_packed(self, node: ProducerNode, token: WriteId, src: int, dst: int, num_bytes: int) -> None:
        """A staged write posts what it has packed."""
        if self.failing_posts:
            self.failing_posts -= 1
            raise TransportError("the post failed")
        stream = node.machine._writes[node.asked]
        self._post(node, stream.inflight[node.asked][0], token, (src, dst, num_bytes))

    def _post(
        self,
        node: ProducerNode,
        effect: PostWrite,
        write_id: WriteId | None = None,
        packed: tuple[int, int, int] | None = None,
    ) -> None:
        stream = node.machine._writes[effect.write_id]
        session = stream.session
        key = session.session_id, stream.request_id, stream.epoch
        owner = Owner(stream.request_id, stream.epoch)
        assert stream.source is not None
        if key in node.fenced or stream.state not in (StreamState.STREAMING, StreamState.DRAINING):
            raise self._broken(f"I2: a write of {key} is posted after its end")
        memory = next(
            (link.consumer.memory for link in self.links if link.session == session.session_id and link.producer is node), None
        )
        if memory is None:
            memory = ToyMemory(session.plan.dst, self.config.cell_tokens)
            memory.alive = False
        src, dst = effect.plan.descriptors(
            effect.layer_lo, effect.layer_hi, effect.src_blocks, effect.dst_blocks, effect.tokens
        )
        src_cells, dst_cells = node.memory.cells(src), memory.cells(dst)
        if [cell[:2] for cell in src_cells] != [cell[:2] for cell in dst_cells]:
            raise self._broken(f"I8: source and destination of write {effect.write_id} differ in layers or planes")
        if effect.num_bytes != int(src[:, 1].sum()):
            raise self._broken(f"write {effect.write_id} counts {effect.num_bytes} bytes and moves {int(src[:, 1].sum())}")
        if packed is not None:
            if not session.lease.valid(node.now):
                raise self._broken(f"I2: a packed write of {key} is posted without a lease")
            src_cells = dst_cells = []
        write = ToyWrite(
            write_id or effect.write_id,
            node,
            memory,
            effect,
            owner,
            stream.source.source_id,
            src_cells,
            dst_cells,
            session.lease,
            self.clock() + 0.8 * self.config.lease_guard_s,
            self.config.retry_window_s,
            packed,
        )
        if memory.alive:
            for block in write.dst_blocks:
                if memory.owner.get(block) != owner:
                    raise self._broken(f"I1: a write of {owner} is posted to block {block} of {memory.owner.get(block)}")
        way = "packed" if packed else "direct"
        self._note(f"{node.name} posts write {effect.write_id} of {owner}, layers {effect.layer_lo}..{effect.layer_hi}, {way}")
        node.writes[write.write_id] = write

    def _report(self, node: ProducerNode | ConsumerNode, effect: Report) -> None:
        outcome = effect.outcome
        self._note(f"{node.name} reports {outcome!r}"[:200])
        if isinstance(outcome, SourceReleased):
            assert isinstance(node, ProducerNode)
            self._released(node, outcome)
        elif isinstance(outcome, ReceiveEnded):
            assert isinstance(node, ConsumerNode)
            self._received(node, outcome)
        elif isinstance(outcome, BlocksSafe):
            assert isinstance(node, ConsumerNode)
            self._safe(node, outcome)

    def _released(self, node: ProducerNode, outcome: SourceReleased) -> None:
        prefill = next(p for p in self.prefills if node in p.ranks)
        source = prefill.sources.get(outcome.source_id)
        if source is None or node.name not in source.held_by:
            raise self._broken(f"I6: {node.name} releases {outcome.source_id} twice")
        if not source.ended:
            raise self._broken(f"I6: {node.name} releases {outcome.source_id}, which its engine has not ended")
        if any(source.source_id == outcome.source_id for _, source in node.machine._digests.values()):
            raise self._broken(f"I1: {outcome.source_id} is released while a digest reads it")
        for write in node.writes.values():
            if write.source_id == outcome.source_id:
                raise self._broken(f"I1: {outcome.source_id} is released while write {write.write_id} reads it")
        source.held_by.discard(node.name)
        if not source.held_by:
            for rank in prefill.ranks:
                rank.memory.scribble(source.blocks)
            prefill.pool.give(source.blocks)
            del prefill.sources[outcome.source_id]
            self.releases.append((outcome.source_id, outcome.num_streams))

    def _received(self, node: ConsumerNode, outcome: ReceiveEnded) -> None:
        receive = node.receives.get(outcome.request_id)
        if receive is None or receive.reported:
            raise self._broken(f"I6: {node.name} reports {outcome.request_id} twice")
        receive.reported = True
        self.statuses.append((outcome.request_id, outcome.status))
        if outcome.status is ReceiveStatus.RECEIVED:
            self._check_content(node, receive)
        elif outcome.error is None:
            raise self._broken(f"{outcome.request_id} has failed without a reason")
        if outcome.blocks_safe:
            self._free(node, receive)
        elif outcome.status is not ReceiveStatus.FAILED:
            raise self._broken(f"{outcome.request_id} is {outcome.status} with unsafe blocks")

    def _check_content(self, node: ConsumerNode, receive: ToyReceive) -> None:
        memory, size = node.memory, self.config.cell_tokens
        first = receive.token_lo // self.config.target_tokens
        for layer in memory.layout.layers:
            for plane in layer.planes:
                for idx in range(receive.token_lo // size, blocks_for_tokens(receive.num_tokens, size)):
                    block, part = memory.place(idx)
                    want = Value(receive.prompt, layer.name, plane.content, idx, min(size, receive.num_tokens - idx * size))
                    cell = Cell(layer.name, plane.content, receive.blocks[block - first], part)
                    have = memory.read(cell)
                    if have != want:
                        raise self._broken(f"I8: {receive.request_id} was received, but {cell} holds {have}, not {want}")

    def _safe(self, node: ConsumerNode, outcome: BlocksSafe) -> None:
        receive = node.receives.get(outcome.request_id)
        if receive is None or not receive.reported:
            raise self._broken(f"I6: blocks of {outcome.request_id} become safe, but were never unsafe")
        self._free(node, receive)

    def _free(self, node: ConsumerNode, receive: ToyReceive) -> None:
        blocks = set(receive.blocks)
        for effect, _ in node.unpacking:
            if blocks & set(effect.blocks[0].tolist()):
                raise self._broken(f"I1: blocks of {receive.request_id} are freed while a slot is copied into them")
        if (receive.request_id, receive.epoch) in node.fences:
            raise self._broken(f"I1: blocks of {receive.request_id} are freed while a visibility fence may touch them")
        for write in [*self.writes, *self.zombies]:
            if write.memory is node.memory and write.may_land(self.clock()) and blocks & write.dst_blocks:
                raise self._broken(f"I1: blocks of {receive.request_id} are freed while write {write.write_id} may touch them")
        for block in receive.blocks:
            del node.memory.owner[block]
        node.memory.scribble(receive.blocks)
        node.pool.give(receive.blocks)
        del node.receives[receive.request_id]


def _shares_known(machine: ConsumerMachine) -> int:
    """Shares that nobody has, and those of sessions that live."""
    if machine._shares is None:
        return 0
    return machine._shares.num_free + sum(session.share is not None for session in machine._sessions.values())


def _digest(prompt: int) -> bytes:
    return b"prompt %d" % prompt


def _table(blocks: Sequence[int]) -> BlockTable:
    return (np.array(blocks, np.int32),)
