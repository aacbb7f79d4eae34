# SPDX-License-Identifier: Apache-2.0
"""The contract suites over NIXL, two agents in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpush.backends._nixl import NixlTransport, merged_ranges, shared_memory_only, user_timeout_problem
from kvpush.backends.base import BackendPlugin
from kvpush.backends.cpu import CpuPlugin
from kvpush.core.transport import MemoryKind, Region, WriteStatus
from kvpush.errors import BackendError, ConfigError, MemoryRegistrationError, TransportError
from kvpush.testing.contract import PluginContract, TransportContract, drain, wait_until
from kvpush.testing.fabric import TransportPair, connect, host_memory, register

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl")

serial = itertools.count()


def nixl_pair(**options: str) -> TransportPair:
    number = next(serial)
    sides = [
        register(NixlTransport(f"{name}-{number}", **options), host_memory(1 << 20))  # type: ignore[arg-type]
        for name in ("source", "target")
    ]
    return connect(sides[0], sides[1])


@pytest.fixture(autouse=True)
def no_user_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)


class TestNixlChosenByUcx(TransportContract):
    @pytest.fixture
    def transport_pair(self) -> Iterator[TransportPair]:
        pair = nixl_pair()
        yield pair
        pair.close()


class TestNixlTcp(TransportContract):
    @pytest.fixture
    def transport_pair(self) -> Iterator[TransportPair]:
        pair = nixl_pair(ucx_tls="tcp,self")
        yield pair
        pair.close()


class TestNixlSharedMemory(TransportContract):
    @pytest.fixture
    def transport_pair(self) -> Iterator[TransportPair]:
        pair = nixl_pair(ucx_tls="sm,self")
        yield pair
        pair.close()


class TestCpuBackend(PluginContract):
    @pytest.fixture
    def plugin(self) -> BackendPlugin:
        return CpuPlugin()

    @pytest.mark.parametrize(
        "options",
        [{"ucx_tls": 1}, {"ucx_error_handling_mode": "maybe"}, {"retry_window_s": -1}, {"retry_window_s": float("nan")}],
    )
    def test_wrong_options(self, options: dict[str, object]) -> None:
        with pytest.raises(ConfigError):
            CpuPlugin().create("x", options)

    def test_an_unusable_transport_is_a_backend_error(self) -> None:
        with pytest.raises(BackendError, match="no-such-transport"):
            CpuPlugin().create("x", {"ucx_tls": "no-such-transport"})

    def test_probe_is_ok_where_nixl_is(self) -> None:
        probe = CpuPlugin().probe()
        assert probe.ok, probe.reasons
        assert {"nixl", "RLIMIT_MEMLOCK"} <= set(probe.details)


@pytest.mark.parametrize(
    ("tls", "only"),
    [
        ("sm,self", True),
        ("posix", True),
        ("sm,cuda_ipc,cuda_copy", True),
        ("tcp,self", False),
        ("sm,tcp", False),
        ("rc,cuda", False),
        ("cuda", False),
        ("^tcp", False),
        ("", False),
        (None, False),
    ],
)
def test_shared_memory_only(tls: str | None, only: bool) -> None:
    assert shared_memory_only(tls) is only


def test_error_handling_follows_the_transports() -> None:
    for tls, detects in (("sm,self", False), ("tcp,self", True)):
        transport = NixlTransport(f"mode-{next(serial)}", ucx_tls=tls)
        assert transport.capabilities.detects_peer_loss is detects
        assert transport.capabilities.target_must_poll
        transport.close()


@pytest.mark.parametrize("text", ["11s", "11", "0.5m", "10001ms", "inf", "auto", "0", "0ms", " 11s "])
def test_a_user_timeout_of_a_user_that_is_longer_than_the_retry_window_is_said(text: str) -> None:
    problem = user_timeout_problem(text, 10.0)
    assert problem.startswith(f"UCX_TCP_USER_TIMEOUT={text} is longer")
    assert "set it to 8s" in problem


@pytest.mark.parametrize("text", [None, "10s", "8000ms", "0.1m", "9999999us", "1", "5.", "10000000000ns", "nonsense", ""])
def test_a_user_timeout_within_the_retry_window_is_fine(text: str | None) -> None:
    assert user_timeout_problem(text, 10.0) == ""
    assert user_timeout_problem("inf", 0.0) == "", "there is no window to keep"


def test_a_user_timeout_that_is_too_long_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "60s")
    NixlTransport(f"timeout-{next(serial)}", ucx_tls="sm,self").close()
    assert "UCX_TCP_USER_TIMEOUT" not in caplog.text, "no TCP here"
    NixlTransport(f"timeout-{next(serial)}", ucx_tls="tcp,self").close()
    assert "UCX_TCP_USER_TIMEOUT=60s is longer than retry_window_s (10 s)" in caplog.text
    caplog.clear()
    NixlTransport(f"timeout-{next(serial)}", ucx_tls="tcp,self", retry_window_s=60.0).close()
    assert "UCX_TCP_USER_TIMEOUT" not in caplog.text


def test_the_environment_wins_and_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    transport = NixlTransport(f"env-{next(serial)}", ucx_tls="tcp,self")
    transport.close()
    assert "UCX_TLS" not in os.environ
    monkeypatch.setenv("UCX_TLS", "sm,self")
    transport = NixlTransport(f"env-{next(serial)}", ucx_tls="tcp,self")
    assert not transport.capabilities.detects_peer_loss
    transport.close()


def test_touching_host_regions_are_one() -> None:
    assert merged_ranges([Region(100, 50), Region(10, 90), Region(140, 5), Region(500, 1)]) == [(10, 140, 0), (500, 1, 0)]
    device = [
        Region(100, 50, 0, MemoryKind.DEVICE),
        Region(150, 50, 0, MemoryKind.DEVICE),
        Region(150, 9, 1, MemoryKind.DEVICE),
    ]
    assert merged_ranges(device) == [(100, 50, 0), (150, 50, 0), (150, 9, 1)]


def test_overlapping_device_regions_are_one() -> None:
    """They are of one allocation, and blocks of both may lie side by side."""
    device = [Region(*numbers, MemoryKind.DEVICE) for numbers in ((100, 50, 0), (149, 51, 0), (120, 5, 0), (149, 51, 1))]
    assert merged_ranges(device) == [(100, 100, 0), (149, 51, 1)]


def test_a_row_may_run_across_touching_regions() -> None:
    sides = []
    for name in ("a", "b"):
        transport, memory = NixlTransport(f"{name}-{next(serial)}"), host_memory(8192)
        transport.register_memory([Region(memory.ctypes.data, 4096), Region(memory.ctypes.data + 4096, 4096, keepalive=memory)])
        sides.append((transport, memory))
    from kvpush.testing.fabric import Side

    pair = connect(Side(*sides[0]), Side(*sides[1]))
    pair.source.memory[:] = 3
    pair.source.transport.post_write(1, pair.peer, pair.source.rows((1000, 6000)), pair.target.rows((1000, 6000)))
    drain(pair, 1)
    assert np.count_nonzero(pair.target.memory) == 6000
    pair.close()


def test_no_memory_after_the_metadata() -> None:
    transport, memory = NixlTransport(f"kinds-{next(serial)}"), host_memory(4096)
    base = memory.ctypes.data
    transport.register_memory([Region(base, 4096, keepalive=memory)])
    transport.metadata()
    with pytest.raises(MemoryRegistrationError, match="before"):
        transport.register_memory([Region(base, 10)])
    transport.close()


class _KindsOfMemory:
    """A NIXL agent that takes what it is told is a device's for the host's, and keeps what it was told."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.told: list[tuple[str, str]] = []

    def register_memory(self, rows: Any, kind: str, **more: Any) -> Any:
        self.told.append(("register", kind))
        return self._agent.register_memory(rows, "DRAM", **more)

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        self.told.append(("describe", kind))
        return self._agent.get_xfer_descs(rows, "DRAM")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


def test_host_memory_beside_a_devices() -> None:
    """Each side of a write is described as what it is, whatever else is registered; one that is both is refused."""
    sides, memories = [], []
    for _ in range(2):
        transport, memory = NixlTransport(f"kinds-{next(serial)}"), host_memory(3 * 4096)
        transport._agent = _KindsOfMemory(transport._agent)
        base = memory.ctypes.data
        transport.register_memory(
            [Region(base, 4096, kind=MemoryKind.DEVICE, keepalive=memory), Region(base + 8192, 4096, keepalive=memory)]
        )
        assert sorted(transport._agent.told) == [("register", "DRAM"), ("register", "VRAM")]
        sides.append(transport)
        memories.append(memory)
    source, target = sides
    peer = source.add_peer(target.metadata())
    target.add_peer(source.metadata())
    memories[0][:] = np.arange(3 * 4096, dtype=np.uint16).view(np.uint8)[: 3 * 4096]
    rows = [[np.array([(memory.ctypes.data + at, 100, 0)], np.uint64) for at in (10, 8200)] for memory in memories]
    expected = np.zeros(3 * 4096, np.uint8)
    for token, (from_, to) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        source._agent.told.clear()
        source.post_write(token, peer, rows[0][from_], rows[1][to])
        assert source._agent.told == [("describe", ("VRAM", "DRAM")[from_]), ("describe", ("VRAM", "DRAM")[to])]
        done: list[Any] = []

        def ended(done: list[Any] = done) -> bool:
            target.progress()
            done += source.poll()
            return bool(done)

        wait_until(ended, "the write")
        assert [completion.status for completion in done] == [WriteStatus.DONE]
        at = (10, 8200)
        expected[at[to] : at[to] + 100] = memories[0][at[from_] : at[from_] + 100]
        assert np.array_equal(memories[1], expected)
    with pytest.raises(TransportError, match="host memory and of device memory"):
        source.post_write(9, peer, np.concatenate(rows[0]), np.concatenate(rows[1]))
    source.close()
    target.close()


def test_a_name_belongs_to_one_peer() -> None:
    pair = nixl_pair()
    impostor = NixlTransport(pair.peer)
    with pytest.raises(TransportError, match="unique"):
        pair.source.transport.add_peer(impostor.metadata())
    impostor.close()
    pair.close()


def test_closing_with_a_write_in_flight_leaks_instead_of_freeing() -> None:
    """Over TCP a write stays in flight while the target doesn't poll."""
    from kvpush.backends import _nixl

    pair = nixl_pair(ucx_tls="tcp,self")
    before = len(_nixl._leaked)
    pair.source.transport.post_write(1, pair.peer, pair.source.rows((0, 1 << 20)), pair.target.rows((0, 1 << 20)))
    assert pair.source.transport.num_in_flight == 1
    pair.source.transport.close()
    assert pair.source.transport.num_in_flight == 0
    assert len(_nixl._leaked) == before + 1
    pair.target.transport.close()
