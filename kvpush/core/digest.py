# SPDX-License-Identifier: Apache-2.0
"""The digest that guards every join (the KV of one prompt never reaches another), and which transfers are verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16
_PIECE_BYTES = 2040
"""hashlib gives up the interpreter's lock for pieces of 2048 bytes and more, and an engine thread would get it back only when
another thread is done with it: milliseconds late, for microseconds of hashing."""


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
    content = ids.tobytes()
    for start in range(0, len(content), _PIECE_BYTES):
        state.update(content[start : start + _PIECE_BYTES])
    for extra in extras:
        data = extra.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def in_sample(key: str, share: float) -> bool:
    """Whether a transfer is among those that ``verify = sample`` checks.

    Args:
        key: Its first key: the same on every rank, and for a repeated registration.
        share: Share of the transfers, 0 to 1.
    """
    drawn = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"kvpush-sample").digest()
    return int.from_bytes(drawn, "little") < share * 2**64
