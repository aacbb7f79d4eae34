# SPDX-License-Identifier: Apache-2.0
"""A small random-weight Llama with a byte-level tokenizer, written to a folder without any download.

It exists so that `kvpush demo` and the end-to-end tests run on a machine that can't fetch weights. Two
properties matter more than size:

* **Same seed, same bytes.** Every tensor is drawn from its own stream, seeded by (seed, tensor name).
* **Outputs depend on the whole prompt.** The demo proves that transferred KV is right by comparing greedy
  outputs, so a model whose output ignores most of its KV would prove nothing. The usual initialisation
  (std 0.02) is like that: its attention is nearly uniform, so one wrong block among many hardly moves the
  average. Here projections keep the variance of their input and query/key weights are scaled up
  (`ATTENTION_GAIN`), so that each head looks sharply at a few positions, all over the prompt.

Only bytes of printable ASCII have output weights, so what the model writes can be shown in a terminal and never
holds half a UTF-8 character. The files are written with NumPy and the standard library alone: `config.json`,
`model.safetensors`, `tokenizer.json` and their companions need neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvpush.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "HEAD_SIZES",
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "TinyModelSpec",
    "kv_bytes_per_token",
    "tiny_model_command",
    "write_model_of",
    "write_tiny_model",
]

#: Head sizes that vLLM's CPU attention accepts. Source: vllm 0.32, v1/attention/backends/cpu_attn.py:70.
HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

#: Ids 256, 257, 258: after the 256 bytes.
SPECIAL_TOKENS: Final = ("<|bos|>", "<|eos|>", "<|pad|>")

#: 256 bytes and the special tokens.
VOCAB_SIZE: Final = 256 + len(SPECIAL_TOKENS)

#: Standard deviation of the attention scores (before softmax) of unrelated positions. 1 is nearly uniform over
#: a long prompt; from about 6 on nearly all weight sits on one position.
ATTENTION_GAIN: Final = 3.5

_DTYPES: Final = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelSpec:
    """Shape of a tiny model, checked on construction.

    Args:
        layers: number of transformer layers.
        hidden: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key/value heads; divides `heads`.
        head_dim: size of a head; `hidden / heads` when None.
        intermediate: width of the MLP; about 8/3 of `hidden`, rounded up to 32, when None.
        vocab: rows of the embedding, at least `VOCAB_SIZE`; ids above the tokenizer's are never produced.
        seed: seed of the weights.
        dtype: "float32", "bfloat16" or "float16": the dtype of the stored weights.
        max_position_embeddings: longest context, in tokens.

    Raises:
        ConfigError: the shape is impossible, or vLLM's CPU attention has no kernel for the head size.
    """

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int | None = None
    intermediate: int | None = None
    vocab: int = VOCAB_SIZE
    seed: int = 0
    dtype: str = "bfloat16"
    max_position_embeddings: int = 16384

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "max_position_embeddings"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, not {self.seed}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim is None and self.hidden % self.heads:
            raise ConfigError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}) unless head_dim is given")
        if self.head_size not in HEAD_SIZES:
            raise ConfigError(
                f"head size {self.head_size} (hidden / heads, or head_dim) has no kernel in vLLM's CPU attention; "
                f"it knows {', '.join(map(str, HEAD_SIZES))}"
            )
        if self.intermediate is not None and self.intermediate < 1:
            raise ConfigError(f"intermediate must be at least 1, not {self.intermediate}")
        if self.vocab < VOCAB_SIZE:
            raise ConfigError(f"vocab must be at least {VOCAB_SIZE} (bytes and special tokens), not {self.vocab}")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}")

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP."""
        return self.intermediate if self.intermediate is not None else math.ceil(self.hidden * 8 / 3 / 32) * 32


def kv_bytes_per_token(spec: TinyModelSpec, dtype: str | None = None) -> int:
    """Bytes of KV that one token takes over all layers.

    Args:
        spec: the model.
        dtype: dtype of the KV cache; that of the weights when None.

    Returns:
        Keys and values, in bytes.
    """
    return 2 * spec.layers * spec.kv_heads * spec.head_size * _DTYPES[dtype or spec.dtype][1]


def write_tiny_model(
    path: str | Path,
    *,
    layers: int = 8,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "bfloat16",
    max_position_embeddings: int = 16384,
) -> Path:
    """Write the model and its tokenizer to a folder.

    Args:
        path: the folder; made if missing, files of an earlier model in it are replaced.
        layers: see `TinyModelSpec`, also for the other arguments.
        hidden: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        head_dim: size of a head.
        intermediate: width of the MLP.
        vocab: rows of the embedding.
        seed: seed of the weights; the same seed and shape give the same bytes.
        dtype: dtype of the stored weights.
        max_position_embeddings: longest context, in tokens.

    Returns:
        The folder.

    Raises:
        ConfigError: a bad argument, or the path is a file.
        OSError: the folder can't be written.
    """
    shape = TinyModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        seed=seed,
        dtype=dtype,
        max_position_embeddings=max_position_embeddings,
    )
    return write_model_of(shape, path)


def write_model_of(spec: TinyModelSpec, path: str | Path) -> Path:
    """The same as `write_tiny_model`, of a shape that is there already.

    Args:
        spec: what to write.
        path: the folder.

    Returns:
        The folder.

    Raises:
        ConfigError: the path is a file.
        OSError: the folder can't be written.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(spec))
    _write_json(folder / "generation_config.json", {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258})
    _write_json(folder / "tokenizer.json", _tokenizer())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(spec))
    _write_safetensors(folder / "model.safetensors", spec)
    return folder


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(spec: TinyModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.mlp_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position_embeddings,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "torch_dtype": spec.dtype,
    }


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte, in byte order, as GPT-2's byte-level BPE defines it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + i, "content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_alphabet())},
            "merges": [],
        },
    }


def _tokenizer_config(spec: TinyModelSpec) -> dict[str, Any]:
    bos, eos, pad = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": spec.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _tensors(spec: TinyModelSpec) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and standard deviation of each tensor; 0 stands for a norm's ones.

    The residual stream starts with variance 1 and each of the 2 * layers branches adds 1 / layers to it, so
    attention weighs as much as the embedding whatever the depth.
    """
    hidden, mlp = spec.hidden, spec.mlp_size
    q_size, kv_size = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    branch = 1 / math.sqrt(spec.layers)
    # score = q.k / sqrt(head size); with unit-variance q and k its deviation is 1.
    qk = math.sqrt(ATTENTION_GAIN / hidden)
    yield "model.embed_tokens.weight", (spec.vocab, hidden), 1.0
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,), 0.0
        yield prefix + "self_attn.q_proj.weight", (q_size, hidden), qk
        yield prefix + "self_attn.k_proj.weight", (kv_size, hidden), qk
        yield prefix + "self_attn.v_proj.weight", (kv_size, hidden), 1 / math.sqrt(hidden)
        # Averaging over a few positions shrinks the values; twice the gain makes up for it.
        yield prefix + "self_attn.o_proj.weight", (hidden, q_size), 2 * branch / math.sqrt(q_size)
        yield prefix + "post_attention_layernorm.weight", (hidden,), 0.0
        yield prefix + "mlp.gate_proj.weight", (mlp, hidden), 1 / math.sqrt(hidden)
        yield prefix + "mlp.up_proj.weight", (mlp, hidden), 1 / math.sqrt(hidden)
        # silu(gate) * up has a variance of about 0.36.
        yield prefix + "mlp.down_proj.weight", (hidden, mlp), branch / math.sqrt(0.36 * mlp)
    yield "model.norm.weight", (hidden,), 0.0
    yield "lm_head.weight", (spec.vocab, hidden), 1 / math.sqrt(hidden)


def _draw(spec: TinyModelSpec, name: str, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    import numpy as np

    if std == 0.0:
        return np.ones(shape, dtype=np.float32)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([spec.seed, zlib.crc32(name.encode())])))
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
    if name == "lm_head.weight":
        values[:0x20] = 0
        values[0x7F:] = 0
    return values


def _encode(values: NDArray[np.float32], dtype: str) -> bytes:
    import numpy as np

    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.view(np.uint32)
    # Round to nearest, ties to even, as torch does.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _write_safetensors(path: Path, spec: TinyModelSpec) -> None:
    """Write the weights: 8 bytes of header length, a JSON header, the tensors one after another."""
    code, itemsize = _DTYPES[spec.dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, _ in _tensors(spec):
        end = offset + math.prod(shape) * itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    # Written aside and moved into place: a server never maps a file that is half written.
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, shape, std in _tensors(spec):
            file.write(_encode(_draw(spec, name, shape, std), spec.dtype))
    partial.replace(path)


def tiny_model_command(
    path: Annotated[Path, typer.Argument(help="Folder to write the model to; made if missing.")],
    layers: Annotated[int, typer.Option(help="Number of transformer layers.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 512,
    heads: Annotated[int, typer.Option(help="Number of query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Number of key/value heads.")] = 4,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head; hidden / heads if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: float32, bfloat16 or float16.")] = "bfloat16",
    max_position_embeddings: Annotated[int, typer.Option(help="Longest context, in tokens.")] = 16384,
) -> None:
    """Write a small random-weight Llama with a byte-level tokenizer, without any download."""
    from rich.console import Console

    try:
        folder = write_tiny_model(
            path,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            seed=seed,
            dtype=dtype,
            max_position_embeddings=max_position_embeddings,
        )
    except (ConfigError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(2) from error
    size = (folder / "model.safetensors").stat().st_size
    Console().print(f"{folder}: {size / 1e6:.1f} MB of {dtype} weights, seed {seed}", highlight=False)
