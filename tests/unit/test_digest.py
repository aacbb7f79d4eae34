# SPDX-License-Identifier: Apache-2.0
"""The prompt's digest: what goes into it, and that it is hashed in small pieces."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
import pytest

from kvpush.core import digest
from kvpush.core.digest import prompt_digest


@pytest.mark.parametrize("count", [0, 1, 254, 255, 256, 257, 5000])
def test_pieces_make_the_digest_of_the_whole(count: int) -> None:
    tokens = [(7919 * idx) % 150_000 for idx in range(count)]
    whole = hashlib.blake2b(digest_size=digest.DIGEST_BYTES, person=b"kvpush-prompt")
    whole.update(count.to_bytes(8, "little") + np.array(tokens, "<i8").tobytes())
    for same in (tokens, np.array(tokens, np.int32), np.array(tokens, np.int64), np.asarray(array("q", tokens))):
        assert prompt_digest(same) == whole.digest()


def test_no_piece_is_so_long_that_the_interpreters_lock_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class State:
        def update(self, data: bytes) -> None:
            lengths.append(len(data))

        def digest(self) -> bytes:
            return b""

    monkeypatch.setattr(digest.hashlib, "blake2b", lambda **_: State())
    prompt_digest(list(range(10_000)))
    assert sum(lengths) == 8 + 80_000
    # CPython's HASHLIB_GIL_MINSIZE.
    assert max(lengths) < 2048


def test_extras_and_their_order_count() -> None:
    found = {prompt_digest([1, 2], extras) for extras in ((), ("a",), ("a", "b"), ("b", "a"), ("ab",), ("",))}
    assert len(found) == 6
