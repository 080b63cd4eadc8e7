"""Validation within epochs and in some of them only, and files of the best, as in Lightning."""

import pathlib

import pytest
import torch

import waterflow as wf
from tests.support.lightning_modules import (
    MARKS,
    SEED,
    Digits,
    same_weights,
    trained_by_host,
    trainer,
)
from tests.support.tables import soaked, thinned
from tests.waterflow.integrations.test_lightning_evaluation import (
    Drawing,
    Dropping,
    Follows,
    Shuffled,
    Streamed,
    job_of,
    made,
)

lightning = pytest.importorskip("lightning")
EarlyStopping = lightning.pytorch.callbacks.EarlyStopping
ModelCheckpoint = lightning.pytorch.callbacks.ModelCheckpoint

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:.*shuffling enabled.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
]


class Counting(Drawing):
    """Its validation logs where the training is."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("at", self.global_step + 1000.0 * self.current_epoch)


class EverySecond(Dropping):
    """Its rate follows a metric that is there in every second epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        settings = {"scheduler": plateau, "monitor": "val_loss", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": settings}


class Lenient(Dropping):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        settings = {"scheduler": plateau, "monitor": "val_loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": settings}


def positions(module, data, **options):
    """Where Lightning validates."""
    found = []

    class Noting(type(module)):
        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                found.append(self.global_step)

    module.__class__ = Noting
    return found, *trained_by_host(module, data, **options)


@pytest.mark.parametrize(
    ("kind", "data", "options"),
    [
        (Counting, Shuffled, {"val_check_interval": 0.5}),
        (Counting, Digits, {"val_check_interval": 0.3, "max_epochs": 3}),
        soaked(Counting, Shuffled, {"val_check_interval": 3}),
        (Counting, Shuffled, {"val_check_interval": 1}),
        (Counting, Shuffled, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
        soaked(Counting, Shuffled, {"val_check_interval": 9, "check_val_every_n_epoch": None}),
        (Counting, Shuffled, {"check_val_every_n_epoch": 2, "max_epochs": 5}),
        (
            Counting,
            Shuffled,
            {"check_val_every_n_epoch": 2, "max_epochs": 5, "val_check_interval": 2},
        ),
        (Counting, Shuffled, {"val_check_interval": 0.5, "limit_train_batches": 4}),
        (Counting, Shuffled, {"val_check_interval": 2, "max_epochs": None, "max_steps": 12}),
        (Dropping, Shuffled, {"val_check_interval": 4, "accumulate_grad_batches": 2}),
        (Dropping, Shuffled, {"check_val_every_n_epoch": 2, "accumulate_grad_batches": 4}),
        (Drawing, Streamed, {"val_check_interval": 2}),
        (
            Drawing,
            Streamed,
            {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3},
        ),
        (Drawing, Streamed, {"check_val_every_n_epoch": 2, "max_epochs": 4}),
        (Follows, Shuffled, {"val_check_interval": 0.5, "max_epochs": 6}),
        (EverySecond, Shuffled, {"check_val_every_n_epoch": 2, "max_epochs": 8}),
        (Lenient, Shuffled, {"check_val_every_n_epoch": 2, "max_epochs": 8}),
    ],
    ids=lambda given: getattr(given, "__name__", None) or str(given)[1:-1],
)
def test_validation_comes_where_the_hosts_does(kind, data, options):
    host, guest = made(kind), made(kind)
    report = wf.run([job_of(guest, data(), **options)], memory="64MiB", threads=1)
    report.raise_errors()
    steps, losses, found = positions(host, data(), **options)
    evaluations = report["guest"].evaluations
    assert found
    assert [each.step for each in evaluations] == steps
    assert [each.values["val_loss"] for each in evaluations] == found
    if "accumulate_grad_batches" not in options:
        assert report["guest"].losses == losses
    if kind is Counting:
        length = options.get("limit_train_batches", 7)
        assert [each.values["at"] for each in evaluations] == [
            step + 1000 * ((step - 1) // length) for step in steps
        ]
    same_weights(host, guest)


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 0.5},
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2},
    ],
    ids=str,
)
def test_early_stopping_within_epochs_is_the_hosts(options):
    def limits():
        callback = EarlyStopping("val_loss", patience=2, min_delta=0.1)
        return {"max_epochs": 30, "callbacks": [callback], **options}

    ours, theirs = limits(), limits()
    host, guest = made(Dropping), made(Dropping)
    report = wf.run([job_of(guest, Shuffled(), **ours)], memory="64MiB", threads=1)
    report.raise_errors()
    losses, found = trained_by_host(host, Shuffled(), **theirs)
    assert report["guest"].losses == losses
    assert [each.values["val_loss"] for each in report["guest"].evaluations] == found
    assert ours["callbacks"][0].state_dict() == theirs["callbacks"][0].state_dict()
    same_weights(host, guest)


class Named(Dropping):
    def __init__(self, width=24):
        super().__init__()
        self.save_hyperparameters()


def files_of(callback, folder):
    """A ModelCheckpoint's files: by name, when they were written and with what."""
    found = {}
    for path in sorted(pathlib.Path(folder).rglob("*.ckpt")):
        kept = torch.load(path, weights_only=False)
        parts = ("epoch", "global_step", "state_dict", "hyper_parameters", "hparams_name")
        found[path.name] = {part: kept.get(part) for part in parts}
    state = callback.state_dict()
    return found, {key: relative(value, folder) for key, value in state.items()}


def relative(value, folder):
    if isinstance(value, dict):
        return {relative(key, folder): each for key, each in value.items()}
    return value.replace(str(folder), "") if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"monitor": "val_loss"}, {}),
        ({"monitor": "val_loss", "mode": "max"}, {}),
        ({"monitor": "val_loss", "save_top_k": 3, "save_last": True}, {"max_epochs": 6}),
        ({"monitor": "val_loss", "save_top_k": -1, "save_last": "link"}, {"max_epochs": 3}),
        ({"monitor": "val_loss", "filename": "best-{epoch:02d}-{val_loss:.3f}"}, {}),
        ({"monitor": "val_loss", "filename": "best"}, {"max_epochs": 4}),
        ({"save_top_k": -1, "every_n_epochs": 2}, {"max_epochs": 5}),
        ({"save_last": True, "save_top_k": 0}, {}),
        ({}, {}),
        ({}, {"limit_val_batches": 0}),
        ({"monitor": "val_loss", "save_top_k": 2}, {"val_check_interval": 0.5}),
        soaked({"monitor": "val_loss", "save_top_k": -1}, {"val_check_interval": 3}),
        ({"monitor": "val_loss", "save_top_k": -1}, {"check_val_every_n_epoch": 2}),
        ({"save_top_k": -1}, {"max_epochs": None, "max_steps": 10}),
        ({"save_top_k": -1, "save_on_train_epoch_end": False}, {"max_epochs": 3}),
        ({"save_weights_only": True, "monitor": "val_loss"}, {}),
    ],
    ids=str,
)
def test_files_are_the_hosts(asked, options, tmp_path):
    def asks(folder):
        stopping = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        validates = options.get("limit_val_batches") != 0
        saving = ModelCheckpoint(dirpath=tmp_path / folder, **asked)
        callbacks = [saving, stopping] if validates else [saving]
        quiet = {"enable_checkpointing": True, "callbacks": callbacks}
        return saving, {"max_epochs": 5, **options, **quiet}

    host, guest = made(Named), made(Named)
    ours, given = asks("ours")
    report = wf.run([job_of(guest, Shuffled(), **given)], memory="64MiB", threads=1)
    report.raise_errors()
    theirs, given = asks("theirs")
    trained_by_host(host, Shuffled(), **given)
    files, state = files_of(ours, tmp_path / "ours")
    expected, hosts = files_of(theirs, tmp_path / "theirs")
    assert files.keys() == expected.keys()
    for name, kept in files.items():
        weights, others = kept.pop("state_dict"), expected[name].pop("state_dict")
        assert kept == expected[name], name
        assert all(torch.equal(weights[key], others[key]) for key in others)
    assert state == hosts
    same_weights(host, guest)
    if ours.best_model_path:
        loaded = Named.load_from_checkpoint(ours.best_model_path, weights_only=False)
        same_weights(loaded, Named.load_from_checkpoint(theirs.best_model_path, weights_only=False))


@pytest.mark.parametrize("logs", [False, True])
def test_files_without_a_folder_of_their_own_lie_where_the_host_puts_them(logs, tmp_path):
    """Under the Trainer's folder, with a logger in that of its next version."""

    def asks(folder):
        root = tmp_path / folder
        logger = lightning.pytorch.loggers.CSVLogger(root, name="logs") if logs else False
        saving = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
        quiet = {"enable_checkpointing": True, "callbacks": [saving], "logger": logger}
        return {"max_epochs": 3, "default_root_dir": root, **quiet}

    def files(folder):
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))

    jobs = [job_of(made(Named), Shuffled(), **asks("ours")) for _ in range(2)]
    jobs[1].name = "second"
    for job in jobs:
        wf.run([job], memory="64MiB", threads=1).raise_errors()
    for _ in range(2):
        trained_by_host(made(Named), Shuffled(), **asks("theirs"))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    assert len(files(tmp_path / "ours")) in (3, 6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"val_check_interval": 50}, "val_check_interval=50 of 7 batches"),
        ({"val_check_interval": "00:00:10:00"}, "val_check_interval of 600"),
    ],
    ids=str,
)
def test_validation_that_a_job_cannot_do_is_refused_by_name(options, named):
    with pytest.raises(wf.JobError, match="from_lightning cannot take over val_check") as refused:
        job_of(made(Dropping), Digits(), **options)
    assert named in str(refused.value)


@pytest.mark.parametrize("stop", thinned([4, 8, 11, 15, 20], keep=2))
def test_a_training_that_goes_on_writes_the_hosts_files(stop, tmp_path):
    def asks(folder):
        saving = ModelCheckpoint(tmp_path / folder, "{step}", monitor="val_loss", save_top_k=2)
        quiet = {"enable_checkpointing": True, "callbacks": [saving]}
        return saving, {"max_epochs": 3, "val_check_interval": 3, **quiet}

    def run(module, options, on_step=None):
        keep = {"checkpoint": tmp_path / "state", "checkpoint_every": "1 steps"}
        job = wf.from_lightning(
            module, Shuffled(), trainer(**options), name="a", seed=SEED, on_step=on_step
        )
        return wf.run([job], "64MiB", threads=1, resume=tmp_path / "state", **keep)

    def fail_there(result):
        if result.step == stop:
            raise RuntimeError

    with pytest.warns(wf.JobFailedWarning):
        run(made(Follows), asks("ours")[1], fail_there)
    host, guest = made(Follows), made(Follows)
    (ours, given), (theirs, hosts) = asks("ours"), asks("theirs")
    report = run(guest, given)
    report.raise_errors()
    losses, found = trained_by_host(host, Shuffled(), **hosts)
    assert report["a"].losses == losses
    assert [each.values["val_loss"] for each in report["a"].evaluations] == found
    # The step that failed had written its file, which is not written over.
    assert ours.best_model_score == theirs.best_model_score
    assert same_scores(ours, theirs)
    same_weights(host, guest)


def same_scores(one, other):
    def scores(callback):
        return sorted(map(float, callback.best_k_models.values()))

    return scores(one) == scores(other)
