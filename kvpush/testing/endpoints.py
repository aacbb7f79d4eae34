# SPDX-License-Identifier: Apache-2.0
"""A producer and a consumer over one backend, in one process, and whole requests between them. Needs no pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

from kvpush.backends.base import BackendPlugin, CacheView, Capability
from kvpush.core.events import (
    Outcome,
    ReceiveEnded,
    ReceiveRequested,
    ReceiveStatus,
    SourceAnnounced,
    SourceFinished,
    SourceProgressed,
    SourceReleased,
)
from kvpush.core.ids import RequestId
from kvpush.endpoint import Endpoint
from kvpush.settings import Settings
from kvpush.testing.fabric import Bytes, Device, Memory

__all__ = ["BLOCK_TOKENS", "NUM_LAYERS", "EndpointPair"]

NUM_LAYERS = 3
BLOCK_TOKENS = 4
_DIGEST = b"the same prompt!"
_Ended = TypeVar("_Ended", ReceiveEnded, SourceReleased)


class EndpointPair:
    """Two endpoints with random bytes in their caches, joined by a control channel over TCP on the loopback.

    Where the backend computes digests, they are compared before a request counts as received (``verify=all``).

    Args:
        plugin: The light half of the backend, used for both.
        device: Where the caches come from: three layers of 8 blocks on each side.
        options: ``backend_options`` of both.
        wait_until: Waits for a condition, named for the error.
        staging: As the setting.
    """

    def __init__(
        self,
        plugin: BackendPlugin,
        device: Device,
        options: Mapping[str, object],
        *,
        wait_until: Callable[[Callable[[], bool], str], None],
        staging: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        # The defaults, whatever the environment of whoever runs this says.
        verify = "all" if Capability.DIGEST in plugin.info.capabilities else "off"
        settings = Settings.model_construct(control_port=0, verify=verify, staging=staging, backend_options=dict(options))
        self._rng = np.random.default_rng(17)
        self._wait_until = wait_until
        self._source, self._target = (self._cache(device) for _ in range(2))
        self._announced: set[str] = set()
        self._before: dict[str, list[Bytes]] = {}
        self._outcomes: dict[int, list[Outcome]] = {}
        self.producer = self._open(plugin, settings, produce=True)
        try:
            self.consumer = self._open(plugin, settings, produce=False)
        except BaseException:
            self.producer.close()
            raise

    def _cache(self, device: Device) -> list[tuple[CacheView, Memory]]:
        layers = [device.view(f"layer.{idx}") for idx in range(NUM_LAYERS)]
        for _, memory in layers:
            memory[:] = self._rng.integers(0, 256, memory.size, np.uint8)
        return layers

    def _open(self, plugin: BackendPlugin, settings: Settings, *, produce: bool) -> Endpoint:
        views = [view for view, _ in (self._source if produce else self._target)]
        return Endpoint.open(views, produce=produce, consume=not produce, settings=settings, plugin=plugin)

    def register(self, name: str, blocks: Sequence[int]) -> None:
        """Decode's side: these destination blocks have been allocated, :data:`BLOCK_TOKENS` tokens each."""
        self._before[name] = [memory[:].copy() for _, memory in self._target]
        address = self.producer.address
        assert address is not None
        table, num_tokens = (np.array(blocks, np.int32),), len(blocks) * BLOCK_TOKENS
        self.consumer.submit(ReceiveRequested(RequestId(name), address, (name,), _DIGEST, num_tokens, 0, table))

    def compute(self, name: str, num_tokens: int, token_hi: int, new_blocks: Sequence[int]) -> None:
        """Prefill's side: these blocks get new random content; all tokens up to ``token_hi`` of ``num_tokens`` are final."""
        source_id = RequestId(f"source-{name}")
        if name not in self._announced:
            self._announced.add(name)
            self.producer.submit(SourceAnnounced(source_id, (name,), _DIGEST, num_tokens))
        for layer, slabs in self._slabs(self.producer, self._source, new_blocks):
            for part in slabs:
                self._source[layer][1][part] = self._rng.integers(0, 256, part.stop - part.start, np.uint8)
        table, fence = (np.array(new_blocks, np.int32),), self.producer.device_fence()
        self.producer.submit(SourceProgressed(source_id, 0, NUM_LAYERS, token_hi, table, fence))

    def finish(self, name: str) -> None:
        """Prefill's side: the request has ended; its blocks wait to be sent."""
        self.producer.submit(SourceFinished(RequestId(f"source-{name}")))

    def received(self, name: str) -> ReceiveEnded:
        """The report to decode, waited for."""
        return self._outcome(self.consumer, ReceiveEnded, lambda outcome: outcome.request_id == name)

    def released(self, name: str) -> SourceReleased:
        """The report to prefill, waited for."""
        return self._outcome(self.producer, SourceReleased, lambda outcome: outcome.source_id == f"source-{name}")

    def check(self, name: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Wait until a request has arrived, and compare every byte of the consumer's cache: the request's blocks are those of
        the source, and nothing else has changed.

        Raises:
            AssertionError: it has not arrived, or there is a difference.
        """
        ended = self.received(name)
        assert ended.status is ReceiveStatus.RECEIVED, f"request {name} was not received: {ended.error}"
        released = self.released(name)
        assert released.num_streams == 1, f"source {name} was sent to {released.num_streams} consumers: {released.error}"
        theirs = list(self._slabs(self.producer, self._source, source))
        ours = list(self._slabs(self.consumer, self._target, target))
        for (layer, places), (_, destinations) in zip(theirs, ours, strict=True):
            memory, expected = self._target[layer][1], self._before[name][layer]
            for place, destination in zip(places, destinations, strict=True):
                expected[destination] = self._source[layer][1][place]
            found = memory[:]
            wrong = np.flatnonzero(found != expected)
            assert not len(wrong), f"request {name}, layer {layer}: {len(wrong)} bytes differ, the first at offset {wrong[0]}"

    @staticmethod
    def _slabs(
        endpoint: Endpoint, cache: list[tuple[CacheView, Memory]], blocks: Sequence[int]
    ) -> Iterator[tuple[int, list[slice]]]:
        """Per layer, where these blocks lie in its memory, plane by plane."""
        for idx, (layer, (view, _)) in enumerate(zip(endpoint.layout.layers, cache, strict=True)):
            starts = [
                (plane.base - view.region.address + block * plane.block_stride, plane.block_bytes)
                for plane in sorted(layer.planes, key=lambda plane: plane.content)
                for block in blocks
            ]
            yield idx, [slice(start, start + length) for start, length in starts]

    def _outcome(self, endpoint: Endpoint, kind: type[_Ended], wanted: Callable[[_Ended], bool]) -> _Ended:
        outcomes = self._outcomes.setdefault(id(endpoint), [])
        found: list[_Ended] = []

        def there() -> bool:
            endpoint.wait_outcome(0.02)
            outcomes.extend(endpoint.drain())
            assert endpoint.error is None, f"the submitter has stopped: {endpoint.error}"
            found[:] = [outcome for outcome in outcomes if isinstance(outcome, kind) and wanted(outcome)]
            return bool(found)

        self._wait_until(there, f"{kind.__name__} of a request")
        assert len(found) == 1, f"reported more than once: {found}"
        return found[0]

    def close(self) -> None:
        """Close both."""
        self.consumer.close()
        self.producer.close()
