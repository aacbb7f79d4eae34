# SPDX-License-Identifier: Apache-2.0
"""The neuron backend over a mock of the Neuron runtime (``libnrt.c``), whose memory shows incoming writes late.

No Trainium is involved: what these tests show is that the backend does what docs/accelerators.md says, not that a real device
agrees.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeGpu
from fake_cuda import Host as GpuHost
from mock_neuron import CHILD, CLOSED, INIT, START, Hbm, Host, MockNrt, MockReader, NeuronDevice, NeuronModule

from kvpush.backends import neuron
from kvpush.backends._host_layout import host_layout
from kvpush.backends.base import Backend, CacheView, VisibilityFence
from kvpush.backends.neuron import LibNrt, NeuronBackend, NeuronPlugin
from kvpush.core.events import ReceiveRequested, ReceiveStatus, SourceAnnounced, SourceFinished, SourceProgressed
from kvpush.core.ids import RequestId
from kvpush.core.layout import CacheLayout
from kvpush.core.transport import MemoryKind, Region
from kvpush.endpoint import Endpoint
from kvpush.errors import BackendError, ConfigError, LayoutError, MemoryRegistrationError
from kvpush.settings import Settings
from kvpush.testing.contract import PluginContract, wait_until
from kvpush.testing.endpoints import EndpointPair
from kvpush.testing.fabric import Device, TransportPair, backend_pair


@pytest.fixture(scope="module")
def nrt(tmp_path_factory: pytest.TempPathFactory) -> MockNrt:
    return MockNrt(tmp_path_factory.mktemp("nrt"))


@pytest.fixture
def host(nrt: MockNrt, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for name in ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "NEURON_RT_ENABLE_P2P"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NEURON_RT_MAP_HBM", "1")
    monkeypatch.setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0")
    nrt.lib.mock_reset(INIT)
    yield Host(nrt)
    nrt.lib.mock_reset(INIT)


class TestContract(PluginContract):
    """The whole contract suite, bytes compared as the device sees them."""

    @pytest.fixture
    def plugin(self, host: Host) -> NeuronPlugin:
        return host.plugin()

    @pytest.fixture
    def device(self, host: Host) -> Device:
        return NeuronDevice(host.nrt)


class FakeTensor:
    """A torch tensor of bytes in the mock's HBM."""

    device = SimpleNamespace(index=None)

    def __init__(self, nrt: MockNrt, num_bytes: int) -> None:
        nrt.lib.nrt_init(1, b"", b"")
        self.hbm = Hbm(nrt, num_bytes)

    def data_ptr(self) -> int:
        return self.hbm.address

    def cpu(self) -> Any:
        array = self.hbm[:]
        return SimpleNamespace(numpy=lambda: array)

    def copy_(self, host: Any) -> None:
        self.hbm[:] = host.numpy()


class TestContractOnTorchTensors(PluginContract):
    """With the memory that the plugin brings itself, as ``kvpush backends check neuron`` runs it; the runtime starts with the
    first tensor."""

    @pytest.fixture(autouse=True)
    def torch(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        def zeros(num_bytes: int, *, dtype: str, device: str) -> FakeTensor:
            assert (dtype, device) == ("uint8", "neuron")
            return FakeTensor(host.nrt, num_bytes)

        torch = SimpleNamespace(__version__="2.13.3", uint8="uint8", zeros=zeros, neuron=NeuronModule())
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace())
        host.nrt.lib.mock_reset(START)

    @pytest.fixture
    def plugin(self, host: Host) -> NeuronPlugin:
        plugin = host.plugin(device_module=None)
        plugin.test_device()
        return plugin


# --- what has been written, and what the device sees -------------------------------------------------------------------------


def written(host: Host, plugin: NeuronPlugin, *, settle: bool = True) -> tuple[TransportPair, np.ndarray[Any, Any]]:
    """A pair whose target has been written to, completely as far as the transport knows, and the bytes that it should have."""
    pair = backend_pair(plugin, NeuronDevice(host.nrt), wait_until=wait_until)
    data = np.random.default_rng(5).integers(1, 256, 4096, np.uint8)
    pair.source.memory[:4096] = data
    pair.source.transport.post_write(1, pair.peer, pair.source.rows((0, 4096)), pair.target.rows((8192, 4096)))
    wait_until(lambda: bool(pair.source.transport.poll()), "the completion")
    if settle:
        pair.settle()
    return pair, data


def test_completed_writes_are_not_visible_without_a_fence(host: Host) -> None:
    """The mock does what trn2 does; else the tests of the fence would prove nothing."""
    pair, data = written(host, host.plugin(), settle=False)
    assert not pair.target.memory[:].any(), "a read by the CPU must not show it, and must not bring it"
    assert not pair.target.memory[:].any()
    pair.settle()
    np.testing.assert_array_equal(pair.target.memory[8192 : 8192 + 4096], data)
    pair.close()


class WithoutFence(NeuronPlugin):
    """The fault that must not go unseen."""

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        backend = super().create(agent_name, options)
        backend.start_visibility_fence = lambda regions: None  # type: ignore[method-assign]
        return backend


class FencedByCpu(NeuronPlugin):
    """Reads back through the runtime instead of the network card."""

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        backend = super().create(agent_name, options)

        def start(regions: Sequence[Region]) -> VisibilityFence:
            memories = [region.keepalive for region in backend._transport.device_regions]  # type: ignore[attr-defined]
            assert all(isinstance(memory, Hbm) and len(memory[:]) for memory in memories)
            return SimpleNamespace(done=lambda: True)  # type: ignore[return-value]

        backend.start_visibility_fence = start  # type: ignore[method-assign]
        return backend


@pytest.mark.parametrize("kind", [WithoutFence, FencedByCpu])
def test_a_missing_fence_is_found_by_the_contract(host: Host, kind: type[NeuronPlugin]) -> None:
    plugin = kind(runtime=host.nrt.runtime(), link=host.link, device_module=SimpleNamespace(synchronize=lambda: None))
    pair = EndpointPair(plugin, NeuronDevice(host.nrt), {}, wait_until=wait_until)
    try:
        pair.register("r", [6, 1])
        pair.compute("r", 8, 8, [3, 0])
        pair.finish("r")
        with pytest.raises(AssertionError, match="bytes differ"):
            pair.check("r", [3, 0], [6, 1])
    finally:
        pair.close()


def test_a_request_is_reported_only_after_the_read_back(host: Host) -> None:
    """And what is read back are the ends of every run of blocks that was written, through the consumer's own card."""
    pair = EndpointPair(host.plugin(), NeuronDevice(host.nrt), {}, wait_until=wait_until)
    consumer = host.readers[1]
    consumer.polls = 10**9
    try:
        pair.register("r", [6, 1, 2])
        pair.compute("r", 12, 12, [3, 0, 5])
        pair.finish("r")
        wait_until(lambda: bool(consumer.reads), "the read-back")
        assert not pair.consumer.wait_outcome(0.1), "nothing is reported while the fence runs"
        assert not host.readers[0].reads, "the producer has nothing to read back"
        (rows,) = consumer.reads
        expected = {
            plane.base + (last + 1) * plane.block_stride - 64
            for layer in pair.consumer.layout.layers
            for plane in layer.planes
            for last in (6, 2)
        }
        assert {int(row[0]) for row in rows} == expected
        assert set(rows[:, 1].tolist()) == {64}
    finally:
        pair.consumer.close(0.0)
        pair.producer.close()


def test_a_failed_read_back_fails_the_request_and_not_the_next(host: Host) -> None:
    pair = EndpointPair(host.plugin(), NeuronDevice(host.nrt), {}, wait_until=wait_until)
    try:
        host.nrt.lib.mock_fail_reads(1)
        pair.register("bad", [6, 1])
        pair.compute("bad", 8, 8, [3, 0])
        pair.finish("bad")
        ended = pair.received("bad")
        assert ended.status is ReceiveStatus.FAILED
        assert "the card can't read" in str(ended.error)
        pair.register("good", [6, 1])
        pair.compute("good", 8, 8, [4, 2])
        pair.finish("good")
        pair.check("good", [4, 2], [6, 1])
    finally:
        pair.close()


def opened(host: Host, **changes: Any) -> tuple[NeuronBackend, Region]:
    """A working half with one registered allocation."""
    backend = host.plugin(**changes).create("one", {})
    assert isinstance(backend, NeuronBackend)
    _, region = NeuronDevice(host.nrt).allocate(1 << 16)
    backend.transport.register_memory([region])
    return backend, region


def test_ends_of_ranges(host: Host) -> None:
    backend, region = opened(host)
    other, near = 1 << 20, region.address
    registered = [region, Region(near + other, 4096, 0, MemoryKind.DEVICE)]

    def ends(*spans: tuple[int, int], device: int = 0) -> list[tuple[int, int]]:
        rows = neuron._ends([Region(near + lo, length, device) for lo, length in spans], registered)
        return [(int(address) - near, int(length)) for address, length, _ in rows]

    assert ends((0, 4096), (8192, 100)) == [(4032, 64), (8228, 64)]
    assert ends((8192, 10)) == [(8192, 10)]
    assert ends((65536 - 8, 8)) == [(65528, 8)]
    assert ends((0, other + 100)) == [(65472, 64), (other + 36, 64)], "a range over two allocations has two ends"
    assert ends((65536, 100), (other + 4096, 10)) == [], "outside"
    assert ends((0, 4096), device=1) == []
    assert neuron._ends([Region(near, 10)], []).shape == (0, 3)
    backend.close()


def test_long_reads_go_in_pieces_and_nothing_waits_for_the_others(host: Host) -> None:
    backend, region = opened(host)
    (reader,) = host.readers
    long = backend.start_visibility_fence([Region(region.address + 64 * k, 10) for k in range(600)])
    assert long is not None
    wait_until(long.done, "the long fence")
    assert [len(rows) for rows in reader.reads] == [256, 256, 88]
    reader.polls = 10**9
    stuck = backend.start_visibility_fence([region])
    assert stuck is not None
    wait_until(lambda: len(reader.reads) == 4, "the read that does not end")
    reader.polls = 0
    quick = backend.start_visibility_fence([region])
    assert quick is not None
    wait_until(quick.done, "the fence behind it")
    assert not stuck.done()
    assert reader.metadata == [backend.transport.metadata()]
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        stuck.done()
    with pytest.raises(BackendError, match="closed"):
        backend.start_visibility_fence([region])
    assert reader.closed == 1


def test_memory_that_nobody_can_write_needs_no_fence(host: Host) -> None:
    backend, region = opened(host)
    assert backend.start_visibility_fence([Region(region.address + region.length, 100)]) is None
    assert backend.start_visibility_fence([]) is None
    backend.close()
    assert not host.readers[0].reads


# --- the runtime and the environment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"), [(START, "allocate a tensor on the device"), (CLOSED, "closed"), (CHILD, "forked")]
)
def test_no_agent_is_made_before_the_runtime_is_up(host: Host, state: int, words: str) -> None:
    host.nrt.lib.mock_reset(state)
    with pytest.raises(BackendError, match=words):
        host.plugin().create("early", {})
    assert not host.readers, "an agent made now would register HBM as system memory"
    host.nrt.lib.mock_reset(INIT)
    host.plugin().create("late", {}).close()


def test_a_runtime_that_nobody_has_loaded_is_not_loaded_by_us(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "libnrt.so.1"
    path.write_bytes(host.nrt.path.read_bytes())
    assert "not loaded" in LibNrt(str(path)).problem()
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NEURON_RT_MAP_HBM", None, "NEURON_RT_MAP_HBM is not 1"),
        ("NEURON_RT_MAP_HBM", "0", "NEURON_RT_MAP_HBM is not 1"),
        ("FI_EFA_ENABLE_SHM_TRANSFER", None, "set it to 0"),
        ("FI_EFA_ENABLE_SHM_TRANSFER", "1", "set it to 0"),
        ("FI_EFA_USE_DEVICE_RDMA", "0", "FI_EFA_USE_DEVICE_RDMA is 0"),
        ("FI_PROVIDER", "tcp", "FI_PROVIDER is 'tcp'"),
        ("NEURON_RT_ENABLE_P2P", "0", "NEURON_RT_ENABLE_P2P is 0"),
    ],
)
def test_an_environment_that_gives_wrong_kv_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, words: str
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=words):
        host.plugin().create("one", {})
    assert not host.readers
    assert any(words in reason for reason in host.plugin().probe().reasons)


def test_options(host: Host) -> None:
    windows: list[float] = []

    def link(agent_name: str, retry_window_s: float) -> Any:
        windows.append(retry_window_s)
        return host.link(agent_name, retry_window_s)

    host.plugin(link=link).create("one", {"retry_window_s": 2}).close()
    host.plugin(link=link).create("two", {}).close()
    assert windows == [2.0, 30.0]
    for wrong in (-1, "2", True, float("nan"), float("inf"), None):
        with pytest.raises(ConfigError, match="retry_window_s"):
            host.plugin().create("three", {"retry_window_s": wrong})


def test_the_link_is_nixl_with_libfabric_on_efa(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of NIXL; its LIBFABRIC plugin can't be loaded on this kind of host."""
    asked: list[tuple[str, str, Mapping[str, object]]] = []

    class Fake:
        def __init__(self, agent_name: str, **arguments: Any) -> None:
            asked.append((type(self).__name__, agent_name, arguments))

    class NixlTransport(Fake):
        pass

    class NixlReader(Fake):
        pass

    monkeypatch.setattr(neuron._nixl, "NixlTransport", NixlTransport)
    monkeypatch.setattr(neuron._nixl, "NixlReader", NixlReader)
    neuron._efa_link("agent", 7.0)
    environment = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    assert asked == [
        ("NixlTransport", "agent", {"backend": "LIBFABRIC", "retry_window_s": 7.0, "environment": environment}),
        ("NixlReader", "agent-reader", {"backend": "LIBFABRIC", "kind": MemoryKind.DEVICE, "environment": environment}),
    ]


# --- memory and layouts ------------------------------------------------------------------------------------------------------


def test_k_and_v_are_planes_of_their_own(host: Host) -> None:
    backend, _ = opened(host)
    view, _memory = host.view()
    assert view.shape == (2, 8, 2, 4, 16)
    (layer,) = backend.describe([view]).layers
    assert [plane.content for plane in layer.planes] == ["k", "v"]
    assert layer.planes[1].base == layer.planes[0].base + view.region.length // 2
    assert (layer.format, layer.split) == ("HNC", "head")
    older = replace(view, device_type="privateuseone")
    assert backend.describe([older]) == backend.describe([view])
    backend.close()


def test_memory_without_an_address_names_the_variable(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, region = opened(host)
    monkeypatch.delenv("NEURON_RT_MAP_HBM")
    view, _memory = host.view()
    assert view.address == view.region.address == 0, "as torch-neuronx gives it then"
    with pytest.raises(LayoutError, match=r"layer\.0.* NEURON_RT_MAP_HBM=1 .*first device tensor"):
        backend.describe([view])
    with pytest.raises(MemoryRegistrationError, match="NEURON_RT_MAP_HBM=1"):
        backend.transport.register_memory([replace(region, address=0)])
    backend.close()


def test_xla_and_host_memory_are_refused_with_a_reason(host: Host) -> None:
    backend, _ = opened(host)
    view, _memory = host.view()
    with pytest.raises(LayoutError, match="native backend"):
        backend.describe([replace(view, device_type="xla")])
    with pytest.raises(LayoutError, match="host memory"):
        backend.describe([replace(view, region=replace(view.region, kind=MemoryKind.HOST))])
    backend.close()


def test_device_memory_without_its_network_card_is_refused(host: Host) -> None:
    backend, region = opened(host)
    transport = backend._transport
    assert transport.efa == {"0000:a1:00.0": 1}
    assert transport.device_regions == (region,)
    stranger = np.zeros(4096, np.uint8)
    with pytest.raises(MemoryRegistrationError, match="names no EFA device"):
        transport.register_memory([Region(stranger.ctypes.data, 4096, 0, MemoryKind.DEVICE, stranger)])
    transport.register_memory([Region(stranger.ctypes.data, 4096, 0, MemoryKind.HOST, stranger)])
    host.nrt.lib.mock_set_efa(0)
    with pytest.raises(MemoryRegistrationError, match="16 on trn2"):
        transport.register_memory([region])
    assert transport.device_regions == (region,)
    backend.close()


# --- device fences -----------------------------------------------------------------------------------------------------------


def test_a_device_fence_is_an_event_on_the_current_stream(host: Host) -> None:
    backend, _ = opened(host)
    token = backend.device_fence()
    assert not backend.fence_done(token)
    assert backend.fence_done(token)
    backend.close()


def test_a_failed_device_is_said(host: Host) -> None:
    class Broken:
        def record(self) -> None: ...

        def query(self) -> bool:
            raise RuntimeError("NRT_EXEC_HW_ERR")

    backend, _ = opened(host, device_module=SimpleNamespace(Event=Broken))
    token = backend.device_fence()
    with pytest.raises(BackendError, match="NRT_EXEC_HW_ERR"):
        backend.fence_done(token)
    backend.close()


def test_without_events_a_thread_waits_for_the_device(host: Host) -> None:
    computed, called = threading.Event(), []

    def synchronize() -> None:
        called.append(threading.current_thread())
        assert computed.wait(30)

    backend, _ = opened(host, device_module=SimpleNamespace(synchronize=synchronize))
    first = backend.device_fence()
    wait_until(lambda: bool(called), "the wait")
    second = backend.device_fence()
    assert not backend.fence_done(first)
    computed.set()
    wait_until(lambda: backend.fence_done(first), "the first fence")
    wait_until(lambda: backend.fence_done(second), "the second fence")
    assert len(called) == 2, "what was queued after the first wait began needs another one"
    assert threading.current_thread() not in called
    backend.close()


def test_a_wait_that_fails_is_said(host: Host) -> None:
    def synchronize() -> None:
        raise RuntimeError("the device is gone")

    backend, _ = opened(host, device_module=SimpleNamespace(synchronize=synchronize))
    token = backend.device_fence()

    assert isinstance(token, neuron._Synchronized)
    assert token.ended.wait(30)
    with pytest.raises(BackendError, match="the device is gone"):
        backend.fence_done(token)
    backend.close()


@pytest.mark.parametrize("name", ["neuron", "privateuseone"])
def test_the_device_is_found_in_torch_by_either_name(host: Host, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch = SimpleNamespace(__version__="2.13.3")
    monkeypatch.setitem(sys.modules, "torch", torch)
    backend, _ = opened(host, device_module=None)
    view, _memory = host.view()
    with pytest.raises(LayoutError, match="import torch_neuronx"):
        backend.describe([view])
    setattr(torch, name, SimpleNamespace(Event=lambda: SimpleNamespace(record=lambda: None)))
    backend.describe([view])
    assert backend.device_fence() is not None
    backend.close()


REAL_TORCH = """
import types, sys, warnings
warnings.simplefilter("ignore")
import torch
from kvpush.backends.neuron import DEVICE_TYPES, _torch_device
from kvpush.errors import LayoutError
try:
    _torch_device()
except LayoutError as error:
    print("without:", error.message)
name = sys.argv[1]
if name == "neuron":
    torch.utils.rename_privateuse1_backend(name)
module = types.SimpleNamespace(Event=object)
torch._register_device_module(name, module)
found, found_module = _torch_device()
print("found:", found, found_module is module, torch.device(found + ":1").type in DEVICE_TYPES)
"""


@pytest.mark.parametrize("name", ["neuron", "privateuseone"])
def test_real_torch_renames_its_private_device_so(name: str) -> None:
    """In a process of its own, as it can't be undone. There are no tensors on it: those need a backend in C++."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = subprocess.run([sys.executable, "-c", REAL_TORCH, name], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    without, found = done.stdout.splitlines()
    assert "import torch_neuronx" in without
    assert found == f"found: {name} True True"


# --- a pair of different devices -------------------------------------------------------------------------------------------


class GpuDevice(FakeGpu):
    """K and V together in a block, tokens before heads."""

    order = "B2NHC"


def logical(view: CacheView, memory: Any) -> np.ndarray[Any, Any]:
    """The cache as an array [block, K/V, head, token, content], as the device sees it."""
    array = np.asarray(memory[:]).view(np.uint16).reshape(view.shape)
    return array.transpose([view.order.index(letter) for letter in "B2HNC"])


@pytest.mark.parametrize("prefill", ["neuron", "gpu"])
def test_between_trainium_and_a_gpu(host: Host, prefill: str) -> None:
    """The two backends over one wire, two layers, either way round: element for element as the layouts say, and nothing else is
    touched."""
    rng = np.random.default_rng(9)
    gpus = GpuHost()
    gpus.fabric = host.fabric
    sides: dict[str, tuple[Any, list[tuple[CacheView, Any]]]] = {}
    for name, plugin, device in (("neuron", host.plugin(), NeuronDevice(host.nrt)), ("gpu", gpus.plugin(), GpuDevice())):
        caches = [device.view(f"layer.{idx}") for idx in range(2)]
        for _, memory in caches:
            memory[:] = rng.integers(0, 256, memory.size, np.uint8)
        sides[name] = plugin, caches
    decode = "gpu" if prefill == "neuron" else "neuron"
    (source_plugin, source), (target_plugin, target) = sides[prefill], sides[decode]

    def settings(side: str) -> Settings:
        options: dict[str, object] = {"transport": "nixl-libfabric"} if side == "gpu" else {}
        return Settings.model_construct(control_port=0, verify="off", backend_options=options)

    producer = Endpoint.open([v for v, _ in source], consume=False, settings=settings(prefill), plugin=source_plugin)
    consumer = Endpoint.open([v for v, _ in target], produce=False, settings=settings(decode), plugin=target_plugin)
    try:
        before = [logical(*cache).copy() for cache in target]
        here, there = np.array([5, 0, 3], np.int32), np.array([2, 7, 1], np.int32)
        assert producer.address is not None
        consumer.submit(ReceiveRequested(RequestId("r"), producer.address, ("r",), b"d" * 16, 12, 0, (there,)))
        producer.submit(SourceAnnounced(RequestId("s"), ("r",), b"d" * 16, 12))
        producer.submit(SourceProgressed(RequestId("s"), 0, 2, 12, (here,), producer.device_fence()))
        producer.submit(SourceFinished(RequestId("s")))
        outcomes: list[Any] = []

        def ended() -> bool:
            consumer.wait_outcome(0.02)
            outcomes.extend(consumer.drain())
            return bool(outcomes)

        wait_until(ended, "the request")
        assert outcomes[0].status is ReceiveStatus.RECEIVED, outcomes[0].error
        for idx, cache in enumerate(target):
            expected = before[idx]
            expected[there] = logical(*source[idx])[here]
            np.testing.assert_array_equal(logical(*cache), expected)
    finally:
        consumer.close()
        producer.close()


def test_the_layouts_of_that_pair_differ(host: Host) -> None:
    """Else the test above would compare nothing but copies."""
    layouts: list[CacheLayout] = [
        host_layout([device.view()[0]], ("neuron", "cuda")) for device in (NeuronDevice(host.nrt), GpuDevice())
    ]
    assert [[plane.content for plane in layout.layers[0].planes] for layout in layouts] == [["k", "v"], ["kv"]]
    assert [layout.layers[0].format for layout in layouts] == ["HNC", "2NHC"]


def test_the_mock_reader_is_used_only_by_the_fence_thread(host: Host) -> None:
    threads: set[str] = set()

    class Watched(MockReader):
        def __getattribute__(self, name: str) -> Any:
            if name in ("attach", "read", "close"):
                threads.add(threading.current_thread().name)
            return super().__getattribute__(name)

    def link(agent_name: str, retry_window_s: float) -> Any:
        transport, _ = host.link(agent_name, retry_window_s)
        return transport, Watched(host.nrt)

    backend, region = opened(host, link=link)
    fence = backend.start_visibility_fence([region])
    assert fence is not None
    wait_until(fence.done, "the fence")
    backend.close()
    assert threads == {"kvpush-neuron-fence"}
