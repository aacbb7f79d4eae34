# SPDX-License-Identifier: Apache-2.0
"""Runs storms: load, faults, and afterwards the look for what is left.

A storm of one topology goes through these phases: instances and router start; reserved prompts are asked, which shows that KV
is pushed, and file descriptors and threads are counted; load runs while faults are dealt; every fault is healed, the load stops
and the instances settle; reserved prompts are asked again, which shows that everything heals; and what is left is counted.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import aiohttp

from kvpush.chaos.asking import Ask, Ending, Reply, ask, fetch_reference
from kvpush.chaos.cluster import Cluster, Condition, Instance
from kvpush.chaos.faults import deal
from kvpush.chaos.harm import Harm
from kvpush.chaos.leaks import Footprint, footprint, settle
from kvpush.chaos.oracle import MARGIN, Oracle, Prompt, Reference, make_prompts
from kvpush.chaos.record import Record
from kvpush.chaos.results import ChaosConfig, ChaosResult, Topology
from kvpush.demo.connectors import Connector, InstanceOptions, plan, roles
from kvpush.demo.runner import Observer, describe_host
from kvpush.demo.supervisor import PortPicker, Server, Supervisor, available_cores, core_shares, first_exception
from kvpush.errors import MeasurementFailed
from kvpush.tiny_model import TinyModelSpec, write_model_of

__all__ = ["run"]

#: Small, so that prompts queue, wait for blocks and are preempted.
_BLOCK_TOKENS: Final = 32
_NUM_BLOCKS: Final = 49
_LONGEST_PROMPT: Final = 800
_LONGEST_OUTPUT: Final = 32
_OUTPUTS: Final = (1, 4, 12, _LONGEST_OUTPUT)
_SAMPLES: Final = (1, 1, 1, 1, 2, 3)
_TINY: Final = TinyModelSpec(layers=4, hidden=128, heads=4, kv_heads=4, seed=7, dtype="float32", max_position_embeddings=2048)
#: Shorter than the defaults where these would outlast a storm. Leases and heartbeats are the defaults.
_SETTINGS: Final[Mapping[str, str | None]] = {
    "KVPUSH_ANNOUNCE_TIMEOUT_S": "10",
    "KVPUSH_SOURCE_TIMEOUT_S": "20",
    "KVPUSH_TRANSFER_TIMEOUT_S": "30",
}
#: A lease, the transport's retry window, a source's time for its consumer, a fence, and room.
_SETTLE_S: Final = 60.0
_SETTLE_AGAIN_S: Final = 10.0
#: Requests for which every prefill instance must have been chosen, and have pushed.
_PROBE_TRIES: Final = 8
#: What a pool of threads or of connections may grow by.
_FD_SLACK: Final = 8
_THREAD_SLACK: Final = 4
_IDLE_S: Final = 5.0
#: Share of a core that an idle instance may use. It uses about 1 %; one that spins, nearly 100 %.
_IDLE_LIMIT: Final = 0.15
_SCRAPE_S: Final = 1.0
_BACK_OFF_S: Final = 1.0


async def run(config: ChaosConfig, observer: Observer) -> ChaosResult:
    """Run the storms one after another; nothing that was made or started is left when it returns, raises or is cancelled.

    Args:
        config: what to run.
        observer: is told how it goes on.

    Returns:
        What was seen. Failures are in it.

    Raises:
        ServerFailed: a server did not start in the first place.
        LinkFailed: the link between the namespaces can't be made.
        RelayFailed: the relays of the control channels don't work.
    """
    observer.phase("writing the tiny model")
    options = await asyncio.to_thread(_instance_options, config)
    pick_port = PortPicker()
    cores = available_cores()
    log_dir = config.work_dir / "logs"
    candidates = make_prompts(4 * config.prompts, seed=config.seed, longest=_LONGEST_PROMPT)
    reserved = _reserved(config)
    num_probes = 2 * _PROBE_TRIES
    found: ChaosResult | None = None
    with Supervisor(log_dir) as supervisor:
        single = plan(Connector.NONE, options, cores=cores[::-1], pick_port=pick_port)
        server = supervisor.start(single.instances["single"])
        observer.starting([server])
        for number, topology in enumerate(config.topologies):
            with Cluster(
                str(topology),
                prefills=topology.prefills,
                network=topology.network,
                options=options,
                cores=cores,
                pick_port=pick_port,
                log_dir=log_dir,
                pinned=_pinned(config, number, topology),
            ) as cluster:
                started = [cluster.start(instance) for instance in cluster.instances.values()]
                observer.starting(started)
                if found is None:
                    # While the first cluster starts, so that starts overlap.
                    await supervisor.wait_ready([server], timeout_s=config.start_timeout_s, on_ready=observer.ready)
                    observer.phase("asking the single instance for the right answers", config.prompts + num_probes)
                    url = single.urls["single"]
                    references = await _references(url, candidates, config.prompts, observer)
                    references |= (more := await _references(url, reserved, num_probes, observer))
                    await asyncio.to_thread(supervisor.stop)
                    prompts = [one for one in candidates if one.prompt_id in references]
                    probes = [one for one in reserved if one.prompt_id in more]
                    found = ChaosResult(config=config, oracle=Oracle(references), host=describe_host(cores))
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
                try:
                    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
                        storm = _Storm(config, number, topology, cluster, session, found.oracle, prompts, probes, observer)
                        found.storms.append(storm.result)
                        await storm.run()
                except BaseExceptionGroup as errors:
                    raise _first_of(errors) from errors
                observer.phase("stopping the servers")
                await asyncio.to_thread(cluster.supervisor.stop)
    assert found is not None
    return found


def _instance_options(config: ChaosConfig) -> InstanceOptions:
    model = write_model_of(_TINY, config.work_dir / "model")
    size = ("--block-size", str(_BLOCK_TOKENS), "--num-gpu-blocks-override", str(_NUM_BLOCKS))
    return InstanceOptions(
        model=model,
        dtype=_TINY.dtype,
        max_model_len=-(-(_LONGEST_PROMPT + _LONGEST_OUTPUT) // 64) * 64,
        kv_cache_bytes=64 << 20,
        extra_args=(*size, "--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
        router=(sys.executable, "-m", "kvpush.router", "--probe-backoff-max-s", "2"),
        env={**_SETTINGS, "KVPUSH_VERIFY": config.verify},
    )


def _reserved(config: ChaosConfig) -> list[Prompt]:
    """Prompts that nobody else asks for, long enough to be worth a transfer (see the setting recompute_below_tokens)."""
    made = make_prompts(256, seed=-1 - config.seed, longest=_LONGEST_PROMPT, families=0)
    long = [prompt for prompt in made if len(prompt.tokens) >= 4 * _BLOCK_TOKENS]
    return [replace(prompt, prompt_id=f"probe-{prompt.prompt_id}") for prompt in long]


def _pinned(config: ChaosConfig, number: int, topology: Topology) -> tuple[str, ...]:
    """Which instances keep their engine id: one of them, another one from seed to seed."""
    names = roles(Connector.KVPUSH, topology.prefills)
    return (names[(config.seed + number) % len(names)],)


async def _references(url: str, prompts: Sequence[Prompt], count: int, observer: Observer) -> dict[str, Reference]:
    """Right answers, one at a time, until there are enough that no rounding can change."""
    found: dict[str, Reference] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for prompt in prompts:
            if len(found) == count:
                break
            reference = await fetch_reference(session, url, prompt, _LONGEST_OUTPUT)
            if reference.margin >= MARGIN:
                found[prompt.prompt_id] = reference
                observer.step()
    if len(found) < count:
        raise MeasurementFailed(f"of {len(prompts)} prompts only {len(found)} have an answer that no rounding can change")
    return found


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


class _Storm:
    """One storm. Owner: the event loop."""

    def __init__(
        self,
        config: ChaosConfig,
        number: int,
        topology: Topology,
        cluster: Cluster,
        session: aiohttp.ClientSession,
        oracle: Oracle,
        prompts: Sequence[Prompt],
        probes: Sequence[Prompt],
        observer: Observer,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.oracle = oracle
        self.prompts = prompts
        self.probes = probes
        self.observer = observer
        self._record = Record(topology, cluster, session)
        self.result = self._record.result
        self._harm = Harm(cluster, self._record, start_timeout_s=config.start_timeout_s)
        self._session = session
        self._seed = f"{config.seed}/{number}"
        self._duration_s = 60 * config.minutes / len(config.topologies)
        self._latencies: deque[float] = deque([1.0], maxlen=64)
        self._stopping = asyncio.Event()
        self._next_probe = 0
        self._sent = 0

    async def run(self) -> None:
        """The whole storm; failures are in its result."""
        await self._start()
        before = await self._prove("before")
        footprints = {name: footprint(server.own_processes()) for name, server in self._servers().items()}
        self._record.begin()
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(self._watch_over()), group.create_task(self._scrape_often())]
            await self._rage()
            await self._settle()
            if before:
                await self._prove("after")
                await self._settle_again()
            await self._measure_idle()
            for task in watchers:
                task.cancel()
        for instance in self._found_dead():
            self._note_death(instance)
        self._compare_footprints(footprints)
        await self._record.scrape()
        self._record.finish()

    # --- phases ----------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        instances = list(self.cluster.instances.values())
        servers = [one.server for one in instances if one.server is not None]
        timeout_s = self.config.start_timeout_s
        await self.cluster.supervisor.wait_ready(servers, timeout_s=timeout_s, on_ready=self.observer.ready)
        for instance in instances:
            instance.condition = Condition.UP
        router = self.cluster.start_router()
        self.observer.starting([router])
        await self.cluster.supervisor.wait_ready([router], timeout_s=timeout_s, on_ready=self.observer.ready)

    async def _rage(self) -> None:
        duration = self._duration_s
        self.observer.phase(f"{self.result.topology}: storm of {duration:.0f} s")
        async with asyncio.TaskGroup() as group:
            for number in range(self.config.workers):
                group.create_task(self._work(number))
            await self._deal(until_s=duration)
            self.observer.phase(f"{self.result.topology}: the last requests")
            self._stopping.set()

    async def _settle(self) -> None:
        self.observer.phase(f"{self.result.topology}: settling")
        async with asyncio.TaskGroup() as group:
            tasks = {role: group.create_task(self._settle_one(role, _SETTLE_S)) for role in self.cluster.instances}
        for role, task in tasks.items():
            held = task.result()
            if held is None:
                self.result.unreadable += 1
                what = f"{role}'s metrics can't be read {_SETTLE_S:.0f} s after the storm: what it still holds is not known"
                self._record.fail("unreadable", what, logs=[role])
                continue
            if not held:
                continue
            share = held.get("kv_cache_usage_perc", 0.0)
            blocks = max(1, round(share * (_NUM_BLOCKS - 1)))
            self.result.leaked_blocks += blocks
            what = f"{role} still holds {blocks} blocks or a request {_SETTLE_S:.0f} s after the storm"
            self._record.fail("leak", what, logs=[role], detail={"held": held})

    async def _settle_again(self) -> None:
        async with asyncio.TaskGroup() as group:
            for role in self.cluster.instances:
                group.create_task(self._settle_one(role, _SETTLE_AGAIN_S))

    async def _settle_one(self, role: str, timeout_s: float) -> dict[str, float] | None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            return await settle(session, self.cluster.instances[role].url, timeout_s=timeout_s)

    async def _measure_idle(self) -> None:
        """CPU time of what should be doing nothing."""
        self.observer.phase(f"{self.result.topology}: idle for {_IDLE_S:.0f} s")
        for role, share in (await core_shares(self._servers(), _IDLE_S)).items():
            self.result.idle_cpu_percent[role] = round(100 * share, 1)
            if share > _IDLE_LIMIT:
                self.result.busy += 1
                self._record.fail("busy", f"{role} uses {100 * share:.0f} % of a core with nothing to do", logs=[role])

    async def _prove(self, when: str) -> bool:
        """Ask reserved prompts, one at a time, until KV was pushed from every prefill instance. Answers are judged too."""
        self.observer.phase(f"{self.result.topology}: is KV pushed from every prefill instance?")
        missing = {one.role for one in self.cluster.prefills}
        await self._router_sees_all()
        for _ in range(_PROBE_TRIES):
            if not missing:
                return True
            before = await self._sent_counts()
            prompt = self.probes[self._next_probe % len(self.probes)]
            self._next_probe += 1
            asked = Ask(
                request_id=f"chaos-{self._seed.replace('/', '-')}-probe-{self._next_probe}",
                prompt=prompt,
                output_tokens=_OUTPUTS[1],
                deadline_s=self.config.deadline_s,
            )
            await self._ask(asked)
            # vLLM's front end counts a moment after it has answered.
            for _ in range(20):
                after = await self._sent_counts()
                grown = {role for role in missing if after[role] > before[role]}
                if grown:
                    break
                await asyncio.sleep(0.1)
            missing -= grown
        if missing:
            self.result.not_healed += len(missing)
            text = f"{when} the storm, nothing is pushed from {', '.join(sorted(missing))}"
            self._record.fail("not healed", text, logs=[*sorted(missing), "decode"])
        return not missing

    async def _sent_counts(self) -> dict[str, float]:
        """By role; NaN where nothing could be read, which is neither more nor less than anything."""
        counts = {}
        for instance in self.cluster.prefills:
            metrics = await self._record.metrics(instance.url)
            counts[instance.role] = metrics.get("kvpush_sent_requests_total", 0.0) if metrics else math.nan
        return counts

    async def _router_sees_all(self) -> None:
        """The router probes instances that were down only now and then."""
        for _ in range(40):
            metrics = await self._record.metrics(self.cluster.url)
            if metrics.get("kvpush_router_instance_up", 0.0) >= len(self.cluster.instances):
                return
            await asyncio.sleep(0.5)

    def _compare_footprints(self, before: Mapping[str, Footprint]) -> None:
        for role, server in self._servers().items():
            first, last = before[role], footprint(server.own_processes())
            self.result.footprints[role] = {
                "fds": [first.num_fds, last.num_fds],
                "threads": [first.num_threads, last.num_threads],
            }
            fds = max(0, last.num_fds - first.num_fds - _FD_SLACK)
            threads = max(0, last.num_threads - first.num_threads - _THREAD_SLACK)
            self.result.leaked_fds += fds
            self.result.leaked_threads += threads
            if fds or threads:
                what = (
                    f"{role} has {last.num_fds} file descriptors and {last.num_threads} threads, after "
                    f"{first.num_fds} and {first.num_threads} at first"
                )
                self._record.fail("leak", what, logs=[role], detail={"more": first.grown_to(last)})

    # --- load ------------------------------------------------------------------------------------------------------------

    async def _work(self, number: int) -> None:
        """One client after another, until the storm is over."""
        rng = random.Random(f"chaos/load/{self._seed}/{number}")
        while not self._stopping.is_set():
            self._sent += 1
            samples = rng.choice(_SAMPLES)
            leaves = None
            if rng.random() < self.config.leaving:
                leaves = rng.random() * 1.5 * sorted(self._latencies)[len(self._latencies) // 2]
            asked = Ask(
                request_id=f"chaos-{self._seed.replace('/', '-')}-{self._sent}",
                prompt=rng.choice(self.prompts),
                output_tokens=rng.choice(_OUTPUTS),
                samples=samples,
                stream=rng.random() < 0.5,
                leave_after_s=leaves,
                deadline_s=self.config.deadline_s,
            )
            reply = await self._ask(asked)
            if reply.ending is Ending.ERROR:
                await asyncio.sleep(_BACK_OFF_S)
            elif rng.random() < 0.1:
                await asyncio.sleep(rng.random())

    async def _ask(self, asked: Ask) -> Reply:
        sent_at = self._record.now()
        reply = await ask(self._session, self.cluster.url, asked)
        ended_at = self._record.now()
        result = self.result
        result.requests += 1
        if reply.ending is Ending.OK:
            self._latencies.append(ended_at - sent_at)
        differences = [
            difference
            for answer in reply.answers
            if (
                difference := self.oracle.judge(
                    asked.prompt.prompt_id, answer, asked=asked.output_tokens, whole=reply.ending is Ending.OK
                )
            )
        ]
        if differences:
            result.wrong += 1
            self._record.fail_request("wrong", asked, reply, sent_at, differences)
        elif reply.ending is Ending.OK:
            result.ok += 1
        elif reply.ending is Ending.LEFT:
            result.left += 1
        elif reply.ending is Ending.HUNG:
            result.hung += 1
            self._record.fail_request("hung", asked, reply, sent_at, ())
        elif self._no_decode_could_save(sent_at, ended_at):
            result.excused[reply.error or "?"] += 1
        else:
            result.errors[reply.error or "?"] += 1
            self._record.fail_request("error", asked, reply, sent_at, ())
        return reply

    def _no_decode_could_save(self, sent_at: float, ended_at: float) -> bool:
        """Whether a decode instance was down at some moment of a request: with one of them, nobody else has its tokens, and
        nobody else can compute. This is the only reason for which an error is allowed."""
        return any(
            begin <= ended_at and (end is None or end >= sent_at)
            for instance in self.cluster.decodes
            for begin, end in instance.outages
        )

    # --- faults ----------------------------------------------------------------------------------------------------------

    async def _deal(self, *, until_s: float) -> None:
        """Deal faults until it is time, then wait until all are healed."""
        possible = self._harm.possible(self.config.kinds)
        async with asyncio.TaskGroup() as group:
            for card in deal(possible, seed=self._seed):
                await self._sleep_until(min(until_s, self._record.now() + card.pause_s))
                if self._record.now() >= until_s:
                    break
                work = self._harm.work_of(card)
                if work is not None:
                    group.create_task(work())
            await self._sleep_until(until_s)
            self.observer.phase(f"{self.result.topology}: healing")

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._record.now()))

    # --- watching --------------------------------------------------------------------------------------------------------

    async def _watch_over(self) -> None:
        """Notice instances that end without our doing, and start them again, so that the storm goes on."""
        while True:
            # Noted at once: while one is started again, another one that is down must not be dealt a fault, or be found again.
            dead = self._found_dead()
            for instance in dead:
                self._note_death(instance)
            for instance in dead:
                await self._harm.revive(instance)
            router = self.cluster.router
            if router is not None and router.exit_status is not None:
                raise router.failed(f"ended with status {router.exit_status}")
            await asyncio.sleep(0.2)

    def _found_dead(self) -> list[Instance]:
        """Instances that have ended without our doing, and were not noted yet."""
        return [
            one
            for one in self.cluster.instances.values()
            if one.condition is not Condition.DOWN and one.server is not None and one.server.exit_status is not None
        ]

    def _note_death(self, instance: Instance) -> None:
        server = instance.server
        assert server is not None
        instance.condition = Condition.DOWN
        instance.outages.append((self._record.now() - 1.0, None))
        self.result.engine_deaths += 1
        text = server.log_path.read_text(encoding="utf-8", errors="replace")
        detail = {"status": server.exit_status, "first_exception": first_exception(text), "log_tail": server.log_tail(40)}
        what = f"{instance.role} ended with status {server.exit_status}"
        self._record.fail("engine death", what, logs=[instance.role], detail=detail)
        self.cluster.supervisor.kill(server)

    async def _scrape_often(self) -> None:
        while True:
            await self._record.scrape()
            await asyncio.sleep(_SCRAPE_S)

    def _servers(self) -> dict[str, Server]:
        """Every server that is up, by role."""
        found = {
            role: one.server
            for role, one in self.cluster.instances.items()
            if one.condition is Condition.UP and one.server is not None
        }
        if self.cluster.router is not None:
            found["router"] = self.cluster.router
        return found
