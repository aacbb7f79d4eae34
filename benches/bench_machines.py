# SPDX-License-Identifier: Apache-2.0
"""The machines with many transfers and peers alive. What an event costs should not depend on how many there are.

Each figure is of a burst of events: ``us_per_event`` in ``extra_info``. Compare the two sizes of each bench.
"""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from common import ConsumerWorld, ProducerWorld, posted, sent

from kvpush.core import wire
from kvpush.core.effects import PostWrite, Report
from kvpush.core.events import MessageReceived, SourceFinished, WriteCompleted
from kvpush.core.ids import RequestId, SessionId
from kvpush.core.lease import Deadlines

SIZES = [pytest.param(n, p, id=f"transfers={n}-peers={p}") for n, p in ((100, 10), (10_000, 1_000))]
LAYERS = 32
BURST = 200
ROUNDS = 5


def measure(benchmark: Any, burst: Callable[[], int], rounds: int = ROUNDS) -> None:
    """Time bursts of events; a burst says how many they were, the same each time."""
    gc.collect()
    counts: list[int] = []
    benchmark.pedantic(lambda: counts.append(burst()), rounds=rounds, warmup_rounds=1)
    assert min(counts) > 0
    benchmark.extra_info["events"] = counts[-1]
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_event"] = benchmark.stats.stats.median / counts[-1] * 1e6
        benchmark.extra_info["events_per_s"] = counts[-1] / benchmark.stats.stats.median


class Waiting:
    """Every transfer is joined and has its first chunk to post, and the credit is used up."""

    def __init__(self, num_transfers: int, num_peers: int) -> None:
        self.world = ProducerWorld(num_peers=num_peers, num_layers=LAYERS)
        self.flying: deque[PostWrite] = deque()
        self.numbers = itertools.count()
        self.grow(num_transfers)

    def grow(self, count: int) -> None:
        """More of them. Nothing is posted meanwhile: kvpush had versions in which that took hours."""
        machine = self.world.machine
        pump, machine._pump = machine._pump, lambda now: None  # type: ignore[method-assign]
        for _ in range(count):
            number = next(self.numbers)
            self.world.register(number)
            self.world.announce(number)
            # Large enough that no run of this module comes to the end of it: 256 tokens in 32 layers of 32 KiB a block.
            self.world.progress(number, 0, LAYERS, 256, blocks=True)
        machine._pump = pump  # type: ignore[method-assign]
        self.flying += posted(self.world.wait(0.0))


@pytest.fixture(scope="module")
def waiting_worlds() -> dict[tuple[int, int], Waiting]:
    return {}


@pytest.fixture
def waiting(request: pytest.FixtureRequest, waiting_worlds: dict[tuple[int, int], Waiting]) -> Waiting:
    key = request.param
    if key not in waiting_worlds:
        waiting_worlds[key] = Waiting(*key)
    return waiting_worlds[key]


WAITING = pytest.mark.parametrize("waiting", [pytest.param(size.values, id=size.id) for size in SIZES], indirect=True)


@WAITING
def bench_producer_write_completed(benchmark: Any, waiting: Waiting) -> None:
    """A write ends, the credit goes to the most urgent of all that wait."""
    before = waiting.world.machine.counters.bytes_written

    def burst() -> int:
        for _ in range(20):
            write = waiting.flying.popleft()
            waiting.flying += posted(waiting.world.do(WriteCompleted(write.write_id)))
        return 20

    measure(benchmark, burst)
    assert waiting.world.machine.counters.bytes_written > before
    assert waiting.world.machine.num_in_flight == len(waiting.flying) > 0


@WAITING
def bench_producer_small_news(benchmark: Any, waiting: Waiting) -> None:
    """Heartbeats are answered while nothing can be posted."""
    world = waiting.world

    def burst() -> int:
        for number in range(20):
            session = 1 + number % world.num_peers
            effects = world.do(MessageReceived(SessionId(session), wire.HeartbeatAck(session, seq=world.seq[session])))
            assert not posted(effects)
        return 20

    measure(benchmark, burst)


@WAITING
def bench_producer_heartbeats_due(benchmark: Any, waiting: Waiting) -> None:
    """Half a second passes: a heartbeat to every peer, and its answer."""
    world = waiting.world

    def burst() -> int:
        before = world.num_events
        waiting.flying += posted(world.wait(0.51))
        return world.num_events - before

    measure(benchmark, burst)
    assert world.machine.counters.sessions_lost == 0


@pytest.mark.parametrize(("transfers", "peers"), SIZES)
def bench_producer_whole_transfers(benchmark: Any, transfers: int, peers: int) -> None:
    """Transfers from registration to release, layer by layer in two chunks, while all the others wait for their prefill."""
    world = ProducerWorld(num_peers=peers, num_layers=LAYERS)
    numbers = itertools.count()
    for _ in range(transfers):
        world.register(next(numbers))

    def burst() -> int:
        before = world.num_events
        for _ in range(5):
            number = next(numbers)
            world.register(number)
            writes = posted(world.announce(number))
            for token_hi in (256, 512):
                for layer in range(LAYERS):
                    writes += posted(world.progress(number, layer, layer + 1, token_hi, blocks=layer == 0 and token_hi == 256))
            effects = [effect for write in writes for effect in world.do(WriteCompleted(write.write_id))]
            (commit,) = sent(effects, wire.Commit)
            assert commit.coverage[0].volume == LAYERS * 8 * 512
            (report,) = [e for e in world.do(SourceFinished(RequestId(f"s-{number}"))) if isinstance(e, Report)]
            assert report.outcome.error is None
        return world.num_events - before

    measure(benchmark, burst)
    assert world.machine.num_streams == transfers


@pytest.mark.parametrize(("transfers", "peers"), SIZES)
def bench_consumer_whole_transfers(benchmark: Any, transfers: int, peers: int) -> None:
    """Receives from the request to the report, while all the others wait."""
    world = ConsumerWorld(num_peers=peers, num_layers=LAYERS)
    numbers = itertools.count()
    for _ in range(transfers):
        world.request(next(numbers))

    def burst() -> int:
        before = world.num_events
        for _ in range(50):
            number = next(numbers)
            world.request(number)
            world.streaming(number)
            (report,) = [effect for effect in world.commit(number) if isinstance(effect, Report)]
            assert report.outcome.num_tokens == world.num_tokens
        return world.num_events - before

    measure(benchmark, burst)
    assert world.machine.num_receives == transfers


@pytest.mark.parametrize(("transfers", "peers"), SIZES)
def bench_consumer_heartbeats(benchmark: Any, transfers: int, peers: int) -> None:
    world = ConsumerWorld(num_peers=peers, num_layers=LAYERS)
    for number in range(transfers):
        world.request(number)
        world.streaming(number)
    seqs = itertools.count(2)

    def burst() -> int:
        seq = next(seqs)
        for number in range(BURST):
            session = 1 + number % peers
            (answer,) = sent(world.say(wire.Heartbeat(session, seq=seq)), wire.HeartbeatAck)
            assert answer.seq == seq
            assert world.machine.next_deadline() is not None
        return BURST

    measure(benchmark, burst)


@pytest.mark.parametrize("ranks", [1, 8, 64], ids=lambda n: f"transfers=100-ranks={n}")
def bench_consumer_register_with_ranks(benchmark: Any, ranks: int) -> None:
    """One request against a producer of many ranks: an event that sends one message a rank."""
    world = ConsumerWorld(num_peers=1, num_layers=64, num_ranks=ranks)
    numbers = itertools.count()
    for _ in range(100):
        world.request(next(numbers))

    def burst() -> int:
        for _ in range(20):
            assert len(sent(world.request(next(numbers)), wire.RegisterBlocks)) == ranks
        return 20

    measure(benchmark, burst)


@pytest.mark.parametrize("keys", [100, 10_000], ids=lambda n: f"keys={n}")
def bench_deadlines(benchmark: Any, keys: int) -> None:
    """Every key's deadline moves to later again and again; the earliest is asked each time."""
    deadlines: Deadlines[int] = Deadlines()
    clock = itertools.count()
    for key in range(keys):
        deadlines.set(key, next(clock))

    def burst() -> int:
        for key in range(1000):
            deadlines.set(key * 7919 % keys, next(clock))
            assert deadlines.next() is not None
        return 1000

    measure(benchmark, burst)
    assert len(deadlines) == keys


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("tokens", [512, 8192], ids=lambda n: f"layers={LAYERS}-tokens={n}")
def bench_memory_per_transfer(benchmark: Any, side: str, tokens: int) -> None:
    """``bytes_per_transfer``: what a live transfer keeps, stories and block tables included. Its time means nothing."""
    count = 200
    world: Any
    if side == "producer":
        world = ProducerWorld(num_peers=4, num_layers=LAYERS, num_tokens=tokens)
    else:
        world = ConsumerWorld(num_peers=4, num_layers=LAYERS, num_tokens=tokens)

    def grow(first: int) -> None:
        for number in range(first, first + count):
            if side == "producer":
                world.register(number)
                world.announce(number)
                world.progress(number, 0, LAYERS, 256, blocks=True)
            else:
                world.request(number)
        if side == "consumer":
            world.registered.clear()

    grow(0)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        benchmark.pedantic(grow, args=(count,), rounds=1)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0 < used / count < 64 << 10
    benchmark.extra_info["bytes_per_transfer"] = round(used / count)
