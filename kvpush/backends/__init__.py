# SPDX-License-Identifier: Apache-2.0
"""Backends: one kind of memory each, found through the entry-point group ``kvpush.backends``."""

from kvpush.backends.hookspecs import hookimpl

__all__ = ["hookimpl"]
