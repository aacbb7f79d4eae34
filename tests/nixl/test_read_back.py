# SPDX-License-Identifier: Apache-2.0
"""Reading registered memory back through an agent of its own, over UCX."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvpush.backends._nixl import NixlReader, NixlTransport
from kvpush.core.transport import Descriptors, MemoryKind, Region
from kvpush.errors import TransportError
from kvpush.testing.contract import wait_until

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
pytest.importorskip("nixl")

SIZE = 1 << 16


class Pair:
    def __init__(self) -> None:
        self.transport = NixlTransport("read-back")
        self.memory = np.arange(SIZE, dtype=np.uint32).view(np.uint8)
        self.transport.register_memory([Region(self.memory.ctypes.data, self.memory.nbytes, keepalive=self.memory)])
        self.reader = NixlReader("read-back-reader", backend="UCX", kind=MemoryKind.HOST)

    def rows(self, *spans: tuple[int, int]) -> Descriptors:
        return np.array([(self.memory.ctypes.data + offset, length, 0) for offset, length in spans], np.uint64)

    def read(self, *spans: tuple[int, int]) -> bytes:
        """Read, and what lies in the reader's scratch memory then."""
        done = self.reader.read(self.rows(*spans))

        def step() -> bool:
            self.transport.progress()
            return done()

        wait_until(step, "the read")
        assert done(), "done, and stays so"
        return self.reader._scratch.tobytes()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.reader.close()
    pair.transport.close()


def test_what_is_read_comes_through_the_transport(pair: Pair) -> None:
    pair.reader.attach(pair.transport.metadata())
    for offset in (0, 4096, pair.memory.nbytes - 64):
        assert pair.read((offset, 64)) == pair.memory[offset : offset + 64].tobytes()
    before = pair.reader._scratch.tobytes()
    assert pair.read((400, 3)) == pair.memory[400:403].tobytes() + before[3:]
    assert pair.read(*((4096 * k, 64) for k in range(40)), (512, 64)) in {
        pair.memory[offset : offset + 64].tobytes() for offset in (512, *(4096 * k for k in range(40)))
    }


def test_what_is_not_registered_is_refused(pair: Pair) -> None:
    with pytest.raises(TransportError, match="not attached"):
        pair.reader.read(pair.rows((0, 64)))
    with pytest.raises(TransportError, match="broken"):
        pair.reader.attach(b"junk")
    pair.reader.attach(pair.transport.metadata())
    with pytest.raises(TransportError, match="refused to read 1 rows"):
        pair.reader.read(pair.rows((pair.memory.nbytes - 32, 64)))
    assert pair.read((0, 64)) == pair.memory[:64].tobytes()


def test_close_is_idempotent_and_final(pair: Pair) -> None:
    pair.reader.attach(pair.transport.metadata())
    pair.read((0, 64))
    for _ in range(2):
        pair.reader.close()
    with pytest.raises(TransportError, match="closed"):
        pair.reader.read(pair.rows((0, 64)))
