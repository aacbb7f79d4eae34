# SPDX-License-Identifier: Apache-2.0
"""One process's end of kvpush, for any engine: a backend, a control channel, the machines and their thread, put together.

The vLLM adapter uses this class, and so may anybody else: see ``examples/two_processes.py``.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from kvpush.backends.base import Backend, BackendPlugin, CacheView, Capability
from kvpush.backends.manager import BackendManager
from kvpush.channels.zmq import ZmqChannel
from kvpush.core import wire
from kvpush.core.consumer import ConsumerConfig, ConsumerMachine
from kvpush.core.events import EngineEvent, Outcome
from kvpush.core.ids import AgentName, BlockTable, EngineId, PeerAddress
from kvpush.core.layout import CacheLayout, PairPlan
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import SchedulingPolicy
from kvpush.core.submitter import Submitter, SubmitterHooks
from kvpush.core.transport import Channel, Region
from kvpush.errors import ConfigError, KvPushError
from kvpush.settings import Settings

logger = logging.getLogger(__name__)


def numpy_views(
    caches: Mapping[str, npt.NDArray[Any]], *, order: str = "BHNC", block_tokens: int, num_heads: int, head_lo: int = 0
) -> list[CacheView]:
    """Describe a paged cache held in NumPy arrays.

    Args:
        caches: One array per layer, in forward order; dimension 0 counts blocks.
        order: Letters for the dimensions; see :class:`~kvpush.backends.base.CacheView`.
        block_tokens: Tokens per block.
        num_heads: KV heads held here.
        head_lo: First of them, over the whole model.
    """
    views = []
    for name, array in caches.items():
        address = array.__array_interface__["data"][0]
        views.append(
            CacheView(
                name=name,
                group=0,
                address=address,
                shape=array.shape,
                strides=array.strides,
                itemsize=array.itemsize,
                dtype=str(array.dtype),
                device_type="cpu",
                device_id=0,
                num_blocks=array.shape[order.index("B")],
                block_tokens=block_tokens,
                head_lo=head_lo,
                num_heads=num_heads,
                order=order,
                region=Region(address, array.nbytes, keepalive=array),
            )
        )
    return views


class Endpoint:
    """A producer, a consumer, or both. Make it with :meth:`open`.

    **Owner** the engine thread, unless a method says otherwise.
    """

    def __init__(self, submitter: Submitter, backend: Backend, layout: CacheLayout, engine_id: EngineId, reason: str) -> None:
        self._submitter = submitter
        self._backend = backend
        self.layout = layout
        self.engine_id = engine_id
        self.selection_reason = reason

    @classmethod
    def open(
        cls,
        views: Sequence[CacheView],
        *,
        produce: bool = True,
        consume: bool = True,
        settings: Settings | None = None,
        engine_id: str | None = None,
        compat: Mapping[str, str] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        plugin: BackendPlugin | None = None,
        channel: Channel | None = None,
        on_outcome: Callable[[], None] | None = None,
    ) -> Endpoint:
        """Choose the backend, register the memory, bind the control endpoint, and start the submitter.

        Args:
            views: The cache, one view per layer in forward order; must stay where it is until :meth:`close`.
            produce: Serve consumers; binds the control endpoint.
            consume: Receive from producers.
            settings: Read from all sources if not given.
            engine_id: Name of this instance, the same on all its ranks; drawn at random if not given.
            compat: What must be equal on both sides besides the layout, such as the model's name.
            rank: This rank's number within the instance; it binds ``control_port + rank``.
            num_ranks: Ranks of the instance.
            plugin: Use this backend instead of choosing one.
            channel: Use this channel instead of ZeroMQ.
            on_outcome: See :class:`~kvpush.core.submitter.Submitter`.

        Raises:
            ConfigError: settings that can't work.
            BackendError: no backend can serve this cache here.
            LayoutError: the backend can't serve this cache.
            MemoryRegistrationError: the device refused the memory.
            TransportError: the control port can't be bound.
        """
        settings = settings or Settings.load()
        if not views:
            raise ConfigError("there is no KV cache to transfer: no layer was given")
        if num_ranks > 1 and settings.control_port == 0 and produce:
            raise ConfigError("control_port=0 works for a single rank only: set a port, rank r uses control_port + r")
        engine = EngineId(engine_id or f"kvpush-{secrets.token_hex(8)}")
        agent_name = f"{engine}-{rank}-{secrets.token_hex(4)}"
        reason = "given by the caller"
        if plugin is None:
            selection = BackendManager().select(settings.backend, views[0].device_type)
            plugin, reason = selection.plugin, selection.reason
        backend = plugin.create(agent_name, settings.backend_options)
        try:
            layout = backend.describe(views)
            layout.check()
            backend.transport.register_memory(_regions(views))
            if channel is None:
                bind = PeerAddress(settings.control_host, settings.control_port + rank if settings.control_port else 0)
                channel = ZmqChannel(bind if produce else None)
        except BaseException:
            backend.close()
            raise
        try:
            submitter = _submitter(
                backend, channel, layout, settings, engine, dict(compat or {}), rank, num_ranks, produce, consume, on_outcome
            )
        except BaseException:
            channel.close()
            backend.close()
            raise
        endpoint = cls(submitter, backend, layout, engine, reason)
        submitter.start(f"kvpush-{rank}")
        logger.info("kvpush: %s", endpoint.describe())
        return endpoint

    @property
    def address(self) -> PeerAddress | None:
        """Where consumers reach this endpoint; None if it only receives."""
        return self._submitter.channel.address

    @property
    def submitter(self) -> Submitter:
        """The thread, for counters and tests."""
        return self._submitter

    @property
    def error(self) -> KvPushError | None:
        """Why the submitter has stopped, if it has."""
        return self._submitter.error

    @property
    def layer_fences(self) -> bool:
        """Whether :meth:`device_fence` may be taken after each layer."""
        return Capability.LAYER_FENCE in self._backend.info.capabilities

    def describe(self) -> str:
        """One line for the log: what was chosen, why, and what it works on."""
        block = self.layout.block_bytes()
        return (
            f"backend {self._backend.info.name} ({self.selection_reason}), transport {self._backend.transport.name}, "
            f"{len(self.layout.layers)} layers, {block} bytes per block, control endpoint {self.address or 'none'}"
        )

    @property
    def worthwhile_bytes(self) -> int:
        """Progress by fewer bytes than this needn't be submitted before more has become final or the step has ended."""
        return self._submitter.worthwhile_bytes

    def device_fence(self) -> object | None:
        """See :meth:`kvpush.backends.base.Backend.device_fence`."""
        return self._backend.device_fence()

    def submit(self, event: EngineEvent, *, wake: bool = True) -> None:
        """See :meth:`kvpush.core.submitter.Submitter.submit`. **Owner** any thread; never blocks."""
        self._submitter.submit(event, wake=wake)

    def drain(self) -> list[Outcome]:
        """Outcomes since the last call. Never blocks."""
        return self._submitter.drain()

    def wait_outcome(self, timeout_s: float) -> bool:
        """Sleep until there is an outcome, or the time is over."""
        return self._submitter.wait_outcome(timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what is open, say goodbye to peers, stop the thread and release the memory. Blocks for at most ``timeout_s``;
        False when not everything ended in time (memory is leaked rather than freed then). Idempotent."""
        in_order = self._submitter.close(timeout_s)
        if in_order:
            self._backend.close()
        return in_order


def _regions(views: Sequence[CacheView]) -> list[Region]:
    """The allocations behind the views, each once."""
    found: dict[tuple[int, int, int], Region] = {}
    for view in views:
        region = view.region
        found.setdefault((region.address, region.length, region.device_id), region)
    return list(found.values())


def _submitter(
    backend: Backend,
    channel: Channel,
    layout: CacheLayout,
    settings: Settings,
    engine: EngineId,
    compat: dict[str, str],
    rank: int,
    num_ranks: int,
    produce: bool,
    consume: bool,
    on_outcome: Callable[[], None] | None,
) -> Submitter:
    transport = backend.transport
    agent_name = AgentName(transport.agent_name)
    producer = consumer = None
    if produce:
        assert channel.address is not None
        base = channel.address.port - rank
        producer = ProducerMachine(
            ProducerConfig(
                engine_id=engine,
                agent_name=agent_name,
                transport=transport.name,
                compat=compat,
                endpoints=tuple(wire.Endpoint(idx, "", base + idx) for idx in range(num_ranks)),
                lease_guard_s=settings.lease_guard_s,
                heartbeat_s=settings.heartbeat_s,
                idle_heartbeat_s=settings.idle_heartbeat_s,
                peer_timeout_s=settings.peer_timeout_s,
                announce_timeout_s=settings.announce_timeout_s * 2,
                source_timeout_s=settings.source_timeout_s,
                write_timeout_s=settings.write_timeout_s,
                policy=SchedulingPolicy(
                    granularity=settings.push_granularity,
                    max_write_bytes=settings.max_write_bytes,
                    max_inflight_bytes_per_peer=settings.max_inflight_bytes_per_peer,
                    max_inflight_bytes=settings.max_inflight_bytes,
                ),
            ),
            layout,
        )
    if consume:
        consumer = ConsumerMachine(
            ConsumerConfig(
                engine_id=engine,
                agent_name=agent_name,
                transport=transport.name,
                metadata=transport.metadata(),
                compat=compat,
                retry_window_s=transport.capabilities.retry_window_s,
                needs_visibility_fence=Capability.VISIBILITY_FENCE in backend.info.capabilities,
                lease_s=settings.lease_s,
                peer_timeout_s=settings.peer_timeout_s,
                handshake_timeout_s=settings.handshake_timeout_s,
                announce_timeout_s=settings.announce_timeout_s,
                transfer_timeout_s=settings.transfer_timeout_s,
                fence_timeout_s=settings.fence_timeout_s,
                fence_give_up_s=settings.write_timeout_s,
            ),
            layout,
            lambda: secrets.randbits(62) + 1,
        )
    itself = PairPlan(layout, layout)

    def start_visibility_fence(blocks: BlockTable) -> Callable[[], bool] | None:
        rows, _ = itself.descriptors(0, itself.num_layers, blocks, blocks)
        regions = [Region(int(address), int(length), int(device)) for address, length, device in rows]
        fence = backend.start_visibility_fence(regions)
        return fence.done if fence is not None else None

    return Submitter(
        transport=transport,
        channel=channel,
        producer=producer,
        consumer=consumer,
        hooks=SubmitterHooks(backend.fence_done, start_visibility_fence),
        poll_interval_s=settings.poll_interval_us * 1e-6,
        max_poll_interval_s=max(1e-3, settings.poll_interval_us * 1e-6),
        on_outcome=on_outcome,
    )


__all__ = ["Endpoint", "numpy_views"]
