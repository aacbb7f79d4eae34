# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: ``pytest_plugins = ["kvpush.testing.plugin"]`` in the top ``conftest.py``.

Failed asserts of the contract suite show their values, and there are fixtures for what isn't part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kvpush.testing.fabric import TransportPair, loopback_pair
from kvpush.testing.simulation import FakeClock, World

_REWRITTEN = ("kvpush.testing.contract", "kvpush.testing.endpoints")

pytest.register_assert_rewrite(*(name for name in _REWRITTEN if name not in sys.modules))


@pytest.fixture
def fake_clock() -> FakeClock:
    """Seconds that only move when told to."""
    return FakeClock()


@pytest.fixture
def two_agents() -> Iterator[TransportPair]:
    """Two connected agents of the loopback transport, with 1 MiB of host memory each; closed at the end."""
    pair = loopback_pair()
    yield pair
    pair.close()


@pytest.fixture
def world() -> World:
    """The real machines on a simulated link: one prefill, one decode instance, no faults yet."""
    return World()
