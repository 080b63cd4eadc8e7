"""The examples run as they are, and what their texts say about memory is so."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import waterflow as wf
from waterflow.common.units import parse_bytes

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.cpu


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "hpo_digits",
        "cross_validation",
        "ensemble",
        "finetune_transformers",
        "early_stopping",
        "optuna_search",
        "gan",
        "resume",
    }


def test_the_trials_need_more_side_by_side_than_their_budget():
    example = load("hpo_digits")
    jobs = example.jobs()
    for job in jobs:
        job.steps = 2
    budget = parse_bytes(example.MEMORY)
    report = wf.run(jobs, memory=example.MEMORY, threads=1)
    assert report.ok, [job.error for job in report]
    assert 0 < report.peak_bytes <= budget < report.side_by_side_bytes
    assert "50.5 MiB" in (EXAMPLES / "hpo_digits.py").read_text()
    assert report.side_by_side_bytes / 2**20 == pytest.approx(50.5, rel=0.1)
    assert all(0 <= example.accuracy(job.model) <= 1 for job in jobs)


def test_the_trials_are_the_same_at_every_call():
    first, second = (load("hpo_digits").jobs() for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.name == other.name
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        assert all(a.equal(b) for a, b in pairs)


def test_halving_gives_most_trials_up(monkeypatch, capsys):
    example = load("early_stopping")
    monkeypatch.setattr(example, "TRIALS", 9)
    monkeypatch.setattr(example, "STEPS", 24)
    ranking = example.main()
    printed = capsys.readouterr().out
    assert 1 <= len(ranking) < 9
    assert list(ranking.values()) == sorted(ranking.values(), reverse=True)
    assert "failed" not in printed
    # Who is given up depends on who comes first; that it is at a rung, and counted, does not.
    given_up = [int(steps) for steps in re.findall(r"stopped after (\d+) steps", printed)]
    assert len(given_up) == 9 - len(ranking)
    assert set(given_up) <= set(example.RUNGS)
    assert f"{24 * len(ranking) + sum(given_up)} steps instead of 216" in printed


def test_the_rule_keeps_the_better_half_of_those_that_came():
    example = load("early_stopping")
    rule = example.Halving()
    losses = [2.0, 3.0, 1.0, 2.5, 0.5]
    results = [wf.StepResult("a", example.RUNGS[0], 0, loss, (0.1,)) for loss in losses]
    assert [rule(result) is wf.STOP for result in results] == [False, True, False, True, False]
    assert rule(wf.StepResult("a", 1, 0, 9.9, (0.1,))) is None


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = load("resume")

    def stop(result):
        if result.step == 150:
            os.kill(os.getpid(), signal.SIGINT)

    options = {
        "threads": 1,
        "memory": "64MiB",
        "checkpoint": example.FOLDER,
        "resume": example.FOLDER,
    }
    first = example.job(1e-2)
    first.on_step = stop
    with pytest.raises(wf.RunInterrupted):
        wf.run([first], **options)
    job, alone = example.job(1e-2), example.job(1e-2)
    report = wf.run([job], **options)
    assert report[job.name].resumed_steps >= 150
    assert report[job.name].losses == wf.run_eager(alone, threads=1).losses


def test_a_search_by_optuna_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for trials in (16, 32):
        study = load("optuna_search").study
        states = {trial.state.name for trial in study.trials}
        assert states <= {"COMPLETE", "PRUNED"}
        assert f"{trials} trials, the best {study.best_value:.3f}" in capsys.readouterr().out
    assert study.best_value > 0.8
    assert len((EXAMPLES / "optuna_search.py").read_text().splitlines()) < 40


def test_two_gans_side_by_side():
    assert len((EXAMPLES / "gan.py").read_text().splitlines()) < 40
    example = load("gan")

    def pair():
        jobs = [example.gan(1e-3, epochs=1), example.gan(3e-4, epochs=1)]
        for job in jobs:
            job.seed = 0
        return jobs

    report = wf.run(pair(), memory="8MiB", threads=1)
    for job in pair():
        alone = wf.run_eager(job, threads=1)
        assert report[job.name].state == "finished", report[job.name].error
        assert report[job.name].losses == alone.losses
        assert report[job.name].metrics == alone.metrics


def test_the_programs_in_readme_and_guide(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for page in ("README.md", "docs/guide.md"):
        text = (EXAMPLES.parent / page).read_text(encoding="utf-8")
        (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        exec(compile(program, page, "exec"), names)
    report = names["report"]
    assert [job.state for job in report] == ["finished"] * 3, [job.error for job in report]
    assert report.peak_bytes <= report.budget_bytes < report.side_by_side_bytes
    assert {path.name for path in (tmp_path / "waterflow-report").iterdir()} == {
        "report.json",
        "memory.png",
        "report.html",
        "trace.json",
    }
    assert names["handle"].result().state == "stopped"
    assert "lr-0.1: finished after 45 steps" in capsys.readouterr().out


def test_transformers_are_fine_tuned_side_by_side(monkeypatch):
    pytest.importorskip("accelerate")
    example = load("finetune_transformers")
    trainers = {name: example.trainer(name) for name in example.MODELS}
    for trainer in trainers.values():
        trainer.args.max_steps = 3
    jobs = [wf.from_trainer(trainer, name) for name, trainer in trainers.items()]
    report = wf.run(jobs, "256MiB", threads=1)
    assert [job.state for job in report] == ["finished"] * 3, [job.error for job in report]
    assert [job.steps for job in report] == [3] * 3


def test_five_folds_are_validated():
    example = load("cross_validation")
    everything = list(range(len(example.LABELS)))
    jobs = [example.fold(n, everything[n::2], everything[:100], epochs=1) for n in range(2)]
    report = wf.run(jobs, memory="64MiB", threads=1)
    assert report.ok, [job.error for job in report]
    assert all(0 < job.evaluations[-1].values["value"] <= 1 for job in report)


def test_members_of_an_ensemble_share_batches():
    example = load("ensemble")
    data = wf.shared(torch.utils.data.DataLoader(example.TRAIN, 100, shuffle=True), seed=0)
    report = wf.run([example.member(seed, data, 1) for seed in range(3)], memory="32MiB")
    assert [job.state for job in report] == ["finished"] * 3, [job.error for job in report]
    assert len({job.losses[-1] for job in report}) == 3


@pytest.mark.parametrize("name", ["cross_validation", "ensemble", "gan", "resume"])
def test_an_example_is_a_program(name, tmp_path):
    command = [sys.executable, "-W", "error::waterflow.JobFailedWarning", EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_examples_of_one_thing_are_short():
    short = [
        "cross_validation",
        "ensemble",
        "finetune_transformers",
        "gan",
        "optuna_search",
        "resume",
    ]
    for name in short:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40, name


def test_the_notebook_runs():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3").execute()
    *_, shown, told = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "<table" in shown.outputs[-1].data["text/html"]
    assert "135 callbacks" in told.outputs[0].text
