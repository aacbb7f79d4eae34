# SPDX-License-Identifier: Apache-2.0
"""What must be as before once a storm is over: blocks, file descriptors, threads, idleness."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import psutil  # type: ignore[import-untyped]

from kvpush.demo.runner import read_metrics

__all__ = ["Footprint", "Totals", "footprint", "settle"]

_POLL_S: Final = 0.5
_BUSY: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_NUMBERED: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the processes of a server hold.

    Args:
        fds: open file descriptors, by what they are.
        threads: of all processes, by name without numbers.
    """

    fds: Mapping[str, int] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_fds(self) -> int:
        """File descriptors in all."""
        return sum(self.fds.values())

    @property
    def num_threads(self) -> int:
        """Threads in all."""
        return sum(self.threads.values())

    def grown_to(self, after: Footprint) -> dict[str, dict[str, int]]:
        """What there is more of in another one, for a report."""
        return {
            "fds": {name: count - self.fds.get(name, 0) for name, count in after.fds.items() if count > self.fds.get(name, 0)},
            "threads": {
                name: count - self.threads.get(name, 0)
                for name, count in after.threads.items()
                if count > self.threads.get(name, 0)
            },
        }


def footprint(processes: Iterable[psutil.Process]) -> Footprint:
    """Look at processes.

    Args:
        processes: of one server; one that has just ended counts as nothing.

    Returns:
        What they hold.
    """
    fds: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for process in processes:
        try:
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                try:
                    fds[_NUMBERED.sub("#", os.readlink(entry))] += 1
                except OSError:
                    continue
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                threads[_NUMBERED.sub("#", (task / "comm").read_text().strip())] += 1
        except OSError:
            continue
    return Footprint(dict(fds), dict(threads))


async def settle(session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> dict[str, float] | None:
    """Wait until an instance holds no request and no block.

    Args:
        session: has a timeout.
        url: of the instance.
        timeout_s: how long it may take.

    Returns:
        What it still holds: running and waiting requests, and the share of its blocks that is in use. Empty if nothing; None if
        that can't be told, because its metrics can't be read, or lack one of these.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        found = await read_metrics(session, f"{url}/metrics")
        told = all(name in found for name in _BUSY)
        held = {name.removeprefix("vllm:"): found[name] for name in _BUSY if found.get(name)}
        if (told and not held) or loop.time() >= deadline:
            return held if told else None
        await asyncio.sleep(_POLL_S)


class Totals:
    """kvpush's counters of one instance over all its lives: each life begins at 0."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()
        self._life: dict[str, float] = {}

    def seen(self, metrics: Mapping[str, float]) -> None:
        """Take what was read of the present life; nothing if it could not be read."""
        for name, value in metrics.items():
            if name.startswith("kvpush_") and name.endswith("_total"):
                self._life[name] = max(value, self._life.get(name, 0.0))

    def died(self) -> None:
        """The present life is over."""
        self._before.update(self._life)
        self._life = {}

    def get(self, name: str) -> float:
        """The sum over all lives."""
        return self._before.get(name, 0.0) + self._life.get(name, 0.0)

    def as_dict(self) -> dict[str, float]:
        """Every counter that is not 0, by name without "_total"."""
        names = {*self._before, *self._life}
        return {name.removesuffix("_total"): round(self.get(name), 3) for name in sorted(names) if self.get(name)}
