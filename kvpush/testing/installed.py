# SPDX-License-Identifier: Apache-2.0
"""The contract suite on one installed plugin: what ``kvpush backends check`` collects. Not to be imported by tests."""

from __future__ import annotations

import pytest

from kvpush.backends.base import BackendPlugin, Probe
from kvpush.testing.check import Subject
from kvpush.testing.contract import BackendContract, EndpointContract, PluginContract, TransportContract
from kvpush.testing.fabric import Device, device_of

_LIGHT = frozenset({"test_the_card_is_complete", "test_probing_is_honest_and_repeatable"})
"""What can be checked wherever the plugin can be imported."""


def _subject(config: pytest.Config) -> Subject:
    subject = config.pluginmanager.get_plugin(Subject.PLUGIN_NAME)
    assert isinstance(subject, Subject), "run this with `kvpush backends check NAME`"
    return subject


@pytest.fixture(scope="session")
def probed(pytestconfig: pytest.Config) -> Probe:
    """What the plugin says of this host."""
    return _subject(pytestconfig).plugin.probe()


@pytest.fixture(scope="session")
def memory(pytestconfig: pytest.Config) -> Device | None:
    """Where the plugin's memory comes from; asked before any working half is made, as a device may start with its first use."""
    return device_of(_subject(pytestconfig).plugin)


class _Installed:
    """The plugin that was named."""

    @pytest.fixture
    def plugin(self, request: pytest.FixtureRequest) -> BackendPlugin:
        if request.function.__name__ not in _LIGHT:
            probe: Probe = request.getfixturevalue("probed")
            if not probe.ok:
                pytest.skip(f"can't run here: {'; '.join(probe.reasons)}")
            request.getfixturevalue("memory")
        return _subject(request.config).plugin

    @pytest.fixture
    def options(self, pytestconfig: pytest.Config) -> dict[str, object]:
        return dict(_subject(pytestconfig).options)

    @pytest.fixture
    def device(self, plugin: BackendPlugin, memory: Device | None) -> Device:
        if memory is None:
            devices = ", ".join(plugin.info.device_types)
            pytest.skip(f"serves {devices} and brings no memory to test with: give the plugin a test_device()")
        return memory


class TestBackend(_Installed, BackendContract):
    """Card, probe, options, layout, fences, digests."""


class TestTransport(_Installed, TransportContract):
    """Writes between two agents."""

    transport_pair = PluginContract.transport_pair


class TestEndpoint(_Installed, EndpointContract):
    """Whole requests."""
