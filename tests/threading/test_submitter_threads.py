# SPDX-License-Identifier: Apache-2.0
"""Submitters with their threads, over the in-process channel and transport: real bytes, real races.

Every wait has a deadline.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpush.backends.loopback import LoopbackFabric, Posting, WriteFault
from kvpush.channels.memory import Fault, MemoryNetwork, Passing
from kvpush.core import wire
from kvpush.core.consumer import ConsumerConfig, ConsumerMachine
from kvpush.core.events import (
    BlocksSafe,
    Outcome,
    ReceiveAborted,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SourceAborted,
    SourceAnnounced,
    SourceFinished,
    SourceProgressed,
    SourceReleased,
)
from kvpush.core.ids import AgentName, BlockTable, EngineId, PeerAddress, RequestId
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import SchedulingPolicy
from kvpush.core.submitter import Submitter
from kvpush.core.transport import Region
from kvpush.errors import InternalError, PeerLost, SubmitterClosed
from kvpush.testing.contract import DEADLINE_S, wait_until
from kvpush.testing.simulation import toy_layout

ADDRESS = PeerAddress("prefill", 5000)
LAYERS, NUM_BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 4, 256, 4, 128
NAMES = itertools.count()


class Side:
    """A cache of real bytes, a submitter, and everything that it has reported."""

    def __init__(self, network: MemoryNetwork, fabric: LoopbackFabric, *, produces: bool, **config: Any) -> None:
        name = AgentName(f"{'p' if produces else 'c'}-{next(NAMES)}")
        self.cache = np.zeros((LAYERS * 2 * (NUM_BLOCKS + 1)) * BLOCK_BYTES, np.uint8)
        base = self.cache.__array_interface__["data"][0]
        self.base = base
        self.layout = toy_layout(range(LAYERS), base=base, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
        transport = fabric.transport(name)
        transport.register_memory([Region(base, self.cache.nbytes, keepalive=self.cache)])
        producer = consumer = None
        if produces:
            policy = config.pop("policy", SchedulingPolicy(min_write_bytes=1024, max_write_bytes=4096))
            producer = ProducerMachine(
                ProducerConfig(EngineId("p"), name, transport.name, policy=policy, **config), self.layout
            )
        else:
            numbers = itertools.count(1000 * next(NAMES) + 1)
            consumer = ConsumerMachine(
                ConsumerConfig(
                    EngineId("c"),
                    name,
                    transport.name,
                    transport.metadata(),
                    retry_window_s=transport.capabilities.retry_window_s,
                    **config,
                ),
                self.layout,
                lambda: next(numbers),
            )
        self.submitter = Submitter(
            transport=transport, channel=network.channel(ADDRESS if produces else None), producer=producer, consumer=consumer
        )
        self.outcomes: list[Outcome] = []
        self.submitter.start(name)

    def slab(self, layer: int, content: str, block: int) -> np.ndarray:
        plane = next(p for p in self.layout.layers[layer].planes if p.content == content)
        at = plane.base + block * plane.block_stride - self.base
        return self.cache[at : at + plane.block_bytes]

    def content(self, layer: int, blocks: list[int]) -> bytes:
        return b"".join(self.slab(layer, content, block).tobytes() for content in ("k", "v") for block in blocks)

    def fill(self, layer: int, blocks: list[int], seed: int) -> None:
        rng = np.random.default_rng([seed, layer])
        for content in ("k", "v"):
            for block in blocks:
                self.slab(layer, content, block)[:] = rng.integers(0, 256, BLOCK_BYTES, np.uint8)

    def expect(self, count: int) -> list[Outcome]:
        """Wait for so many outcomes in all."""

        def there() -> bool:
            self.submitter.wait_outcome(0.05)
            self.outcomes += self.submitter.drain()
            return len(self.outcomes) >= count

        wait_until(there, f"{count} outcomes, have {self.outcomes}")
        return self.outcomes

    def ended(self) -> dict[str, ReceiveEnded]:
        return {o.request_id: o for o in self.outcomes if isinstance(o, ReceiveEnded)}

    def close(self) -> bool:
        done = self.submitter.close(DEADLINE_S)
        self.outcomes += self.submitter.drain()
        return done


class Pair:
    def __init__(self, fabric: LoopbackFabric | None = None, *, producer: Any = None, consumer: Any = None) -> None:
        self.network = MemoryNetwork()
        self.fabric = fabric or LoopbackFabric()
        self.producer = Side(self.network, self.fabric, produces=True, **(producer or {}))
        self.consumer = Side(self.network, self.fabric, produces=False, **(consumer or {}))

    def request(self, number: int, dst: list[int], tokens: int) -> None:
        self.consumer.submitter.submit(
            ReceiveRequested(RequestId(f"r{number}"), ADDRESS, (f"t{number}",), b"%d" % number, tokens, 0, table(dst))
        )

    def announce(self, number: int, tokens: int) -> None:
        self.producer.submitter.submit(SourceAnnounced(RequestId(f"s{number}"), (f"t{number}",), b"%d" % number, tokens))

    def compute(self, number: int, src: list[int], tokens: int, *, layers: int = LAYERS) -> None:
        for low in range(0, LAYERS, layers):
            for layer in range(low, low + layers):
                self.producer.fill(layer, src, number)
            new = table(src) if low == 0 else None
            self.producer.submitter.submit(SourceProgressed(RequestId(f"s{number}"), low, low + layers, tokens, new))

    def finish(self, number: int) -> None:
        self.producer.submitter.submit(SourceFinished(RequestId(f"s{number}")))

    def close(self) -> tuple[bool, bool]:
        return self.consumer.close(), self.producer.close()


def table(blocks: list[int]) -> BlockTable:
    return (np.array(blocks, np.int32),)


FABRICS = {
    "instant": lambda: LoopbackFabric(),
    "slow": lambda: LoopbackFabric(latency_s=0.002, bytes_per_s=20e6),
    "target polls": lambda: LoopbackFabric(target_must_poll=True, latency_s=0.001),
}


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize("fabric", list(FABRICS))
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_random_bytes_arrive_as_they_were_sent(fabric: str, layers: int) -> None:
    made = Pair(FABRICS[fabric]())
    rng = np.random.default_rng(layers)
    count, size = 20, 7
    src = rng.permutation(NUM_BLOCKS)[: count * size].reshape(count, size).tolist()
    dst = rng.permutation(NUM_BLOCKS)[: count * size].reshape(count, size).tolist()
    tokens = size * BLOCK_TOKENS - 1
    for number in range(count):
        if number % 2:
            made.request(number, dst[number], tokens)
        made.announce(number, tokens)
        if not number % 2:
            made.request(number, dst[number], tokens)
        made.compute(number, src[number], tokens, layers=layers)
        made.finish(number)
    made.consumer.expect(count)
    made.producer.expect(count)
    assert {o.status for o in made.consumer.ended().values()} == {ReceiveStatus.RECEIVED}
    for number in range(count):
        for layer in range(LAYERS):
            assert made.producer.content(layer, src[number]) == made.consumer.content(layer, dst[number])
    untouched = sorted(set(range(NUM_BLOCKS)) - {block for blocks in dst for block in blocks})
    assert not any(np.frombuffer(made.consumer.content(layer, untouched), np.uint8).any() for layer in range(LAYERS))
    assert made.producer.submitter.num_open == made.consumer.submitter.num_open == 0
    assert made.close() == (True, True)


def test_submitted_from_many_threads_at_once(pair: Pair) -> None:
    count, tokens = 48, 8
    blocks = [[2 * n, 2 * n + 1] for n in range(count)]

    def prefill(numbers: range) -> None:
        for number in numbers:
            pair.announce(number, tokens)
            pair.compute(number, blocks[number], tokens)
            pair.finish(number)

    def decode(numbers: range) -> None:
        for number in numbers:
            pair.request(number, blocks[number], tokens)

    threads = [threading.Thread(target=run, args=(range(k, count, 4),)) for run in (prefill, decode) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    pair.consumer.expect(count)
    pair.producer.expect(count)
    assert {o.status for o in pair.consumer.ended().values()} == {ReceiveStatus.RECEIVED}
    assert (pair.producer.cache == pair.consumer.cache).all()


def test_wait_outcome_wakes_and_times_out(pair: Pair) -> None:
    assert not pair.consumer.submitter.wait_outcome(0.0)
    woken = threading.Event()

    def engine() -> None:
        if pair.consumer.submitter.wait_outcome(DEADLINE_S):
            woken.set()

    thread = threading.Thread(target=engine)
    thread.start()
    pair.request(1, [1, 2], 8)
    pair.announce(1, 8)
    pair.compute(1, [1, 2], 8)
    thread.join(DEADLINE_S)
    assert woken.is_set()


def test_an_aborted_receive_is_fenced_while_a_write_is_stuck(pair: Pair) -> None:
    pair.fabric.set_faults(lambda posting: WriteFault(delay_s=0.3))
    pair.request(1, [1, 2], 8)
    pair.announce(1, 8)
    pair.compute(1, [1, 2], 8)
    wait_until(lambda: pair.producer.submitter.transport.num_in_flight > 0, "a write in flight")
    pair.consumer.submitter.submit(ReceiveAborted(RequestId("r1")))
    (ended,) = pair.consumer.expect(1)
    assert isinstance(ended, ReceiveEnded)
    assert ended.status is ReceiveStatus.CANCELLED
    assert pair.producer.submitter.transport.num_in_flight == 0, "safe only when nothing is in flight"


def test_a_write_that_fails_is_told_to_both(pair: Pair) -> None:
    failing = iter([True])

    def rule(posting: Posting) -> WriteFault | None:
        return WriteFault(fail_post="planted") if next(failing, False) else None

    pair.fabric.set_faults(rule)
    for number in (1, 2):
        pair.request(number, [2 * number, 2 * number + 1], 8)
        pair.announce(number, 8)
        pair.compute(number, [2 * number, 2 * number + 1], 8)
        pair.finish(number)
    pair.consumer.expect(2)
    pair.producer.expect(2)
    assert sorted(o.status.value for o in pair.consumer.ended().values()) == ["failed", "received"]


def test_a_producer_abort_is_told(pair: Pair) -> None:
    pair.request(1, [1, 2], 8)
    pair.announce(1, 8)
    pair.producer.submitter.submit(SourceAborted(RequestId("s1"), "client gone"))
    (ended,) = pair.consumer.expect(1)
    assert isinstance(ended, ReceiveEnded)
    assert ended.status is ReceiveStatus.FAILED
    assert ended.error is not None
    assert "client gone" in ended.error.message


def test_lost_and_repeated_messages() -> None:
    pair = Pair(consumer={"retry_s": 0.1})
    passed = itertools.count()

    def rule(passing: Passing) -> Fault:
        message = wire.decode(passing.data)
        if isinstance(message, wire.Hello | wire.Welcome):
            return Fault()
        return Fault(copies=(0, 1, 2)[next(passed) % 3])

    pair.network.set_faults(rule)
    for number in range(8):
        pair.request(number, [2 * number, 2 * number + 1], 8)
        pair.announce(number, 8)
        pair.compute(number, [2 * number, 2 * number + 1], 8)
        pair.finish(number)
    pair.consumer.expect(8)
    pair.network.set_faults(None)
    pair.producer.expect(8)
    for number, ended in pair.consumer.ended().items():
        if ended.status is ReceiveStatus.RECEIVED:
            blocks = [2 * int(number[1:]), 2 * int(number[1:]) + 1]
            assert all(pair.producer.content(n, blocks) == pair.consumer.content(n, blocks) for n in range(LAYERS))
    pair.close()


def test_garbage_from_strangers_disturbs_nobody() -> None:
    # Patient: strangers that never pause leave little of a busy machine to heartbeats, and that is not what is asked here.
    pair = Pair(producer={"peer_timeout_s": DEADLINE_S}, consumer={"peer_timeout_s": DEADLINE_S})
    stop = threading.Event()

    def stranger() -> None:
        rng = np.random.default_rng(1)
        while not stop.is_set():
            channel = pair.network.channel()
            for _ in range(20):
                link = channel.connect(ADDRESS)
                channel.send(link, rng.bytes(40))
                channel.send(link, b"KVP\x01" + rng.bytes(40))
                channel.send(link, wire.encode(wire.Cancel(int(rng.integers(1, 5000)), request_id="r1", epoch=1)))
                channel.send(link, wire.encode(wire.Goodbye(int(rng.integers(1, 5000)))))
            channel.close()

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        for number in range(20):
            pair.request(number, [2 * number, 2 * number + 1], 8)
            pair.announce(number, 8)
            pair.compute(number, [2 * number, 2 * number + 1], 8)
            pair.finish(number)
        pair.consumer.expect(20)
    finally:
        stop.set()
        thread.join(DEADLINE_S)
    assert [o.error for o in pair.consumer.ended().values() if o.status is not ReceiveStatus.RECEIVED] == []
    assert pair.producer.submitter.counters.bad_frames > 0
    pair.close()


def test_close_with_everything_open() -> None:
    made = Pair(LoopbackFabric(latency_s=0.05))
    for number in range(6):
        made.request(number, [2 * number, 2 * number + 1], 8)
        if number > 1:
            made.announce(number, 8)
        if number > 3:
            made.compute(number, [2 * number, 2 * number + 1], 8)
            made.finish(number)
    wait_until(lambda: made.producer.submitter.transport.num_in_flight > 0, "a write in flight")
    assert made.close() == (True, True)
    ended = made.consumer.ended()
    assert sorted(ended) == [f"r{n}" for n in range(6)]
    assert all(o.blocks_safe for o in ended.values())
    assert {o.status for o in ended.values()} <= {ReceiveStatus.CANCELLED, ReceiveStatus.RECEIVED}
    released = [o.source_id for o in made.producer.outcomes if isinstance(o, SourceReleased)]
    assert sorted(released) == ["s2", "s3", "s4", "s5"]
    assert made.close() == (True, True), "closing twice is allowed"
    for side in (made.producer, made.consumer):
        assert side.submitter.num_open == 0
        with pytest.raises(SubmitterClosed):
            made.announce(9, 8) if side is made.producer else made.request(9, [1, 2], 8)


def test_the_producer_closes_first() -> None:
    made = Pair()
    made.request(1, [1, 2], 8)
    made.announce(1, 8)
    wait_until(lambda: made.producer.submitter.counters.messages_in >= 2, "the registration")
    assert made.producer.close()
    (ended,) = made.consumer.expect(1)
    assert isinstance(ended, ReceiveEnded)
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.FAILED, True)
    assert made.consumer.close()


def test_what_is_accepted_while_closing_is_reported() -> None:
    for _ in range(10):
        made = Pair()
        accepted: list[str] = []
        go = threading.Event()

        def engine(made: Pair = made, accepted: list[str] = accepted, go: threading.Event = go) -> None:
            for number in range(100):
                try:
                    made.request(number, [number], 4)
                except SubmitterClosed:
                    return
                accepted.append(f"r{number}")
                if number == 5:
                    go.set()

        thread = threading.Thread(target=engine)
        thread.start()
        assert go.wait(DEADLINE_S)
        assert made.consumer.close()
        thread.join(DEADLINE_S)
        assert sorted(made.consumer.ended()) == sorted(accepted)
        made.producer.close()


@pytest.mark.parametrize("planted", [InternalError("planted"), ZeroDivisionError("planted")], ids=["internal", "any"])
def test_a_crash_of_the_consumer_is_reported_and_nothing_hangs(planted: Exception) -> None:
    made = Pair(consumer={"lease_s": 1.2})
    for number in range(3):
        made.request(number, [2 * number, 2 * number + 1], 8)
    machine = made.consumer.submitter.consumer
    assert machine is not None
    inner = machine.handle

    def handle(event: Any, now: float) -> Any:
        if isinstance(event, ReceiveAborted):
            raise planted
        return inner(event, now)

    machine.handle = handle  # type: ignore[method-assign]
    made.consumer.submitter.submit(ReceiveAborted(RequestId("r0")))
    made.consumer.expect(3)
    assert all((o.status, o.blocks_safe) == (ReceiveStatus.FAILED, False) for o in made.consumer.ended().values())
    assert all(isinstance(o.error, PeerLost) for o in made.consumer.ended().values())
    wait_until(lambda: made.consumer.submitter.error is not None, "the error is shown")
    with pytest.raises(SubmitterClosed, match="planted"):
        made.request(7, [1, 2], 8)
    assert made.consumer.close() is False
    made.consumer.expect(6)
    assert sorted(o.request_id for o in made.consumer.outcomes if isinstance(o, BlocksSafe)) == ["r0", "r1", "r2"]
    assert made.producer.close()


def test_a_crash_of_the_producer_fails_its_consumers_and_releases_its_sources() -> None:
    made = Pair(consumer={"lease_s": 1.2})
    made.request(1, [1, 2], 8)
    made.announce(1, 8)
    wait_until(lambda: made.producer.submitter.counters.messages_in >= 2, "the registration")
    made.producer.submitter.transport.post_write = None  # type: ignore[method-assign,assignment]
    made.producer.submitter.transport.poll = None  # type: ignore[method-assign,assignment]
    machine = made.producer.submitter.producer
    assert machine is not None
    machine.handle = None  # type: ignore[method-assign,assignment]
    made.compute(1, [1, 2], 8)
    (released,) = made.producer.expect(1)
    assert isinstance(released, SourceReleased)
    assert released.error is not None
    (ended,) = made.consumer.expect(1)[:1]
    assert isinstance(ended, ReceiveEnded)
    assert ended.status is ReceiveStatus.FAILED
    assert made.producer.close() is False
    made.consumer.close()


def test_close_gives_up_in_time_when_a_write_is_stuck() -> None:
    made = Pair()
    made.fabric.set_faults(lambda posting: WriteFault(never=True))
    made.request(1, [1, 2], 8)
    made.announce(1, 8)
    made.compute(1, [1, 2], 8)
    made.finish(1)
    wait_until(lambda: made.producer.submitter.transport.num_in_flight > 0, "a write in flight")
    assert made.producer.submitter.close(0.5) is False
    made.producer.expect(1)
    assert made.consumer.submitter.close(0.5) is False
    made.consumer.expect(1)
    assert not made.consumer.ended()["r1"].blocks_safe


def test_an_idle_submitter_takes_no_steps() -> None:
    made = Pair(producer={"idle_heartbeat_s": 30.0})
    submitters = made.producer.submitter, made.consumer.submitter

    def steady() -> bool:
        before = [s.counters.steps for s in submitters]
        time.sleep(0.2)
        return before == [s.counters.steps for s in submitters]

    assert steady() or steady(), "nothing was ever asked of it"
    made.request(1, [1, 2], 8)
    made.announce(1, 8)
    made.compute(1, [1, 2], 8)
    made.finish(1)
    made.consumer.expect(1)
    made.producer.expect(1)
    # The heartbeat that was due while it was busy, and its answer; then none for 30 s.
    wait_until(lambda: all(steady() for _ in range(4)), "no steps within 0.8 s", pause_s=0.1)
    assert steady()
    assert made.close() == (True, True)


def test_unstarted_submitters_close_as_well() -> None:
    network, fabric = MemoryNetwork(), LoopbackFabric()
    side = Side.__new__(Side)
    layout = toy_layout(range(1), base=4096, num_blocks=4)
    transport = fabric.transport("x")
    side.submitter = Submitter(
        transport=transport,
        channel=network.channel(),
        consumer=ConsumerMachine(ConsumerConfig(EngineId("c"), AgentName("x"), "loopback", b""), layout, lambda: 1),
    )
    assert side.submitter.close(0.0)
