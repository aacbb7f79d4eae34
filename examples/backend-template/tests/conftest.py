# SPDX-License-Identifier: Apache-2.0
# Failed assertions of kvpush's contract suite show their values.
pytest_plugins = ["kvpush.testing.plugin"]
