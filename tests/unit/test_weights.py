# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a checkpoint: by content, not by name or by how it is spread over files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvpush import _weights
from kvpush._weights import weights_fingerprint
from kvpush.tiny_model import write_tiny_model

Tensors = dict[str, np.ndarray]


def tensors(seed: int = 0, count: int = 5) -> Tensors:
    rng = np.random.default_rng(seed)
    return {f"layer.{i}.weight": rng.normal(size=(20, 10 + i)).astype(np.float32) for i in range(count)}


def write(path: Path, content: Tensors, metadata: str = "") -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "by": metadata}}
    offset = 0
    for name, array in content.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in content.values()))


def test_copies_are_equal_whatever_their_names(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one", layers=2, hidden=64, heads=2, kv_heads=1)
    shutil.copytree(tmp_path / "one", tmp_path / "another-name")
    first = weights_fingerprint(tmp_path / "one")
    assert first is not None
    assert len(first) == 16
    assert weights_fingerprint(tmp_path / "another-name") == first
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert weights_fingerprint(tmp_path / "link") == first


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_tiny_model(tmp_path / str(seed), layers=2, hidden=64, heads=2, kv_heads=1, seed=seed)
    assert weights_fingerprint(tmp_path / "1") != weights_fingerprint(tmp_path / "2")


def test_how_tensors_are_spread_over_files_does_not_matter(tmp_path: Path) -> None:
    content = tensors()
    write(tmp_path / "whole" / "model.safetensors", content)
    items = list(content.items())
    write(tmp_path / "parts" / "model-2-of-2.safetensors", dict(items[:2]), "somebody else")
    write(tmp_path / "parts" / "model-1-of-2.safetensors", dict(items[:1:-1]))
    whole = weights_fingerprint(tmp_path / "whole")
    assert weights_fingerprint(tmp_path / "parts") == whole
    # Other forms of the same weights beside them don't count.
    names = {name: f"model-{2 if i < 2 else 1}-of-2.safetensors" for i, name in enumerate(content)}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    write(tmp_path / "parts" / "consolidated.safetensors", tensors(7))
    write(tmp_path / "whole" / "consolidated.safetensors", tensors(8))
    assert weights_fingerprint(tmp_path / "parts") == whole
    assert weights_fingerprint(tmp_path / "whole") == whole


@pytest.mark.parametrize("changed", range(5))
def test_one_tensor_is_enough(tmp_path: Path, changed: int) -> None:
    content = tensors()
    write(tmp_path / "a" / "model.safetensors", content)
    content[f"layer.{changed}.weight"] = content[f"layer.{changed}.weight"] * np.float32(1.01)
    write(tmp_path / "b" / "model.safetensors", content)
    assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "b")


def test_names_and_shapes_count(tmp_path: Path) -> None:
    content = tensors()
    write(tmp_path / "a" / "model.safetensors", content)
    renamed = {name.replace("layer.3", "layer.7"): array for name, array in content.items()}
    write(tmp_path / "b" / "model.safetensors", renamed)
    reshaped = content | {"layer.0.weight": content["layer.0.weight"].reshape(10, 20)}
    write(tmp_path / "c" / "model.safetensors", reshaped)
    assert len({weights_fingerprint(tmp_path / name) for name in "abc"}) == 3


def test_very_many_tensors_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "MAX_TENSORS", 8)
    content = tensors(count=50)
    write(tmp_path / "a" / "model.safetensors", content)
    write(tmp_path / "b" / "model.safetensors", {name: array + 1 for name, array in content.items()})
    write(tmp_path / "c" / "model.safetensors", dict(reversed(content.items())))
    assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "b")
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "c")


def test_other_formats(tmp_path: Path) -> None:
    for name, fill in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(bytes([fill]) * 100_000)
    (tmp_path / "d.gguf").write_bytes(b"\1" * 100_000)
    (tmp_path / "e.gguf").write_bytes(b"\1" * 100_001)
    found = {name: weights_fingerprint(tmp_path / name) for name in ("a", "b", "c", "d.gguf", "e.gguf")}
    assert found["a"] == found["b"] == found["d.gguf"]
    assert len(set(found.values())) == 3


def test_what_a_trainer_has_left_does_not_count(tmp_path: Path) -> None:
    left = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "last_optimizer.pt")
    for name in ("plain", "trained", "nothing"):
        (tmp_path / name).mkdir()
        if name != "nothing":
            (tmp_path / name / "pytorch_model.bin").write_bytes(b"\1" * 10_000)
        if name != "plain":
            for file in left:
                (tmp_path / name / file).write_bytes(b"\2" * 10_000)
    assert weights_fingerprint(tmp_path / "trained") == weights_fingerprint(tmp_path / "plain")
    assert weights_fingerprint(tmp_path / "nothing") is None


def test_only_the_first_format_that_there_are_weights_of_counts(tmp_path: Path) -> None:
    """As vLLM loads them: the original form of the same weights may lie beside."""
    for name in ("alone", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(b"\1" * 10_000)
    (tmp_path / "beside" / "consolidated.00.pth").write_bytes(b"\2" * 10_000)
    assert weights_fingerprint(tmp_path / "beside") == weights_fingerprint(tmp_path / "alone")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weights_fingerprint(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{"])
def test_broken_files_are_said_to_be(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises((ValueError, AttributeError)):
        weights_fingerprint(tmp_path)
