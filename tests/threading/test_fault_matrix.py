# SPDX-License-Identifier: Apache-2.0
"""Promises 1 to 4 over everything that a transport can do wrong, at each point of a transfer, seen by either side first.

Real endpoints with their threads, real bytes, late ones included. Whatever goes wrong, a request ends in the right bytes or in
a named error; its blocks come back, at once or after they were reported unsafe; nothing is written into a block that has come
back; the same two peers can go on; and nothing is left.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from faulty_transport import Fault, FaultyPlugin, Wire

from kvpush.channels.memory import Fault as MessageFault
from kvpush.channels.memory import MemoryNetwork, Passing
from kvpush.core import wire
from kvpush.core.consumer import ConsumerMachine
from kvpush.core.events import (
    BlocksSafe,
    Outcome,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SourceAnnounced,
    SourceFinished,
    SourceProgressed,
    SourceReleased,
)
from kvpush.core.ids import BlockTable, PeerAddress, RequestId
from kvpush.core.producer import ProducerMachine, StreamState
from kvpush.core.submitter import Submitter
from kvpush.endpoint import Endpoint, numpy_views
from kvpush.errors import KvPushError, SubmitterClosed, TransferCancelled, TransferError
from kvpush.settings import Settings
from kvpush.testing.contract import wait_until

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 2, 32, 2, 4, 8
CHUNKS = 3
TOKENS = CHUNKS * BLOCK_TOKENS
CANARY = np.float32(7.0)
"""What our engine has in blocks that are its own; what is sent lies below 1."""
ADDRESS = PeerAddress("prefill", 5000)
LEASE_S, GUARD_S, HEARTBEAT_S = 0.7, 0.2, 0.15
SOON_S, LATER_S = 0.15, 60.0
DST, DST_BYSTANDER, DST_AFTER = [3, 1, 2], [10, 11, 12], [20, 22, 21]
SRC, SRC_BYSTANDER, SRC_AFTER = [5, 6, 7], [8, 9, 10], [11, 12, 13]
LANDED = "a write has landed in a block that had come back"
CRASHED = "have crashed|stopped on an internal error"
SEEDS, NAMES = itertools.count(), itertools.count()


class Wrong(enum.Enum):
    """What goes wrong."""

    POST_FAILS = "post fails"
    NEVER_ENDS = "completion never comes"
    UNTOLD = "completion is lost, its bytes are there"
    FAILS = "completion with an error, its bytes may come later"
    TOLD_TWICE = "completion comes twice"
    MESSAGES_LOST = "notifications are lost"
    MESSAGES_TWICE = "notifications come twice"
    RELEASE_REFUSED = "release refused, of a connection with a write that never ends"


class Phase(enum.Enum):
    """When."""

    FIRST = "before the first write"
    BETWEEN = "between two chunks"
    LAST = "on the last write"
    FENCE = "while a fence is awaited"


class By(enum.Enum):
    """Who notices: the other one has long timeouts, and what the first would tell it is lost. Of messages: whose are lost, or
    come twice."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


WRITE_FAULTS = {
    Wrong.POST_FAILS: Fault.REFUSED,
    Wrong.NEVER_ENDS: Fault.STUCK,
    Wrong.UNTOLD: Fault.UNTOLD,
    Wrong.FAILS: Fault.FAILED,
    Wrong.TOLD_TWICE: Fault.TWICE,
    Wrong.RELEASE_REFUSED: Fault.STUCK,
}
HARMLESS = (Wrong.TOLD_TWICE, Wrong.MESSAGES_LOST, Wrong.MESSAGES_TWICE)
"""The request is received all the same."""
FAULTY_WRITE = {Phase.FIRST: 0, Phase.BETWEEN: 1, Phase.LAST: CHUNKS - 1, Phase.FENCE: 1}


class Party:
    """An endpoint, its cache, and all that it has reported."""

    def __init__(self, world: World, *, produce: bool, **settings: Any) -> None:
        shape = (BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
        self.caches = [np.full(shape, 0 if produce else CANARY, np.float32) for _ in range(LAYERS)]
        self.outcomes: list[Outcome] = []
        address = ADDRESS if produce else None
        self.endpoint = Endpoint.open(
            numpy_views(
                {f"layer.{idx}": cache for idx, cache in enumerate(self.caches)}, block_tokens=BLOCK_TOKENS, num_heads=HEADS
            ),
            produce=produce,
            consume=not produce,
            settings=Settings.model_construct(
                push_granularity="chunk",
                lease_s=LEASE_S,
                lease_guard_s=GUARD_S,
                heartbeat_s=HEARTBEAT_S,
                idle_heartbeat_s=0.4,
                peer_timeout_s=20.0,
                fence_timeout_s=0.1,
                **settings,
            ),
            plugin=FaultyPlugin(world.wire),
            channel=lambda: world.network.channel(address),
        )

    def look(self) -> list[Outcome]:
        self.endpoint.wait_outcome(0.01)
        self.outcomes += self.endpoint.drain()
        return self.outcomes

    def find(self, kind: type, request_id: str) -> list[Any]:
        name = "source_id" if kind is SourceReleased else "request_id"
        return [outcome for outcome in self.look() if isinstance(outcome, kind) and getattr(outcome, name) == request_id]

    def expect(self, kind: type, request_id: str) -> Any:
        wait_until(lambda: bool(self.find(kind, request_id)), f"{kind.__name__} of {request_id}; have {self.outcomes}")
        found = self.find(kind, request_id)
        # A source that is finished while its submitter crashes and is started again is told of twice.
        assert len(found) == 1 or (kind is SourceReleased and self.endpoint.restarts), f"reported more than once: {found}"
        return found[0]

    def submit(self, event: Any) -> bool:
        """Whether it was taken. If not, the submitter has crashed, and reports everything that was open."""
        try:
            self.endpoint.submit(event)
        except SubmitterClosed:
            return False
        return True


class World:
    """Two peers and everything between them."""

    def __init__(self, wrong: Wrong, by: By) -> None:
        self.network = MemoryNetwork()
        self.wire = Wire(slack_s=GUARD_S)
        patient = wrong in HARMLESS
        by_producer = SOON_S if by is By.PRODUCER and not patient else LATER_S
        by_consumer = SOON_S if by is By.CONSUMER and not patient else LATER_S
        self.producer = Party(self, produce=True, write_timeout_s=by_producer)
        self.consumer = Party(
            self, produce=False, transfer_timeout_s=by_consumer, write_timeout_s=by_consumer, announce_timeout_s=5.0
        )
        machine = self.consumer.endpoint.submitter.consumer
        assert machine is not None
        machine.config = replace(machine.config, inquiry_s=0.3, retry_s=0.2)

    def request(self, name: str, blocks: list[int]) -> None:
        event = SourceAnnounced(RequestId(f"s-{name}"), (name,), b"d", TOKENS)
        wait_until(lambda: self.producer.submit(event), "the producer to be up", pause_s=0.01)
        self.consumer.submit(ReceiveRequested(RequestId(f"r-{name}"), ADDRESS, (name,), b"d", TOKENS, 0, table(blocks)))

    def compute(self, name: str, src: list[int], chunk: int) -> None:
        rng = np.random.default_rng(next(SEEDS))
        for cache in self.producer.caches:
            cache[src[chunk]] = rng.random(cache[src[chunk]].shape, np.float32)
        progress = SourceProgressed(RequestId(f"s-{name}"), 0, LAYERS, (chunk + 1) * BLOCK_TOKENS, table([src[chunk]]))
        self.producer.submit(progress)
        if chunk == CHUNKS - 1:
            self.producer.submit(SourceFinished(RequestId(f"s-{name}")))

    def compute_all(self, name: str, src: list[int]) -> None:
        for chunk in range(CHUNKS):
            self.compute(name, src, chunk)

    def stream_state(self) -> StreamState | None:
        """Of the one stream that there is, if there is one."""
        machine = self.producer.endpoint.submitter.producer
        assert machine is not None
        streams = [stream for session in list(machine._sessions.values()) for stream in list(session.streams.values())]
        return streams[0].state if streams else None

    def same_bytes(self, src: list[int], dst: list[int]) -> bool:
        return all(
            (mine[src] == theirs[dst]).all() for mine, theirs in zip(self.producer.caches, self.consumer.caches, strict=True)
        )

    def take_back(self, blocks: list[int]) -> None:
        """The blocks are our engine's again, which writes to them."""
        for cache in self.consumer.caches:
            cache[blocks] = CANARY

    def untouched(self, but: list[int]) -> bool:
        own = [block for block in range(BLOCKS) if block not in but]
        return all(bool((cache[own] == CANARY).all()) for cache in self.consumer.caches)

    def transfers_again(self) -> None:
        """Something can be sent between the two. They may still be finding out about one another, with little patience."""
        for _ in range(20):
            name = f"healthy-{next(NAMES)}"
            self.request(name, DST_AFTER)
            self.compute_all(name, SRC_AFTER)
            ended = self.consumer.expect(ReceiveEnded, f"r-{name}")
            self.producer.expect(SourceReleased, f"s-{name}")
            if ended.status is ReceiveStatus.RECEIVED:
                assert self.same_bytes(SRC_AFTER, DST_AFTER)
                return
            if not ended.blocks_safe:
                self.consumer.expect(BlocksSafe, f"r-{name}")
            self.take_back(DST_AFTER)
        raise AssertionError(f"no transfer succeeds any more: {self.consumer.outcomes}")

    def nothing_left(self) -> bool:
        submitters = [party.endpoint.submitter for party in (self.producer, self.consumer)]
        producer, consumer = submitters[0].producer, submitters[1].consumer
        assert producer is not None
        assert consumer is not None
        counts = (
            *(submitter.num_open for submitter in submitters),
            *(submitter.transport.num_in_flight for submitter in submitters),
            producer.num_in_flight,
            producer.num_sources,
            producer.num_streams,
            consumer.num_receives,
        )
        return not any(counts) and not consumer.expects_writes

    def close(self, timeout_s: float = 20.0) -> tuple[bool, bool]:
        return self.consumer.endpoint.close(timeout_s), self.producer.endpoint.close(timeout_s)


@contextmanager
def world_of(wrong: Wrong, by: By) -> Iterator[World]:
    world = World(wrong, by)
    try:
        yield world
    finally:
        world.network.set_faults(None)
        world.wire.disarm()
        world.close(1.0)


def table(blocks: list[int]) -> BlockTable:
    return (np.array(blocks, np.int32),)


def messages(wrong: Wrong, by: By) -> Callable[[Passing], MessageFault | None]:
    """A rule for the messages: the first of each kind that one side sends is lost, or all arrive twice; or nothing of what the
    producer would tell of a failure reaches the consumer."""
    seen: set[type] = set()
    lock = threading.Lock()

    def rule(passing: Passing) -> MessageFault | None:
        kind = type(wire.decode(passing.data))
        if wrong not in (Wrong.MESSAGES_LOST, Wrong.MESSAGES_TWICE):
            hidden = by is By.CONSUMER and kind in (wire.Failing, wire.Failed, wire.Goodbye) and not passing.to_listener
            return MessageFault(copies=0) if hidden else None
        if passing.to_listener is not (by is By.CONSUMER):
            return None
        if wrong is Wrong.MESSAGES_TWICE:
            return MessageFault(copies=2)
        with lock:
            new = kind not in seen
            seen.add(kind)
        return MessageFault(copies=0) if new else None

    return rule


def strike(world: World, wrong: Wrong, by: By, write: int) -> None:
    """From now on it goes wrong, with the write of that number."""
    world.wire.refuses_release = wrong is Wrong.RELEASE_REFUSED
    world.wire.arm({write: WRITE_FAULTS[wrong]} if wrong in WRITE_FAULTS else {})
    world.network.set_faults(messages(wrong, by))


def compute_and_send(world: World, chunk: int) -> None:
    """A chunk in a write of its own, which goes well."""
    posted = world.wire.posted
    world.compute("it", SRC, chunk)
    producer = world.producer.endpoint.submitter.producer
    assert producer is not None
    wait_until(lambda: world.wire.posted > posted and not producer.num_in_flight, f"write {chunk} to end")


def transfer_that_goes_wrong(world: World, wrong: Wrong, phase: Phase, by: By) -> None:
    """Up to the point where nothing more will be done to it."""
    faulty = FAULTY_WRITE[phase]
    if faulty:
        world.wire.arm({})
    else:
        strike(world, wrong, by, 0)
    world.request("it", DST)
    for chunk in range(CHUNKS):
        if 0 < chunk == faulty:
            strike(world, wrong, by, 0)
        if chunk < faulty:
            compute_and_send(world, chunk)
        else:
            world.compute("it", SRC, chunk)


def fence_that_goes_wrong(world: World, wrong: Wrong, by: By) -> None:
    """Likewise, with a receive that our engine gives up while a write of it is in flight."""
    world.wire.arm({FAULTY_WRITE[Phase.FENCE]: Fault.HELD})
    world.request("it", DST)
    compute_and_send(world, 0)
    world.compute("it", SRC, 1)
    wait_until(lambda: world.wire.posted == 2, "a write in flight")
    strike(world, wrong, by, 0)
    world.consumer.submit(ReceiveAborted(RequestId("r-it")))
    wait_until(
        lambda: world.stream_state() in (StreamState.CANCELLING, None) or bool(world.consumer.find(ReceiveEnded, "r-it")),
        "the cancel at the producer",
    )
    if wrong is Wrong.POST_FAILS:
        # Nothing more of it will be posted, so it is the post of another one that fails meanwhile.
        world.request("bystander", DST_BYSTANDER)
        world.compute_all("bystander", SRC_BYSTANDER)
        wait_until(lambda: world.wire.posted == 1, "a post that fails")
    world.wire.become(None if wrong is Wrong.POST_FAILS else WRITE_FAULTS.get(wrong))
    world.compute("it", SRC, 2)


def check_end(world: World, name: str, status: ReceiveStatus, src: list[int], dst: list[int]) -> None:
    """The request ends as expected, and its blocks come back."""
    ended = world.consumer.expect(ReceiveEnded, f"r-{name}")
    assert ended.status is status, f"{ended.status}: {ended.error}"
    if status is ReceiveStatus.RECEIVED:
        assert ended.blocks_safe
        assert world.same_bytes(src, dst)
    else:
        error = ended.error
        assert isinstance(error, TransferCancelled if status is ReceiveStatus.CANCELLED else TransferError), error
        assert isinstance(error, KvPushError)
        assert error.message
    if not ended.blocks_safe:
        world.consumer.expect(BlocksSafe, f"r-{name}")
    world.take_back(dst)


def run_cell(wrong: Wrong, phase: Phase, by: By) -> None:
    with world_of(wrong, by) as world:
        world.transfers_again()
        world.take_back(DST_AFTER)
        status = ReceiveStatus.RECEIVED if wrong in HARMLESS else ReceiveStatus.FAILED
        if phase is Phase.FENCE:
            status = ReceiveStatus.CANCELLED
            fence_that_goes_wrong(world, wrong, by)
        else:
            transfer_that_goes_wrong(world, wrong, phase, by)
        check_end(world, "it", status, SRC, DST)
        if wrong is Wrong.POST_FAILS and phase is Phase.FENCE:
            check_end(world, "bystander", ReceiveStatus.FAILED, SRC_BYSTANDER, DST_BYSTANDER)
            world.producer.expect(SourceReleased, "s-bystander")
        world.wire.land_what_may()
        assert world.untouched(but=[]), LANDED
        world.producer.expect(SourceReleased, "s-it")
        world.network.set_faults(None)
        world.wire.disarm()
        world.transfers_again()
        assert world.untouched(but=DST_AFTER), LANDED
        wait_until(world.nothing_left, "everything to have ended on both sides")
        restarts = [party.endpoint.restarts for party in (world.producer, world.consumer)]
        assert restarts == [wrong is Wrong.RELEASE_REFUSED, 0], f"submitters have crashed and started again: {restarts}"
        assert world.close() == (True, True)


@pytest.mark.parametrize("by", By, ids=lambda by: by.value)
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name.lower())
@pytest.mark.parametrize("wrong", Wrong, ids=lambda wrong: wrong.name.lower())
def test_a_transfer_that_goes_wrong(wrong: Wrong, phase: Phase, by: By) -> None:
    run_cell(wrong, phase, by)


# --- the matrix finds what it is for -----------------------------------------------------------------------------------


def a_failure_is_a_fence(patch: pytest.MonkeyPatch) -> None:
    """A write that has failed and may still land is taken for one that is over."""
    inner: Any = ProducerMachine._write_ended

    def write_ended(self: Any, *args: Any, may_land: bool = False) -> None:
        inner(self, *args)

    patch.setattr(ProducerMachine, "_write_ended", write_ended)


def connections_stay_open(patch: pytest.MonkeyPatch) -> None:
    """Nobody closes a connection under a write that never ends."""
    inner: Any = Submitter._remove_peer
    patch.setattr(Submitter, "_remove_peer", lambda self, effect: None if effect.cut else inner(self, effect))


def no_wait_for_a_fence(patch: pytest.MonkeyPatch) -> None:
    """The consumer gives blocks back as soon as it has cancelled."""
    patch.setattr(ConsumerMachine, "_quiet", lambda self, receive, now: not receive.fence_running)


def an_end_that_is_told_twice_counts(patch: pytest.MonkeyPatch) -> None:
    """The submitter believes whatever the transport says that has ended."""
    patch.setattr(Submitter, "__init__", _forgiving(Submitter.__init__))


def _forgiving(inner: Any) -> Any:
    class Everything(dict[Any, float]):
        def pop(self, key: Any, *default: Any) -> float:
            return super().pop(key, 0.0)

    def init(self: Any, *args: Any, **more: Any) -> None:
        inner(self, *args, **more)
        self._post_s = Everything()

    return init


PLANTS = (
    (a_failure_is_a_fence, Wrong.FAILS, Phase.LAST, By.PRODUCER, LANDED),
    (connections_stay_open, Wrong.NEVER_ENDS, Phase.BETWEEN, By.PRODUCER, LANDED),
    (no_wait_for_a_fence, Wrong.NEVER_ENDS, Phase.FENCE, By.CONSUMER, LANDED),
    (an_end_that_is_told_twice_counts, Wrong.TOLD_TWICE, Phase.BETWEEN, By.PRODUCER, CRASHED),
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant[0].__name__)
def test_a_protection_that_is_missing_is_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, wrong, phase, by, said = plant
    remove(monkeypatch)
    with pytest.raises(AssertionError, match=said):
        run_cell(wrong, phase, by)
