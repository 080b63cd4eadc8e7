"""Who may enter the arena, and whose turn it is to ask again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import waterflow as wf
from tests.support.engine_parts import Parts, make_job, parts
from waterflow.engine.admission import Admission
from waterflow.engine.job_run import JobRun

pytestmark = pytest.mark.cpu


@pytest.fixture
def engine() -> Iterator[Parts]:
    with parts() as found:
        yield found


def prepared(engine: Parts, job: wf.Job) -> JobRun:
    run = engine.submit(job)
    run.steps.preparer.prepare(next(iter(job.data)))
    return run


def admission(engine: Parts, capacity: int) -> Admission:
    return Admission(capacity, capacity, engine.context.residency)


def test_a_job_fits_where_all_it_needs_does(engine: Parts) -> None:
    run = prepared(engine, make_job("a"))
    need = run.needs.memory.alone_bytes
    assert need == run.needs.memory.persistent_bytes + run.needs.memory.step_bytes
    admission(engine, need).check(run, [])
    with pytest.raises(wf.BudgetError, match=f"'a' needs {need} bytes .* the budget is {need - 1}"):
        admission(engine, need - 1).check(run, [])


def test_beside_others_the_largest_step_counts_once(engine: Parts) -> None:
    small, large = prepared(engine, make_job("a")), prepared(engine, make_job("b", 64))
    needs = [run.needs.memory for run in (small, large)]
    together = sum(need.persistent_bytes for need in needs) + needs[1].step_bytes
    assert admission(engine, together).fits_beside(large, [small.needs.memory])
    assert not admission(engine, together - 1).fits_beside(large, [small.needs.memory])


def test_a_job_that_waits_is_not_asked_again_before_somebody_leaves(engine: Parts) -> None:
    asked, run = admission(engine, 1 << 20), prepared(engine, make_job("a"))
    assert not asked.is_waiting(run)
    asked.wait(run)
    assert asked.is_waiting(run)
    asked.somebody_left()
    assert not asked.is_waiting(run)


def test_two_jobs_may_not_train_one_tensor(engine: Parts) -> None:
    first, second = make_job("a"), make_job("b")
    second.model[0].weight = first.model[0].weight  # type: ignore[index, union-attr]
    first_run, _ = engine.enter(first)
    second_run = prepared(engine, second)
    with pytest.raises(wf.JobError, match=r"'a' and 'b' share a tensor of shape \(8, 4\)"):
        admission(engine, 1 << 20).check(second_run, [first_run])


def test_what_does_not_fit_is_said_for_all(engine: Parts) -> None:
    small, large = prepared(engine, make_job("a")), prepared(engine, make_job("b", 64))
    needs = {run.name: run.needs.memory.alone_bytes for run in (small, large)}
    text = admission(engine, needs["a"]).too_small([small, large])
    assert f"'a' needs {needs['a']} bytes" in text
    assert "What would fit: jobs 'a' under this budget" in text
    assert f"all of them under {needs['b']} bytes" in text
