"""A schedule: which node groups run side by side, and what that needs at worst.

A round is one step of every job. It is a list of pairs; the groups of a pair run in parallel,
one per lane, and the next pair starts when all of them are done (Waterwave, section 4.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from waterflow.common.units import format_bytes
from waterflow.partitioner.groups import NodeGroup
from waterflow.partitioner.profile import Profile, node_times


class GroupRef(NamedTuple):
    """A group of a job, both counted from 0; ``job`` is the caller's index."""

    job: int
    group: int


Pair = tuple[GroupRef | None, ...]


@dataclass(frozen=True)
class Schedule:
    """One round of all jobs: the plan that a policy makes and the executor runs.

    ``groups[j]`` are the node groups of job j. Each of ``pairs`` has ``lanes`` places; None is a
    bubble. ``peak_bytes`` is the most that the round holds under worst-order accounting, all
    persistent bytes included.
    """

    policy: str
    lanes: int
    groups: tuple[tuple[NodeGroup, ...], ...]
    pairs: tuple[Pair, ...]
    peak_bytes: int

    def predicted_seconds(self, profiles: Sequence[Profile]) -> float:
        """Time of the round: the longest lane of each pair, summed (barriers not counted)."""
        return sum(max(times, default=0.0) for times in self._lane_seconds(profiles))

    def overlap(self, profiles: Sequence[Profile]) -> float:
        """Fraction of the busy time during which more than one lane is active, 0.0 to 1.0."""
        both = busy = 0.0
        for times in self._lane_seconds(profiles):
            longest_first = [*sorted(times, reverse=True), 0.0, 0.0]
            busy += longest_first[0]
            both += longest_first[1]
        return both / busy if busy else 0.0

    def compact(self) -> Schedule:
        """The same schedule without pairs in which no lane has work."""
        kept = tuple(pair for pair in self.pairs if any(ref is not None for ref in pair))
        return self if len(kept) == len(self.pairs) else dataclasses.replace(self, pairs=kept)

    def describe(self, names: Sequence[str], max_rows: int = 40) -> str:
        """A text table, one row a pair: job, group number (from 1) and net bytes per lane."""
        rows = [["pair", *(f"lane {lane}" for lane in range(self.lanes))]]
        for number, pair in enumerate(self.pairs[:max_rows]):
            rows.append([str(number), *(self._cell(ref, names) for ref in pair)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{self.policy}: {len(self.groups)} jobs, {len(self.pairs)} pairs, "
            f"peak {format_bytes(self.peak_bytes, 2)}"
        ]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        if len(self.pairs) > max_rows:
            lines.append(f"... {len(self.pairs) - max_rows} more pairs")
        return "\n".join(lines)

    def _cell(self, ref: GroupRef | None, names: Sequence[str]) -> str:
        if ref is None:
            return "-"
        groups = self.groups[ref.job]
        net = groups[ref.group].net_bytes
        sign = "+" if net > 0 else ""
        return f"{names[ref.job]} {ref.group + 1}/{len(groups)} {sign}{format_bytes(net, 2)}"

    def _lane_seconds(self, profiles: Sequence[Profile]) -> list[list[float]]:
        times = node_times(profiles)
        seconds = [
            [float(times[job][group.start : group.stop].sum()) for group in groups]
            for job, groups in enumerate(self.groups)
        ]
        return [
            [seconds[ref.job][ref.group] for ref in pair if ref is not None] for pair in self.pairs
        ]


def planned_peak(
    groups: Sequence[Sequence[NodeGroup]], pairs: Sequence[Pair], persistent: Sequence[int]
) -> int:
    """The most bytes that ``pairs`` can hold, under the worst order inside each pair.

    Inside a pair no lane may count on what another lane frees: the growth of all its groups adds
    up before any of them ends. ``persistent`` are the bytes that each job holds all the time.
    """
    live = peak = sum(persistent)
    for pair in pairs:
        running = [groups[ref.job][ref.group] for ref in pair if ref is not None]
        peak = max(peak, live + sum(group.growth_bytes for group in running))
        live += sum(group.net_bytes for group in running)
    return peak
