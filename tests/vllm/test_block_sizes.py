# SPDX-License-Identifier: Apache-2.0
"""Two of vLLM's schedulers with different ``--block-size``, and both halves of the connector over the loopback backend, into
real tensors: whatever decode reads is what prefill has written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from test_sides import CHUNK, LAYERS, PREFILL, Engine, Make, make, small_model

from kvpush.vllm import compat

torch = pytest.importorskip("torch")

__all__ = ["make", "small_model"]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

HEADS, HEAD_SIZE = 1, 32
DEADLINE_S = 120.0


def content(layer: int, position: int, token: int) -> Any:
    """What the model writes for a token: K, then V. Shape ``[HEADS, 2 * HEAD_SIZE]``."""
    return torch.arange(2 * HEADS * HEAD_SIZE, dtype=torch.float32).view(HEADS, -1) + 1000 * (layer + 1) + 7 * position + token


@dataclass
class Instance:
    """An engine with a real endpoint and a cache; its model writes :func:`content`, and checks what it finds.

    Args:
        engine: Made by ``Make``; its fake endpoint is replaced.
        block_tokens: vLLM's block size.
        tokens_first: Tokens come before heads in memory.
    """

    engine: Engine
    block_tokens: int
    tokens_first: bool
    caches: dict[str, Any] = field(default_factory=dict)
    computed: int = 0
    """Tokens that went through the model."""

    def __post_init__(self) -> None:
        shape = [self.engine.num_blocks, HEADS, self.block_tokens, 2 * HEAD_SIZE]
        if self.tokens_first:
            shape[1:3] = shape[2], shape[1]
        for name in LAYERS:
            cache = torch.full(shape, -1.0)
            self.caches[name] = cache.transpose(1, 2) if self.tokens_first else cache
        worker = self.engine.workers[0]
        worker.register_kv_caches(self.caches)
        run = self.engine._execute

        def execute(output: Any, connector: Any) -> Any:
            self.forward(output)
            return run(output, connector)

        self.engine._execute = execute  # type: ignore[method-assign]

    @property
    def endpoint(self) -> Any:
        return self.engine.worker.endpoint

    def forward(self, output: Any) -> None:
        """Check the KV that a step reads, and write what it computes."""
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[request_id]
            (blocks,) = self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)
            tokens = list(request.all_token_ids)
            stop = request.num_computed_tokens
            self.computed += count
            for idx, name in enumerate(LAYERS):
                for position in range(stop):
                    block, at = divmod(position, self.block_tokens)
                    place = self.caches[name][blocks[block], :, at]
                    if position >= stop - count:
                        place.copy_(content(idx, position, tokens[position]))
                    else:
                        assert torch.equal(place, content(idx, position, tokens[position])), (request_id, name, position)

    def run(self, *request_ids: str) -> None:
        """Step until these have ended."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(request_id in self.engine.ends for request_id in request_ids):
            assert time.monotonic() < deadline, "a request doesn't end"
            self.engine.step()

    def idle(self) -> None:
        """Step until nothing is left."""
        deadline = time.monotonic() + DEADLINE_S
        while self.engine.scheduler.requests or self.engine.scheduler.connector.has_pending_push_work():
            assert time.monotonic() < deadline, "something doesn't end"
            self.engine.step()
        self.engine.check_clean()


@pytest.fixture
def pair(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a prefill and a decode instance."""
    monkeypatch.setattr("kvpush.vllm.caches._tp_rank", lambda: 0)
    made: list[Instance] = []

    def pair(prefill_tokens: int, decode_tokens: int, *, tokens_first: bool) -> tuple[Instance, Instance]:
        for role, tokens in (("kv_producer", prefill_tokens), ("kv_consumer", decode_tokens)):
            engine = make(role=role, block_size=tokens, backend="loopback", control_port=0)
            made.append(Instance(engine, tokens, tokens_first and role == "kv_consumer"))
        return made[0], made[1]

    yield pair
    for instance in reversed(made):
        instance.engine.workers[0].shutdown()


def decode_params(prefill: Instance) -> dict[str, Any]:
    address = prefill.endpoint.address
    return {"do_remote_prefill": True, "remote_host": address.host, "remote_port": address.port, "transfer_id": "t"}


@pytest.mark.parametrize("tokens_first", [False, True], ids=["like-prefill", "tokens-first"])
@pytest.mark.parametrize(("prefill_tokens", "decode_tokens"), [(32, 16), (16, 32), (48, 32), (16, 16)])
def test_instances_with_different_block_sizes_pair_up(
    pair: Any, monkeypatch: pytest.MonkeyPatch, prefill_tokens: int, decode_tokens: int, tokens_first: bool
) -> None:
    monkeypatch.setattr(compat, "attention_tag", lambda config, spec: "")  # As on any platform but the CPU.
    prefill, decode = pair(prefill_tokens, decode_tokens, tokens_first=tokens_first)
    length, hit = 3 * CHUNK + 5, 3 * decode_tokens
    # Decode has the beginning already: up to where its own blocks end, not prefill's.
    known = decode.engine.add("known", hit, output=1)
    decode.run(known)
    before = decode.computed
    one = decode.engine.add("one", length, decode_params(prefill), prefix=hit)
    sent = prefill.engine.add("one", length, PREFILL, prefix=hit, output=1)
    decode.engine.step()
    prefill.run(sent)
    decode.run(one)
    assert decode.engine.worker.counters.received == 1
    assert decode.engine.worker.counters.tokens_received == length - hit
    assert decode.computed - before <= 3, "the prompt was not computed again"
    prefill.idle()
    decode.idle()


def test_blocks_of_vllm_s_cpu_attention_can_not_be_divided(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They are packed by the kernel: the handshake is refused, and decode computes the prompt."""
    prefill, decode = pair(32, 16, tokens_first=False)
    prefill.engine.add("one", 100, PREFILL, output=1)
    prefill.engine.step()
    one = decode.engine.add("one", 100, decode_params(prefill))
    decode.run(one)
    assert decode.computed >= 100
    assert decode.engine.worker.counters.received == 0
    assert "choose the same block size on both sides" in caplog.text
    assert "32 tokens/block" in caplog.text
    assert "16 tokens/block" in caplog.text
    decode.idle()
