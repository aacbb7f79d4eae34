# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: turns vLLM's hooks into events and outcomes back into vLLM's results. It decides nothing."""
