# SPDX-License-Identifier: Apache-2.0
"""What the cuda backend asks of torch: whose context is current on a thread, when kernels have ended, where memory comes from.

``torch.cuda`` is handed in by whoever uses this, so that nothing here imports torch, and tests give another one. Asked of it:
``is_available``, ``device_count``, ``current_device``, ``device``, ``mem_get_info``, ``current_stream``, ``Event``,
``memory_snapshot``. Nothing here waits for the device.

* **Contexts.** A thread has no CUDA context of its own until it has called something of the CUDA runtime that needs one;
  ``torch.cuda.set_device(0)`` is no such call when 0 is the thread's device already. UCX asks the driver for the thread's
  context as it makes its contexts, and when it copies: an agent made on a thread without one takes GPU memory for the host's.
* **Events.** ``cudaEventQuery`` may be called from any thread. An event belongs to the device of the stream that it was first
  recorded on, so events are kept per device. Making one costs a few microseconds more than recording one: they are used again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvpush.backends._wrapped import WrappedTransport
from kvpush.core.transport import MemoryKind, Region, Transport
from kvpush.errors import BackendError, MemoryRegistrationError

__all__ = ["DeviceContext", "EventFence", "EventFences", "EventPool", "OnDevice", "expandable_region"]

logger = logging.getLogger(__name__)

_MOST_FREE_EVENTS = 1024
"""Per device; more are only needed by an engine that is so many layers ahead of its device."""


class DeviceContext:
    """Makes a device's context the current one for as long as a call takes, on any thread.

    Args:
        module: ``torch.cuda``.
        device_id: The device, as this process counts them.
    """

    def __init__(self, module: Any, device_id: int) -> None:
        self._module = module
        self._bound = threading.local()
        self.device_id = device_id

    @contextmanager
    def current(self) -> Iterator[None]:
        """Costs about a microsecond; some more once per thread. **Owner** any thread."""
        with self._module.device(self.device_id):
            if getattr(self._bound, "device_id", None) != self.device_id:
                self._module.mem_get_info(self.device_id)  # the cheapest call that needs a context
                self._bound.device_id = self.device_id
            yield


class EventPool:
    """Events to be used again, per device. One thread records, one asks; they may be two.

    Args:
        module: ``torch.cuda``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._free: dict[int, deque[Any]] = {}

    def record(self, device_id: int, stream: Any) -> Any:
        """An event behind what has been launched on a stream of a device. Never waits; raises what torch raises."""
        free = self._free.setdefault(device_id, deque())
        event = free.pop() if free else self._module.Event()  # nobody else takes any
        event.record(stream)
        return event

    def passed(self, device_id: int, event: Any) -> bool:
        """Whether an event has passed. If so it belongs to the pool again and must not be asked any more. Never waits.

        Raises:
            BackendError: the device has failed; the event is not used again.
        """
        try:
            if not event.query():
                return False
        except Exception as exc:
            raise BackendError(f"CUDA device {device_id} has failed: {type(exc).__name__}: {exc}") from exc
        free = self._free.setdefault(device_id, deque())
        if len(free) < _MOST_FREE_EVENTS:
            free.append(event)
        return True


class EventFence:
    """Events on the streams that the engine computes on, one per device; or why none could be recorded."""

    __slots__ = ("error", "events")

    def __init__(self, events: list[tuple[int, Any]], error: str = "") -> None:
        self.events = events
        self.error = error


class EventFences:
    """Device fences.

    Args:
        module: ``torch.cuda``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._pool = EventPool(module)
        self.device_ids: tuple[int, ...] = ()
        """The devices to record on; set before the submitter starts."""

    def record(self) -> EventFence:
        """An event on each device's current stream. **Owner** engine thread; never waits, never raises: the engine lives on,
        and the transfers concerned fail by the fence."""
        try:
            return EventFence(
                [
                    (device_id, self._pool.record(device_id, self._module.current_stream(device_id)))
                    for device_id in self.device_ids
                ]
            )
        except Exception as exc:  # noqa: BLE001 - whatever torch raises
            return EventFence([], f"no event can be recorded: {type(exc).__name__}: {exc}")

    def done(self, fence: EventFence) -> bool:
        """Whether all of its events have passed. **Owner** submitter thread; never waits.

        Raises:
            BackendError: the device has failed; so it does at the next try.
        """
        if fence.error:
            raise BackendError(fence.error)
        while fence.events:
            try:
                if not self._pool.passed(*fence.events[-1]):
                    return False
            except BackendError as exc:
                fence.error = exc.message
                fence.events.clear()
                raise
            fence.events.pop()
        return True


class OnDevice(WrappedTransport):
    """A transport whose every call is made with the device's context current.

    Args:
        inner: The transport.
        context: Of the device whose memory it moves; follows the first region that is registered.
        num_devices: What this process sees.
    """

    def __init__(self, inner: Transport, context: DeviceContext, num_devices: int) -> None:
        super().__init__(inner)
        self._context = context
        self._num_devices = num_devices

    def around(self) -> AbstractContextManager[object]:
        """With the device's context current."""
        return self._context.current()

    def register_memory(self, regions: Sequence[Region]) -> None:
        """Register device memory, and host memory beside it.

        Raises:
            MemoryRegistrationError: host memory alone, no such device, or the inner transport refuses; says what to do.
        """
        on_device = [region for region in regions if region.kind is MemoryKind.DEVICE]
        if len(on_device) < len(regions) and not on_device:
            raise MemoryRegistrationError(
                f"a region of {regions[0].length} bytes is host memory: the cuda backend registers that only beside a GPU's"
            )
        for region in on_device:
            if not 0 <= region.device_id < self._num_devices:
                raise MemoryRegistrationError(unknown_device(region.device_id, self._num_devices))
        if on_device:
            self._context.device_id = on_device[0].device_id
        try:
            super().register_memory(regions)
        except MemoryRegistrationError as exc:
            raise MemoryRegistrationError(
                f"{exc.message}. Is it memory of the GPU? `kvpush doctor --backend cuda` names what else may be missing"
            ) from exc


def unknown_device(device_id: int, num_devices: int) -> str:
    """What to say of a device that this process doesn't see."""
    return (
        f"CUDA device {device_id} is not one of the {num_devices} that this process sees (numbered from 0 in the order of "
        "CUDA_VISIBLE_DEVICES)"
    )


def expandable_region(module: Any, regions: Sequence[Region]) -> Region | None:
    """The first region in one of torch's expandable segments: the allocator maps other memory there when it grows or gives
    memory back, under the registration, and CUDA IPC can't export it.

    What the environment says doesn't tell: it can be changed while the process runs, and a pool may be excepted from it.
    None where the memory is not of torch's own allocator.
    """
    try:
        segments = module.memory_snapshot()
    except Exception as exc:  # noqa: BLE001 - an allocator that was plugged in has no snapshot, and no such segments
        logger.debug("kvpush: torch tells nothing of its segments: %s: %s", type(exc).__name__, exc)
        return None
    found = [
        (int(segment["address"]), int(segment["address"]) + int(segment["total_size"]))
        for segment in segments
        if segment.get("is_expandable")
    ]
    for region in regions:
        if any(region.address < hi and lo < region.address + region.length for lo, hi in found):
            return region
    return None
