# SPDX-License-Identifier: Apache-2.0
"""One process's end of kvpush, for any engine: a backend, a control channel, the machines and their thread, put together.

The vLLM adapter uses this class, and so may anybody else: see ``examples/two_processes.py``.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy.typing as npt

from kvpush.backends.base import Backend, BackendPlugin, CacheView, Capability
from kvpush.backends.manager import BackendManager
from kvpush.channels.zmq import ZmqChannel
from kvpush.core import wire
from kvpush.core.consumer import ConsumerConfig, ConsumerMachine
from kvpush.core.events import EngineEvent, Outcome
from kvpush.core.ids import AgentName, BlockTable, EngineId, PeerAddress
from kvpush.core.layout import CacheLayout
from kvpush.core.plan import PairPlan
from kvpush.core.producer import ProducerConfig, ProducerMachine
from kvpush.core.scheduling import SchedulingPolicy
from kvpush.core.staging import SLOT_BYTES, SLOTS_PER_SESSION, StagingArea
from kvpush.core.submitter import DigestPoll, Submitter, SubmitterHooks
from kvpush.core.transport import Channel, Descriptors, Region
from kvpush.errors import BackendError, ConfigError, KvPushError
from kvpush.security import Protection
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


_RESTARTS_PER_MINUTE = 5
_FIRST_BACK_OFF_S = 0.5

_Build = Callable[[PeerAddress | None, Callable[[], None]], tuple[Backend, CacheLayout, Submitter]]
"""Makes the parts of an endpoint; where it is to listen if that is known already, and what to call after a crash."""


class Endpoint:
    """A producer, a consumer, or both. Make it with :meth:`open`.

    When its submitter crashes, everything open is reported as failed, and the endpoint starts again by itself: new machines, a
    new transport, a new control endpoint on the same address. Peers need not be touched: to them it is an instance that has
    been restarted. After more than five crashes within a minute it stays stopped, and :attr:`error` says why.

    **Owner** the engine thread, unless a method says otherwise.
    """

    def __init__(
        self,
        build: _Build,
        engine_id: EngineId,
        reason: str,
        name: str,
        protection: Protection | None = None,
    ) -> None:
        self._build = build
        self._protection = protection
        self._name = name
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._crashes: deque[float] = deque()
        self._retired: list[Submitter] = []
        self.engine_id = engine_id
        self.selection_reason = reason
        self.restarts = 0
        """How often the submitter has been started again after a crash."""
        self._backend, self.layout, self._submitter = build(None, self._on_crash)
        self._listens_at = self._submitter.channel.address

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
        channel: Channel | Callable[[], Channel] | None = None,
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
            channel: Use this channel instead of ZeroMQ. A function makes a new one at each start; with a channel itself, the
                endpoint can't be started again after a crash.
            on_outcome: See :class:`~kvpush.core.submitter.Submitter`.

        Raises:
            ConfigError: settings that can't work, or an endpoint that everybody on a network could use.
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
        protection = Protection.load(settings, listens=produce) if channel is None else None
        engine = EngineId(engine_id or f"kvpush-{secrets.token_hex(8)}")
        reason = "given by the caller"
        if plugin is None:
            manager = BackendManager()
            try:
                selection = manager.select(settings.backend, views[0].device_type)
            finally:
                manager.log_broken()
            plugin, reason = selection.plugin, selection.reason
        chosen = plugin
        make_channel = channel if channel is None or callable(channel) else _once(channel)

        def build(listens_at: PeerAddress | None, on_crash: Callable[[], None]) -> tuple[Backend, CacheLayout, Submitter]:
            backend = _created(chosen, f"{engine}-{rank}-{secrets.token_hex(4)}", settings.backend_options)
            try:
                layout = backend.describe(views)
                layout.check()
                staging = _staging_region(backend, settings)
                backend.transport.register_memory(_regions(views) + ([staging] if staging is not None else []))
                bind = listens_at or PeerAddress(
                    settings.control_host, settings.control_port + rank if settings.control_port else 0
                )
                if make_channel is not None:
                    own = make_channel()
                else:
                    assert protection is not None
                    own = ZmqChannel(
                        bind if produce else None,
                        credentials=protection.credentials,
                        producers=protection.producers,
                        max_messages_per_s=settings.max_messages_per_s,
                        handshake_timeout_s=settings.handshake_timeout_s,
                    )
            except BaseException:
                backend.close()
                raise
            try:
                return backend, layout, _submitter(
                    backend, own, layout, settings, engine, dict(compat or {}), rank, num_ranks, produce, consume,
                    staging, on_outcome, on_crash,
                )  # fmt: skip
            except BaseException:
                own.close()
                backend.close()
                raise

        endpoint = cls(build, engine, reason, f"kvpush-{rank}", protection)
        endpoint._submitter.start(endpoint._name)
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
        protection = self._protection.describe() if self._protection is not None else "a channel of the caller's"
        return (
            f"backend {self._backend.info.name} ({self.selection_reason}), transport {self._backend.transport.name}, "
            f"{len(self.layout.layers)} layers, {block} bytes per block, "
            f"control endpoint {self.address or 'none'} ({protection})"
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
        outcomes: list[Outcome] = []
        for retired in list(self._retired):
            outcomes += retired.drain()
            if retired.exhausted:
                self._retired.remove(retired)
        return outcomes + self._submitter.drain()

    def wait_outcome(self, timeout_s: float) -> bool:
        """Sleep until there is an outcome, or the time is over."""
        return self._submitter.wait_outcome(timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what is open, say goodbye to peers, stop the thread and release the memory. Blocks for at most ``timeout_s``;
        False when not everything ended in time (memory is leaked rather than freed then). Idempotent."""
        self._closing.set()
        with self._lock:
            submitter, backend = self._submitter, self._backend
        in_order = submitter.close(timeout_s)
        if in_order:
            backend.close()
        return in_order

    def _on_crash(self) -> None:
        """Start again. **Owner** the submitter thread that has crashed, as the last thing that it does."""
        crashed = self._submitter
        with contextlib.suppress(Exception):
            self._backend.close()
        while True:
            now = time.monotonic()
            self._crashes.append(now)
            while self._crashes[0] < now - 60.0:
                self._crashes.popleft()
            count = len(self._crashes)
            if count > _RESTARTS_PER_MINUTE:
                logger.error("kvpush: stays stopped after %d crashes within a minute; requests are computed locally", count)
                return
            if self._closing.wait(_FIRST_BACK_OFF_S * 2 ** (count - 1)):
                return
            try:
                backend, _, submitter = self._build(self._listens_at, self._on_crash)
            except Exception as error:
                logger.exception("kvpush: starting again failed")
                if isinstance(error, ConfigError):
                    return
                continue
            submitter.inherit(crashed)
            with self._lock:
                if self._closing.is_set():
                    submitter.close(0.0)
                    backend.close()
                    return
                self._retired.append(crashed)
                self._backend, self._submitter = backend, submitter
                self.restarts += 1
                submitter.start(self._name)
            logger.warning("kvpush: started again after a crash: %s", self.describe())
            return


def _once(channel: Channel) -> Callable[[], Channel]:
    """Hands out a channel that the caller has made, which can't be made again."""
    left = [channel]

    def take() -> Channel:
        if not left:
            raise ConfigError("the channel was given by the caller, who would have to make a new one")
        return left.pop()

    return take


_WORKING_HALF = ("close", "describe", "device_fence", "fence_done", "info", "start_visibility_fence", "transport")


def _created(plugin: BackendPlugin, agent_name: str, options: Mapping[str, object]) -> Backend:
    """The working half; what is wrong with it is said with the plugin's name.

    Raises:
        BackendError: the plugin raised something else than kvpush's own errors, or returned no backend.
    """
    name = plugin.info.name
    try:
        backend: object = plugin.create(agent_name, options)
    except KvPushError:
        raise
    except Exception as error:
        raise BackendError(f"backend {name}: create() raised {type(error).__name__}: {error}") from error
    missing = [part for part in _WORKING_HALF if not hasattr(backend, part)]
    if missing:
        raise BackendError(f"backend {name}: create() returned {backend!r}, which is no Backend: it lacks {', '.join(missing)}")
    return cast(Backend, backend)


def _regions(views: Sequence[CacheView]) -> list[Region]:
    """The allocations behind the views, each once."""
    found: dict[tuple[int, int, int], Region] = {}
    for view in views:
        region = view.region
        found.setdefault((region.address, region.length, region.device_id), region)
    return list(found.values())


def _staging_region(backend: Backend, settings: Settings) -> Region | None:
    """Memory for packed blocks; None where it is turned off or the backend can't, which is said if it should have been able to.

    Raises:
        BackendError: the backend's own, if staging is not to be chosen by what is faster, but wanted.
    """
    capabilities = backend.info.capabilities
    if settings.staging == "off" or Capability.STAGING not in capabilities or Capability.VISIBILITY_FENCE in capabilities:
        return None
    try:
        return backend.staging_region(settings.staging_bytes // SLOT_BYTES * SLOT_BYTES)
    except BackendError as exc:
        if settings.staging == "on":
            raise
        logger.warning("kvpush: no staging: %s", exc.message)
        return None


def _staging_areas(region: Region) -> tuple[StagingArea | None, StagingArea]:
    """The part for what arrives, in whole shares, and the rest for what is sent."""
    num_slots = region.length // SLOT_BYTES
    incoming = num_slots * 3 // 4 // SLOTS_PER_SESSION * SLOTS_PER_SESSION
    area = StagingArea(region.address, region.device_id, SLOT_BYTES, num_slots)
    sent = StagingArea(area.slot(incoming), region.device_id, SLOT_BYTES, num_slots - incoming)
    return StagingArea(region.address, region.device_id, SLOT_BYTES, incoming) if incoming else None, sent


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
    staging: Region | None,
    on_outcome: Callable[[], None] | None,
    on_crash: Callable[[], None],
) -> Submitter:
    transport = backend.transport
    incoming, outgoing = _staging_areas(staging) if staging is not None else (None, None)
    agent_name = AgentName(transport.agent_name)
    digest_scheme = backend.digest_scheme if Capability.DIGEST in backend.info.capabilities else ""
    if consume and settings.verify != "off" and not digest_scheme:
        raise ConfigError(f"verify={settings.verify}: the backend {backend.info.name} can't compute digests; set verify=off")
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
                retry_window_s=transport.capabilities.retry_window_s,
                lease_guard_s=settings.lease_guard_s,
                heartbeat_s=settings.heartbeat_s,
                idle_heartbeat_s=settings.idle_heartbeat_s,
                peer_timeout_s=settings.peer_timeout_s,
                announce_timeout_s=settings.announce_timeout_s * 2,
                source_timeout_s=settings.source_timeout_s,
                write_timeout_s=settings.write_timeout_s,
                digest_scheme=digest_scheme,
                policy=SchedulingPolicy(
                    granularity=settings.push_granularity,
                    max_write_bytes=settings.max_write_bytes,
                    max_inflight_bytes_per_peer=settings.max_inflight_bytes_per_peer,
                    max_inflight_bytes=settings.max_inflight_bytes,
                ),
                first_seq=lambda: secrets.randbits(52),
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
                verify=settings.verify,
                verify_sample_share=settings.verify_sample_share,
                digest_scheme=digest_scheme,
                staging=incoming,
                slots_per_session=SLOTS_PER_SESSION,
                lease_s=settings.lease_s,
                peer_timeout_s=settings.peer_timeout_s,
                handshake_timeout_s=settings.handshake_timeout_s,
                announce_timeout_s=settings.announce_timeout_s,
                transfer_timeout_s=settings.transfer_timeout_s,
                fence_timeout_s=settings.fence_timeout_s,
                digest_timeout_s=settings.write_timeout_s,
                fence_give_up_s=settings.write_timeout_s,
                visibility_timeout_s=settings.write_timeout_s,
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

    def start_digest(layers: tuple[int, ...], blocks: BlockTable) -> DigestPoll:
        return backend.start_digest([layout.layers[layer] for layer in layers], blocks).poll

    def start_copy(src: Descriptors, dst: Descriptors) -> Callable[[], bool]:
        return backend.start_copy(src, dst).done

    submitter = Submitter(
        transport=transport,
        channel=channel,
        producer=producer,
        consumer=consumer,
        hooks=SubmitterHooks(
            backend.fence_done,
            start_visibility_fence,
            start_digest if digest_scheme else None,
            start_copy if staging is not None else None,
        ),
        staging=outgoing,
        staging_mode=settings.staging,
        poll_interval_s=settings.poll_interval_us * 1e-6,
        max_poll_interval_s=max(1e-3, settings.poll_interval_us * 1e-6),
        device_timeout_s=settings.write_timeout_s,
        on_outcome=on_outcome,
        on_crash=on_crash,
    )
    submitter.keepalive = staging
    return submitter


__all__ = ["Endpoint", "numpy_views"]
