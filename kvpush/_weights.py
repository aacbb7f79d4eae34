# SPDX-License-Identifier: Apache-2.0
"""Which weights lie in a folder: a fingerprint by content, so that equal copies under different names are equal.

Reading all of a checkpoint would take minutes. Read are: of each safetensors file the header (names, types and shapes of all
tensors) and a few hundred bytes out of the middle of each tensor; of other formats the size and evenly spaced pieces. Any
training, quantising or merging changes these. A copy in which only a few rows of one tensor differ is not told apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_TENSORS = 2048
"""At most so many tensors are sampled, evenly chosen by name: for models of tens of thousands of experts on slow disks."""
SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20
_PIECES = 64
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""What a trainer leaves beside its weights, and vLLM does not load (its ``filter_files_not_needed_for_inference``): names
that end so."""


def weights_fingerprint(path: Path) -> str | None:
    """16 hexadecimal digits, the same for the same tensors however they are spread over files; None where there are no weights.

    Args:
        path: A model's folder, or a single file.

    Raises:
        OSError: something can't be read.
        ValueError: a file is broken.
    """
    state = hashlib.blake2b(digest_size=8)
    files = _safetensors(path)
    if files:
        for piece in _tensors(files):
            state.update(piece)
        return state.hexdigest()
    files = [path] if path.is_file() else _of_other_formats(path)
    for file in files:
        for piece in _pieces(file):
            state.update(piece)
    return state.hexdigest() if files else None


def _safetensors(path: Path) -> list[Path]:
    """The files that count: those that the index names, if there is one (other forms of the same weights may lie beside)."""
    if path.is_file():
        return [path] if path.suffix == ".safetensors" else []
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({path / name for name in names})
    files = sorted(path.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _of_other_formats(path: Path) -> list[Path]:
    """The files of the first format that there are weights of, as vLLM takes them."""
    for pattern in _OTHER_FORMATS:
        files = sorted(file for file in path.glob(pattern) if not file.name.endswith(_NO_WEIGHTS))
        if files:
            return files
    return []


def _tensors(files: Iterable[Path]) -> Iterable[bytes]:
    """Names, types and shapes of all tensors, and samples of some, ordered by name.

    Source: the safetensors format, an 8-byte little-endian length, a JSON header of that length, then the tensors' bytes at the
    offsets that it names.
    """
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError(f"{file.name} is no safetensors file: its header would have {length} bytes")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = (file, 8 + length, entry)
    names = sorted(found)
    for name in names:
        entry = found[name][2]
        yield f"{name} {entry['dtype']} {entry['shape']};".encode()
    step = max(1, -(-len(names) // MAX_TENSORS))
    # File by file and front to back, as disks like it.
    chosen = sorted(names[::step], key=lambda name: (found[name][0], found[name][2]["data_offsets"][0]))
    samples: dict[str, bytes] = {}
    opened: tuple[Path, Any] | None = None
    try:
        for name in chosen:
            file, start, entry = found[name]
            if opened is None or opened[0] != file:
                if opened is not None:
                    opened[1].close()
                opened = (file, file.open("rb", buffering=0))
            lo, hi = entry["data_offsets"]
            middle = max(lo, (lo + hi - SAMPLE_BYTES) // 2)
            opened[1].seek(start + middle)
            samples[name] = opened[1].read(min(SAMPLE_BYTES, hi - middle))
    finally:
        if opened is not None:
            opened[1].close()
    for name in names[::step]:
        yield samples[name]


def _pieces(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    yield size.to_bytes(8, "little")
    with file.open("rb", buffering=0) as stream:
        for idx in range(_PIECES):
            stream.seek(max(0, size - 4096) * idx // (_PIECES - 1))
            yield stream.read(4096)
