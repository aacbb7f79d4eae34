# SPDX-License-Identifier: Apache-2.0
"""Two honest endpoints with real sockets and real bytes, between which good transfers run while a test misbehaves."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvpush.backends.base import BackendPlugin
from kvpush.backends.loopback import LoopbackPlugin
from kvpush.channels.zmq import ZmqChannel
from kvpush.core.digest import prompt_digest
from kvpush.core.events import (
    Outcome,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SourceAnnounced,
    SourceFinished,
    SourceProgressed,
    SourceReleased,
)
from kvpush.core.ids import PeerAddress, RequestId
from kvpush.endpoint import Endpoint, numpy_views
from kvpush.settings import Settings
from kvpush.testing.contract import wait_until

LAYERS, NUM_BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 2, 64, 2, 16, 8
TRAFFIC_SLOTS = 4
"""Of 8: the traffic's. The others' blocks are for what a test does meanwhile."""
SECRET = "a secret that only the tests' honest endpoints know"

_numbers = itertools.count()
_wakers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Of all parties' channels. Its descriptor lives as long as references to it: in whoever runs the test, or uncollected."""


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - len(_wakers)


class Party:
    """An endpoint, its cache, and what it has reported."""

    def __init__(self, *, produce: bool, consume: bool, backend: BackendPlugin | None = None, **settings: Any) -> None:
        self.caches = {
            f"layer.{idx}": np.zeros((NUM_BLOCKS, HEADS, BLOCK_TOKENS, CONTENT), np.float32) for idx in range(LAYERS)
        }
        views = numpy_views(self.caches, order="BHNC", block_tokens=BLOCK_TOKENS, num_heads=HEADS)
        self.endpoint = Endpoint.open(
            views,
            produce=produce,
            consume=consume,
            settings=Settings(**{"control_port": 0, **settings}),
            plugin=backend or LoopbackPlugin(),
        )
        self.outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        _wakers.add(self.channel._waker)

    @property
    def address(self) -> PeerAddress:
        assert self.endpoint.address is not None
        return PeerAddress("127.0.0.1", self.endpoint.address.port)

    @property
    def channel(self) -> ZmqChannel:
        channel = self.endpoint.submitter.channel
        assert isinstance(channel, ZmqChannel)
        return channel

    def content(self, blocks: np.ndarray[Any, Any]) -> bytes:
        return b"".join(cache[blocks].tobytes() for cache in self.caches.values())

    def ended(self, kind: type[Any]) -> dict[str, Any]:
        with self._lock:  # One thread at a time: the traffic's and the test's both ask.
            self.outcomes += self.endpoint.drain()
            outcomes = list(self.outcomes)
        return {getattr(one, "request_id", getattr(one, "source_id", "")): one for one in outcomes if type(one) is kind}


class Transfer:
    """One prompt on its way; whole blocks, chosen by number so that concurrent ones don't share any."""

    def __init__(self, blocks: int = 4, *, slot: int = 0) -> None:
        self.number = next(_numbers)
        self.name = f"r{self.number}"
        self.prompt = np.random.default_rng(self.number).integers(0, 1000, blocks * BLOCK_TOKENS)
        self.digest = prompt_digest(self.prompt)
        self.src = np.arange(slot * 8, slot * 8 + blocks, dtype=np.int32)
        self.dst = self.src[::-1].copy()

    def register(self, consumer: Party, address: PeerAddress) -> None:
        consumer.endpoint.submit(
            ReceiveRequested(RequestId(self.name), address, (f"t{self.number}",), self.digest, len(self.prompt), 0, (self.dst,))
        )

    def announce(self, producer: Party) -> None:
        producer.endpoint.submit(SourceAnnounced(RequestId(self.name), (f"t{self.number}",), self.digest, len(self.prompt)))

    def compute(self, producer: Party) -> None:
        for layer, cache in enumerate(producer.caches.values()):
            cache[self.src] = np.random.default_rng([self.number, layer]).random(cache[self.src].shape, np.float32)
        source = RequestId(self.name)
        producer.endpoint.submit(SourceProgressed(source, 0, LAYERS, len(self.prompt), (self.src,)))
        producer.endpoint.submit(SourceFinished(source))

    def finish(self, producer: Party, consumer: Party) -> None:
        """Wait for both reports, and compare bytes."""
        wait_until(lambda: self.name in consumer.ended(ReceiveEnded), f"{self.name} is received")
        ended = consumer.ended(ReceiveEnded)[self.name]
        assert ended.status is ReceiveStatus.RECEIVED, ended
        wait_until(lambda: self.name in producer.ended(SourceReleased), f"{self.name} is released")
        assert producer.ended(SourceReleased)[self.name].error is None
        assert consumer.content(self.dst) == producer.content(self.src)

    def run(self, producer: Party, consumer: Party) -> None:
        """From beginning to end."""
        self.announce(producer)
        self.register(consumer, producer.address)
        self.compute(producer)
        self.finish(producer, consumer)


@contextmanager
def parties(**settings: Any) -> Iterator[tuple[Party, Party]]:
    """A producer and a consumer; closed in good order, with every file descriptor given back."""
    before = _open_descriptors()
    producer = Party(produce=True, consume=False, **settings)
    consumer = Party(produce=False, consume=True, **settings)
    try:
        yield producer, consumer
        assert producer.endpoint.error is None
        assert consumer.endpoint.error is None
    finally:
        closed = [party.endpoint.close(30) for party in (consumer, producer)]
    assert closed == [True, True]
    wait_until(lambda: _open_descriptors() <= before, "file descriptors are given back")
