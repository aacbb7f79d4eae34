# SPDX-License-Identifier: Apache-2.0
"""Staged writes between endpoints with their threads: scattered blocks of real bytes, and what goes wrong on the way.

Every wait has a deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpush.backends._host_layout import HostBackend
from kvpush.backends.loopback import LoopbackFabric, LoopbackPlugin, WriteFault
from kvpush.channels.memory import Fault, MemoryNetwork, Passing
from kvpush.core import wire
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
from kvpush.core.ids import PeerAddress, RequestId
from kvpush.core.transport import Descriptors
from kvpush.endpoint import Endpoint, numpy_views
from kvpush.errors import BackendError
from kvpush.settings import Settings
from kvpush.testing.contract import wait_until

LAYERS, NUM_BLOCKS, BLOCK_TOKENS = 3, 1500, 4
SHAPE = (NUM_BLOCKS, 2, BLOCK_TOKENS, 128)
"""Blocks of 4 KiB."""
PER_REQUEST = 600
"""Blocks of one request: 7 MiB, four slots."""
ADDRESS = PeerAddress("prefill", 5000)


class Rig:
    """A producer and a consumer over one fabric and one network."""

    def __init__(self, fabric: LoopbackFabric | None = None, **settings: Any) -> None:
        self.fabric = fabric or LoopbackFabric()
        self.network = MemoryNetwork()
        self.rng = np.random.default_rng(1)
        values = {"staging": "on", "verify": "all", "control_port": 0} | settings
        chosen = Settings.model_construct(**values)
        self.here, self.there = self.caches(), self.caches()
        plugin = LoopbackPlugin(self.fabric)
        self.producer = Endpoint.open(
            self.views(self.here), consume=False, settings=chosen, plugin=plugin, channel=self.network.channel(ADDRESS)
        )
        self.consumer = Endpoint.open(
            self.views(self.there), produce=False, settings=chosen, plugin=plugin, channel=self.network.channel(None)
        )
        self.outcomes: dict[str, list[Outcome]] = {"producer": [], "consumer": []}
        self.before: list[npt.NDArray[Any]] = []

    def caches(self) -> dict[str, npt.NDArray[Any]]:
        return {f"layer.{idx}": self.rng.integers(0, 2**15, SHAPE).astype(np.int16).view(np.float16) for idx in range(LAYERS)}

    @staticmethod
    def views(caches: dict[str, npt.NDArray[Any]]) -> Any:
        return numpy_views(caches, block_tokens=BLOCK_TOKENS, num_heads=2)

    def some_blocks(self, count: int = PER_REQUEST) -> npt.NDArray[np.int32]:
        return self.rng.permutation(NUM_BLOCKS)[:count].astype(np.int32)

    def begin(self, name: str, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32], *, finish: bool = True) -> None:
        self.before = [cache.view(np.int16).copy() for cache in self.there.values()]
        tokens = len(src) * BLOCK_TOKENS
        key = (name,)
        self.consumer.submit(ReceiveRequested(RequestId(name), ADDRESS, key, b"d", tokens, 0, (dst,)))
        self.producer.submit(SourceAnnounced(RequestId(f"s-{name}"), key, b"d", tokens))
        self.producer.submit(SourceProgressed(RequestId(f"s-{name}"), 0, LAYERS, tokens, (src,)))
        if finish:
            self.producer.submit(SourceFinished(RequestId(f"s-{name}")))

    def received(self, name: str) -> ReceiveEnded:
        return self._wait("consumer", lambda o: isinstance(o, ReceiveEnded) and o.request_id == name, f"the end of {name}")

    def safe(self, name: str) -> None:
        self._wait("consumer", lambda o: isinstance(o, BlocksSafe) and o.request_id == name, f"safety of the blocks of {name}")

    def released(self, name: str) -> SourceReleased:
        return self._wait(
            "producer", lambda o: isinstance(o, SourceReleased) and o.source_id == f"s-{name}", f"release of {name}"
        )

    def _wait(self, side: str, wanted: Any, what: str) -> Any:
        endpoint: Endpoint = getattr(self, side)
        found: list[Outcome] = []

        def there() -> bool:
            endpoint.wait_outcome(0.02)
            self.outcomes[side] += endpoint.drain()
            assert endpoint.error is None, endpoint.error
            found[:] = [outcome for outcome in self.outcomes[side] if wanted(outcome)]
            return bool(found)

        wait_until(there, what)
        assert len(found) == 1, found
        return found[0]

    def check(self, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]) -> None:
        """Every byte of the consumer's cache: the blocks are the source's, and nothing else has changed."""
        for before, here, there in zip(self.before, self.here.values(), self.there.values(), strict=True):
            before[dst] = here.view(np.int16)[src]
            assert np.array_equal(before, there.view(np.int16))

    def check_untouched_but(self, dst: npt.NDArray[np.int32]) -> None:
        """Nothing but these blocks has changed."""
        rest = np.setdiff1d(np.arange(NUM_BLOCKS), dst)
        for before, there in zip(self.before, self.there.values(), strict=True):
            assert np.array_equal(before[rest], there.view(np.int16)[rest])

    def transfer(self, name: str) -> None:
        """One that has to go well."""
        src, dst = self.some_blocks(), self.some_blocks()
        self.begin(name, src, dst)
        ended = self.received(name)
        assert ended.status is ReceiveStatus.RECEIVED, ended.error
        self.check(src, dst)
        assert self.released(name).num_streams == 1

    @property
    def staged(self) -> int:
        assert self.producer.submitter.staged is not None
        return self.producer.submitter.staged.num_writes

    def close(self) -> tuple[bool, bool]:
        return self.consumer.close(), self.producer.close()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.close()


FABRICS = {
    "instant": lambda: LoopbackFabric(),
    "slow": lambda: LoopbackFabric(latency_s=0.002, bytes_per_s=200e6),
    "target polls": lambda: LoopbackFabric(target_must_poll=True, latency_s=0.001),
}


@pytest.mark.parametrize("fabric", list(FABRICS))
@pytest.mark.parametrize("mode", ["on", "auto", "off"])
def test_scattered_blocks_arrive_as_they_were_sent(fabric: str, mode: str, rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(FABRICS[fabric](), staging=mode))
    for number in range(6):
        rig.transfer(f"r{number}")
    submitter = rig.producer.submitter
    if mode == "off":
        assert submitter.staged is None
    else:
        assert mode == "auto" or rig.staged >= 6
        assert submitter.consumer is None
    counters = rig.consumer.submitter.consumer.counters  # type: ignore[union-attr]
    assert (counters.verified, counters.integrity_errors) == (6, 0)
    assert rig.close() == (True, True)


def test_many_at_once_share_the_slots(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(FABRICS["slow"]()))
    src, dst = rig.some_blocks(NUM_BLOCKS), rig.some_blocks(NUM_BLOCKS)
    size = NUM_BLOCKS // 30
    parts = [(src[at : at + size], dst[at : at + size]) for at in range(0, size * 30, size)]
    rig.before = [cache.view(np.int16).copy() for cache in rig.there.values()]
    kept = rig.before
    for number, (one, other) in enumerate(parts):
        rig.begin(f"r{number}", one, other)
    for number in range(30):
        assert rig.received(f"r{number}").status is ReceiveStatus.RECEIVED
        rig.released(f"r{number}")
    rig.before = kept
    rig.check(src[: size * 30], dst[: size * 30])
    assert rig.staged >= 30


def test_an_abort_in_the_middle_frees_blocks_that_nothing_writes_to(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(FABRICS["slow"]()))
    rig.transfer("before")
    for number in range(10):
        src, dst = rig.some_blocks(), rig.some_blocks()
        rig.begin(f"r{number}", src, dst)
        staged = rig.staged
        wait_until(lambda staged=staged: rig.staged > staged, "a staged write")  # type: ignore[misc]
        rig.consumer.submit(ReceiveAborted(RequestId(f"r{number}")))
        ended = rig.received(f"r{number}")
        assert ended.status is ReceiveStatus.CANCELLED or ended.status is ReceiveStatus.RECEIVED
        assert ended.blocks_safe
        rig.check_untouched_but(dst)
        for cache in rig.there.values():
            cache[dst] = 7.0
        rig.released(f"r{number}")
        for cache in rig.there.values():
            assert (cache[dst] == 7.0).all(), "written to after it was said to be safe"
    rig.transfer("afterwards")


@pytest.mark.parametrize("side", ["packing", "unpacking"])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_copy_that_fails_fails_its_transfer_and_nothing_else(
    side: str, when: str, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.append(rig := Rig())
    rig.transfer("before")
    backend = (rig.producer if side == "packing" else rig.consumer)._backend
    inner = HostBackend.start_copy
    broken = [True]

    class Broken:
        def done(self) -> bool:
            raise BackendError("planted")

    def start_copy(self: HostBackend, src: Descriptors, dst: Descriptors) -> Any:
        if self is backend and broken[0]:
            if when == "at once":
                raise BackendError("planted")
            return Broken()
        return inner(self, src, dst)

    monkeypatch.setattr(HostBackend, "start_copy", start_copy)
    src, dst = rig.some_blocks(), rig.some_blocks()
    rig.begin("r", src, dst)
    ended = rig.received("r")
    assert ended.status is ReceiveStatus.FAILED
    assert "planted" in str(ended.error)
    if not ended.blocks_safe:
        rig.safe("r")
    rig.check_untouched_but(dst)
    assert rig.released("r").num_streams == 0
    broken[0] = False
    rig.transfer("afterwards")


def test_blocks_are_not_given_away_while_a_slot_is_copied_into_them(rigs: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy takes for ever, the producer dies: the request ends at once, its blocks are kept until the copy has ended."""
    rigs.append(rig := Rig(lease_s=1.0, lease_guard_s=0.1, heartbeat_s=0.1, idle_heartbeat_s=0.5, peer_timeout_s=0.5))
    backend = rig.consumer._backend
    inner = HostBackend.start_copy
    running: list[tuple[Descriptors, Descriptors]] = []
    done = [False]

    class Endless:
        def done(self) -> bool:
            return done[0]

    def start_copy(self: HostBackend, src: Descriptors, dst: Descriptors) -> Any:
        if self is not backend:
            return inner(self, src, dst)
        running.append((src, dst))
        return Endless()

    monkeypatch.setattr(HostBackend, "start_copy", start_copy)
    src, dst = rig.some_blocks(), rig.some_blocks()
    rig.begin("r", src, dst)
    wait_until(lambda: bool(running), "a copy that runs")
    rig.producer.close(0.5)
    ended = rig.received("r")
    assert ended.status is ReceiveStatus.FAILED
    assert not ended.blocks_safe
    later = rig.consumer.submitter.counters.steps + 50
    wait_until(lambda: rig.consumer.submitter.counters.steps > later, "the submitter goes on")
    assert not any(isinstance(outcome, BlocksSafe) for outcome in rig.consumer.drain())
    done[0] = True
    rig.safe("r")


@pytest.mark.parametrize("kind", [wire.Staged, wire.Unpacked], ids=lambda kind: kind.__name__)
def test_a_lost_message_is_said_again(kind: type, rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    rig.transfer("before")
    lose = itertools.chain([True, False, True], itertools.repeat(False))

    def rule(passing: Passing) -> Fault | None:
        if isinstance(wire.decode(passing.data), kind) and next(lose):
            return Fault(copies=0)
        return None

    rig.network.set_faults(rule)
    rig.transfer("r")
    rig.network.set_faults(None)
    rig.transfer("afterwards")


@pytest.mark.parametrize("fault", [WriteFault(fail="planted"), WriteFault(fail_post="planted"), WriteFault(spoil="flip")])
def test_a_slot_that_does_not_arrive_is_noticed(fault: WriteFault, rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    rig.transfer("before")
    faults = iter([None, fault])
    rig.fabric.set_faults(lambda posting: next(faults, None))
    src, dst = rig.some_blocks(), rig.some_blocks()
    rig.begin("r", src, dst)
    ended = rig.received("r")
    assert ended.status is ReceiveStatus.FAILED
    rig.check_untouched_but(dst)
    rig.transfer("afterwards")
