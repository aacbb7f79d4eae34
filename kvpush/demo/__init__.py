# SPDX-License-Identifier: Apache-2.0
"""The demo: real vLLM instances, a router and streaming requests, measured and compared.

* `shim` and `supervisor` start processes and make sure that they end.
* `connectors` knows how each connector's instances are configured.
* `client` sends requests and times their answers; `stats` sums the times up.
* `runner` puts these together; `report` shows and writes what it found; `cli` is the command.
* `command` is the frame around it: folder, progress, exit status. `kvpush bench` and `kvpush chaos` have the same.

Nothing here is part of kvpush's data path. `supervisor`, `client` and `stats` know nothing of the demo.
"""
