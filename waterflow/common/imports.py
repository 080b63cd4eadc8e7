"""Imports in the middle of a user's program."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Inside, a module may draw from Python's random stream while it is imported, as rich does: the
    stream is the user's, and stays where it is."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
