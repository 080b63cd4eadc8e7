"""The benchmark of coverage tells equal from different, and outlives what dies in it."""

from __future__ import annotations

import json

import pytest
import torch

import waterflow as wf
from benchmarks.coverage.__main__ import chosen, main
from benchmarks.coverage.pool import Task, run_all
from benchmarks.coverage.trial import Kind, Trial, judge, outcome_of, same
from tests.support.coverage_suite import Mixed, linear, raising

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def test_equal_training_is_captured():
    assert judge(Trial("", linear)).kind is Kind.CAPTURED


def test_one_wrong_bit_is_a_difference(monkeypatch):
    run = wf.run

    def inexact(jobs, *args, **options):
        report = run(jobs, *args, **options)
        jobs[0].model.bias.detach().view(torch.int32)[0] ^= 1
        return report

    monkeypatch.setattr(wf, "run", inexact)
    found = judge(Trial("", linear))
    assert found.kind is Kind.DIFFERENT
    assert "bias" in found.reason


def test_what_eager_cannot_train_is_skipped():
    assert judge(Trial("", raising)).kind is Kind.SKIPPED


def test_what_differs_from_itself_is_skipped():
    seeds = iter(range(9))

    def unsteady():
        torch.manual_seed(next(seeds))
        return linear()

    found = judge(Trial("", unsteady))
    assert found.kind is Kind.SKIPPED
    assert "differs from itself" in found.reason


def test_the_piece_that_is_to_blame_is_named():
    pieces = (Trial("first", linear), Trial("second", one_that_is_not_captured))
    found = outcome_of([Trial("both", one_that_is_not_captured, pieces)], "log")
    assert found.kind is Kind.OPAQUE
    assert "second: opaque step" in found.reason


def one_that_is_not_captured():
    job = linear()
    plain = job.loss
    job.loss = lambda model, batch: plain(model, batch) * (2 if batch.sum() > 0 else 1)
    return job


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -torch.nan]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), False),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
    ],
)
def test_tensors_are_compared_by_bits(one, other, equal):
    assert same(one, other) is equal


def test_cases_that_die_or_hang_are_counted_and_the_rest_goes_on():
    found = {}
    tasks = [Task("tests.support.coverage_suite:Mixed", name) for name in Mixed().names()]
    run_all(tasks, 1, 12.0, "log", lambda task, outcome: found.setdefault(task.name, outcome))
    assert [found[task.name].kind for task in tasks] == [
        Kind.CAPTURED,
        Kind.CRASHED,
        Kind.CRASHED,
        Kind.SKIPPED,
        Kind.CAPTURED,
    ]
    assert "Segmentation fault" in found["dies"].reason
    assert "no answer in 12 s" in found["hangs"].reason


def test_the_share_of_names_is_fixed():
    names = [str(number) for number in range(1000)]
    quarter = chosen(names, 0.25)
    assert 200 < len(quarter) < 300
    assert set(quarter) < set(chosen(names, 0.5))
    assert chosen(names, 1.0) == names


def test_the_document(capsys, monkeypatch):
    pytest.importorskip("expecttest")
    monkeypatch.setenv("WATERFLOW_TIERS", "on")  # as users have it: few steps alone stay eager
    main(["--json", "--suite", "optim_db", "--only", "Adagrad", "--limit", "2", "--workers", "1"])
    document = json.loads(capsys.readouterr().out)
    found = document["suites"]["optim_db"]
    assert (found["captured"], found["cases"], found["captured_share"]) == (2, 2, 1.0)
    assert found["worst"] == []
    assert {"opaque", "refused", "different", "crashed", "skipped"} <= found.keys()
    assert document["versions"]["torch"] == torch.__version__


def test_the_table(capsys):
    pytest.importorskip("expecttest")
    main(["--suite", "optim_db", "--only", "Adagrad", "--limit", "1", "--workers", "1"])
    assert "optim_db" in capsys.readouterr().out
