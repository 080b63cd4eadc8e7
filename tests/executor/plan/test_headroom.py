"""The headroom of piles: what is chosen, and that a plan chooses as a run does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import waterflow as wf
from waterflow.engine import flow_planner
from waterflow.executor.plan import headroom as chooser
from waterflow.executor.plan.headroom import (
    MOST_SIMULATED,
    FlowJob,
    HeadroomChoice,
    choose_headroom,
    forecast,
)
from waterflow.executor.plan.piled_step import HEADROOMS, Piles
from waterflow.executor.plan.step_memory import StepMemory
from waterflow.partitioner.policies.fair_share import NextJob
from waterflow.partitioner.profile import Profile
from waterflow.partitioner.testing import step_profile, triangle
from waterflow.study import estimate as study_estimate
from waterflow.study.estimate import SizedJob, estimate
from waterflow.study.footprint import footprint_of

UNIT = 64
ALIGNMENT = 64  # of the host's arena


def flow_job(*steps: Profile, weight: float = 1.0) -> FlowJob:
    return FlowJob([Piles(StepMemory(profile, UNIT)) for profile in steps], weight)


def hill(half: int, seconds: float = 1.0) -> Profile:
    """Rises by a unit a node to `half` units, and falls again."""
    return triangle(half, UNIT, node_seconds=seconds)


@st.composite
def steps(draw: st.DrawFn) -> Profile:
    """Blocks that come one by one and go in some order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    frees = draw(st.permutations(sizes))
    nodes = [[size * UNIT] for size in sizes] + [[-size * UNIT] for size in frees]
    return step_profile(nodes, seconds=draw(_seconds(len(nodes))))


def _seconds(count: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=count, max_size=count)


@dataclass
class Choices:
    """What has been asked of `choose_headroom`, and its answers."""

    made: list[tuple[Sequence[FlowJob], int, int, HeadroomChoice | None]] = field(
        default_factory=list
    )

    def __call__(
        self, jobs: Sequence[FlowJob], room: int, lanes: int, next_job: NextJob
    ) -> HeadroomChoice | None:
        self.made.append((jobs, room, lanes, choose_headroom(jobs, room, lanes, next_job)))
        return self.made[-1][-1]


# The choice


@pytest.mark.virtual
def test_with_memory_for_both_nothing_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "simulate_flow", None)
    choice = choose_headroom([flow_job(hill(10)), flow_job(hill(8))], 22 * UNIT, lanes=2)
    assert choice == HeadroomChoice(HEADROOMS[0], HEADROOMS)
    alone = choose_headroom([flow_job(hill(10), hill(8))], 10 * UNIT, lanes=2)
    assert alone is not None
    assert alone.headroom == HEADROOMS[0]


@pytest.mark.virtual
def test_a_step_without_room_even_alone_has_no_choice() -> None:
    assert choose_headroom([flow_job(hill(4), hill(10)), flow_job(hill(3))], 9 * UNIT, 2) is None


@pytest.mark.virtual
@given(st.lists(steps(), min_size=2, max_size=3), st.integers(0, 12), st.sampled_from([2, 3, 4]))
@settings(max_examples=40, deadline=None)
def test_the_quickest_of_those_that_fit_is_chosen(
    own: list[Profile], more: int, lanes: int
) -> None:
    """The short cuts give what simulating every headroom gives."""
    jobs = [flow_job(profile, weight=1.0 + i) for i, profile in enumerate(own)]
    room = max(job.largest.memory.extent for job in jobs) + more * UNIT
    choice = choose_headroom(jobs, room, lanes)
    assert choice is not None
    fitting = [
        headroom
        for headroom in HEADROOMS
        if all(job.largest.at(headroom, room).extent <= room for job in jobs)
    ]
    assert choice.fitting == tuple(fitting)
    seconds = {headroom: forecast(jobs, headroom, room, lanes).seconds for headroom in fitting}
    assert seconds[choice.headroom] == min(seconds.values())
    assert choice.headroom == max(h for h in fitting if seconds[h] == seconds[choice.headroom])


@pytest.mark.virtual
def test_of_many_jobs_the_largest_are_simulated_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[int]] = []

    def simulated(*arguments: Any) -> Any:
        asked.append([int(weight) for weight in arguments[4]])
        return simulate(*arguments)

    simulate = chooser.simulate_flow
    monkeypatch.setattr(chooser, "simulate_flow", simulated)
    sizes = [9, 3, 12, 7, 4, 11, 8, 10]  # of their largest steps; the weight is the place
    jobs = [flow_job(hill(2), hill(size), weight=i + 1) for i, size in enumerate(sizes)]
    assert choose_headroom(jobs, 14 * UNIT, lanes=2) is not None
    assert asked
    assert all(places == [1, 3, 4, 6, 7, 8] for places in asked)
    assert len(asked[0]) == MOST_SIMULATED


@pytest.mark.virtual
def test_a_pile_is_made_once_for_all_ample_rooms_and_again_for_tight_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piles = Piles(StepMemory(hill(10), UNIT))
    ample = piles.at(0.1, 11 * UNIT)
    assert piles.at(0.1, 500 * UNIT) is ample
    assert piles.at(0.0, 500 * UNIT) is not ample
    assert piles.at(0.1, 10 * UNIT).extent == 10 * UNIT
    for room in range(10 * UNIT, 10 * UNIT + 60):  # more than are kept: none is mixed up
        assert piles.at(0.1, room).extent <= room
    assert piles.at(0.1, 500 * UNIT).extent == ample.extent


# A plan and a run


def make_job(name: str, width: int, rows: int, weight: float) -> wf.Job:
    generator = torch.Generator().manual_seed(width)
    torch.manual_seed(width)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise([16, width, width, width]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    data = [
        (torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator))
    ]
    return wf.Job(
        name,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=data,
        epochs=20,
        weight=weight,
        seed=0,
    )


def three_jobs() -> list[wf.Job]:
    return [make_job("a", 64, 96, 1.0), make_job("b", 48, 128, 2.0), make_job("c", 80, 48, 1.0)]


def with_seconds(sized: SizedJob, measured: Profile, weight: float) -> SizedJob:
    """A job of a study with the times that the run has measured."""
    steady = replace(sized.footprint.steady, node_seconds=measured.node_seconds)
    return SizedJob(replace(sized.footprint, steady=steady), ALIGNMENT, weight)


@pytest.mark.cpu
@pytest.mark.parametrize("share", [1.0, 1.5, 2.5])
def test_a_plan_chooses_what_the_run_chooses(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = three_jobs()
    sized = [SizedJob(footprint_of(job), ALIGNMENT, job.weight) for job in jobs]
    needs = [own.need for own in sized]
    memory = sum(need.persistent_bytes for need in needs)
    memory += int(share * max(need.step_bytes for need in needs))
    memory -= memory % ALIGNMENT

    run, study = Choices(), Choices()
    monkeypatch.setattr(flow_planner, "choose_headroom", run)
    monkeypatch.setattr(study_estimate, "choose_headroom", study)
    report = wf.run(jobs, memory=memory, policy="flow", threads=1)
    assert all(job.state == "finished" for job in report.jobs.values())
    together = [made for made in run.made if len(made[0]) == len(jobs)]
    assert together, "they did not flow together"
    asked, room, lanes, choice = together[-1]
    assert choice is not None
    planned_jobs = [
        with_seconds(own, ran.largest.memory.profile, job.weight)
        for own, ran, job in zip(sized, asked, jobs, strict=True)
    ]
    assert estimate(planned_jobs, memory, "flow", ALIGNMENT, lanes)
    own, own_room, _, told = study.made[-1]
    assert own_room == room
    assert told == choice
    assert [job.weight for job in asked] == [job.weight for job in own]
    for ran, planned in zip(asked, own, strict=True):
        here, there = (job.largest.at(choice.headroom, room) for job in (ran, planned))
        assert here.extent == there.extent
        assert here.offsets.tolist() == there.offsets.tolist()
