# SPDX-License-Identifier: Apache-2.0
"""The tasks a router has started, so that none outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """Holds running tasks; ``aclose`` cancels and awaits all of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def closed(self) -> bool:
        """True once ``aclose`` was called: nothing may be started any more."""
        return self._closed

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task that ends with this set at the latest.

        Raises:
            RuntimeError: the set is closed.
        """
        if self._closed:
            coro.close()
            raise RuntimeError("the router is closed")
        task = asyncio.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Cancel what still runs and wait for its end."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
