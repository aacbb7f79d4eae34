# SPDX-License-Identifier: Apache-2.0
"""What the backends over plain host memory share: the layout adapter, and a working half without fences, with digests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from kvpush.backends._host_copy import copy_rows
from kvpush.backends._host_digest import CLOSE_S, SCHEME, HostDigest, HostDigester
from kvpush.backends.base import BackendInfo, CacheView, VisibilityFence
from kvpush.core.ids import BlockTable
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.transport import Descriptors, Region, Transport
from kvpush.errors import BackendError, LayoutError

logger = logging.getLogger(__name__)

Split = Literal["none", "head", "token", "both"]
_PAGE = 4096


def host_layout(views: Sequence[CacheView], device_types: Sequence[str] = ("cpu",)) -> CacheLayout:
    """Say how caches in host memory lie, from shapes and strides alone.

    Args:
        views: One per layer, in forward order.
        device_types: What may stand in ``view.device_type``.

    Returns:
        Per layer one plane ``kv``, or ``k`` and ``v`` where the dimension ``2`` comes before ``B``::

            BHNC      [block 0: H N C][block 1: H N C] ...                      plane kv
            2BHNC     [block 0 of K][block 1 of K] ... [block 0 of V] ...       planes k and v

        With ``r`` kernel blocks to a manager block, ``r`` neighbours are one slab: format ``2xHNC`` for ``r`` = 2.
        The format names the dimensions from the outermost in *memory*, then ``:tag``.

    Raises:
        LayoutError: a view whose blocks are not contiguous slabs, or whose numbers contradict one another; says which and why.
    """
    if not views:
        raise LayoutError("the engine has no KV cache layers")
    layers = tuple(_layer(view, device_types) for view in views)
    layout = CacheLayout(layers=layers, num_groups=1 + max(view.group for view in views))
    layout.check()
    return layout


def _layer(view: CacheView, device_types: Sequence[str]) -> LayerLayout:
    if view.device_type not in device_types:
        raise _refuse(view, f"it lies on device type {view.device_type!r}, this backend serves {', '.join(device_types)}")
    order = view.order
    if not len(order) == len(view.shape) == len(view.strides):
        raise _refuse(view, f"order {order!r} doesn't name the dimensions of shape {view.shape}, strides {view.strides}")
    if len(set(order)) != len(order) or "B" not in order or not set(order) <= set("BHNC2"):
        raise _refuse(view, f"order {order!r} must have B once, and each of H, N, C, 2 at most once")
    if min(view.shape) < 1 or min(view.strides) < 0 or view.itemsize < 1 or view.num_blocks < 1:
        raise _refuse(view, f"shape {view.shape}, strides {view.strides}, {view.num_blocks} blocks can't be right")
    extent = dict(zip(order, view.shape, strict=True))
    stride = dict(zip(order, view.strides, strict=True))

    apart = "2" in order and order.index("2") < order.index("B")
    if "2" in order and extent["2"] != 2:
        raise _refuse(view, f"the K/V dimension has extent {extent['2']}")
    inner, kernel_bytes = _inner(view, [dim for dim in order if dim != "B" and not (dim == "2" and apart)], extent, stride)

    ratio, rest = divmod(extent["B"], view.num_blocks)
    if rest or ratio < 1:
        raise _refuse(view, f"{extent['B']} kernel blocks are no multiple of the engine's {view.num_blocks} blocks")
    if "N" in extent and extent["N"] * ratio != view.block_tokens:
        raise _refuse(view, f"{ratio} x {extent['N']} tokens are not the {view.block_tokens} tokens of a block")
    if "H" in extent and extent["H"] != view.num_heads:
        raise _refuse(view, f"{extent['H']} heads in the cache, {view.num_heads} announced")
    if ratio > 1 and stride["B"] != kernel_bytes:
        raise _refuse(
            view,
            f"a block is {ratio} kernel blocks of {kernel_bytes} bytes that lie {stride['B']} bytes apart; they must be "
            f"adjacent (set --block-size {extent.get('N', 'as the kernel has it')})",
        )
    if extent["B"] > 1 and stride["B"] < kernel_bytes:
        raise _refuse(view, f"blocks of {kernel_bytes} bytes overlap: they lie {stride['B']} bytes apart")

    slab = ratio * kernel_bytes
    step = max(ratio * stride["B"], slab)
    contents = (("k", 0), ("v", stride["2"])) if apart else (("kv", 0),)
    planes = tuple(Plane(content, view.address + offset, step, slab, view.device_id) for content, offset in contents)
    end = view.region.address + view.region.length
    for plane in planes:
        if plane.base < view.region.address or plane.base + step * (view.num_blocks - 1) + slab > end:
            raise _refuse(view, f"plane {plane.content} leaves its region of {view.region.length} bytes")
    text = f"{ratio}x{inner}" if ratio > 1 else inner
    return LayerLayout(
        name=view.name,
        group=view.group,
        num_blocks=view.num_blocks,
        block_tokens=view.block_tokens,
        head_lo=view.head_lo,
        num_heads=view.num_heads,
        dtype=view.dtype,
        format=f"{text}:{view.tag}" if view.tag else text,
        split=_split(inner, ratio, view.tag),
        planes=planes,
    )


def _inner(view: CacheView, dims: list[str], extent: dict[str, int], stride: dict[str, int]) -> tuple[str, int]:
    """The dimensions inside a block in memory order, and the block's bytes.

    Dimensions of extent 1 have no place in memory: they keep theirs in the order where that works, else come first.
    """
    real = [dim for dim in dims if extent[dim] > 1]
    in_memory = sorted(real, key=lambda dim: -stride[dim])
    names = dims if in_memory == real else [dim for dim in dims if extent[dim] == 1] + in_memory
    expected = view.itemsize
    for dim in reversed(in_memory):
        if stride[dim] != expected:
            raise _refuse(
                view,
                f"dimension {dim} (extent {extent[dim]}) has a stride of {stride[dim]} bytes, contiguous is {expected}",
            )
        expected *= extent[dim]
    return "".join(names) or "-", expected


def _split(inner: str, ratio: int, tag: str) -> Split:
    if tag or not inner.endswith("C"):
        return "none"
    if ratio > 1:
        return "token"
    return "head" if inner.lstrip("2").startswith("H") else "token"


def _refuse(view: CacheView, why: str) -> LayoutError:
    return LayoutError(f"layer {view.name!r} ({view.order}, shape {view.shape}, strides {view.strides}): {why}")


class CopiedRows:
    """A copy that has ended when it was begun; satisfies :class:`kvpush.backends.base.RunningCopy`."""

    def done(self) -> bool:
        """True."""
        return True


class HostBackend:
    """The working half of a backend over host memory: results are final when the call that made them returns, and written
    bytes are readable as soon as their write is complete. Satisfies :class:`kvpush.backends.base.Backend`.

    Args:
        info: The plugin's card.
        transport: The transport to use; closed by :meth:`close`.
    """

    def __init__(self, info: BackendInfo, transport: Transport) -> None:
        self._info = info
        self._transport = transport
        self._digester = HostDigester()
        self._regions: tuple[Region, ...] = ()

    @property
    def info(self) -> BackendInfo:
        return self._info

    @property
    def transport(self) -> Transport:
        return self._transport

    def describe(self, views: Sequence[CacheView]) -> CacheLayout:
        """See :func:`host_layout`."""
        layout = host_layout(views, self._info.device_types)
        self._regions = tuple(view.region for view in views)
        return layout

    def device_fence(self) -> object | None:
        """None: nothing runs behind the engine's back."""
        return None

    def fence_done(self, token: object) -> bool:
        """True: see :meth:`device_fence`."""
        return True

    def start_visibility_fence(self, regions: Sequence[Region]) -> VisibilityFence | None:
        """None: host memory is coherent."""
        return None

    @property
    def digest_scheme(self) -> str:
        """See :data:`kvpush.backends._host_digest.SCHEME`."""
        return SCHEME

    def start_digest(self, layers: Sequence[LayerLayout], blocks: BlockTable) -> HostDigest:
        """On a thread of its own, but for small ones. Holds the memory's owners until it has ended."""
        return self._digester.start(layers, blocks, self._regions)

    def staging_region(self, num_bytes: int) -> Region:
        """Host memory, in pages that are made when they are first written to."""
        memory = np.zeros(num_bytes + _PAGE, np.uint8)
        address = -(-memory.ctypes.data // _PAGE) * _PAGE
        return Region(address, num_bytes, keepalive=memory)

    def start_copy(self, src: Descriptors, dst: Descriptors) -> CopiedRows:
        """At once: see :func:`kvpush.backends._host_copy.copy_rows`."""
        try:
            copy_rows(src, dst)
        except ValueError as error:
            raise BackendError(str(error)) from error
        return CopiedRows()

    def close(self) -> None:
        """Stop digests and close the transport. Idempotent.

        A digest that does not stop keeps the owners of the memory that it reads, so that closing the transport takes nothing
        away under it; it is said in the log.
        """
        if not self._digester.close():
            logger.warning(
                "kvpush: a digest of the cache still runs %g s after it was told to stop; the cache stays until it ends",
                CLOSE_S,
            )
        self._transport.close()
