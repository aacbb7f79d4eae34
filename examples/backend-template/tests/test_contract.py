# SPDX-License-Identifier: Apache-2.0
"""What kvpush demands of every transport and backend, run on this one."""

from __future__ import annotations

import pytest
from kvpush.backends.base import BackendPlugin
from kvpush.testing.contract import PluginContract

from kvpush_example_cma.plugin import CmaPlugin


class TestCma(PluginContract):
    @pytest.fixture
    def plugin(self) -> BackendPlugin:
        return CmaPlugin()
