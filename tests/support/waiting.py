"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 240) -> None:
    """Returns when the condition holds; fails when it has not for so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happens any more"
        time.sleep(0.001)
