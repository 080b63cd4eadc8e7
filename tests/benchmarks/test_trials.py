"""The benchmark of trials at small sizes: its seconds are not looked at, its numbers are."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.trials import digits, models, stacked, text, ways
from benchmarks.trials.__main__ import arguments, chosen, main
from benchmarks.trials.case import JobsCase, Size
from benchmarks.trials.cases import all_cases
from benchmarks.trials.ways import loops, with_compile, with_processes

pytestmark = pytest.mark.cpu

KEYS = {
    "case",
    "trials",
    "steps",
    "eager_seconds",
    "processes_seconds",
    "compile_seconds",
    "vmap_seconds",
    "waterflow_seconds",
    "vs_eager",
    "vs_best",
    "equal",
}


def rows(capsys, *options):
    main(["--json", "--repeats", "1", "--steps-fraction", "0.01", "--most-trials", "2", *options])
    return json.loads(capsys.readouterr().out)["rows"]


def test_rows_have_all_keys_and_equal_numbers(capsys):
    cases = ["tiny", "folds", "gans", "mlp-8"]
    found = rows(capsys, "--cases", *cases, "--skip", "processes", "compile")
    assert sorted(row["case"] for row in found) == sorted(cases)
    for row in found:
        assert row.keys() == KEYS
        assert row["equal"]
        assert row["trials"] == 2
        assert row["vs_best"] <= row["vs_eager"]
        assert row["processes_seconds"] is row["compile_seconds"] is None
    stackable = {row["case"] for row in found if row["vmap_seconds"] is not None}
    assert stackable == {"tiny", "mlp-8"}


def test_a_search_prunes_the_same_trials_whoever_trains_them(capsys):
    pytest.importorskip("optuna")
    (row,) = rows(capsys, "--cases", "optuna", "--skip", "processes", "compile")
    assert row["equal"]
    small = digits.SearchCase().sized(Size(most_trials=12, steps_fraction=0.5))
    small.prepare()
    steps = [len(losses) for losses in small.run(loops(1))]
    assert len(steps) == 12
    assert set(steps[:8]) == {small.steps}, "nothing to compare with, nothing is pruned"
    assert min(steps[8:]) < small.steps


def test_a_row_without_its_library_is_skipped(capsys, monkeypatch):
    def prepare(self):
        raise ModuleNotFoundError("No module named 'optuna'", name="optuna")

    monkeypatch.setattr(digits.SearchCase, "prepare", prepare)
    main(["--json", "--cases", "optuna"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows"] == []
    assert "optuna: skipped, optuna is missing: pip install 'waterflow[bench]'" in printed.err


def test_cases_are_chosen_by_patterns():
    assert [case.name for case in chosen(["*-8"])] == ["mlp-8", "cnn-8", "gru-8", "transformer-8"]
    assert len(chosen(arguments([]).cases)) == len(all_cases()) == 14
    with pytest.raises(SystemExit, match="'mlp-9' is none of optuna, folds"):
        chosen(["mlp-9"])


def test_batches_of_text_have_that_many_lengths():
    for lengths in (30, 70):
        assert len({batch.shape[1] for batch in text.passages(lengths, seed=0)}) == lengths


def test_every_trial_falls_to_one_process():
    case = all_cases()["tiny"]
    assert isinstance(case, JobsCase)
    shares = [case.part(part, 3) for part in range(3)]
    assert sorted(number for share in shares for number in share.numbers) == list(range(200))


@pytest.mark.slow
def test_processes_train_their_shares():
    assert with_processes("mlp-8", Size(steps_fraction=0.01, most_trials=2)) > 0


@pytest.mark.slow
def test_a_compilation_that_takes_long_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(ways, "COMPILE_LIMIT", 0.01)
    assert with_compile("mlp-8", Size()) is None
    assert "not compiled: not done after 0.01 s" in capsys.readouterr().err


@pytest.mark.soak
def test_compiled_steps():
    seconds = with_compile("mlp-8", Size(steps_fraction=0.01, most_trials=1))
    assert seconds is None or seconds > 0  # None: no compiler here


@pytest.mark.parametrize("name", ["mlp-8", "cnn-8", "gru-8", "transformer-8"])
def test_stacked_trials_are_the_same_training_but_for_rounding(name):
    case = all_cases()[name].sized(Size(steps_fraction=0.03, most_trials=2))
    expected = torch.tensor(case.run(loops(1)))
    torch.testing.assert_close(torch.tensor(case.run(stacked.train)), expected)
    assert len({tuple(losses) for losses in expected.tolist()}) == 2


def test_stacked_sgd_has_momentum():
    case = all_cases()["tiny"].sized(Size(steps_fraction=0.3, most_trials=3))
    expected = torch.tensor(case.run(loops(1)))
    torch.testing.assert_close(torch.tensor(case.run(stacked.train)), expected)


def test_trials_of_one_architecture_differ_in_their_rates_alone():
    make = models.make_trial(models.mlp, 4)
    one, other = make(0, 3), make(1, 3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )
    assert one.optimizer.param_groups[0]["lr"] < other.optimizer.param_groups[0]["lr"]
