# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV-cache tensors as :class:`~kvpush.backends.base.CacheView`."""

from __future__ import annotations

import re
from typing import Any

from kvpush.backends.base import CacheView
from kvpush.core.transport import MemoryKind, Region
from kvpush.errors import LayoutError
from kvpush.vllm import compat


def forward_order(names: list[str]) -> list[str]:
    """Layer names by the numbers in them, so that ``layers.10`` follows ``layers.9``."""
    return sorted(names, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))


def describe_caches(kv_caches: dict[str, Any], kv_cache_config: Any, vllm_config: Any) -> list[CacheView]:
    """One view per layer, in forward order.

    Args:
        kv_caches: vLLM's dict of layer name to tensor, as given to ``register_kv_caches``.

    Raises:
        LayoutError: a tensor whose geometry isn't understood; says which.
    """
    parallel = vllm_config.parallel_config
    total_heads = vllm_config.model_config.get_total_num_kv_heads()
    tp_size = parallel.tensor_parallel_size
    tp_rank = _tp_rank()
    views: list[CacheView] = []
    for group_idx, group_id in enumerate(compat.transfer_group_ids(kv_cache_config)):
        group = kv_cache_config.kv_cache_groups[group_id]
        for name in forward_order(list(group.layer_names)):
            tensor = kv_caches.get(name)
            if tensor is None:
                continue
            spec = _layer_spec(group.kv_cache_spec, name)
            views.append(
                _view(name, group_idx, tensor, spec, kv_cache_config.num_blocks, total_heads, tp_rank, tp_size, vllm_config)
            )
    missing = set(kv_caches) - {view.name for view in views}
    if missing:
        raise LayoutError(f"layers of no KV-cache group can't be transferred: {sorted(missing)[:4]}")
    order = {name: idx for idx, name in enumerate(forward_order([view.name for view in views]))}
    return sorted(views, key=lambda view: order[view.name])


def _layer_spec(spec: Any, name: str) -> Any:
    specs = getattr(spec, "kv_cache_specs", None)
    return specs[name] if specs else spec


def _tp_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _view(
    name: str,
    group: int,
    tensor: Any,
    spec: Any,
    num_blocks: int,
    total_heads: int,
    tp_rank: int,
    tp_size: int,
    vllm_config: Any,
) -> CacheView:
    shape, itemsize = tuple(tensor.shape), tensor.element_size()
    if len(shape) == 4:
        order = "BHNC"
    elif len(shape) == 5 and shape[0] == 2:
        order = "2BHNC"
    else:
        raise LayoutError(f"layer {name!r}: a KV cache of shape {list(shape)} is not understood")
    heads = shape[order.index("H")]
    if vllm_config.model_config.use_mla:
        head_lo = 0
    elif total_heads >= tp_size:
        head_lo = tp_rank * heads
    else:
        head_lo = tp_rank * total_heads // tp_size
    storage = tensor.untyped_storage()
    device_id = tensor.device.index or 0
    return CacheView(
        name=name,
        group=group,
        address=tensor.data_ptr(),
        shape=shape,
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device_type=tensor.device.type,
        device_id=device_id,
        num_blocks=num_blocks,
        block_tokens=spec.block_size,
        head_lo=head_lo,
        num_heads=heads,
        order=order,
        region=Region(
            storage.data_ptr(),
            storage.nbytes(),
            device_id,
            MemoryKind.HOST if tensor.device.type == "cpu" else MemoryKind.DEVICE,
            keepalive=tensor,
        ),
        tag=compat.attention_tag(vllm_config, spec),
    )
