"""Co-train several PyTorch jobs in one process under one memory budget."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "allocator_ext").is_dir() and (_ROOT / "setup.py").is_file():
    # A source checkout that Python found by itself (``python -m`` from its root): the subpackages
    # lie beside this folder there, and are installed under it everywhere else.
    __path__.append(str(_ROOT))
