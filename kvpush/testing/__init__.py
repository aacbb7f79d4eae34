# SPDX-License-Identifier: Apache-2.0
"""The kit for authors of backends, transports and channels, and for whoever tests an engine against kvpush. Public.

============================  ==========================================================================================
:mod:`~.contract`             The contract suite, as pytest classes to subclass. ``PluginContract`` is all of it for a
                              backend plugin: ``BackendContract`` (card, probe, options, layout, fences, digests),
                              ``TransportContract`` (writes between two agents, byte by byte) and ``EndpointContract`` (whole
                              requests, from block registration to report). ``ChannelContract`` is for a control channel.
:mod:`~.plugin`               ``pytest_plugins = ["kvpush.testing.plugin"]``: asserts of the suite show their values; the
                              fixtures ``fake_clock``, ``two_agents`` and ``world``.
:mod:`~.fabric`               Two connected agents with memory (``TransportPair``), and ``Device``: where tests get memory
                              from. A plugin for other memory than the host's returns one from ``test_device()``.
:mod:`~.endpoints`            ``EndpointPair``: a producer and a consumer over one backend, with bytes compared.
:mod:`~.simulation`           The real machines on a simulated link and a fake clock, with every fault on demand, and the
                              invariants checked after each step: ``World``, ``SimulatedLink``, ``ToyMemory``, ``FakeClock``.
:mod:`~.check`                What ``kvpush backends check NAME`` does.
============================  ==========================================================================================

Fakes that ship with kvpush itself: :class:`kvpush.backends.loopback.LoopbackFabric` (a transport with latency, bandwidth and
faults on demand) and :class:`kvpush.channels.memory.MemoryNetwork` (a control channel likewise).

``contract``, ``plugin`` and ``installed`` need pytest; nothing else here does, and importing this package imports none of them.
"""
