# SPDX-License-Identifier: Apache-2.0
"""Real vLLM instances on the CPU, with a tiny float32 model.

float32, because bfloat16 answers change with the composition of a batch, for a single instance too: equality has to mean
that the KV is right and nothing else. One pair and one single instance stay up for the whole session.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_cluster import Cluster, options, start

from kvpush.demo.connectors import Connector, plan
from kvpush.demo.supervisor import PortPicker, Supervisor, available_cores
from kvpush.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers depend on the whole prompt."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(path, layers=4, hidden=128, heads=4, kv_heads=2, seed=7, dtype="float32", max_position_embeddings=4096)
    return path


@pytest.fixture(scope="session")
def _both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    pick = PortPicker()
    cores = available_cores()
    with Supervisor(tmp_path_factory.mktemp("logs")) as supervisor:
        pair = plan(Connector.KVPUSH, options(model), cores=cores, pick_port=pick)
        single = plan(Connector.NONE, options(model), cores=cores, pick_port=pick)
        servers, _ = start(supervisor, pair, single)
        url = single.instances["single"].health_url
        assert url is not None
        yield Cluster(supervisor, pair, servers), url.removesuffix("/health")


@pytest.fixture
def cluster(_both: tuple[Cluster, str]) -> Iterator[Cluster]:
    """The pair; every test leaves all of its servers alive."""
    yield _both[0]
    _both[0].supervisor.check_alive()


@pytest.fixture(scope="session")
def single_url(_both: tuple[Cluster, str]) -> str:
    """The single instance that is right by definition."""
    return _both[1]
