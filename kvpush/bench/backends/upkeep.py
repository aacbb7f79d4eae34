# SPDX-License-Identifier: Apache-2.0
"""What a backend costs besides its writes: registration, handshake, fences, digests."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from kvpush.backends.base import Backend, CacheView, Capability
from kvpush.bench.backends.case import Axes, Bench, Case, Effort, LeftOut, copying
from kvpush.bench.backends.ends import DEADLINE_S, Ends, rows, wait
from kvpush.bench.backends.results import Result
from kvpush.errors import BackendError
from kvpush.testing.fabric import Device, Memory

__all__ = ["DEVICE_FENCE", "DIGEST", "HANDSHAKE", "REGISTER_MEMORY", "VISIBILITY_FENCE"]

_GAP_BYTES = 4096
_LAYERS = 8
_POLL_S = 1e-4


def _register(ends: Ends, result: Result, effort: Effort) -> Case:
    """As many bytes in so many regions that don't touch, and the metadata made from them, by an endpoint that has none yet."""
    assert result.regions is not None
    memory, whole = ends.device.allocate(ends.num_bytes)
    step = ends.num_bytes // result.regions
    parts = [
        dataclasses.replace(whole, address=whole.address + start, length=step - _GAP_BYTES)
        for start in range(0, ends.num_bytes, step)
    ]
    made: list[Backend] = []

    def fresh() -> None:
        close()
        made.append(ends.create())

    def close() -> None:
        while made:
            made.pop().close()

    def run() -> None:
        transport = made[-1].transport
        transport.register_memory(parts)
        if not transport.metadata():
            raise BackendError("there is no metadata after registering memory")

    return Case(
        msgspec.structs.replace(result, num_bytes=memory.size), run, max(effort.rounds // 2, 1), prepare=fresh, close=close
    )


def _handshake(ends: Ends, result: Result, effort: Effort) -> Case:
    """Two new endpoints get to know each other, and the first small write has arrived."""
    num_bytes = 64 << 10
    start = np.zeros(1, np.int64)

    def run() -> None:
        ends.connect()
        ends.write([(rows(ends.here, start, 64), rows(ends.there, start, 64))])

    def check() -> None:
        expected = np.zeros(num_bytes, np.uint8)
        expected[:64] = ends.content[:64]
        ends.expect(expected)

    return Case(result, run, max(effort.rounds // 2, 1), prepare=lambda: ends.renew(num_bytes), check=check)


def _device_fence(ends: Ends, result: Result, effort: Effort) -> Case:
    """Take a token for what the device has computed, and wait until it is done; nothing is being computed."""
    backend = ends.backend

    def run() -> None:
        token = backend.device_fence()
        if token is not None:
            wait(lambda: backend.fence_done(token), "a device fence")

    return Case(result, run, effort.short_rounds)


def _visibility_fence(ends: Ends, result: Result, effort: Effort) -> Case:
    """Make sure that writes into all registered memory can be read."""
    backend, region = ends.backend, ends.side.region
    assert region is not None

    def run() -> None:
        fence = backend.start_visibility_fence([region])
        if fence is not None:
            wait(fence.done, "a visibility fence")

    return Case(result, run, effort.short_rounds)


def _cache(device: Device, num_blocks: int) -> list[tuple[CacheView, Memory]]:
    """Caches of some layers as the device's tests have them, but with blocks of 64 KiB: 8 heads, 16 tokens, 256 elements."""
    layers = []
    for idx in range(_LAYERS):
        small, _ = device.view(f"layer.{idx}")
        extents = {"B": num_blocks, "H": 8, "N": 16, "C": 256, "2": 2}
        if "2" in small.order:
            extents["C"] //= 2
        shape = tuple(extents[letter] for letter in small.order)
        strides = tuple(small.itemsize * math.prod(shape[at + 1 :]) for at in range(len(shape)))
        memory, region = device.allocate(small.itemsize * math.prod(shape))
        view = dataclasses.replace(
            small,
            address=region.address,
            shape=shape,
            strides=strides,
            num_blocks=num_blocks,
            block_tokens=16,
            num_heads=8,
            region=region,
        )
        layers.append((view, memory))
    return layers


def _digest(ends: Ends, result: Result, effort: Effort) -> Case:
    """A digest of all blocks of all layers, in order or not, waited for as the submitter does."""
    if Capability.DIGEST not in ends.plugin.info.capabilities:
        raise LeftOut("it declares no digests")
    num_blocks = max(ends.num_bytes // (_LAYERS * (64 << 10)), 2)
    cache = _cache(ends.device, num_blocks)
    layout = ends.backend.describe([view for view, _ in cache])
    rng = np.random.default_rng(5)
    for _, memory in cache:
        memory[0 : memory.size] = rng.integers(0, 256, memory.size, np.uint8)
    table = ((rng.permutation(num_blocks) if result.fragmented else np.arange(num_blocks)).astype(np.int32),)
    found: list[tuple[bytes, ...]] = []

    def run() -> None:
        running = ends.backend.start_digest(layout.layers, table)
        limit = time.monotonic() + DEADLINE_S
        while (digests := running.poll()) is None:
            if time.monotonic() > limit:
                raise TimeoutError(f"a digest was not over after {DEADLINE_S:g} s")
            # A thread of this process may be computing it.
            time.sleep(_POLL_S)
        found.append(digests)

    def check() -> None:
        _, memory = cache[1]
        memory[0:1] = memory[0:1] ^ 1
        run()
        if set(found[:-1]) != {found[0]} or [a == b for a, b in zip(found[0], found[-1], strict=True)].index(False) != 1:
            raise BackendError("digests are not equal for equal content, or equal for different content")

    return Case(
        msgspec.structs.replace(result, num_bytes=sum(memory.size for _, memory in cache), block_bytes=64 << 10),
        run,
        effort.rounds,
        is_rate=True,
        limit=copying(ends),
        check=check,
    )


def _regions(effort: Effort) -> Sequence[Axes]:
    return [{"regions": 1}, {"regions": 64}]


def _one(effort: Effort) -> Sequence[Axes]:
    return [{}]


REGISTER_MEMORY = Bench("Registering memory, and the metadata for a peer", _regions, _register)
HANDSHAKE = Bench("Two new endpoints meet, and the first write arrives", _one, _handshake)
DEVICE_FENCE = Bench("Fence: what the device has computed, on an idle device", _one, _device_fence)
VISIBILITY_FENCE = Bench("Fence: writes that have arrived can be read", _one, _visibility_fence)
DIGEST = Bench("Digests of cache blocks", lambda _: [{"fragmented": False}, {"fragmented": True}], _digest)
