# SPDX-License-Identifier: Apache-2.0
"""The connector's two halves in the hands of vLLM's real scheduler, block pool and worker mixin; only the endpoint is a fake.

vLLM's own asserts do the judging: reporting an id that it doesn't expect, or blocks that are still in use, ends the test.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    # torch and vLLM warn of themselves when they are imported.
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.forward_context import set_forward_context
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    from kvpush.core.events import (
        BlocksSafe,
        EngineEvent,
        Outcome,
        ReceiveAborted,
        ReceiveEnded,
        ReceiveRequested,
        ReceiveStatus,
        SourceAborted,
        SourceAnnounced,
        SourceFinished,
        SourcePreempted,
        SourceProgressed,
        SourceReleased,
        SourceStarted,
        StartAwaitCancelled,
        StartAwaited,
        TransferDeclined,
    )
    from kvpush.core.ids import PeerAddress, RequestId
    from kvpush.errors import InternalError, PeerLost, SubmitterClosed
    from kvpush.settings import Settings
    from kvpush.tiny_model import write_tiny_model
    from kvpush.vllm import compat
    from kvpush.vllm.connector import KVPushConnector
    from kvpush.vllm.metadata import KVPushMetadata, KVPushWorkerMetadata
    from kvpush.vllm.scheduler_side import SchedulerSide
    from kvpush.vllm.stats import COUNTERS
    from kvpush.vllm.step_cost import StepCost
    from kvpush.vllm.worker_side import WorkerSide

pytestmark = [
    pytest.mark.vllm,
    # vLLM's and torch's own, raised lazily.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

BLOCK = 16
CHUNK = 64
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
PEER = PeerAddress("127.0.0.1", 14579)
DECODE = {"do_remote_prefill": True, "remote_host": PEER.host, "remote_port": PEER.port, "transfer_id": "t"}
PREFILL = {"do_remote_decode": True, "transfer_id": "t"}


# --- the harness --------------------------------------------------------------------------------------------------------


class FakeEndpoint:
    """An endpoint whose outcomes the test decides."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.outcomes: list[Outcome] = []
        self.error: Exception | None = None
        self.closed = 0
        self.waits: list[float] = []
        self.worthwhile_bytes = 0
        self.restarts = 0
        self.submitter: Any = SimpleNamespace(
            counters=SimpleNamespace(bad_frames=0, cpu_s=0.0), channel_counts=dict, producer=None, consumer=None
        )

    def submit(self, event: EngineEvent, *, wake: bool = True) -> None:
        if self.error is not None:
            raise SubmitterClosed(str(self.error))
        self.events.append(event)

    def drain(self) -> list[Outcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def wait_outcome(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return bool(self.outcomes)

    def device_fence(self) -> object | None:
        return None

    def close(self, timeout_s: float = 5.0) -> bool:
        self.closed += 1
        return True

    def of(self, *kinds: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    def received(self, request_id: str, num_tokens: int = 1) -> None:
        self.outcomes.append(ReceiveEnded(RequestId(request_id), ReceiveStatus.RECEIVED, True, num_tokens))

    def failed(self, request_id: str, *, safe: bool = True) -> None:
        error = PeerLost("gone", story=("one line",))
        self.outcomes.append(ReceiveEnded(RequestId(request_id), ReceiveStatus.FAILED, safe, error=error))

    def cancelled(self, request_id: str) -> None:
        self.outcomes.append(ReceiveEnded(RequestId(request_id), ReceiveStatus.CANCELLED, True))

    def safe(self, request_id: str) -> None:
        self.outcomes.append(BlocksSafe(RequestId(request_id)))

    def released(self, source_id: str, streams: int = 1) -> None:
        error = None if streams else PeerLost("nobody came")
        self.outcomes.append(SourceReleased(RequestId(source_id), streams, 100 * streams, error))


@dataclass
class Engine:
    """One engine core: vLLM's scheduler, and as many worker connectors as there are ranks."""

    config: Any
    scheduler: Any
    workers: list[Any]
    endpoints: list[FakeEndpoint]
    num_blocks: int
    hasher: Any
    aggregator: Any
    reported: Counter[str] = field(default_factory=Counter)
    answers: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> FakeEndpoint:
        return self.endpoints[0]

    @property
    def side(self) -> SchedulerSide:
        side = self.scheduler.connector._scheduler
        assert isinstance(side, SchedulerSide)
        return side

    @property
    def worker(self) -> WorkerSide:
        side = self.workers[0]._worker
        assert isinstance(side, WorkerSide)
        return side

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def may_reset(self) -> bool:
        """vLLM's reset raises while blocks are held by anybody but running requests."""
        held = {request_id for request_id, request in self.scheduler.requests.items() if request not in self.scheduler.running}
        return not held and not self.side._quarantines

    def add(
        self, name: str, length: int, params: Any = None, *, output: int = 2, seed: int = 0, prefix: int = 0, **sampling: Any
    ) -> str:
        """Args: prefix: begins with the prompt of this length."""
        request_id = f"cmpl-{name}-0-{sum(name.encode()) & 0xFFFFFFFF:08x}"
        tokens: list[int] = []
        for part in (prefix, length - prefix):
            rng = random.Random(f"{seed}/{part}")
            tokens += [rng.randint(40, 200) for _ in range(part)]
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(
                max_tokens=output, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None, **sampling
            ),
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def execute(self, output: Any) -> Any:
        """What the model runner does, with the connector's part done by vLLM itself; ranks are put together."""
        outputs = [self._execute(output, worker) for worker in self.workers]
        whole = self.aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        found = whole.kv_connector_output
        if found is not None:
            for request_id in (*(found.finished_sending or ()), *(found.finished_recving or ())):
                self.reported[request_id] += 1
        return whole

    def _execute(self, output: Any, worker: Any) -> Any:
        meta = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        output.kv_connector_metadata = meta
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        worker.handle_preemptions(meta)
        if not output.total_num_scheduled_tokens:
            done = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
            return pickle.loads(pickle.dumps(done))  # As on its way from a worker; some outputs are shared constants.
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as found,
        ):
            for name in LAYERS:
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, None, None)
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            whole = request is not None and request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if whole else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: idx for idx, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=pickle.loads(pickle.dumps(found)),
        )

    def update(self, output: Any, done: Any) -> None:
        for outputs in self.scheduler.update_from_output(output, done).values():
            for one in outputs.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    assert one.request_id not in self.ends
                    self.ends[one.request_id] = str(one.finish_reason)
                    if one.kv_transfer_params:
                        assert one.kv_transfer_params["remote_request_id"] == one.request_id

    def step(self, times: int = 1) -> Any:
        output = None
        for _ in range(times):
            output = self.schedule()
            self.update(output, self.execute(output))
        return output

    def check_clean(self) -> None:
        """Nothing is left of anything, and nothing was said twice."""
        assert not self.scheduler.requests
        assert not self.scheduler.connector.has_pending_push_work()
        assert self.free_blocks == self.num_blocks - 1
        assert [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null] == []
        assert not [request_id for request_id, times in self.reported.items() if times != 1]
        side = self.side
        assert not side._legs
        assert not side._held
        assert side._num_pinned == 0
        assert not side._sources
        assert not side._delayed
        assert not side._receiving
        assert not side._failed
        assert not side._quarantines
        for connector in self.workers:
            worker = connector._worker
            assert not worker._receiving
            assert not worker._held
            assert not worker._sources
            assert not worker._ended_sources
            assert not worker._released_early
            assert not worker._quarantined
            assert connector.get_block_ids_with_load_errors() == set()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "tiny"
    write_tiny_model(path, layers=2, hidden=64, heads=2, kv_heads=1, seed=1, dtype="float32", max_position_embeddings=2048)
    return path


class Make:
    """Makes engines."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def __call__(
        self, *, role: str = "kv_both", policy: str = "recompute", num_blocks: int = 64, ranks: int = 1, caching: bool = True,
        max_seqs: int = 8, block_size: int = BLOCK, **extra: Any,
    ) -> Engine:  # fmt: skip
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_seqs,
                max_num_batched_tokens=CHUNK,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            model_config=ModelConfig(model=str(self._model), dtype="float32", skip_tokenizer_init=True, max_model_len=1024),
            cache_config=cache,
            parallel_config=ParallelConfig(),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVPushConnector",
                kv_connector_module_path="kvpush.vllm.connector",
                kv_role=role,
                engine_id="engine-1",
                kv_load_failure_policy=policy,
                kv_connector_extra_config={"recompute_below_tokens": 0, **extra},
            ),
        )
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
        caches = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)]
        )
        cache.num_gpu_blocks = num_blocks
        scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
        )
        endpoints = [FakeEndpoint() for _ in range(ranks)]
        workers = []
        for endpoint in endpoints:
            worker = KVPushConnector(config, KVConnectorRole.WORKER, caches)
            worker._worker = WorkerSide(
                endpoint,  # type: ignore[arg-type]
                list(LAYERS),
                layer_events=True,
                empty_step_wait_s=0.001,
                failures_by_request=compat.FAILURES_BY_REQUEST,
                token_bytes=[100] * len(LAYERS),
            )
            workers.append(worker)
        hasher = get_request_block_hasher(block_size, sha256)
        return Engine(config, scheduler, workers, endpoints, num_blocks, hasher, KVOutputAggregator(ranks))


@pytest.fixture
def make(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    init_none_hash(sha256)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    return Make(small_model)


# --- decode: receives ---------------------------------------------------------------------------------------------------


def test_a_receive_from_first_to_last(make: Make) -> None:
    engine = make(role="kv_consumer")
    one = engine.add("one", 40, DECODE)
    engine.step()
    (event,) = engine.endpoint.of(ReceiveRequested)
    assert (event.request_id, event.peer, event.num_tokens, event.token_lo) == (one, PEER, 40, 0)
    assert event.keys == ("t:t",)
    assert [len(group) for group in event.blocks] == [3]
    engine.step(3)
    assert one not in engine.answers
    engine.endpoint.received(one, 40)
    engine.step(4)
    assert engine.answers[one] == [7, 7]
    assert engine.reported == {one: 1}
    assert engine.worker.counters.received == 1
    assert engine.worker.counters.tokens_received == 40
    engine.check_clean()


def test_only_what_the_prefix_cache_lacks_is_asked_for(make: Make) -> None:
    engine = make(role="kv_consumer")
    engine.add("first", 32, output=1)
    engine.step(3)
    one = engine.add("one", 48, DECODE, prefix=32)
    engine.step()
    (event,) = engine.endpoint.of(ReceiveRequested)
    assert event.token_lo == 32
    assert [len(group) for group in event.blocks] == [1]
    engine.endpoint.received(one, 16)
    engine.step(3)
    engine.check_clean()


@pytest.mark.parametrize("length", [3 * BLOCK, 3 * BLOCK + 1, 4 * BLOCK - 1], ids=["whole-blocks", "and-a-token", "and-most"])
@pytest.mark.parametrize("threshold", [0, BLOCK])
def test_a_full_local_hit_asks_for_nothing(make: Make, length: int, threshold: int) -> None:
    """vLLM never takes a prompt's last block from its cache, so that it has something to compute: it is there all the same.
    What lies beyond the last full block can't be cached; a threshold of a block's size covers it."""
    engine = make(role="kv_consumer", recompute_below_tokens=threshold)
    engine.add("first", length, output=1)
    engine.step(4)
    one = engine.add("one", length, DECODE)
    output = engine.step()
    if length % BLOCK and not threshold:
        assert [event.token_lo for event in engine.endpoint.of(ReceiveRequested)] == [3 * BLOCK]
        engine.endpoint.received(one)
    else:
        assert engine.endpoint.of(ReceiveRequested) == []
        assert 0 < output.num_scheduled_tokens[one] <= BLOCK
        assert len(engine.endpoint.of(TransferDeclined)) == 1
    engine.step(4)
    assert engine.ends[one] == "length"
    engine.check_clean()


def test_a_short_rest_is_computed_here_by_default() -> None:
    assert Settings().recompute_below_tokens == 32


@pytest.mark.parametrize("cached", [0, 2 * BLOCK], ids=["nothing-cached", "prefix-cached"])
@pytest.mark.parametrize(("missing", "computed_here"), [(39, True), (40, False), (41, False)])
def test_the_threshold_counts_what_is_not_cached(make: Make, cached: int, missing: int, computed_here: bool) -> None:
    engine = make(role="kv_consumer", recompute_below_tokens=40)
    if cached:
        engine.add("first", cached, output=1)
        engine.step(3)
    one = engine.add("one", cached + missing, DECODE, prefix=cached)
    engine.step()
    if computed_here:
        assert engine.endpoint.of(ReceiveRequested) == []
        (declined,) = engine.endpoint.of(TransferDeclined)
        assert declined.keys == ("t:t",)
    else:
        (event,) = engine.endpoint.of(ReceiveRequested)
        assert (event.token_lo, event.num_tokens) == (cached, cached + missing)
        assert engine.endpoint.of(TransferDeclined) == []
        engine.endpoint.received(one)
    engine.step(4)
    assert engine.ends[one] == "length"
    engine.check_clean()


def test_a_second_look_up_before_blocks_are_free_changes_nothing(make: Make) -> None:
    """vLLM asks again in every step in which the request can't be admitted."""
    engine = make(role="kv_consumer", num_blocks=8)
    first = engine.add("first", 80, output=12)
    engine.step(2)
    one = engine.add("one", 100, DECODE, seed=1)
    engine.step(4)
    assert engine.endpoint.of(ReceiveRequested) == []
    assert engine.endpoint.of(TransferDeclined) == []
    engine.step(12)
    assert engine.ends[first]
    assert len(engine.endpoint.of(ReceiveRequested)) == 1
    engine.endpoint.received(one)
    engine.step(4)
    engine.check_clean()


ENDINGS = ["received", "failed", "unsafe", "cancelled"]


def end_receive(endpoint: FakeEndpoint, request_id: str, ending: str) -> None:
    if ending == "received":
        endpoint.received(request_id)
    elif ending == "cancelled":
        endpoint.cancelled(request_id)
    else:
        endpoint.failed(request_id, safe=ending == "failed")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("when", ["before-the-worker-knows", "with-the-step", "in-flight", "same-moment", "after"])
def test_abort_and_end_in_any_order_are_reported_once(make: Make, when: str, ending: str, policy: str) -> None:
    engine = make(role="kv_consumer", policy=policy)
    one = engine.add("one", 40, DECODE)
    if when == "before-the-worker-knows":
        # Allocated, and gone before the step's metadata is made: as with 0.33's late allocation.
        output = engine.schedule()
        engine.abort(one)
        engine.update(output, engine.execute(output))
        end_receive(engine.endpoint, one, ending)
        engine.step(2)
    elif when == "with-the-step":
        output = engine.schedule()
        done = engine.execute(output)
        engine.abort(one)
        engine.update(output, done)
        end_receive(engine.endpoint, one, ending)
        engine.step(2)
    elif when == "in-flight":
        engine.step(2)
        engine.abort(one)
        engine.step()
        end_receive(engine.endpoint, one, ending)
        engine.step()
    elif when == "same-moment":
        engine.step()
        output = engine.schedule()
        end_receive(engine.endpoint, one, ending)
        done = engine.execute(output)
        engine.abort(one)
        engine.update(output, done)
    else:
        engine.step()
        end_receive(engine.endpoint, one, ending)
        engine.step()
        engine.abort(one)
    engine.step(3)
    if ending == "unsafe":
        engine.endpoint.safe(one)
        engine.step(2)
    assert engine.reported[one] == 1
    assert len(engine.endpoint.of(ReceiveRequested)) == 1
    if when in ("before-the-worker-knows", "with-the-step", "in-flight"):
        assert [event.request_id for event in engine.endpoint.of(ReceiveAborted)] == [one]
    engine.check_clean()


@pytest.mark.parametrize("abort", [False, True])
def test_blocks_that_are_handed_over_late(make: Make, abort: bool) -> None:
    """vLLM 0.33 may put ``update_state_after_alloc`` off until steps in flight have ended; older ones never do. A request
    that is aborted meanwhile has never been ours: it is declined, and never reported."""
    engine = make(role="kv_both", caching=False)
    engine.scheduler.defer_block_free = engine.scheduler.defer_async_loads = True
    late = hasattr(engine.scheduler, "deferred_loads")
    first = engine.add("first", 20, output=6, seed=1)
    before = engine.schedule()
    one = engine.add("one", 40, DECODE)
    output = engine.schedule()
    assert len(output.kv_connector_metadata.receives) == (not late)
    if abort:
        engine.abort(one)
    engine.update(before, engine.execute(before))
    engine.update(output, engine.execute(output))
    engine.step(2)
    asked = engine.endpoint.of(ReceiveRequested)
    if abort and late:
        assert asked == []
        assert len(engine.endpoint.of(TransferDeclined)) == 1
    else:
        assert [event.request_id for event in asked] == [one]
        assert len(asked[0].blocks[0]) == 3
        if abort:
            engine.endpoint.cancelled(one)
        else:
            engine.endpoint.received(one, 40)
    engine.step(8)
    assert engine.ends[first] == "length"
    assert (one in engine.ends) != abort
    assert engine.reported[one] == (not (abort and late))
    engine.check_clean()


@pytest.mark.parametrize("caching", [True, False])
def test_a_failed_receive_is_computed_here(make: Make, caching: bool) -> None:
    engine = make(role="kv_consumer", caching=caching)
    one = engine.add("one", 100, DECODE)
    engine.step()
    engine.endpoint.failed(one)
    engine.step(6)
    assert engine.answers[one] == [7, 7]
    assert len(engine.endpoint.of(ReceiveRequested)) == 1, "it must not be tried again"
    assert engine.endpoint.of(TransferDeclined) == [], "the producer knows that it failed"
    assert engine.worker.counters.failed == 1
    engine.check_clean()


def test_a_failed_receive_behind_a_prefix_hit_is_computed_here(make: Make) -> None:
    engine = make(role="kv_consumer")
    engine.add("first", 48, output=1)
    engine.step(3)
    one = engine.add("one", 48, DECODE)
    engine.step()
    engine.endpoint.failed(one)
    output = engine.schedule()
    engine.update(output, engine.execute(output))
    engine.step(4)
    assert engine.answers[one] == [7, 7]
    engine.check_clean()


def test_a_failed_receive_fails_its_request_where_that_is_wanted(make: Make) -> None:
    engine = make(role="kv_consumer", policy="fail")
    one, other = engine.add("one", 40, DECODE), engine.add("other", 30, seed=5)
    engine.step()
    engine.endpoint.failed(one)
    engine.step(4)
    assert engine.ends[one] == "error"
    assert engine.answers[other] == [7, 7]
    engine.check_clean()


@pytest.mark.parametrize("after_alloc", [True, False])
def test_a_request_aborted_before_it_has_blocks_is_declined(make: Make, after_alloc: bool) -> None:
    engine = make(role="kv_consumer", max_seqs=1)
    if after_alloc:
        engine.add("first", 16, output=8, seed=3)
        engine.step()
    one = engine.add("one", 40, DECODE)
    if after_alloc:
        engine.step()
    assert engine.endpoint.of(ReceiveRequested) == []
    engine.abort(one)
    assert engine.scheduler.connector.has_pending_push_work() or after_alloc
    engine.step(10)
    (declined,) = engine.endpoint.of(TransferDeclined)
    assert (declined.peer, declined.keys) == (PEER, ("t:t",))
    assert engine.reported[one] == 0
    engine.check_clean()


@pytest.mark.parametrize("why", ["cached", "too-short", "prompt-logprobs"])
def test_a_request_that_computes_here_is_declined_once(make: Make, why: str) -> None:
    engine = make(role="kv_consumer", recompute_below_tokens=17 if why != "prompt-logprobs" else 0)
    if why == "cached":
        engine.add("first", 48, output=1)
        engine.step(3)
        one = engine.add("one", 48, DECODE)
    elif why == "too-short":
        one = engine.add("one", 10, DECODE)
    else:
        one = engine.add("one", 40, DECODE, prompt_logprobs=1)
    # Asked by hand as well: vLLM from 0.31 on doesn't listen where prompt_logprobs are wanted.
    hit = 32 if why == "cached" else 0
    assert engine.side.matched_tokens(engine.scheduler.requests[one], hit) == (0, False)
    output = engine.step()
    assert output.num_scheduled_tokens[one] > 0
    engine.step(4)
    assert len(engine.endpoint.of(TransferDeclined)) == 1
    assert engine.endpoint.of(ReceiveRequested) == []
    assert engine.ends[one] == "length"
    engine.check_clean()


def test_a_received_request_that_is_preempted_computes_again(make: Make) -> None:
    engine = make(role="kv_consumer", num_blocks=11, caching=False)
    first, one = engine.add("first", 64, output=40, seed=9), engine.add("one", 64, DECODE, output=40)
    engine.step(2)
    engine.endpoint.received(one)
    engine.step(200)
    assert engine.ends == {first: "length", one: "length"}
    assert len(engine.answers[one]) == 40
    assert len(engine.endpoint.of(ReceiveRequested)) == 1
    engine.check_clean()


@pytest.mark.parametrize("params", [{"do_remote_prefill": "yes"}, {"do_remote_prefill": True}, "text", ["list"], {"x": 1}])
def test_nonsense_is_computed_here(make: Make, params: Any) -> None:
    engine = make()
    one = engine.add("one", 40)
    engine.scheduler.requests[one].kv_transfer_params = params
    engine.step(4)
    assert engine.ends[one] == "length"
    assert engine.endpoint.events == []
    engine.check_clean()


@pytest.mark.parametrize(("role", "params"), [("kv_producer", DECODE), ("kv_consumer", PREFILL)])
def test_a_leg_that_the_role_does_not_serve_is_computed_here(make: Make, role: str, params: dict[str, Any]) -> None:
    engine = make(role=role)
    one = engine.add("one", 40, params)
    engine.step(4)
    assert engine.ends[one] == "length"
    assert engine.endpoint.events == []
    engine.check_clean()


def test_outcomes_that_nobody_waits_for_are_counted_and_ignored(make: Make) -> None:
    engine = make()
    one = engine.add("one", 40, DECODE)
    engine.step()
    engine.endpoint.received("who")
    engine.endpoint.failed("who")
    engine.endpoint.safe("who")
    engine.endpoint.safe(one)
    engine.endpoint.released("who")
    engine.endpoint.received(one)
    engine.endpoint.received(one)
    engine.endpoint.failed(one, safe=False)
    engine.step(4)
    engine.endpoint.received(one)
    engine.step()
    assert engine.reported == {one: 1}
    assert engine.worker.counters.surprises == 8
    engine.check_clean()


# --- quarantine ---------------------------------------------------------------------------------------------------------


def test_suspect_blocks_are_out_of_use_until_they_are_safe(make: Make) -> None:
    """Whatever this vLLM does with a failed request, nobody is given its blocks while a write may still land in them."""
    engine = make(role="kv_consumer", num_blocks=16, caching=False)
    one = engine.add("one", 64, DECODE)
    engine.step()
    (event,) = engine.endpoint.of(ReceiveRequested)
    suspect = {int(block) for block in event.blocks[0]}
    engine.endpoint.failed(one, safe=False)
    engine.step()
    assert engine.scheduler.connector.has_pending_push_work() or one in engine.scheduler.requests
    for name in range(6):
        engine.add(f"other{name}", 40, output=3, seed=20 + name)
    for _ in range(30):
        engine.step()
        held = set(engine.scheduler.kv_cache_manager.get_block_ids(one)[0]) if one in engine.scheduler.requests else set()
        computing = any(request.request_id == one for request in engine.scheduler.running)
        assert not (computing and held & suspect)
        for request_id in engine.scheduler.requests:
            if request_id != one:
                assert not suspect & set(engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0])
        assert not [block for block in suspect if not engine.pool.blocks[block].ref_cnt]
    assert engine.worker.counters.quarantined == 1
    if compat.FAILURES_BY_REQUEST:
        assert engine.ends[one] == "length", "the request itself needn't wait"
        assert engine.side.counters.quarantined_blocks == 4
        assert engine.free_blocks == engine.num_blocks - 1 - len(suspect)
    engine.endpoint.safe(one)
    engine.step(6)
    assert engine.ends[one] == "length"
    engine.check_clean()


def test_suspect_blocks_of_a_request_that_is_to_fail(make: Make) -> None:
    engine = make(role="kv_consumer", policy="fail", num_blocks=16)
    one = engine.add("one", 64, DECODE)
    engine.step()
    engine.endpoint.failed(one, safe=False)
    engine.step(3)
    assert engine.free_blocks == engine.num_blocks - 1 - 4
    engine.endpoint.safe(one)
    engine.step(2)
    assert engine.ends[one] == "error"
    engine.check_clean()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("first_is_safe_early", [True, False])
def test_two_ranks_in_quarantine(make: Make, order: tuple[int, int], first_is_safe_early: bool) -> None:
    engine = make(role="kv_consumer", ranks=2, num_blocks=16)
    one = engine.add("one", 64, DECODE)
    engine.step()
    first, second = (engine.endpoints[idx] for idx in order)
    first.failed(one, safe=False)
    engine.step(2)
    if first_is_safe_early:
        first.safe(one)
        engine.step(2)
    second.failed(one, safe=False)
    engine.step(5)
    if compat.FAILURES_BY_REQUEST:
        assert engine.ends[one] == "length"
        assert engine.free_blocks < engine.num_blocks - 1
    second.safe(one)
    engine.step(2)
    if not first_is_safe_early:
        first.safe(one)
    engine.step(6)
    assert engine.ends[one] == "length"
    engine.check_clean()


@pytest.mark.parametrize(
    "endings", [("received", "failed"), ("failed", "received"), ("unsafe", "received"), ("received", "unsafe")]
)
def test_one_rank_of_two_fails(make: Make, endings: tuple[str, str]) -> None:
    engine = make(role="kv_consumer", ranks=2)
    one = engine.add("one", 64, DECODE)
    engine.step()
    for endpoint, ending in zip(engine.endpoints, endings, strict=True):
        end_receive(endpoint, one, ending)
        engine.step(2)
    for endpoint, ending in zip(engine.endpoints, endings, strict=True):
        if ending == "unsafe":
            endpoint.safe(one)
    engine.step(6)
    assert engine.answers[one] == [7, 7]
    assert [endpoint.of(ReceiveRequested)[0].token_lo for endpoint in engine.endpoints] == [0, 0]
    engine.check_clean()


def test_pins_come_and_go_in_a_real_pool(make: Make) -> None:
    """The scheduler side alone, told by hand: twice unsafe is one pin, and safe means safe on every rank."""
    engine = make(num_blocks=16, caching=False)
    side, pool = engine.side, engine.pool
    assert side.block_pool is pool
    one = engine.add("one", 40, DECODE)
    engine.schedule()
    blocks = engine.scheduler.kv_cache_manager.get_block_ids(one)[0]

    def told(**meta: dict[str, int]) -> None:
        side.on_output(KVConnectorOutput(kv_connector_worker_meta=KVPushWorkerMetadata(**meta)))

    told(unsafe={one: 1})
    told(unsafe={one: 1})
    assert [pool.blocks[block].ref_cnt for block in blocks] == [2, 2, 2]
    assert side.has_pending_work()
    told(safe={one: 1})
    assert [pool.blocks[block].ref_cnt for block in blocks] == [2, 2, 2]
    told(safe={one: 1})
    assert [pool.blocks[block].ref_cnt for block in blocks] == [1, 1, 1]
    told(safe={one: 1})
    told(unsafe={}, safe={"who": 2})
    assert [pool.blocks[block].ref_cnt for block in blocks] == [1, 1, 1]


# --- prefill: sources ---------------------------------------------------------------------------------------------------


def test_a_source_from_first_to_last(make: Make) -> None:
    engine = make(role="kv_producer")
    one = engine.add("one", 100, PREFILL, output=1)
    engine.step(3)
    kinds = [type(event) for event in engine.endpoint.events]
    assert kinds == [SourceAnnounced, *[SourceProgressed] * 4, SourceFinished]
    progress = engine.endpoint.of(SourceProgressed)
    assert [(event.layer_lo, event.layer_hi, event.token_hi) for event in progress] == [
        (0, 1, 64), (1, 2, 64), (0, 1, 100), (1, 2, 100),
    ]  # fmt: skip
    table = np.concatenate([event.new_blocks[0] for event in progress if event.new_blocks is not None])
    assert len(table) == 7
    assert [event.new_blocks is None for event in progress] == [False, True, False, True]
    assert engine.ends[one] == "length"
    assert one in engine.scheduler.requests, "its blocks are kept"
    assert [pool_block.ref_cnt for pool_block in (engine.pool.blocks[int(block)] for block in table)] == [1] * 7
    engine.endpoint.released(one)
    engine.step()
    assert engine.worker.counters.sent == 1
    engine.check_clean()


def test_tokens_that_decode_here_are_not_pushed(make: Make) -> None:
    engine = make(role="kv_producer")
    one = engine.add("one", 20, PREFILL, output=30)
    engine.step(32)
    assert [event.token_hi for event in engine.endpoint.of(SourceProgressed)] == [20, 20]
    assert len(engine.endpoint.of(SourceFinished)) == 1
    engine.endpoint.released(one)
    engine.step()
    engine.check_clean()


def test_a_prefix_that_is_cached_here_is_pushed_all_the_same(make: Make) -> None:
    engine = make(role="kv_producer")
    engine.add("first", 100, output=1)
    engine.step(3)
    one = engine.add("one", 100, PREFILL, output=1)
    engine.step(2)
    progress = engine.endpoint.of(SourceProgressed)
    assert [event.token_hi for event in progress] == [100, 100]
    assert len(progress[0].new_blocks[0]) == 7
    engine.endpoint.released(one)
    engine.step()
    engine.check_clean()


@pytest.mark.parametrize("streams", [0, 1])
@pytest.mark.parametrize("when", ["unseen", "announced", "half-computed", "computed", "decoding"])
def test_a_source_that_is_aborted_is_reported_once_or_never(make: Make, when: str, streams: int) -> None:
    engine = make(role="kv_producer", max_seqs=1)
    engine.add("first", 16, output=4, seed=2)
    engine.step()
    one = engine.add("one", 100, PREFILL, output=50, seed=3)
    engine.step({"unseen": 0, "announced": 1, "half-computed": 4, "computed": 5, "decoding": 9}[when])
    engine.abort(one)
    engine.step(2)
    known = engine.endpoint.of(SourceAborted, SourceFinished)
    if when == "unseen":
        assert engine.endpoint.of(SourceAnnounced) == []
        assert known == []
    else:
        assert len(known) == 1
        assert isinstance(known[0], SourceAborted)
        assert "FINISHED_ABORTED" in known[0].reason
        engine.endpoint.released(one, streams)
    engine.step(6)
    assert engine.reported[one] == (when != "unseen")
    engine.check_clean()


def test_preemption_voids_what_was_pushed_and_starts_again(make: Make) -> None:
    engine = make(role="kv_producer", num_blocks=11, caching=False)
    first, one = engine.add("first", 60, output=60, seed=9), engine.add("one", 60, PREFILL, output=60)
    engine.step(300)
    assert engine.ends[first] == "length"
    preempted = engine.endpoint.of(SourcePreempted)
    assert preempted, "the pool is too small for both"
    # After each preemption the whole table comes again.
    tables: list[list[int]] = [[]]
    for event in engine.endpoint.events:
        if isinstance(event, SourcePreempted):
            tables.append([])
        elif isinstance(event, SourceProgressed) and event.new_blocks is not None:
            tables[-1].extend(int(block) for block in event.new_blocks[0])
    assert {len(table) for table in tables} == {4}
    assert len(engine.endpoint.of(SourceAnnounced)) == 1
    engine.endpoint.released(one)
    engine.step(2)
    assert engine.ends[one] == "length"
    engine.check_clean()


def test_a_source_that_ends_without_its_blocks_is_aborted(make: Make) -> None:
    """With async scheduling a request can be preempted and end in one step: what was computed is gone."""
    engine = make(role="kv_producer")
    one = engine.add("one", 40, PREFILL, output=50)
    request = engine.scheduler.requests[one]
    engine.step(2)
    side = engine.side
    output = SimpleNamespace(
        total_num_scheduled_tokens=0, num_scheduled_tokens={}, preempted_req_ids={one}, scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
    )  # fmt: skip
    assert side.build_meta(output).preempted == [one]
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert side.on_finished(request, ([1, 2, 3],)) == (True, None)
    (aborted,) = side.build_meta(SimpleNamespace(**vars(output) | {"preempted_req_ids": None})).aborted
    assert (aborted.source_id, aborted.reason) == (one, "the prefill request ended as FINISHED_LENGTH_CAPPED")


def test_reset_prefix_cache_restarts_a_running_source(make: Make) -> None:
    """Preempts between two steps, outside ``schedule()``."""
    engine = make(role="kv_producer")
    one = engine.add("one", 100, PREFILL, output=4)
    engine.step(2)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step(8)
    kinds = [type(event) for event in engine.endpoint.events]
    where = kinds.index(SourcePreempted)
    assert SourceProgressed in kinds[:where]
    again = [event for event in engine.endpoint.events[where:] if isinstance(event, SourceProgressed)]
    assert [event.token_hi for event in again] == [64, 64, 100, 100]
    assert sum(len(event.new_blocks[0]) for event in again if event.new_blocks is not None) == 7
    engine.endpoint.released(one)
    engine.step(2)
    assert engine.ends[one] == "length"
    engine.check_clean()


def test_a_source_ends_when_every_rank_has_let_go(make: Make) -> None:
    engine = make(role="kv_producer", ranks=2)
    one = engine.add("one", 40, PREFILL, output=1)
    engine.step(2)
    engine.endpoints[1].released(one)
    engine.step(3)
    assert one in engine.scheduler.requests
    engine.endpoints[0].released(one, streams=0)
    engine.step()
    engine.check_clean()


def test_what_a_step_leaves_unsaid_is_said_with_the_next(make: Make) -> None:
    """vLLM leaves wait_for_save out on some pipeline ranks; and drafts are written after results were taken."""
    engine = make(role="kv_producer")
    worker = engine.worker
    one = engine.add("one", 20, PREFILL, output=1)
    output = engine.schedule()
    meta = output.kv_connector_metadata
    worker.begin_step(meta)
    worker.layer_done(LAYERS[0])
    worker.results()
    assert [event.layer_hi for event in engine.endpoint.of(SourceProgressed)] == [1]
    worker.begin_step(KVPushMetadata(finished=[one]))
    events = [event for event in engine.endpoint.events if not isinstance(event, SourceAnnounced)]
    assert [type(event) for event in events] == [SourceProgressed, SourceProgressed, SourceFinished]
    assert (events[1].layer_lo, events[1].layer_hi) == (1, 2)


def test_hooks_out_of_order_tell_each_layer_once(make: Make) -> None:
    engine = make(role="kv_producer")
    worker = engine.worker
    engine.add("one", 20, PREFILL, output=1)
    meta = engine.schedule().kv_connector_metadata
    for _ in range(2):
        worker.begin_step(meta)
    worker.layer_done("unknown")
    worker.layer_done(LAYERS[1])
    worker.layer_done(LAYERS[0])
    worker.layer_done(LAYERS[1])
    worker.end_forward()
    worker.end_forward()
    assert [(event.layer_lo, event.layer_hi) for event in engine.endpoint.of(SourceProgressed)] == [(0, 2)]
    assert len(engine.endpoint.of(SourceAnnounced)) == 1


def test_params_for_a_router_that_runs_prefill_first(make: Make) -> None:
    engine = make(role="kv_producer")
    one = engine.add("one", 40, {"do_remote_decode": True}, output=1)
    engine.step()
    done = engine.execute(output := engine.schedule())
    engine.update(output, done)
    (event,) = engine.endpoint.of(SourceAnnounced)
    assert event.keys == (f"t:{one}", f"r:{one}", "r:cmpl-one-0")
    # What decode would look for is among the keys.
    decode = make(role="kv_consumer")
    decode.add("other", 40, {**DECODE, "transfer_id": one})
    decode.step()
    (receive,) = decode.endpoint.of(ReceiveRequested)
    assert set(receive.keys) & set(event.keys)
    assert receive.prompt_digest == event.prompt_digest
    engine.endpoint.released(one)
    engine.step()
    engine.check_clean()


# --- the submitter is gone ----------------------------------------------------------------------------------------------


def crash(endpoint: FakeEndpoint) -> None:
    endpoint.error = InternalError("the submitter stopped")


def test_receives_fail_at_once_when_the_submitter_is_gone(make: Make) -> None:
    engine = make(role="kv_consumer")
    crash(engine.endpoint)
    one = engine.add("one", 40, DECODE)
    engine.step(5)
    assert engine.answers[one] == [7, 7]
    assert engine.worker.counters.failed == 1
    assert engine.worker.counters.quarantined == 0
    engine.check_clean()


def test_an_abort_after_the_crash_waits_for_the_outcome_of_the_crash(make: Make) -> None:
    engine = make(role="kv_consumer")
    one = engine.add("one", 40, DECODE)
    engine.step()
    crash(engine.endpoint)
    engine.abort(one)
    engine.step(2)
    assert one in engine.scheduler.requests
    engine.endpoint.failed(one, safe=False)
    engine.step(2)
    engine.endpoint.safe(one)
    engine.step(2)
    assert engine.reported == {one: 1}
    engine.check_clean()


@pytest.mark.parametrize("when", ["before-announcement", "after-announcement", "half-computed"])
@pytest.mark.parametrize("outcome", ["none", "early", "late", "twice"])
@pytest.mark.parametrize("end", ["finish", "abort"])
def test_sources_end_once_when_the_submitter_is_gone(make: Make, when: str, outcome: str, end: str) -> None:
    engine = make(role="kv_producer")
    if when == "before-announcement":
        crash(engine.endpoint)
    one = engine.add("one", 200, PREFILL, output=1)
    engine.step(1 if when == "after-announcement" else 2)
    crash(engine.endpoint)
    if outcome in ("early", "twice"):
        engine.endpoint.released(one, streams=0)
    engine.step()
    assert engine.reported[one] == 0, "vLLM doesn't expect it yet"
    if end == "abort":
        engine.abort(one)
    else:
        engine.step(2)
    if outcome in ("late", "twice"):
        engine.endpoint.released(one, streams=0)
    engine.step(4)
    assert engine.reported == {one: 1}
    assert one in engine.ends or end == "abort"
    engine.check_clean()


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_a_submitter_that_was_started_again_hears_nothing_of_sources_from_before(make: Make, end: str) -> None:
    engine = make(role="kv_producer")
    one = engine.add("one", 200, PREFILL, output=1)
    engine.step(2)
    crash(engine.endpoint)
    engine.endpoint.released(one, streams=0)
    engine.step()
    engine.endpoint.error = None
    told = len(engine.endpoint.events)
    if end == "abort":
        engine.abort(one)
    two = engine.add("two", 40, PREFILL, seed=1, output=1)
    engine.step(5)
    engine.endpoint.released(two)
    engine.step(2)
    assert engine.reported == {one: 1, two: 1}
    assert {getattr(event, "source_id", None) for event in engine.endpoint.events[told:]} == {two}
    engine.check_clean()


# --- the rest -----------------------------------------------------------------------------------------------------------


def test_metadata_survives_pickling(make: Make) -> None:
    engine = make()
    engine.add("source", 40, PREFILL, output=1)
    engine.add("receive", 40, DECODE, seed=1)
    engine.add("declined", 40, DECODE, seed=2, prompt_logprobs=1)
    meta = engine.schedule().kv_connector_metadata
    again = pickle.loads(pickle.dumps(meta, protocol=pickle.HIGHEST_PROTOCOL))
    assert again.announced == meta.announced
    assert again.progress == meta.progress
    assert again.declined == meta.declined
    (before,), (after,) = meta.receives, again.receives
    assert [group.tolist() for group in after.blocks] == [group.tolist() for group in before.blocks]
    assert [group.dtype for group in after.blocks] == [np.dtype(np.int32)]
    assert (after.request_id, after.peer, after.keys, after.prompt_digest) == (
        before.request_id, before.peer, before.keys, before.prompt_digest,
    )  # fmt: skip
    assert isinstance(after.peer, PeerAddress)
    report = KVPushWorkerMetadata({"a": 1, "b": 2}, {"c": 1})
    assert pickle.loads(pickle.dumps(report)) == report
    assert report.aggregate(KVPushWorkerMetadata({"b": 1}, {})) == KVPushWorkerMetadata({"a": 1, "b": 3}, {"c": 1})


def test_empty_steps_wait_only_while_something_is_awaited(make: Make) -> None:
    engine = make()
    engine.step(2)
    assert engine.endpoint.waits == []
    one = engine.add("one", 40, DECODE)
    engine.step(4)
    # Longer and longer, up to the setting.
    assert engine.endpoint.waits == [0.0005, 0.001, 0.001, 0.001]
    engine.endpoint.received(one)
    engine.step()
    before = len(engine.endpoint.waits)
    engine.step(4)
    assert len(engine.endpoint.waits) == before
    engine.check_clean()


def test_requests_beyond_the_share_get_blocks_when_their_prefill_has_started(make: Make) -> None:
    engine = make(role="kv_consumer", num_blocks=17, caching=False, max_pinned_share=0.5)
    first, second, third = (engine.add(name, 4 * BLOCK, DECODE, seed=idx) for idx, name in enumerate(("a", "b", "c")))
    engine.step(3)
    assert [event.request_id for event in engine.endpoint.of(ReceiveRequested)] == [first, second]
    assert [event.request_id for event in engine.endpoint.of(StartAwaited)] == [third]
    # Prefill has begun with the third one: it may go beyond the share.
    engine.endpoint.outcomes.append(SourceStarted(RequestId(third)))
    engine.step(2)
    assert [event.request_id for event in engine.endpoint.of(ReceiveRequested)] == [first, second, third]
    for request_id in (first, second, third):
        engine.endpoint.received(request_id)
    engine.step(6)
    assert set(engine.ends) == {first, second, third}
    engine.check_clean()


def test_requests_beyond_the_share_get_blocks_when_others_are_done(make: Make) -> None:
    engine = make(role="kv_consumer", num_blocks=17, caching=False, max_pinned_share=0.5)
    names = [engine.add(name, 4 * BLOCK, DECODE, seed=idx) for idx, name in enumerate("abcdefgh")]
    for _ in range(60):
        engine.step()
        for request_id in list(engine.worker._receiving):
            engine.endpoint.received(request_id)
        if len(engine.ends) == len(names):
            break
    assert set(engine.ends) == set(names)
    engine.step(2)
    engine.check_clean()


def test_one_request_larger_than_the_share_is_let_in(make: Make) -> None:
    engine = make(role="kv_consumer", num_blocks=17, caching=False, max_pinned_share=0.1)
    only = engine.add("only", 8 * BLOCK, DECODE)
    engine.step()
    assert [event.request_id for event in engine.endpoint.of(ReceiveRequested)] == [only]
    engine.endpoint.received(only)
    engine.step(4)
    engine.check_clean()


def test_a_held_request_that_is_aborted_is_declined(make: Make) -> None:
    engine = make(role="kv_consumer", num_blocks=17, caching=False, max_pinned_share=0.1)
    first, held = engine.add("first", 4 * BLOCK, DECODE), engine.add("held", 4 * BLOCK, DECODE, seed=1)
    engine.step(2)
    engine.abort(held)
    engine.endpoint.outcomes.append(SourceStarted(RequestId(held)))
    engine.step()
    assert len(engine.endpoint.of(TransferDeclined)) == 1
    assert [event.request_id for event in engine.endpoint.of(StartAwaitCancelled)] == [held], (
        "it must not be asked for any more"
    )
    engine.endpoint.received(first)
    engine.step(4)
    engine.check_clean()


def test_a_held_request_that_gets_its_blocks_asks_no_more(make: Make) -> None:
    engine = make(role="kv_consumer", num_blocks=17, caching=False, max_pinned_share=0.1)
    first, held = engine.add("first", 4 * BLOCK, DECODE), engine.add("held", 4 * BLOCK, DECODE, seed=1)
    engine.step(2)
    assert [event.request_id for event in engine.endpoint.of(StartAwaited)] == [held]
    assert not engine.endpoint.of(StartAwaitCancelled)
    # Nobody has said that its prefill has started, but there is room now.
    engine.endpoint.received(first)
    engine.step(2)
    assert [event.request_id for event in engine.endpoint.of(ReceiveRequested)] == [first, held]
    assert [event.request_id for event in engine.endpoint.of(StartAwaitCancelled)] == [held]
    engine.endpoint.received(held)
    engine.step(4)
    engine.check_clean()


def test_a_crash_lets_held_requests_go(make: Make) -> None:
    engine = make(role="kv_consumer", num_blocks=17, caching=False, max_pinned_share=0.1)
    first = engine.add("first", 4 * BLOCK, DECODE)
    engine.step()
    engine.endpoint.error = InternalError("broken")
    held = engine.add("held", 4 * BLOCK, DECODE, seed=1)
    engine.endpoint.failed(first)
    engine.step(8)
    assert set(engine.ends) == {first, held}
    engine.check_clean()


def test_counters_come_as_increments(make: Make) -> None:
    engine = make()
    one = engine.add("one", 40, DECODE)
    engine.step()
    engine.endpoint.received(one, 40)
    output = engine.schedule()
    done = engine.execute(output)
    data = done.kv_connector_output.kv_connector_stats.data
    assert {name: data[name] for name in COUNTERS if name in data} == {"received_requests": 1, "received_tokens": 40}
    assert any(name.startswith("step_worker_empty_") for name in data), "with the news comes what the steps before have cost"
    engine.update(output, done)
    output = engine.schedule()
    done = engine.execute(output)
    assert done.kv_connector_output is None or done.kv_connector_output.kv_connector_stats is None
    engine.update(output, done)


def test_every_step_is_counted_on_both_sides(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCost, "take", lambda self, now=False: {})
    engine = make()
    one = engine.add("one", 40, DECODE)
    engine.step(3)  # Empty: it waits.
    engine.endpoint.received(one, 40)
    engine.step(3)  # The news; two steps that compute a token each.
    engine.check_clean()
    assert [sum(counts) for counts in engine.side.cost._counts] == [2, 4]
    assert [sum(counts) for counts in engine.worker.cost._counts] == [1, 4], "a worker's step ends when the next one begins"


def test_a_wait_in_an_empty_step_is_no_cost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCost, "take", lambda self, now=False: {})
    clock = SimpleNamespace(ns=0, perf_counter_ns=lambda: clock.ns)
    monkeypatch.setattr("kvpush.vllm.step_cost.time", clock)
    engine = make()
    engine.add("one", 40, DECODE)

    def wait(timeout_s: float) -> bool:
        clock.ns += 1_000_000_000
        return False

    def drain() -> list[Outcome]:
        clock.ns += 1_000
        return []

    monkeypatch.setattr(engine.endpoint, "wait_outcome", wait)
    monkeypatch.setattr(engine.endpoint, "drain", drain)
    engine.step(3)
    assert clock.ns > 3_000_000_000
    assert sum(engine.worker.cost._sums_ns[1]) == 2 * 1_000


def test_shutdown_closes_the_endpoint(make: Make) -> None:
    engine = make()
    engine.workers[0].shutdown()
    assert engine.endpoint.closed == 1


# --- everything at once -------------------------------------------------------------------------------------------------


class Chaos:
    """Ends transfers as a network would: in any order, in any way, and late."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.seen = [0] * len(engine.endpoints)
        self.receives: list[dict[str, Any]] = [{} for _ in engine.endpoints]
        self.sources: list[dict[str, bool]] = [{} for _ in engine.endpoints]
        self.unsafe: list[set[str]] = [set() for _ in engine.endpoints]
        self.suspect: dict[str, set[int]] = {}

    def act(self, likely: float) -> None:
        for rank, endpoint in enumerate(self.engine.endpoints):
            for event in endpoint.events[self.seen[rank] :]:
                if isinstance(event, ReceiveRequested):
                    assert event.request_id not in self.receives[rank]
                    self.receives[rank][event.request_id] = {int(block) for block in event.blocks[0]}
                elif isinstance(event, SourceAnnounced):
                    self.sources[rank][event.source_id] = False
                elif isinstance(event, StartAwaited) and self.rng.random() < 0.5:
                    endpoint.outcomes.append(SourceStarted(event.request_id))
                elif isinstance(event, SourceFinished | SourceAborted):
                    assert self.sources[rank][event.source_id] is False
                    self.sources[rank][event.source_id] = True
            self.seen[rank] = len(endpoint.events)
            for request_id in list(self.receives[rank]):
                if self.rng.random() < likely:
                    blocks = self.receives[rank].pop(request_id)
                    ending = self.rng.choice(ENDINGS)
                    if ending == "unsafe":
                        self.unsafe[rank].add(request_id)
                        self.suspect.setdefault(request_id, set()).update(blocks)
                    end_receive(endpoint, request_id, "received" if ending == "cancelled" else ending)
            for request_id in list(self.unsafe[rank]):
                if self.rng.random() < likely / 3:
                    self.unsafe[rank].discard(request_id)
                    endpoint.safe(request_id)
                    if not any(request_id in ids for ids in self.unsafe):
                        self.suspect.pop(request_id, None)
            for source_id, ended in list(self.sources[rank].items()):
                if ended and self.rng.random() < likely:
                    del self.sources[rank][source_id]
                    endpoint.released(source_id, self.rng.randint(0, 1))

    def check_quarantine(self, reported: Counter[str]) -> None:
        """No request is given a block in which a write may still land."""
        engine = self.engine
        for owner, suspect in self.suspect.items():
            for request_id, request in engine.scheduler.requests.items():
                if request_id == owner and (not reported[owner] or request.is_finished()):
                    continue
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request_id == owner:
                    continue
                table = set(engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0])
                assert not table & suspect, f"{request_id} has blocks of {owner}'s quarantine"

    def crash(self) -> None:
        for rank, endpoint in enumerate(self.engine.endpoints):
            crash(endpoint)
            for request_id in list(self.receives[rank]):
                endpoint.failed(request_id)
            self.receives[rank].clear()
            for source_id in self.sources[rank]:
                endpoint.released(source_id, 0)
            self.sources[rank].clear()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("seed", range(12))
def test_everything_at_once(make: Make, seed: int, policy: str, ranks: int) -> None:
    """Random requests, aborts, preemptions, cache resets, outcomes, and in the end sometimes a crash: vLLM's scheduler never
    complains, every id is reported at most once, suspect blocks are never used, and nothing is left over."""
    rng = random.Random(f"{seed}/{policy}/{ranks}")
    engine = make(policy=policy, ranks=ranks, num_blocks=rng.choice([20, 28, 64]), caching=rng.random() < 0.7)
    chaos = Chaos(engine, rng)
    for turn in range(150):
        if rng.random() < 0.35:
            params = rng.choice([None, PREFILL, DECODE, DECODE])
            if params is not None:
                params = {**params, "transfer_id": f"t{turn}"}
            engine.add(f"r{turn}", rng.randint(1, 150), params, output=rng.randint(1, 40), seed=rng.randint(0, 4))
        chaos.act(0.3)
        output = engine.schedule()
        if rng.random() < 0.1 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        done = engine.execute(output)
        if rng.random() < 0.1 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        engine.update(output, done)
        chaos.check_quarantine(engine.reported)
        if rng.random() < 0.05 and engine.may_reset:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    crashed = seed % 3 == 0
    if crashed:
        chaos.act(0.0)
        chaos.crash()
    for _ in range(1500):
        if not engine.scheduler.requests and not any(chaos.unsafe) and not engine.scheduler.connector.has_pending_push_work():
            break
        chaos.act(0.5)
        engine.step()
        chaos.check_quarantine(engine.reported)
    engine.step()
    engine.check_clean()


def test_a_request_that_the_http_layer_refused_is_declined_whatever_its_prompt_was(make: Make) -> None:
    engine = make(role="kv_consumer")
    request = Request(
        request_id="cmpl-refused-0-00000000",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": DECODE}),
        pooling_params=None,
        abort_immediately=True,
    )
    engine.scheduler.add_request(request)
    engine.abort(request.request_id)
    engine.step(2)
    (declined,) = engine.endpoint.of(TransferDeclined)
    assert declined.prompt_digest == b""
    engine.check_clean()


def test_layers_are_told_when_it_is_worth_it(make: Make) -> None:
    engine = make(role="kv_producer")
    engine.add("small", 40, PREFILL, output=1)
    engine.step()
    # One event a layer, as nothing says otherwise.
    assert [(e.layer_lo, e.layer_hi) for e in engine.endpoint.of(SourceProgressed)] == [(0, 1), (1, 2)]
    engine.endpoint.events.clear()
    engine.endpoint.worthwhile_bytes = 40 * 100 + 1
    engine.add("large", 40, PREFILL, output=1, seed=1)
    engine.step()
    (event,) = engine.endpoint.of(SourceProgressed)
    assert (event.layer_lo, event.layer_hi, event.token_hi) == (0, 2, 40)
    assert event.new_blocks is not None


@pytest.mark.parametrize("fences", [True, False])
def test_layers_are_told_only_where_the_backend_can_fence_each(
    make: Make, monkeypatch: pytest.MonkeyPatch, fences: bool
) -> None:
    engine = make(role="kv_producer")
    endpoint: Any = FakeEndpoint()
    endpoint.layer_fences = fences
    endpoint.layout = SimpleNamespace(layers=[SimpleNamespace(block_bytes=1600, block_tokens=BLOCK)] * len(LAYERS))
    views = [SimpleNamespace(name=name) for name in LAYERS]
    monkeypatch.setattr("kvpush.vllm.connector.describe_caches", lambda *_: views)
    monkeypatch.setattr("kvpush.vllm.connector.compatibility", lambda *_: {})
    monkeypatch.setattr("kvpush.vllm.connector.Endpoint.open", lambda *_, **__: endpoint)
    engine.workers[0].register_kv_caches({})
    engine.add("one", 40, PREFILL, output=1)
    engine.step()
    told = [(event.layer_lo, event.layer_hi) for event in endpoint.of(SourceProgressed)]
    assert told == ([(0, 1), (1, 2)] if fences else [(0, 2)])
