# SPDX-License-Identifier: Apache-2.0
"""Every transport that is installed and can run here, two endpoints in this process: bandwidth, posting, latency, set-up.

Bandwidth is compared with a plain memcpy of the same bytes, taken between the rounds of the same bench: the ``ratio`` in
``extra_info`` means something where the gigabytes a second, on a shared machine, don't.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvpush.backends.base import BackendPlugin
from kvpush.backends.manager import BackendManager
from kvpush.core.transport import Descriptors, Transport, WriteStatus
from kvpush.testing.fabric import TransportPair, connect, host_memory, register

TOTAL = 32 << 20
BLOCK_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
ORDERS = ("contiguous", "in-order", "random")
"""One descriptor for all; one for each block, in order; one for each block, in random order at the target."""
DEADLINE_S = 30.0
serial = itertools.count()


@dataclass(frozen=True)
class Way:
    """A transport in one configuration."""

    name: str
    plugin: BackendPlugin
    options: Mapping[str, object] = field(default_factory=dict)

    def transport(self) -> Transport:
        return self.plugin.create(f"bench-{self.name}-{next(serial)}", self.options).transport


def ways() -> Iterator[Any]:
    """Every backend for host memory that can run here, built-in or not."""
    for found in BackendManager().discover(probe=True):
        if found.plugin is None or not found.ok or "cpu" not in found.plugin.info.device_types:
            continue
        if any(name.startswith("nixl") for name in found.plugin.info.transports):
            for tls in ("sm", "tcp"):
                way = Way(f"{found.name}-{tls}", found.plugin, {"ucx_tls": f"{tls},self"})
                yield pytest.param(way, id=f"backend={way.name}", marks=pytest.mark.nixl)
        else:
            yield pytest.param(Way(found.name, found.plugin), id=f"backend={found.name}")


WAYS = list(ways())
every_way = pytest.mark.parametrize("way", WAYS, scope="module")


@pytest.fixture(autouse=True)
def no_user_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # The ids name the way: UCX_TLS of the environment would win over it.
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, TransportPair]]:
    made: dict[str, TransportPair] = {}
    yield made
    for pair in made.values():
        pair.close()


@pytest.fixture
def pair(way: Way, pairs: dict[str, TransportPair]) -> TransportPair:
    if way.name not in pairs:
        made = connect(*(register(way.transport(), host_memory(TOTAL, fill)) for fill in (1, 0)))
        write(made, made.source.rows((0, 64)), made.target.rows((0, 64)))
        pairs[way.name] = made
    return pairs[way.name]


def post(pair: TransportPair, src: Descriptors, dst: Descriptors) -> int:
    token = next(serial)
    pair.source.transport.post_write(token, pair.peer, src, dst)
    return token


def drain(pair: TransportPair, count: int = 1) -> None:
    """Poll both ends until so many writes have ended, all of them well."""
    deadline = time.monotonic() + DEADLINE_S
    while count:
        for completion in pair.source.transport.poll():
            assert completion.status is WriteStatus.DONE, completion.error
            count -= 1
        pair.target.transport.progress()
        assert time.monotonic() < deadline, f"{count} writes have not ended within {DEADLINE_S} s"


def write(pair: TransportPair, src: Descriptors, dst: Descriptors) -> None:
    post(pair, src, dst)
    drain(pair)


def describe(benchmark: Any, way: Way, pair: TransportPair | None, num_bytes: int, descriptors: int) -> None:
    info = {"backend": way.name, "bytes": num_bytes, "descriptors": descriptors}
    if pair is not None:
        info["transport"] = pair.source.transport.name
    benchmark.extra_info |= info


@every_way
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"order={order}")
@pytest.mark.parametrize("block", BLOCK_SIZES, ids=lambda n: f"block={n >> 10}KiB")
def bench_write_bandwidth(benchmark: Any, way: Way, pair: TransportPair, block: int, order: str) -> None:
    rng = np.random.default_rng(block)
    pair.source.memory[:] = rng.integers(0, 256, TOTAL, np.uint8)
    pair.target.memory[:] = 0
    count = TOTAL // block
    target_block = rng.permutation(count) if order == "random" else np.arange(count)
    if order == "contiguous":
        src, dst = pair.source.rows((0, TOTAL)), pair.target.rows((0, TOTAL))
    else:
        src = pair.source.rows(*((at * block, block) for at in range(count)))
        dst = pair.target.rows(*((at * block, block) for at in target_block.tolist()))
    plain = np.zeros(TOTAL, np.uint8)
    memcpy_s: list[float] = []

    def between() -> None:
        start = time.perf_counter()
        plain[:] = pair.source.memory
        memcpy_s.append(time.perf_counter() - start)

    benchmark.pedantic(write, args=(pair, src, dst), setup=between, rounds=5, warmup_rounds=1)
    arrived = pair.target.memory.reshape(count, block)[target_block].ravel()
    assert np.array_equal(arrived, pair.source.memory)
    describe(benchmark, way, pair, TOTAL, len(src))
    benchmark.extra_info |= {"block_bytes": block, "fragmented": order == "random", "coalesced": order == "contiguous"}
    if benchmark.stats is not None:
        took_s, copy_s = benchmark.stats.stats.median, statistics.median(memcpy_s[1:])
        benchmark.extra_info |= {
            "gbytes_per_s": TOTAL / took_s / 1e9,
            "memcpy_gbytes_per_s": TOTAL / copy_s / 1e9,
            "ratio": copy_s / took_s,
        }


@every_way
@pytest.mark.parametrize("descriptors", [1, 256, 4096], ids=lambda n: f"descriptors={n}")
def bench_post(benchmark: Any, way: Way, pair: TransportPair, descriptors: int) -> None:
    """The call alone, rows of 64 bytes: what the submitter pays for a write besides its bytes."""
    rows = [(at * 256, 64) for at in range(descriptors)]
    src, dst = pair.source.rows(*rows), pair.target.rows(*rows)
    posted = 0

    def once() -> None:
        nonlocal posted
        post(pair, src, dst)
        posted = 1

    def settle() -> None:
        nonlocal posted
        drain(pair, posted)
        posted = 0

    benchmark.pedantic(once, setup=settle, rounds=20, warmup_rounds=2)
    settle()
    assert pair.source.transport.num_in_flight == 0
    describe(benchmark, way, pair, 64 * descriptors, descriptors)
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_descriptor"] = benchmark.stats.stats.median / descriptors * 1e6


@every_way
@pytest.mark.parametrize("size", [64, 4096], ids=lambda n: f"bytes={n}")
def bench_small_write_latency(benchmark: Any, way: Way, pair: TransportPair, size: int) -> None:
    """From the post to the completion, both ends polling."""
    pair.source.memory[:size] = 7
    pair.target.memory[:size] = 0
    rows = pair.source.rows((0, size)), pair.target.rows((0, size))
    benchmark.pedantic(write, args=(pair, *rows), rounds=50, warmup_rounds=5)
    assert int(pair.target.memory[:size].min()) == 7
    describe(benchmark, way, pair, size, 1)


@every_way
@pytest.mark.parametrize("regions", [1, 64], ids=lambda n: f"regions={n}")
def bench_register_memory(benchmark: Any, way: Way, regions: int) -> None:
    """``TOTAL`` bytes in so many regions that don't touch, and the metadata made from them."""
    from kvpush.core.transport import Region

    memory = host_memory(TOTAL, 1)
    step = TOTAL // regions
    parts = [Region(memory.ctypes.data + at * step, step - 64, keepalive=memory) for at in range(regions)]
    transports: list[Transport] = []

    def fresh() -> None:
        transports.append(way.transport())

    def once() -> bytes:
        transports[-1].register_memory(parts)
        return transports[-1].metadata()

    try:
        assert benchmark.pedantic(once, setup=fresh, rounds=3, warmup_rounds=1)
        describe(benchmark, way, None, TOTAL, regions)
        benchmark.extra_info["transport"] = transports[-1].name
    finally:
        for transport in transports:
            transport.close()


@every_way
def bench_handshake(benchmark: Any, way: Way) -> None:
    """Two endpoints get to know each other, and the first small write has arrived."""
    pairs: list[TransportPair] = []
    make: list[Callable[[], TransportPair]] = []

    def fresh() -> None:
        sides = [register(way.transport(), host_memory(4096, fill)) for fill in (9, 0)]
        make.append(lambda: connect(*sides))

    def once() -> None:
        pair = make[-1]()
        pairs.append(pair)
        write(pair, pair.source.rows((0, 64)), pair.target.rows((0, 64)))

    try:
        benchmark.pedantic(once, setup=fresh, rounds=3, warmup_rounds=1)
        assert all(np.count_nonzero(pair.target.memory) == 64 for pair in pairs)
        describe(benchmark, way, pairs[-1], 64, 1)
    finally:
        for pair in pairs:
            pair.close()
