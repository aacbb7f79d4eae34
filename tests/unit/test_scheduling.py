# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvpush.core.scheduling import (
    AGING_S,
    Credit,
    Granularity,
    PostQueue,
    SchedulingPolicy,
    WriteRange,
    final_tokens,
    next_range,
)

BYTES = 100


def ask(
    posted: list[int],
    final: list[int],
    *,
    granularity: Granularity = "layer",
    num_tokens: int = 16,
    block_bytes: list[int] | None = None,
    **limits: int,
) -> WriteRange | None:
    return next_range(
        SchedulingPolicy(granularity, **limits),
        np.array(posted, np.int64),
        np.array(final, np.int64),
        num_tokens,
        4,
        np.array(block_bytes or [BYTES] * len(posted), np.int64),
    )


@pytest.mark.parametrize(("computed", "final"), [(0, 0), (3, 0), (4, 4), (9, 8), (13, 12), (14, 14), (99, 14)])
def test_only_whole_blocks_are_final_but_for_the_last(computed: int, final: int) -> None:
    assert final_tokens(computed, 14, 4) == final


def test_nothing_to_do() -> None:
    assert ask([4, 4], [4, 4]) is None


def test_layers_that_are_equally_far_go_together() -> None:
    assert ask([0, 0, 0], [8, 8, 4]) == WriteRange(0, 2, 0, 8, 400)
    assert ask([8, 8, 0], [8, 8, 4]) == WriteRange(2, 3, 0, 4, 100)
    assert ask([0, 4, 0], [8, 8, 8]) == WriteRange(0, 1, 0, 8, 200)


def test_chunk_waits_for_all_layers() -> None:
    assert ask([0, 0], [8, 4], granularity="chunk") is None
    assert ask([0, 0], [8, 8], granularity="chunk") == WriteRange(0, 2, 0, 8, 400)


def test_request_waits_for_the_whole_prompt() -> None:
    assert ask([0, 0], [12, 12], granularity="request") is None
    assert ask([0, 0], [16, 16], granularity="request") == WriteRange(0, 2, 0, 16, 800)


def test_auto_posts_early_only_what_is_worth_it() -> None:
    assert ask([0, 0], [8, 0], granularity="auto", min_write_bytes=201) is None
    assert ask([0, 0], [8, 0], granularity="auto", min_write_bytes=200) == WriteRange(0, 1, 0, 8, 200)
    assert ask([0, 0], [4, 4], granularity="auto", min_write_bytes=10**6) == WriteRange(0, 2, 0, 4, 200)


@pytest.mark.parametrize("granularity", ["chunk", "auto"])
def test_layers_that_nobody_wants_do_not_hold_up_chunks(granularity: Granularity) -> None:
    # The consumer holds layer 0 only; the others count as posted and final from the start.
    assert ask([0, 16], [8, 16], granularity=granularity, block_bytes=[BYTES, 0]) == WriteRange(0, 1, 0, 8, 200)


def test_long_ranges_are_cut_by_layers_then_by_blocks() -> None:
    assert ask([0, 0, 0], [8, 8, 8], max_write_bytes=450) == WriteRange(0, 2, 0, 8, 400)
    assert ask([0, 0, 0], [8, 8, 8], max_write_bytes=150) == WriteRange(0, 1, 0, 4, 100)
    assert ask([0, 0, 0], [8, 8, 8], max_write_bytes=1) == WriteRange(0, 1, 0, 4, 100)
    assert ask([0], [14], num_tokens=14, max_write_bytes=300) == WriteRange(0, 1, 0, 12, 300)
    assert ask([12], [14], num_tokens=14, max_write_bytes=300) == WriteRange(0, 1, 12, 14, 100)


@pytest.mark.parametrize("granularity", ["layer", "chunk", "request", "auto"])
@pytest.mark.parametrize("limit", [1, 150, 250, 10**6])
def test_a_final_prompt_is_always_posted_completely(granularity: Granularity, limit: int) -> None:
    posted, final = np.array([4, 0, 14, 0]), np.full(4, 14)
    sizes = np.array([BYTES, 2 * BYTES, 0, BYTES])
    total = 0
    for _ in range(100):
        piece = ask(
            posted.tolist(),
            final.tolist(),
            num_tokens=14,
            granularity=granularity,
            block_bytes=sizes.tolist(),
            max_write_bytes=limit,
        )
        if piece is None:
            break
        blocks = -(-piece.token_hi // 4) - piece.token_lo // 4
        assert piece.num_bytes == blocks * sizes[piece.layer_lo : piece.layer_hi].sum()
        assert (posted[piece.layer_lo : piece.layer_hi] == piece.token_lo).all()
        posted[piece.layer_lo : piece.layer_hi] = piece.token_hi
        total += piece.num_bytes
    assert (posted == 14).all()
    assert total == 3 * BYTES + 4 * 2 * BYTES + 4 * BYTES


@dataclass(eq=False)
class Stream:
    awaited: bool
    remaining_bytes: int
    waiting_since: float


def order(queue: PostQueue[Stream], streams: list[Stream], now: float) -> list[int]:
    taken = []
    while (stream := queue.first(now)) is not None:
        taken.append(streams.index(stream))
        queue.discard(stream)
    assert not len(queue)
    return taken


@pytest.mark.parametrize("num_peers", [1, 2, 6])
def test_urgency(num_peers: int) -> None:
    now = 10.0
    streams = [
        Stream(False, 10, now),
        Stream(True, 500, now),
        Stream(True, 50, now),
        Stream(False, 10**9, now - AGING_S - 0.1),
        Stream(False, 5, now),
        Stream(False, 10**9, now - AGING_S - 5),
    ]
    queue: PostQueue[Stream] = PostQueue()
    for idx, stream in enumerate(streams):
        queue.put(stream, idx % num_peers)
    assert order(queue, streams, now) == [5, 3, 2, 1, 4, 0]
    same = [Stream(True, 7, now) for _ in range(3)]
    for idx, stream in enumerate(same):
        queue.put(stream, idx % num_peers)
    assert order(queue, same, now) == [0, 1, 2]


def test_a_held_peer_waits_until_it_is_released_or_something_more_urgent_comes() -> None:
    now = 10.0
    streams = [Stream(True, 5, now), Stream(True, 6, now), Stream(True, 7, now), Stream(True, 1, now)]
    queue: PostQueue[Stream] = PostQueue()
    for stream, peer in zip(streams[:3], ("a", "a", "b"), strict=True):
        queue.put(stream, peer)
    queue.hold(streams[1], now)
    assert queue.first(now) is streams[0], "only the first of a peer holds it"
    queue.hold(streams[0], now)
    assert queue.first(now) is streams[2]
    queue.put(streams[1], "a")
    assert queue.first(now) is streams[2]
    queue.put(streams[3], "a")
    assert queue.first(now) is streams[3]
    queue.discard(streams[3])
    queue.hold(streams[0], now)
    queue.release("a")
    queue.release("a")
    assert queue.first(now) is streams[0]
    queue.hold(streams[0], now)
    queue.discard(streams[0])
    assert queue.first(now) is streams[1], "what held it has gone"


@pytest.mark.parametrize("seed", range(10))
def test_queue_against_a_plain_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue: PostQueue[Stream] = PostQueue()
    waiting: dict[Stream, None] = {}
    peers: dict[Stream, int] = {}
    now = 0.0
    for _ in range(300):
        now += float(rng.choice([0.0, 0.1]))
        stream = Stream(bool(rng.integers(2)), int(rng.integers(1, 5)), now)
        if waiting and rng.integers(2):
            stream = list(waiting)[int(rng.integers(len(waiting)))]
            if rng.integers(2):
                queue.discard(stream)
                del waiting[stream]
                continue
            stream.remaining_bytes, stream.waiting_since = int(rng.integers(1, 5)), now
        waiting.setdefault(stream)
        queue.put(stream, peers.setdefault(stream, int(rng.integers(3))))

        def rank(pair: tuple[int, Stream], now: float = now) -> tuple[float, float, int]:
            starved = now - pair[1].waiting_since > AGING_S
            return (0, pair[1].waiting_since, pair[0]) if starved else (2 - pair[1].awaited, pair[1].remaining_bytes, pair[0])

        assert queue.first(now) is min(enumerate(waiting), key=rank)[1]
        assert len(queue) == len(waiting)


def test_credit() -> None:
    credit = Credit(SchedulingPolicy(max_inflight_bytes_per_peer=100, max_inflight_bytes=150))
    assert credit.allows("a", 10**9), "one write is always allowed"
    credit.take("a", 80)
    assert not credit.allows("a", 30)
    assert credit.allows("a", 20)
    assert credit.allows("b", 70)
    assert not credit.allows("b", 80), "all peers together"
    credit.take("b", 70)
    credit.give("a", 80)
    assert credit.allows("a", 80)
    credit.give("b", 70)
    assert credit.total == 0
    assert not credit._per_peer
