# SPDX-License-Identifier: Apache-2.0
"""What kvpush demands of every transport and backend, run on this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvpush_example_cma.plugin import CmaPlugin
from kvpush_example_cma.transport import CmaTransport

from kvpush.backends.base import BackendPlugin
from kvpush.testing.contract import BackendContract, TransportContract
from kvpush.testing.fabric import TransportPair, connect, host_memory, register


class TestCmaTransport(TransportContract):
    @pytest.fixture
    def transport_pair(self) -> Iterator[TransportPair]:
        source, target = (register(CmaTransport(name), host_memory(1 << 20)) for name in ("source", "target"))
        pair = connect(source, target)
        yield pair
        pair.close()


class TestCmaBackend(BackendContract):
    @pytest.fixture
    def plugin(self) -> BackendPlugin:
        return CmaPlugin()
