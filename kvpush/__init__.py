# SPDX-License-Identifier: Apache-2.0
"""kvpush: push-based KV-cache transfer for disaggregated LLM serving."""

__version__ = "0.1.0.dev0"
