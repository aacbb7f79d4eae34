# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP front for prefill and decode instances of vLLM.

``create_app`` builds the aiohttp application, ``make_runner`` a runner for it, ``serve`` runs it to the end.
"""

from kvpush.router.app import create_app
from kvpush.router.config import (
    DEFAULT_CONTROL_PORT,
    Mode,
    OnPrefillFailure,
    PrefillTarget,
    RouterConfig,
    parse_prefill,
    parse_url,
)
from kvpush.router.server import make_runner, serve

__all__ = [
    "DEFAULT_CONTROL_PORT",
    "Mode",
    "OnPrefillFailure",
    "PrefillTarget",
    "RouterConfig",
    "create_app",
    "make_runner",
    "parse_prefill",
    "parse_url",
    "serve",
]
