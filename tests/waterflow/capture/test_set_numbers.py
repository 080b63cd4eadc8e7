import functools
import math

import pytest
import torch
from torch import nn

import waterflow as wf
from waterflow.capture.set_numbers import SetNumbers
from waterflow.steps.recaptures import Recaptures, StillChangingError

STEPS = 120


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.within, self.scale, self.best = nn.Linear(16, 4), 1.0, 0.0

    def forward(self, inputs):
        return self.within(inputs) * self.scale

    def set_scale(self, value):
        self.scale = value


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Scaled()

    def forward(self, inputs):
        return self.inner(inputs)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = 1.0

    def forward(self, model, batch):
        return self.weight * loss(model, batch)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_job(callback, criterion=loss, kind=Scaled):
    torch.manual_seed(0)
    model = kind()
    data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(STEPS)]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    on_step = callback(criterion if isinstance(criterion, nn.Module) else model)
    return wf.Job("a", model, optimizer, criterion, data, steps=STEPS, on_step=on_step, seed=0)


def sets(every):
    def callback(model):
        def on_step(step):
            if step.step % every == 0:
                model.scale = 1.0 / step.step

        return on_step

    return callback


def calls_method(model):
    return lambda step: model.set_scale(1.0)


def sets_inner(model):
    def on_step(step):
        model.inner.scale = 0.5

    return on_step


def sets_weight(criterion):
    def on_step(step):
        criterion.weight = 0.5

    return on_step


def sets_best(model):
    def on_step(step):
        model.best = min(model.best, step.loss)

    return on_step


def reads(model):
    return lambda step: model.scale


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        (sets(20), {}),
        (calls_method, {}),
        (sets_inner, {"kind": Outer}),
        (sets_weight, {"criterion": Criterion()}),
    ],
)
def test_numbers_that_a_callback_sets_and_steps_read(callback, options):
    job = make_job(callback, **options)
    found = SetNumbers.of(job)
    assert found is not None
    assert found.hold()
    job.on_step(wf.StepResult("a", 20, 0, 0.0, ()))
    assert found.taken_anew().hold()


@pytest.mark.parametrize("callback", [sets_best, reads, lambda model: None, lambda model: print])
def test_what_it_only_reads_or_steps_do_not(callback):
    assert SetNumbers.of(make_job(callback)) is None


def test_a_first_capture_waits_until_they_stay():
    job = make_job(sets(20))
    recaptures = Recaptures("a", functools.partial(SetNumbers.of, job))
    with pytest.raises(StillChangingError, match="sets the attribute 'scale'") as waiting:
        recaptures.wait_for("batches", None, 40.0)
    assert waiting.value.steps == 40
    job.model.scale = 0.5
    with pytest.raises(StillChangingError) as waiting:
        recaptures.wait_for("batches", None, 40.0)
    assert waiting.value.steps == 80
    recaptures.wait_for("batches", None, 40.0)
    assert recaptures.count == 0, "the first takes the place of none"
    recaptures.wait_for("batches", None, 40.0)


@pytest.mark.parametrize("runs_to_pay", [0.0, math.inf])
def test_nothing_waits_where_eager_steps_are_no_choice(runs_to_pay):
    recaptures = Recaptures("a", functools.partial(SetNumbers.of, make_job(sets(20))))
    recaptures.wait_for("batches", None, runs_to_pay)
    with pytest.raises(StillChangingError) as waiting:
        recaptures.wait_for("batches", None, 40.0)
    assert waiting.value.steps == 40, "it has not waited before"


@pytest.mark.parametrize("every", [20, STEPS])
def test_numbers_are_the_loops(every, monkeypatch):
    monkeypatch.setenv("WATERFLOW_TIERS", "on")
    report = wf.run([make_job(sets(every))], memory="64MiB")["a"]
    assert report.losses == wf.run_eager(make_job(sets(every))).losses
