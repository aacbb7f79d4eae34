# SPDX-License-Identifier: Apache-2.0
"""A kvpush backend for host memory on one Linux machine, over cross-memory attach (process_vm_writev)."""
