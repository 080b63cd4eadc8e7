"""Where waterflow keeps files, and how it writes one: as a whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def cache_directory() -> Path:
    """Where profiles are kept: ``$WATERFLOW_CACHE``, else ``~/.cache/waterflow``."""
    configured = os.environ.get("WATERFLOW_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "waterflow"


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file at `path`: a reader sees the old one or the new one, never a part.

    Raises OSError if the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            # Without it, a power cut after the rename can leave an empty file under the good name.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
