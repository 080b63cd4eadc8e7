"""VGG16 is torchvision's, by parameters, multiplications, maps and logits; it trains."""

import pytest
import torch
from case_compare import MEMORY, assert_same_numbers
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import waterflow as wf
from waterflow.models.vgg import VGG16, VGG16_SMALL, Vgg16

pytestmark = pytest.mark.cpu


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


def job(task, name="alone", batch=2, batches=3, epochs=1):
    torch.manual_seed(3)
    model = task.model()
    data = [task.batch(batch) for _ in range(batches)]
    optimizer = task.optimizer(model.parameters())
    return wf.Job(
        name, model=model, optimizer=optimizer, loss=task.loss, data=data, epochs=epochs, seed=5
    )


@pytest.mark.parametrize(
    ("task", "number"), [(VGG16, 138_357_544), (VGG16_SMALL, VGG16_SMALL.parameters)]
)
def test_parameters(task, number):
    with torch.device("meta"):
        assert count(task.model()) == number == task.parameters


def test_maps_and_multiplications():
    """Table 1 of the paper, column D; the multiplications are torchvision's."""
    shapes, multiplications = traced(VGG16)
    with torch.device("meta"):
        parts = VGG16.model().features
    poolings = [i for i, part in enumerate(parts) if isinstance(part, torch.nn.MaxPool2d)]
    found = [shapes[f"features.{i}"] for i in poolings]
    assert found == [
        (2, c, s, s) for c, s in zip((64, 128, 256, 512, 512), (112, 56, 28, 14, 7), strict=True)
    ]
    convolutions = [i for i, part in enumerate(parts) if isinstance(part, torch.nn.Conv2d)]
    assert [sum(c < p for c in convolutions) for p in poolings] == [2, 4, 7, 10, 13]
    assert [shapes[f"classifier.{i}"] for i in (2, 5, 6)] == [(2, 4096), (2, 4096), (2, 1000)]
    assert round(multiplications / 1e9, 2) == 15.47


def test_logits_are_those_of_torchvision():
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):  # 138 million random numbers are enough once
        mine, theirs = VGG16.model().eval(), torchvision.models.vgg16().eval()
    assert count(mine) == count(theirs)
    torch.manual_seed(0)
    values = [
        torch.randn(each.shape) / each[0].numel() ** 0.5 for each in mine.state_dict().values()
    ]
    for model in (mine, theirs):
        model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)), assign=True)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(mine(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_signals_pass_all_layers():
    """Without batch norm the first weights must keep the scale: logits of about the same spread."""
    torch.manual_seed(0)
    model = Vgg16(classes=200, width=16, size=32, hidden=256).eval()
    with torch.no_grad():
        assert 0.3 < model(torch.randn(16, 3, 32, 32)).std() < 3


@pytest.mark.parametrize("size", [0, 33])
def test_sizes_that_cannot_be(size):
    with pytest.raises(ValueError, match=f"{size} x {size}: .* multiple of 32"):
        Vgg16(size=size)


def test_thirty_steps_lower_the_loss():
    losses = wf.run_eager(job(VGG16_SMALL, batch=4, batches=1, epochs=30), threads=1).losses
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])


def test_co_trained_as_alone():
    alone = job(VGG16_SMALL)
    expected = wf.run_eager(alone, threads=1)
    jobs = [job(VGG16_SMALL, name) for name in ("one", "two")]
    report = wf.run(jobs, memory=MEMORY, threads=1)
    for each in jobs:
        assert_same_numbers(alone, expected, each, report.jobs[each.name])
        assert report.jobs[each.name].captured == "captured"
