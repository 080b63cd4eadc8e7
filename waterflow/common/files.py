"""Files, written as a whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(
    path: Path, content: bytes, *, private: bool = False, durable: bool = True
) -> None:
    """Replace the file at `path`: a reader sees the old one or the new one, never a part.

    Args:
        path: the file.
        content: what it is to hold.
        private: whether its owner alone may read and write it.
        durable: whether that holds after a power cut, too, for which this waits for the disk.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        mode = 0o600 if private else 0o666
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            if durable:  # else a power cut can leave an empty file under the good name
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Makes durable which files are in a folder: else a power cut may bring back a renamed one.

    Raises OSError if it cannot.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
