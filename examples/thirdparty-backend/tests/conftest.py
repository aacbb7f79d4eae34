# SPDX-License-Identifier: Apache-2.0
import pytest

# So that failed assertions of kvpush's contract suite show their values.
pytest.register_assert_rewrite("kvpush.testing.contract")
