"""plan, max_batch and pair: what they promise, a run on the CPU confirms."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn

import waterflow as wf
from waterflow.models.zoo import TASKS
from waterflow.study.job_specs import job_of

pytestmark = pytest.mark.cpu

BERT, LSTM, TABLE, CNN = "bert_base_small", "lstm_lm_small", "deepfm_small", "resnet50_small"


@pytest.fixture(autouse=True)
def _kept_captures(one_thread, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("WATERFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def jobs_of(*tasks: str, batch: int = 8, steps: int = 4) -> list[wf.Job]:
    """Jobs that really train, numbered."""
    torch.manual_seed(0)
    made = [job_of(TASKS[task], batch, f"{task}-{n}") for n, task in enumerate(tasks)]
    for job in made:
        job.data, job.steps = list(job.data) * steps, steps
    return made


# What is promised


@pytest.mark.parametrize("task", [BERT, LSTM, TABLE])
@pytest.mark.parametrize("measure", [False, True])
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


def test_the_largest_batch_trains_and_one_more_does_not():
    budget = 8 << 20
    found = wf.max_batch([BERT, BERT], budget, hardware="cpu")
    (solo, same), (batch, other) = found.solo, found.policies["flow"].batch
    assert solo == same
    assert batch == other < solo
    assert wf.run(jobs_of(BERT, batch=solo), memory=budget, threads=1).ok
    with pytest.raises(wf.BudgetError):
        wf.run(jobs_of(BERT, batch=solo + 1), memory=budget, threads=1)
    together = jobs_of(BERT, BERT, batch=batch)
    report = wf.run(together, memory=budget, policy="flow", threads=1)
    assert report.ok
    assert report.peak_bytes <= budget
    spans = {span.job: (span.start, span.stop) for span in report.spans}
    assert len(spans) == 2


def test_policies_are_in_the_order_that_they_should_be():
    found = wf.max_batch([BERT, BERT], "64MiB").policies
    assert found["waterwave-s"].ratio <= found["waterwave"].ratio <= found["flow"].ratio
    assert found["flow"].ratio == found["temporal"].ratio
    assert found["temporal"].outlook.overlap == 0


def test_flow_reaches_the_bound_that_two_sets_of_parameters_leave():
    budget = 1 << 30
    found = wf.max_batch([BERT, BERT], budget)
    held = wf.plan([f"{BERT}:batch=2"], budget).jobs[0].persistent_bytes
    bound = (budget - 2 * held) / (budget - held)
    assert found.policies["flow"].ratio >= 0.99 * bound


def test_different_jobs_keep_their_proportion():
    found = wf.max_batch([BERT, LSTM], "32MiB")
    shares = [n / solo for n, solo in zip(found.policies["flow"].batch, found.solo, strict=True)]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)
    assert found.policies["flow"].ratio == pytest.approx(sum(shares) / 2)


def test_more_memory_overlaps_more():
    frontier = wf.max_batch([CNN, CNN], "64MiB", frontier=True).frontier["flow"]
    ratios, overlaps = zip(*frontier, strict=True)
    assert list(ratios) == sorted(ratios)
    assert overlaps[0] > 0.9  # both fit side by side
    assert overlaps[-1] < overlaps[0]


def test_nothing_is_allocated_for_a_model_that_fits_no_machine():
    def enormous(batch: int) -> wf.Job:
        model = nn.Linear(200_000, 200_000)  # 149 GiB of parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        return wf.Job("x", model, optimizer, loss, [torch.randn(batch, 200_000)])

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = wf.max_batch([enormous], "400GiB")
    assert found.solo[0] > 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in KiB


# Choosing


def test_pairs_are_ranked_by_predicted_speed():
    pairs = wf.pair([BERT, LSTM, TABLE], "64MiB")
    assert {pair.places for pair in pairs} == {(0, 1), (0, 2), (1, 2)}
    speeds = [pair.speed for pair in pairs]
    assert speeds == sorted(speeds, reverse=True)
    assert all(pair.outlook.peak_bytes <= 64 << 20 for pair in pairs)
    assert all(min(pair.batch) >= 1 for pair in pairs)


def test_a_pair_of_fixed_jobs_keeps_their_batches():
    (pair,) = wf.pair(jobs_of(BERT, LSTM), "64MiB")
    assert pair.batch == (None, None)
    assert 1.0 <= pair.speed <= 2.0 + 1e-6


def test_jobs_that_leave_no_room_for_each_other_are_no_pair():
    jobs = jobs_of(BERT, BERT)
    needed = wf.plan(jobs, "1GiB").jobs[0].solo_bytes
    assert wf.pair(jobs, needed) == []


# What comes back


def test_json_of_a_plan():
    found = json.loads(wf.plan([f"{BERT}:batch=4", f"{LSTM}:batch=4"], "1GiB").to_json())
    assert found["memory_bytes"] == 1 << 30
    assert found["fits"] is True
    assert [job["name"] for job in found["jobs"]] == [BERT, LSTM]
    assert set(found["policies"]) == {"temporal", "waterwave", "waterwave-s", "flow"}
    assert found["policies"]["flow"]["peak_bytes"] <= 1 << 30
    assert "overlap" in found["simulated"]


def test_json_of_max_batch():
    found = json.loads(wf.max_batch([BERT, BERT], "64MiB").to_json())
    assert found["memory_bytes"] == 64 << 20
    assert [job["name"] for job in found["jobs"]] == [f"{BERT}-1", f"{BERT}-2"]
    flow = found["policies"]["flow"]
    assert flow["batch"][0] < found["jobs"][0]["solo"]
    assert {"ratio", "peak_bytes", "syncs_per_step", "overlap"} <= set(flow)


def test_what_does_not_fit_is_said_per_policy():
    found = wf.plan([f"{BERT}:batch=64", f"{BERT}:batch=64"], "1MiB")
    assert not found.fits
    assert set(found.policies.values()) == {None}


# Wrong input


def unchanging(batch: int) -> wf.Job:
    return jobs_of(TABLE, batch=4)[0]


def raising(batch: int) -> wf.Job:
    raise RuntimeError("no such file: weights.bin")


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
        (lambda: wf.max_batch([BERT], "100KiB"), wf.BudgetError, "a batch of 1 needs"),
        (lambda: wf.max_batch(jobs_of(BERT), "1GiB"), wf.JobError, "its batch is fixed"),
        (lambda: wf.max_batch([f"{BERT}:batch=2"], "1GiB"), wf.JobError, "its batch is fixed"),
        (lambda: wf.max_batch([raising], "1GiB"), wf.JobError, "no such file: weights.bin"),
        (lambda: wf.max_batch([unchanging], "1GiB"), wf.JobError, "do not depend on the batch"),
        (lambda: wf.pair([BERT], "1GiB"), wf.JobError, "at least two candidates"),
        (lambda: wf.pair(jobs_of(BERT, LSTM), "10KiB"), wf.BudgetError, "it needs"),
    ],
)
def test_wrong_input_is_told_clearly(ask: Callable[[], object], error, message):
    with pytest.raises(error, match=message):
        ask()
