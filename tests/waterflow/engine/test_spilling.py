"""Jobs planned into less memory than they need: equal numbers, the limit never passed."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import waterflow as wf
from tests.support.differences import MEMORY, assert_same_numbers
from tests.support.jobs import MODELS, OPTIMIZERS, TRAINING
from tests.support.steps import steady_steps
from tests.support.tables import crossed, soaked, thinned
from tests.support.zoo_jobs import BERT, CNN, LSTM, jobs_of
from waterflow.engine.engine import Engine

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

JOBS = {**MODELS, **OPTIMIZERS, **TRAINING}
#: Dropout, batch norm, tied weights, in-place operators, views, buffers, optimizers.
CHOSEN = (
    *("cnn", "encoder", "lstm_deep", "tied", "in_place", "noisy", "ema", "custom", "transposed"),
    *("autocast", "clip", "groups", "adam_plain", "adamw_foreach", "sgd_plain", "nadam_plain"),
    *("trained_before", "frozen_later", "last_batch"),
)


@functools.cache
def eager(name):
    job = JOBS[name]()
    return job, wf.run_eager(job, threads=1)


@functools.cache
def peak(name):
    """Bytes that the job's captured steps need, alone."""
    with Engine(MEMORY, threads=1) as engine:
        run = engine.submit(JOBS[name]())._job
    return run.needs.memory.alone_bytes


def trained(job, limit, *others, **options):
    """Runs a job under a limit, beside others; returns its report and its run."""
    engine = Engine(options.pop("memory", limit), threads=1, check=True, **options)
    with engine:
        runs = [engine.submit(one)._job for one in (job, *others)]
    report = engine.report()
    assert engine.check_races() == []
    assert report.deviations == 0
    return report, runs[0]


def least(name):
    """The smallest limit that is not refused, by halves: 5 % of the peak is near enough."""
    low, high = 0.0, 1.0
    while high - low > 0.05:
        middle = (low + high) / 2
        report, _ = trained(JOBS[name](), int(peak(name) * middle), spill=True)
        low, high = (low, middle) if report.jobs[JOBS[name]().name].ok else (middle, high)
    return int(peak(name) * high)


def spills(run):
    return [step.spill for step in run.steps.cache.steps() if step.spill is not None]


@pytest.mark.parametrize("name", CHOSEN)
def test_numbers_are_equal_under_a_limit(name):
    job, limit = JOBS[name](), int(peak(name) * 0.87)
    report, run = trained(job, limit, spill=True)
    if needs := re.search(
        r"one operator works on takes (\d+) bytes", str(report.jobs[job.name].error)
    ):
        # A convolution's workspace takes what the processor wants; the error names what is enough.
        job, limit = JOBS[name](), int(needs[1])
        assert limit < peak(name)
        report, run = trained(job, limit, spill=True)
    assert_same_numbers(*eager(name), job, report.jobs[job.name])
    assert report.peak_bytes <= report.extent_bytes <= limit
    assert spills(run)


@pytest.mark.soak  # plans go by measured times, and at the edge not every one finds its way
@pytest.mark.parametrize("name", CHOSEN)
def test_numbers_are_equal_at_the_smallest_limit(name):
    job, limit = JOBS[name](), least(name)
    report, run = trained(job, limit, spill=True)
    assert_same_numbers(*eager(name), job, report.jobs[job.name])
    assert report.extent_bytes <= limit
    assert all(
        step.memory.profile.num_nodes == len(step.compiled.tape) for step in steady_steps(run)
    )


def zoo(task, steps=9, **options):
    (job,) = jobs_of(task, steps=steps)
    job.seed = 3
    for name, value in options.items():
        setattr(job, name, value)
    return job


@functools.cache
def zoo_eager(task, steps=9):
    job = zoo(task, steps)
    return job, wf.run_eager(job, threads=1)


@functools.cache
def zoo_peak(task):
    with Engine(MEMORY, threads=1) as engine:
        run = engine.submit(zoo(task, steps=3))._job
    return run.needs.memory.alone_bytes


@pytest.mark.parametrize(("task", "spill"), crossed([CNN, BERT, LSTM], ["memory", "disk"]))
def test_every_step_keeps_to_the_limit(task, spill):
    """Nine steps, of which the engine compares four with eager ones; the others are spilled."""
    for share in (0.9, 0.6, 0.5):
        job = zoo(task)
        limit = int(zoo_peak(task) * share)
        report, run = trained(job, limit, spill=spill)
        assert_same_numbers(*zoo_eager(task), job, report.jobs[job.name])
        assert report.extent_bytes <= limit
        (plan,) = spills(run)
        assert plan.moved_bytes > 0
        # The tier's bytes were really copied, by each of the steps that were not checked and by
        # their twins in checks.
        assert run.steps.spiller._store.moved >= 5 * plan.moved_bytes * 0.9


@pytest.mark.parametrize(
    "policy", thinned(["flow", "temporal", "waterwave", "waterwave-s"], keep=["flow", "waterwave"])
)
def test_other_jobs_beside_it_are_not_touched(policy):
    limit = int(zoo_peak(CNN) * 0.6)
    job, other = zoo(CNN, memory_limit=limit), zoo(BERT)
    report, run = trained(job, limit, other, memory="8MiB", policy=policy)
    assert_same_numbers(*zoo_eager(CNN), job, report.jobs[job.name])
    assert_same_numbers(*zoo_eager(BERT), other, report.jobs[other.name])
    assert report.jobs[job.name].peak_bytes <= limit
    assert report.jobs[other.name].peak_bytes > 0
    assert spills(run)


def test_two_jobs_with_limits_share_a_capture_and_no_memory():
    shares = (0.7, 0.5)
    jobs = [zoo(CNN, memory_limit=int(zoo_peak(CNN) * share)) for share in shares]
    for number, job in enumerate(jobs):
        job.name = f"{number}"
    report, _ = trained(jobs[0], None, jobs[1], memory="8MiB")
    for job in jobs:
        assert report.jobs[job.name].losses == zoo_eager(CNN)[1].losses
        assert report.jobs[job.name].peak_bytes <= job.memory_limit


def test_a_job_that_fits_is_left_alone():
    report, run = trained(zoo(CNN), None, memory="64MiB", spill=True)
    assert report.ok
    assert spills(run) == []
    assert all(origin.early is None for origin in run.steps.spiller.origins.values())


def test_order_comes_before_spilling():
    """Without momentum an update's gradient is all that early updates save; they suffice here."""

    def job():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(12)]
        model = torch.nn.Sequential(*layers)
        return wf.Job(
            "deep",
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.01),
            loss=lambda m, x: m(x).square().mean(),
            data=[torch.randn(4, 64, generator=torch.Generator().manual_seed(1))] * 9,
        )

    with Engine(MEMORY, threads=1) as engine:
        run = engine.submit(job())._job
    need = run.needs.memory
    limit = need.persistent_bytes + need.step_bytes // 2
    one, twin = job(), job()
    report, run = trained(one, limit, spill=True)
    assert_same_numbers(twin, wf.run_eager(twin, threads=1), one, report.jobs["deep"])
    assert report.extent_bytes <= limit
    assert spills(run) == []
    assert all(origin.early is one.steady for one, origin in run.steps.spiller.origins.items())


def test_less_than_one_operator_works_on_is_refused_before_anything_runs():
    job = zoo(CNN)
    before = [p.clone() for p in job.model.parameters()]
    with pytest.raises(
        wf.BudgetError, match=r"job 'resnet50_small-0'.*even by spilling.*takes \d+"
    ):
        wf.run([job], memory="20KiB", spill=True)
    assert all(map(torch.equal, before, job.model.parameters()))


def test_a_limit_that_is_too_small_ends_that_job_alone():
    job, other = zoo(CNN, memory_limit=1000), zoo(BERT)
    report = wf.run([job, other], memory="8MiB", threads=1)
    assert report.jobs[job.name].state == "failed"
    assert "cannot be planned into" in report.jobs[job.name].error
    assert report.jobs[other.name].ok


def test_an_eager_step_cannot_be_spilled():
    job = zoo(CNN, memory_limit=1 << 20)
    job.optimizer = torch.optim.LBFGS(job.model.parameters())
    report = wf.run([job], memory="64MiB", threads=1)
    error = report.jobs[job.name].error
    assert f"job {job.name!r}" in error
    assert f"memory_limit is {1 << 20} bytes" in error
    assert "cannot be spilled, since they run as eager Python" in error
    assert "LBFGS" in error


@pytest.mark.parametrize("limit", ["many", -1, 0, True])
def test_a_limit_that_is_none(limit):
    job = zoo(CNN)
    parts = {"model": job.model, "optimizer": job.optimizer, "loss": job.loss, "data": job.data}
    with pytest.raises(wf.JobError, match="job 'a': memory_limit"):
        wf.Job("a", **parts, memory_limit=limit)


def test_weights_that_are_away_are_nobody_elses():
    """Where both jobs keep weights away, no reservation says who has them."""
    limit = int(zoo_peak(CNN) * 0.45)
    one, other = zoo(CNN, memory_limit=limit), zoo(CNN, memory_limit=limit)
    other.name, other.model = "other", one.model
    other.optimizer = torch.optim.SGD(one.model.parameters(), 0.1, momentum=0.9)
    report = wf.run([one, other], memory="8MiB", threads=1)
    assert report.jobs[one.name].state == "finished"
    assert "share a tensor" in report.jobs["other"].error


def test_a_tier_that_is_none():
    with pytest.raises(wf.JobError, match="'tape'"):
        wf.run([zoo(CNN)], memory="8MiB", spill="tape")


def test_a_full_disk_ends_the_job_before_it_runs(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "nowhere"))
    job = zoo(CNN)
    report, _ = trained(job, int(zoo_peak(CNN) * 0.6), spill="disk")
    assert "nowhere" in report.jobs[job.name].error
    assert "Have it spill to another folder or to memory" in report.jobs[job.name].error


def test_a_step_that_fails_leaves_nothing_behind():
    """Its values are away when an index of its batch is found to be out of range."""
    job, other = zoo(BERT, memory_limit=int(zoo_peak(BERT) * 0.6)), zoo(CNN)
    broken = list(job.data)
    bad = [t.clone() for t in broken[6]] if isinstance(broken[6], (list, tuple)) else None
    assert bad is not None
    bad[0].view(-1)[0] = 1 << 30
    broken[6] = type(broken[6])(bad) if type(broken[6]) in (list, tuple) else type(broken[6])(*bad)
    job.data = broken
    engine = Engine("8MiB", threads=1, check=True)
    with engine:
        engine.submit(job)
        engine.submit(other)
    report = engine.report()
    assert report.jobs[job.name].state == "failed"
    assert "ndex" in report.jobs[job.name].error
    assert_same_numbers(*zoo_eager(CNN), other, report.jobs[other.name])
    assert engine.check_races() == []
    assert int(engine._arena.statistics().live) == 0


@pytest.mark.parametrize("share", [soaked(0.6), 0.45])
def test_shapes_that_alternate_know_what_the_other_keeps_away(share):
    def job():
        one = zoo(CNN, steps=12)
        one.data = [tuple(t[: 4 + 4 * (i % 2)] for t in b) for i, b in enumerate(one.data)]
        return one

    one, twin = job(), job()
    report, run = trained(one, int(zoo_peak(CNN) * share), spill=True)
    assert_same_numbers(twin, wf.run_eager(twin, threads=1), one, report.jobs[one.name])
    assert len(spills(run)) == 2
    assert report.jobs[one.name].eager_steps < 12


def test_a_capture_of_another_mode_keeps_to_the_limit():
    """In evaluation mode batch norm writes to no buffer, and some of them are away all the same."""

    def job():
        one = zoo(CNN, steps=12)

        def turn(result):
            if result.step in (4, 8):
                one.model.train(result.step == 8)

        one.on_step = turn
        for group in one.optimizer.param_groups:
            group["lr"] = 1e-4
        return one

    one, twin = job(), job()
    limit = int(zoo_peak(CNN) * 0.45)
    report, _ = trained(one, limit, spill=True)
    assert_same_numbers(twin, wf.run_eager(twin, threads=1), one, report.jobs[one.name])
    assert report.jobs[one.name].recaptures
    assert report.extent_bytes <= limit


def test_a_limit_can_change_between_steps():
    """Down, up and away: the steps are planned anew, what was away returns."""
    job = zoo(CNN)
    _, run = trained(job, int(zoo_peak(CNN) * 0.6), spill=True)
    spiller, persistent = run.steps.spiller, run.steps.persistent
    (steady,) = steady_steps(run)
    assert steady.spill is not None
    limit = spiller.limit
    assert persistent.final_bytes < persistent.full_bytes
    spiller.set_limit(int(zoo_peak(CNN) * 0.4))
    (tighter,) = steady_steps(run)
    assert tighter.spill.moved_bytes > steady.spill.moved_bytes
    assert persistent.final_bytes + tighter.memory.extent <= zoo_peak(CNN) * 0.4
    spiller.set_limit(1000)
    assert isinstance(spiller.problem, wf.BudgetError)
    spiller.set_limit(limit)
    (again,) = steady_steps(run)
    assert again is steady  # remembered
    assert spiller.problem is None
    spiller.set_limit(None)
    (free,) = steady_steps(run)
    assert free is steady.planned_from
    assert persistent.final_bytes == persistent.full_bytes


def test_a_job_without_a_limit_gets_the_capture_of_one_that_spills_as_it_was():
    """What is planned into one job's limit is its own."""
    (need,) = {job.solo_peak_bytes for job in wf.run([MODELS["encoder"](capture=True)], MEMORY)}
    limited = MODELS["encoder"](capture=True, memory_limit=int(0.8 * need), epochs=8)
    free, expected = (MODELS["encoder"](capture=True, epochs=4) for _ in range(2))
    free.name = "free"
    with Engine(MEMORY, threads=1) as engine:
        first = engine.submit(limited)
        assert first.result(300).state == "finished", first.result().error
        second = engine.submit(free)
        assert second.result(300).state == "finished", second.result().error
    report = engine.report()
    assert report["encoder"].spills
    assert report["free"].capture_shared_with == "encoder"
    assert not report["free"].spills
    assert_same_numbers(expected, wf.run_eager(expected, threads=1), free, report["free"])
