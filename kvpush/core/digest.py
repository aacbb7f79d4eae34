# SPDX-License-Identifier: Apache-2.0
"""The digest that guards every join: the KV of one prompt never reaches another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16


def prompt_digest(tokens: Sequence[int] | npt.NDArray[np.integer], extras: Iterable[str] = ()) -> bytes:
    """Digest of what determines a prompt's KV.

    Args:
        tokens: Token ids of the whole prompt, shape ``[num_tokens]``.
        extras: Whatever else changes the KV, such as a LoRA's name, a cache salt, or hashes of images; order matters.

    Returns:
        16 bytes of BLAKE2b over the little-endian 64-bit ids, their number, and the extras, each with its length.
    """
    ids = np.ascontiguousarray(tokens, "<i8")
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvpush-prompt")
    state.update(len(ids).to_bytes(8, "little"))
    state.update(ids.data)
    for extra in extras:
        data = extra.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()
