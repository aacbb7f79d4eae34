# SPDX-License-Identifier: Apache-2.0
"""Runs that end in good order when a signal asks for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Stopped", "run_until_signal"]

T = TypeVar("T")


class Stopped(Exception):
    """A signal asked for the end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run something; on SIGINT, SIGTERM or SIGHUP cancel it, let it end everything that it has started, then raise.

    A second signal while it is ending changes nothing: that takes a few seconds at most.

    Args:
        work: cleans up after itself when it is cancelled.

    Returns:
        Its result.

    Raises:
        Stopped: a signal came.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    got: list[int] = []

    def stop(number: int) -> None:
        if not got:
            got.append(number)
            task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if got:
            raise Stopped(got[0]) from None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
