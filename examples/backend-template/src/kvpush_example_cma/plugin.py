# SPDX-License-Identifier: Apache-2.0
"""The plugin: a light half that is made at discovery, and the working half that it creates.

Nothing heavy is imported at module level: every process that lists backends imports this module. Comments that begin with
"Yours:" say what changes for a device of your own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from kvpush.backends import hookimpl
from kvpush.backends.base import BACKEND_API_VERSION, Backend, BackendInfo, CacheView, Capability, Probe, VisibilityFence
from kvpush.core.layout import CacheLayout, LayerLayout, Plane
from kvpush.core.transport import Region, Transport
from kvpush.errors import BackendError, ConfigError, LayoutError

INFO = BackendInfo(
    name="example-cma",
    # The version that this was written for: a kvpush with another one refuses the plugin by name instead of crashing in it.
    api_version=BACKEND_API_VERSION,
    # Yours: as torch names the device, such as "gizmo" of "gizmo:0".
    device_types=("cpu",),
    # Compared at the handshake: two sides that share no transport say so there.
    transports=("cma",),
    # Yours: what works, and nothing else; the contract suite tests each one that stands here. VISIBILITY_FENCE if written bytes
    # can't be read at once, DIGEST for the setting `verify`.
    capabilities=frozenset({Capability.LAYER_FENCE}),
    summary="Host memory of one machine, written with process_vm_writev (an example)",
    # Below every built-in backend: chosen only when named, or when nothing else can run. Yours: 10 or so.
    priority=-10,
)


class CmaPlugin:
    """The light half, made once per process at discovery."""

    @property
    def info(self) -> BackendInfo:
        return INFO

    def probe(self) -> Probe:
        # Never raises, is over within a second or two, leaves no thread and no device context. Each reason names what is
        # missing and what mends it. Yours: driver and version, a device, permission to use it; import the framework here.
        if sys.platform != "linux":
            return Probe(False, ("process_vm_writev exists on Linux only: use the loopback backend here",))
        from kvpush_example_cma.transport import self_test

        complaint = self_test()
        if complaint:
            return Probe(False, (f"process_vm_writev doesn't work here ({complaint}): allow it in the seccomp profile",))
        return Probe(True, details={"process_vm_writev": "works"})

    def create(self, agent_name: str, options: Mapping[str, object]) -> Backend:
        # The user's `backend_options`. An unknown one is refused: a typing error must not be ignored.
        if options:
            raise ConfigError(f"backend example-cma takes no options, not {', '.join(sorted(options))}")
        probe = self.probe()
        if not probe.ok:
            raise BackendError(probe.reasons[0])
        return CmaBackend(agent_name)

    # Yours: memory that isn't the host's comes from here in tests, so that `kvpush backends check` can run all of the suite:
    #
    #     def test_device(self) -> "Device":
    #         from my_package.testing import GizmoDevice  # a kvpush.testing.fabric.Device
    #
    #         return GizmoDevice()


class CmaBackend(Backend):
    """The working half, one per worker process. What belongs to capabilities that aren't declared comes from the base class."""

    def __init__(self, agent_name: str) -> None:
        from kvpush_example_cma.transport import CmaTransport

        # Yours: where NIXL can register your memory, a transport over NIXL instead; transport.py can then go.
        self._transport = CmaTransport(agent_name)

    @property
    def info(self) -> BackendInfo:
        return INFO

    @property
    def transport(self) -> Transport:
        return self._transport

    def describe(self, views: Sequence[CacheView]) -> CacheLayout:
        layout = CacheLayout(tuple(_layer(view) for view in views), 1 + max(view.group for view in views))
        layout.check()
        return layout

    def device_fence(self) -> object | None:
        # What a CPU has computed is final when the call that computed it has returned. Yours: record an event on the stream
        # that computes, and return it. This runs on the engine thread, in every layer: it must not wait.
        return None

    def fence_done(self, token: object) -> bool:
        # Yours: ask the event, don't wait for it.
        return True

    def start_visibility_fence(self, regions: Sequence[Region]) -> VisibilityFence | None:
        # Caches are coherent: a completed write can be read. Yours, where it can't: begin a read-back and
        # return what tells its end.
        return None

    def close(self) -> None:
        # May be called twice.
        self._transport.close()


def _layer(view: CacheView) -> LayerLayout:
    """One plane per layer: blocks at equal distances, each without a hole inside.

    ::

        address          + block stride
           |                  |
           [==== block 0 ====]....[==== block 1 ====]

    Believe the strides, not the name of a layout: engines give views that look alike and lie differently. What you can't serve,
    refuse by name; the requests are then computed locally.
    """
    if view.device_type != "cpu" or not view.order.startswith("B"):
        raise LayoutError(f"layer {view.name!r}: example-cma wants host memory with blocks first, not {view.order}")
    expected = view.itemsize
    for extent, stride in zip(reversed(view.shape[1:]), reversed(view.strides[1:]), strict=True):
        if stride != expected and extent != 1:
            raise LayoutError(f"layer {view.name!r}: a block is not contiguous (strides {view.strides}, shape {view.shape})")
        expected *= extent
    # The engine's block ids count manager blocks; each may be several kernel blocks, which then must touch.
    kernel_blocks, rest = divmod(view.shape[0], view.num_blocks)
    if rest or (kernel_blocks > 1 and view.strides[0] != expected):
        raise LayoutError(f"layer {view.name!r}: {view.shape[0]} kernel blocks don't make {view.num_blocks} manager blocks")
    plane = Plane("kv", view.address, view.strides[0] * kernel_blocks, expected * kernel_blocks)
    return LayerLayout(
        name=view.name,
        group=view.group,
        num_blocks=view.num_blocks,
        block_tokens=view.block_tokens,
        head_lo=view.head_lo,
        num_heads=view.num_heads,
        dtype=view.dtype,
        format=f"{view.order}{view.tag and ':' + view.tag}",
        # Blocks are copied whole. Where heads or tokens lie apart in memory, say so: peers that are sharded otherwise, or have
        # blocks of another size, can then be served.
        split="none",
        planes=(plane,),
    )


@hookimpl
def kvpush_backend() -> CmaPlugin:
    return CmaPlugin()
