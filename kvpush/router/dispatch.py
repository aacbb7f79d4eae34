# SPDX-License-Identifier: Apache-2.0
"""From a request to an open decode answer: picks instances, runs both legs, retries, falls back."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import TypeVar

from kvpush.router.call import Call, decode_params
from kvpush.router.config import Mode, OnPrefillFailure, RouterConfig
from kvpush.router.errors import RequestFailed
from kvpush.router.legs import DecodeAnswer, LegFailure, Legs, PrefillDone
from kvpush.router.metrics import RouterMetrics
from kvpush.router.pool import Lease, Pool
from kvpush.router.tasks import TaskSet

T = TypeVar("T")


class Attempt:
    """One try: its claims, its tasks and, in the end, its answer. ``close`` ends whatever is left of it."""

    def __init__(self, tasks: TaskSet) -> None:
        self.transfer_id = uuid.uuid4().hex
        self.prefill_lease: Lease | None = None
        self.decode_lease: Lease | None = None
        self.prefill_task: asyncio.Task[PrefillDone | LegFailure] | None = None
        self.decode_task: asyncio.Task[DecodeAnswer | LegFailure] | None = None
        self._tasks = tasks

    def start_prefill(self, legs: Legs, call: Call, lease: Lease, *, keep: bool) -> asyncio.Task[PrefillDone | LegFailure]:
        """Start the prefill leg; its claim ends with it."""
        self.prefill_lease = lease
        self.prefill_task = self._tasks.spawn(
            legs.prefill(call, lease.instance, self.transfer_id, keep=keep), name="kvpush-router-prefill"
        )
        self.prefill_task.add_done_callback(lambda _: lease.release())
        return self.prefill_task

    def start_decode(
        self, legs: Legs, call: Call, lease: Lease, params: dict[str, object] | None
    ) -> asyncio.Task[DecodeAnswer | LegFailure]:
        """Start the decode leg; its claim ends with the attempt."""
        self.decode_lease = lease
        self.decode_task = self._tasks.spawn(
            legs.decode(call, lease.instance, self.transfer_id, params), name="kvpush-router-decode"
        )
        return self.decode_task

    def close(self, *, prefill_linger_s: float = 0.0) -> None:
        """End both legs: close what was answered, cancel what runs. Safe to call again.

        Args:
            prefill_linger_s: let a prefill leg that still runs go on for so long.
        """
        task = self.decode_task
        if task is not None:
            if not task.done():
                # Never returns an answer any more: see Legs.decode.
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                answer = task.result()
                if isinstance(answer, DecodeAnswer):
                    answer.close()
        if self.decode_lease is not None:
            self.decode_lease.release()
        if self.prefill_task is not None and not self.prefill_task.done():
            if prefill_linger_s > 0:
                timer = asyncio.get_running_loop().call_later(prefill_linger_s, self.prefill_task.cancel)
                self.prefill_task.add_done_callback(lambda _: timer.cancel())
            else:
                self.prefill_task.cancel()


@dataclass(slots=True)
class Exchange:
    """An open answer and the attempt it belongs to."""

    answer: DecodeAnswer
    attempt: Attempt
    tries: int


@dataclass(slots=True)
class _Progress:
    """What one request has tried so far."""

    use_prefill: bool
    tries: int = 0
    tried_prefill: set[int] = field(default_factory=set)
    tried_decode: set[int] = field(default_factory=set)


class Dispatcher:
    """Turns calls into exchanges."""

    def __init__(
        self,
        config: RouterConfig,
        legs: Legs,
        metrics: RouterMetrics,
        prefills: Pool,
        decodes: Pool,
        tasks: TaskSet,
    ) -> None:
        self._config = config
        self._legs = legs
        self._metrics = metrics
        self._prefills = prefills
        self._decodes = decodes
        self._tasks = tasks

    async def open(self, call: Call) -> Exchange:
        """Get the first byte of an answer, within the request's deadline.

        Returns:
            The open answer, whatever its status; the caller closes its attempt.

        Raises:
            RequestFailed: 502 when no instance brought an answer, 504 when none did in time.
        """
        progress = _Progress(use_prefill=len(self._prefills) > 0 and not call.steered)
        attempt = Attempt(self._tasks)
        try:
            async with asyncio.timeout_at(call.arrived_at + self._config.ttft_timeout_s):
                while True:
                    progress.tries += 1
                    result = await self._try(call, attempt, progress)
                    if isinstance(result, DecodeAnswer):
                        return Exchange(result, attempt, progress.tries)
                    attempt.close()
                    self._learn(result, attempt, progress)
                    attempt = Attempt(self._tasks)
        except TimeoutError:
            self._note_timeouts(call, attempt)
            attempt.close()
            raise RequestFailed(504, "no answer within the time allowed", kind="timeout_error", outcome="timeout") from None
        except BaseException:
            attempt.close()
            raise

    async def _try(self, call: Call, attempt: Attempt, progress: _Progress) -> DecodeAnswer | LegFailure:
        if progress.use_prefill:
            prefill = self._prefills.acquire(
                progress.tried_prefill, last_resort=self._config.on_prefill_failure is OnPrefillFailure.ERROR
            )
            if prefill is not None:
                if self._config.mode is Mode.SEQUENTIAL:
                    return await self._sequential(call, attempt, prefill, progress)
                return await self._concurrent(call, attempt, prefill, progress)
            progress.use_prefill = False
        if len(self._prefills) > 0 and not call.steered:
            self._metrics.fallbacks.inc()
        return await _settled(attempt.start_decode(self._legs, call, self._decode_lease(progress), None))

    async def _concurrent(self, call: Call, attempt: Attempt, prefill: Lease, progress: _Progress) -> DecodeAnswer | LegFailure:
        try:
            decode = self._decode_lease(progress)
        except RequestFailed:
            prefill.release()
            raise
        target = self._config.prefill[prefill.instance.index]
        prefill_task = attempt.start_prefill(self._legs, call, prefill, keep=False)
        params = decode_params(attempt.transfer_id, target)
        decode_task = attempt.start_decode(self._legs, call, decode, params)
        await asyncio.wait((prefill_task, decode_task), return_when=asyncio.FIRST_COMPLETED)
        if not decode_task.done():
            done = prefill_task.result()
            if isinstance(done, PrefillDone):
                await asyncio.wait((decode_task,))
            elif done.final:
                # Decode is expected to refuse the same request by itself, and its words are the client's answer.
                # If it took it, it now waits for KV that never comes.
                await asyncio.wait((decode_task,), timeout=self._config.client_error_grace_s)
                if not decode_task.done():
                    return done
            else:
                return done
        answer = decode_task.result()
        if isinstance(answer, DecodeAnswer) and answer.status >= 400:
            failed = prefill_task.result() if prefill_task.done() else None
            if answer.status >= 500 and isinstance(failed, LegFailure) and not failed.final:
                return failed
            prefill_task.cancel()
        return answer

    async def _sequential(self, call: Call, attempt: Attempt, prefill: Lease, progress: _Progress) -> DecodeAnswer | LegFailure:
        done = await _settled(attempt.start_prefill(self._legs, call, prefill, keep=True))
        if isinstance(done, LegFailure):
            if not done.final:
                return done
            # Decode would refuse the same request; its words are the client's answer.
            params = None
        else:
            params = done.params
        if params is None:
            self._metrics.fallbacks.inc()
        return await _settled(attempt.start_decode(self._legs, call, self._decode_lease(progress), params))

    def _decode_lease(self, progress: _Progress) -> Lease:
        lease = self._decodes.acquire(progress.tried_decode, last_resort=True)
        if lease is None:
            raise _no_decode()
        return lease

    def _learn(self, failure: LegFailure, attempt: Attempt, progress: _Progress) -> None:
        """Note what a failed try teaches the next one.

        Raises:
            RequestFailed: there is no next one.
        """
        policy = self._config.on_prefill_failure
        if failure.leg == "prefill":
            if attempt.prefill_lease is not None:
                progress.tried_prefill.add(attempt.prefill_lease.instance.index)
            if policy is OnPrefillFailure.ERROR:
                raise _prefill_failed()
            # The last try never depends on another prefill.
            if policy is OnPrefillFailure.DECODE_ONLY or failure.final or progress.tries + 1 >= self._config.max_tries:
                progress.use_prefill = False
            retry = "prefill_failed"
            exhausted = progress.tries >= self._config.max_tries
            error = _prefill_failed()
        else:
            if attempt.decode_lease is not None:
                progress.tried_decode.add(attempt.decode_lease.instance.index)
            retry = "decode_failed"
            exhausted = progress.tries >= self._config.max_tries or len(progress.tried_decode) >= len(self._decodes)
            error = _no_decode()
        if exhausted:
            raise error
        self._metrics.retries.labels(retry).inc()

    def _note_timeouts(self, call: Call, attempt: Attempt) -> None:
        for leg, lease, task in (
            ("prefill", attempt.prefill_lease, attempt.prefill_task),
            ("decode", attempt.decode_lease, attempt.decode_task),
        ):
            if lease is not None and task is not None and not task.done():
                self._legs.timed_out(call, lease.instance, attempt.transfer_id, leg)


async def _settled(task: asyncio.Task[T]) -> T:
    """Wait for a task without handing a cancellation of the waiter on to it."""
    await asyncio.wait((task,))
    return task.result()


def _no_decode() -> RequestFailed:
    return RequestFailed(502, "no decode instance could be reached", kind="server_error", outcome="no_decode")


def _prefill_failed() -> RequestFailed:
    return RequestFailed(502, "the prefill of the request failed", kind="server_error", outcome="prefill_failed")
