# SPDX-License-Identifier: Apache-2.0
"""What ``verify`` costs: digests of cache blocks in host memory, against a plain memcpy of the same bytes in the same bench.

The ``ratio`` in ``extra_info`` is digest time over memcpy time: on a shared machine it means something where gigabytes a second
don't. The hash functions that could have been used are compared by ``test_hash_functions``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from common import cache_layout, scattered

from kvpush.backends._host_digest import SCHEME, HostDigest, scratch_memory

NUM_LAYERS = 8
TOTAL = 64 << 20
HASHES: dict[str, Callable[[Any], bytes]] = {
    "xxh3_128": xxhash.xxh3_128_digest,
    "xxh3_64": xxhash.xxh3_64_digest,
    "crc32": lambda data: zlib.crc32(data).to_bytes(4, "little"),
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
}
if importlib.util.find_spec("blake3") is not None:  # vLLM brings it along; kvpush doesn't need it
    HASHES["blake3"] = lambda data: importlib.import_module("blake3").blake3(data).digest()


def memcpy_s(src: np.ndarray, dst: np.ndarray) -> float:
    """Seconds that copying takes, median of five."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        np.copyto(dst, src)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def note(benchmark: Any, num_bytes: int, copy_s: float) -> None:
    if benchmark.stats is None:  # --benchmark-disable
        return
    median = benchmark.stats.stats.median
    benchmark.extra_info |= {
        "bytes": num_bytes,
        "GB_per_s": round(num_bytes / median / 1e9, 2),
        "memcpy_GB_per_s": round(num_bytes / copy_s / 1e9, 2),
        "ratio": round(median / copy_s, 2),
    }


@pytest.mark.parametrize("blocks_outermost", [False, True], ids=["order=layers", "order=blocks"])
@pytest.mark.parametrize("scatter", [False, True], ids=["ids=ascending", "ids=scattered"])
@pytest.mark.parametrize("block_bytes", [4 << 10, 32 << 10, 256 << 10], ids=lambda size: f"slab={size >> 10}K")
def test_digest(benchmark: Any, block_bytes: int, scatter: bool, blocks_outermost: bool) -> None:
    count = TOTAL // NUM_LAYERS // block_bytes
    size = NUM_LAYERS * (2 * count * block_bytes + 4096)
    memory = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    layout = cache_layout(
        NUM_LAYERS, 2 * count, block_bytes=block_bytes, base=memory.ctypes.data, blocks_outermost=blocks_outermost
    )
    ids = scattered(count).astype(np.int64) if scatter else np.arange(count)
    scratch = scratch_memory()

    def digest() -> tuple[bytes, ...] | None:
        running = HostDigest(layout.layers, (ids,), memory)
        while running.advance(scratch):
            pass
        return running.poll()

    found = benchmark(digest)
    first, plane = xxhash.xxh3_128(), layout.layers[0].planes[0]
    for block in ids.tolist():
        start = plane.base - memory.ctypes.data + block * plane.block_stride
        first.update(memory[start : start + block_bytes])
    assert found[0] == first.digest()
    assert len(set(found)) == NUM_LAYERS
    benchmark.extra_info["scheme"] = SCHEME
    note(benchmark, TOTAL, memcpy_s(memory[:TOTAL], np.empty(TOTAL, np.uint8)))


@pytest.mark.parametrize("name", HASHES)
def test_hash_functions(benchmark: Any, name: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, TOTAL, np.uint8)
    found = benchmark(HASHES[name], data)
    changed = data.copy()
    changed[TOTAL // 2] ^= 1
    assert found == HASHES[name](data.copy()) != HASHES[name](changed)
    note(benchmark, TOTAL, memcpy_s(data, changed))
