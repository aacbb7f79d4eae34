# SPDX-License-Identifier: Apache-2.0
"""Digests in host memory: every way of reading the blocks gives what reading them one by one gives."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash

from kvpush.backends._host_digest import INLINE_BYTES, HostDigest, HostDigester, digest_layer, scratch_memory
from kvpush.backends.loopback import LoopbackFabric, LoopbackPlugin
from kvpush.core.layout import LayerLayout, Plane
from kvpush.core.transport import Region
from kvpush.errors import BackendError
from kvpush.testing.contract import DEADLINE_S, wait_until


def memory(
    slab: int, num_blocks: int, *, stride: int | None = None, contents: tuple[str, ...] = ("kv",), seed: int = 0
) -> tuple[LayerLayout, list[np.ndarray]]:
    """A layer of random bytes, and its planes as arrays of shape ``[num_blocks, slab]``."""
    stride = stride or slab
    planes, arrays = [], []
    for idx, content in enumerate(contents):
        whole = np.frombuffer(np.random.default_rng(seed + idx).bytes(stride * num_blocks), np.uint8).copy()
        planes.append(Plane(content, whole.ctypes.data, stride, slab))
        arrays.append(np.lib.stride_tricks.as_strided(whole, (num_blocks, slab), (stride, 1)))
    return LayerLayout("layer.0", 0, num_blocks, 16, 0, 2, "bfloat16", "HNC", "none", tuple(planes)), arrays


def one_by_one(layer: LayerLayout, arrays: list[np.ndarray], ids: list[int]) -> bytes:
    state = xxhash.xxh3_128()
    for idx in sorted(range(len(arrays)), key=lambda idx: layer.planes[idx].content):
        for block in ids:
            state.update(arrays[idx][block].tobytes())
    return state.digest()


ORDERS = {
    "ascending": lambda n: list(range(n // 4, n // 4 + n // 2)),
    "runs": lambda n: [*range(n // 2, n), *range(n // 4)],
    "scattered": lambda n: np.random.default_rng(3).permutation(n)[: n // 2].tolist(),
    "one": lambda n: [n - 1],
    "none": lambda n: [],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("slab", "num_blocks", "stride", "contents"),
    [
        pytest.param(64, 32, None, ("kv",), id="small"),
        pytest.param(4096, 600, None, ("kv",), id="gathered"),
        pytest.param(4096, 600, 12288, ("kv",), id="gathered-with-gaps"),
        pytest.param(4096, 600, 10000, ("kv",), id="gathered-with-odd-gaps"),
        pytest.param(3000, 700, None, ("v", "k"), id="planes-by-name"),
        pytest.param(200_000, 12, None, ("kv",), id="slab-by-slab"),
        pytest.param(200_000, 12, 300_000, ("kv",), id="slab-by-slab-with-gaps"),
        pytest.param(2_500_000, 4, None, ("kv",), id="larger-than-the-scratch"),
    ],
)
def test_reading_fast_is_reading_right(
    slab: int, num_blocks: int, stride: int | None, contents: tuple[str, ...], order: str
) -> None:
    layer, arrays = memory(slab, num_blocks, stride=stride, contents=contents)
    ids = ORDERS[order](num_blocks)
    got = digest_layer(layer, np.array(ids, np.int64), scratch_memory())
    assert got == one_by_one(layer, arrays, ids)


@pytest.mark.parametrize("block", [-1, 8, 2**31 - 1])
def test_ids_outside_the_pool_are_refused(block: int) -> None:
    layer, _arrays = memory(64, 8)
    digester = HostDigester()
    digest = digester.start([layer], (np.array([0, block], np.int64),))
    with pytest.raises(BackendError, match="pool of 8"):
        digest.poll()


def wait(digest: HostDigest) -> tuple[bytes, ...]:
    wait_until(lambda: digest.poll() is not None, "the digest")
    found = digest.poll()
    assert found is not None
    return found


def test_small_ones_end_at_once_and_start_no_thread() -> None:
    digester, before = HostDigester(), threading.active_count()
    layer, arrays = memory(1024, 8)
    assert digester.start([layer], (np.arange(8),)).poll() == (one_by_one(layer, arrays, list(range(8))),)
    assert threading.active_count() == before
    assert digester.close()


def test_large_ones_take_turns_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    digester, before = HostDigester(), threading.active_count()
    layer, arrays = memory(4096, 512)
    ids = np.random.default_rng(1).permutation(512)
    assert layer.block_bytes * len(ids) >= INLINE_BYTES
    ended: list[HostDigest] = []
    advance = HostDigest.advance

    def watched(self: HostDigest, scratch: np.ndarray) -> bool:
        more = advance(self, scratch)
        if not more:
            ended.append(self)
        return more

    monkeypatch.setattr(HostDigest, "advance", watched)
    with digester._changed:  # its thread can't begin before both are there
        long = digester.start([layer] * 40, (ids,))
        short = digester.start([layer] * 2, (ids[:100],))
    assert wait(short) == (one_by_one(layer, arrays, ids[:100].tolist()),) * 2
    assert wait(long) == (one_by_one(layer, arrays, ids.tolist()),) * 40
    assert ended == [short, long]
    assert threading.active_count() == before + 1
    assert digester.close()
    assert threading.active_count() == before


def test_close_ends_what_runs() -> None:
    digester = HostDigester()
    layer, _arrays = memory(4096, 512)
    running = [digester.start([layer] * 1000, (np.arange(512),)) for _ in range(3)]
    assert digester.close(DEADLINE_S)
    for digest in running:
        with pytest.raises(BackendError, match="closed"):
            digest.poll()
    with pytest.raises(BackendError, match="closed"):
        digester.start([layer], (np.arange(2),))
    assert digester.close()


def test_a_backend_that_is_closed_over_a_digest_that_does_not_stop_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LoopbackPlugin(LoopbackFabric()).create("c", {})
    layer, arrays = memory(4096, 512)
    array = arrays[0]
    region = Region(array.__array_interface__["data"][0], array.nbytes, keepalive=array)
    backend._regions = (region,)  # type: ignore[attr-defined]
    go_on, hashing = threading.Event(), threading.Event()
    advance = HostDigest.advance

    def stuck(self: HostDigest, scratch: np.ndarray) -> bool:
        hashing.set()
        assert go_on.wait(DEADLINE_S)
        return advance(self, scratch)

    monkeypatch.setattr(HostDigest, "advance", stuck)
    monkeypatch.setattr(HostDigester.close, "__defaults__", (0.01,))
    digest = backend.start_digest([layer] * 20, (np.arange(512),))
    assert hashing.wait(DEADLINE_S)
    backend.close()
    assert "still runs" in caplog.text
    assert digest._keepalive == (region,), "its memory is held for as long as it is read"
    go_on.set()
    caplog.clear()
    monkeypatch.setattr(HostDigester.close, "__defaults__", (DEADLINE_S,))
    backend.close()
    assert not caplog.text
