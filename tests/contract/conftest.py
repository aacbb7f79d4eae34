# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvpush.testing.contract")
