# SPDX-License-Identifier: Apache-2.0
"""Command lines and environments of the demo's servers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpush.demo
from kvpush.demo.connectors import (
    SERVED_MODEL,
    Connector,
    Deployment,
    InstanceOptions,
    Place,
    plan,
    roles,
    with_transfer_config,
)
from kvpush.demo.supervisor import ServerSpec

REPAIRS = Path(kvpush.demo.__file__).with_name("intree_repairs")


def planned(connector: Connector, cores: tuple[int, ...] = (0, 1), **options: Any) -> Deployment:
    ports = itertools.count(5001)
    return plan(connector, InstanceOptions(model=Path("model"), **options), cores=cores, pick_port=lambda: next(ports))


def option(spec: ServerSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def transfer(spec: ServerSpec) -> dict[str, Any]:
    return dict(json.loads(option(spec, "--kv-transfer-config")))


@pytest.mark.parametrize("connector", list(Connector))
def test_common_flags(connector: Connector) -> None:
    deployment = planned(connector, extra_args=("--block-size", "64"))
    assert set(deployment.instances) == ({"single"} if connector is Connector.NONE else {"prefill", "decode"})
    ports = set()
    for role, spec in deployment.instances.items():
        assert spec.name == f"{connector.value} {role}"
        assert spec.argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
        assert option(spec, "--served-model-name") == SERVED_MODEL
        assert option(spec, "--dtype") == "float32"
        assert option(spec, "--distributed-executor-backend") == "uni"
        assert option(spec, "--block-size") == "64"
        assert "--enforce-eager" in spec.argv
        assert spec.cpus == ((1,) if role == "decode" else (0,))
        assert spec.env["OMP_NUM_THREADS"] == "1"
        assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert spec.health_url == f"http://127.0.0.1:{option(spec, '--port')}/health"
        ports.add(option(spec, "--port"))
    assert len(ports) == len(deployment.instances)
    assert deployment.router.argv[1:3] == ("-m", "kvpush.router")
    assert deployment.router.cpus is None
    assert deployment.url == f"http://127.0.0.1:{option(deployment.router, '--port')}"


def test_kvpush() -> None:
    deployment = planned(Connector.KVPUSH)
    prefill, decode = deployment.instances["prefill"], deployment.instances["decode"]
    control = transfer(prefill)["kv_connector_extra_config"]["control_port"]
    assert transfer(prefill) == {
        "kv_connector": "KVPushConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"control_host": "127.0.0.1", "control_port": control},
    }
    assert transfer(decode)["kv_role"] == "kv_consumer"
    assert transfer(decode)["kv_connector_extra_config"]["control_port"] != control
    assert option(deployment.router, "--prefill") == f"http://127.0.0.1:{option(prefill, '--port')}@127.0.0.1:{control}"
    assert option(deployment.router, "--decode") == f"http://127.0.0.1:{option(decode, '--port')}"
    assert option(deployment.router, "--mode") == "concurrent"
    for spec in deployment.instances.values():
        assert "VLLM_PLUGINS" not in spec.env
        assert "PYTHONPATH" not in spec.env
        assert "KVPUSH_AUTH_SECRET" not in spec.env


@pytest.mark.parametrize(
    ("connector", "name"), [(Connector.NIXL_PUSH, "NixlPushConnector"), (Connector.NIXL_PULL, "NixlPullConnector")]
)
def test_in_tree(connector: Connector, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    deployment = planned(connector)
    side_channels = set()
    for role, spec in deployment.instances.items():
        config = transfer(spec)
        assert config["kv_connector"] == name
        assert config["kv_role"] == ("kv_producer" if role == "prefill" else "kv_consumer")
        assert config["kv_buffer_device"] == "cpu"
        assert spec.env["PYTHONPATH"] == f"{REPAIRS}{os.pathsep}mine"
        assert spec.env["VLLM_PLUGINS"] == ""
        side_channels.add(spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    assert len(side_channels) == 2
    assert "PYTHONPATH" not in deployment.router.env
    prefill = deployment.instances["prefill"]
    assert option(deployment.router, "--prefill") == f"http://127.0.0.1:{option(prefill, '--port')}"
    assert option(deployment.router, "--mode") == "sequential"


def test_single_instance_behind_the_same_front() -> None:
    deployment = planned(Connector.NONE)
    single = deployment.instances["single"]
    assert "--kv-transfer-config" not in single.argv
    assert "--prefill" not in deployment.router.argv
    assert option(deployment.router, "--decode") == f"http://127.0.0.1:{option(single, '--port')}"


def test_one_core_is_shared() -> None:
    deployment = planned(Connector.KVPUSH, cores=(3,))
    assert [spec.cpus for spec in deployment.instances.values()] == [(3,), (3,)]


def test_compiled_and_more_environment() -> None:
    spec = planned(Connector.NONE, eager=False, env={"UCX_TLS": "tcp,self"}).instances["single"]
    assert "--enforce-eager" not in spec.argv
    assert spec.env["UCX_TLS"] == "tcp,self"


def test_repairs_patch_only_what_they_name(tmp_path: Path) -> None:
    """With a stand-in for NIXL's binding and for vLLM's module: neither package is needed."""
    package = tmp_path / "nixl_cu99"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_bindings.py").write_text("def nixlAgent(name, config): return name, config.pthrDelay\n")
    code = """
import os, types
import nixl_cu99._bindings as bindings
print(bindings.nixlAgent("a", types.SimpleNamespace(pthrDelay=0)))
before = os.sched_getaffinity(0)
exec("import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})", {"__name__": "vllm.x.nixl.base_worker"})
print(os.sched_getaffinity(0) == before)
os.sched_setaffinity(0, {max(before)})
print(os.sched_getaffinity(0) == {max(before)})
"""
    env = {**os.environ, "PYTHONPATH": f"{REPAIRS}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["('a', 1000)", "True", "True"]
    assert done.stderr == ""


def test_two_prefill_instances_behind_one_router() -> None:
    ports = itertools.count(1)
    place = Place(transfer_host="127.0.0.2", control_host="127.0.0.1")
    made = plan(
        Connector.KVPUSH,
        InstanceOptions(model=Path("model")),
        cores=(0, 1),
        pick_port=lambda: next(ports),
        places={"prefill-2": place},
        prefills=2,
    )
    assert list(made.instances) == list(roles(Connector.KVPUSH, 2)) == ["prefill", "prefill-2", "decode"]
    options = [made.router.argv[at + 1] for at, text in enumerate(made.router.argv) if text == "--prefill"]
    assert options == [
        f"{made.urls['prefill']}@127.0.0.1:{made.controls['prefill'][1]}",
        f"{made.urls['prefill-2']}@127.0.0.2:{made.controls['prefill-2'][1]}",
    ]
    argv = made.instances["prefill-2"].argv
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config["kv_role"] == "kv_producer"
    assert config["kv_connector_extra_config"] == {
        "control_host": "127.0.0.1",
        "control_port": made.controls["prefill-2"][1],
        "advertise_host": "127.0.0.2",
    }
    argv = with_transfer_config(made.instances["decode"], engine_id="pinned", kv_load_failure_policy=None).argv
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert (config["kv_role"], config["engine_id"]) == ("kv_consumer", "pinned")
    assert "kv_load_failure_policy" not in config
