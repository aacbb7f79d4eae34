# SPDX-License-Identifier: Apache-2.0
"""What is learned of a link, and what follows for writes and queues."""

from __future__ import annotations

import pytest
from machines import Producer, ids, posted, sent

from kvpush.core import wire
from kvpush.core.events import WriteCompleted
from kvpush.core.scheduling import LinkEstimate, SchedulingPolicy

MIB = 1 << 20


def drive(link: LinkEstimate, *, rate: float, write: int, post_s: float, seconds: float = 2.0) -> None:
    """A link that is kept busy with two writes in flight."""
    now = 0.0
    link.posted(write, now)
    while now < seconds:
        link.posted(write, now)
        now += write / rate
        link.ended(write, now, ok=True, post_s=post_s)


def test_nothing_seen_means_the_configured_policy() -> None:
    base = SchedulingPolicy()
    assert LinkEstimate(base).policy is base


def test_a_slow_link_gets_small_writes_and_a_short_queue() -> None:
    link = LinkEstimate(SchedulingPolicy())
    drive(link, rate=125e6, write=MIB, post_s=200e-6)
    assert link.rate is not None
    assert 100e6 < link.rate < 140e6
    policy = link.policy
    assert policy.max_inflight_bytes_per_peer < 10 * MIB
    assert policy.max_write_bytes < 3 * MIB
    assert 128 << 10 <= policy.min_write_bytes < MIB


def test_a_fast_link_gets_large_writes() -> None:
    link = LinkEstimate(SchedulingPolicy())
    drive(link, rate=20e9, write=8 * MIB, post_s=500e-6)
    assert link.policy.max_write_bytes == SchedulingPolicy().max_write_bytes
    assert link.policy.min_write_bytes == LinkEstimate.LARGEST_MINIMUM
    assert link.policy.max_inflight_bytes_per_peer == SchedulingPolicy().max_inflight_bytes_per_peer


def test_a_fixed_granularity_is_left_alone() -> None:
    base = SchedulingPolicy(granularity="layer")
    link = LinkEstimate(base)
    drive(link, rate=125e6, write=MIB, post_s=200e-6)
    assert link.policy is base


def test_failed_writes_teach_nothing_of_the_rate() -> None:
    link = LinkEstimate(SchedulingPolicy())
    link.posted(MIB, 0.0)
    link.ended(MIB, 30.0, ok=False)
    assert link.rate is None


def test_the_producer_says_what_is_worth_waking_up_for() -> None:
    producer = Producer(policy=SchedulingPolicy(granularity="auto", min_write_bytes=1 * MIB))
    assert producer.machine.worthwhile_bytes == MIB
    assert Producer(policy=SchedulingPolicy(granularity="layer")).machine.worthwhile_bytes == 0
    producer.connect()
    producer.announce()
    producer.register()
    (write,) = posted(producer.progress(8, blocks=ids(1, 2)))
    producer.now += 0.001
    producer.do(WriteCompleted(write.write_id, 100e-6))
    assert producer.machine.worthwhile_bytes == LinkEstimate.SMALLEST


def test_a_slow_link_is_polled_rarely_a_fast_one_often() -> None:
    assert LinkEstimate(SchedulingPolicy()).poll_s == 0.0, "nothing is known yet"
    slow = LinkEstimate(SchedulingPolicy())
    drive(slow, rate=44e6, write=MIB, post_s=200e-6)
    assert slow.poll_s == LinkEstimate.LONGEST_POLL_S or slow.poll_s > 3e-3
    assert slow.target_poll_s > 3e-3
    fast = LinkEstimate(SchedulingPolicy())
    drive(fast, rate=20e9, write=8 * MIB, post_s=500e-6)
    assert fast.target_poll_s < 200e-6


@pytest.mark.parametrize("rate", [44e6, 120e6, 500e6, 2e9])
def test_no_more_lies_between_two_polls_than_the_buffers_of_the_way_hold(rate: float) -> None:
    """Where polls move the bytes, longer pauses would bound the rate, and the rate that is seen the pauses: at 0.5 GB/s both
    ends once slept for 4 ms."""
    link = LinkEstimate(SchedulingPolicy())
    drive(link, rate=rate, write=8 * MIB, post_s=200e-6)
    link.posted(64 * MIB, 100.0)
    assert 0 < link.poll_s * rate <= 1.01 * LinkEstimate.UNPOLLED_BYTES
    assert 0 < link.target_poll_s * rate <= 1.01 * LinkEstimate.UNPOLLED_BYTES


def test_the_last_small_write_is_asked_for_soon() -> None:
    link = LinkEstimate(SchedulingPolicy())
    drive(link, rate=44e6, write=MIB, post_s=200e-6)
    link.ended(MIB, 10.0, ok=True)
    assert link.idle
    link.posted(44_000, 11.0)
    assert link.poll_s < 0.5e-3
    assert link.target_poll_s > 3e-3


def test_the_producer_polls_for_the_fastest_of_its_busy_peers_and_tells_the_target() -> None:
    producer = Producer()
    producer.connect(1)
    producer.connect(2)
    assert producer.machine.poll_s == 0.0
    producer.announce()
    producer.register()
    (write,) = posted(producer.progress(4, blocks=ids(1)))
    assert producer.machine.poll_s == 0.0, "the rate is not known"
    producer.now += 0.5  # 192 bytes in half a second
    producer.complete([write])
    producer.wait(0.01)
    effects = producer.progress(8, blocks=ids(2))
    assert producer.machine.poll_s == LinkEstimate.LONGEST_POLL_S
    assert [message.poll_s for message in sent(effects, wire.Streaming)] == [LinkEstimate.LONGEST_POLL_S]
    producer.announce("s2", keys=("t2",))
    producer.register("r2", session=2, keys=("t2",))
    others = posted(producer.progress(4, source="s2", blocks=ids(3)))
    assert producer.machine.poll_s == 0.0, "one of two is unknown"
    producer.complete(others)
    assert producer.machine.poll_s == LinkEstimate.LONGEST_POLL_S
    producer.complete(posted(effects))
    assert producer.machine.poll_s == 0.0, "nothing is in flight"
