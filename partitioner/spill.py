"""Plans a step into a memory limit: which values leave for a slower tier, and when they are back.

A value that is not needed for long is copied out after one use and back before the next. Values are
chosen greedily, by the bytes times the places over the limit that they free, over what the copies
cost. Copies begin as early and are waited for as late as the limit allows, so that they run beside
compute. The plan is data; `executor/plan/spilled_step.py` makes instructions of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from waterflow.common.errors import PlanError
from waterflow.partitioner.profile import FloatArray, IntArray, Profile, node_times

#: Of a copy that is hidden beside compute so much counts all the same: it takes memory bandwidth.
_HIDDEN_SHARE = 0.25
#: A copy is begun so many times its length before it is needed: others may be in its way.
_HEAD_START = 1.5


@dataclass(frozen=True)
class MovableValue:
    """A storage that a step uses, with all tensors over it.

    Attributes:
        size: its bytes, as the arena counts them.
        uses: the nodes that read or write it, ascending; the one that makes it among them.
        writes: those of them that write it.
        block: its block in the step's profile; None: it is persistent, held between steps.
    """

    size: int
    uses: tuple[int, ...]
    writes: frozenset[int]
    block: int | None = None

    @property
    def is_persistent(self) -> bool:
        """Whether it is held between steps."""
        return self.block is None


class Absence(NamedTuple):
    """A time in which a value is away. Places are "before node n"; the last is after all nodes.

    Attributes:
        value: its number.
        leave: where copying out begins; -1: it is away when the step begins.
        gone: where its block is given up, the copy out being done; -1 with `leave`.
        fetch: where a new block is taken and copying in begins; one past the last place: it stays
            away until the next step.
        back: where the copy in is done; as `fetch` where it stays away.
        copies: whether its home has other bytes than it when it leaves.
    """

    value: int
    leave: int
    gone: int
    fetch: int
    back: int
    copies: bool


@dataclass(frozen=True)
class CopyCost:
    """What copies take.

    Attributes:
        out_rate, in_rate: bytes per second to the tier and from it.
        latency: seconds of each, whatever its size.
    """

    out_rate: float = 6e9
    in_rate: float = 6e9
    latency: float = 5e-6

    def out(self, size: int) -> float:
        """Seconds to copy a value out."""
        return size / self.out_rate + self.latency

    def back(self, size: int) -> float:
        """Seconds to copy a value back."""
        return size / self.in_rate + self.latency


@dataclass(frozen=True)
class SpillPlan:
    """Which values are away when.

    Attributes:
        absences: in the order in which they begin.
        away: the persistent values that are away between steps.
        peak: bytes that are held at most, the persistent ones that stay included.
    """

    absences: tuple[Absence, ...]
    away: frozenset[int]
    peak: int


class LimitTooSmallError(PlanError):
    """What cannot be away at one node is more than the limit; `smallest` would do."""

    def __init__(self, limit: int, smallest: int, node: int) -> None:
        super().__init__(
            f"the step cannot be planned into {limit} bytes: what node {node} works on "
            f"takes {smallest} bytes. A limit of {smallest} bytes or more is needed"
        )
        self.smallest = smallest
        self.node = node


def plan_spill(
    profile: Profile,
    values: Sequence[MovableValue],
    limit: int,
    *,
    cost: CopyCost | None = None,
    required: Collection[int] = (),
) -> SpillPlan:
    """Plans a step so that it never holds more than `limit` bytes, persistent ones included.

    Args:
        profile: the step; its persistent bytes are all that the job holds between steps.
        values: what may move.
        limit: bytes.
        cost: what copies take.
        required: persistent values that are away between steps in any case.

    Raises:
        LimitTooSmallError: there is no such plan.
    """
    planner = _Planner(profile, values, cost or CopyCost())
    planner.check(limit)
    planner.choose(limit, required)
    planner.thin_out(limit, required)
    return planner.spread(limit)


def spill_everything(profile: Profile, values: Sequence[MovableValue]) -> SpillPlan:
    """The plan without a plan: everything out right after each use and in right before the next."""
    planner = _Planner(profile, values, CopyCost())
    for gap in range(len(planner.value)):
        planner.take(gap)
    return planner.as_chosen()


def smallest_limit(profile: Profile, values: Sequence[MovableValue]) -> int:
    """Bytes of the smallest limit that a step can be planned into; see `plan_spill`."""
    return tightest_place(profile, values)[0]


def tightest_place(profile: Profile, values: Sequence[MovableValue]) -> tuple[int, int]:
    """The smallest limit, and the node whose operator takes that much."""
    least = _Planner(profile, values, CopyCost()).least()
    node = int(least.argmax())
    return int(least[node]), node


class _Planner:
    """Gaps between uses, as arrays; two half-open intervals of nodes each.

    A persistent value's boundary gap goes from its last use over the step's end to its first use.
    Its other gaps count only together with that one: a value that stays between steps keeps its
    place.
    """

    def __init__(self, profile: Profile, values: Sequence[MovableValue], cost: CopyCost) -> None:
        self.values = values
        self.cost = cost
        self.count = profile.num_nodes
        (seconds,) = node_times([profile])
        self.time: FloatArray = np.concatenate(([0.0], np.cumsum(seconds)))
        self.high: IntArray = profile.node_high() + profile.persistent_bytes
        self.boundary: dict[int, int] = {}  # of a persistent value its boundary gap
        self._find_gaps()
        self.chosen = np.zeros(len(self.value), dtype=bool)
        self.order: list[int] = []

    def _find_gaps(self) -> None:
        rows: list[tuple[int, int, int, int, int]] = []
        for number, value in enumerate(self.values):
            if value.is_persistent:
                self.boundary[number] = len(rows)
                first, last = value.uses[0], value.uses[-1]
                rows.append((number, last + 1, self.count, 0, first))
            for left, right in zip(value.uses, value.uses[1:], strict=False):
                if right > left + 1:
                    rows.append((number, left + 1, right, 0, 0))
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        self.value, self.start, self.stop, self.start2, self.stop2 = table.T
        sizes = np.array([value.size for value in self.values], dtype=np.int64)
        self.size = sizes[self.value] if len(rows) else np.zeros(0, np.int64)
        self.price = np.array([self._price(gap) for gap in range(len(rows))])
        self.depends = np.array(  # on which gap each one does, -1: on none
            [
                self.boundary.get(int(number), -1) if not self._is_boundary(gap) else -1
                for gap, number in enumerate(self.value)
            ],
            dtype=np.int64,
        )

    def _is_boundary(self, gap: int) -> bool:
        return self.boundary.get(int(self.value[gap])) == gap

    def _price(self, gap: int) -> float:
        """Seconds that an absence costs: what compute does not hide, and a share of the rest."""
        value, size = self.values[int(self.value[gap])], int(self.size[gap])
        copies = bool(value.writes) if value.is_persistent else True
        copy = self.cost.back(size) + (self.cost.out(size) if copies else self.cost.latency)
        room = self.time[self.stop[gap]] - self.time[self.start[gap]]
        room += self.time[self.stop2[gap]] - self.time[self.start2[gap]]
        return float(_HIDDEN_SHARE * copy + max(0.0, copy - room))

    # What is possible

    def least(self) -> IntArray:
        """The bytes held at each node where all is away that can be."""
        change = np.zeros(self.count + 1, dtype=np.int64)
        for start, stop in ((self.start, self.stop), (self.start2, self.stop2)):
            np.add.at(change, start, -self.size)
            np.add.at(change, stop, self.size)
        least: IntArray = self.high + np.cumsum(change)[:-1]
        return least

    def check(self, limit: int) -> None:
        """Raises LimitTooSmallError where no plan keeps to the limit."""
        least = self.least()
        node = int(least.argmax())
        if least[node] > limit:
            raise LimitTooSmallError(limit, int(least[node]), node)

    # What leaves

    def take(self, gap: int) -> None:
        """Has a value be away in a gap, and in the one that this depends on."""
        for one in (int(self.depends[gap]), gap):
            if one >= 0 and not self.chosen[one]:
                self.chosen[one] = True
                self.order.append(one)
                self._raise(one, -int(self.size[one]))

    def _raise(self, gap: int, size: int) -> None:
        self.high[self.start[gap] : self.stop[gap]] += size
        self.high[self.start2[gap] : self.stop2[gap]] += size

    def choose(self, limit: int, required: Collection[int]) -> None:
        """Takes gaps until nothing is above the limit."""
        for number in required:
            if number in self.boundary:
                self.take(self.boundary[number])
        while (peak := int(self.high.argmax())) >= 0 and self.high[peak] > limit:
            over = np.concatenate(([0], np.cumsum(self.high > limit)))
            places = over[self.stop] - over[self.start] + over[self.stop2] - over[self.start2]
            covers = (self.start <= peak) & (peak < self.stop)
            covers |= (self.start2 <= peak) & (peak < self.stop2)
            free = np.flatnonzero(covers & ~self.chosen)
            price = self.price[free].copy()
            needs = self.depends[free]
            extra = (needs >= 0) & ~self.chosen[needs]
            price[extra] += self.price[needs[extra]]
            # Bytes beyond what is to be freed are worth nothing.
            useful = np.minimum(self.size[free], self.high[peak] - limit)
            self.take(int(free[(useful * places[free] / price).argmax()]))

    def thin_out(self, limit: int, required: Collection[int]) -> None:
        """Gives up gaps that later ones have made needless, the dearest for their bytes first."""
        needed_by = np.zeros(len(self.value), dtype=np.int64)
        np.add.at(needed_by, self.depends[self.chosen & (self.depends >= 0)], 1)
        for gap in sorted(self.order, key=lambda gap: -self.price[gap]):
            number, size = int(self.value[gap]), int(self.size[gap])
            if needed_by[gap] or (self._is_boundary(gap) and number in required):
                continue
            parts = self.high[self.start[gap] : self.stop[gap]]
            others = self.high[self.start2[gap] : self.stop2[gap]]
            if max(parts.max(initial=0), others.max(initial=0)) + size <= limit:
                self._raise(gap, size)
                self.chosen[gap] = False
                if self.depends[gap] >= 0:
                    needed_by[self.depends[gap]] -= 1

    # When it moves

    def as_chosen(self) -> SpillPlan:
        """Each copy waited for where it begins."""
        return self._plan(self._absences())

    def spread(self, limit: int) -> SpillPlan:
        """Copies in begin earlier and copies out end later, as far as the limit lets them."""
        absences = self._absences()
        lane = np.inf
        for place in sorted(range(len(absences)), key=lambda n: -absences[n].back):
            one = absences[place]
            if one.fetch <= self.count:
                seconds = self.cost.back(self.values[one.value].size)
                lane = min(lane, float(self.time[one.back])) - seconds * _HEAD_START
                wanted = int(np.searchsorted(self.time, lane, "right")) - 1
                fetch = self._earliest(one, max(wanted, one.gone, 0), limit)
                absences[place] = one._replace(fetch=fetch)
        lane = 0.0
        for place in sorted(range(len(absences)), key=lambda n: absences[n].leave):
            one = absences[place]
            if one.leave >= 0 and one.copies:
                seconds = self.cost.out(self.values[one.value].size)
                lane = max(lane, float(self.time[one.leave])) + seconds
                wanted = int(np.searchsorted(self.time, lane, "left"))
                gone = self._latest(one, min(wanted, one.fetch, self.count), limit)
                absences[place] = one._replace(gone=gone)
        return self._plan(absences)

    def _earliest(self, one: Absence, wanted: int, limit: int) -> int:
        size = self.values[one.value].size
        stands = self.high[wanted : one.back] + size > limit
        blocked = np.flatnonzero(stands)
        fetch = wanted + int(blocked[-1]) + 1 if len(blocked) else min(wanted, one.back)
        self.high[fetch : one.back] += size
        return fetch

    def _latest(self, one: Absence, wanted: int, limit: int) -> int:
        size = self.values[one.value].size
        blocked = np.flatnonzero(self.high[one.leave : wanted] + size > limit)
        gone = one.leave + int(blocked[0]) if len(blocked) else max(wanted, one.leave)
        self.high[one.leave : gone] += size
        return gone

    def _absences(self) -> list[Absence]:
        """The chosen gaps as absences, in the order of values and of time."""
        by_value: dict[int, list[int]] = {}
        for gap in np.flatnonzero(self.chosen):
            by_value.setdefault(int(self.value[gap]), []).append(int(gap))
        return [one for number in by_value for one in self._of_value(number, by_value[number])]

    def _of_value(self, number: int, gaps: list[int]) -> list[Absence]:
        value, after = self.values[number], self.count + 1
        inner = (gap for gap in gaps if not self._is_boundary(gap))
        spans = sorted((int(self.start[gap]), int(self.stop[gap])) for gap in inner)
        if value.is_persistent:
            spans = [(-1, value.uses[0]), *spans, (value.uses[-1] + 1, after)]
        found = [Absence(number, start, start, stop, stop, copies=False) for start, stop in spans]
        # Its home is as it is until it is written to; one that the step made has none yet.
        clean_since = 0 if value.is_persistent else -1
        for place, one in enumerate(found):
            if one.leave < 0:
                continue
            copies = any(clean_since <= node < one.leave for node in value.writes)
            copies = copies or clean_since < 0
            found[place] = one._replace(copies=copies)
            clean_since = one.leave
        return found

    def _plan(self, absences: Iterable[Absence]) -> SpillPlan:
        absences = tuple(sorted(absences, key=lambda one: (one.leave, one.value)))
        away = frozenset(one.value for one in absences if one.leave < 0)
        return SpillPlan(absences, away, int(self.high.max()))
