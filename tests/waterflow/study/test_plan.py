"""plan: what it promises, a run on the CPU confirms."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import waterflow as wf
from tests.support.jobs import OWN_STEPS
from tests.support.tables import crossed
from tests.support.zoo_jobs import BERT, CNN, LSTM, TABLE, jobs_of

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("kept_captures")]


@pytest.mark.parametrize(("measure", "task"), crossed([False, True], [BERT, LSTM, TABLE]))
def test_the_peak_one_after_another_is_that_of_a_run(task, measure):
    found = wf.plan(jobs_of(task, task), "1GiB", hardware="cpu", measure=measure)
    report = wf.run(jobs_of(task, task), memory="1GiB", policy="temporal", threads=1)
    assert found.policies["temporal"].peak_bytes == report.peak_bytes
    assert [job.source for job in found.jobs] == ["measured" if measure else "fake"] * 2


def test_convolutions_take_workspaces_that_only_measuring_sees():
    estimated, exact = (
        wf.plan(jobs_of(CNN, CNN), "1GiB", hardware="cpu", measure=measure).policies["temporal"]
        for measure in (False, True)
    )
    report = wf.run(jobs_of(CNN, CNN), memory="1GiB", policy="temporal", threads=1)
    assert estimated.peak_bytes <= exact.peak_bytes == report.peak_bytes


@pytest.mark.parametrize("task", [BERT, TABLE])
def test_the_least_budget_is_exact_to_the_byte(task):
    needed = wf.plan(jobs_of(task), "1GiB", hardware="cpu").jobs[0].solo_bytes
    report = wf.run(jobs_of(task), memory=needed, threads=1)
    assert report.ok
    assert report.peak_bytes <= needed
    with pytest.raises(wf.BudgetError, match=f"needs {needed} bytes"):
        wf.run(jobs_of(task), memory=needed - 64, threads=1)


@pytest.mark.parametrize(("measure", "name"), crossed([False, True], list(OWN_STEPS)))
def test_the_peak_of_a_step_of_ones_own_is_that_of_a_run(name, measure):
    """The plan is made before the step has left gradients and state; and once it has."""
    jobs = [OWN_STEPS[name](capture=True) for _ in range(2)]
    jobs[1].name = "other"
    before = wf.plan(jobs, "1MiB", hardware="cpu", measure=measure)
    assert all(p.grad is None for job in jobs for p in job.model.parameters())
    report = wf.run(jobs, memory="1MiB", policy="temporal", threads=1)
    after = wf.plan(jobs, "1MiB", hardware="cpu", measure=measure)
    assert {job.captured for job in report} == {"captured"}
    assert before.policies["temporal"].peak_bytes == report.peak_bytes
    assert before.to_dict()["jobs"] == after.to_dict()["jobs"]
    for planned, job in zip(before.jobs, report, strict=True):
        assert planned.persistent_bytes == job.persistent_bytes


def test_side_by_side_no_run_exceeds_the_plan():
    named = (BERT, LSTM, BERT)
    roomy = wf.plan(jobs_of(*named), "1GiB", hardware="cpu")
    budget = roomy.policies["temporal"].peak_bytes * 5 // 4
    found = wf.plan(jobs_of(*named), budget, hardware="cpu", measure=True)
    for policy in ("waterwave", "flow"):
        report = wf.run(jobs_of(*named), memory=budget, policy=policy, threads=1)
        assert report.ok
        assert report.deviations == 0
        assert report.peak_bytes <= found.policies[policy].peak_bytes <= budget


def test_the_peak_of_flow_does_not_depend_on_the_clock():
    """On devices of other speeds events come in another order; what they may reach is the same."""
    jobs = [f"{BERT}:batch=8", f"{LSTM}:batch=8"]
    roomy = wf.plan(jobs, "1GiB").policies["temporal"].peak_bytes
    for budget in (roomy * 11 // 10, roomy * 3 // 2):
        peaks = {
            wf.plan(jobs, budget, hardware=device).policies["flow"].peak_bytes
            for device in ("v100", "p100", "h100")
        }
        assert len(peaks) == 1


def test_json_of_a_plan():
    found = json.loads(wf.plan([f"{BERT}:batch=4", f"{LSTM}:batch=4"], "1GiB").to_json())
    assert found["memory_bytes"] == 1 << 30
    assert found["fits"] is True
    assert [job["name"] for job in found["jobs"]] == [BERT, LSTM]
    assert set(found["policies"]) == {"temporal", "waterwave", "waterwave-s", "flow"}
    assert found["policies"]["flow"]["peak_bytes"] <= 1 << 30
    assert "overlap" in found["simulated"]


def test_what_does_not_fit_is_said_per_policy():
    found = wf.plan([f"{BERT}:batch=64", f"{BERT}:batch=64"], "1MiB")
    assert not found.fits
    assert set(found.policies.values()) == {None}


RANKS = ("opportunistic", "normal", "guaranteed")


def ranked(*names):
    jobs = jobs_of(*names)
    for job, rank in zip(jobs, RANKS, strict=False):
        job.priority = rank
    return jobs


def test_who_goes_last_waits_for_room():
    names = (TABLE, TABLE, TABLE)
    alone = wf.plan(ranked(*names), "1GiB", hardware="cpu").jobs
    budget = alone[0].persistent_bytes + alone[0].solo_bytes + 4096  # for two of them
    found = wf.plan(ranked(*names), budget, hardware="cpu")
    last, middle, first = (job.name for job in ranked(*names))
    assert (found.first, found.waiting, found.refused) == ((first, middle), (last,), ())
    assert not found.fits


def test_what_does_not_fit_alone_is_refused_and_lets_others_in():
    found = wf.plan([f"{BERT}:batch=64", f"{TABLE}:batch=1"], "1MiB", hardware="cpu")
    assert found.refused == (BERT,)
    assert found.first == (TABLE,)
    assert json.loads(found.to_json())["refused"] == [BERT]


def test_guaranteed_jobs_keep_their_speed_in_a_plan():
    names = (TABLE, TABLE, TABLE)
    ranks = [job.name for job in ranked(*names)]
    equal, unequal = (
        wf.plan(jobs, "1GiB", hardware="cpu").policies for jobs in (jobs_of(*names), ranked(*names))
    )
    assert max(equal["flow"].speeds) < 0.8
    assert unequal["flow"].speeds[ranks.index(ranks[-1])] == pytest.approx(1.0)
    assert unequal["flow"].speeds[0] < 0.1, "the opportunistic one lives from what is left"
    assert unequal["temporal"].speeds == equal["temporal"].speeds


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: wf.plan(["resnet5:batch=2"], "1GiB"), wf.JobError, "resnet50"),
        (lambda: wf.plan([BERT], "1GiB"), wf.JobError, f"{BERT}:batch=32"),
        (lambda: wf.plan([f"{BERT}:batch=many"], "1GiB"), wf.JobError, "whole number above 0"),
        (lambda: wf.plan([f"{BERT}:batch=0"], "1GiB"), wf.JobError, "whole number above 0"),
        (lambda: wf.plan([], "1GiB"), wf.JobError, "at least one job"),
        (lambda: wf.plan([7], "1GiB"), wf.JobError, "cannot plan 7"),
        (lambda: wf.plan([f"{BERT}:batch=2"], "lots"), wf.JobError, "cannot read 'lots'"),
        (lambda: wf.plan([f"{BERT}:batch=2"], "1GiB", hardware="h10"), wf.JobError, "'h100'"),
        (lambda: wf.plan(["nowhere.py:make"], "1GiB"), wf.JobError, "nowhere.py does not exist"),
    ],
)
def test_wrong_input_is_told_clearly(ask: Callable[[], object], error, message):
    with pytest.raises(error, match=message):
        ask()


def test_who_waits_in_the_plan_waits_in_a_run():
    names = (TABLE, TABLE, TABLE)
    alone = wf.plan(ranked(*names), "1GiB", hardware="cpu").jobs
    budget = alone[0].persistent_bytes + alone[0].solo_bytes + 4096  # for two of them
    found = wf.plan(ranked(*names), budget, hardware="cpu")
    jobs = ranked(*names)
    made: list[str] = []
    for job in jobs:
        job.capture = True
        job.on_step = lambda result: made.append(result.job)
    assert wf.run(jobs, memory=budget, threads=1).ok
    (waiting,) = found.waiting
    begun = made.index(waiting)
    assert any(name not in made[begun:] for name in found.first), "came before one had ended"
