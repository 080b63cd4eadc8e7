"""What a step does under a spill plan: its nodes with the moves between them, and its profile."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from waterflow.partitioner.profile import EVENT, Profile
from waterflow.partitioner.spill import Absence, MovableValue, SpillPlan

#: Seconds of an end of a move, beside the copy.
_END_SECONDS = 2e-6


class End(enum.IntEnum):
    """The four ends of an absence, in the order in which those of one place come."""

    LEAVE = 0
    GONE = 1
    FETCH = 2
    BACK = 3


class Node(NamedTuple):
    """A node of the step as it was."""

    number: int


class Move(NamedTuple):
    """One end of an absence."""

    end: End
    absence: Absence


@dataclass(frozen=True)
class Homes:
    """Where values lie while they are away.

    Attributes:
        sizes, starts, stops: of each value that needs a place in the tier, by its number: bytes,
            and the first and last position in the spilled step between which it has it.
    """

    sizes: dict[int, int]
    starts: dict[int, int]
    stops: dict[int, int]

    def profile(self, nodes: int) -> tuple[Profile | None, list[int]]:
        """What the tier holds, as the profile of a step, and the values by their blocks."""
        order = sorted(self.sizes, key=lambda value: (self.starts[value], value))
        rows = [(self.starts[value], 0, self.sizes[value], n) for n, value in enumerate(order)]
        rows += [(self.stops[value], 1, -self.sizes[value], n) for n, value in enumerate(order)]
        if not rows:
            return None, []
        events = [(node, size, block) for node, _, size, block in sorted(rows)]
        return Profile(np.array(events, dtype=EVENT), np.zeros(nodes), 0, "fake", "tier"), order


def sequence_of(plan: SpillPlan, nodes: int) -> list[Node | Move]:
    """The step's nodes in their order, each behind the moves of its place."""
    places: list[list[Move]] = [[] for _ in range(nodes + 1)]
    for one in plan.absences:
        for end, place in zip(End, one[1:5], strict=True):
            if 0 <= place <= nodes:
                places[place].append(Move(end, one))
    found: list[Node | Move] = []
    for number, moves in enumerate(places):
        moves.sort(key=lambda move: move.end)
        found += moves
        if number < nodes:
            found.append(Node(number))
    return found


def spilled_profile(
    profile: Profile, values: Sequence[MovableValue], sequence: Sequence[Node | Move]
) -> Profile:
    """What the step does to memory now, beside the persistent values that stay; those that are away
    count where they are fetched."""
    starts = np.searchsorted(profile.events["node"], np.arange(profile.num_nodes + 1))
    blocks: dict[int, int] = {}  # of the profile as it was -> now
    held = {value.block: number for number, value in enumerate(values) if value.block is not None}
    of_value: dict[int, int] = {}
    rows: list[tuple[int, int, int]] = []
    seconds: list[float] = []
    count = 0
    for place, item in enumerate(sequence):
        if isinstance(item, Node):
            seconds.append(float(profile.node_seconds[item.number]))
            for event in profile.events[starts[item.number] : starts[item.number + 1]]:
                size, block = int(event["bytes"]), int(event["id"])
                if size > 0:
                    blocks[block] = count
                    count += 1
                value = held.get(block)
                moved = None if value is None else of_value.get(value)
                rows.append((place, size, blocks[block] if moved is None or size > 0 else moved))
            continue
        seconds.append(_END_SECONDS)
        number = item.absence.value
        value_moved = values[number]
        if item.end is End.GONE:
            block = of_value.get(number, -1)
            if block < 0:
                assert value_moved.block is not None, "a persistent value is fetched before it goes"
                block = blocks[value_moved.block]
            rows.append((place, -value_moved.size, block))
        elif item.end is End.FETCH:
            of_value[number] = count
            rows.append((place, value_moved.size, count))
            count += 1
    events = np.array(rows, dtype=EVENT)
    times = np.array(seconds) if profile.seconds > 0 else np.zeros(len(sequence))
    return Profile(events, times, 0, profile.source, profile.name)


def homes_of(values: Sequence[MovableValue], sequence: Sequence[Node | Move]) -> Homes:
    """The places in the tier that transient values need; persistent ones have a home."""
    homes = Homes({}, {}, {})
    for place, item in enumerate(sequence):
        if isinstance(item, Move) and not values[item.absence.value].is_persistent:
            number = item.absence.value
            homes.sizes[number] = values[number].size
            homes.starts.setdefault(number, place)
            homes.stops[number] = place
    return homes
