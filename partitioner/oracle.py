"""An independent check of a schedule: replay every event, trust nothing that the planner summed.

It shares no accounting code with ``groups`` and ``schedule``: of a node group it believes only
the node range, and walks the raw events of the profile with plain loops.
"""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.common.errors import PlanError
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.schedule import Pair, Schedule


def verify(schedule: Schedule, profiles: Sequence[Profile], budget: int) -> None:
    """Accept a schedule or raise PlanError with a sentence that says what is wrong.

    Checked: the groups of each job cover its step in order; every pair has a place per lane, some
    work, and at most one group of a job; each job's groups run once each, in order; and the
    worst-order peak, in bytes, is what the schedule says and at most ``budget``.
    """
    _check_groups(schedule, profiles)
    _check_order(schedule)
    peak = _replay(schedule, profiles)
    if peak != schedule.peak_bytes:
        raise PlanError(
            f"The schedule says that it peaks at {schedule.peak_bytes} bytes, its replay peaks at "
            f"{peak}."
        )
    if peak > budget:
        raise PlanError(f"The schedule peaks at {peak} bytes, the budget is {budget}.")


def _check_groups(schedule: Schedule, profiles: Sequence[Profile]) -> None:
    if len(schedule.groups) != len(profiles):
        raise PlanError(
            f"The schedule has groups of {len(schedule.groups)} jobs, there are {len(profiles)}."
        )
    for job, groups in enumerate(schedule.groups):
        expected = 0
        for number, group in enumerate(groups):
            if group.start != expected or group.stop <= group.start:
                raise PlanError(
                    f"Group {number} of job {job} covers nodes {group.start} to {group.stop}, "
                    f"expected a non-empty range from {expected}."
                )
            expected = group.stop
        if expected != len(profiles[job].node_seconds):
            raise PlanError(
                f"The groups of job {job} end at node {expected}, its step has "
                f"{len(profiles[job].node_seconds)} nodes."
            )


def _check_order(schedule: Schedule) -> None:
    if schedule.lanes < 1:
        raise PlanError(f"A schedule needs at least one lane, this one has {schedule.lanes}.")
    done = dict.fromkeys(range(len(schedule.groups)), 0)
    for number, pair in enumerate(schedule.pairs):
        _check_pair(number, pair, schedule.lanes)
        for ref in pair:
            if ref is None:
                continue
            if ref.job not in done:
                raise PlanError(f"Pair {number} runs job {ref.job}, which does not exist.")
            if ref.group != done[ref.job]:
                raise PlanError(
                    f"Pair {number} runs group {ref.group} of job {ref.job}, its next is "
                    f"{done[ref.job]}."
                )
            done[ref.job] += 1
            if done[ref.job] > len(schedule.groups[ref.job]):
                raise PlanError(
                    f"Pair {number} runs group {ref.group} of job {ref.job}, it has only "
                    f"{len(schedule.groups[ref.job])}."
                )
    for job, count in done.items():
        if count != len(schedule.groups[job]):
            raise PlanError(
                f"The schedule runs {count} groups of job {job}, its step has "
                f"{len(schedule.groups[job])}."
            )


def _check_pair(number: int, pair: Pair, lanes: int) -> None:
    if len(pair) != lanes:
        raise PlanError(f"Pair {number} has {len(pair)} places, the schedule has {lanes} lanes.")
    jobs = [ref.job for ref in pair if ref is not None]
    if not jobs:
        raise PlanError(f"Pair {number} has no work on any lane.")
    if len(set(jobs)) != len(jobs):
        raise PlanError(f"Pair {number} runs two groups of one job side by side.")


def _replay(schedule: Schedule, profiles: Sequence[Profile]) -> int:
    """The worst-order peak: in each pair every lane reaches its own highest point at once."""
    waiting: list[list[tuple[int, int]]] = []
    for profile in profiles:
        events = [(int(event["node"]), int(event["bytes"])) for event in profile.events]
        waiting.append(events[::-1])  # the next event is the last of the list
    held = {job: profile.persistent_bytes for job, profile in enumerate(profiles)}
    peak = sum(held.values())
    for pair in schedule.pairs:
        highest = dict(held)
        for ref in pair:
            if ref is None:
                continue
            stop = schedule.groups[ref.job][ref.group].stop
            events = waiting[ref.job]
            while events and events[-1][0] < stop:
                held[ref.job] += events.pop()[1]
                highest[ref.job] = max(highest[ref.job], held[ref.job])
        peak = max(peak, sum(highest.values()))
    return peak
