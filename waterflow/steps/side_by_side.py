"""Whether eager steps of several jobs gain or lose side by side, as an engine's jobs learn it."""

from __future__ import annotations

import math
import threading

#: Two lanes of eager Python side by side were slower than one after another where an operator that
#: makes a tensor took less than this (0.78 times as fast at 3.7 us, 1.6 to 1.8 at 8 in a recurrent
#: network).
_FINE_SECONDS = 5e-6
#: That depends on the machine, and on how much of a step is Python: where steps side by side are
#: seen to take so much of the time of one after another, those up to a bit longer go in turn. Small
#: perceptrons take 1.0 to 1.4 of it, convolutional and recurrent networks 0.5 to 0.65.
_LOSES, _AND_MORE = 0.8, 1.25
#: Seen so often in a row, or once so clearly: a garbage collection falls into any step, but two
#: threads that wait for each other take no more than this.
_LEAST_LOSSES = 2
_LOSES_CLEARLY, _AT_MOST = 1.0, 2.0


class SideBySide:
    """How long operators have to be for eager steps of two jobs to gain side by side, rather than
    wait for the interpreter's lock. Safe to use from any thread.

    Attributes:
        fine_seconds: of a thread for each tensor that steps make: below, they go in turn.
        long_seconds: what was seen to gain.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fine_seconds, self.long_seconds = _FINE_SECONDS, math.inf
        self._losses = 0  # seen one after another

    def note(self, grain: float, ratio: float) -> None:
        """Eager steps of several jobs ran beside each other, whose operators take `grain` seconds,
        and took `ratio` times as long as one after another: what loses is not tried again."""
        with self._lock:
            is_clear = _LOSES_CLEARLY < ratio < _AT_MOST
            lost = _LEAST_LOSSES if is_clear else 1
            self._losses = self._losses + lost if ratio > _LOSES else 0
            if self._losses >= _LEAST_LOSSES:
                self.fine_seconds = max(self.fine_seconds, _AND_MORE * grain)
            elif not self._losses:
                self.long_seconds = min(self.long_seconds, grain)

    def is_known(self, grain: float) -> bool:
        """Whether steps whose operators take so long were seen to gain or lose, or others like
        them."""
        return grain <= self.fine_seconds or grain >= self.long_seconds
