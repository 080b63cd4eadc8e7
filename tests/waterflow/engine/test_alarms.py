"""What goes wrong is said when it does, once for each job."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from waterflow.common import machine

pytestmark = pytest.mark.cpu

DATA = [(torch.ones(2, 4), torch.ones(2, 1))] * 6


def job(name="a", *, worth=lambda step: 1.0, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = [(*batch, torch.tensor(worth(step))) for step, batch in enumerate(DATA, 1)]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    settings = {"loss": weighted, "data": data, "seed": 0, **options}
    return wf.Job(name, model=model, optimizer=optimizer, **settings)


def weighted(model, batch):
    return F.mse_loss(model(batch[0]), batch[1]) * batch[2]


def run(jobs, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        report = wf.run(jobs, "8MiB", threads=1, **options)
    return report, caught


@pytest.mark.parametrize("tiers", ["on", "off"])
def test_a_loss_that_became_nan_is_said_at_once_and_in_the_notes(tiers, monkeypatch):
    monkeypatch.setenv("WATERFLOW_TIERS", tiers)
    report, caught = run([job(worth=lambda step: math.nan if step >= 3 else 1.0), job("b")])
    said = [w for w in caught if w.category is wf.NonFiniteLossWarning]
    assert [str(w.message) for w in said] == [
        "job 'a': the loss of step 3 is nan, and it trains on; stop_on_nan=True ends a job then"
    ]
    assert (said[0].filename, said[0].lineno) == (__file__, weighted.__code__.co_firstlineno)
    assert report["a"].state == "finished"
    assert report["a"].nonfinite_step == 3
    assert report["a"].notes[-1].startswith("the loss of step 3 was nan")
    assert report["b"].nonfinite_step is None
    assert not any("loss" in note for note in report["b"].notes)
    assert wf.Report.from_json(report.to_json())["a"].notes == report["a"].notes


def test_stopping_on_nan_is_a_failure():
    report, caught = run([job(worth=lambda step: math.nan, stop_on_nan=True)])
    assert wf.JobFailedWarning in [w.category for w in caught]
    with pytest.raises(wf.NonFiniteLossError):
        report.raise_errors()


def test_the_same_failure_in_the_next_run_is_said_again():
    def broken(model, batch):
        raise ValueError("again\x1b[31m")

    for _ in range(2):
        _, caught = run([job(loss=broken), job("b", loss=broken)])
        texts = [str(w.message) for w in caught if w.category is wf.JobFailedWarning]
        assert len(texts) == 2
        assert all(r"again\x1b[31m" in text and "\x1b" not in text for text in texts)


def test_warnings_as_errors_end_no_engine():
    def broken(model, batch):
        raise ValueError("broken")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = wf.run([job(loss=broken), job("b")], "8MiB", threads=1)
    assert [one.state for one in report] == ["failed", "finished"]


def test_more_memory_than_there_is_is_said():
    there = machine.memory_limit().size
    with pytest.warns(
        wf.BudgetWarning, match=f"memory={there + 1} bytes .* is more than"
    ) as caught:
        wf.Engine(memory=there + 1).close()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wf.Engine(memory=there).close()
