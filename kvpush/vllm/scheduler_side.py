# SPDX-License-Identifier: Apache-2.0
"""The half of the connector that lives in vLLM's scheduler: its hooks become entries of the next step's metadata.

**Owner** the engine core's main thread, for everything here.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpush.core.digest import prompt_digest
from kvpush.core.events import ReceiveRequested, SourceAborted, SourceAnnounced, StartAwaited, TransferDeclined
from kvpush.core.ids import PeerAddress, RequestId
from kvpush.core.layout import blocks_for_tokens
from kvpush.errors import RemoteProtocolError
from kvpush.vllm import compat
from kvpush.vllm.metadata import KVPushMetadata, KVPushWorkerMetadata, Progress
from kvpush.vllm.params import DecodeLeg, PrefillLeg, parse_params, receive_keys, source_keys
from kvpush.vllm.step_cost import StepCost

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Source:
    """A request of ours that somebody else will decode."""

    num_tokens: int
    told_to_worker: bool = False
    computed: int = 0


@dataclass(slots=True)
class _Quarantine:
    blocks: list[Any]
    ranks: int


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts, for metrics and tests."""

    malformed_params: int = 0
    sources: int = 0
    receives: int = 0
    receives_failed: int = 0
    recomputed_locally: int = 0
    held_back: int = 0
    quarantined_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler side has to know.

    Args:
        address: What other instances are told to connect to.
        block_tokens: Tokens per block.
        recompute_below_tokens: Fewer missing tokens than this are computed here instead of transferred.
        num_blocks: Blocks in the pool.
        max_pinned_share: At most this share of them is given to requests whose prefill may still be queueing.
    """

    engine_id: str
    produce: bool
    consume: bool
    address: PeerAddress
    block_tokens: int
    group_ids: tuple[int, ...]
    num_groups: int
    tp_size: int = 1
    pp_size: int = 1
    recompute_below_tokens: int = 0
    num_blocks: int = 0
    max_pinned_share: float = 1.0


@dataclass(slots=True)
class _Leg:
    leg: PrefillLeg | DecodeLeg | None
    digest: bytes = b""
    tried: bool = False
    """A transfer was started, or decided against: a second look-up computes locally."""
    watching: bool = False
    """It waits for its prefill to start before it gets blocks."""
    started: bool = False
    """Its prefill has started: blocks given to it will not be idle for long."""


class SchedulerSide:
    """Decides nothing about transfers; keeps what vLLM's next hook needs."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.address = config.address
        self.counters = SchedulerCounters()
        self.cost = StepCost("scheduler")
        self.block_pool: Any = None
        self._legs: dict[str, _Leg] = {}
        self._sources: dict[str, _Source] = {}
        self._delayed: set[str] = set()
        self._receiving: dict[str, tuple[list[int], ...]] = {}
        self._num_pinned = 0
        self._held: set[str] = set()
        self._failed: dict[str, tuple[list[int], ...]] = {}
        self._quarantines: dict[str, _Quarantine] = {}
        self._staged = KVPushMetadata()

    # --- requests come in ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """First sight of a request. Never raises: vLLM's engine would die of it."""
        entry = self._leg(request)
        if not isinstance(entry.leg, PrefillLeg):
            return
        shared_id = compat.external_id(request.request_id)
        self._sources[request.request_id] = _Source(request.num_prompt_tokens)
        self.counters.sources += 1
        self._staged.announced.append(
            SourceAnnounced(
                RequestId(request.request_id),
                source_keys(entry.leg, request.request_id, shared_id),
                entry.digest,
                request.num_prompt_tokens,
            )
        )

    def _leg(self, request: Any) -> _Leg:
        entry = self._legs.get(request.request_id)
        if entry is not None:
            return entry
        leg: PrefillLeg | DecodeLeg | None = None
        digest = b""
        try:
            leg = parse_params(request.kv_transfer_params)
        except RemoteProtocolError as error:
            self.counters.malformed_params += 1
            logger.warning("kvpush: request %s is computed locally: %s", request.request_id, error.message)
        if leg is not None:
            served = self.config.produce if isinstance(leg, PrefillLeg) else self.config.consume
            if not served:
                logger.warning(
                    "kvpush: request %s is computed locally: it asks for %s, which this instance's kv_role doesn't serve",
                    request.request_id,
                    "do_remote_decode" if isinstance(leg, PrefillLeg) else "do_remote_prefill",
                )
                leg = None
        if leg is not None:
            extras = compat.prompt_extras(request)
            if extras is None or request.num_prompt_tokens == 0:
                logger.warning(
                    "kvpush: request %s is computed locally: its prompt has no digest (embeddings, or media without a hash)",
                    request.request_id,
                )
                leg = None
            elif not getattr(request, "abort_immediately", False):
                # (vLLM's stand-in for a request that its HTTP layer has refused has no prompt of its own.)
                # An array: NumPy goes through a list twice.
                digest = prompt_digest(np.asarray(array("q", request.prompt_token_ids)), extras)
        entry = _Leg(leg, digest)
        self._legs[request.request_id] = entry
        return entry

    # --- decode --------------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``: how many tokens of the prompt a producer will push; None: ask again next step.
        Asking again changes nothing."""
        entry = self._leg(request)
        if not isinstance(entry.leg, DecodeLeg) or entry.tried or num_computed % self.config.block_tokens:
            return 0, False
        if compat.must_compute(request):
            return 0, False
        missing = request.num_prompt_tokens - num_computed
        if missing <= 0 or missing < self.config.recompute_below_tokens or self._is_full_hit(request, missing):
            return 0, False
        if self._must_wait(request.request_id, entry, entry.leg, missing):
            return None, False
        return missing, True

    def _is_full_hit(self, request: Any, missing: int) -> bool:
        """Whether all of the prompt is cached here, and vLLM only leaves its last block out, as it has to compute something."""
        block_tokens = self.config.block_tokens
        if missing != block_tokens or request.num_prompt_tokens % block_tokens:
            return False
        last = request.num_prompt_tokens // block_tokens - 1
        return compat.holds_block(self.block_pool, request, last, self.config.group_ids)

    def _must_wait(self, request_id: str, entry: _Leg, leg: DecodeLeg, missing: int) -> bool:
        """Whether a request is to get its blocks only when its prefill has started.

        Early registration pins blocks while prefill queues. Without a bound, decode's pool could fill up with requests that
        prefill can't start, because its own pool is full of finished ones that find no blocks here: nothing would move.
        """
        if entry.started or self.config.max_pinned_share >= 1.0 or not self._num_pinned:
            return False
        needed = blocks_for_tokens(missing, self.config.block_tokens) * len(self.config.group_ids)
        if self._num_pinned + needed <= self.config.max_pinned_share * self.config.num_blocks:
            self._held.discard(request_id)
            return False
        self._held.add(request_id)
        if not entry.watching:
            entry.watching = True
            self.counters.held_back += 1
            keys = receive_keys(leg, compat.external_id(request_id))
            self._staged.watches.append(StartAwaited(RequestId(request_id), leg.peer, keys, entry.digest))
        return True

    def after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """``update_state_after_alloc``: the destination blocks are there."""
        entry = self._leg(request)
        if not isinstance(entry.leg, DecodeLeg) or entry.tried:
            return
        entry.tried = True
        self._held.discard(request.request_id)
        self._call_off_watch(request.request_id, entry)
        if num_external <= 0:
            self.counters.recomputed_locally += 1
            self._decline(request.request_id, entry)
            return
        token_lo = request.num_prompt_tokens - num_external
        first = token_lo // self.config.block_tokens
        stop = blocks_for_tokens(request.num_prompt_tokens, self.config.block_tokens)
        table = blocks.get_block_ids()
        mine = tuple(list(table[group][first:stop]) for group in self.config.group_ids)
        self._receiving[request.request_id] = mine
        self._num_pinned += sum(map(len, mine))
        self.counters.receives += 1
        self._staged.receives.append(
            ReceiveRequested(
                RequestId(request.request_id),
                entry.leg.peer,
                receive_keys(entry.leg, compat.external_id(request.request_id)),
                entry.digest,
                request.num_prompt_tokens,
                token_lo,
                tuple(np.asarray(ids, np.int32) for ids in mine),
            )
        )

    def _call_off_watch(self, request_id: str, entry: _Leg) -> None:
        if entry.watching:  # Also when one rank's producer has answered: another's may not have.
            self._staged.unwatched.append(request_id)

    def _decline(self, request_id: str, entry: _Leg) -> None:
        if isinstance(entry.leg, DecodeLeg):
            keys = receive_keys(entry.leg, compat.external_id(request_id))
            self._staged.declined.append(TransferDeclined(entry.leg.peer, keys, entry.digest))

    # --- each step -----------------------------------------------------------------------------------------------------

    def build_meta(self, output: Any) -> KVPushMetadata:
        """``build_connector_meta``: everything staged, and what this step will compute of our sources."""
        meta, self._staged = self._staged, KVPushMetadata()
        meta.computes = output.total_num_scheduled_tokens > 0
        for event in meta.announced:
            self._sources[event.source_id].told_to_worker = True
        if self._sources:
            for request_id in compat.preempted_ids(output):
                source = self._sources.get(request_id)
                if source is not None and source.told_to_worker and source.computed:
                    source.computed = 0
                    meta.preempted.append(request_id)
            for new in output.scheduled_new_reqs:
                self._progress(meta, output, new.req_id, new.num_computed_tokens, new.block_ids)
            cached = output.scheduled_cached_reqs
            for request_id, computed, new_blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            ):
                self._progress(meta, output, request_id, computed, new_blocks)
        meta.waiting = bool(self._receiving or self._delayed or self._quarantines or self._held)
        return meta

    def _progress(
        self, meta: KVPushMetadata, output: Any, request_id: str, computed: int, new_blocks: tuple[list[int], ...] | None
    ) -> None:
        source = self._sources.get(request_id)
        if source is None or not source.told_to_worker or source.computed >= source.num_tokens:
            return
        token_hi = min(computed + output.num_scheduled_tokens.get(request_id, 0), source.num_tokens)
        grown, source.computed = token_hi - source.computed, token_hi
        mine = tuple(list(new_blocks[group]) for group in self.config.group_ids) if new_blocks is not None else None
        meta.progress.append(Progress(request_id, token_hi, mine, grown))

    def has_pending_work(self) -> bool:
        """``has_pending_push_work``: something is staged that no live request carries to the worker, or blocks are pinned."""
        staged = self._staged
        return bool(staged.declined or staged.aborted or staged.finished or staged.receive_aborts or self._quarantines)

    # --- outcomes ------------------------------------------------------------------------------------------------------

    def on_output(self, output: Any) -> None:
        """``update_connector_output``: before vLLM frees anything that the workers have reported."""
        meta = output.kv_connector_worker_meta
        failed = getattr(output, "failed_recving", None) or ()
        if isinstance(meta, KVPushWorkerMetadata):
            for request_id, ranks in meta.unsafe.items():
                self._failed.setdefault(request_id, self._receiving.get(request_id, ()))
                self._pin(request_id, ranks)
            for request_id, ranks in meta.safe.items():
                self._unpin(request_id, ranks)
            for request_id in meta.started:
                entry = self._legs.get(request_id)
                if entry is not None:
                    entry.started = True
        for request_id in output.finished_recving or ():
            self._num_pinned -= sum(map(len, self._receiving.pop(request_id, ())))
            self._failed.pop(request_id, None)
            if request_id in failed:
                self.counters.receives_failed += 1
        for request_id in output.finished_sending or ():
            self._delayed.discard(request_id)

    def _pin(self, request_id: str, ranks: int) -> None:
        """Keep suspect blocks out of the pool, so that the request itself needn't wait for the quarantine."""
        known = self._quarantines.get(request_id)
        if known is not None:
            known.ranks += ranks
            return
        ids = [block_id for group in self._failed[request_id] for block_id in group]
        blocks = compat.pin_blocks(self.block_pool, ids)
        self.counters.quarantined_blocks += len(blocks)
        self._quarantines[request_id] = _Quarantine(blocks, ranks)

    def _unpin(self, request_id: str, ranks: int) -> None:
        known = self._quarantines.get(request_id)
        if known is None:
            return
        known.ranks -= ranks
        if known.ranks <= 0:
            compat.unpin_blocks(self.block_pool, known.blocks)
            del self._quarantines[request_id]

    # --- requests go ---------------------------------------------------------------------------------------------------

    def on_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """``request_finished``: called exactly once per request, whatever way it ends.

        Returns:
            Whether its blocks are kept until it is reported as sent, and the params for the response.
        """
        request_id = request.request_id
        entry = self._legs.pop(request_id, None)
        self._held.discard(request_id)
        if request_id in self._receiving:
            self._staged.receive_aborts.append(request_id)
            return False, None
        if entry is not None and isinstance(entry.leg, DecodeLeg) and not entry.tried:
            # It never got blocks here: let the producer have its own back.
            self._call_off_watch(request_id, entry)
            self._decline(request_id, entry)
            return False, None
        source = self._sources.pop(request_id, None)
        if source is None:
            return False, None
        if not source.told_to_worker:
            self._staged.announced = [event for event in self._staged.announced if event.source_id != request_id]
            return False, None
        whole = source.computed >= source.num_tokens and compat.finished_with_whole_prompt(request) and any(block_ids)
        self._delayed.add(request_id)
        if not whole:
            self._staged.aborted.append(
                SourceAborted(RequestId(request_id), f"the prefill request ended as {request.status.name}")
            )
            return True, None
        self._staged.finished.append(request_id)
        assert entry is not None
        assert isinstance(entry.leg, PrefillLeg)
        return True, self._params(request_id, entry.leg, source)

    def _params(self, request_id: str, leg: PrefillLeg, source: _Source) -> dict[str, Any]:
        """What a router that runs prefill first passes on to decode as it is."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": leg.transfer_id or request_id,
            "remote_engine_id": self.config.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.address.host,
            "remote_port": self.address.port,
            "remote_block_ids": [],
            "remote_num_tokens": source.num_tokens,
            "tp_size": self.config.tp_size,
            "pp_size": self.config.pp_size,
        }
