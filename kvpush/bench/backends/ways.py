# SPDX-License-Identifier: Apache-2.0
"""Which ways of which backends there are to measure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpush.backends.manager import BackendManager, Discovered
from kvpush.bench.backends.results import Subject
from kvpush.errors import BackendNotFound

__all__ = ["Way", "find_ways", "ways_of"]

_RDMA = Path("/dev/infiniband")


@dataclass(frozen=True, slots=True)
class Way:
    """A backend with one of its transports.

    Args:
        subject: How it is told to people.
        entry_point: Of the plugin.
        environment: Of the processes that measure it: UCX reads its own as an agent is made.
        options: ``backend_options``.
        chosen: With a transport that isn't the backend's first: it may not be there.
    """

    subject: Subject
    entry_point: tuple[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    chosen: bool = False

    @property
    def name(self) -> str:
        """Backend and variant in one word."""
        return self.subject.way


def find_ways(
    names: Sequence[str] = (), options: Mapping[str, object] | None = None, *, manager: BackendManager | None = None
) -> tuple[list[Way], list[Subject]]:
    """Probe every backend, or those that are named.

    Args:
        names: Of backends; all if there is none.
        options: ``backend_options`` of each.
        manager: Where backends are looked for; what is installed by default.

    Returns:
        What can be measured, and what can't with the reasons.

    Raises:
        BackendNotFound: nothing has one of the names; a close one is suggested.
    """
    manager = manager or BackendManager()
    found = manager.discover()
    for name in names:
        if all(entry.name != name for entry in found):
            manager.get(name)  # says which name is close
            raise BackendNotFound(f"no backend is called {name!r}")
    ways: list[Way] = []
    others: list[Subject] = []
    # A probe may take seconds: only where it is needed.
    entries = manager.discover(probe=True)
    for entry in entries:
        if names and entry.name not in names:
            continue
        if entry.ok:
            ways += ways_of(entry, options or {})
        else:
            others.append(_refused(entry))
    return ways, others


def ways_of(entry: Discovered, options: Mapping[str, object]) -> list[Way]:
    """The ways of a backend that can run here.

    One that uses NIXL with UCX for the host's memory has two on one host: UCX would always choose shared memory, and TCP is
    what joins hosts without RDMA. A value of ``UCX_TLS`` in the environment leaves only that one. One with several transports
    is measured as it chooses, and with each further one by the option ``transport``.
    """
    assert entry.plugin is not None, "it can run"
    info = entry.plugin.info
    first: dict[str, dict[str, str]] = {"": {}}
    if "nixl-ucx" in info.transports and "cpu" in info.device_types:
        set_by_user = os.environ.get("UCX_TLS")
        if set_by_user:
            first = {f"UCX_TLS={set_by_user}": {}}
        else:
            first = {"sm": {"UCX_TLS": "sm,self"}, "tcp": {"UCX_TLS": "tcp,self"}}
            if _RDMA.is_dir():
                first["rdma"] = {"UCX_TLS": "ib,self"}
    further = () if "transport" in options else info.transports[1:]
    return [
        *(_way(entry, variant, environment, options) for variant, environment in first.items()),
        *(_way(entry, transport, {}, {**options, "transport": transport}, chosen=True) for transport in further),
    ]


def _way(
    entry: Discovered,
    variant: str,
    environment: Mapping[str, str],
    options: Mapping[str, object],
    *,
    chosen: bool = False,
) -> Way:
    subject = Subject(entry.name, variant, entry.distribution, "measured")
    return Way(subject, entry.entry_point, environment, dict(options), chosen)


def _refused(entry: Discovered) -> Subject:
    if entry.error is not None:
        return Subject(entry.name, "", entry.distribution, "broken", (entry.error,))
    return Subject(entry.name, "", entry.distribution, "cannot run", entry.probe.reasons if entry.probe is not None else ())
