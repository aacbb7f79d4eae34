# SPDX-License-Identifier: Apache-2.0
"""The cuda backend over real NIXL agents, its fake GPU's memory being the host's; and what NIXL says of such memory itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from fake_cuda import FakeCuda, FakeDriver, FakeGpu

from kvpush.backends import cuda
from kvpush.backends._nixl import NixlTransport
from kvpush.backends.cuda import CudaLink, CudaPlugin
from kvpush.core.transport import MemoryKind, Region
from kvpush.errors import MemoryRegistrationError
from kvpush.testing.contract import wait_until
from kvpush.testing.endpoints import EndpointPair

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
pytest.importorskip("nixl")


class OverHost(NixlTransport):
    """NIXL knows no fake GPU."""

    def register_memory(self, regions: Sequence[Region]) -> None:
        super().register_memory([replace(region, kind=MemoryKind.HOST) for region in regions])


@pytest.fixture(params=["", "tcp,cuda_copy,self", "sm,cuda,self"], ids=["any", "tcp", "sm"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointPair]:
    monkeypatch.delenv("UCX_TLS", raising=False)

    def link(wanted: CudaLink) -> NixlTransport:
        # What the plugin asks for; on a host without a GPU, UCX passes over the names of CUDA's transports.
        return OverHost(wanted.agent_name, ucx_tls=wanted.ucx_tls, retry_window_s=wanted.retry_window_s)

    fake = FakeCuda(num_devices=2)
    plugin = CudaPlugin(link=link, device_module=fake, driver=FakeDriver(fake))
    options: dict[str, object] = {"ucx_tls": request.param} if request.param else {}
    made = EndpointPair(plugin, FakeGpu(0), options, wait_until=wait_until)
    yield made
    made.close()


def test_whole_requests(pair: EndpointPair) -> None:
    for number, (source, target) in enumerate((([3, 0, 5], [6, 1, 2]), ([7, 6, 5, 4], [0, 2, 4, 6]), ([1], [7]))):
        name = f"r{number}"
        pair.register(name, target)
        pair.compute(name, 4 * len(source), 4 * len(source), source)
        pair.finish(name)
        pair.check(name, source, target)


def test_memory_that_is_no_gpus_is_refused_by_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link that is used on GPUs: it asks for device memory, and the host's is none. Older releases only warned."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    fake = FakeCuda()
    plugin = CudaPlugin(link=cuda._nixl_link, device_module=fake, driver=FakeDriver(fake))
    backend = plugin.create("no-gpu", {})
    _, region = FakeGpu().allocate(1 << 16)
    with pytest.raises(
        MemoryRegistrationError, match=r"device memory.*Is it memory of the GPU\?.*kvpush doctor --backend cuda"
    ):
        backend.transport.register_memory([region])
    backend.close()
