# SPDX-License-Identifier: Apache-2.0
"""Scheduling on a simulated link: what is exposed, who waits for whom, and what `auto` is worth. Simulated time only."""

from __future__ import annotations

import pytest
from link_run import Case, LinkRun

from kvpush.core.scheduling import AGING_S, Granularity, LinkEstimate, SchedulingPolicy

MIB = 1 << 20
CASES = {
    "nic-25g": Case(rate=3e9, overhead_s=50e-6),
    "nic-400g-32-layers": Case(layers=32, block_bytes=64 << 10, rate=40e9, overhead_s=50e-6, layer_s=2e-3),
    "loopback": Case(layers=8, block_bytes=64 << 10, rate=4e9, overhead_s=150e-6, layer_s=40e-3),
    "slow-as-prefill": Case(layers=8, block_bytes=64 << 10, rate=44e6, overhead_s=300e-6, layer_s=48e-3),
    "10-times-slower": Case(layers=8, block_bytes=64 << 10, rate=4e6, overhead_s=300e-6, layer_s=48e-3),
    "1g-small-model": Case(layers=24, block_bytes=8 << 10, rate=110e6, overhead_s=100e-6, layer_s=1e-3),
    "10g-many-layers": Case(layers=80, block_bytes=16 << 10, rate=1.1e9, overhead_s=100e-6, layer_s=1.5e-3),
    "costly-posts": Case(layers=16, block_bytes=16 << 10, rate=1e9, overhead_s=2e-3, layer_s=3e-3),
}


def total_s(case: Case, granularity: Granularity, tokens: int) -> tuple[float, int]:
    """Seconds from arrival to commit on a connection that has been used before, and the number of writes."""
    run = LinkRun(case, SchedulingPolicy(granularity=granularity))
    for idx in range(4):
        run.arrive(f"warm-{idx}", 2048)
        run.run()
    arrived_at = run.now
    request = run.arrive("r", tokens)
    run.run()
    return request.committed_at - arrived_at, request.num_writes


@pytest.mark.parametrize("tokens", [500, 2000, 8000])
@pytest.mark.parametrize("name", CASES)
def test_auto_is_never_5_percent_slower_than_the_best_fixed_choice(name: str, tokens: int) -> None:
    fixed = {choice: total_s(CASES[name], choice, tokens) for choice in ("layer", "chunk", "request")}
    took_s, _ = total_s(CASES[name], "auto", tokens)
    assert took_s <= 1.05 * min(seconds for seconds, _ in fixed.values()), fixed


def test_a_transfer_as_long_as_the_prefill_hides_behind_it() -> None:
    case = CASES["slow-as-prefill"]
    run = LinkRun(case, SchedulingPolicy())
    run.arrive("warm", 2048)
    run.run()
    request = run.arrive("r", 4096)
    run.run()
    assert 0 < request.exposed_s < 0.1 * case.transfer_s(4096)


@pytest.mark.parametrize("computed", [False, True])
def test_a_long_prompt_does_not_hold_up_a_short_one(computed: bool) -> None:
    case = Case(layers=32, rate=1e9, layer_s=1e-3)
    alone = LinkRun(case, SchedulingPolicy())
    alone.arrive("warm", 2048)
    alone.run()
    lone = alone.arrive("short", 500, computed=True)
    alone.run()
    run = LinkRun(case, SchedulingPolicy())
    run.arrive("warm", 2048)
    run.run()
    long = run.arrive("long", 30_000, computed=computed)
    run.run(0.05)
    short = run.arrive("short", 500, computed=True)
    run.run()
    # It waits for what is in flight already, at most a queue's worth, and a write.
    assert short.exposed_s <= lone.exposed_s + LinkEstimate.QUEUE_S + LinkEstimate.WRITE_S
    assert short.committed_at < long.committed_at < float("inf")


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    case = Case(layers=32, rate=1e9, layer_s=1e-3)
    run = LinkRun(case, SchedulingPolicy())
    run.arrive("warm", 2048)
    run.run()
    long = run.arrive("long", 8000, computed=True)
    started_at = run.now
    each_s = case.transfer_s(500)
    for idx in range(600):
        # More than the link can carry: there is always a shorter one that waits.
        run.at(started_at + idx * each_s * 0.9, lambda idx=idx: run.arrive(f"short-{idx}", 500, computed=True))  # type: ignore[misc]
    run.run()
    # Once in AGING_S it has its turn, whoever else waits.
    assert long.committed_at - started_at <= (long.num_writes + 2) * (AGING_S + 2 * LinkEstimate.QUEUE_S)
    assert all(request.committed_at < float("inf") for request in run.requests.values())


def test_the_awaited_tail_goes_before_what_is_still_computing() -> None:
    case = Case(layers=32, rate=1e9, layer_s=1e-3)
    run = LinkRun(case, SchedulingPolicy())
    run.arrive("warm", 2048)
    run.run()
    tail = run.arrive("tail", 4096, computed=True)
    early = run.arrive("early", 4096)
    run.run()
    assert tail.committed_at < early.committed_at
    assert tail.exposed_s <= case.transfer_s(4096) * 1.1 + LinkEstimate.QUEUE_S
