# SPDX-License-Identifier: Apache-2.0
"""Copies on a side stream and digests of GPU memory, over a fake of torch and of the driver; and the binding of the real driver
over a mock of its library (``libcuda.c``)."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeDriver, FakeGpu, Host

from kvpush.backends import _cuda_copy
from kvpush.backends._cuda_copy import GpuDigest, LibCuda, SideStream
from kvpush.backends._cuda_device import DeviceContext
from kvpush.backends._host_digest import digest_layer, scratch_memory
from kvpush.backends._host_layout import host_layout
from kvpush.backends.loopback import WriteFault
from kvpush.core.layout import LayerLayout
from kvpush.core.transport import Descriptors
from kvpush.errors import BackendError, IntegrityError
from kvpush.testing.contract import wait_until
from kvpush.testing.endpoints import EndpointPair
from kvpush.testing.fabric import Bytes, host_memory


def rows(memory: Bytes, *spans: tuple[int, int]) -> Descriptors:
    return np.array([(memory.ctypes.data + offset, length, 0) for offset, length in spans], np.uint64).reshape(-1, 3)


def side_stream(cuda: FakeCuda) -> tuple[SideStream, FakeDriver]:
    driver = FakeDriver(cuda)
    return SideStream(cuda, driver, DeviceContext(cuda, cuda.num_devices - 1)), driver


def test_a_copy_ends_when_its_stream_has_run_and_no_other_is_waited_for() -> None:
    cuda = FakeCuda(num_devices=2, runs=False)
    side, _ = side_stream(cuda)
    source, target = host_memory(4096), host_memory(4096)
    source[:] = np.random.default_rng(1).integers(1, 256, 4096, np.uint8)
    for stream in cuda.streams:
        stream.launch()  # what the engine computes
    copy = side.start(rows(source, (0, 100), (1000, 0), (2000, 300)), rows(target, (50, 100), (0, 0), (3000, 300)))
    assert not copy.done()
    assert not target.any()
    (stream,) = cuda.side_streams
    assert stream.device == 1
    stream.run()
    assert copy.done()
    assert copy.done()
    expected = host_memory(4096)
    expected[50:150], expected[3000:3300] = source[:100], source[2000:2300]
    np.testing.assert_array_equal(target, expected)
    assert side.start(rows(source), rows(target)).done(), "nothing to copy"
    assert len(cuda.side_streams) == 1
    assert len(cuda.events) == 1, "its event is used again"


def test_a_copy_that_is_refused_half_way_ends_after_what_had_begun() -> None:
    cuda = FakeCuda(runs=False)
    side, driver = side_stream(cuda)
    source, target = host_memory(4096, 7), host_memory(4096)
    driver.fail_at = 1
    copy = side.start(rows(source, (0, 100), (100, 100)), rows(target, (0, 100), (200, 100)))
    assert not copy.done(), "the first row may be under way"
    cuda.side_streams[0].run()
    for _ in range(2):
        with pytest.raises(BackendError, match="INVALID_VALUE"):
            copy.done()


def test_without_an_event_to_tell_its_end_no_copy_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes an event when it is first recorded, and that may be refused while the device works on."""
    cuda = FakeCuda(runs=False)
    side, _ = side_stream(cuda)
    source, target = host_memory(4096, 7), host_memory(4096)
    record = cuda.Event.record

    def refused(event: Any, stream: Any) -> None:
        if not event.records:
            raise RuntimeError("CUDA error: out of memory")
        record(event, stream)

    monkeypatch.setattr(cuda.Event, "record", refused)
    with pytest.raises(BackendError, match="out of memory"):
        side.start(rows(source, (0, 100)), rows(target, (0, 100)))
    for stream in cuda.side_streams:
        stream.run()
    assert not target.any(), "it was said that nothing was begun: its blocks have been given away"


def test_a_device_that_fails_is_said() -> None:
    cuda = FakeCuda(runs=False)
    side, _ = side_stream(cuda)
    memory = host_memory(4096)
    copy = side.start(rows(memory, (0, 100)), rows(memory, (200, 100)))
    cuda.failure = "CUDA error: unspecified launch failure"
    with pytest.raises(BackendError, match=r"device 0 has failed.*unspecified launch failure"):
        copy.done()
    with pytest.raises(BackendError, match="device 0 has failed"):
        side.start(rows(memory, (0, 100)), rows(memory, (200, 100)))
    with pytest.raises(BackendError, match="no stream to copy on"):
        SideStream(cuda, FakeDriver(cuda), DeviceContext(cuda, 0)).start(rows(memory), rows(memory))


def test_rows_that_do_not_pair_are_refused() -> None:
    cuda = FakeCuda()
    side, driver = side_stream(cuda)
    memory = host_memory(4096)
    for dst in (rows(memory, (0, 11)), rows(memory, (0, 10), (20, 10))):
        with pytest.raises(BackendError, match="don't pair"):
            side.start(rows(memory, (100, 10)), dst)
    assert not driver.copied


# --- digests -----------------------------------------------------------------------------------------------------------------


def random_layer(order: str = "BHNC") -> tuple[LayerLayout, Any]:
    device = FakeGpu()
    device.order = order
    view, memory = device.view(num_blocks=16)
    memory[:] = np.random.default_rng(4).integers(0, 256, memory.size, np.uint8)
    return host_layout([view], ("cuda",)).layers[0], memory


@pytest.mark.parametrize("order", ["BHNC", "2BHNC"])
@pytest.mark.parametrize("scratch_bytes", [1 << 20, 1000, 512, 300, 1])
def test_a_digest_is_that_of_the_same_bytes_on_the_host(order: str, scratch_bytes: int) -> None:
    """Whatever fits into the scratch memory at once: all blocks, some, or a part of one (of 256 or 512 bytes)."""
    layer, _memory = random_layer(order)
    cuda = FakeCuda()
    digest = GpuDigest(cuda, FakeDriver(cuda), DeviceContext(cuda, 0), scratch_bytes=scratch_bytes)
    for ids in ([5], [0, 1, 2, 3], [9, 3, 4, 5, 15], []):
        blocks = np.array(ids, np.int64)
        assert digest(layer, blocks, scratch_memory()) == digest_layer(layer, blocks, scratch_memory())
    with pytest.raises(BackendError, match="leave the pool of 16"):
        digest(layer, np.array([16]), scratch_memory())


def test_neighbouring_blocks_are_copied_in_one_piece() -> None:
    layer, _memory = random_layer()
    cuda = FakeCuda()
    driver = FakeDriver(cuda)
    GpuDigest(cuda, driver, DeviceContext(cuda, 0))(layer, np.array([3, 4, 5, 9, 10]), scratch_memory())
    slab = layer.planes[0].block_bytes
    assert [length for _, _, length in driver.copied] == [3 * slab, 2 * slab]
    assert len(driver.allocated) == 1


def test_differences_are_found_and_recomputed_as_on_a_host() -> None:
    """Whole requests with verify=all; a bit that flips on the wire is seen by the digests."""
    host = Host()
    pair = EndpointPair(host.plugin(), FakeGpu(), {}, wait_until=wait_until)
    try:
        pair.register("good", [6, 1])
        pair.compute("good", 8, 8, [3, 0])
        pair.finish("good")
        pair.check("good", [3, 0], [6, 1])
        assert host.driver.copied, "blocks were read for their digests"
        host.fabric.set_faults(lambda posting: WriteFault(spoil="flip"))
        pair.register("bad", [6, 1])
        pair.compute("bad", 8, 8, [3, 0])
        pair.finish("bad")
        assert isinstance(pair.received("bad").error, IntegrityError)
    finally:
        pair.close()


def test_close_ends_a_digest_that_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_copy, "_CLOSE_DEADLINE_S", 0.05)
    host = Host(FakeCuda(runs=False))
    backend = host.plugin().create("one", {})
    view, _memory = FakeGpu().view()
    layout = backend.describe([view])
    running = backend.start_digest(layout.layers, (np.array([1, 2], np.int32),))
    wait_until(lambda: bool(host.driver.copied), "the copy")
    assert running.poll() is None
    backend.close()
    with pytest.raises(BackendError, match="did not copy to the host in time"):
        running.poll()
    assert host.driver.allocated[0] in _cuda_copy._leaked, "the GPU may still write there"
    _cuda_copy._leaked.clear()
    with pytest.raises(BackendError, match="closed"):
        backend.start_digest(layout.layers, (np.array([1, 2], np.int32),))


def test_nothing_of_a_digest_is_done_by_the_caller() -> None:
    host = Host()
    backend = host.plugin().create("one", {})
    view, _memory = FakeGpu().view()
    layout = backend.describe([view])
    threads: set[int] = set()
    inner = host.driver.copy

    def copy(*arguments: int) -> None:
        threads.add(threading.get_ident())
        inner(*arguments)

    host.driver.copy = copy  # type: ignore[method-assign]
    running = backend.start_digest(layout.layers, (np.array([1], np.int32),))
    wait_until(lambda: running.poll() is not None, "the digest")
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    backend.close()


# --- the driver's library ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = Path(__file__).with_name("libcuda.c")
    command = [os.environ.get("CC", "cc"), "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run(command, check=True)
    return path


def test_the_drivers_functions_are_called_as_its_header_has_them(library: Path) -> None:
    driver, mock = LibCuda(str(library)), ctypes.CDLL(str(library))
    mock.mock_last_stream.restype = ctypes.c_size_t
    mock.mock_set_current(ctypes.c_void_p(0x1000))
    buffer = driver.pinned(1 << 16)
    assert (buffer.size, mock.mock_pinned(), mock.mock_last_flags()) == (1 << 16, 1, 1)
    source = host_memory(4096, 9)
    stream = 0x7F12_3456_789A  # a pointer, longer than an int
    driver.copy(buffer.address + 100, int(source.ctypes.data), 4096, stream)
    assert mock.mock_last_stream() == stream
    assert ctypes.string_at(buffer.address + 100, 4096) == bytes(source)
    with pytest.raises(BackendError, match="refused: CUDA_ERROR_INVALID_VALUE"):
        driver.copy(0, buffer.address, 1, stream)
    with pytest.raises(BackendError, match="can't be pinned: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.pinned(1 << 50)
    del buffer
    gc.collect()
    assert mock.mock_pinned() == 0


def test_pinned_memory_is_given_back_on_a_thread_without_a_context(library: Path) -> None:
    """The last reference goes wherever it goes, such as on the thread that collects garbage."""
    driver, mock = LibCuda(str(library)), ctypes.CDLL(str(library))
    mock.mock_set_current(ctypes.c_void_p(0x1000))
    held = [driver.pinned(1 << 16)]
    assert mock.mock_pinned() == 1
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert mock.mock_pinned() == 0


def test_pinned_memory_that_outlives_its_context_is_left_alone(
    library: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the end of a process: it has gone with the context."""
    own = tmp_path / "libcuda.so.1"  # what is destroyed in it stays so
    shutil.copy(library, own)
    driver, mock = LibCuda(str(own)), ctypes.CDLL(str(own))
    mock.mock_set_current(ctypes.c_void_p(0x1000))
    buffer = driver.pinned(1 << 16)
    mock.mock_destroy()
    with caplog.at_level(logging.DEBUG):
        del buffer
        gc.collect()
    assert mock.mock_pinned() == 1
    assert "CUDA_ERROR_CONTEXT_IS_DESTROYED" in caplog.text


def test_a_driver_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="install the driver"):
        LibCuda(str(tmp_path / "libcuda.so.1"))
