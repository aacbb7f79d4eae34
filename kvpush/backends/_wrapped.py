# SPDX-License-Identifier: Apache-2.0
"""A transport around another one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvpush.core.ids import AgentName
from kvpush.core.transport import Completion, Descriptors, Region, Transport, TransportCapabilities


class WrappedTransport:
    """All that another transport does; satisfies :class:`kvpush.core.transport.Transport`. Override what is to differ: checks
    before memory is registered, or :meth:`around`, what every call needs.

    Args:
        inner: The other transport, closed with this one.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def around(self) -> contextlib.AbstractContextManager[object]:
        """Entered around each call of the inner transport that does something. Nothing, if not overridden."""
        return contextlib.nullcontext()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def agent_name(self) -> AgentName:
        return self._inner.agent_name

    @property
    def capabilities(self) -> TransportCapabilities:
        return self._inner.capabilities

    def register_memory(self, regions: Sequence[Region]) -> None:
        """Register regions.

        Raises:
            MemoryRegistrationError: the inner transport refuses.
        """
        with self.around():
            self._inner.register_memory(regions)

    def metadata(self) -> bytes:
        with self.around():
            return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> AgentName:
        with self.around():
            return self._inner.add_peer(metadata)

    def remove_peer(self, peer: AgentName) -> None:
        with self.around():
            self._inner.remove_peer(peer)

    def post_write(self, token: int, peer: AgentName, src: Descriptors, dst: Descriptors) -> None:
        with self.around():
            self._inner.post_write(token, peer, src, dst)

    def poll(self) -> list[Completion]:
        with self.around():
            return self._inner.poll()

    def progress(self) -> None:
        with self.around():
            self._inner.progress()

    @property
    def num_in_flight(self) -> int:
        return self._inner.num_in_flight

    def close(self) -> None:
        with self.around():
            self._inner.close()
