"""Evaluations of a job made of a Trainer are those of `trainer.train()`, and so is what follows."""

import numpy as np
import pytest
import torch

import waterflow as wf
from tests.support.tables import crossed, soaked
from tests.support.trainers import (
    MODELS,
    SEED,
    masked_at_random,
    same_weights,
    sentences,
    trained_by_host,
    trainer,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.cpu


def accuracy(prediction):
    logits, labels = prediction.predictions, prediction.label_ids
    noise = np.random.rand(*labels.shape) * 1e-3  # drawn, as some metrics do
    right = (logits.argmax(-1) == labels).mean()
    return {"accuracy": right + noise.mean(), "best_epoch": 3.0}


#: Evaluated in batches of four, the last of which has one row.
HELD_OUT = {"per_device_eval_batch_size": 4}


def evaluated(name, tmp_path, evaluation, kind=transformers.Trainer, **keywords):
    data = MODELS[name]()[1][:13]
    keywords = {"eval_dataset": data, **keywords}
    return trainer(MODELS[name], tmp_path, kind, keywords, **HELD_OUT, **evaluation)


def told_by_host(host):
    """What the Trainer's log says of each evaluation, but for its times."""
    timings = ("_runtime", "_per_second", "_preparation_time")
    return [
        {k: v for k, v in entry.items() if k.startswith("eval_") and not k.endswith(timings)}
        for entry in host.state.log_history
        if any(key.startswith("eval_") for key in entry)
    ]


@pytest.mark.parametrize(
    ("name", "evaluation"),
    [
        ("gpt2", {"eval_strategy": "epoch"}),
        soaked("t5", {"eval_strategy": "epoch"}),
        soaked("bert", {"eval_strategy": "steps", "eval_steps": 2}),
        ("bert", {"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 5}),
        ("gpt2", {"eval_strategy": "steps", "eval_steps": 0.5}),
        ("t5", {"eval_strategy": "epoch", "eval_delay": 2, "gradient_accumulation_steps": 2}),
        ("bert", {"eval_strategy": "epoch", "max_steps": 5, "eval_accumulation_steps": 1}),
        ("bert", {"eval_strategy": "epoch", "eval_on_start": True}),
        soaked("gpt2", {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}),
        soaked("t5", {"eval_strategy": "epoch", "eval_delay": 2, "eval_on_start": True}),
    ],
    ids=lambda given: given if isinstance(given, str) else ",".join(map(str, given.values())),
)
def test_evaluations_are_those_of_the_host(name, evaluation, tmp_path):
    """They draw random numbers, as every loader does, so that what follows has others."""
    metrics = {"compute_metrics": accuracy} if name == "bert" else {}
    collated = {"data_collator": masked_at_random} if name == "bert" else {}
    host, guest, beside = (
        evaluated(name, tmp_path, evaluation, **metrics, **collated) for _ in range(3)
    )
    asked = []
    own = beside.get_eval_dataloader
    beside.get_eval_dataloader = lambda *data: asked.append(1) or own(*data)
    jobs = [wf.from_trainer(guest, "guest"), wf.from_trainer(beside, "beside")]
    transformers.set_seed(SEED)
    report = wf.run(jobs, memory="512MiB", threads=1)
    report.raise_errors()
    losses, told = trained_by_host(host), told_by_host(host)
    assert len(told) == len(asked) > 0
    for job, one in (("guest", guest), ("beside", beside)):
        assert [found.values for found in report[job].evaluations] == told
        assert told_by_host(one) == told
        if "gradient_accumulation_steps" not in evaluation:
            assert report[job].losses == losses
        same_weights(host.model, one.model)
    places = [
        [(e["step"], e["epoch"]) for e in one.state.log_history if "eval_loss" in e]
        for one in (host, guest)
    ]
    assert places[0] == places[1]
    assert [found.step for found in report["guest"].evaluations] == [step for step, _ in places[0]]


class Found(transformers.Trainer):
    """Keeps what its evaluations return."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.found = []

    def evaluate(self, *arguments, **options):
        metrics = super().evaluate(*arguments, **options)
        metrics["eval_drawn"] = float(torch.rand(()))
        self.found.append({k: v for k, v in metrics.items() if k in ("eval_loss", "eval_drawn")})
        return metrics


class Predicting(Found):
    """Predicts in a way of its own, which draws."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        return loss * (2 + torch.rand(())), logits, labels


class Weighing(Found):
    """A loss of its own, in training and in evaluations."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 3.0])
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("strategy", "kind"), crossed(["epoch", "steps"], [Found, Predicting, Weighing])
)
def test_methods_of_a_subclass_evaluate_as_in_the_host(kind, strategy, tmp_path):
    options = {"eval_strategy": strategy, "eval_steps": 4}
    host, guest = (evaluated("bert", tmp_path, options, kind=kind) for _ in range(2))
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    report.raise_errors()
    assert report["guest"].losses == trained_by_host(host)
    assert len(host.found) == 2
    assert guest.found == host.found == [e.values for e in report["guest"].evaluations]
    same_weights(host.model, guest.model)


def test_several_datasets_are_evaluated_as_in_the_host(tmp_path):
    data = {"seen": sentences("class", rows=6), "runtime": sentences("class", rows=9)}
    options = {"eval_strategy": "steps", "eval_steps": 2}
    keywords = {"eval_dataset": data, "compute_metrics": accuracy}
    host, guest = (evaluated("bert", tmp_path, options, **keywords) for _ in range(2))
    transformers.set_seed(SEED)
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    report.raise_errors()
    assert report["guest"].losses == trained_by_host(host)
    told = told_by_host(host)  # an entry for each dataset
    assert told_by_host(guest) == told
    together = [{**first, **second} for first, second in zip(told[::2], told[1::2], strict=True)]
    assert [found.values for found in report["guest"].evaluations] == together
    assert "eval_runtime_accuracy" in together[0]
    same_weights(host.model, guest.model)


@pytest.mark.parametrize(("strategy", "patience"), crossed(["epoch", "steps"], [1, 2]))
def test_early_stopping_stops_where_the_host_does(strategy, patience, tmp_path):
    evaluation = {
        "eval_strategy": strategy,
        "eval_steps": 2,
        "metric_for_best_model": "accuracy",
        "greater_is_better": False,
        "num_train_epochs": 6,
    }

    def stopping():
        callbacks = [transformers.EarlyStoppingCallback(patience)]
        keywords = {"compute_metrics": accuracy, "callbacks": callbacks}
        return evaluated("bert", tmp_path, evaluation, **keywords)

    host, guest = stopping(), stopping()
    transformers.set_seed(SEED)
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    report.raise_errors()
    losses = trained_by_host(host)
    assert report["guest"].losses == losses
    assert report["guest"].state == "stopped"
    assert len(losses) == host.state.global_step < 18
    assert told_by_host(guest) == told_by_host(host)
    assert guest.state.best_metric == host.state.best_metric
    same_weights(host.model, guest.model)


@pytest.mark.parametrize(
    ("evaluation", "stop"), crossed(["no", "epoch", "steps", "start"], [3, 4, 5, 7, 8])
)
def test_a_training_that_goes_on_is_the_hosts(evaluation, stop, tmp_path):
    """In data, whose loader is a batch ahead and whose collator draws, and in evaluations."""
    options = {"eval_strategy": "steps" if evaluation == "steps" else "epoch", "eval_steps": 2}
    if evaluation == "no":
        options = {"eval_strategy": "no"}
    elif evaluation == "start":
        options["eval_on_start"] = True

    def made():
        keywords = {"compute_metrics": accuracy, "data_collator": masked_at_random}
        return evaluated("bert", tmp_path, {**options, "num_train_epochs": 3}, **keywords)

    def fail_there(result):
        if result.step == stop:
            raise RuntimeError

    def run(one, on_step=None):
        transformers.set_seed(SEED)
        folder = tmp_path / "checkpoint"
        keep = {"checkpoint": folder, "checkpoint_every": "1 steps", "resume": folder}
        return wf.run([wf.from_trainer(one, "a", on_step=on_step)], "256MiB", threads=1, **keep)

    host, guest = made(), made()
    with pytest.warns(wf.JobFailedWarning):
        run(made(), fail_there)
    report = run(guest)
    report.raise_errors()
    assert report["a"].resumed_steps == stop - 1
    assert report["a"].losses == trained_by_host(host)
    assert [found.values for found in report["a"].evaluations] == told_by_host(host)
    assert told_by_host(guest) == told_by_host(host)
    same_weights(host.model, guest.model)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bf16": True}, "bf16=True with an eval_strategy"),
        (
            {"load_best_model_at_end": True, "save_strategy": "epoch"},
            "load_best_model_at_end=True with save_only_model=False",
        ),
        (
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            "dataloader_persistent_workers=True with an eval_strategy",
        ),
        (
            {"callbacks": [transformers.EarlyStoppingCallback()]},
            "EarlyStoppingCallback without metric_for_best_model",
        ),
        (
            {"callbacks": [transformers.EarlyStoppingCallback()], "eval_strategy": "no"},
            "EarlyStoppingCallback without an eval_strategy",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_taken_over_is_refused_by_name(options, named, tmp_path):
    keywords = {"callbacks": options.pop("callbacks", None)}
    one = evaluated("bert", tmp_path, {"eval_strategy": "epoch", **options}, **keywords)
    with pytest.raises(wf.JobError, match="job 'mine': from_trainer cannot") as refused:
        wf.from_trainer(one, "mine")
    assert named in str(refused.value)


def test_a_missing_dataset_is_refused_by_name(tmp_path):
    one = evaluated("bert", tmp_path, {"eval_strategy": "epoch"})
    one.eval_dataset = None
    with pytest.raises(wf.JobError, match=r"'mine'.*eval_strategy without eval_dataset"):
        wf.from_trainer(one, "mine")
