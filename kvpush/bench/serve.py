# SPDX-License-Identifier: Apache-2.0
"""Runs a matrix of prompt lengths and rates over several connectors, with real vLLM instances, and collects what it saw.

As in `kvpush.demo.runner`, all instances of a run stay up together and arms take turns: request by request when these are
sent one at a time, else round by round, beginning with another one each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from kvpush.bench.arms import Arm, Rate
from kvpush.bench.drive import Driver, EngineCpu, Measured
from kvpush.bench.link import Link, LinkSpec, places
from kvpush.bench.steps import STEP_SERIES
from kvpush.demo.client import RequestResult, RequestSpec, arrival_times, make_requests
from kvpush.demo.connectors import Connector, Deployment, InstanceOptions, plan
from kvpush.demo.runner import Observer, describe_host, read_metrics, split
from kvpush.demo.stats import Calibration, calibrate, host_cpu, percentile
from kvpush.demo.supervisor import PortPicker, Server, Supervisor, available_cores, core_shares
from kvpush.errors import ConfigError, MeasurementFailed
from kvpush.tiny_model import TinyModelSpec, kv_bytes_per_token, write_model_of

__all__ = ["ArmResult", "BenchConfig", "BenchResult", "Point", "run"]

#: No two prompts of a run may begin alike. Each point and each arm of a connector has its own range of request numbers.
_RANGE: Final = 10_000
_WARM_UP: Final = 100_000_000
_EQUALITY: Final = 200_000_000
_SATURATION: Final = 300_000_000

_EQUALITY_REQUESTS: Final = 4
_SATURATION_REQUESTS: Final = 12
_SATURATION_AT_ONCE: Final = 4
_SETTLE_S: Final = 1.0
_BLOCK: Final = 128

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What to run.

    Args:
        arms: in the order of the table, the single instance among them.
        link: shaped link between prefill and decode; None is the loopback.
        prompt_tokens: lengths of prompts, a point each.
        rates: rates of requests, a point each.
        output_tokens: length of each answer.
        requests: for each arm and point, over all rounds.
        rounds: how often to take turns.
        seed: of the weights, the prompts and the arrival times.
        tiny: shape and dtype of the model.
        max_num_batched_tokens: size of a chunk of prefill; vLLM's own when None.
        kv_cache_bytes: of each instance; some times the longest request's when None.
        eager: skip compilation.
        vllm_args: more arguments for every instance.
        warm_up: requests to each arm before anything is measured.
        idle_s: length of the idle window; 0 leaves it out.
        start_timeout_s: for all servers together.
        request_timeout_s: for one request.
        work_dir: folder for the model and the logs.
    """

    arms: tuple[Arm, ...]
    link: LinkSpec | None = None
    prompt_tokens: tuple[int, ...] = (2000,)
    rates: tuple[Rate, ...] = (Rate(0.0),)
    output_tokens: int = 32
    requests: int = 12
    rounds: int = 3
    seed: int = 0
    tiny: TinyModelSpec
    max_num_batched_tokens: int | None = 512
    kv_cache_bytes: int | None = None
    eager: bool = True
    vllm_args: tuple[str, ...] = ()
    warm_up: int = 3
    idle_s: float = 5.0
    start_timeout_s: float = 600.0
    request_timeout_s: float = 300.0
    work_dir: Path

    def __post_init__(self) -> None:
        for name in ("output_tokens", "requests", "rounds", "warm_up"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.requests >= _RANGE:
            raise ConfigError(f"requests must be below {_RANGE}")
        if not self.arms or not self.prompt_tokens or not self.rates:
            raise ConfigError("a connector, a prompt length and a rate are needed")
        if min(self.prompt_tokens) < 1:
            raise ConfigError("prompt lengths must be at least 1")
        for values in (self.arms, self.prompt_tokens, self.rates):
            if len(set(values)) != len(values):
                raise ConfigError("a connector, prompt length or rate is given twice")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise ConfigError("max_num_batched_tokens must be at least 1")
        if self.idle_s < 0:
            raise ConfigError("idle_s must not be negative")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer, in whole blocks."""
        return -(-(max(self.prompt_tokens) + self.output_tokens) // _BLOCK) * _BLOCK

    @property
    def cache_bytes(self) -> int:
        """Size of each instance's KV cache."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        # One at a time: so small that the warm-up touches all of it, and no measured request pays for fresh pages.
        times = 3 if all(rate == Rate(0.0) for rate in self.rates) else 8
        return times * self.longest * kv_bytes_per_token(self.tiny)


@dataclass(slots=True)
class ArmResult:
    """What was seen of one arm at one point.

    Args:
        measured: the requests, in order.
        equality_results: of the pass that outputs are compared by; the measured requests' where these serve.
        engine_cpu_s: CPU time of decode's engine process during its turns; NaN if unknown.
        instance_cpu_s: the same for every process of the decode instance.
        wall_s: length of its turns.
        counters: how far each counter of an instance moved during its turns, by role and name; those of the cost of steps by
            name and labels.
        capacity_qps: requests a second that it managed when always busy; None if not measured.
    """

    measured: list[Measured] = field(default_factory=list)
    equality_results: list[RequestResult] = field(default_factory=list)
    engine_cpu_s: float = 0.0
    instance_cpu_s: float = 0.0
    wall_s: float = 0.0
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    capacity_qps: float | None = None

    @property
    def errors(self) -> int:
        """Number of failed requests."""
        return sum(not one.result.ok for one in self.measured)

    @property
    def good(self) -> list[Measured]:
        """The requests that succeeded."""
        return [one for one in self.measured if one.result.ok]


@dataclass(slots=True, kw_only=True)
class Point:
    """One prompt length at one rate.

    Args:
        prompt_tokens: length of the prompts.
        rate: as asked for.
        qps: requests a second, known once percents are resolved; 0 is one at a time.
        dtype: of the computation.
        arms: what was seen, in the order of the table.
        references: outputs of the single instance by lane (see `lane_of`).
        calibrations: one list a round.
        other_cpu_percent: taken by others meanwhile, percent of a core; None if unknown.
        steal_percent: the same for the hypervisor.
    """

    prompt_tokens: int
    rate: Rate
    qps: float = 0.0
    dtype: str
    arms: dict[Arm, ArmResult]
    references: dict[int, list[RequestResult]] = field(default_factory=dict)
    calibrations: list[list[Calibration]] = field(default_factory=list)
    other_cpu_percent: float | None = None
    steal_percent: float | None = None

    @property
    def exact(self) -> bool:
        """Whether greedy outputs do not depend on which requests share a batch."""
        return self.dtype == "float32" or self.qps == 0

    @property
    def equality(self) -> str:
        """How outputs are compared, for the reader."""
        head = f"token ids of greedy outputs against the single instance's, {self.dtype}, "
        if self.exact:
            return head + "every measured request"
        return (
            head + f"in a pass of its own with {_EQUALITY_REQUESTS} requests one at a time: "
            "under load the outputs of this dtype depend on which requests share a batch"
        )

    @property
    def decode_step_ms(self) -> float:
        """Median TPOT of every disaggregated arm's requests: what a decode step takes; NaN if unknown."""
        return percentile(
            [
                1000 * one.result.tpot_s
                for arm, result in self.arms.items()
                if arm.connector is not Connector.NONE
                for one in result.good
                if not math.isnan(one.result.tpot_s)
            ],
            50,
        )

    def equals_reference(self, arm: Arm) -> bool:
        """Whether an arm's outputs equal the single instance's, token by token, none missing."""
        reference = self.references.get(lane_of(arm, list(self.arms)), [])
        own = self.arms[arm].equality_results
        return (
            len(own) == len(reference) > 0
            and all(result.ok for result in (*own, *reference))
            and all(a.token_ids == b.token_ids for a, b in zip(own, reference, strict=True))
        )

    @property
    def outputs_equal(self) -> bool:
        """Whether the outputs of kvpush's arms equal the single instance's; those of all arms if kvpush was not run."""
        judged = [arm for arm in self.arms if arm.connector is Connector.KVPUSH] or list(self.arms)
        return all(self.equals_reference(arm) for arm in judged)

    @property
    def ok(self) -> bool:
        """Whether every request succeeded and the outputs are equal."""
        return self.outputs_equal and not any(result.errors for result in self.arms.values())


@dataclass(slots=True, kw_only=True)
class BenchResult:
    """What a run saw.

    Args:
        config: what was run.
        points: in order.
        idle_cpu_percent: by connector and role, of one core.
        host: what it ran on.
    """

    config: BenchConfig
    points: list[Point] = field(default_factory=list)
    idle_cpu_percent: dict[Connector, dict[str, float]] = field(default_factory=dict)
    host: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether every point is."""
        return bool(self.points) and all(point.ok for point in self.points)


def lane_of(arm: Arm, arms: Sequence[Arm]) -> int:
    """Which of an arm's connector's arms it is, from 0.

    Arms of one connector share instances, and so prefix caches: each needs prompts of its own.
    """
    return [other for other in arms if other.connector is arm.connector].index(arm)


async def run(config: BenchConfig, observer: Observer) -> BenchResult:
    """Run everything once; nothing that it made or started is left when it returns, raises or is cancelled.

    Args:
        config: what to run.
        observer: is told how it goes on.

    Returns:
        What was seen. Failed requests are in it.

    Raises:
        ServerFailed: a server did not start, or ended.
        LinkFailed: the link can't be made.
        ConfigError: an option is wrong.
        MeasurementFailed: a connector answers nothing, so that its saturation is unknown.
    """
    observer.phase("writing the tiny model")
    options = await asyncio.to_thread(_instance_options, config)
    cores = available_cores()
    pick_port = PortPicker()
    found = BenchResult(config=config, host=describe_host(cores))
    timeout = aiohttp.ClientTimeout(total=config.request_timeout_s)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link(config.link)) if config.link is not None else None
        supervisor = stack.enter_context(Supervisor(config.work_dir / "logs"))
        deployments = {
            connector: plan(connector, options, cores=cores, pick_port=pick_port, places=places(link))
            for connector in dict.fromkeys(arm.connector for arm in config.arms)
        }
        servers = {
            connector: {role: supervisor.start(spec) for role, spec in deployment.instances.items()}
            for connector, deployment in deployments.items()
        }
        observer.starting(supervisor.servers)
        await supervisor.wait_ready(supervisor.servers, timeout_s=config.start_timeout_s, on_ready=observer.ready)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            bench = _Bench(config, supervisor, session, deployments, servers, found, observer, cores[:2])
            await bench.warm_up()
            await bench.measure_idle()
            for number, (tokens, rate) in enumerate((t, r) for t in config.prompt_tokens for r in config.rates):
                await bench.measure_point(number, tokens, rate)
        observer.phase("stopping the servers")
        await asyncio.to_thread(supervisor.stop)
    return found


def _instance_options(config: BenchConfig) -> InstanceOptions:
    tiny = config.tiny
    shape = replace(tiny, seed=config.seed, max_position_embeddings=max(config.longest, 2048))
    model = write_model_of(shape, config.work_dir / "model")
    chunk: tuple[str, ...] = ()
    if config.max_num_batched_tokens is not None:
        # vLLM refuses more requests at once than tokens in a batch.
        at_once = min(64, config.max_num_batched_tokens)
        chunk = ("--max-num-batched-tokens", str(config.max_num_batched_tokens), "--max-num-seqs", str(at_once))
    return InstanceOptions(
        model=model,
        dtype=tiny.dtype,
        max_model_len=config.longest,
        kv_cache_bytes=config.cache_bytes,
        eager=config.eager,
        extra_args=(*chunk, *config.vllm_args),
    )


class _Bench:
    """The measuring part of a run: every server is up."""

    def __init__(
        self,
        config: BenchConfig,
        supervisor: Supervisor,
        session: aiohttp.ClientSession,
        deployments: dict[Connector, Deployment],
        servers: dict[Connector, dict[str, Server]],
        found: BenchResult,
        observer: Observer,
        cores: Sequence[int],
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._session = session
        self._servers = servers
        self._found = found
        self._observer = observer
        self._cores = cores
        self._deployments = deployments
        self._drivers = {arm: Driver(arm, deployments[arm.connector], session) for arm in config.arms}
        self._engines = {connector: EngineCpu(_decoder(roles)) for connector, roles in servers.items()}
        self._capacities: dict[int, dict[Arm, float]] = {}

    async def warm_up(self) -> None:
        """First requests pay for handshakes, allocations and fresh pages; they are not counted."""
        config = self._config
        self._observer.phase("warming up", config.warm_up * len(config.arms))
        for arm in config.arms:
            for request in self._requests(config.warm_up, max(config.prompt_tokens), _WARM_UP, arm):
                await self._send(arm, request)

    async def measure_idle(self) -> None:
        """CPU time of each instance's processes while nothing is asked of any of them."""
        if not self._config.idle_s:
            return
        self._observer.phase(f"idle for {self._config.idle_s:g} s")
        await asyncio.sleep(_SETTLE_S)
        instances = {(one, role): server for one, roles in self._servers.items() for role, server in roles.items()}
        for (connector, role), share in (await core_shares(instances, self._config.idle_s)).items():
            self._found.idle_cpu_percent.setdefault(connector, {})[role] = round(100 * share, 2)

    async def measure_point(self, number: int, prompt_tokens: int, rate: Rate) -> None:
        """Measure one point, and compare its outputs.

        Args:
            number: of the point within the run.
            prompt_tokens: length of the prompts.
            rate: of the requests.
        """
        config = self._config
        point = Point(
            prompt_tokens=prompt_tokens, rate=rate, dtype=config.tiny.dtype, arms={a: ArmResult() for a in config.arms}
        )
        if rate.percent:
            capacities = await self._measure_capacity(prompt_tokens)
            for arm, capacity in capacities.items():
                point.arms[arm].capacity_qps = capacity
            point.qps = min(capacities.values()) * rate.value / 100
        else:
            point.qps = rate.value
        how = f"{point.qps:.3g} requests/s" if point.qps else "one at a time"
        self._observer.phase(f"{prompt_tokens} tokens, {how}", config.requests * len(config.arms))
        requests = {arm: self._requests(config.requests, prompt_tokens, number * 100 * _RANGE, arm) for arm in config.arms}
        loop = asyncio.get_running_loop()
        at, host, own = loop.time(), host_cpu(), self._own_cpu_seconds()
        for round_, chunk in enumerate(split(range(config.requests), config.rounds)):
            point.calibrations.append(await asyncio.to_thread(calibrate, self._cores))
            if point.qps == 0:
                for index in chunk:
                    for arm in self._turns(index):
                        await self._turn(point, arm, partial(self._one, point, arm, requests[arm][index]))
            else:
                for arm in self._turns(round_):
                    batch = [requests[arm][index] for index in chunk]
                    await self._turn(point, arm, partial(self._at_rate, point, arm, batch, config.seed + round_))
        seconds, host_after = loop.time() - at, host_cpu()
        if host is not None and host_after is not None and seconds > 0:
            others = host_after.busy_s - host.busy_s - (self._own_cpu_seconds() - own)
            point.other_cpu_percent = round(100 * max(0.0, others) / seconds, 1)
            point.steal_percent = round(100 * max(0.0, host_after.stolen_s - host.stolen_s) / seconds, 1)
        await self._compare(number, point, requests)
        self._found.points.append(point)

    async def _one(self, point: Point, arm: Arm, request: RequestSpec) -> None:
        point.arms[arm].measured.append(await self._send(arm, request, count_cpu=True))

    async def _at_rate(self, point: Point, arm: Arm, batch: Sequence[RequestSpec], seed: int) -> None:
        async def later(request: RequestSpec, delay_s: float) -> Measured:
            await asyncio.sleep(delay_s)
            return await self._send(arm, request)

        delays = arrival_times(len(batch), qps=point.qps, seed=seed)
        point.arms[arm].measured += await _all(later(r, d) for r, d in zip(batch, delays, strict=True))

    async def _turn(self, point: Point, arm: Arm, work: Callable[[], Awaitable[None]]) -> None:
        """Run an arm's turn, and add up what its servers did meanwhile."""
        result = point.arms[arm]
        roles = self._servers[arm.connector]
        before = await self._counters(arm.connector)
        loop = asyncio.get_running_loop()
        engine, decoder = self._engines[arm.connector], _decoder(roles)
        at, engine_s, instance_s = loop.time(), engine.seconds(), decoder.cpu_seconds()
        await work()
        result.wall_s += loop.time() - at
        result.engine_cpu_s += engine.seconds() - engine_s
        result.instance_cpu_s += decoder.cpu_seconds() - instance_s
        for role, counters in (await self._counters(arm.connector)).items():
            moved = result.counters.setdefault(role, {})
            for name, value in counters.items():
                moved[name] = moved.get(name, 0.0) + value - before[role].get(name, 0.0)

    async def _measure_capacity(self, prompt_tokens: int) -> dict[Arm, float]:
        """Requests a second that each arm manages when it always has some to work on."""
        if prompt_tokens in self._capacities:
            return self._capacities[prompt_tokens]
        arms = [arm for arm in self._config.arms if arm.connector is not Connector.NONE] or list(self._config.arms)
        self._observer.phase(f"saturation, {prompt_tokens} tokens", _SATURATION_REQUESTS * len(arms))
        loop = asyncio.get_running_loop()
        found: dict[Arm, float] = {}
        first = _SATURATION + len(self._capacities) * 100 * _RANGE
        for arm in arms:
            places_ = asyncio.Semaphore(_SATURATION_AT_ONCE)
            ends: list[float] = []

            async def one(
                request: RequestSpec, arm: Arm = arm, places_: asyncio.Semaphore = places_, ends: list[float] = ends
            ) -> None:
                async with places_:
                    measured = await self._send(arm, request)
                if measured.result.ok:
                    ends.append(loop.time())

            await _all(one(request) for request in self._requests(_SATURATION_REQUESTS, prompt_tokens, first, arm))
            if len(ends) < 2 or ends[-1] == ends[0]:
                raise MeasurementFailed(f"{arm} answered {len(ends)} of {_SATURATION_REQUESTS} requests: saturation is unknown")
            # From the first end to the last: the pipeline is full in between.
            found[arm] = (len(ends) - 1) / (ends[-1] - ends[0])
        self._capacities[prompt_tokens] = found
        return found

    async def _compare(self, number: int, point: Point, requests: dict[Arm, list[RequestSpec]]) -> None:
        """Have the single instance answer what it has not answered yet, and note what is compared with what."""
        arms = self._config.arms
        reference = next(arm for arm in arms if arm.connector is Connector.NONE)
        if point.exact:
            for arm in arms:
                point.arms[arm].equality_results = [one.result for one in point.arms[arm].measured]
            point.references[0] = point.arms[reference].equality_results
            asked = {lane_of(arm, arms): requests[arm] for arm in arms if lane_of(arm, arms) > 0}
        else:
            first = _EQUALITY + number * 100 * _RANGE
            passes = {arm: self._requests(_EQUALITY_REQUESTS, point.prompt_tokens, first, arm) for arm in arms}
            self._observer.phase("comparing outputs", _EQUALITY_REQUESTS * len(arms))
            for arm in arms:
                point.arms[arm].equality_results = [(await self._send(arm, one)).result for one in passes[arm]]
            point.references[0] = point.arms[reference].equality_results
            asked = {lane_of(arm, arms): passes[arm] for arm in arms if lane_of(arm, arms) > 0}
        for lane, wanted in asked.items():
            self._observer.phase("asking the single instance for more outputs", len(wanted))
            point.references[lane] = [(await self._send(reference, one)).result for one in wanted]

    async def _send(self, arm: Arm, request: RequestSpec, *, count_cpu: bool = False) -> Measured:
        cpu = self._engines[arm.connector] if count_cpu and arm.connector is not Connector.NONE else None
        measured = await self._drivers[arm].send(request, cpu=cpu)
        if not measured.result.ok:
            # Gives a server that is just dying the time to be dead.
            await asyncio.sleep(_SETTLE_S)
        self._supervisor.check_alive()
        self._observer.step()
        return measured

    def _requests(self, count: int, prompt_tokens: int, first: int, arm: Arm) -> list[RequestSpec]:
        made = make_requests(
            count,
            prompt_tokens=prompt_tokens,
            output_tokens=self._config.output_tokens,
            seed=self._config.seed,
            first=first + lane_of(arm, self._config.arms) * _RANGE,
        )
        return [replace(request, index=index) for index, request in enumerate(made)]

    def _turns(self, number: int) -> list[Arm]:
        """The arms, beginning with another one for each number."""
        arms = list(self._config.arms)
        start = number % len(arms)
        return arms[start:] + arms[:start]

    async def _counters(self, connector: Connector) -> dict[str, dict[str, float]]:
        urls = self._deployments[connector].urls
        return {role: await read_metrics(self._session, f"{url}/metrics", labelled=STEP_SERIES) for role, url in urls.items()}

    def _own_cpu_seconds(self) -> float:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return own + sum(server.cpu_seconds() for server in self._supervisor.servers)


def _decoder(roles: dict[str, Server]) -> Server:
    return roles["decode"] if "decode" in roles else roles["single"]


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines at once; of several errors the first is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
