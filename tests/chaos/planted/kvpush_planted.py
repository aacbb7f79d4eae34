# SPDX-License-Identifier: Apache-2.0
"""The cpu backend, with a sin: now and then a write carries the bytes of the neighbouring block. Only for tests of the oracle.

Found through the entry point beside it once this folder is on the path; chosen by ``KVPUSH_BACKEND=planted``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from kvpush.backends.base import Backend, BackendInfo
from kvpush.backends.cpu import CpuPlugin
from kvpush.backends.hookspecs import hookimpl
from kvpush.core.ids import AgentName
from kvpush.core.transport import Descriptors

EVERY = 5


class PlantedPlugin(CpuPlugin):
    """Light half."""

    @property
    def info(self) -> BackendInfo:
        return dataclasses.replace(super().info, name="planted", priority=-1, summary="cpu, with wrong writes planted")

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Make the working half, and spoil its transport."""
        backend = super().create(agent_name, options)
        transport = backend.transport
        post, count = transport.post_write, itertools.count(1)

        def spoiled(token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
            if next(count) % EVERY == 0:
                src = src.copy()
                address, length = int(src[0, 0]), int(src[0, 1])
                # The cache, or the area that blocks are staged in.
                (end,) = (
                    region.address + region.length
                    for region in transport._regions  # type: ignore[attr-defined]
                    if region.address <= address < region.address + region.length
                )
                after = address + length
                src[0, 0] = after if after + length <= end else address - length
            post(token, peer, src, dst)

        transport.post_write = spoiled  # type: ignore[method-assign]
        return backend


@hookimpl
def kvpush_backend() -> PlantedPlugin:
    """The plugin of this module."""
    return PlantedPlugin()
