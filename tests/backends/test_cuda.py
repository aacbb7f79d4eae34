# SPDX-License-Identifier: Apache-2.0
"""The cuda backend over a fake of ``torch.cuda`` (``fake_cuda.py``).

No GPU is involved: what these tests show is that the backend does what docs/accelerators.md says. ``tests/cuda`` is for GPUs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeGpu, Host

from kvpush.backends import _cuda_copy, cuda
from kvpush.backends.base import CacheView
from kvpush.backends.cuda import CudaBackend, CudaPlugin
from kvpush.core.events import (
    ReceiveRequested,
    ReceiveStatus,
    SourceAnnounced,
    SourceFinished,
    SourceProgressed,
)
from kvpush.core.ids import RequestId
from kvpush.core.plan import PairPlan
from kvpush.core.transport import MemoryKind, Region
from kvpush.endpoint import Endpoint
from kvpush.errors import BackendError, ConfigError, LayoutError, MemoryRegistrationError, TransportError
from kvpush.settings import Settings
from kvpush.testing.contract import PluginContract, wait_until
from kvpush.testing.endpoints import EndpointPair
from kvpush.testing.fabric import Device, Memory, host_memory


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host() -> Host:
    return Host()


def made(host: Host, options: Mapping[str, object] | None = None, **changes: Any) -> CudaBackend:
    backend = host.plugin(**changes).create("one", options or {})
    assert isinstance(backend, CudaBackend)
    return backend


class TestContract(PluginContract):
    """The whole contract suite."""

    @pytest.fixture
    def plugin(self, host: Host) -> CudaPlugin:
        return host.plugin()

    @pytest.fixture
    def device(self) -> Device:
        return FakeGpu()


class TestContractOnTheSecondGpu(TestContract):
    """As a worker of a tensor-parallel engine has it: every GPU is visible, and the cache is on another than the first."""

    @pytest.fixture
    def host(self) -> Host:
        return Host(FakeCuda(num_devices=2))

    @pytest.fixture
    def device(self) -> Device:
        return FakeGpu(1)


# --- device fences -----------------------------------------------------------------------------------------------------------


def test_a_fence_ends_with_the_kernels_before_it() -> None:
    host = Host(FakeCuda(runs=False))
    backend = made(host)
    (stream,) = host.cuda.streams
    stream.launch()
    first = backend.device_fence()
    assert not backend.fence_done(first)
    stream.run()
    stream.launch()
    second = backend.device_fence()
    assert backend.fence_done(first), "what was launched after it is not waited for"
    assert not backend.fence_done(second)
    stream.run()
    assert backend.fence_done(second)
    assert backend.fence_done(second), "and it stays so"
    backend.close()


def test_events_are_used_again_and_not_before_they_have_passed() -> None:
    host = Host(FakeCuda(runs=False))
    backend = made(host)
    (stream,) = host.cuda.streams
    for _ in range(10):
        stream.launch()
        fences = [backend.device_fence() for _ in range(3)]
        assert not any(backend.fence_done(fence) for fence in fences)
        stream.run()
        assert all(backend.fence_done(fence) for fence in fences)
    assert [event.records for event in host.cuda.events] == [10, 10, 10]
    backend.close()


def test_a_fence_covers_every_gpu_that_holds_a_part_of_the_cache() -> None:
    host = Host(FakeCuda(num_devices=3, runs=False))
    backend = made(host)
    views = [FakeGpu(device).view(f"layer.{idx}")[0] for idx, device in enumerate((2, 1, 1))]
    backend.describe(views)
    for stream in host.cuda.streams:
        stream.launch()
    fence = backend.device_fence()
    assert len(host.cuda.events) == 2
    host.cuda.streams[1].run()
    assert not backend.fence_done(fence)
    host.cuda.streams[2].run()
    assert backend.fence_done(fence), "GPU 0 holds nothing of it"
    for _ in range(4):
        backend.device_fence()
    assert {event.stream.device for event in host.cuda.events} == {1, 2}
    backend.close()


def test_a_failed_gpu_is_said_and_said_again(host: Host) -> None:
    backend = made(host)
    token = backend.device_fence()
    host.cuda.failure = "CUDA error: an illegal memory access was encountered"
    for _ in range(2):
        with pytest.raises(BackendError, match=r"device 0 has failed.*illegal memory access"):
            backend.fence_done(token)
    host.cuda.failure = ""
    other = backend.device_fence()
    assert len(host.cuda.events) == 2, "the event of a failed fence is not used again"
    wait_until(lambda: backend.fence_done(other), "the next fence")
    backend.close()


def test_an_event_that_cannot_be_recorded_fails_the_fence_and_not_the_engine(host: Host) -> None:
    backend = made(host)
    host.cuda.failure = "CUDA error: out of memory"
    token = backend.device_fence()
    with pytest.raises(BackendError, match="no event can be recorded: RuntimeError: CUDA error: out of memory"):
        backend.fence_done(token)
    backend.close()


def test_what_is_computed_late_is_sent_late() -> None:
    """The kernel that writes the blocks runs long after its progress was told: nothing leaves before, the right bytes do."""
    host = Host(FakeCuda(runs=False))
    (stream,) = host.cuda.streams
    device = FakeGpu()
    (source_view, source), (target_view, target) = device.view(), device.view()
    settings = Settings.model_construct(control_port=0, verify="off", backend_options={})
    producer = Endpoint.open([source_view], consume=False, settings=settings, plugin=host.plugin())
    consumer = Endpoint.open([target_view], produce=False, settings=settings, plugin=host.plugin())
    try:
        data = np.random.default_rng(3).integers(1, 256, source.size, np.uint8)

        def kernel() -> None:
            source[:] = data

        stream.launch(kernel)
        table = (np.arange(8, dtype=np.int32),)
        assert producer.address is not None
        consumer.submit(ReceiveRequested(RequestId("r"), producer.address, ("r",), b"d" * 16, 32, 0, table))
        producer.submit(SourceAnnounced(RequestId("s"), ("r",), b"d" * 16, 32))
        producer.submit(SourceProgressed(RequestId("s"), 0, 1, 32, table, producer.device_fence()))
        producer.submit(SourceFinished(RequestId("s")))
        wait_until(lambda: producer.submitter.producer is not None and host.cuda.events[0].asked > 20, "the fence is asked for")
        assert producer.submitter.producer is not None
        assert producer.submitter.producer.counters.writes == 0
        assert not target[:].any()
        stream.run()
        outcomes: list[Any] = []

        def ended() -> bool:
            consumer.wait_outcome(0.02)
            outcomes.extend(consumer.drain())
            return bool(outcomes)

        wait_until(ended, "the request")
        assert outcomes[0].status is ReceiveStatus.RECEIVED, outcomes[0].error
        np.testing.assert_array_equal(target[:], data)
    finally:
        consumer.close()
        producer.close()


# --- threads, devices and contexts -------------------------------------------------------------------------------------------


def test_every_thread_that_calls_the_transport_has_the_context_of_the_caches_gpu() -> None:
    """The fake transport refuses a call without one. The engine's own current device stays what it is."""
    host = Host(FakeCuda(num_devices=2))
    pair = EndpointPair(host.plugin(), FakeGpu(1), {}, wait_until=wait_until)
    try:
        pair.register("r", [6, 1])
        pair.compute("r", 8, 8, [3, 0])
        pair.finish("r")
        pair.check("r", [3, 0], [6, 1])
    finally:
        pair.close()
    assert host.cuda.current_device() == 0
    assert {thread for thread, device in host.cuda.contexts if device == 1} >= {threading.get_ident()}
    assert all(transport.devices == {1} for transport in host.transports)


def test_a_context_is_made_once_per_thread(host: Host) -> None:
    backend = made(host)
    calls: list[int] = []
    inner = host.cuda.mem_get_info
    host.cuda.mem_get_info = lambda device: (calls.append(threading.get_ident()), inner(device))[1]  # type: ignore[method-assign]

    def use() -> None:
        for _ in range(5):
            backend.transport.poll()

    threads = [threading.Thread(target=use) for _ in range(2)]
    use()
    for thread in threads:
        thread.start()
        thread.join(30)
    assert len(calls) == 2, "this thread has had one since create()"
    backend.close()


# --- memory and layouts ------------------------------------------------------------------------------------------------------


def test_blocks_over_all_layers_are_one_run_in_the_preferred_layout(host: Host) -> None:
    backend = made(host)
    assert backend.info.preferred_layout == "BLHNC"
    num_layers, slab = 3, 2 * 4 * 16 * 2
    memory, region = FakeGpu().allocate(8 * num_layers * slab)
    views = [
        replace(
            FakeGpu().view(f"layer.{idx}")[0],
            address=region.address + idx * slab,
            strides=(num_layers * slab, 128, 32, 2),
            region=region,
        )
        for idx in range(num_layers)
    ]
    layout = backend.describe(views)
    backend.transport.register_memory([region])
    ids = (np.array([5], np.int32),)
    rows, _ = PairPlan(layout, layout).descriptors(0, num_layers, ids, ids)
    assert rows.tolist() == [[region.address + 5 * num_layers * slab, num_layers * slab, 0]]
    assert memory.size == region.length
    backend.close()


def view_and_memory(device: int = 0) -> tuple[CacheView, Memory]:
    return FakeGpu(device).view()


def test_device_numbers_go_into_the_layout() -> None:
    backend = made(Host(FakeCuda(num_devices=4)))
    view, _memory = view_and_memory(3)
    (layer,) = backend.describe([view]).layers
    assert [plane.device_id for plane in layer.planes] == [3]
    backend.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device_type": "cpu"}, "device type 'cpu', this backend serves cuda"),
        ({"device_id": 1}, "is on CUDA device 1, its region on device 0"),
        ({"region": {"kind": MemoryKind.HOST}}, "host memory"),
        ({"device_id": 2, "region": {"device_id": 2}}, "CUDA device 2 is not one of the 2 .*CUDA_VISIBLE_DEVICES"),
        ({"region": {"length": 64}}, "leaves its region of 64 bytes"),
    ],
)
def test_views_that_cannot_be_served_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    backend = made(Host(FakeCuda(num_devices=2)))
    view, _memory = view_and_memory()
    change = {**change, "region": replace(view.region, **change.get("region", {}))}
    with pytest.raises(LayoutError, match=rf"layer\.0.*{words}"):
        backend.describe([replace(view, **change)])
    backend.close()


def test_memory_that_cannot_be_registered_is_refused_with_a_mend(host: Host) -> None:
    backend = made(host)
    memory, region = FakeGpu().allocate(4096)
    with pytest.raises(MemoryRegistrationError, match="host memory: the cuda backend registers that only beside a GPU's"):
        backend.transport.register_memory([replace(region, kind=MemoryKind.HOST)])
    with pytest.raises(MemoryRegistrationError, match="CUDA device 1 is not one of the 1"):
        backend.transport.register_memory([replace(region, device_id=1)])
    with pytest.raises(MemoryRegistrationError, match="kvpush doctor --backend cuda"):
        backend.transport.register_memory([replace(region, address=0)])
    backend.transport.register_memory([region])
    assert memory.size == 4096
    backend.close()


def test_expandable_segments_are_refused_where_the_cache_lies_in_one(host: Host) -> None:
    backend = made(host)
    view, _memory = view_and_memory()
    other = Region(view.region.address, 64)
    host.cuda.segments = [
        {"address": other.address - (1 << 21), "total_size": 1 << 21, "is_expandable": True},
        {"address": view.region.address, "total_size": 1 << 21, "is_expandable": False},
        {"address": view.region.address + (1 << 21), "total_size": 1 << 21, "is_expandable": True},
    ]
    backend.describe([view])
    host.cuda.segments[1]["is_expandable"] = True
    with pytest.raises(LayoutError, match=r"layer\.0.*unset expandable_segments in PYTORCH_ALLOC_CONF"):
        backend.describe([view])

    def no_snapshot() -> list[dict[str, Any]]:
        raise RuntimeError("this allocator does not yet support memory snapshots")

    host.cuda.memory_snapshot = no_snapshot  # type: ignore[method-assign]
    backend.describe([view])
    backend.close()


def test_blocks_are_staged_in_pinned_memory_on_a_stream_of_their_own() -> None:
    host = Host(FakeCuda(runs=False))
    backend = made(host)
    memory, region = FakeGpu().allocate(4096)
    slot = backend.staging_region(1 << 16)
    assert (slot.kind, slot.address) == (MemoryKind.HOST, host.driver.allocated[0].address)
    backend.transport.register_memory([region, slot])
    memory[0:4096] = np.arange(4096, dtype=np.uint16).view(np.uint8)[:4096]
    rows = np.array([(region.address + 1024, 512, 0), (region.address, 256, 0)], np.uint64)
    packed = np.array([(slot.address, 512, 0), (slot.address + 512, 256, 0)], np.uint64)
    copy = backend.start_copy(rows, packed)
    assert not copy.done(), "the device has not come to it"
    assert not host.driver.allocated[0].memory[:1024].any()
    (side,) = host.cuda.side_streams
    assert side is not host.cuda.streams[0]
    side.run()
    assert copy.done()
    found = host.driver.allocated[0].memory[:768]
    assert found.tobytes() == memory[1024:1536].tobytes() + memory[0:256].tobytes()
    backend.close()


def test_pinned_memory_that_a_copy_may_still_write_to_outlives_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(_cuda_copy, "_leaked", kept)
    for ends in (True, False):
        host = Host(FakeCuda(runs=False))
        backend = made(host)
        _memory, region = FakeGpu().allocate(4096)
        slot = backend.staging_region(1 << 16)
        backend.start_copy(np.array([(region.address, 512, 0)], np.uint64), np.array([(slot.address, 512, 0)], np.uint64))
        if ends:
            host.cuda.side_streams[0].run()
        backend.close()
        assert kept == ([] if ends else host.driver.allocated)


def test_memory_that_cannot_be_pinned_costs_staging_and_not_the_instance(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pinned(num_bytes: int) -> Any:
        raise BackendError(f"{num_bytes} bytes of host memory can't be pinned")

    monkeypatch.setattr(host.driver, "pinned", pinned)
    view, _memory = view_and_memory()
    settings = Settings.model_construct(control_port=0, staging="on")
    with pytest.raises(BackendError, match="can't be pinned"):
        Endpoint.open([view], consume=False, settings=settings, plugin=host.plugin())
    settings = Settings.model_construct(control_port=0, staging="auto")
    endpoint = Endpoint.open([view], consume=False, settings=settings, plugin=host.plugin())
    assert "no staging" in caplog.text
    endpoint.close()


def test_a_write_from_memory_that_is_not_registered_is_refused(host: Host) -> None:
    source, target = host.plugin().create("source", {}), host.plugin().create("target", {})
    (mine, my_region), (theirs, their_region) = (FakeGpu().allocate(4096) for _ in range(2))
    source.transport.register_memory([my_region])
    target.transport.register_memory([their_region])
    peer = source.transport.add_peer(target.transport.metadata())
    stranger = host_memory(4096)
    rows = np.array([[stranger.ctypes.data, 64, 0]], np.uint64)
    with pytest.raises(TransportError, match="outside the registered memory"):
        source.transport.post_write(1, peer, rows, np.array([[their_region.address, 64, 0]], np.uint64))
    assert not theirs[:].any()
    assert mine.size == theirs.size
    source.close()
    target.close()


# --- starting ----------------------------------------------------------------------------------------------------------------


def test_no_gpu_is_refused_with_a_mend(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.cuda.num_devices = 0
    with pytest.raises(BackendError, match="finds no GPU: see that nvidia-smi lists one"):
        made(host)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(BackendError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        made(host)
    assert not host.asked


def test_a_torch_without_cuda_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(__version__="2.13.0+cpu", version=SimpleNamespace(cuda=None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(BackendError, match=r"torch 2\.13\.0\+cpu is no CUDA build"):
        made(host, device_module=None)


def test_a_forked_process_is_said(host: Host) -> None:
    def forked() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    host.cuda.current_device = forked  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="CUDA doesn't start: Cannot re-initialize CUDA in forked subprocess"):
        made(host)


def test_an_agent_that_cannot_be_made_is_a_backend_error(host: Host) -> None:
    def link(wanted: object) -> Any:
        raise TransportError("no NIXL agent with backend UCX")

    with pytest.raises(BackendError, match="can't run here: no NIXL agent"):
        made(host, link=link)


def test_options_reach_the_link(host: Host, tmp_path: Path) -> None:
    made(host, {"ucx_tls": "rc,cuda", "ucx_net_devices": "mlx5_0:1", "ucx_error_handling_mode": "none", "retry_window_s": 2})
    (wanted,) = host.asked
    assert (wanted.agent_name, wanted.transport, wanted.retry_window_s) == ("one", "nixl-ucx", 2.0)
    assert (wanted.ucx_tls, wanted.ucx_net_devices, wanted.ucx_error_handling_mode) == ("rc,cuda", "mlx5_0:1", "none")
    for number, (options, transport, window) in enumerate(
        (
            ({}, "nixl-ucx", 10.0),
            ({"transport": "auto"}, "nixl-ucx", 10.0),
            ({"transport": "nixl-libfabric"}, "nixl-libfabric", 30.0),
        )
    ):
        backend = host.plugin(root=tmp_path).create(f"agent-{number}", options)
        assert (host.asked[-1].transport, host.asked[-1].retry_window_s) == (transport, window)
        assert backend.transport.name == transport


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "ucx"}, "transport must be auto, nixl-ucx or nixl-libfabric, not 'ucx'"),
        ({"ucx_net_devices": 1}, "ucx_net_devices must be text"),
        ({"ucx_tls": "tcp,self"}, "ucx_tls is 'tcp,self'.*without cuda_copy.*add 'cuda'"),
        ({"retry_window_s": -1}, "retry_window_s"),
        ({"retry_window_s": True}, "retry_window_s"),
        ({"retry_window_s": float("nan")}, "retry_window_s"),
    ],
)
def test_wrong_options_are_refused(host: Host, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(host, options)
    assert not host.asked


def test_transports_without_cuda_are_refused_before_ucx_takes_the_memory_for_the_hosts(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with pytest.raises(BackendError, match=r"UCX_TLS is 'tcp,self'.*without cuda_copy"):
        made(host)
    made(host, {"transport": "nixl-libfabric"}).close()
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")
    host.plugin().create("two", {"ucx_tls": "tcp"}).close()  # the environment goes before the option


def test_the_link_is_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of NIXL for either transport; neither can move GPU memory on this kind of host."""
    asked: list[tuple[str, Mapping[str, object]]] = []

    class NixlTransport:
        def __init__(self, agent_name: str, **arguments: Any) -> None:
            asked.append((agent_name, arguments))

    monkeypatch.setattr(cuda._nixl, "NixlTransport", NixlTransport)
    for transport in ("nixl-ucx", "nixl-libfabric"):
        cuda._nixl_link(cuda.CudaLink("agent", transport, 7.0, "rc,cuda"))
    common = {"ucx_tls": "rc,cuda", "ucx_net_devices": None, "ucx_error_handling_mode": None, "retry_window_s": 7.0}
    assert asked == [
        ("agent", {"backend": "UCX", "environment": {"UCX_MEMTYPE_CACHE": "n"}, **common}),
        ("agent", {"backend": "LIBFABRIC", "environment": {"FI_EFA_USE_DEVICE_RDMA": "1"}, **common}),
    ]


def test_memory_for_checks_is_a_tensor() -> None:
    """On the CPU here; the same class on a GPU there."""
    pytest.importorskip("torch")
    memory = cuda._Tensor(100, "cpu")
    assert memory.size == 100
    assert not memory[:].any()
    memory[10:20] = np.arange(10, dtype=np.uint8)
    memory[20:30] = 7
    copy = memory[0:40]
    assert copy.tolist() == [0] * 10 + list(range(10)) + [7] * 10 + [0] * 10
    copy[:] = 1
    assert memory[0:10].tolist() == [0] * 10, "what is read is a copy"
    other = cuda._Tensor(100, "cpu")
    assert cuda.CudaPlugin().test_device().copy(other, memory) is True
    assert other[0:100].tolist() == memory[0:100].tolist()
