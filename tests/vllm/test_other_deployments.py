# SPDX-License-Identifier: Apache-2.0
"""The same, differently deployed: compiled, both roles in one instance, no prefix caching, loaded by module path; a prefill
instance that is killed, and one that preempts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_cluster import Cluster, answer, complete, grown, metrics, options, prompt, settled, start

from kvpush.demo.connectors import Connector, plan, with_transfer_config
from kvpush.demo.supervisor import PortPicker, Supervisor, available_cores

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def both_roles(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Compiled instances of kv_both without prefix caching; the entry point is switched off, the module path is given."""
    given = options(model, "--no-enable-prefix-caching", eager=False, env={"VLLM_PLUGINS": ""})
    pair = plan(Connector.KVPUSH, given, cores=available_cores(), pick_port=PortPicker())
    changes = {"kv_role": "kv_both", "kv_connector_module_path": "kvpush.vllm.connector"}
    instances = {role: with_transfer_config(spec, **changes) for role, spec in pair.instances.items()}
    pair = dataclasses.replace(pair, instances=instances)
    with Supervisor(tmp_path_factory.mktemp("logs-both")) as supervisor:
        (servers,) = start(supervisor, pair)
        yield Cluster(supervisor, pair, servers)


async def test_compiled_instances_of_both_roles(both_roles: Cluster, single_url: str) -> None:
    prompts = [prompt(length, seed=300 + length) for length in (7, 64, 100, 700)]
    before = await metrics(both_roles.instance_url("decode"))
    for tokens in prompts:
        assert await answer(both_roles.url, tokens) == await answer(single_url, tokens)
    await grown(both_roles.instance_url("decode"), "kvpush_received_requests_total", before, len(prompts))
    # Without prefix caching the same prompt is pushed again.
    assert await answer(both_roles.url, prompts[-1]) == await answer(single_url, prompts[-1])
    await grown(both_roles.instance_url("decode"), "kvpush_received_requests_total", before, len(prompts) + 1)


async def test_both_directions_at_once(both_roles: Cluster, single_url: str) -> None:
    """Each instance is a producer for the other one."""
    first, second = prompt(150, seed=401), prompt(170, seed=402)
    prefill, decode = both_roles.instance_url("prefill"), both_roles.instance_url("decode")

    async def one(tokens: list[int], producer: str, consumer: str) -> list[int]:
        status, content = await complete(
            producer, tokens, output_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}
        )
        assert status == 200, content
        return await answer(consumer, tokens, kv_transfer_params=content["kv_transfer_params"])

    before = await metrics(prefill)
    answers = await asyncio.gather(one(first, prefill, decode), one(second, decode, prefill))
    assert answers == [await answer(single_url, first), await answer(single_url, second)]
    await grown(prefill, "kvpush_received_requests_total", before, 1)
    for url in (prefill, decode):
        await settled(url)


async def test_decode_answers_after_the_prefill_instance_is_killed(model: Path, single_url: str, tmp_path: Path) -> None:
    pair = plan(Connector.KVPUSH, options(model), cores=available_cores(), pick_port=PortPicker())
    with Supervisor(tmp_path / "logs") as supervisor:
        (servers,) = await asyncio.to_thread(start, supervisor, pair)
        cluster = Cluster(supervisor, pair, servers)
        tokens = prompt(100, seed=500)
        assert await answer(cluster.url, tokens) == await answer(single_url, tokens)
        # Long prompts are under way when it dies.
        prompts = [prompt(1500 + i, seed=510 + i) for i in range(6)]
        expected = [await answer(single_url, one) for one in prompts]
        running = [asyncio.create_task(answer(cluster.url, one)) for one in prompts]
        await asyncio.sleep(0.3)
        supervisor.kill(servers["prefill"])
        assert list(await asyncio.gather(*running)) == expected
        # Straight to decode, with params that point to the dead one, as a router would send that has not noticed yet.
        host, port = cluster.control
        params = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": "gone"}
        late = prompt(200, seed=600)
        expected_late = await answer(single_url, late)
        assert await answer(cluster.instance_url("decode"), late, kv_transfer_params=params) == expected_late
        assert await answer(cluster.url, prompt(90, seed=601)) == await answer(single_url, prompt(90, seed=601))
        found = await settled(cluster.instance_url("decode"))
        assert found["kvpush_failed_receives_total"] >= 1
        assert servers["decode"].exit_status is None


async def test_thirty_two_requests_with_sixteen_blocks(model: Path, single_url: str, tmp_path: Path) -> None:
    """Tiny pools on both sides, everything at once: nothing deadlocks, nothing is wrong, every block comes back."""
    tiny = dataclasses.replace(options(model, "--num-gpu-blocks-override", "17"), max_model_len=384)
    pair = plan(Connector.KVPUSH, tiny, cores=available_cores(), pick_port=PortPicker())
    with Supervisor(tmp_path / "logs") as supervisor:
        (servers,) = await asyncio.to_thread(start, supervisor, pair)
        cluster = Cluster(supervisor, pair, servers)
        prompts = [prompt(60 + 7 * i, seed=700 + i) for i in range(32)]
        expected = [await answer(single_url, tokens) for tokens in prompts]
        assert list(await asyncio.gather(*(answer(cluster.url, tokens) for tokens in prompts))) == expected
        found = await settled(cluster.instance_url("decode"))
        assert found["kvpush_received_requests_total"] > 16
        await settled(cluster.instance_url("prefill"))
        supervisor.check_alive()


async def test_a_prefill_that_is_preempted_with_parts_pushed_is_pushed_again(
    model: Path, single_url: str, tmp_path: Path
) -> None:
    """Long prompts in small chunks, in a pool of 16 blocks that other requests hold half of: vLLM takes the blocks away in the
    middle of a prompt, gives other ones, and the answers are right."""
    # Without the reservation a prompt is admitted as long as its first chunk fits: preempted for certain, not by chance.
    arguments = ("--num-gpu-blocks-override", "17", "--max-num-batched-tokens", "64", "--no-scheduler-reserve-full-isl")
    pair = plan(
        Connector.KVPUSH,
        dataclasses.replace(options(model), max_model_len=512),
        cores=available_cores(),
        pick_port=PortPicker(),
    )
    prefill = pair.instances["prefill"]
    instances = {**pair.instances, "prefill": dataclasses.replace(prefill, argv=(*prefill.argv, *arguments))}
    with Supervisor(tmp_path / "logs") as supervisor:
        (servers,) = await asyncio.to_thread(start, supervisor, dataclasses.replace(pair, instances=instances))
        cluster = Cluster(supervisor, pair, servers)
        prompts = [prompt(420 - 20 * i, seed=800 + i) for i in range(4)]
        expected = [await answer(single_url, tokens) for tokens in prompts]
        url = cluster.instance_url("prefill")
        before = await metrics(url)
        # Ten blocks, for as long as 150 steps take.
        holders = [asyncio.create_task(complete(url, prompt(96, seed=810 + i), output_tokens=60)) for i in range(2)]
        await asyncio.sleep(0.1)
        assert list(await asyncio.gather(*(answer(cluster.url, tokens) for tokens in prompts))) == expected
        assert [status for status, _ in await asyncio.gather(*holders)] == [200, 200]
        found = await settled(url)
        assert found.get("kvpush_restarted_sources_total", 0) > before.get("kvpush_restarted_sources_total", 0)
        assert found["kvpush_sent_requests_total"] == len(prompts)
        received = await settled(cluster.instance_url("decode"))
        assert received["kvpush_received_requests_total"] == len(prompts)
        assert received.get("kvpush_failed_receives_total", 0) == 0
        supervisor.check_alive()
