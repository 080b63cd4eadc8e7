"""Real studies whose trials train side by side: values, pruning, failures, storages, Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import waterflow as wf
from tests.support.data import cross_entropy, pairs

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[3]
COMPLETE, PRUNED, FAIL = (
    getattr(optuna.trial.TrialState, name) for name in ("COMPLETE", "PRUNED", "FAIL")
)


def held_out(model: nn.Module) -> float:
    inputs, labels = pairs()[0]
    return functional.cross_entropy(model(inputs), labels).item()


def build(name: str, rate: float, width: int, **options: Any) -> wf.Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
    settings = {"data": pairs(), "epochs": 3, "seed": 0, "evaluate": held_out, **options}
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    return wf.Job(name, model=model, optimizer=optimizer, loss=cross_entropy, **settings)


def suggested(trial: Any, **options: Any) -> wf.Job:
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    width = trial.suggest_categorical("width", [8, 16])
    return build(f"trial-{trial.number}", rate, width, **options)


def study_of(**options: Any) -> Any:
    return optuna.create_study(**{"sampler": optuna.samplers.TPESampler(seed=0), **options})


def search(study: Any, make_job: Any = suggested, n_trials: int = 4, **options: Any) -> wf.Report:
    return wf.optuna.optimize(study, make_job, n_trials, "8MiB", threads=1, **options)


@pytest.mark.parametrize(
    "sampler",
    [optuna.samplers.TPESampler(seed=0, n_startup_trials=3), optuna.samplers.RandomSampler(seed=0)],
)
def test_each_trial_has_the_numbers_of_its_solo_run(sampler: Any) -> None:
    # Which trials have ended by then, and so the default pruner's median, is a matter of time.
    study = study_of(sampler=sampler, pruner=optuna.pruners.NopPruner())
    report = search(study, n_trials=6)
    assert [trial.state for trial in study.trials] == [COMPLETE] * 6
    for trial in study.trials:
        rate, width = trial.params["rate"], trial.params["width"]
        alone = wf.run_eager(build("alone", rate, width), threads=1)
        assert report[f"trial-{trial.number}"].losses == alone.losses
        values = [found.values["value"] for found in alone.evaluations]
        assert trial.value == values[-1]
        assert trial.intermediate_values == dict(enumerate(values, start=1))


def test_without_evaluate_the_last_loss_is_the_value() -> None:
    study = study_of()
    report = search(study, lambda trial: suggested(trial, evaluate=None))
    values = [report[f"trial-{trial.number}"].losses[-1] for trial in study.trials]
    assert [trial.value for trial in study.trials] == values


class AtSecond(optuna.pruners.BasePruner):
    """Prunes odd trials at their second report."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number % 2 == 1 and trial.last_step == 2


@pytest.mark.parametrize("every", ["epoch", 2])
def test_a_pruned_trial_ends_at_its_evaluation(every: Any) -> None:
    study = study_of(
        pruner=AtSecond() if every == "epoch" else optuna.pruners.ThresholdPruner(upper=-1)
    )
    report = search(study, lambda trial: suggested(trial, evaluate_every=every))
    each = len(pairs())
    for trial in study.trials:
        found = report[f"trial-{trial.number}"]
        if every == 2:
            assert (trial.state, found.steps, trial.last_step) == (PRUNED, 2, 2)
        elif trial.number % 2:
            assert (trial.state, found.steps, trial.last_step) == (PRUNED, 2 * each, 2)
            assert trial.value == trial.intermediate_values[2]
        else:
            assert (trial.state, found.steps) == (COMPLETE, 3 * each)


def test_callbacks_may_report_and_prune_by_themselves() -> None:
    def make_job(trial: Any) -> wf.Job:
        def on_step(result: wf.StepResult) -> None:
            assert threading.current_thread() is threading.main_thread()
            trial.report(result.loss, result.step)
            if trial.number == 1 and result.step == 3:
                raise optuna.TrialPruned

        return suggested(trial, evaluate=None, on_step=on_step)

    study = study_of()
    report = search(study, make_job, 3)
    assert [trial.state for trial in study.trials] == [COMPLETE, PRUNED, COMPLETE]
    assert (report["trial-1"].steps, report["trial-1"].state) == (3, "stopped")
    assert report.ok
    assert list(study.trials[0].intermediate_values.values()) == report["trial-0"].losses


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.filterwarnings("error::waterflow.JobFailedWarning")
def test_an_evaluation_that_prunes_by_itself_is_no_failure(reports: bool) -> None:
    def prune(model: nn.Module) -> float:
        raise optuna.TrialPruned

    study = study_of()
    report = search(study, lambda trial: suggested(trial, evaluate=prune), 2, report=reports)
    assert [trial.state for trial in study.trials] == [PRUNED, PRUNED]
    assert {job.state for job in report} == {"stopped"}


def failing(trial: Any) -> wf.Job:
    def fail(model: nn.Module) -> float:
        raise ValueError("the disk is gone")

    trial.suggest_float("rate", 0, 1)
    if trial.number == 1:
        raise RuntimeError("no such data set")
    if trial.number == 2:
        raise optuna.TrialPruned
    if trial.number == 3:
        return build("c", 0.1, 8, evaluate=lambda model: float("nan"))
    return build("b", 0.1, 8, evaluate=fail)


def test_a_failed_trial_is_a_failed_trial() -> None:
    study = study_of()
    search(study, failing, 5)
    states = [trial.state for trial in study.trials]
    assert states == [FAIL, FAIL, PRUNED, FAIL, FAIL]
    errors = [trial.user_attrs.get("waterflow_error") for trial in study.trials]
    assert errors == [
        "ValueError: the disk is gone",
        "RuntimeError: no such data set",
        None,
        "job 'c': its value is nan",
        "ValueError: the disk is gone",
    ]


@pytest.mark.parametrize("answer", [None, {"x": 1.0, "y": 2.0}])
def test_a_job_without_a_value_says_so(answer: Any) -> None:
    study = study_of()
    job = lambda trial: 3 if answer is None else suggested(trial, evaluate=lambda model: answer)  # noqa: E731
    search(study, job, 1)
    expected = "make_job is to return a waterflow.Job" if answer is None else "by objective="
    assert expected in study.trials[0].user_attrs["waterflow_error"]


def test_of_several_numbers_one_is_the_value() -> None:
    study = study_of(direction="maximize")
    values = {"x": 1.0, "y": 2.0}
    search(study, lambda trial: suggested(trial, evaluate=lambda model: values), 1, objective="y")
    assert study.best_value == 2.0


def test_how_trials_end_is_logged_as_optuna_does() -> None:
    def made(trial: Any) -> wf.Job:
        if trial.suggest_int("place", 0, 3) == 0:
            raise KeyError("a bug of make_job")
        if trial.params["place"] == 1:
            raise optuna.TrialPruned
        value = float("nan") if trial.params["place"] == 2 else 0.5
        return build("c", 0.1, 8, evaluate=lambda model: value)

    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger = optuna.logging.get_logger("optuna")
    logger.addHandler(handler)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        study = optuna.create_study(sampler=optuna.samplers.GridSampler({"place": range(4)}))
        heard.clear()
        wf.optuna.optimize(study, made, n_trials=4, memory="64MiB", at_once=1)
    finally:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logger.removeHandler(handler)
    ended = {trial.number: trial for trial in study.trials}
    assert len(heard) == len(ended) == 4
    for record in heard:
        trial = ended[int(record.getMessage().split()[1])]
        wanted = {
            0: "failed with parameters: {'place': 0}: KeyError: 'a bug of make_job'",
            1: "pruned.",
            2: "failed with parameters: {'place': 2}: job '",
            3: "finished with value: 0.5 and parameters: {",
        }[trial.params["place"]]
        assert record.getMessage().startswith(f"Trial {trial.number} {wanted}")
        assert (record.exc_info is not None) == (trial.params["place"] == 0), "with its traceback"


def test_an_error_that_is_not_to_be_caught_ends_the_search() -> None:
    study = study_of()
    with pytest.raises(RuntimeError, match="no such data set"):
        search(study, failing, 50, catch=(ValueError,))
    assert len(study.trials) < 10
    assert all(trial.state.is_finished() for trial in study.trials)


def test_callbacks_hear_of_trials_and_may_stop_the_search() -> None:
    study, heard = study_of(), []
    callbacks = [
        lambda study, trial: heard.append((trial.number, trial.state)),
        optuna.study.MaxTrialsCallback(3, states=(COMPLETE,)),
    ]
    search(study, n_trials=50, callbacks=callbacks, at_once=1)
    assert heard == [(number, COMPLETE) for number in range(3)]


@pytest.mark.parametrize("kind", ["GridSampler", "BruteForceSampler"])
def test_a_sampler_that_has_tried_all_there_is_ends_the_search(kind: str) -> None:
    grid = [{"place": range(3)}] if kind == "GridSampler" else []
    study = study_of(sampler=getattr(optuna.samplers, kind)(*grid))

    def made(trial: Any) -> wf.Job:
        return build("a", 0.1, 8, seed=trial.suggest_int("place", 0, 2))

    search(study, made, 20, at_once=1)
    assert sorted(trial.params["place"] for trial in study.trials) == [0, 1, 2]
    assert {trial.state for trial in study.trials} == {COMPLETE}
    with pytest.raises(RuntimeError):  # Optuna's own again
        study.stop()


def test_no_more_trials_are_under_way_than_asked_for_or_fit() -> None:
    most = 0

    def count(study: Any, trial: Any) -> None:
        nonlocal most
        running = [t for t in study.get_trials() if t.state is optuna.trial.TrialState.RUNNING]
        most = max(most, len(running) + 1)

    search(study_of(), n_trials=6, callbacks=[count], at_once=2)
    assert most == 2
    most, needs = 0, 15_000  # one of them needs about so much, two do not fit
    big = lambda trial: suggested(trial, epochs=20)  # noqa: E731
    report = wf.optuna.optimize(study_of(), big, 6, needs, threads=1, at_once=6, callbacks=[count])
    assert report.ok, [job.error for job in report]
    assert report.peak_bytes <= needs


def test_the_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second with each trial; one under way goes on to its end."""
    now = [0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("waterflow.integrations.optuna.time", clock)

    def make(trial: Any) -> wf.Job:
        now[0] += 1
        return suggested(trial)

    study = study_of()
    search(study, make, n_trials=None, timeout=3)
    assert len(study.trials) == 3
    assert all(trial.state in (COMPLETE, PRUNED) for trial in study.trials)


def test_a_study_in_a_file_goes_on(tmp_path: Path) -> None:
    options = {"storage": f"sqlite:///{tmp_path / 'study.db'}", "study_name": "s"}
    search(study_of(**options), n_trials=3)
    again = study_of(**options, load_if_exists=True)
    search(again, n_trials=2)
    assert [trial.number for trial in again.trials] == list(range(5))
    assert all(trial.state is COMPLETE for trial in again.trials)
    assert all(len(trial.intermediate_values) == 3 for trial in again.trials)


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    program = f"""
        import os, signal
        import optuna
        from tests.waterflow.integrations.test_optuna import *

        def make_job(trial):
            if trial.number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return suggested(trial)

        study = study_of(storage="sqlite:///{path}", study_name="s")
        search(study, make_job, 50)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert ended.returncode != 0
    assert "KeyboardInterrupt" in ended.stderr
    study = study_of(storage=f"sqlite:///{path}", study_name="s", load_if_exists=True)
    assert len(study.trials) == 4
    assert all(trial.state.is_finished() for trial in study.trials)
    assert "interrupted" in study.trials[3].user_attrs["waterflow_error"]
    search(study, n_trials=2)
    assert [trial.state for trial in study.trials[4:]] == [COMPLETE] * 2


def test_what_cannot_be_used_is_an_error() -> None:
    both = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(wf.JobError, match="has 2 objectives"):
        search(both)
    for options in ({"n_trials": 0}, {"at_once": 0}, {"timeout": 0}):
        with pytest.raises(wf.JobError, match=f"{next(iter(options))} must be"):
            search(study_of(), **options)


def test_it_is_reached_by_its_name_alone() -> None:
    program = "import sys, waterflow as wf; wf.optuna.optimize; print('optuna' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False\n"
