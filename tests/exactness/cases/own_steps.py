"""Cases: steps of the user's own, metrics, accumulated gradients, autocast, clipping, teachers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.case import KEPT, Subject, at, batches, case, cross_entropy, job, mlp, sgd
from tests.support.loops import TRAININGS

# -- whole trainings; tests/exactness/test_loops.py compares them with loops that are written out


def entered(name):
    def make(live):
        import waterflow as wf

        training = TRAININGS[name]()
        return Subject(wf.Job("case", seed=5, **training.job), training.tensors)

    make.__name__ = f"training_{name}"
    expected = {True: KEPT, False: ("opaque",), None: (*KEPT, "opaque")}
    case(*expected[TRAININGS[name]().captured], matters=False)(make)


for _name in TRAININGS:
    entered(_name)


# -- what a step is, changed between two steps


def ruled(name, field, value, **options):
    """Enters a case in which a callback changes a field of the job."""

    def make(live):
        made = job(mlp(), **options)
        made.on_step = at(4, live, lambda: setattr(made, field, value))
        return made

    make.__name__ = name
    case(*KEPT)(make)


ruled("clipping_by_value_begun", "clip_grad_value", 1e-3)
ruled("clipping_by_value_ended", "clip_grad_value", None, clip_grad_value=1e-3)
ruled("autocast_begun", "autocast", torch.bfloat16)
ruled("autocast_ended", "autocast", None, autocast=torch.bfloat16)
ruled("accumulation_of_the_next_epoch", "accumulate", 2, steps=12)
ruled("accumulation_ended", "accumulate", 1, accumulate=2, steps=12)


# -- metrics


@case(*KEPT)
def metric_by_a_name_that_changes(live):
    model = mlp()
    model.told = "first"

    def loss(model, batch):
        made = model(batch[0])
        return F.cross_entropy(made, batch[1]) * len(model.told), {model.told: made.max()}

    change = at(4, live, lambda: setattr(model, "told", "later on"))
    return job(model, loss=loss, on_step=change)


@case("opaque", *KEPT)
def metric_that_counts_in_python(live):
    counts = []

    def loss(model, batch):
        counts.append(None)
        value = cross_entropy(model, batch)
        return value * (len(counts) if live else 1), {"steps": len(counts)}

    return job(mlp(), loss=loss)


@case("opaque", *KEPT)
def metric_read_by_item(live):
    def loss(model, batch):
        made = model(batch[0])
        value = F.cross_entropy(made, batch[1])
        return value * (2 if live else 1), {"most": made.max().item()}

    return job(mlp(), loss=loss)


@case(*KEPT)
def metric_that_draws(live):
    def loss(model, batch):
        made = model(batch[0])
        told = torch.randn(()) if live else torch.zeros(())
        return F.cross_entropy(made, batch[1]), {"noise": told}

    return job(mlp(0.2), loss=loss)


@case(*KEPT)
def metric_of_the_weights(live):
    """They are read before the update, or it would be another number."""

    def loss(model, batch):
        value = cross_entropy(model, batch)
        return value * (2 if live else 1), {"norm": model[0].weight.norm()}

    return job(mlp(), loss=loss)


# -- teachers and losses with a state of their own


def taught(change):
    def make(live):
        student, teacher = mlp(), mlp(0.3)

        def loss(model, batch):
            with torch.no_grad():
                target = teacher(batch[0]).softmax(1)
            return F.cross_entropy(model(batch[0]), target)

        def alter():
            change(teacher)

        return job(student, loss=loss, on_step=at(4, live, alter))

    make.__name__ = f"teacher_{change.__name__}"
    case(*KEPT)(make)


def stops_to_draw(teacher):
    teacher.eval()


def changes_its_weights(teacher):
    with torch.no_grad():
        teacher[0].weight.mul_(2)


def gets_other_weights(teacher):
    teacher[0].weight = nn.Parameter(torch.ones_like(teacher[0].weight))


for _change in (stops_to_draw, changes_its_weights, gets_other_weights):
    taught(_change)


@case("opaque", *KEPT)
def loss_whose_own_parameters_freeze(live):
    model, criterion = mlp(), nn.Linear(4, 4)

    def loss(model, batch):
        return F.cross_entropy(criterion(model(batch[0])), batch[1])

    def freeze():
        criterion.requires_grad_(False)

    optimizer = sgd(nn.ModuleList([model, criterion]))
    options = {"modules": criterion, "optimizer": optimizer, "on_step": at(4, live, freeze)}
    return Subject(job(model, loss=loss, **options), lambda: criterion.state_dict())


@case("opaque")
def own_step_that_reads_its_gradients(live):
    """Those of the step before are there, as in the loop."""
    model = mlp()
    optimizer = sgd(model)

    def step(batch):
        former = model[0].weight.grad
        scale = 1.0 if former is None or not live else 1 / (1 + float(former.norm()))
        optimizer.zero_grad()
        value = cross_entropy(model, batch) * scale
        value.backward()
        optimizer.step()
        return value

    return job(model, loss=None, step=step, optimizer=optimizer, data=batches())
