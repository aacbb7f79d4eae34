# SPDX-License-Identifier: Apache-2.0
"""The neuron backend over real NIXL agents (UCX, as LIBFABRIC needs hardware) and the mock's memory: a second agent reads back
what the first one's memory was written with, each on the thread that owns it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from mock_neuron import INIT, MockNrt, NeuronDevice, NeuronModule

from kvpush.backends._nixl import NixlReader, NixlTransport
from kvpush.backends.neuron import NeuronPlugin
from kvpush.core.transport import Descriptors, MemoryKind, Region
from kvpush.testing.contract import wait_until
from kvpush.testing.endpoints import EndpointPair

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
pytest.importorskip("nixl")


class OverHost(NixlTransport):
    """UCX has no Neuron memory: the mock's is the host's."""

    def register_memory(self, regions: Sequence[Region]) -> None:
        super().register_memory([replace(region, kind=MemoryKind.HOST) for region in regions])


class Flushing(NixlReader):
    """UCX orders nothing in the mock: when *its* read has ended, the mock's card has read as well."""

    def __init__(self, nrt: MockNrt, agent_name: str, **arguments: Any) -> None:
        super().__init__(agent_name, **arguments)
        self.nrt = nrt
        self.num_read = 0

    def read(self, rows: Descriptors) -> Callable[[], bool]:
        ended = super().read(rows)

        def done() -> bool:
            if not ended():
                return False
            self.num_read += len(rows)
            into = (ctypes.c_uint8 * 64)()
            for address, length, _ in rows.tolist():
                assert self.nrt.lib.mock_efa_read(into, address, length) == 0
            return True

        return done


@pytest.fixture(params=["", "tcp,self"], ids=["any", "tcp"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[EndpointPair, list[Flushing]]]:
    monkeypatch.setenv("NEURON_RT_MAP_HBM", "1")
    monkeypatch.setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0")
    nrt = MockNrt(tmp_path_factory.mktemp("nrt"))
    nrt.lib.mock_reset(INIT)
    environment = {"UCX_TLS": request.param} if request.param else {}
    readers: list[Flushing] = []

    def link(agent_name: str, retry_window_s: float) -> tuple[Any, Any]:
        transport = OverHost(agent_name, retry_window_s=retry_window_s, environment=environment)
        readers.append(Flushing(nrt, f"{agent_name}-reader", backend="UCX", kind=MemoryKind.HOST, environment=environment))
        return transport, readers[-1]

    plugin = NeuronPlugin(runtime=nrt.runtime(), link=link, device_module=NeuronModule())
    made = EndpointPair(plugin, NeuronDevice(nrt), {}, wait_until=wait_until)
    yield made, readers
    made.close()


def test_whole_requests(pair: tuple[EndpointPair, list[Flushing]]) -> None:
    endpoints, (at_source, at_target) = pair
    for number, (source, target) in enumerate((([3, 0, 5], [6, 1, 2]), ([7, 6, 5, 4], [0, 2, 4, 6]), ([1], [7]))):
        name = f"r{number}"
        endpoints.register(name, target)
        endpoints.compute(name, 4 * len(source), 4 * len(source), source)
        endpoints.finish(name)
        endpoints.check(name, source, target)
    # Runs of neighbouring blocks, for K and V of three layers.
    assert at_target.num_read == 6 * (2 + 4 + 1)
    assert at_source.num_read == 0
