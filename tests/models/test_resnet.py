"""The ResNets are torchvision's, by parameters, multiplications, maps and logits; they train."""

import pytest
import torch
from case_compare import MEMORY, assert_same_numbers
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import waterflow as wf
from waterflow.models.resnet import (
    RESNET50,
    RESNET50_SMALL,
    RESNET152,
    RESNET152_SMALL,
    resnet50,
)

pytestmark = pytest.mark.cpu

SMALL = [RESNET50_SMALL, RESNET152_SMALL]


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def traced(task):
    """Shapes of what each part gives for two units, and a forward's multiplications per unit."""
    shapes = {}

    def note(name):
        def hook(module, inputs, output):
            shapes[name] = tuple(output.shape)

        return hook

    with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
        model = task.model().eval()
        for name, part in model.named_modules():
            part.register_forward_hook(note(name))
        model(task.batch(2)[0])
    return shapes, counter.get_total_flops() / 2 / 2


def pair(mine, theirs):
    """Both models with equal, random contents; batch norms whose statistics matter, too."""
    torch.manual_seed(0)
    for part in theirs.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.1)
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    values = theirs.state_dict().values()
    mine.load_state_dict(dict(zip(mine.state_dict(), values, strict=True)))
    return mine, theirs


def job(task, name="alone", batch=2, batches=3, epochs=1):
    torch.manual_seed(3)
    model = task.model()
    data = [task.batch(batch) for _ in range(batches)]
    optimizer = task.optimizer(model.parameters())
    return wf.Job(
        name, model=model, optimizer=optimizer, loss=task.loss, data=data, epochs=epochs, seed=5
    )


@pytest.mark.parametrize(
    ("task", "number"),
    [(RESNET50, 25_557_032), (RESNET152, 60_192_808), *((task, task.parameters) for task in SMALL)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameters(task, number):
    with torch.device("meta"):
        assert count(task.model()) == number == task.parameters


@pytest.mark.parametrize(
    ("task", "depths", "billions"),
    [(RESNET50, (3, 4, 6, 3), 4.089), (RESNET152, (3, 8, 36, 3), 11.514)],
)
def test_maps_and_multiplications(task, depths, billions):
    """Table 1 of the paper; the multiplications are torchvision's."""
    shapes, multiplications = traced(task)
    blocks = [
        shape for name, shape in shapes.items() if name.startswith("blocks.") and name[7:].isdigit()
    ]
    wanted = []
    for stage, depth in enumerate(depths):
        wanted += [(2, 256 << stage, 56 >> stage, 56 >> stage)] * depth
    assert shapes["maxpool"] == (2, 64, 56, 56)
    assert blocks == wanted
    assert shapes[""] == (2, 1000)
    assert round(multiplications / 1e9, 3) == billions


@pytest.mark.parametrize(("task", "name"), [(RESNET50, "resnet50"), (RESNET152, "resnet152")])
def test_logits_are_those_of_torchvision(task, name):
    torchvision = pytest.importorskip("torchvision")
    mine, theirs = pair(task.model().eval(), getattr(torchvision.models, name)().eval())
    assert count(mine) == count(theirs)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(mine(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_width_and_classes():
    assert resnet50(classes=7, width=4)(torch.randn(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_thirty_steps_lower_the_loss(task):
    losses = wf.run_eager(job(task, batch=4, batches=1, epochs=30), threads=1).losses
    assert sum(losses[-3:]) < 0.2 * sum(losses[:3])


@pytest.mark.parametrize(
    "task", [RESNET50_SMALL, pytest.param(RESNET152_SMALL, marks=pytest.mark.slow)]
)
def test_co_trained_as_alone(task):
    alone = job(task)
    expected = wf.run_eager(alone, threads=1)
    jobs = [job(task, name) for name in ("one", "two")]
    report = wf.run(jobs, memory=MEMORY, threads=1)
    for each in jobs:
        assert_same_numbers(alone, expected, each, report.jobs[each.name])
        assert report.jobs[each.name].captured == "captured"
