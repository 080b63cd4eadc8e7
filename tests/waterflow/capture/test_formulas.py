"""Steps for which torch's C++ would be traced by another formula than it runs."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from waterflow.capture.formulas import OtherFormulaError, as_it_runs, check_function

pytestmark = pytest.mark.cpu

ONE = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.tensor([0.2, 0.3, 0.5])


def product(multiply):
    """A loss of a batch of matrices times a batch of one."""

    def loss(model, batch):
        rows, labels = batch
        out = multiply(model(rows).unflatten(0, (-1, 2)), ONE)
        return F.cross_entropy(out.flatten(0, 1), labels)

    return loss


def penalized(penalty):
    """A loss with a penalty of the model's weights."""

    def loss(model, batch):
        rows, labels = batch
        return F.cross_entropy(model(rows) @ ONE[0], labels) + penalty(model.weight)

    return loss


def double(function):
    """The norm of a gradient that is kept for another one."""

    def penalty(weight):
        (gradient,) = torch.autograd.grad(function(weight), weight, create_graph=True)
        return gradient.square().sum()

    return penalty


def without_gradient(function):
    def penalty(weight):
        with torch.no_grad():
            scale = function(weight)
        return scale * weight.square().sum()

    return penalty


REFUSED = {
    "@": product(lambda left, right: left @ right),
    "matmul": product(torch.matmul),
    "a method": product(lambda left, right: left.matmul(right)),
    "by name": product(lambda left, right: torch.matmul(other=right, input=left)),
    "of linalg": product(torch.linalg.matmul),
    "without history": product(lambda left, right: left @ nn.Parameter(right).detach()),
    "prod": penalized(lambda weight: weight.prod()),
    "prod of a dimension": penalized(lambda weight: weight.prod(1).sum()),
    "cumprod": penalized(lambda weight: weight.cumprod(0).sum()),
    "max": penalized(lambda weight: weight.max()),
    "min": penalized(lambda weight: weight.min()),
    "median": penalized(lambda weight: weight.median()),
    "masked_fill": penalized(lambda weight: weight.masked_fill(weight > 0, weight[0, 0]).sum()),
    "max, in a gradient within": penalized(double(lambda weight: weight.square().max())),
    "a determinant": penalized(torch.linalg.det),
    "a determinant's own gradient": penalized(double(torch.linalg.det)),
    "svdvals": penalized(without_gradient(lambda weight: torch.linalg.svdvals(weight)[0])),
    "a matrix norm": penalized(without_gradient(lambda weight: torch.linalg.norm(weight, 2))),
    "a nuclear norm": penalized(without_gradient(lambda weight: torch.norm(weight, p="nuc"))),
    "eigvalsh": penalized(without_gradient(lambda w: torch.linalg.eigvalsh(w @ w.T)[-1])),
    "eigvals": penalized(without_gradient(lambda weight: torch.linalg.eigvals(weight).abs()[0])),
    "weights and smoothing": lambda model, batch: F.cross_entropy(
        model(batch[0]) @ ONE[0], batch[1], weight=WEIGHTS, label_smoothing=0.1
    ),
}

CAPTURED = {
    "a parameter as the batch of one": lambda model, batch: F.cross_entropy(
        (batch[0].unflatten(0, (-1, 2)) @ model.weight[None]).flatten(0, 1), batch[1]
    ),
    "one matrix": product(lambda left, right: left @ right[0]),
    "as many": product(lambda left, right: left @ right.expand(len(left), -1, -1)),
    "a batch of one before": penalized(
        lambda weight: (ONE.mT @ torch.stack([weight, weight.T])).square().mean()
    ),
    "max of a dimension": penalized(lambda weight: weight.amax()),
    "without a gradient": penalized(without_gradient(lambda weight: weight.max() * weight.prod())),
    "svd": penalized(without_gradient(lambda weight: torch.linalg.svd(weight)[1][0])),
    "eigh": penalized(without_gradient(lambda w: torch.linalg.eigh(w @ w.T)[0][-1])),
    "a matrix norm": penalized(lambda weight: torch.linalg.matrix_norm(weight, 2)),
}


def make_job(loss, name="a"):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(6)
    ]
    return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=data, epochs=2, seed=0)


def trained(loss):
    """How a job's steps were run, and why, with numbers that are those of the loop."""
    job, alone = make_job(loss), make_job(loss)
    expected = wf.run_eager(alone, threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wf.OpaqueStepWarning)
        report = wf.run([job], memory="16MiB", threads=1)
    assert report.ok
    assert report["a"].losses == expected.losses
    assert torch.equal(job.model.weight, alone.model.weight)
    return report["a"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_traced_by_another_formula_is_not_captured(name):
    report = trained(REFUSED[name])
    assert report.captured == "opaque step"
    assert any("by another formula than it runs" in note for note in report.notes)


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_like_it_is_captured(name):
    assert trained(CAPTURED[name]).captured == "captured"


UNCHECKED = {
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "solve": lambda matrix: torch.linalg.solve(matrix, matrix),
    "lu_factor": lambda matrix: torch.linalg.lu_factor(matrix)[0],
    "matrix_power": lambda matrix: torch.linalg.matrix_power(matrix, -1),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_where_a_check_of_values_would_be_left_out_nothing_is_captured(name):
    def penalty(weight):
        return 0.01 * UNCHECKED[name](weight @ weight.T + torch.eye(4)).square().mean()

    report = trained(penalized(penalty))
    assert report.captured == "opaque step"
    assert any("looks at values and may raise" in note for note in report.notes)


def test_a_backward_pass_through_autograd_is_looked_at():
    graph = torch.ones(3, requires_grad=True).prod()
    with pytest.raises(OtherFormulaError, match="Prod"):
        check_function(torch.autograd.backward, ([graph],), {})
    with pytest.raises(OtherFormulaError, match="Prod"):
        check_function(torch.autograd.backward, (), {"tensors": [graph]})


@pytest.mark.parametrize("classes", [4, 9])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_classes_are_marked_as_torch_does(shape, classes):
    labels = torch.arange(torch.Size(shape).numel()).view(shape) % 4
    one_hot = as_it_runs(F.one_hot, (), {})
    assert torch.equal(one_hot(labels, classes), F.one_hot(labels, classes))
    assert torch.equal(one_hot(labels + 0, num_classes=classes), F.one_hot(labels, classes))
    for wrong in (labels + classes, labels - 5) if labels.numel() else ():
        with pytest.raises(RuntimeError):
            one_hot(wrong, classes)
