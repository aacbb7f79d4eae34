# SPDX-License-Identifier: Apache-2.0
"""A producer and a consumer in two processes move a paged NumPy cache, without vLLM: ``python examples/two_processes.py``.

Needs ``pip install 'kvpush[nixl]'``. The consumer registers its blocks first, while the producer is still "computing" its four
layers chunk by chunk; each finished chunk is pushed at once.
"""

import hashlib
import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import numpy as np

from kvpush.core.digest import prompt_digest
from kvpush.core.events import ReceiveRequested, SourceAnnounced, SourceFinished, SourceProgressed
from kvpush.endpoint import Endpoint, numpy_views
from kvpush.settings import Settings

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 4, 64, 8, 16, 128
PROMPT = list(range(400))  # token ids; 25 blocks of 16 tokens


def open_cache(**roles: bool) -> tuple[dict[str, np.ndarray], Endpoint]:
    caches = {f"layer.{i}": np.zeros((BLOCKS, HEADS, BLOCK_TOKENS, CONTENT), np.float32) for i in range(LAYERS)}
    views = numpy_views(caches, order="BHNC", block_tokens=BLOCK_TOKENS, num_heads=HEADS)
    return caches, Endpoint.open(views, settings=Settings(control_port=0, backend="cpu"), **roles)


def outcome(endpoint: Endpoint) -> object:
    assert endpoint.wait_outcome(timeout_s=30), "nothing happened for 30 s"
    return endpoint.drain()[0]


def digest(caches: dict[str, np.ndarray], blocks: np.ndarray) -> str:
    return hashlib.sha256(b"".join(cache[blocks].tobytes() for cache in caches.values())).hexdigest()


def producer(pipe: Connection) -> None:
    caches, endpoint = open_cache(consume=False)
    pipe.send(endpoint.address)
    endpoint.submit(SourceAnnounced("prefill-1", ("transfer-1",), prompt_digest(PROMPT), len(PROMPT)))
    blocks = np.random.default_rng(0).permutation(BLOCKS)[:25].astype(np.int32)
    for chunk in range(0, 25, 5):
        for cache in caches.values():  # the forward pass of a chunk
            cache[blocks[chunk : chunk + 5]] = np.random.default_rng(chunk).random(cache[:5].shape, np.float32)
        time.sleep(0.02)
        new_blocks = (blocks[chunk : chunk + 5],)
        endpoint.submit(SourceProgressed("prefill-1", 0, LAYERS, (chunk + 5) * BLOCK_TOKENS, new_blocks))
    endpoint.submit(SourceFinished("prefill-1"))
    print("producer:", outcome(endpoint))
    pipe.send(digest(caches, blocks))
    endpoint.close()


if __name__ == "__main__":
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=producer, args=(there,))
    process.start()
    caches, endpoint = open_cache(produce=False)
    blocks = np.arange(25, dtype=np.int32)[::-1].copy()
    endpoint.submit(
        ReceiveRequested("decode-1", here.recv(), ("transfer-1",), prompt_digest(PROMPT), len(PROMPT), 0, (blocks,))
    )
    print("consumer:", outcome(endpoint))
    print("same bytes on both sides:", same := here.recv() == digest(caches, blocks))
    endpoint.close()
    process.join(timeout=30)
    raise SystemExit(0 if same and process.exitcode == 0 else 1)
