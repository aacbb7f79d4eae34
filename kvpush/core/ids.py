# SPDX-License-Identifier: Apache-2.0
"""The identities of ``core``, as distinct types."""

from __future__ import annotations

from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

TransferId = NewType("TransferId", str)
"""Joins both halves of one transfer: the router's ``transfer_id``, or a request id that both legs share."""

RequestId = NewType("RequestId", str)
"""The engine's own id of a request; unique in one engine while the request lives."""

EngineId = NewType("EngineId", str)
AgentName = NewType("AgentName", str)
"""A transport endpoint's name, unique per process start."""

SessionId = NewType("SessionId", int)
"""One conversation of one consumer endpoint with one producer endpoint; a random 63-bit number that the consumer draws."""

Epoch = NewType("Epoch", int)
"""Counts the attempts of one request; on every message; an older one has no effect."""

WriteId = NewType("WriteId", int)

DigestId = NewType("DigestId", int)
"""One digest that a machine has asked for; counted by each machine for itself."""

UnpackId = NewType("UnpackId", int)
"""One unpacking of a staging slot; counted by the consumer's machine."""

BlockIds = npt.NDArray[np.int32]
"""Block ids of one request in one KV-cache group, in token order. Shape ``[num_blocks]``."""

BlockTable = tuple[BlockIds, ...]
"""One :data:`BlockIds` per KV-cache group."""


class PeerAddress(NamedTuple):
    """Where a producer's control endpoint listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Rect(NamedTuple):
    """A set of KV entries: layers x heads x tokens, each half-open ``[lo, hi)``.

    Layers count in the consumer's layout, heads over the whole model, tokens from the start of the prompt.
    """

    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int
    token_lo: int
    token_hi: int

    @property
    def volume(self) -> int:
        """Number of (layer, head, token) entries; 0 for an empty or inverted one."""
        return (
            max(0, self.layer_hi - self.layer_lo) * max(0, self.head_hi - self.head_lo) * max(0, self.token_hi - self.token_lo)
        )
