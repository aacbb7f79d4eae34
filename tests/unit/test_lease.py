# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import random

import pytest

from kvpush.core.lease import Deadlines, GrantedLease, HeldLease


@pytest.mark.parametrize("order", list(itertools.permutations([3.0, 1.0, 2.0, 1.0])))
def test_expiry_does_not_depend_on_insertion_order(order: tuple[float, ...]) -> None:
    deadlines: Deadlines[tuple[float, int]] = Deadlines()
    for number, when in enumerate(order):
        deadlines.set((when, number), when)
    assert deadlines.next() == 1.0
    assert [key[0] for key in deadlines.due(2.0)] == [1.0, 1.0, 2.0]
    assert len(deadlines) == 4, "due ones stay until they are taken"


def test_moving_and_forgetting_a_deadline() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 5.0)
    deadlines.set("a", 1.0)
    deadlines.set("a", 9.0)
    deadlines.set("b", 2.0)
    deadlines.discard("b")
    deadlines.discard("never there")
    assert deadlines.due(8.0) == []
    assert deadlines.get("a") == 9.0
    assert "b" not in deadlines
    assert deadlines.due(9.0) == ["a"]


def test_a_deadline_that_has_been_moved_since_is_not_taken() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("b", 1.0)
    assert deadlines.due(1.0) == ["a", "b"]
    assert deadlines.take("a", 1.0)
    deadlines.set("b", 3.0)
    assert not deadlines.take("a", 1.0)
    assert not deadlines.take("b", 1.0)
    assert deadlines.next() == 3.0


def test_deadlines_against_a_dictionary() -> None:
    chance = random.Random(4)
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    now = 0.0
    for _ in range(5000):
        key = chance.randrange(40)
        action = chance.random()
        if action < 0.6:
            model[key] = now + chance.randrange(10)
            deadlines.set(key, model[key])
        elif action < 0.8:
            model.pop(key, None)
            deadlines.discard(key)
        else:
            now += chance.randrange(4)
            due = deadlines.due(now)
            assert sorted(due) == sorted(k for k, when in model.items() if when <= now)
            assert [model[k] for k in due] == sorted(model[k] for k in due)
            for k in due:
                assert deadlines.take(k, now)
                del model[k]
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)
    assert len(deadlines._heap) <= 64 + 4 * 40


def test_lease_counts_from_the_sending_of_the_answered_heartbeat() -> None:
    lease = HeldLease(lease_s=10.0, guard_s=1.0)
    assert not lease.valid(0.0)
    assert lease.heartbeat(100.0) == 1
    assert lease.heartbeat(105.0) == 2
    # The answer to the first comes late: only what was granted counts.
    assert lease.answered(1)
    assert lease.valid(108.9)
    assert not lease.valid(109.0)
    assert lease.answered(2)
    assert lease.valid(113.9)
    assert not lease.valid(114.0)


def test_repeated_and_late_answers_never_prolong() -> None:
    lease = HeldLease(lease_s=10.0, guard_s=0.0)
    for now in (1.0, 2.0, 3.0):
        lease.heartbeat(now)
    assert lease.answered(3)
    assert lease.answered(3)
    assert lease.answered(1)
    assert lease.until == 13.0


@pytest.mark.parametrize("seq", [0, 4, 2**53])
def test_answers_to_what_was_never_sent_give_nothing(seq: int) -> None:
    lease = HeldLease(lease_s=10.0, guard_s=0.0)
    lease.heartbeat(1.0)
    assert not lease.answered(seq)
    assert not lease.valid(1.0)


def test_unanswered_heartbeats_are_bounded_and_the_oldest_is_known() -> None:
    lease = HeldLease(lease_s=10.0, guard_s=0.0)
    for number in range(1000):
        lease.heartbeat(float(number))
    assert len(lease._sent) == 256
    assert lease.oldest_unanswered(0) == 744.0
    assert lease.answered(900)
    assert lease.oldest_unanswered(900) == 900.0
    assert lease.oldest_unanswered(1000) is None


def test_both_halves_agree_whatever_the_delays() -> None:
    """The producer's belief always ends before the consumer's, on whichever clocks."""
    chance = random.Random(1)
    held, granted = HeldLease(4.0, 0.5), GrantedLease(4.0)
    now = 0.0
    for _ in range(500):
        now += chance.random()
        seq = held.heartbeat(now)
        if chance.random() < 0.3:
            continue
        now += chance.random() * 6
        granted.grant(now)
        now += chance.random() * 6
        if chance.random() < 0.8:
            held.answered(chance.choice([seq, max(1, seq - 1)]))
        assert held.until <= granted.until
