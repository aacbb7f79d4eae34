# SPDX-License-Identifier: Apache-2.0
"""Parts of kvpush's own backends for backends of your own. Importing this imports no nixl and no framework.

* :class:`NixlTransport`: writes through a NIXL agent, for memory that NIXL knows how to register. :func:`import_problem` says
  why nixl can't be used here, for a probe.
* :class:`WrappedTransport`: a transport around another one, for checks of memory before it is registered, or for what a device
  needs around every call.
* :func:`host_layout`: says how caches lie, from the shapes and strides of their views alone. Not only for the host's memory.
* :class:`HostBackend`: a working half for memory that is coherent with the CPU: digests, no fences. It wants a card and a
  transport.
"""

from __future__ import annotations

from kvpush.backends._host_layout import HostBackend, host_layout
from kvpush.backends._nixl import NixlTransport, import_problem
from kvpush.backends._wrapped import WrappedTransport

__all__ = ["HostBackend", "NixlTransport", "WrappedTransport", "host_layout", "import_problem"]
