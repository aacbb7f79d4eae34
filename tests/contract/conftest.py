# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import pytest

if "kvpush.testing.contract" not in sys.modules:
    pytest.register_assert_rewrite("kvpush.testing.contract")
