# SPDX-License-Identifier: Apache-2.0
"""What a backend is: one kind of memory, and how to move it.

A backend plugin is two objects. :class:`BackendPlugin` is light: it is made at discovery, in any process, and must import
nothing heavy. :class:`Backend` is the working one: made once per worker process by :meth:`BackendPlugin.create`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvpush.core.layout import CacheLayout
from kvpush.core.transport import Region, Transport

BACKEND_API_VERSION = 1
"""Version of this module's contract. A plugin names the one that it was written for; another one is refused by name."""


class Capability(enum.StrEnum):
    """Flags that the core or the adapter acts on."""

    LAYER_FENCE = "layer-fence"
    """:meth:`Backend.device_fence` may be taken after each layer (else only after the whole step)."""

    VISIBILITY_FENCE = "visibility-fence"
    """Completed writes are not yet readable; :meth:`Backend.start_visibility_fence` must end before a request is reported."""

    IN_PROCESS = "in-process"
    """Both sides must live in one process: tests and demos only."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """The card of a backend.

    Args:
        name: Unique, lower case, such as ``cpu``; what users write into settings.
        api_version: The :data:`BACKEND_API_VERSION` it was written for.
        device_types: Device types it serves, as torch names them: ``cpu``, ``cuda``, ``neuron``.
        transports: Names of the transports it can use, preferred first, such as ``nixl-ucx``.
        capabilities: Flags.
        summary: One line for people.
        priority: Higher is probed first where nothing else decides.
    """

    name: str
    api_version: int
    device_types: tuple[str, ...]
    transports: tuple[str, ...]
    capabilities: frozenset[Capability] = frozenset()
    summary: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can run on this host, and if not why.

    Args:
        ok: It can run.
        reasons: Why not, each with what would mend it; empty when ok.
        details: What was found, for ``kvpush doctor``: name to value.
    """

    ok: bool
    reasons: tuple[str, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheView:
    """One layer's KV cache as an engine holds it, without naming a framework.

    Args:
        name: Layer name; the same on both sides.
        group: KV-cache group.
        address: Address of the view's first element, bytes.
        shape: Extents, such as ``(num_blocks, heads, block_tokens, content)``; dimension 0 counts *kernel* blocks.
        strides: Bytes per step in each dimension.
        itemsize: Bytes per element.
        dtype: Element type as text.
        device_type: ``cpu``, ``cuda``, ``neuron``.
        device_id: Device index; 0 on CPU.
        num_blocks: *Manager* blocks: what the engine's block ids count.
        block_tokens: Tokens per manager block.
        head_lo: First KV head here, over the whole model.
        num_heads: KV heads here.
        order: Letters for the dimensions: B block, H head, N token, C content (K and V of one head and token),
            2 the K/V dimension where they lie apart. Such as ``BHNC``.
        region: The whole allocation that the view lies in (several views may share one).
        tag: Extra text that must agree on both sides, such as a packing chosen by the attention kernel.
    """

    name: str
    group: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    device_type: str
    device_id: int
    num_blocks: int
    block_tokens: int
    head_lo: int
    num_heads: int
    order: str
    region: Region
    tag: str = ""


class VisibilityFence(Protocol):
    """A running check that written bytes have become readable."""

    def done(self) -> bool:
        """True once they are. Never blocks. **Owner** submitter thread."""


class Backend(Protocol):
    """The working half of a backend, one per worker process.

    **Owner** constructed and :meth:`describe` called on the engine's worker thread before the submitter starts;
    :meth:`device_fence` on the engine thread; everything else on the submitter thread.
    """

    @property
    def info(self) -> BackendInfo: ...

    @property
    def transport(self) -> Transport:
        """The transport it has chosen; not yet registered with any memory."""

    def describe(self, views: Sequence[CacheView]) -> CacheLayout:
        """Layout adapter: say how these caches lie in memory.

        Args:
            views: One per layer, in forward order.

        Raises:
            LayoutError: a view that this backend can't serve; says which and why.
        """

    def device_fence(self) -> object | None:
        """A token for "what the device has computed so far", such as an event recorded on the compute stream. None when
        results are final as soon as the call that computed them has returned (CPU). **Owner** engine thread; must not wait.
        """

    def fence_done(self, token: object) -> bool:
        """Whether the work behind a token is final and readable by the transport. Never blocks. **Owner** submitter thread.

        Raises:
            BackendError: the device has failed.
        """

    def start_visibility_fence(self, regions: Sequence[Region]) -> VisibilityFence | None:
        """Begin to make sure that completed incoming writes into ``regions`` can be read by the device. None: they can."""

    def close(self) -> None:
        """Release everything, the transport included. Idempotent."""


@runtime_checkable
class BackendPlugin(Protocol):
    """The light half of a backend, returned by the ``kvpush_backend`` hook."""

    @property
    def info(self) -> BackendInfo: ...

    def probe(self) -> Probe:
        """Say whether the backend can run on this host. May import heavy packages; must not raise, must not keep a device
        context or a thread alive, and ends within a second or two."""
        ...

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        """Make the working half.

        Args:
            agent_name: Name of this endpoint, unique per process start.
            options: The user's ``backend_options``; unknown keys are refused with the known ones named.

        Raises:
            BackendError: it can't run here; says what is missing.
            ConfigError: an option is wrong.
        """
        ...
