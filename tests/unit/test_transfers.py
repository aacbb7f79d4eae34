# SPDX-License-Identifier: Apache-2.0
"""Whole transfers: both machines back to back in a toy world, which checks contents, ownership and reports by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpush.core.events import ReceiveStatus
from kvpush.testing.simulation import DIRECTIONS, World, WorldConfig

RECEIVED, FAILED, CANCELLED = ReceiveStatus.RECEIVED, ReceiveStatus.FAILED, ReceiveStatus.CANCELLED
"""Prompts 0 to 3 of a world have 3, 8, 13 and 17 tokens, in blocks of 4."""


def world(**fields: Any) -> World:
    return World(WorldConfig(**fields))


def begun(prompt: int = 3, *, tokens: int = 8, **fields: Any) -> World:
    """A transfer of which some is computed and pushed, and nothing is in flight yet delivered."""
    made = world(**fields)
    made.request(0, "r", key="t", prompt=prompt)
    made.announce(0, "s", key="t", prompt=prompt)
    made.settle()
    made.compute(0, "s", tokens=tokens)
    return made


def status(made: World, request_id: str = "r") -> ReceiveStatus | None:
    return dict(made.statuses).get(request_id)  # type: ignore[call-overload]


@pytest.mark.parametrize("request_first", [True, False])
@pytest.mark.parametrize("prompt", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("granularity", ["layer", "chunk", "request", "auto"])
@pytest.mark.parametrize("fence", [True, False])
def test_either_side_first(request_first: bool, prompt: int, ranks: int, granularity: str, fence: bool) -> None:
    made = world(num_ranks=ranks, num_layers=4, granularity=granularity, needs_visibility_fence=fence)
    if request_first:
        made.request(0, "r", key="t", prompt=prompt)
        made.settle()
    made.announce(0, "s", key="t", prompt=prompt)
    made.compute(0, "s")
    made.finish(0, "s")
    made.settle()
    if not request_first:
        made.request(0, "r", key="t", prompt=prompt)
        made.settle()
    assert status(made) is RECEIVED
    assert made.releases == [("s", 1)]
    made.drain()


@pytest.mark.parametrize("token_lo", [0, 4, 8, 16])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7])
@pytest.mark.parametrize("limit", [32, 100, 8 << 20])
def test_chunks_layers_and_prefix_hits(token_lo: int, layers: int, tokens: int, limit: int) -> None:
    made = world(num_layers=3, max_write_bytes=limit)
    made.announce(0, "s", key="t", prompt=3)
    made.request(0, "r", key="t", prompt=3, token_lo=token_lo)
    while made.compute(0, "s", tokens=tokens, layers=layers):
        made.settle()
    made.finish(0, "s")
    made.settle()
    assert status(made) is RECEIVED
    made.drain()


@pytest.mark.parametrize(("here", "there"), [(8, 4), (4, 8), (6, 4), (4, 6), (3, 5)])
@pytest.mark.parametrize("token_lo", [0, 4, 12])
@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("limit", [8, 100, 8 << 20])
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_different_sizes(here: int, there: int, token_lo: int, tokens: int, limit: int, ranks: int) -> None:
    """Prefix hits end where the consumer's blocks do, chunks anywhere; the toy memory tells apart what fits in both."""
    made = world(
        num_layers=3, num_ranks=ranks, block_tokens=here, consumer_block_tokens=there, max_write_bytes=limit, num_blocks=24
    )
    made.announce(0, "s", key="t", prompt=3)
    made.request(0, "r", key="t", prompt=3, token_lo=token_lo)
    while made.compute(0, "s", tokens=tokens, layers=1):
        made.settle()
    made.finish(0, "s")
    made.settle()
    assert status(made) is RECEIVED
    machine = made.prefills[0].ranks[0].machine
    unit = made.config.cell_tokens
    lo = token_lo // there * there
    layers = len(machine.layout.layers)
    assert machine.counters.bytes_written == (-(-17 // unit) - lo // unit) * unit * 8 * 2 * layers
    made.drain()


def test_blocks_of_different_sizes_are_not_verified() -> None:
    made = world(consumer_block_tokens=8, verify="all")
    made.request(0, "r", key="t", prompt=3)
    made.settle()
    assert status(made) is FAILED
    assert made.prefills[0].ranks[0].machine.counters.refused_hellos == 1


def test_most_of_a_prompt_is_there_before_it_is_computed() -> None:
    made = begun(tokens=16)
    made.settle()
    assert made.prefills[0].ranks[0].machine.counters.bytes_written == 4 * 2 * 2 * 32
    assert status(made) is None


def test_two_consumers_of_one_source() -> None:
    made = world(num_consumers=2)
    made.announce(0, "s", key="t", prompt=2)
    for consumer in (0, 1):
        made.request(consumer, f"r{consumer}", key="t", prompt=2)
    made.request(0, "again", key="t", prompt=2, token_lo=8)
    made.settle()
    made.compute(0, "s")
    made.finish(0, "s")
    made.settle()
    assert sorted(made.statuses) == [("again", RECEIVED), ("r0", RECEIVED), ("r1", RECEIVED)]
    assert made.releases == [("s", 3)]
    made.drain()


@pytest.mark.parametrize("request_first", [True, False])
def test_another_prompt_under_the_same_key_is_refused(request_first: bool) -> None:
    made = world()
    for step in ("request", "announce") if request_first else ("announce", "request"):
        if step == "request":
            made.request(0, "r", key="t", prompt=2)
        else:
            made.announce(0, "s", key="t", prompt=3)
        made.settle()
    assert status(made) is FAILED
    assert made.clock() == 1000.0, "at once"
    made.drain()


def test_a_transfer_that_nobody_announces() -> None:
    made = world()
    made.request(0, "r", key="t", prompt=1)
    assert made.run(made.config.announce_timeout_s + 0.1, until=lambda: status(made) is FAILED)
    made.drain()


def test_a_source_that_nobody_comes_for() -> None:
    made = world()
    made.announce(0, "s", key="t", prompt=1)
    made.compute(0, "s")
    made.finish(0, "s")
    assert not made.run(made.config.source_timeout_s - 0.1, until=lambda: bool(made.releases))
    assert made.run(0.2, until=lambda: bool(made.releases))
    assert made.releases == [("s", 0)]
    made.drain()


def test_nobody_listens() -> None:
    made = world(num_producers=1)
    made.request(0, "r", key="t", prompt=1, producer=7)
    assert made.run(made.config.handshake_timeout_s + 0.1, until=lambda: status(made) is FAILED)
    assert made.decodes[0].pool.all_free
    made.drain()


def states(state: str) -> World:
    made = world(needs_visibility_fence=state == "verifying")
    if state == "hello sent":
        made.request(0, "r", key="t", prompt=2)
        made.announce(0, "s", key="t", prompt=2)
        return made
    made.request(0, "r", key="t", prompt=2)
    made.settle()
    if state == "registered":
        return made
    made.announce(0, "s", key="t", prompt=2)
    made.settle()
    if state == "joined":
        return made
    made.compute(0, "s", tokens=None if state in ("draining", "verifying") else 4)
    for link in made.links:
        while made.deliver(link, "to_consumer"):
            pass
    if state == "verifying":
        for write in made.writes:
            made.end_write(write)
        for link in made.links:
            while made.deliver(link, "to_consumer"):
                pass
    return made


STATES = ["hello sent", "registered", "joined", "streaming", "draining", "verifying"]


@pytest.mark.parametrize("state", STATES)
def test_the_consumer_aborts(state: str) -> None:
    made = states(state)
    made.abort_receive(0, "r")
    made.settle()
    assert status(made) is CANCELLED
    assert made.decodes[0].pool.all_free
    made.drain()


@pytest.mark.parametrize("state", STATES)
def test_the_producer_aborts(state: str) -> None:
    made = states(state)
    made.abort_source(0, "s")
    made.run(made.config.announce_timeout_s + 1)
    assert status(made) is (RECEIVED if state == "verifying" else FAILED)
    assert made.decodes[0].pool.all_free
    made.drain()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "heard_by", [(), DIRECTIONS[:1], DIRECTIONS[1:], DIRECTIONS], ids=["none", "producer", "consumer", "both"]
)
def test_the_link_breaks(state: str, heard_by: Any) -> None:
    made = states(state)
    made.break_link(made.links[0], heard_by)
    made.run(20.0)
    assert status(made) is (RECEIVED if state == "verifying" else FAILED)
    assert made.decodes[0].pool.all_free
    made.drain()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("links", ["closed", "silent", "reconnected"])
def test_the_producer_is_killed(state: str, links: Any) -> None:
    made = states(state)
    made.restart_producer(0, links)
    told = made.run(made.config.handshake_timeout_s + 0.1, until=lambda: status(made) is not None)
    assert told, "a dead producer never makes a request wait for the quarantine"
    assert status(made) is (RECEIVED if state == "verifying" else FAILED)
    for write in made.zombies:
        assert made.land(write), "its network card lives on"
    made.run(made.config.lease_s + made.config.retry_window_s + 0.1)
    assert made.decodes[0].pool.all_free
    # And the restarted one works; that an idle link has died silently is known by now.
    made.request(0, "next", key="u", prompt=1)
    made.announce(0, "next source", key="u", prompt=1)
    made.compute(0, "next source")
    made.finish(0, "next source")
    made.run(1.0)
    assert status(made, "next") is RECEIVED
    made.drain()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("links", ["closed", "silent"])
def test_the_consumer_is_killed(state: str, links: Any) -> None:
    made = states(state)
    made.restart_consumer(0, links)
    made.run(made.config.peer_timeout_s + 1)
    assert made.prefills[0].ranks[0].machine.num_streams == 0
    made.request(0, "r", key="u", prompt=1)
    made.announce(0, "next source", key="u", prompt=1)
    made.compute(0, "next source")
    made.finish(0, "next source")
    made.run(1.0)
    assert status(made) is RECEIVED
    made.drain()


def test_a_failed_write_fails_the_transfer_on_both_sides() -> None:
    made = begun()
    made.end_write(made.writes[0], ok=False, partly=1)
    made.settle()
    assert status(made) is FAILED
    assert made.clock() == 1000.0
    made.finish(0, "s", early=True)
    assert made.releases == [("s", 0)]
    made.drain()


def test_a_failure_is_told_at_once_and_the_blocks_wait_for_the_other_writes() -> None:
    made = begun(max_write_bytes=32)
    made.end_write(made.writes[0], ok=False)
    for link in made.links:
        while made.deliver(link, "to_consumer"):
            pass
    assert status(made) is FAILED
    assert not made.decodes[0].pool.all_free, "others are in flight"
    made.settle()
    assert made.decodes[0].pool.all_free
    made.drain()


def test_a_stuck_write_pins_the_source_and_fails_the_transfer() -> None:
    made = begun(prompt=1)
    made.finish(0, "s", early=True)
    made.advance(0.1)
    for _ in range(60):
        made.advance(0.5)
        for link in made.links:
            for direction in DIRECTIONS:
                while made.deliver(link, direction):
                    pass
    assert not made.releases, "the write may still read the blocks"
    assert status(made) is FAILED
    made.drain()


@pytest.mark.parametrize("prompt", [2, 3])
@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("limit", [32, 8 << 20])
def test_preemption_with_parts_pushed_and_in_flight(prompt: int, landed: bool, limit: int) -> None:
    made = begun(prompt, tokens=4, max_write_bytes=limit)
    made.settle()
    made.compute(0, "s", tokens=4)
    if landed:
        for write in made.writes:
            made.land(write)
    made.preempt(0, "s")
    # Somebody else gets the blocks.
    made.announce(0, "other", key="u", prompt=3)
    made.compute(0, "other")
    made.settle()
    made.abort_source(0, "other")
    made.compute(0, "s")
    made.finish(0, "s")
    made.settle()
    assert status(made) is RECEIVED
    made.drain()


def test_preempted_for_good() -> None:
    made = begun()
    made.preempt(0, "s")
    made.abort_source(0, "s")
    made.settle()
    assert status(made) is FAILED
    made.drain()


def test_preempted_while_everything_is_posted() -> None:
    made = begun(prompt=1, tokens=8)
    made.preempt(0, "s")
    made.settle()
    assert status(made) is None
    made.compute(0, "s")
    made.settle()
    assert status(made) is RECEIVED
    made.finish(0, "s")
    made.drain()


def test_nothing_is_posted_without_a_lease_and_a_heartbeat_renews_it() -> None:
    made = begun(tokens=4)
    made.settle()
    link = made.links[0]
    link.partitioned = True
    rank = made.prefills[0].ranks[0]
    made.freeze(rank)
    made.clock.advance(made.config.lease_s - made.config.lease_guard_s)
    rank.frozen = False
    made.compute(0, "s", tokens=4)
    assert not made.writes, "the lease is over: nothing is posted, not even before the deadlines are looked at"
    assert rank.machine.counters.lease_stalls == 1
    made.end_faults()
    made.compute(0, "s")
    made.finish(0, "s")
    made.run(1.0)
    made.drain()


def test_a_stalled_stream_goes_on_when_a_heartbeat_is_answered() -> None:
    made = begun(tokens=4, peer_timeout_s=100.0)
    made.settle()
    made.links[0].partitioned = True
    made.run(made.config.lease_s)
    made.compute(0, "s")
    made.finish(0, "s")
    assert not made.writes
    made.end_faults()
    made.settle()
    assert status(made) is RECEIVED
    made.drain()


def test_a_frozen_consumer_is_given_up_and_blocks_stay_safe() -> None:
    made = begun()
    made.freeze(made.decodes[0])
    made.run(made.config.peer_timeout_s + 1)
    assert made.prefills[0].ranks[0].machine.num_streams == 0
    made.thaw(made.decodes[0])
    made.run(10.0)
    assert status(made) is FAILED
    made.drain()


def test_quarantine_then_blocks_safe() -> None:
    made = begun()
    for link in made.links:
        while made.deliver(link, "to_consumer"):
            pass
    made.freeze(made.prefills[0].ranks[0])
    told = made.run(made.config.peer_timeout_s + 0.1, until=lambda: status(made) is FAILED)
    assert told
    assert not made.decodes[0].pool.all_free, "reported, but the blocks are kept"
    made.thaw(made.prefills[0].ranks[0])
    made.run(made.config.lease_s + made.config.retry_window_s + 0.1)
    assert made.decodes[0].pool.all_free
    made.drain()


def test_a_cancel_waits_for_the_fence() -> None:
    made = begun()
    for link in made.links:
        while made.deliver(link, "to_consumer"):
            pass
    made.abort_receive(0, "r")
    link = made.links[0]
    for _ in range(3):
        for direction in DIRECTIONS:
            while made.deliver(link, direction):
                pass
    made.advance(0.6)
    assert status(made) is None
    made.settle()
    assert status(made) is CANCELLED
    made.drain()


def test_a_peer_that_never_fences_is_given_up() -> None:
    made = begun(write_timeout_s=100.0)
    for link in made.links:
        while made.deliver(link, "to_consumer"):
            pass
    made.abort_receive(0, "r")
    # Messages flow, the write is stuck.
    limit = made.config.fence_give_up_s + made.config.lease_s + made.config.retry_window_s + 2
    for _ in range(int(limit / 0.25)):
        made.advance(0.25)
        for link in made.links:
            for direction in DIRECTIONS:
                while made.deliver(link, direction):
                    pass
    assert status(made) is CANCELLED
    made.drain()


@pytest.mark.parametrize("when", ["waiting", "streaming", "committed"])
def test_repeated_registrations_change_nothing(when: str) -> None:
    made = world()
    made.request(0, "r", key="t", prompt=1)
    made.settle()
    if when != "waiting":
        made.announce(0, "s", key="t", prompt=1)
        made.compute(0, "s", tokens=4)
    if when == "committed":
        made.compute(0, "s")
        made.finish(0, "s")
        made.settle()
        # The same blocks are somebody else's by now.
        made.request(0, "other", key="u", prompt=1)
        made.settle()
    for _ in range(3):
        for link in made.links:
            link.replay("to_producer")
        made.settle()
    assert made.prefills[0].ranks[0].machine.num_streams == 1
    made.drain()
    assert made.statuses.count(("r", RECEIVED)) == (0 if when == "waiting" else 1)


def test_an_epoch_that_is_over_has_no_effect_on_the_next_one() -> None:
    made = world()
    made.request(0, "r", key="t", prompt=1)
    made.announce(0, "s", key="t", prompt=1)
    made.compute(0, "s")
    made.finish(0, "s")
    made.settle()
    made.request(0, "r", key="u", prompt=2)
    for link in made.links:
        link.replay("to_consumer")
        link.replay("to_producer")
    made.settle()
    assert made.statuses == [("r", RECEIVED)]
    made.drain()


@pytest.mark.parametrize("inflight", [1, 64, 200, 1 << 30])
def test_credit_limits_what_is_in_flight_and_everything_gets_through(inflight: int) -> None:
    made = world(max_inflight_bytes=inflight, max_write_bytes=64, num_consumers=2)
    for idx in range(2):
        made.request(idx, f"r{idx}", key=f"t{idx}", prompt=3)
        made.announce(0, f"s{idx}", key=f"t{idx}", prompt=3)
        made.settle()
    for idx in range(2):
        made.compute(0, f"s{idx}")
        made.finish(0, f"s{idx}")
        total = sum(write.effect.num_bytes for write in made.writes)
        assert total <= max(inflight, 64)
    made.settle()
    assert sorted(made.statuses) == [("r0", RECEIVED), ("r1", RECEIVED)]
    made.drain()


def test_a_declined_source_is_released_when_it_ends() -> None:
    made = world()
    made.announce(0, "s", key="t", prompt=1)
    made.decline(0, key="t", prompt=1)
    made.settle()
    made.compute(0, "s")
    made.finish(0, "s")
    assert made.releases == [("s", 0)]
    made.drain()


def test_a_decline_of_another_prompt_is_ignored() -> None:
    made = world()
    made.announce(0, "s", key="t", prompt=1)
    made.decline(0, key="t", prompt=2)
    made.request(0, "r", key="t", prompt=1)
    made.settle()
    made.compute(0, "s")
    made.finish(0, "s")
    made.settle()
    assert status(made) is RECEIVED
    made.drain()


@pytest.mark.parametrize("outermost", [False, True])
def test_caches_that_lie_differently(outermost: bool) -> None:
    made = begun(prompt=3, tokens=17, blocks_outermost=outermost, num_layers=3)
    made.finish(0, "s")
    made.settle()
    assert status(made) is RECEIVED
    made.drain()


def test_the_world_notices_what_it_is_for() -> None:
    made = begun()
    with pytest.raises(AssertionError, match="I1"):
        made._free(made.decodes[0], next(iter(made.decodes[0].receives.values())))
    write = made.writes[0]
    del made.decodes[0].memory.owner[min(write.dst_blocks)]
    with pytest.raises(AssertionError, match="I1"):
        made.land(write)


def test_the_bound_is_a_bound() -> None:
    assert WorldConfig().bound_s > sum(
        getattr(WorldConfig(), field.name) for field in dataclasses.fields(WorldConfig) if field.name.endswith("timeout_s")
    )


def test_after_a_preemption_nothing_is_posted_before_the_old_writes_have_ended() -> None:
    made = begun(prompt=1, tokens=4)
    (old,) = made.writes
    made.preempt(0, "s")
    made.compute(0, "s")
    made.finish(0, "s")
    assert made.writes == [old], "it would land on top of what is written again"
    for write in made.writes[::-1]:
        made.end_write(write)
    made.settle()
    assert status(made) is RECEIVED
    made.drain()
