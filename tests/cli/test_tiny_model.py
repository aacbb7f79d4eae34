# SPDX-License-Identifier: Apache-2.0
"""The tiny model: the same bytes for the same seed, readable by transformers, sensitive to its whole prompt."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvpush.errors import ConfigError
from kvpush.tiny_model import VOCAB_SIZE, TinyModelSpec, kv_bytes_per_token, tiny_model_command, write_tiny_model

SMALL = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = files_of(write_tiny_model(tmp_path / "a", **SMALL, seed=7))
    assert first == files_of(write_tiny_model(tmp_path / "b", **SMALL, seed=7))
    assert set(first) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    other = files_of(write_tiny_model(tmp_path / "c", **SMALL, seed=8))
    assert other.pop("model.safetensors") != first.pop("model.safetensors")
    assert other == first


def test_writing_again_replaces_the_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **SMALL, seed=1)
    again = files_of(write_tiny_model(tmp_path, **SMALL, seed=2))
    assert again == files_of(write_tiny_model(tmp_path / "fresh", **SMALL, seed=2))


@pytest.mark.parametrize(("dtype", "code", "itemsize"), [("float32", "F32", 4), ("bfloat16", "BF16", 2), ("float16", "F16", 2)])
def test_safetensors_file_is_well_formed(tmp_path: Path, dtype: str, code: str, itemsize: int) -> None:
    header, body = header_of(write_tiny_model(tmp_path, **SMALL, dtype=dtype) / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for entry in header.values():
        assert entry["dtype"] == code
        assert entry["data_offsets"] == [end, end + math.prod(entry["shape"]) * itemsize]
        end = entry["data_offsets"][1]
    assert end == len(body)
    assert header["model.embed_tokens.weight"]["shape"] == [VOCAB_SIZE, 64]


def test_bfloat16_is_the_rounded_float32(tmp_path: Path) -> None:
    _, exact = header_of(write_tiny_model(tmp_path / "f32", **SMALL, dtype="float32") / "model.safetensors")
    _, short = header_of(write_tiny_model(tmp_path / "bf16", **SMALL, dtype="bfloat16") / "model.safetensors")
    wide = np.frombuffer(exact, dtype="<f4")
    narrow = (np.frombuffer(short, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    assert wide.shape == narrow.shape
    np.testing.assert_array_less(np.abs(wide - narrow), np.abs(wide) * 2.0**-8 + 1e-30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"hidden": 65}, "multiple of heads"),
        ({"hidden": 128, "heads": 8}, "head size 16"),
        ({"head_dim": 48}, "head size 48"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"kv_heads": -1}, "kv_heads must be at least 1"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"vocab": 200}, "vocab must be at least"),
        ({"seed": -1}, "seed must not be negative"),
        ({"intermediate": 0}, "intermediate must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused_before_anything_is_written(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_tiny_model(tmp_path / "model", **{**SMALL, **change})
    assert not (tmp_path / "model").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ConfigError, match="not a folder"):
        write_tiny_model(tmp_path / "model", **SMALL)
    assert (tmp_path / "model").read_text() == "mine"


def test_kv_bytes_per_token() -> None:
    spec = TinyModelSpec(layers=8, hidden=512, heads=8, kv_heads=4)
    assert kv_bytes_per_token(spec) == 2 * 8 * 4 * 64 * 2
    assert kv_bytes_per_token(spec, "float32") == 2 * 8 * 4 * 64 * 4


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(tiny_model_command)
    return app


def test_command_writes_the_model(tmp_path: Path) -> None:
    arguments = ["--layers", "2", "--hidden", "64", "--heads", "2", "--kv-heads", "1", "--seed", "7", "--dtype", "float32"]
    result = CliRunner().invoke(command(), [str(tmp_path / "cli"), *arguments])
    assert result.exit_code == 0, result.output
    assert "seed 7" in result.output
    assert files_of(tmp_path / "cli") == files_of(write_tiny_model(tmp_path / "api", **SMALL, seed=7, dtype="float32"))


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    result = CliRunner().invoke(command(), [str(tmp_path / "cli"), "--heads", "3"])
    assert result.exit_code == 2
    assert "multiple of" in result.output


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_it_and_outputs_depend_on_the_whole_prompt(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_model(tmp_path, layers=4, hidden=128, heads=4, kv_heads=2, dtype="float32", seed=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "héllo\n  wörld <b>"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|bos|>a<|eos|>") == [256, 97, 257]
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "user: hi\nassistant: "

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=258)
        return out[0, len(prompt) :].tolist()

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0x20, 0x7F, 300).tolist() for _ in range(3)]
    answers = [answer(prompt) for prompt in prompts]
    assert len({tuple(one) for one in answers}) == 3
    assert all(len(set(one)) >= 4 for one in answers)
    assert all(0x20 <= token < 0x7F for one in answers for token in one)
    for prompt, before in zip(prompts, answers, strict=True):
        for start in range(0, len(prompt) - 32, 32):
            # What a wrong block of KV would do, at the smallest block size that vLLM's CPU attention has.
            changed = [(token - 0x20 + 40) % 95 + 0x20 if start <= i < start + 32 else token for i, token in enumerate(prompt)]
            assert answer(changed) != before, f"tokens from {start} on of {len(prompt)} do not matter"
