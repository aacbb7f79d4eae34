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

from kvpush.core.ids import BlockTable
from kvpush.core.layout import CacheLayout, LayerLayout
from kvpush.core.transport import Descriptors, Region, Transport
from kvpush.errors import BackendError

BACKEND_API_VERSION = 1
"""Version of this module's contract. A plugin names the one that it was written for; another one is refused by name."""


class Capability(enum.StrEnum):
    """Flags that the core or the adapter acts on."""

    LAYER_FENCE = "layer-fence"
    """:meth:`Backend.device_fence` may be taken after each layer (else only after the whole step)."""

    VISIBILITY_FENCE = "visibility-fence"
    """Completed writes are not yet readable; :meth:`Backend.start_visibility_fence` must end before a request is reported."""

    DIGEST = "digest"
    """:meth:`Backend.start_digest` works, so that ``verify`` can be ``sample`` or ``all``."""

    STAGING = "staging"
    """:meth:`Backend.staging_region` and :meth:`Backend.start_copy` work, so that scattered blocks can travel packed. Not
    together with :attr:`VISIBILITY_FENCE`: what has arrived in a slot must be readable when its write is complete."""

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
        preferred_layout: Order of the cache's dimensions in memory, outermost first, that the engine is asked for where its
            attention kernels can use it, in the letters of :class:`CacheView` with L for the layer. ``BLHNC`` gives one run of
            bytes per block over all layers. None: the engine's own choice.
    """

    name: str
    api_version: int
    device_types: tuple[str, ...]
    transports: tuple[str, ...]
    capabilities: frozenset[Capability] = frozenset()
    summary: str = ""
    priority: int = 0
    preferred_layout: str | None = None


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


class RunningDigest(Protocol):
    """A digest of cache blocks that is being computed."""

    def poll(self) -> tuple[bytes, ...] | None:
        """The digests, one per layer and each of 1 to 64 bytes; None while it runs. Never blocks. **Owner** submitter thread.

        Raises:
            BackendError: it can't be computed.
        """


class RunningCopy(Protocol):
    """Rows that are being copied."""

    def done(self) -> bool:
        """True once they are. Never blocks. **Owner** submitter thread.

        Raises:
            BackendError: it has failed; nothing of it goes on.
        """


class Backend(Protocol):
    """The working half of a backend, one per worker process.

    Derive from it (``class MyBackend(Backend)``): what belongs to a capability that the card doesn't declare then needs no
    line of yours.

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

    @property
    def digest_scheme(self) -> str:
        """Name of what :meth:`start_digest` computes: hash function and order of the bytes. Two backends with the same name get
        the same digest from blocks of the same content. Asked only with :attr:`Capability.DIGEST`."""
        raise _undeclared(self, Capability.DIGEST)

    def start_digest(self, layers: Sequence[LayerLayout], blocks: BlockTable) -> RunningDigest:
        """Begin to compute a digest of the content of some blocks, layer by layer. Called only with :attr:`Capability.DIGEST`.

        On the producer the blocks are written before and not during it; on the consumer likewise. Where an engine takes them
        away in the middle (preemption), the result is thrown away, so any result will do; the memory itself stays until
        :meth:`close`.

        Must not keep the caller for longer than some 100 microseconds: more work belongs on a thread or on the device.

        Args:
            layers: Of the layout that :meth:`describe` has returned. A digest covers every plane of a layer.
            blocks: Per group, block ids in token order; a layer's are those of its group. Copy them, or read them at once.

        Raises:
            BackendError: it can't begin.
        """
        raise _undeclared(self, Capability.DIGEST)

    def staging_region(self, num_bytes: int) -> Region:
        """Fresh memory that the transport can write to beside the cache, owned by the region's ``keepalive``. Called only with
        :attr:`Capability.STAGING`, before the memory is registered.

        Raises:
            BackendError: there is none.
        """
        raise _undeclared(self, Capability.STAGING)

    def start_copy(self, src: Descriptors, dst: Descriptors) -> RunningCopy:
        """Begin to copy between ranges of memory of this process: cache blocks into a slot of the staging region, or back.
        Called only with :attr:`Capability.STAGING`.

        One call copies at most a slot. It may copy before it returns where that takes no longer than some 100 microseconds a
        megabyte, as on a host; a device does it behind the caller's back, and not on the stream that computes.

        Args:
            src: Shape ``[n, 3]``: address, length, device id.
            dst: Likewise, lengths as in ``src``. Rows don't overlap.

        Raises:
            BackendError: it can't begin.
        """
        raise _undeclared(self, Capability.STAGING)

    def close(self) -> None:
        """Release everything, the transport included. Idempotent. When it returns no digest reads the cache any more."""


def _undeclared(backend: Backend, capability: Capability) -> BackendError:
    return BackendError(f"backend {backend.info.name} does not declare {capability}")


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
