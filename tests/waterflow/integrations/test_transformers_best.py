"""The best weights of a Trainer, and schedules that follow its evaluations, are the host's own."""

import json
import pathlib

import pytest
import torch

import waterflow as wf
from tests.support.tables import crossed, soaked, thinned
from tests.support.trainers import SEED, same_weights, trained_by_host
from tests.waterflow.integrations.test_transformers_evaluation import (
    accuracy,
    evaluated,
    told_by_host,
)

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu

PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.1},
    "learning_rate": 1e-2,
}
BEST = {"load_best_model_at_end": True, "save_only_model": True}
#: Of a checkpoint's state, what its files are chosen by.
NOTED = ("best_metric", "best_global_step", "global_step", "epoch", "max_steps", "save_steps")


def made(folder, options, patience=None, name="bert"):
    callbacks = [] if patience is None else [transformers.EarlyStoppingCallback(patience)]
    keywords = {"compute_metrics": accuracy} if name == "bert" else {}
    folder.mkdir(exist_ok=True)
    return evaluated(name, folder, options, callbacks=callbacks, **keywords)


def files(one):
    """The checkpoints that are left: weights and what is noted of them."""
    found = {}
    for folder in pathlib.Path(one.args.output_dir).glob("checkpoint-*"):
        noted = json.loads((folder / "trainer_state.json").read_text())
        found[folder.name] = (
            {path.name: path.read_bytes() for path in folder.glob("*.safetensors")},
            {key: noted[key] for key in NOTED},
            sorted(path.name for path in folder.iterdir()),
        )
    return found


#: By what the best weights are chosen, and when they are kept.
CHOSEN = [
    {"eval_strategy": "epoch", "save_strategy": "epoch", **BEST},
    {"eval_strategy": "epoch", "save_strategy": "best", **BEST},
    {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4, **BEST},
    {
        "eval_strategy": "steps",
        "eval_steps": 0.25,
        "save_strategy": "steps",
        "save_steps": 0.5,
        **BEST,
    },
    {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1, **BEST},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 8, **BEST},
    {
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "save_only_model": True,
        "metric_for_best_model": "loss",
    },
    {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "metric_for_best_model": "accuracy",
        "greater_is_better": False,
        **BEST,
    },
    {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        **BEST,
        **PLATEAU,
    },
    {"eval_strategy": "epoch", "eval_delay": 2, "save_strategy": "best", **BEST},
]
#: What differs from one of those by its numbers only.
ALIKE = [
    {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, **BEST},
    {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", **BEST},
]


@pytest.mark.parametrize(
    ("options", "patience"),
    [
        *crossed(CHOSEN, [1, None]),
        *(soaked(options, patience) for options in ALIKE for patience in (1, None)),
    ],
    ids=str,
)
def test_the_best_weights_are_the_hosts(options, patience, tmp_path):
    options = {"num_train_epochs": 4, "metric_for_best_model": "accuracy", **options}
    host, guest = (made(tmp_path / name, options, patience) for name in ("host", "guest"))
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    report.raise_errors()
    assert report["guest"].losses == trained_by_host(host)
    assert told_by_host(guest) == told_by_host(host)
    same_weights(host.model, guest.model)
    left = files(guest)
    assert left == files(host)
    assert left
    assert guest.state.best_metric == host.state.best_metric
    best = [one.state.best_model_checkpoint for one in (host, guest)]
    assert len({path and pathlib.Path(path).name for path in best}) == 1


@pytest.mark.parametrize(
    "options",
    [
        soaked({"eval_strategy": "epoch"}),
        {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
        {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_rate_that_follows_evaluations_is_the_hosts(options, tmp_path):
    options = {"num_train_epochs": 4, "metric_for_best_model": "loss", **PLATEAU, **options}
    host, guest = (made(tmp_path / name, options) for name in ("host", "guest"))
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    report.raise_errors()
    losses = trained_by_host(host)
    if "gradient_accumulation_steps" not in options:
        assert report["guest"].losses == losses
    assert told_by_host(guest) == told_by_host(host)
    same_weights(host.model, guest.model)
    rates = [one.optimizer.param_groups[0]["lr"] for one in (host, guest)]
    assert rates[0] == rates[1] < 1e-2
    assert guest.lr_scheduler.state_dict() == host.lr_scheduler.state_dict()


@pytest.mark.parametrize("stop", thinned([3, 5, 8, 11], keep=[8]))
def test_a_training_that_goes_on_has_the_hosts_best(stop, tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "num_train_epochs": 4,
    }
    options |= {"metric_for_best_model": "loss", **BEST, **PLATEAU}

    def fail_there(result):
        if result.step == stop:
            raise RuntimeError

    def run(one, on_step=None):
        transformers.set_seed(SEED)
        folder = tmp_path / "state"
        keep = {"checkpoint": folder, "checkpoint_every": "1 steps", "resume": folder}
        return wf.run([wf.from_trainer(one, "a", on_step=on_step)], "256MiB", threads=1, **keep)

    with pytest.warns(wf.JobFailedWarning):
        run(made(tmp_path / "guest", options), fail_there)
    host, guest = (made(tmp_path / name, options) for name in ("host", "guest"))
    report = run(guest)
    report.raise_errors()
    assert report["a"].resumed_steps == stop - 1
    assert report["a"].losses == trained_by_host(host)
    same_weights(host.model, guest.model)
    assert files(guest) == files(host)


def test_a_schedule_that_nobody_follows_is_refused_by_name(tmp_path):
    one = made(tmp_path, {"eval_strategy": "no"})
    parameters = list(one.model.parameters())
    one.optimizer = torch.optim.SGD(parameters, lr=0.1)
    one.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(one.optimizer)
    with pytest.raises(wf.JobError, match="ReduceLROnPlateau without an eval_strategy"):
        wf.from_trainer(one, "mine")
