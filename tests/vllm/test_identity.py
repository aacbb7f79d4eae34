# SPDX-License-Identifier: Apache-2.0
"""What must be equal between two instances: each thing that changes the KV is found, by name; nothing else is."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    # torch and vLLM warn of themselves when they are imported.
    warnings.simplefilter("ignore")
    from vllm.config import CacheConfig, LoadConfig, ModelConfig

    from kvpush.core import wire
    from kvpush.vllm.identity import MAX_VALUE_CHARS, compatibility

from kvpush.tiny_model import write_tiny_model

pytestmark = pytest.mark.vllm

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "seed": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_tiny_model(path, **SHAPE)
    return path


def engine(path: Path | str, *, cache: dict[str, Any] | None = None, load: dict[str, Any] | None = None, **model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SimpleNamespace(
            model_config=ModelConfig(model=str(path), **{"dtype": "float32", **model}),
            cache_config=CacheConfig(**cache or {}),
            load_config=LoadConfig(**load or {}),
        )


def configure(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one | other if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        pytest.param({"rope_theta": 500000.0}, {"config.rope_parameters.rope_theta"}, id="rope-theta"),
        pytest.param(
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"config.rope_parameters.rope_type", "config.rope_parameters.factor"},
            id="rope-scaling",
        ),
        pytest.param({"rms_norm_eps": 1e-6}, {"config.rms_norm_eps"}, id="norm"),
        pytest.param({"num_hidden_layers": 3}, {"config.num_hidden_layers"}, id="layers"),
        pytest.param({"num_key_value_heads": 2}, {"config.num_key_value_heads"}, id="kv-heads"),
        pytest.param({"num_attention_heads": 4}, {"config.num_attention_heads"}, id="heads"),
        pytest.param({"head_dim": 64}, {"config.head_dim"}, id="head-size"),
        pytest.param({"hidden_size": 128}, {"config.hidden_size"}, id="hidden-size"),
        pytest.param({"intermediate_size": 1024}, {"config.intermediate_size"}, id="intermediate-size"),
        pytest.param({"attention_bias": True}, {"config.attention_bias"}, id="bias"),
        pytest.param({"hidden_act": "gelu"}, {"config.hidden_act"}, id="activation"),
        pytest.param({"sliding_window": 64}, {"config.sliding_window", "sliding window"}, id="sliding-window"),
        pytest.param({"max_position_embeddings": 4096}, {"config.max_position_embeddings"}, id="positions"),
        pytest.param({"something_new": [1, 2]}, {"config.something_new"}, id="a-field-of-the-future"),
    ],
)
def test_the_configuration_is_compared_field_by_field(folder: Path, fields: dict[str, Any], names: set[str]) -> None:
    before = compatibility(engine(folder))
    configure(folder, **fields)
    assert differing(before, compatibility(engine(folder))) == names


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({"dtype": "bfloat16"}, {"dtype", "cache dtype"}, id="dtype"),
        pytest.param({"cache": {"cache_dtype": "fp8"}}, {"cache dtype"}, id="cache-dtype"),
        pytest.param({"hf_overrides": {"rms_norm_eps": 0.1}}, {"config.rms_norm_eps"}, id="hf-overrides"),
        pytest.param({"load": {"load_format": "dummy"}}, {"weights"}, id="dummy-weights"),
    ],
)
def test_the_options_are_compared(folder: Path, changes: dict[str, Any], names: set[str]) -> None:
    assert differing(compatibility(engine(folder)), compatibility(engine(folder, **changes))) == names


def test_quantization_is_compared(folder: Path) -> None:
    plain, other = engine(folder), engine(folder)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    other.model_config.quantization = "fp8"
    other.model_config.hf_config.quantization_config = method
    assert differing(compatibility(plain), compatibility(other)) == {"quantization", "quantization config"}
    third = engine(folder)
    third.model_config.quantization = "fp8"
    third.model_config.hf_config.quantization_config = method | {"activation_scheme": "static"}
    assert differing(compatibility(other), compatibility(third)) == {"quantization config"}


def test_an_explicit_cache_dtype_is_the_same_as_the_inherited_one(folder: Path) -> None:
    assert compatibility(engine(folder, cache={"cache_dtype": "bfloat16"}, dtype="bfloat16")) == compatibility(
        engine(folder, dtype="bfloat16")
    )


def test_layers_excepted_from_the_cache_dtype_are_compared(folder: Path) -> None:
    one, other = engine(folder, cache={"cache_dtype": "fp8"}), engine(folder, cache={"cache_dtype": "fp8"})
    other.cache_config.kv_cache_dtype_skip_layers = ["0"]
    assert differing(compatibility(one), compatibility(other)) == {"cache dtype"}


def test_other_weights_are_found(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other", **SHAPE | {"seed": 4})
    assert differing(compatibility(engine(folder)), compatibility(engine(tmp_path / "other"))) == {"weights"}


def test_a_copy_under_another_name_is_the_same(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a-copy-of-it"
    shutil.copytree(folder, copy)
    configure(copy, transformers_version="4.0.0", use_cache=False, eos_token_id=1, torch_dtype="float32")
    assert compatibility(engine(copy)) == compatibility(engine(folder))


def test_what_may_differ_does(folder: Path) -> None:
    """Instances of one model that are started with other options of their own."""
    other = engine(
        folder,
        max_model_len=512,
        seed=9,
        enforce_eager=True,
        cache={"block_size": 64, "enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor"},
        served_model_name="something",
    )
    assert compatibility(other) == compatibility(engine(folder))


@pytest.mark.parametrize(("longest", "same"), [(8192, True), (1024, False)])
def test_the_longest_prompt_counts_where_it_chooses_the_rope_factors(folder: Path, longest: int, same: bool) -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "factor": 4.0}
    configure(folder, rope_scaling=factors | {"original_max_position_embeddings": 4096})
    assert differing(
        compatibility(engine(folder, max_model_len=8192)), compatibility(engine(folder, max_model_len=longest))
    ) == (set() if same else {"longest prompt"})


def test_weights_that_are_not_at_hand_are_compared_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = engine(folder)
    for name in ("one", "two"):
        given.model_config.model, given.model_config.revision = f"someone/{name}", "v1"
        with caplog.at_level(logging.WARNING, "kvpush"):
            assert compatibility(given)["weights"] == f"{name}@v1, by name"
        assert "by name only" in caplog.text


def test_broken_weights_are_compared_by_name(folder: Path) -> None:
    given = engine(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert compatibility(given)["weights"] == "model@main, by name"


def test_downloaded_weights_are_found(folder: Path, tmp_path: Path) -> None:
    """A model that was named by its id on the hub, against the same as a local folder."""
    cache = tmp_path / "cache" / "models--someone--tiny"
    snapshot = cache / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    given = engine(folder)
    expected = compatibility(given)
    given.model_config.model = "someone/tiny"
    given.load_config = replace(given.load_config, download_dir=str(tmp_path / "cache"))
    assert compatibility(given) == expected


def test_the_towers_around_a_text_model_are_compared(folder: Path) -> None:
    def multimodal(change: Callable[[dict[str, Any]], None]) -> Any:
        given = engine(folder)
        whole: dict[str, Any] = {
            "text_config": given.model_config.hf_config.to_dict(), "vision_config": {"depth": 3, "_name_or_path": "x"},
        }  # fmt: skip
        change(whole)
        given.model_config.hf_config = SimpleNamespace(architectures=["Both"], to_dict=lambda: whole)
        return compatibility(given)

    plain = multimodal(lambda whole: None)
    deeper = multimodal(lambda whole: whole["vision_config"].update(depth=4))
    moved = multimodal(lambda whole: whole["vision_config"].update(_name_or_path="y"))
    assert differing(plain, deeper) == {"config around the text model"}
    assert plain == moved


def test_it_fits_the_handshake(folder: Path) -> None:
    configure(folder, a_long_list=list(range(1000)))
    found = compatibility(engine(folder))
    assert all(len(value) <= MAX_VALUE_CHARS + 40 for value in found.values())
    configure(folder, a_long_list=[*range(999), 0])
    assert differing(found, compatibility(engine(folder))) == {"config.a_long_list"}
    assert 0 < len(found) < 100
    hello = wire.Hello(
        1, engine_id="e", agent_name="a", agent_metadata=b"", transport="t", layout=tiny_layout(), compat=found, lease_s=1.0
    )
    assert wire.decode(wire.encode(hello)) == hello


def tiny_layout() -> Any:
    from kvpush.testing.simulation import toy_layout

    return toy_layout(range(1), base=4096, num_blocks=2)
