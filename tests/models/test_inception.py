"""Inception v3 is torchvision's, by parameters, multiplications, maps and logits; it trains."""

import pytest
import torch
from case_compare import MEMORY, assert_same_numbers
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import waterflow as wf
from waterflow.models.inception import INCEPTION_V3, INCEPTION_V3_SMALL, Inception

pytestmark = pytest.mark.cpu


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def traced(task):
    """Shapes of what each part gives for two units, and a forward's multiplications per unit."""
    shapes = {}

    def note(name):
        def hook(module, inputs, output):
            shapes[name] = torch.utils._pytree.tree_map(lambda tensor: tuple(tensor.shape), output)

        return hook

    with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
        model = task.model().train()
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


def test_parameters():
    with torch.device("meta"):
        model = INCEPTION_V3.model()
        assert count(INCEPTION_V3_SMALL.model()) == INCEPTION_V3_SMALL.parameters
    assert count(model) == 27_161_264 == INCEPTION_V3.parameters
    assert count(model.auxiliary) == 3_326_696


def test_maps_and_multiplications():
    """Torchvision counts the multiplications without the auxiliary classifier."""
    shapes, multiplications = traced(INCEPTION_V3)
    stem = [(32, 149), (32, 147), (64, 147), (64, 73), (80, 73), (192, 71), (192, 35)]
    modules = [
        *((f"stem.{number}", *wanted) for number, wanted in enumerate(stem)),
        *((f"maps35.{number}", channels, 35) for number, channels in enumerate((256, 288, 288))),
        *((f"maps17.{number}", 768, 17) for number in range(5)),
        *((f"maps8.{number}", channels, 8) for number, channels in enumerate((1280, 2048, 2048))),
        ("auxiliary.pool", 768, 5),
        ("auxiliary.conv", 768, 1),
    ]
    for name, channels, side in modules:
        assert shapes[name] == (2, channels, side, side), name
    assert shapes[""] == ((2, 1000), (2, 1000))
    auxiliary = 768 * 128 * 5 * 5 + 128 * 768 * 5 * 5 + 768 * 1000
    assert round((multiplications - auxiliary) / 1e9, 3) == 5.713


@pytest.mark.parametrize("training", [False, True])
def test_logits_are_those_of_torchvision(training):
    torchvision = pytest.importorskip("torchvision")
    reference = torchvision.models.inception_v3(init_weights=False, aux_logits=True)
    mine, theirs = pair(INCEPTION_V3.model(), reference)
    assert count(mine) == count(theirs)
    images, found = torch.randn(2, 3, 299, 299), []
    for model in (mine, theirs):
        torch.manual_seed(1)  # for dropout
        with torch.no_grad():
            found.append(model.train(training)(images))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_the_auxiliary_loss_counts_in_training_only():
    torch.manual_seed(0)
    model, (images, labels) = INCEPTION_V3_SMALL.model(), INCEPTION_V3_SMALL.batch(3)
    model.dropout.p = 0.0
    logits, auxiliary = model(images)
    wanted = cross_entropy(logits, labels) + 0.4 * cross_entropy(auxiliary, labels)
    assert torch.equal(INCEPTION_V3_SMALL.loss(model, (images, labels)), wanted)
    model.eval()
    wanted = cross_entropy(model(images), labels)
    assert torch.equal(INCEPTION_V3_SMALL.loss(model, (images, labels)), wanted)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 3}, "a width of 3: .* even"),
        ({"size": 74}, "74 x 74: 75 x 75"),
        ({"depths": (3, 5, 2)}, "at most .3, 4, 2"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        Inception(**sizes)


def test_thirty_steps_lower_the_loss():
    losses = wf.run_eager(job(INCEPTION_V3_SMALL, batch=4, batches=1, epochs=30), threads=1).losses
    assert sum(losses[-3:]) < 0.2 * sum(losses[:3])


@pytest.mark.slow
def test_co_trained_as_alone():
    alone = job(INCEPTION_V3_SMALL)
    expected = wf.run_eager(alone, threads=1)
    jobs = [job(INCEPTION_V3_SMALL, name) for name in ("one", "two")]
    report = wf.run(jobs, memory=MEMORY, threads=1)
    for each in jobs:
        assert_same_numbers(alone, expected, each, report.jobs[each.name])
        assert report.jobs[each.name].captured == "captured"
