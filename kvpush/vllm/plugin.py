# SPDX-License-Identifier: Apache-2.0
"""Entry point of group ``vllm.general_plugins``: makes ``--kv-transfer-config '{"kv_connector": "KVPushConnector"}'`` work.

vLLM calls it in the API server, the engine core and every worker, possibly several times.
"""

from __future__ import annotations

import logging

CONNECTOR_NAME = "KVPushConnector"
CONNECTOR_MODULE = "kvpush.vllm.connector"


def register() -> None:
    """Register the connector's name. Idempotent; imports nothing of kvpush that is heavy."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    _share_log_handlers()


def _share_log_handlers() -> None:
    """Let kvpush's log lines appear where and as vLLM's own do."""
    ours, theirs = logging.getLogger("kvpush"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
