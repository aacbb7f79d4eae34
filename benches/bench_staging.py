# SPDX-License-Identifier: Apache-2.0
"""Whole transfers of scattered 4 KiB blocks over TCP, staged and not: from the last token computed to the receive's report.

The producer is in this process, the consumer in one of its own; the control channel is the one of real instances.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvpush.backends.cpu import CpuPlugin
from kvpush.core.events import ReceiveEnded, ReceiveRequested, SourceAnnounced, SourceFinished, SourceProgressed
from kvpush.core.ids import PeerAddress, RequestId
from kvpush.endpoint import Endpoint, numpy_views
from kvpush.settings import Settings
from kvpush.testing.contract import wait_until

LAYERS, HEADS, BLOCK_TOKENS, CONTENT = 8, 2, 16, 32
"""4 KiB a block and layer, float32."""
NUM_BLOCKS, PER_REQUEST = 4096, 1024
"""32 MiB a request."""
ROUNDS, WARMUP = 25, 3
DEADLINE_S = 60.0
MODES = {"direct": "off", "staged": "on", "auto": "auto"}
ENVIRONMENT = {"UCX_TLS": "tcp,self"}


def open_endpoint(caches: list[npt.NDArray[np.float32]], staging: str, *, produce: bool) -> Endpoint:
    views = numpy_views({f"layer.{idx}": cache for idx, cache in enumerate(caches)}, block_tokens=BLOCK_TOKENS, num_heads=HEADS)
    settings = Settings.model_construct(control_port=0, verify="off", staging=staging)
    return Endpoint.open(views, produce=produce, consume=not produce, settings=settings, plugin=CpuPlugin())


def new_caches(fill: np.random.Generator | None = None) -> list[npt.NDArray[np.float32]]:
    """Allocated by torch, as an engine's are: NumPy's begin 16 bytes into a page, and to there glibc 2.36 copies from the
    beginning of one (where slots lie) at half the speed on Zen. All is written to: no page is new to the kernel."""
    shape = (NUM_BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
    caches = [torch.zeros(shape).numpy() for _ in range(LAYERS)]
    for cache in caches:
        cache[:] = 0.5 if fill is None else fill.random(shape, np.float32)
    return caches


def blocks_of(number: int, side: int) -> npt.NDArray[np.int32]:
    """Blocks of a request on a side, in random order."""
    return np.random.default_rng((number, side)).permutation(NUM_BLOCKS)[:PER_REQUEST].astype(np.int32)


def digest_of(caches: list[npt.NDArray[np.float32]], rows: npt.NDArray[np.int32]) -> str:
    """Of all bytes of some blocks, in this order."""
    digest = hashlib.sha256()
    for cache in caches:
        digest.update(cache[rows].tobytes())
    return digest.hexdigest()


class Consumer:
    """The process that receives, seen from here."""

    def __init__(self, address: PeerAddress, staging: str) -> None:
        spec = json.dumps({"host": address.host, "port": address.port, "staging": staging})
        self._process = subprocess.Popen(
            [sys.executable, __file__, spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def say(self, what: str, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, number]) + "\n")

    def hear(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if ready else ""
        assert line, "the consumer has not answered"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Transfers:
    """One producer, one consumer, one request after another."""

    def __init__(self, mode: str) -> None:
        staging = MODES[mode]
        self.mode = mode
        self.number = 0
        self.caches = new_caches(np.random.default_rng(1))
        self.endpoint = open_endpoint(self.caches, staging, produce=True)
        assert self.endpoint.address is not None
        self.consumer = Consumer(self.endpoint.address, staging)

    def prepare(self) -> None:
        """Registered, and computed but for the report of it."""
        self.number += 1
        tokens = PER_REQUEST * BLOCK_TOKENS
        source = RequestId(f"s-{self.number}")
        self.endpoint.submit(SourceAnnounced(source, (f"t-{self.number}",), b"digest", tokens))
        self.consumer.say("receive", self.number)
        producer = self.endpoint.submitter.producer
        assert producer is not None
        wait_until(lambda: producer.num_streams > 0, "the registration")

    def send(self) -> None:
        source, tokens = RequestId(f"s-{self.number}"), PER_REQUEST * BLOCK_TOKENS
        self.endpoint.submit(SourceProgressed(source, 0, LAYERS, tokens, (blocks_of(self.number, 0),)))
        self.endpoint.submit(SourceFinished(source))
        status = self.consumer.hear()
        assert status == "received", status

    def check(self) -> None:
        """The bytes of the last request."""
        self.consumer.say("content", self.number)
        assert self.consumer.hear() == digest_of(self.caches, blocks_of(self.number, 0))

    def close(self) -> None:
        self.consumer.close()
        self.endpoint.close()


@pytest.fixture
def open_transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Transfers]]:
    """Opens a producer and a consumer, by mode; closes them at the end."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:

        def open_(mode: str) -> Transfers:
            transfers = Transfers(mode)
            stack.callback(transfers.close)
            return transfers

        yield open_


@pytest.mark.nixl
@pytest.mark.parametrize("mode", MODES)
def bench_scattered_over_tcp(benchmark: Any, open_transfers: Callable[[str], Transfers], mode: str) -> None:
    """Each transfer in turn with one of the same blocks without staging: machines drift by more than the ways differ."""
    transfers, direct = open_transfers(mode), open_transfers("direct")
    took_s: list[float] = []

    def prepare() -> None:
        direct.prepare()
        before = time.perf_counter()
        direct.send()
        took_s.append(time.perf_counter() - before)
        transfers.prepare()

    rounds, warmup = (1, 1) if benchmark.disabled else (ROUNDS, WARMUP)
    benchmark.pedantic(transfers.send, setup=prepare, rounds=rounds, warmup_rounds=warmup)
    for each in (transfers, direct):
        each.check()
    staged = transfers.endpoint.submitter.staged
    assert (staged is not None and staged.num_writes > 0) or mode != "staged"
    num_bytes = LAYERS * PER_REQUEST * HEADS * BLOCK_TOKENS * CONTENT * 4
    benchmark.extra_info |= {"backend": "cpu", "bytes": num_bytes, "descriptors": LAYERS * PER_REQUEST}
    if not benchmark.disabled:
        direct_s, own_s = statistics.median(took_s[warmup:]), benchmark.stats.stats.median
        ratio = round(direct_s / own_s, 2)
        benchmark.extra_info |= {"direct_ms": round(direct_s * 1e3, 1), "times_as_fast_as_direct": ratio}
        print(f"\n{mode}: {own_s * 1e3:.1f} ms, direct in turn with it {direct_s * 1e3:.1f} ms: {ratio} times as fast")


def main(spec: dict[str, Any]) -> None:
    """Be the consumer."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    caches = new_caches()
    endpoint = open_endpoint(caches, spec["staging"], produce=False)
    address = PeerAddress(spec["host"], spec["port"])
    for line in sys.stdin:
        what, number = json.loads(line)
        rows = blocks_of(number, 1)
        if what == "content":
            answer = digest_of(caches, rows)
        else:
            tokens = PER_REQUEST * BLOCK_TOKENS
            endpoint.submit(
                ReceiveRequested(RequestId(f"r-{number}"), address, (f"t-{number}",), b"digest", tokens, 0, (rows,))
            )
            ended: list[ReceiveEnded] = []
            while not ended:
                endpoint.wait_outcome(1.0)
                ended = [outcome for outcome in endpoint.drain() if isinstance(outcome, ReceiveEnded)]
            answer = ended[0].status.value
        out.write(json.dumps(answer) + "\n")
        out.flush()
    endpoint.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
