# SPDX-License-Identifier: Apache-2.0
"""pluggy hook specifications for backends. These docstrings are the plugin author's manual.

A third party ships a backend like this::

    # pyproject.toml
    [project.entry-points."kvpush.backends"]
    mydevice = "my_package.kvpush_plugin"

    # my_package/kvpush_plugin.py
    from kvpush.backends import hookimpl

    @hookimpl
    def kvpush_backend():
        return MyPlugin()
"""

from __future__ import annotations

import pluggy

from kvpush.backends.base import BackendPlugin

PROJECT = "kvpush"
ENTRY_POINT_GROUP = "kvpush.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvpush_backend() -> BackendPlugin:  # type: ignore[empty-body]
    """Return this module's backend.

    Called once per process at discovery, also in processes that will never use the backend. Import nothing heavy at module
    level and do nothing here but construct the light plugin object. One module serves one backend.

    Returns:
        An object that satisfies :class:`kvpush.backends.base.BackendPlugin`.
    """
