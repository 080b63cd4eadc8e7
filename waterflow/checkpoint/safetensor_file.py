"""Files of tensors in the format of safetensors, with their SHA-256.

They are written here in one pass, which hashes what it writes and copies nothing: the library's own
function makes a second copy of all tensors, and leaves no moment at which to make the file durable.
They are read by the library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PART = 16 << 20  # bytes hashed or read at once


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Writes a new file, durably; returns its SHA-256 and its bytes.

    Args:
        path: nothing is there yet.
        tensors: on the host, contiguous, of plain types.

    Raises:
        OSError: it cannot be written; a part of it may be there.
    """
    # Larger elements first: then each tensor lies as its type wants it, and readers can map them.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        parts: list[Buffer] = [_header(tensors, order)]
        parts += [_bytes_of(tensors[name]) for name in order]
        for part in parts:
            digest.update(part)
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), size


def _header(tensors: Mapping[str, torch.Tensor], order: list[str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        tensor = tensors[name]
        stop = start + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> Buffer:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def read_tensors(path: Path, sha256: str, size: int) -> dict[str, torch.Tensor]:
    """The tensors of a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not the file that was written; says how.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise ValueError(f"it has {found} bytes, and had {size}")
        while part := file.read(_PART):
            digest.update(part)
    if digest.hexdigest() != sha256:
        raise ValueError("its checksum is wrong")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"it is no file of tensors: {error}") from error
