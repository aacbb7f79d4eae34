# SPDX-License-Identifier: Apache-2.0
"""Instances of one role: which one takes the next leg, and which are left out for now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

import aiohttp

from kvpush.router.metrics import RouterMetrics
from kvpush.router.tasks import TaskSet

logger = logging.getLogger(__name__)


class Instance:
    """One vLLM instance as the router sees it.

    Attributes:
        url: HTTP base URL.
        index: position among the instances of its role.
        in_flight: legs open to it.
        up: False from a failed connection until a probe or a leg reaches it again.
    """

    def __init__(self, url: str, index: int) -> None:
        self.url = url
        self.index = index
        self.in_flight = 0
        self.up = True


class Lease:
    """One leg's claim on an instance; counts as in flight until released."""

    def __init__(self, instance: Instance, on_release: Callable[[Instance], None]) -> None:
        self.instance = instance
        self._on_release: Callable[[Instance], None] | None = on_release

    def release(self) -> None:
        """Give the claim back; further calls do nothing."""
        callback, self._on_release = self._on_release, None
        if callback is not None:
            callback(self.instance)


class Pool:
    """Picks the instance with the fewest legs in flight, round robin among equals.

    An instance that refused a connection or failed a health probe is left out. A background task probes its ``/health`` after a
    pause that doubles, and takes it back when it answers.
    """

    def __init__(
        self,
        role: str,
        urls: Sequence[str],
        *,
        metrics: RouterMetrics,
        tasks: TaskSet,
        session: aiohttp.ClientSession,
        probe_timeout_s: float,
        backoff_s: float,
        backoff_max_s: float,
    ) -> None:
        self.role = role
        self.instances = [Instance(url, i) for i, url in enumerate(urls)]
        self._next_idx = 0
        self._metrics = metrics
        self._tasks = tasks
        self._session = session
        self._probe_timeout_s = probe_timeout_s
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._suspected: set[int] = set()
        self._recovering: dict[int, asyncio.Task[None]] = {}
        for instance in self.instances:
            self._report(instance)

    def __len__(self) -> int:
        return len(self.instances)

    def acquire(self, exclude: Collection[int] = (), *, last_resort: bool) -> Lease | None:
        """Claim an instance for one leg.

        Args:
            exclude: indices that this request has tried already.
            last_resort: with no instance up, take one that is down instead of none.

        Returns:
            The claim, or None when no instance is left.
        """
        usable = [i for i in self.instances if i.index not in exclude]
        candidates = [i for i in usable if i.up] or (usable if last_resort else [])
        if not candidates:
            return None
        num = len(self.instances)
        chosen = min(candidates, key=lambda i: (i.in_flight, (i.index - self._next_idx) % num))
        self._next_idx = (chosen.index + 1) % num
        chosen.in_flight += 1
        self._report(chosen)
        return Lease(chosen, self._release)

    def _release(self, instance: Instance) -> None:
        instance.in_flight -= 1
        self._report(instance)

    def mark_down(self, instance: Instance) -> None:
        """Leave an instance out until a probe reaches it."""
        if not instance.up or self._tasks.closed:
            return
        instance.up = False
        self._report(instance)
        logger.warning("instance down role=%s url=%s", self.role, instance.url)
        task = self._tasks.spawn(self._recover(instance), name=f"kvpush-router-probe-{self.role}-{instance.index}")
        self._recovering[instance.index] = task

    def mark_up(self, instance: Instance) -> None:
        """Take an instance back: it answered."""
        if instance.up:
            return
        instance.up = True
        self._report(instance)
        logger.info("instance up role=%s url=%s", self.role, instance.url)
        task = self._recovering.pop(instance.index, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def suspect(self, instance: Instance) -> None:
        """Probe an instance that failed a leg although it can be reached.

        An engine that is dead behind a live HTTP server fails fast, so it has few legs in flight and would be
        picked first, again and again.
        """
        if instance.up and instance.index not in self._suspected and not self._tasks.closed:
            self._suspected.add(instance.index)
            task = self._tasks.spawn(self.probe(instance), name=f"kvpush-router-check-{self.role}-{instance.index}")
            task.add_done_callback(lambda _: self._suspected.discard(instance.index))

    async def probe(self, instance: Instance) -> bool:
        """Ask an instance for its health, and note the answer.

        Returns:
            True if it answered in time with anything below 500.
        """
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                async with self._session.get(f"{instance.url}/health", allow_redirects=False) as response:
                    answered = response.status < 500
        except (aiohttp.ClientError, OSError, TimeoutError):
            answered = False
        if answered:
            self.mark_up(instance)
        else:
            self.mark_down(instance)
        return answered

    async def _recover(self, instance: Instance) -> None:
        pause_s = self._backoff_s
        while not instance.up:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self._backoff_max_s)
            await self.probe(instance)

    def _report(self, instance: Instance) -> None:
        self._metrics.instance_up.labels(self.role, instance.url).set(int(instance.up))
        self._metrics.instance_in_flight.labels(self.role, instance.url).set(instance.in_flight)
