# SPDX-License-Identifier: Apache-2.0
"""Promise 5: a crash of the submitter is reported, and it starts again by itself; peers need not be touched."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from kvpush.backends.loopback import LoopbackFabric, LoopbackPlugin, WriteFault
from kvpush.channels.memory import MemoryNetwork
from kvpush.channels.zmq import ZmqChannel
from kvpush.core.events import (
    BlocksSafe,
    Outcome,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SourceAnnounced,
    SourceFinished,
    SourceProgressed,
    SourceReleased,
)
from kvpush.core.ids import BlockTable, PeerAddress, RequestId
from kvpush.core.transport import Region
from kvpush.endpoint import Endpoint, numpy_views
from kvpush.errors import InternalError, SubmitterClosed
from kvpush.settings import Settings
from kvpush.testing.contract import wait_until

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 3, 64, 2, 4, 16
ADDRESS = PeerAddress("prefill", 5000)
NUMBERS = itertools.count()


class Side:
    def __init__(self, fabric: LoopbackFabric, network: MemoryNetwork | None, *, produce: bool, **settings: Any) -> None:
        shape = (BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
        self.caches = {f"layer.{n}": np.zeros(shape, np.float32) for n in range(LAYERS)}
        self.outcomes: list[Outcome] = []
        fields: dict[str, Any] = {"control_port": 0, "lease_s": 1.5, "idle_heartbeat_s": 1.0}
        self.endpoint = Endpoint.open(
            numpy_views(self.caches, block_tokens=BLOCK_TOKENS, num_heads=HEADS),
            produce=produce,
            consume=not produce,
            settings=Settings.load(fields | settings),
            engine_id="pinned" if produce else None,
            plugin=LoopbackPlugin(fabric),
            channel=(lambda: network.channel(ADDRESS if produce else None)) if network is not None else None,
        )

    def expect(self, kind: type, request_id: str) -> Any:
        found: list[Any] = []

        def there() -> bool:
            self.endpoint.wait_outcome(0.02)
            self.outcomes += self.endpoint.drain()
            name = "source_id" if kind is SourceReleased else "request_id"
            found[:] = [o for o in self.outcomes if isinstance(o, kind) and getattr(o, name) == request_id]
            return bool(found)

        wait_until(there, f"{kind.__name__} of {request_id}; have {self.outcomes}")
        assert len(found) == 1, "reported once"
        return found[0]


class Pair:
    def __init__(self, channel: str, **settings: Any) -> None:
        self.fabric = LoopbackFabric()
        network = MemoryNetwork() if channel == "memory" else None
        self.producer = Side(self.fabric, network, produce=True, **settings)
        self.consumer = Side(self.fabric, network, produce=False, **settings)
        address = self.producer.endpoint.address
        assert address is not None
        self.address = address

    def request(self, name: str, blocks: list[int]) -> None:
        event = ReceiveRequested(RequestId(f"r-{name}"), self.address, (name,), b"d", 8, 0, table(blocks))
        self.consumer.endpoint.submit(event)

    def announce(self, name: str) -> None:
        self.producer.endpoint.submit(SourceAnnounced(RequestId(f"s-{name}"), (name,), b"d", 8))

    def compute(self, name: str, blocks: list[int]) -> None:
        rng = np.random.default_rng(next(NUMBERS))
        for cache in self.producer.caches.values():
            cache[blocks] = rng.random(cache[blocks].shape, np.float32)
        self.producer.endpoint.submit(SourceProgressed(RequestId(f"s-{name}"), 0, LAYERS, 8, table(blocks)))
        self.producer.endpoint.submit(SourceFinished(RequestId(f"s-{name}")))

    def transfer(self, name: str, src: list[int], dst: list[int]) -> ReceiveStatus:
        self.request(name, dst)
        self.announce(name)
        self.compute(name, src)
        ended = self.consumer.expect(ReceiveEnded, f"r-{name}")
        self.producer.expect(SourceReleased, f"s-{name}")
        if ended.status is ReceiveStatus.RECEIVED:
            for mine, theirs in zip(self.producer.caches.values(), self.consumer.caches.values(), strict=True):
                assert (mine[src] == theirs[dst]).all()
        status: ReceiveStatus = ended.status
        return status

    def transfers_until_one_works(self) -> None:
        """The peer learns of a restart by the answer to its next message: that costs one transfer at most."""
        tries = [self.transfer(f"again-{next(NUMBERS)}", [5, 6], [7, 8]) for _ in range(2)]
        assert tries[-1] is ReceiveStatus.RECEIVED


def table(blocks: list[int]) -> BlockTable:
    return (np.array(blocks, np.int32),)


def crash(side: Side) -> None:
    machine = side.endpoint.submitter.producer or side.endpoint.submitter.consumer
    assert machine is not None

    def handle(event: Any, now: float) -> Any:
        raise InternalError("planted")

    machine.handle = handle  # type: ignore[method-assign]
    machine.on_deadline = lambda now: handle(None, now)  # type: ignore[method-assign]
    machine.next_deadline = lambda: 0.0  # type: ignore[method-assign]
    side.endpoint.submitter.wake()


def wait_for_restart(side: Side, count: int = 1) -> None:
    wait_until(lambda: side.endpoint.restarts == count and side.endpoint.error is None, "the endpoint to start again")


@pytest.mark.parametrize("channel", ["memory", "zmq"])
@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_requests_fall_back_and_then_transfers_work_again(channel: str, who: str) -> None:
    pair = Pair(channel)
    assert pair.transfer("before", [1, 2], [3, 4]) is ReceiveStatus.RECEIVED
    counted = pair.producer.endpoint.submitter.counters.messages_in
    pair.request("lost", [10, 11])
    pair.announce("lost")
    producer = pair.producer.endpoint.submitter.producer
    assert producer is not None
    wait_until(lambda: producer.num_streams == 1, "the registration")
    crash(pair.producer if who == "producer" else pair.consumer)
    ended = pair.consumer.expect(ReceiveEnded, "r-lost")
    assert ended.status is ReceiveStatus.FAILED
    if not ended.blocks_safe:
        pair.consumer.expect(BlocksSafe, "r-lost")
    wait_for_restart(pair.producer if who == "producer" else pair.consumer)
    if who == "consumer":
        pair.compute("lost", [12, 13])
    pair.producer.expect(SourceReleased, "s-lost")
    assert pair.producer.endpoint.address == pair.address
    pair.transfers_until_one_works()
    assert pair.producer.endpoint.submitter.counters.messages_in > counted, "counters go on"
    assert pair.consumer.endpoint.close()
    assert pair.producer.endpoint.close()


def test_what_the_channel_has_counted_is_not_lost() -> None:
    pair = Pair("zmq")
    channel = pair.producer.endpoint.submitter.channel
    assert isinstance(channel, ZmqChannel)
    channel.counters.flooders = 3
    crash(pair.producer)
    wait_for_restart(pair.producer)
    again = pair.producer.endpoint.submitter.channel
    assert isinstance(again, ZmqChannel)
    assert again is not channel
    again.counters.flooders += 1
    assert pair.producer.endpoint.submitter.channel_counts()["disconnected_peers"] == 4
    pair.consumer.endpoint.close()
    pair.producer.endpoint.close()


def test_what_was_in_flight_at_the_crash_reaches_nobody_afterwards() -> None:
    pair = Pair("memory")
    pair.fabric.set_faults(lambda posting: WriteFault(never=True))
    pair.request("lost", [10, 11])
    pair.announce("lost")
    pair.compute("lost", [12, 13])
    wait_until(lambda: pair.producer.endpoint.submitter.transport.num_in_flight > 0, "a write in flight")
    crash(pair.producer)
    wait_for_restart(pair.producer)
    pair.fabric.set_faults(None)
    assert not pair.consumer.expect(ReceiveEnded, "r-lost").blocks_safe
    pair.consumer.expect(BlocksSafe, "r-lost")
    pair.transfers_until_one_works()
    for cache in pair.consumer.caches.values():
        assert not cache[[10, 11]].any()
    pair.consumer.endpoint.close()
    pair.producer.endpoint.close()


def test_an_endpoint_that_crashes_again_and_again_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpush.endpoint._FIRST_BACK_OFF_S", 0.01)
    pair = Pair("memory")
    for count in range(5):
        pair.request(f"lost-{count}", [1, 2])
        crash(pair.consumer)
        pair.consumer.expect(ReceiveEnded, f"r-lost-{count}")
        wait_for_restart(pair.consumer, count + 1)
    pair.request("last", [1, 2])
    crash(pair.consumer)
    pair.consumer.expect(ReceiveEnded, "r-last")
    wait_until(lambda: pair.consumer.endpoint.error is not None, "the error is shown")
    with pytest.raises(SubmitterClosed, match="planted"):
        pair.request("refused", [1, 2])
    for count in range(5):
        pair.consumer.expect(BlocksSafe, f"r-lost-{count}")
    assert pair.consumer.endpoint.close() is False
    assert pair.consumer.endpoint.restarts == 5
    assert pair.producer.endpoint.close()


def test_closing_while_it_waits_to_start_again() -> None:
    pair = Pair("memory")
    pair.announce("s")
    crash(pair.producer)
    pair.producer.expect(SourceReleased, "s-s")
    assert pair.producer.endpoint.close() is False
    assert pair.producer.endpoint.close() is False
    assert pair.producer.endpoint.restarts == 0
    assert pair.consumer.endpoint.close()


def test_a_channel_that_was_given_as_it_is_can_not_be_made_again() -> None:
    network = MemoryNetwork()
    views = numpy_views({"layer.0": np.zeros((4, 1, 4, 4), np.float32)}, block_tokens=4, num_heads=1)
    endpoint = Endpoint.open(views, produce=False, plugin=LoopbackPlugin(), channel=network.channel(None))
    assert endpoint.submitter.consumer is not None
    endpoint.submitter.consumer.handle = None  # type: ignore[method-assign,assignment]
    endpoint.submit(ReceiveRequested(RequestId("r"), ADDRESS, ("k",), b"d", 4, 0, table([1])))
    wait_until(lambda: endpoint.error is not None, "the crash")
    thread = endpoint.submitter._thread
    assert thread is not None
    thread.join(10.0)
    assert not thread.is_alive()
    assert endpoint.restarts == 0
    endpoint.close()


def test_slots_outlive_a_crash_for_as_long_as_peers_may_write_to_them() -> None:
    """Whoever has a lease may post until it ends, also into a slot, and that memory must not be another one's by then."""
    pair = Pair("memory", staging="on")
    pair.transfers_until_one_works()
    endpoint = pair.consumer.endpoint
    begun = time.monotonic()
    crash(pair.consumer)
    wait_until(lambda: endpoint.restarts == 1, "the restart")
    (crashed,) = endpoint._retired
    memory = crashed.keepalive
    assert isinstance(memory, Region)
    assert isinstance(endpoint.submitter.keepalive, Region)
    assert memory.address != endpoint.submitter.keepalive.address
    kept_s = 0.0

    def given_up() -> bool:
        nonlocal kept_s
        endpoint.drain()
        if endpoint._retired:
            kept_s = time.monotonic() - begun
        return not endpoint._retired

    wait_until(given_up, "the crashed one to be given up")
    assert kept_s > 1.0, "the lease is 1.5 s"
    endpoint.close()
    pair.producer.endpoint.close()
