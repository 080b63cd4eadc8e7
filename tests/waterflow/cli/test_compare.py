"""Comparisons: what a row says, and that bits decide whether losses are equal."""

import json
import math
import sys
import types

import pytest
import torch

import waterflow
from waterflow.cli.compare import EAGER, compare
from waterflow.common.errors import JobError
from waterflow.report.report import JobReport, Report


class Engine:
    """Eager takes what it takes; a policy's report says one second for two jobs of ten steps."""

    def __init__(self, losses, eager_losses, eager_peak=0, error=None):
        self.losses, self.eager_losses, self.eager_peak = losses, eager_losses, eager_peak
        self.error = error

    def run(self, jobs, memory, *, device, policy, lanes, threads, progress):
        assert progress is False
        assert (lanes, threads) == (2, 2)
        reports = {
            job.name: JobReport(name=job.name, steps=10, losses=list(self.losses)) for job in jobs
        }
        return Report(jobs=reports, seconds=1.0, peak_bytes=memory // 2, budget_bytes=memory)

    def run_eager(self, job, threads):
        if self.error:
            raise self.error
        losses = [loss if threads == 2 else loss + 1 for loss in self.eager_losses]
        return JobReport(name=job.name, steps=10, losses=losses, peak_bytes=self.eager_peak)


@pytest.fixture
def rows(monkeypatch):
    def rows(*, losses, eager_losses, eager_peak=0, error=None, policies=("temporal",)):
        engine = Engine(losses, eager_losses, eager_peak, error)
        monkeypatch.setattr(waterflow, "run", engine.run, raising=False)
        module = types.ModuleType("waterflow.job.training_step")
        module.run_eager = engine.run_eager
        monkeypatch.setitem(sys.modules, "waterflow.job.training_step", module)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        jobs = [types.SimpleNamespace(name="a"), types.SimpleNamespace(name="b")]
        return compare(lambda: jobs, "1MiB", policies)

    return rows


def test_rows(rows):
    result = rows(losses=[1.0], eager_losses=[1.0], policies=("temporal", "waterwave"))
    names = [f"{EAGER}, 2 threads", f"{EAGER}, 4 threads", "temporal", "waterwave"]
    assert [row.name for row in result.rows] == names
    eager, other, temporal, _ = result.rows
    assert max(eager.speed, other.speed) == 1.0
    assert (eager.equal, other.equal) == (True, None)
    assert eager.peak_bytes is None
    assert temporal.steps_per_second == 20.0
    assert temporal.peak_bytes == 2**19
    fastest = max(eager.steps_per_second, other.steps_per_second)
    assert temporal.speed == pytest.approx(20.0 / fastest)
    assert result.ok
    document = json.loads(result.to_json())
    assert document["memory_bytes"] == 2**20
    assert document["rows"][2]["equal"] is True


def test_the_largest_eager_job_counts_once_all_are_measured(rows):
    result = rows(losses=[], eager_losses=[], eager_peak=7)
    assert result.rows[0].peak_bytes == 7


@pytest.mark.parametrize(
    ("losses", "eager_losses", "equal"),
    [
        ([1.0, 0.5], [1.0, 0.5], True),
        ([math.nan], [math.nan], True),
        ([math.inf], [math.inf], True),
        ([0.0], [-0.0], False),
        ([1.0], [math.nextafter(1.0, 2.0)], False),
        ([1.0], [1.0, 1.0], False),
        ([], [], True),
    ],
)
def test_equal_means_every_bit(rows, losses, eager_losses, equal):
    result = rows(losses=losses, eager_losses=eager_losses)
    assert result.rows[2].equal is equal
    assert result.ok is equal


def test_a_job_that_raises_eagerly_is_a_failed_job(rows):
    result = rows(losses=[1.0], eager_losses=[1.0], error=ValueError("the user's"))
    assert result.rows[0].failed == ["a", "b"]
    assert not result.ok


def test_a_wrong_budget_before_anything_runs():
    with pytest.raises(JobError, match="lots"):
        compare(lambda: pytest.fail("made jobs"), "lots")
