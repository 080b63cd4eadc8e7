"""A user's ordinary bugs are shown as that: their words, their line, at once, however they run."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import waterflow as wf

pytestmark = pytest.mark.cpu


def batches(count=8, width=8, classes=3):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(4, width, generator=generator),
            torch.randint(classes, (4,), generator=generator),
        )
        for _ in range(count)
    ]


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])  # in the loss


def job(model=None, *, optimizer=None, scheduler=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = (optimizer or torch.optim.SGD)(model.parameters(), 0.1)
    settings = {"loss": cross_entropy, "data": batches(), "seed": 0, **options}
    if scheduler is not None:
        settings["scheduler"] = scheduler(optimizer)
    return wf.Job("a", model=model, optimizer=optimizer, **settings)


class WrongShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(15, 3)

    def forward(self, x):
        return self.second(self.first(x))  # wrong shape


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.last = nn.Embedding(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.rows(x[:, 0].abs().long() + 7))  # outside


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.layer.register_full_backward_hook(self.hook)

    def hook(self, module, given, made):
        raise AttributeError("no such gradient")  # in a hook

    def forward(self, x):
        return self.layer(x.requires_grad_())


def wrong_key(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])  # wrong key


def wrong_type(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1].float())  # wrong type


def wrong_name(model, batch):
    return F.crossentropy(model(batch[0]), batch[1])  # wrong name


class Rows(torch.utils.data.Dataset):
    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(f"row {index} cannot be read")  # broken row
        return torch.randn(8), index % 3


def collate_until(last):
    calls = itertools.count(1)

    def collate(rows):
        if next(calls) > last:
            raise TypeError("cannot collate")  # collate
        return default_collate(rows)

    return collate


def sgd_until(last):
    class Breaking(torch.optim.SGD):
        def step(self, closure=None):
            self.made = getattr(self, "made", 0) + 1
            if self.made > last:
                raise RuntimeError("the update broke")  # optimizer
            return super().step(closure)

    return Breaking


class Breaking(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        if self.last_epoch > 3:
            raise ZeroDivisionError("no rate")  # scheduler
        return [0.1]


def callback_at(step):
    def on_step(result):
        if result.step == step:
            raise KeyError("accuracy")  # callback

    return on_step


def one_wrong(index, batch):
    found = batches()
    found[index] = batch
    return found


def loader(dataset, **options):
    return DataLoader(dataset, batch_size=4, **options)


#: What torch says of it.
WRONG_DTYPE = "target dtype" if torch.__version__ >= (2, 13) else "expected scalar type"
#: What is wrong -> the job, the error, words of its own, its line, steps before it.
BUGS = {
    "shape": (lambda: {"model": WrongShape()}, RuntimeError, "shapes cannot", "wrong shape", 0),
    "key": (
        lambda: {"loss": wrong_key, "data": [{"x": x, "y": y} for x, y in batches()]},
        *(KeyError, "'label'", "wrong key", 0),
    ),
    "type": (lambda: {"loss": wrong_type}, RuntimeError, WRONG_DTYPE, "wrong type", 0),
    "name": (lambda: {"loss": wrong_name}, AttributeError, "crossentropy", "wrong name", 0),
    "index": (lambda: {"model": Outside()}, IndexError, "out of range", "outside", 0),
    "hook": (lambda: {"model": Hooked()}, AttributeError, "no such", "in a hook", 0),
    "row": (lambda: {"data": loader(Rows(1))}, OSError, "row 1 cannot", "broken row", 0),
    "later row": (lambda: {"data": loader(Rows(22))}, OSError, "row 22", "broken row", 5),
    "collate": (
        lambda: {"data": loader(Rows(-1), collate_fn=collate_until(0))},
        *(TypeError, "cannot collate", "collate", 0),
    ),
    "later collate": (
        lambda: {"data": loader(Rows(-1), collate_fn=collate_until(3))},
        *(TypeError, "cannot collate", "collate", 3),
    ),
    "optimizer": (lambda: {"optimizer": sgd_until(0)}, RuntimeError, "broke", "optimizer", 0),
    "later update": (lambda: {"optimizer": sgd_until(4)}, RuntimeError, "broke", "optimizer", 4),
    "scheduler": (lambda: {"scheduler": Breaking}, ZeroDivisionError, "no rate", "scheduler", 3),
    "callback": (lambda: {"on_step": callback_at(1)}, KeyError, "accuracy", "callback", 1),
    "later call": (lambda: {"on_step": callback_at(6)}, KeyError, "accuracy", "callback", 6),
    "later shape": (
        lambda: {"data": one_wrong(5, (torch.ones(4, 9), torch.zeros(4, dtype=torch.long)))},
        *(RuntimeError, "shapes cannot", "in the loss", 5),
    ),
    "later label": (
        lambda: {"data": one_wrong(5, (torch.ones(4, 8), torch.full((4,), 50)))},
        *(IndexError, "Target 50", "in the loss", 5),
    ),
}


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return line


def own_line(error):
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if frame.filename == __file__][-1]


@pytest.mark.parametrize("capture", ["tiers", "auto", True, False])
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_shown_as_what_it_is(bug, capture, monkeypatch, caplog):
    monkeypatch.setenv("WATERFLOW_TIERS", "on" if capture == "tiers" else "off")
    make, kind, words, mark, steps = BUGS[bug]
    capture = "auto" if capture == "tiers" else capture
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        report = wf.run([job(capture=capture, **make())], "16MiB", threads=1)
    one = report["a"]
    assert (one.state, one.steps, report.ok) == ("failed", steps, False)
    assert type(one.exception) is kind
    assert words in one.error
    assert own_line(one.exception) == line_of(mark)
    said = [w for w in caught if w.category is wf.JobFailedWarning]
    assert len(said) == 1
    assert words in str(said[0].message)
    assert "\n" not in str(said[0].message)
    assert (said[0].filename, said[0].lineno) == (__file__, line_of(mark))
    blamed = [str(w.message) for w in caught if w.category is wf.OpaqueStepWarning]
    assert not any(words in text for text in blamed + one.notes)
    if bug in ("shape", "key", "type", "name", "index", "hook"):
        assert blamed == one.notes == []
    assert "failed while attempting" not in caplog.text
    with pytest.raises(kind):
        report.raise_errors()


def nothing(model, batch):
    F.cross_entropy(model(batch[0]), batch[1])


def number(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]).item()


def vector(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def detached(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]).detach()


@pytest.mark.parametrize("capture", ["auto", True, False])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nothing, "must be a tensor with one element, got None"),
        (number, "must be a tensor with one element, got 1."),
        (vector, r"one element, got a tensor of shape \(4,\)"),
        (detached, "does not depend on any parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_on(loss, words, capture):
    with pytest.warns(wf.JobFailedWarning, match=words):
        report = wf.run([job(loss=loss, capture=capture)], "16MiB", threads=1)
    with pytest.raises(TypeError, match=rf"{words}.*test_bugs\.py:\d+ in {loss.__name__}"):
        report.raise_errors()


def test_a_limit_of_captures_is_said_once_a_step_has_shown_it():
    def asks(model, batch):
        value = cross_entropy(model, batch)
        return 2 * value if value > 100 else value

    with pytest.warns(wf.OpaqueStepWarning, match="needs the value of a tensor"):
        report = wf.run([job(loss=asks)], "16MiB", threads=1)
    assert report["a"].captured == "opaque step"
    assert "needs the value of a tensor" in report["a"].notes[0]


def test_insisting_on_capture_still_names_what_cannot_be_captured():
    def asks(model, batch):
        value = cross_entropy(model, batch)
        return 2 * value if value > 100 else value

    one = job(loss=asks, capture=True)
    before = [parameter.clone() for parameter in one.model.parameters()]
    with pytest.warns(wf.JobFailedWarning, match="cannot be captured"):
        report = wf.run([one], "16MiB", threads=1)
    with pytest.raises(wf.CaptureError, match="needs the value of a tensor"):
        report.raise_errors()
    for parameter, value in zip(one.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


class Interrupting(Exception):
    def __str__(self):
        raise KeyboardInterrupt


def circular():
    error = ValueError("a")
    error.args = (error,)
    return error


@pytest.mark.parametrize("make", [Unspeakable, Interrupting, circular])
def test_an_error_that_cannot_say_what_it_is_ends_its_job_alone(make, tmp_path):
    def fails(step):
        if step.step == 2:
            raise make()

    other = job()
    other.name = "other"
    failing = job(on_step=fails)
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([failing, other], "64MiB", threads=1)
    assert report[failing.name].state == "failed"
    assert "its text cannot be made" in report[failing.name].error
    assert report["other"].state == "finished"
    report.save(tmp_path / "report")
    assert "its text cannot be made" in repr(report)


class DiesInAWorker(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 30:
            os._exit(3)
        return torch.ones(8), index % 3


def test_a_worker_that_dies_ends_its_job_alone():
    """Also where torch tells the main thread by a signal, as it does from the first loader with
    workers on that was read there."""
    for _ in DataLoader(list(range(4)), num_workers=1):
        pass
    other = job(data=batches(40), epochs=4)
    other.name = "other"
    dying = job(data=DataLoader(DiesInAWorker(), batch_size=4, num_workers=1), epochs=1)
    with pytest.warns(wf.JobFailedWarning):
        report = wf.run([dying, other], "64MiB", threads=1)
    assert report[dying.name].state == "failed"
    assert (report["other"].state, report["other"].steps) == ("finished", 160)


def test_workers_that_stay_are_each_jobs_own():
    """Of one iterator of a loader two jobs would take each other's batches, and wait for ever."""
    rows = list(zip(torch.randn(64, 8), torch.randint(3, (64,)), strict=True))
    loader = DataLoader(rows, 8, num_workers=1, persistent_workers=True)

    def jobs():
        made = [job(data=loader, epochs=2, seed=seed) for seed in range(2)]
        for number, each in enumerate(made):
            each.name = f"job-{number}"
        return made

    expected = [list(wf.run_eager(each, threads=1).losses) for each in jobs()]
    report = wf.run(jobs(), memory="64MiB", threads=1)
    assert [list(each.losses) for each in report] == expected


@pytest.mark.parametrize("where", ["loss", "on_step", "evaluate", "data"])
def test_an_interrupt_that_a_job_raises_itself_fails_it_alone(where):
    def interrupt(*_):
        raise KeyboardInterrupt("of its own")

    class Data:
        def __len__(self):
            return 2

        def __iter__(self):
            yield batches()[0]
            interrupt()

    wrong = job(**{where: Data() if where == "data" else interrupt}, epochs=1)
    other = job(epochs=1)
    other.name = "b"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = wf.run([wrong, other], memory="64MiB")
    assert report["b"].ok
    assert not report.ok
    assert report["a"].state == "failed"
    assert report["a"].error_type == "KeyboardInterrupt"


@pytest.mark.parametrize("folder", ["", "a\0b", "x" * 300])
def test_a_folder_of_checkpoints_that_cannot_be_is_named(folder):
    with pytest.raises(wf.CheckpointError, match="checkpoint"):
        wf.run([job()], "64MiB", checkpoint=folder)


def test_progress_draws_nothing_of_the_users():
    """rich draws from Python's stream when it is imported, so this takes a process of its own."""
    program = (
        "import random, torch, waterflow as wf\n"
        "model = torch.nn.Linear(2, 1)\n"
        "random.seed(0)\n"
        "before = random.getstate()\n"
        "wf.run([wf.Job('a', model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),\n"
        "    loss=lambda m, b: m(b).sum(), data=[torch.ones(2)], steps=1)],\n"
        "    '8MiB', progress=True)\n"
        "assert random.getstate() == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_an_engine_that_was_small_has_room_for_eager_steps_once_it_has_grown():
    wide = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 3))
    with wf.Engine("64KiB", threads=1) as engine:
        engine.resize("64MiB")
        assert engine.submit(job(wide, capture=False)).result().error is None


def test_a_budget_of_next_to_nothing_is_refused_by_name():
    with pytest.raises(wf.JobError, match="a budget of 10 B cannot be had"):
        wf.Engine(10)
