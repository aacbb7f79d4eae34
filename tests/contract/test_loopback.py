# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvpush.backends.base import BackendPlugin
from kvpush.backends.loopback import LoopbackFabric, LoopbackPlugin, Posting, WriteFault
from kvpush.core.transport import Completion, MemoryKind, Region, WriteStatus
from kvpush.errors import ConfigError, MemoryRegistrationError, TransportError
from kvpush.testing.contract import PluginContract, TransportContract, drain
from kvpush.testing.fabric import TransportPair, loopback_pair


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestLoopback(TransportContract):
    @pytest.fixture
    def transport_pair(self) -> Iterator[TransportPair]:
        pair = loopback_pair()
        yield pair
        pair.close()


class TestLoopbackSlowLinkLikeNixl(TransportContract):
    """Latency, bandwidth and a target that has to poll, on a fake clock."""

    @pytest.fixture
    def transport_pair(self) -> Iterator[TransportPair]:
        clock = FakeClock()
        fabric = LoopbackFabric(clock=clock, latency_s=0.001, bytes_per_s=1e9, target_must_poll=True)

        def advance() -> None:
            clock.now += 0.0005

        pair = loopback_pair(fabric=fabric, advance=advance)
        yield pair
        pair.close()


class TestLoopbackBackend(PluginContract):
    @pytest.fixture
    def plugin(self) -> BackendPlugin:
        return LoopbackPlugin(LoopbackFabric())

    @pytest.mark.parametrize("options", [{"latency_s": -1}, {"latency_s": "x"}, {"bytes_per_s": 0}, {"bytes_per_s": True}])
    def test_wrong_options(self, options: dict[str, object]) -> None:
        with pytest.raises(ConfigError):
            LoopbackPlugin().create("x", options)

    def test_backends_of_one_process_meet(self) -> None:
        one, two = LoopbackPlugin().create("meet-1", {"latency_s": 0.0}), LoopbackPlugin().create("meet-2", {})
        try:
            assert one.transport.add_peer(two.transport.metadata()) == "meet-2"
            with pytest.raises(ConfigError, match="meet-1"):
                LoopbackPlugin().create("meet-1", {})
        finally:
            one.close()
            two.close()


class Rig:
    """A pair on a fake clock, with one row of 1000 bytes to write."""

    def __init__(self, **options: object) -> None:
        self.clock = FakeClock()
        self.fabric = LoopbackFabric(clock=self.clock, **options)  # type: ignore[arg-type]
        self.pair = loopback_pair(fabric=self.fabric)
        self.pair.source.memory[:] = 7
        self.source, self.target = self.pair.source.transport, self.pair.target.transport

    def post(self, token: int = 1, length: int = 1000) -> None:
        self.source.post_write(token, self.pair.peer, self.pair.source.rows((0, length)), self.pair.target.rows((0, length)))

    def at(self, seconds: float) -> list[Completion]:
        self.clock.now = 100.0 + seconds
        return self.source.poll()

    @property
    def landed(self) -> int:
        return int(np.count_nonzero(self.pair.target.memory))


def test_latency_and_bandwidth() -> None:
    rig = Rig(latency_s=1.0, bytes_per_s=1000.0)
    rig.post(1)
    rig.post(2)
    assert rig.fabric.next_due() == 102.0
    assert rig.at(1.9) == []
    assert rig.landed == 0
    assert rig.at(2.0) == [Completion(1, WriteStatus.DONE)]
    assert rig.landed == 1000
    assert rig.at(2.9) == []
    assert rig.at(3.0) == [Completion(2, WriteStatus.DONE)]


def test_the_source_is_read_when_the_bytes_leave() -> None:
    rig = Rig(latency_s=1.0)
    rig.post()
    rig.pair.source.memory[:] = 9
    rig.at(1.0)
    assert (rig.pair.target.memory[:1000] == 9).all()


def test_target_must_poll() -> None:
    rig = Rig(target_must_poll=True)
    assert rig.source.capabilities.target_must_poll
    rig.post()
    assert rig.at(100.0) == []
    assert rig.landed == 0
    rig.target.progress()
    assert rig.landed == 1000
    assert rig.at(100.0) == [Completion(1, WriteStatus.DONE)]


def test_failed_post() -> None:
    rig = Rig()
    rig.fabric.set_faults(lambda posting: WriteFault(fail_post="no") if posting.serial == 0 else None)
    with pytest.raises(TransportError, match="no"):
        rig.post()
    assert rig.source.num_in_flight == 0
    rig.post()
    assert rig.at(0.0) == [Completion(1, WriteStatus.DONE)]


def test_failed_completion_with_and_without_bytes() -> None:
    rig = Rig()
    seen: list[Posting] = []

    def rule(posting: Posting) -> WriteFault:
        seen.append(posting)
        return WriteFault(fail="broken", copy_anyway=posting.token == 2)

    rig.fabric.set_faults(rule)
    rig.post(1)
    assert rig.at(0.0) == [Completion(1, WriteStatus.FAILED, "broken")]
    assert rig.landed == 0
    rig.post(2)
    assert rig.at(0.0) == [Completion(2, WriteStatus.FAILED, "broken")]
    assert rig.landed == 1000
    assert [posting.num_bytes for posting in seen] == [1000, 1000]


def test_never_and_delay() -> None:
    rig = Rig()
    faults = {1: WriteFault(never=True), 2: WriteFault(delay_s=5.0)}
    rig.fabric.set_faults(lambda posting: faults.get(posting.token))
    rig.post(1)
    rig.post(2)
    assert rig.at(4.9) == []
    assert rig.at(5.0) == [Completion(2, WriteStatus.DONE)]
    assert rig.at(1e9) == []
    assert rig.source.num_in_flight == 1
    rig.source.remove_peer(rig.pair.peer)
    assert [completion.status for completion in rig.at(1e9)] == [WriteStatus.FAILED]


def test_late_write() -> None:
    rig = Rig()
    rig.fabric.set_faults(lambda _: WriteFault(fail="timeout", late_copy_s=3.0))
    rig.post()
    assert rig.at(0.0) == [Completion(1, WriteStatus.FAILED, "timeout")]
    assert rig.landed == 0
    assert rig.at(3.0) == []
    assert rig.landed == 1000


def test_removal_recalls_for_certain() -> None:
    rig = Rig(latency_s=1.0)
    rig.post()
    rig.source.remove_peer(rig.pair.peer)
    assert [completion.status for completion in rig.at(0.0)] == [WriteStatus.FAILED]
    assert rig.at(10.0) == []
    assert rig.landed == 0


@pytest.mark.parametrize("detects", [True, False])
def test_dropped_peer(detects: bool) -> None:
    rig = Rig(latency_s=1.0, detects_peer_loss=detects)
    rig.post(1)
    rig.fabric.drop_peer(rig.target.agent_name)
    if detects:
        assert rig.at(0.0) == [Completion(1, WriteStatus.FAILED, "the peer has gone")]
        with pytest.raises(TransportError):
            rig.post(2)
    else:
        rig.post(2)
        assert rig.at(1e6) == []
        assert rig.source.num_in_flight == 2
    assert rig.landed == 0


def test_closing_the_target_fails_writes_to_it() -> None:
    rig = Rig(latency_s=1.0)
    rig.post()
    rig.target.close()
    assert [completion.status for completion in rig.at(2.0)] == [WriteStatus.FAILED]
    assert rig.landed == 0
    with pytest.raises(TransportError, match="gone"):
        rig.post(2)


def test_metadata_of_another_fabric_is_refused() -> None:
    one, two = loopback_pair(), loopback_pair()
    with pytest.raises(TransportError, match="another process"):
        one.source.transport.add_peer(two.target.transport.metadata())


def test_device_memory_and_late_registration_are_refused() -> None:
    transport = LoopbackFabric().transport("a")
    with pytest.raises(MemoryRegistrationError):
        transport.register_memory([Region(4096, 4096, kind=MemoryKind.DEVICE)])
    pair = loopback_pair()
    with pytest.raises(MemoryRegistrationError, match="before the first peer"):
        pair.source.transport.register_memory([Region(pair.source.memory.ctypes.data, 10)])


def test_names_are_unique_until_closed() -> None:
    fabric = LoopbackFabric()
    first = fabric.transport("a")
    with pytest.raises(ConfigError):
        fabric.transport("a")
    first.close()
    fabric.transport("a").close()


def test_overlapping_regions_are_one() -> None:
    fabric = LoopbackFabric()
    pair = loopback_pair(fabric=fabric)
    third = fabric.transport("third")
    base = pair.source.memory.ctypes.data
    third.register_memory([Region(base, 1000), Region(base + 100, 10)])
    peer = third.add_peer(pair.target.transport.metadata())
    third.post_write(1, peer, pair.source.rows((0, 1000)), pair.target.rows((0, 1000)))
    assert (
        drain(TransportPair(type(pair.source)(third, pair.source.memory), pair.target, peer), 1)[0].status is WriteStatus.DONE
    )
