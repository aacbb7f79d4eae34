# SPDX-License-Identifier: Apache-2.0
"""What must be equal between two instances for one's KV to mean the same to the other, name to text.

It travels in the handshake. Names and values are for people: a refusal says which of them differ, and how. What the layouts
say themselves (block size, heads and element type of each layer, packing) is compared there, and not again here; some of it,
the block size among it, need not be equal where blocks can be divided.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpush._weights import weights_fingerprint

logger = logging.getLogger(__name__)

MAX_VALUE_CHARS = 160
"""Longer values are cut, and a hash of the whole is added."""

_NOT_OF_THE_KV = frozenset(
    {
        # Told by the weights' fingerprint, or by an entry of its own.
        "_name_or_path", "name_or_path", "architectures", "dtype", "torch_dtype", "quantization_config",
        # About the library, training, the tokenizer, or what is done with the output.
        "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward", "eos_token_id",
        "finetuning_task", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "output_attentions",
        "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
        "router_aux_loss_coef", "task_specific_params", "tokenizer_class", "transformers_version", "use_cache",
        "use_return_dict",
    }
)  # fmt: skip


def compatibility(vllm_config: Any) -> dict[str, str]:
    """All of it, for one instance.

    Every field of the model's configuration that can change the KV is an entry of its own: RoPE, windows, norms, sizes.
    """
    model = vllm_config.model_config
    text = getattr(model, "hf_text_config", None) or model.hf_config
    found = {
        "weights": weights(vllm_config),
        "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ()),
        "dtype": _plain_dtype(model.dtype),
        "cache dtype": cache_dtype(vllm_config),
        "quantization": str(model.quantization or "none"),
        "MLA": str(bool(model.use_mla)),
        "sliding window": str(None if model.disable_sliding_window else getattr(text, "sliding_window", None)),
    }
    quantization = getattr(model.hf_config, "quantization_config", None)
    if quantization is not None:
        found["quantization config"] = _short(_canonical(_as_dict(quantization)))
    found |= {f"config.{name}": value for name, value in _fields(_cleaned(_as_dict(text)))}
    if model.hf_config is not text:
        # The other towers of a multimodal model, in one: their fields' names are of no use to anybody.
        found["config around the text model"] = _short(_canonical(_cleaned(_as_dict(model.hf_config))))
    if _picks_by_length(text):
        # Which of its two sets of factors a model has is chosen by the longest prompt that the instance takes.
        found["longest prompt"] = str(model.max_model_len)
    return found


def weights(vllm_config: Any) -> str:
    """Content of the checkpoint, or, where that can't be looked at, its name and revision."""
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load, "load_format", "auto"))
    if load_format == "dummy":
        return "dummy"
    begun = time.perf_counter()
    by_name = f"{str(model.model).rstrip('/').rsplit('/', 1)[-1]}@{model.revision or 'main'}, by name"
    try:
        folder = _local_folder(model, load)
        fingerprint = weights_fingerprint(folder) if folder is not None else None
    except Exception as error:  # noqa: BLE001 - a checkpoint that vLLM can read and we can't must not stop the engine
        logger.warning("kvpush: the weights are compared by name only: %s: %s", type(error).__name__, error)
        return by_name
    if fingerprint is None:
        logger.warning("kvpush: the weights are compared by name only (%s): they are no local files", by_name)
        return by_name
    logger.info("kvpush: weights %s, read in %.2f s", fingerprint, time.perf_counter() - begun)
    return fingerprint


def _local_folder(model: Any, load: Any) -> Path | None:
    """Where the checkpoint's files are: a local path, or the folder into which vLLM has downloaded it."""
    if getattr(model, "model_weights", ""):
        return None  # in an object store
    path = Path(str(model.model))
    if path.exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(
        str(model.model), "config.json", cache_dir=getattr(load, "download_dir", None), revision=model.revision
    )
    return Path(found).parent if isinstance(found, str) else None


def cache_dtype(vllm_config: Any) -> str:
    """The cache's element type in effect, and the layers that are excepted from it."""
    cache = vllm_config.cache_config
    name = str(cache.cache_dtype)
    if name == "auto":
        name = _plain_dtype(vllm_config.model_config.dtype)
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    return f"{name}, not {_short(','.join(map(str, skipped)))}" if skipped else name


def _plain_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _picks_by_length(text: Any) -> bool:
    """Whether RoPE is of the kind with factors for short and for long contexts."""
    rope = _as_dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    return any("long_factor" in name for name, _ in _fields(rope))


def _cleaned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what can't change the KV, at every depth."""
    return {
        name: _cleaned(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value is not None and name not in _NOT_OF_THE_KV and not str(name).startswith("_")
    }


def _fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field, nested ones as ``outer.inner``."""
    for name, value in config.items():
        if isinstance(value, Mapping) and len(value) <= 16:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _short(value if isinstance(value, str) else _canonical(value))


def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    found: dict[str, Any] = config.to_dict()
    return found


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(text: str) -> str:
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"{text[:MAX_VALUE_CHARS]}... (hash {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"
