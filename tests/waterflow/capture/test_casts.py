"""Which jobs may empty torch's cache of casts under each other, by their code."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import waterflow as wf
from tests.support import libraries
from waterflow.capture import casts
from waterflow.capture.casts import Casts, casts_of

NOTHING, CLEARS, USES = Casts(False, False), Casts(True, False), Casts(True, True)
BFLOAT16 = torch.bfloat16


def plain(model, batch):
    return model(batch).sum()


def inside(model, batch):
    with torch.autocast("cpu", dtype=BFLOAT16):
        return model(batch).sum()


@torch.autocast("cpu", dtype=BFLOAT16)
def decorated(model, batch):
    return model(batch).sum()


def recomputed(model, batch):
    return checkpoint.checkpoint(model, batch, use_reentrant=False).sum()


def parametrized(model, batch):
    with nn.utils.parametrize.cached():
        return model(batch).sum()


def switched(model, batch):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return model(batch).sum()


def renamed(again=checkpoint.checkpoint):
    return lambda model, batch: again(model, batch, use_reentrant=False).sum()


class Halved(nn.Linear):
    def forward(self, rows):
        with torch.autocast("cpu", dtype=BFLOAT16):
            return super().forward(rows)


def job(loss=plain, model=nn.Linear, **options):
    model = model(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return wf.Job("a", model=model, optimizer=optimizer, loss=loss, data=[], **options)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (functools.partial(job), NOTHING),
        (functools.partial(job, inside), USES),
        (functools.partial(job, decorated), USES),
        (functools.partial(job, functools.partial(inside)), USES),
        (functools.partial(job, lambda model, batch: inside(model, batch)), USES),
        (functools.partial(job, model=Halved), USES),
        (functools.partial(job, autocast=BFLOAT16), USES),
        (functools.partial(job, evaluate=lambda model: inside(model, torch.ones(4))), USES),
        (functools.partial(job, recomputed), CLEARS),
        (functools.partial(job, renamed()), CLEARS),
        (functools.partial(job, parametrized), USES),
        (functools.partial(job, switched), Casts(False, False, True)),
    ],
)
def test_what_a_job_does_is_found_by_its_code(made, expected):
    assert casts_of(made()) == expected


def test_a_library_that_switches_autocast_off_uses_no_cache(monkeypatch):
    monkeypatch.setattr("waterflow.capture.casts.is_library_file", lambda file: True)

    def loss(model, batch):
        with torch.autocast("cpu", enabled=False):
            return model(batch).sum()

    assert casts_of(job(loss)) == CLEARS


def in_bfloat16(model, batch):
    with torch.autocast("cpu", dtype=BFLOAT16):
        return libraries.classified(model, batch)


@pytest.mark.parametrize(
    ("loss", "expected"), [(libraries.classified, CLEARS), (in_bfloat16, USES)]
)
def test_of_a_library_that_is_too_large_to_look_through_the_own_code_counts(loss, expected):
    for _ in range(2):  # the second time it is known
        assert casts_of(libraries.bert_job(loss=loss)) == expected
    assert casts._TOO_LARGE


@pytest.mark.parametrize(("bf16", "expected"), [(False, CLEARS), (True, USES)])
def test_of_a_trainer_its_precision_counts(bf16, expected, tmp_path):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, bf16=bf16)
    trainer = Trainer(libraries.bert(), arguments, train_dataset=libraries.samples())
    assert casts_of(wf.from_trainer(trainer, "a")) == expected


def test_only_who_has_casts_is_disturbed():
    assert USES.disturb(USES)
    assert USES.disturb(CLEARS)
    assert CLEARS.disturb(USES)
    assert not CLEARS.disturb(CLEARS)
    assert not USES.disturb(NOTHING)
    assert not NOTHING.disturb(NOTHING)
    assert NOTHING.disturb(Casts(False, False, True))


def test_autocast_that_a_callback_switches_on_counts():
    one = job()
    assert casts_of(one) == NOTHING
    one.autocast = BFLOAT16
    assert casts_of(one) == USES


def with_context(context):
    def loss(model, batch):
        with context[0]:
            return model(batch).sum()

    return loss


def calls(model, batch, loss=plain):
    return loss(model, batch)


def calls_inside():
    return lambda model, batch, loss=inside: loss(model, batch)


def hooked(model):
    model.register_forward_pre_hook(
        lambda module, rows: inside(torch.neg, rows[0]) if module is None else None
    )
    return model


def put_in_place(model):
    model.forward = functools.partial(inside, torch.neg)
    return model


class Calls:
    """A loss that keeps what it calls."""

    def __init__(self, loss):
        self.loss = loss

    def __call__(self, model, batch):
        return self.loss(model, batch)

    def method(self, model, batch):
        return self.loss(model, batch)


def held_by_a_tensor(model):
    hook = inside if model is None else torch.neg
    model.weight.register_hook(lambda grad: inside(hook, grad) if grad is None else grad)
    return model


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: job(Calls(plain)), lambda: job(Calls(inside))),
        (lambda: job(Calls(plain).method), lambda: job(Calls(inside).method)),
        (job, lambda: job(model=lambda *size: held_by_a_tensor(nn.Linear(*size)))),
        (
            lambda: job(with_context([torch.no_grad()])),
            lambda: job(with_context([torch.autocast("cpu", dtype=BFLOAT16)])),
        ),
        (
            lambda: job(functools.partial(calls, loss=plain)),
            lambda: job(functools.partial(calls, loss=inside)),
        ),
        (job, lambda: job(model=lambda *size: hooked(nn.Linear(*size)))),
        (job, lambda: job(model=lambda *size: put_in_place(nn.Linear(*size)))),
    ],
)
def test_what_was_found_for_one_job_is_no_answer_for_another_kind(first, second):
    assert casts_of(first()) == NOTHING
    assert casts_of(second()) == USES


def test_a_default_makes_another_kind():
    one, other = calls_inside(), calls_inside()
    one.__defaults__ = (plain,)
    assert casts_of(job(one)) == NOTHING
    assert casts_of(job(other)) == USES


def test_a_model_that_lists_no_modules_is_looked_at_all_the_same():
    class Hidden(nn.Linear):
        is_hidden = False

        def modules(self):
            if self.is_hidden:
                raise RuntimeError("no modules")
            return super().modules()

    model = Hidden(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = wf.Job("a", model=model, optimizer=optimizer, loss=plain, data=[torch.ones(1, 2)])
    model.is_hidden = True
    assert casts_of(job) == NOTHING
