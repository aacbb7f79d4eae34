# SPDX-License-Identifier: Apache-2.0
"""The stateful test finds bugs: each of these, planted into the real machines, makes it fail.

Every one is the removal of one thing that safety rests on. For a table of how many examples it took to find each, and by
what, run ``python tests/property/test_planted.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from test_world import HostileWorld

from kvpush.core import consumer as consumer_module
from kvpush.core import wire
from kvpush.core.consumer import ConsumerMachine
from kvpush.core.lease import HeldLease
from kvpush.core.producer import ProducerMachine, StreamState
from kvpush.core.staged_writes import StagedWrites
from kvpush.core.staging import Shares
from kvpush.testing.simulation import InvariantBroken

MAX_EXAMPLES = 3000
SEEDS = (1, 2, 3)
"""Tried until one finds it: what a seed makes of it depends on what else has been imported."""
Plant = Callable[[pytest.MonkeyPatch], None]


def no_fence_wait(patch: pytest.MonkeyPatch) -> None:
    """The producer says that a stream is fenced while its writes are in flight."""
    inner: Any = ProducerMachine._on_cancel

    def on_cancel(self: Any, session: Any, message: wire.Cancel, now: float) -> None:
        inner(self, session, message, now)
        stream = session.streams.get(message.request_id)
        if stream is not None and stream.inflight:
            fenced = wire.Fenced(session.session_id, request_id=stream.request_id, epoch=stream.epoch)
            self._effects.append(consumer_module.Send(fenced))

    patch.setattr(ProducerMachine, "_on_cancel", on_cancel)


def no_wait_for_a_fence(patch: pytest.MonkeyPatch) -> None:
    """The consumer gives blocks back as soon as it has cancelled."""
    patch.setattr(ConsumerMachine, "_quiet", lambda self, receive, now: not receive.fence_running)


def no_epoch_check(patch: pytest.MonkeyPatch) -> None:
    """The consumer takes messages of an older epoch of the same request for those of the newest one."""
    inner: Any = ConsumerMachine._on_part_message

    def on_part_message(self: Any, session: Any, message: Any, now: float) -> None:
        receive = session.receives.get(message.request_id)
        if receive is not None:
            message = type(message)(
                **{name: getattr(message, name) for name in message.__struct_fields__} | {"epoch": receive.epoch}
            )
        inner(self, session, message, now)

    patch.setattr(ConsumerMachine, "_on_part_message", on_part_message)


def no_epoch_check_at_the_producer(patch: pytest.MonkeyPatch) -> None:
    """The producer takes a late registration of an epoch that is over for a new one."""
    patch.setattr(ProducerMachine, "_bury", lambda self, *args: None)


def no_lease(patch: pytest.MonkeyPatch) -> None:
    """The producer posts and leaves in flight whatever it likes, whether it has a lease or not."""
    patch.setattr(HeldLease, "ends_at", property(lambda self: float("inf")))


def no_guard(patch: pytest.MonkeyPatch) -> None:
    """The producer posts until the very end of its lease."""
    patch.setattr(HeldLease, "ends_at", property(lambda self: self.until))


def no_cut(patch: pytest.MonkeyPatch) -> None:
    """Connections are not closed when the lease ends under their writes."""
    patch.setattr(ProducerMachine, "cut_overdue", lambda self, now: [])
    patch.setattr(ProducerMachine, "next_deadline", lambda self: self._deadlines.next())


def no_retry_window(patch: pytest.MonkeyPatch) -> None:
    """The consumer waits for the lease only."""
    for machine in (ConsumerMachine, ProducerMachine):
        inner: Any = machine.__init__

        def init(self: Any, config: Any, *args: Any, inner: Any = inner) -> None:
            inner(self, replace(config, retry_window_s=0.0), *args)

        patch.setattr(machine, "__init__", init)


def restart_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """After a preemption, what is in flight is not waited for before it is written again."""

    def on_source_restarted(self: Any, stream: Any, now: float) -> None:
        self._postable.discard(stream)
        stream.coverage.clear()
        stream.state = StreamState.STREAMING
        self._restart(stream, now)

    patch.setattr(ProducerMachine, "_on_source_restarted", on_source_restarted)


def a_failure_is_a_fence(patch: pytest.MonkeyPatch) -> None:
    """A write that has failed and may still land is taken for one that is over."""
    inner: Any = ProducerMachine._write_ended

    def write_ended(self: Any, *args: Any, may_land: bool = False) -> None:
        inner(self, *args)

    patch.setattr(ProducerMachine, "_write_ended", write_ended)


def a_failed_post_stops_nothing(patch: pytest.MonkeyPatch) -> None:
    """The rest of a batch is posted after a post of it has failed."""
    patch.setattr(ProducerMachine, "may_post", lambda self, write_id: True)


def a_fence_that_runs_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given back while the device still makes them visible."""
    inner: Any = ConsumerMachine._on_given_up

    def on_given_up(self: Any, receive: Any, *args: Any, **more: Any) -> None:
        receive.fence_running = False
        inner(self, receive, *args, **more)

    patch.setattr(ConsumerMachine, "_on_given_up", on_given_up)


def commit_before_the_last_write(patch: pytest.MonkeyPatch) -> None:
    """A stream is committed when everything has been posted."""
    inner: Any = ProducerMachine._on_write_ended

    def on_write_ended(self: Any, stream: Any, now: float, write_id: Any, error: Any) -> None:
        inner(self, stream, now, write_id, error)
        if stream.state is StreamState.DRAINING and stream.inflight:
            plan = stream.session.plan
            whole = plan.coverage(0, plan.num_layers, stream.token_lo, stream.num_tokens)
            commit = wire.Commit(
                stream.session.session_id, request_id=stream.request_id, epoch=stream.epoch, coverage=tuple(whole)
            )
            self._effects.append(consumer_module.Send(commit))

    patch.setattr(ProducerMachine, "_on_write_ended", on_write_ended)


def a_copy_that_runs_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given back while a slot is copied into them."""
    inner: Any = ConsumerMachine._quiet

    def quiet(self: Any, receive: Any, now: float) -> bool:
        unpacking, receive.unpacking = receive.unpacking, 0
        try:
            return bool(inner(self, receive, now))
        finally:
            receive.unpacking = unpacking

    patch.setattr(ConsumerMachine, "_quiet", quiet)


def a_slot_is_used_before_it_is_unpacked(patch: pytest.MonkeyPatch) -> None:
    """The producer takes what has landed in a slot for unpacked."""
    inner: Any = StagedWrites.completed

    def completed(self: Any, *args: Any, now: float, **more: Any) -> bool:
        ours = bool(inner(self, *args, now=now, **more))
        for peer in self._peers.values():
            for message in [piece.message for piece in peer.awaiting.values()]:
                self.unpacked(wire.Unpacked(message.session, tag=message.tag), now)
        return ours

    patch.setattr(StagedWrites, "completed", completed)


def a_share_is_given_away_at_once(patch: pytest.MonkeyPatch) -> None:
    """The slots of a session that is gone are offered to the next one, whatever may still land in them."""
    inner: Any = Shares.give
    patch.setattr(Shares, "give", lambda self, index, safe_at: inner(self, index, float("-inf")))


PLANTS: tuple[Plant, ...] = (
    no_fence_wait,
    no_wait_for_a_fence,
    no_epoch_check,
    no_epoch_check_at_the_producer,
    no_lease,
    no_guard,
    no_cut,
    no_retry_window,
    restart_without_waiting,
    a_failure_is_a_fence,
    a_failed_post_stops_nothing,
    a_fence_that_runs_is_forgotten,
    commit_before_the_last_write,
    a_copy_that_runs_is_forgotten,
    a_slot_is_used_before_it_is_unpacked,
    a_share_is_given_away_at_once,
)


def search(number: int, max_examples: int = MAX_EXAMPLES) -> tuple[int, str]:
    """Run the stateful test until it fails. Returns the examples that it took, and what it said; "" when it found nothing."""
    begun = 0

    class Counted(HostileWorld):
        def __init__(self) -> None:
            nonlocal begun
            super().__init__()
            begun += 1

    profile = settings(
        max_examples=max_examples,
        stateful_step_count=50,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    try:
        run_state_machine_as_test(seed(number)(Counted), settings=profile)  # type: ignore[no-untyped-call]
    except InvariantBroken as error:
        return begun, str(error).splitlines()[0]
    return begun, ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(search(number)[1] for number in SEEDS)


def main(seeds: list[int]) -> None:
    """Print how many examples each took, for each seed."""
    for plant in PLANTS:
        for number in seeds:
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                started_at = time.monotonic()
                begun, said = search(number)
                took_s = time.monotonic() - started_at
                print(f"{plant.__name__:34} seed {number} {begun:5} examples {took_s:5.1f} s  {said[:90]}", flush=True)


if __name__ == "__main__":
    main([int(arg) for arg in sys.argv[1:]] or [1, 2, 3])
