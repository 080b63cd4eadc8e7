"""Jobs that share Python objects train to the numbers of the plain loops one after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import waterflow as wf
from tests.support import shared_objects
from tests.support.shared_objects import SHARED, OfClass, OwnNotes, job, sharing

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")]
MAKES: dict[str, Callable[[], dict[str, Any]]] = {
    "class": lambda: {"model": OfClass()},
    "own notes": lambda: {"model": OwnNotes()},
}


@pytest.fixture(autouse=True)
def _as_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What belongs to the module begins anew with each test."""
    yield
    _forget()


def _forget() -> None:
    shared_objects.COUNT = OfClass.steps = 0
    shared_objects.NOTES.clear()
    shared_objects.with_default.__defaults__[0].clear()  # type: ignore[index]


def jobs_of(kind: str, count: int, **given: Any) -> list[wf.Job]:
    """Jobs of other rates, all with one object of that kind."""
    _forget()
    torch.manual_seed(3)
    make = MAKES[kind] if kind in MAKES else sharing(kind)
    made = [job(seed=0, steps=7, **make(), **given) for _ in range(count)]
    for number, one in enumerate(made):
        one.name = f"job {number}"
        one.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
    return made


def numbers(jobs: Sequence[wf.Job]) -> list[list[float]]:
    return [[float(v) for p in one.model.parameters() for v in p.flatten()] for one in jobs]


@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("kind", [*SHARED, *MAKES])
def test_jobs_with_one_object_train_as_one_after_another(kind: str, capture: Any) -> None:
    loops = jobs_of(kind, 3)
    losses = [wf.run_eager(one).losses for one in loops]
    jobs = jobs_of(kind, 3, capture=capture)
    report = wf.run(jobs, memory="64MiB")
    report.raise_errors()
    assert numbers(jobs) == numbers(loops)
    assert [report.jobs[one.name].losses for one in jobs] == losses


@pytest.mark.parametrize("policy", ["temporal", "time-slice"])
@pytest.mark.parametrize("kind", ["criterion", "metric", "dataset cached"])
def test_so_they_do_under_other_policies(kind: str, policy: str) -> None:
    loops = jobs_of(kind, 3)
    losses = [wf.run_eager(one).losses for one in loops]
    jobs = jobs_of(kind, 3)
    report = wf.run(jobs, memory="64MiB", policy=policy)
    report.raise_errors()
    assert [report.jobs[one.name].losses for one in jobs] == losses


def mixed(seed: int, **given: Any) -> list[wf.Job]:
    """Jobs of two objects, and some with objects of their own, in any order. (Not those that write
    to their batches: others here have the same tensors as data, and end them.)"""
    _forget()
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kinds = chance.sample([*(kind for kind in SHARED if kind != "batches"), *MAKES], 2)
    common = [MAKES[kind] if kind in MAKES else sharing(kind) for kind in kinds]
    makes = [chance.choice(common) for _ in range(4)]
    makes += [sharing(chance.choice(["criterion", "metric", "dataset counted"])) for _ in range(2)]
    chance.shuffle(makes)
    made = [job(seed=0, steps=chance.randint(3, 9), **make(), **given) for make in makes]
    for number, one in enumerate(made):
        one.name = f"job {number}"
    return made


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(120))
def test_any_jobs_train_as_one_after_another(seed: int) -> None:
    chance = random.Random(1000 + seed)
    given = {"capture": chance.choice(["auto", False])}
    policy = chance.choice(["flow", "temporal", "time-slice"])
    callbacks = chance.choice(["lane", "caller"])
    loops = mixed(seed)
    losses = [wf.run_eager(one).losses for one in loops]
    jobs = mixed(seed, **given)
    report = wf.run(jobs, memory="64MiB", policy=policy, callbacks=callbacks)
    report.raise_errors()
    assert numbers(jobs) == numbers(loops)
    assert [report.jobs[one.name].losses for one in jobs] == losses
