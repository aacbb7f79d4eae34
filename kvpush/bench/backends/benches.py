# SPDX-License-Identifier: Apache-2.0
"""All benches by name."""

from __future__ import annotations

from kvpush.bench.backends import upkeep, writes
from kvpush.bench.backends.case import Bench

__all__ = ["BENCHES"]

BENCHES: dict[str, Bench] = {
    "write_bandwidth": writes.WRITE_BANDWIDTH,
    "layouts": writes.LAYOUTS,
    "staging": writes.STAGING,
    "post_cost": writes.POST_COST,
    "small_write_latency": writes.SMALL_WRITE,
    "register_memory": upkeep.REGISTER_MEMORY,
    "handshake": upkeep.HANDSHAKE,
    "device_fence": upkeep.DEVICE_FENCE,
    "visibility_fence": upkeep.VISIBILITY_FENCE,
    "digest": upkeep.DIGEST,
}
