# SPDX-License-Identifier: Apache-2.0
"""The cuda backend on a real GPU, over real NIXL agents: bytes compared, fences, ways of the bytes, refused memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpush._trial import run_trial
from kvpush.backends._cuda_copy import GpuDigest, LibCuda, SideStream
from kvpush.backends._cuda_device import DeviceContext
from kvpush.backends._data_path import seen_in_words, ucx_in_words
from kvpush.backends._host_digest import digest_layer, scratch_memory
from kvpush.backends._host_layout import host_layout
from kvpush.backends.cuda import CudaPlugin
from kvpush.core.events import ReceiveRequested, ReceiveStatus, SourceAnnounced, SourceFinished, SourceProgressed
from kvpush.core.ids import RequestId
from kvpush.endpoint import Endpoint
from kvpush.settings import Settings
from kvpush.testing.contract import PluginContract, wait_until
from kvpush.testing.fabric import Device

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

_CYCLES = 2_000_000_000
"""About a second of a kernel that does nothing."""


class TestContract(PluginContract):
    """The whole contract suite between two agents of this process, whatever UCX chooses."""

    @pytest.fixture
    def plugin(self) -> CudaPlugin:
        return CudaPlugin()


class TestContractThroughTheHost(TestContract):
    """With the transports that are left without GPUDirect RDMA and CUDA IPC."""

    @pytest.fixture
    def plugin(self, monkeypatch: pytest.MonkeyPatch) -> CudaPlugin:
        monkeypatch.setenv("UCX_TLS", "cuda_copy,tcp,self")
        return CudaPlugin()


class TestContractOnTheLastGpu(TestContract):
    """As a worker of a tensor-parallel engine has it, where there is more than one GPU."""

    @pytest.fixture
    def device(self, torch: Any, plugin: CudaPlugin) -> Iterator[Device]:
        last = torch.cuda.device_count() - 1
        if last == 0:
            pytest.skip("there is one GPU only, which the other tests use")
        device = plugin.test_device()
        device.device_id = last
        with torch.cuda.device(last):
            yield device


@pytest.mark.parametrize(
    "tls", ["", "^sm,cuda_ipc", "cuda_copy,tcp,self", "cuda,sm,self"], ids=["any", "other-hosts", "tcp", "one-host"]
)
def test_between_two_processes(tls: str) -> None:
    """Written by one process, compared in another. Run with -s to see which way the bytes went, and how fast."""
    trial = run_trial("cuda", {}, {"UCX_TLS": tls} if tls else {}, timeout_s=120)
    assert not trial.problem, trial.problem
    assert trial.device
    assert trial.equal
    path = ucx_in_words(trial.asked) if trial.asked else seen_in_words(4 << 20, trial.tcp, trial.rdma, device=True)[0]
    print(f"\nUCX_TLS={tls or 'unset'}: {path}, {trial.gbytes_per_s} GB/s ({trial.asked})")


def test_a_fence_ends_with_the_kernels_before_it(torch: Any) -> None:
    backend = CudaPlugin().create("fence", {})
    stream = torch.cuda.current_stream()
    cycles, seen = _CYCLES, False
    for _ in range(5):  # a machine that stalls for longer than the kernel runs gets another try
        torch.cuda._sleep(cycles)
        token = backend.device_fence()
        ended = backend.fence_done(token)
        still_busy = not stream.query()
        assert not (ended and still_busy), "the fence ended before the kernel"
        wait_until(lambda token=token: backend.fence_done(token), "the fence")
        assert stream.query(), "nothing was launched after the fence"
        if still_busy:
            seen = True
            break
        cycles *= 4
    assert seen, "the kernel never ran for long enough to tell"
    backend.close()


def test_a_fence_is_of_the_current_stream(torch: Any) -> None:
    """An engine may compute on a stream of its own; what runs on another is not waited for."""
    backend = CudaPlugin().create("streams", {})
    busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(_CYCLES)
        slow = backend.device_fence()
    with torch.cuda.stream(idle):
        quick = backend.device_fence()
    wait_until(lambda: backend.fence_done(quick), "the fence of the idle stream")
    ended = backend.fence_done(slow)
    assert not (ended and not busy.query())
    wait_until(lambda: backend.fence_done(slow), "the fence of the busy stream")
    assert busy.query()
    backend.close()


def test_what_is_computed_late_is_sent_late(torch: Any) -> None:
    """The kernel that writes the blocks runs a second after its progress was told. Without a fence old bytes would arrive."""
    plugin = CudaPlugin()
    device = plugin.test_device()
    (source_view, source), (target_view, target) = device.view(), device.view()
    settings = Settings.model_construct(control_port=0, verify="off", backend_options={})
    producer = Endpoint.open([source_view], consume=False, settings=settings, plugin=plugin)
    consumer = Endpoint.open([target_view], produce=False, settings=settings, plugin=plugin)
    try:
        data = np.random.default_rng(3).integers(1, 256, source.size, np.uint8)
        late = torch.from_numpy(data).cuda()
        table = (np.arange(8, dtype=np.int32),)
        assert producer.address is not None
        consumer.submit(ReceiveRequested(RequestId("r"), producer.address, ("r",), b"d" * 16, 32, 0, table))
        producer.submit(SourceAnnounced(RequestId("s"), ("r",), b"d" * 16, 32))
        torch.cuda._sleep(_CYCLES)
        source.tensor.copy_(late, non_blocking=True)
        producer.submit(SourceProgressed(RequestId("s"), 0, 1, 32, table, producer.device_fence()))
        producer.submit(SourceFinished(RequestId("s")))
        outcomes: list[Any] = []

        def ended() -> bool:
            consumer.wait_outcome(0.02)
            outcomes.extend(consumer.drain())
            return bool(outcomes)

        wait_until(ended, "the request")
        assert outcomes[0].status is ReceiveStatus.RECEIVED, outcomes[0].error
        np.testing.assert_array_equal(target[0 : target.size], data)
    finally:
        consumer.close()
        producer.close()


@pytest.mark.parametrize("scratch_bytes", [4 << 20, 1000])
def test_digests_are_those_of_the_same_bytes_on_the_host(torch: Any, scratch_bytes: int) -> None:
    """And are computed while the engine's stream is busy, with which they have nothing to do."""
    view, memory = CudaPlugin().test_device().view(num_blocks=64)
    memory[0 : memory.size] = np.random.default_rng(4).integers(0, 256, memory.size, np.uint8)
    layer = host_layout([view], ("cuda",)).layers[0]
    copy = memory[0 : memory.size].copy()
    (plane,) = layer.planes
    there = msgspec.structs.replace(
        layer, planes=(msgspec.structs.replace(plane, base=plane.base - view.region.address + copy.ctypes.data),)
    )
    digest = GpuDigest(torch.cuda, LibCuda(), DeviceContext(torch.cuda, view.device_id), scratch_bytes=scratch_bytes)
    torch.cuda._sleep(_CYCLES)
    for ids in ([5], [0, 1, 2, 3], [9, 3, 4, 5, 63], list(range(64))):
        blocks = np.array(ids, np.int64)
        assert digest(layer, blocks, scratch_memory()) == digest_layer(there, blocks, scratch_memory())


def test_rows_are_copied_both_ways_on_a_stream_of_their_own(torch: Any) -> None:
    """From the GPU to pinned memory and from there to other places on the GPU; nothing else is touched."""
    driver, context = LibCuda(), DeviceContext(torch.cuda, 0)
    side = SideStream(torch.cuda, driver, context)
    device, size = CudaPlugin().test_device(), 1 << 20
    (source, source_region), (target, target_region) = device.allocate(size), device.allocate(size)
    rng = np.random.default_rng(6)
    data = rng.integers(0, 256, size, np.uint8)
    source[0:size] = data
    with context.current():
        pinned = driver.pinned(size)
    lengths, src, dst = rng.integers(1, 4096, 200), 5000 * rng.permutation(200), 5000 * rng.permutation(200)
    packed = np.concatenate(([0], np.cumsum(lengths[:-1])))

    def rows(base: int, offsets: Any) -> Any:
        return np.stack([base + offsets, lengths, np.zeros(200, np.int64)], axis=1).astype(np.uint64)

    out = side.start(rows(source_region.address, src), rows(pinned.address, packed))
    wait_until(out.done, "the copy to the host")
    back = side.start(rows(pinned.address, packed), rows(target_region.address, dst))
    wait_until(back.done, "the copy to the GPU")
    expected = np.zeros(size, np.uint8)
    for here, there, length in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        expected[there : there + length] = data[here : here + length]
    np.testing.assert_array_equal(target[0:size], expected)


_EXPANDABLE = """
import warnings
warnings.simplefilter("ignore")
import torch
from kvpush.backends.cuda import CudaPlugin
from kvpush.errors import LayoutError
plugin = CudaPlugin()
view, memory = plugin.test_device().view()
backend = plugin.create("expandable", {})
print("segments", any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
try:
    backend.describe([view])
    print("taken")
except LayoutError as error:
    print("refused", error.message)
backend.close()
"""


@pytest.mark.parametrize("wanted", [True, False])
def test_expandable_segments_are_refused(wanted: bool) -> None:
    """As torch itself says whether it uses them, which it does not on every platform."""
    setting = f"expandable_segments:{wanted}"
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", _EXPANDABLE], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    used, answer = [line for line in done.stdout.splitlines() if line.startswith(("segments", "refused", "taken"))]
    if used == "segments True":
        assert wanted
        assert "unset expandable_segments" in answer
    else:
        assert answer == "taken"
