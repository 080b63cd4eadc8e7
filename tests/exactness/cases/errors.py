"""Cases: the step meets an error, and its own Python goes on."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from tests.exactness.case import batches, case, job, mlp

#: The batches whose last label is none.
WRONG = (6, 7)


def labelled(live):
    """Batches, some of them with a label that there is no class for."""
    made = []
    for number, (inputs, labels) in enumerate(batches(), 1):
        given = labels.clone()
        given[-1] += 4 * (live and number in WRONG)
        made.append((inputs, given))
    return made


@case("opaque")
def errors_of_one_kind(live):
    def loss(model, batch):
        found = model(batch[0])
        try:
            return F.cross_entropy(found, batch[1])
        except (KeyError, IndexError):
            return found.square().mean()

    return job(mlp(), loss, data=labelled(live))


@case("opaque")
def errors_of_any_kind(live):
    def loss(model, batch):
        found = model(batch[0])
        try:
            return F.cross_entropy(found, batch[1])
        except:  # noqa: E722
            return found.square().mean()

    return job(mlp(), loss, data=labelled(live))


@case("opaque")
def errors_that_a_context_suppresses(live):
    def loss(model, batch):
        found = model(batch[0])
        value = found.square().mean()
        with contextlib.suppress(IndexError):
            value = F.cross_entropy(found, batch[1])
        return value

    return job(mlp(), loss, data=labelled(live))


@case("opaque")
def errors_in_a_function_that_a_model_calls(live):
    class Model(torch.nn.Sequential):
        def forward(self, x):
            try:
                found = torch.linalg.cholesky(x[:4, :4] @ x[:4, :4].T - x[0, 0] * torch.eye(4))
            except RuntimeError:
                found = torch.zeros(4, 4)
            return super().forward(x) + found.sum()

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]) * torch.arange(4.0), batch[1])

    data = batches()
    if live:
        data = [(x * (1 if number % 2 else 0.01), y) for number, (x, y) in enumerate(data)]
    return job(Model(*mlp()), loss, data=data)


@case("captured", matters=False)
def errors_that_no_operator_raises(live):
    def loss(model, batch):
        try:
            weight = {"weight": 1.0}["wait"]
        except KeyError:
            weight = 2.0
        return F.cross_entropy(model(batch[0]), batch[1]) * weight

    return job(mlp(), loss)
