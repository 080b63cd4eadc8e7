"""ESPCN has the layers of its paper, sees small images only and puts each pixel in its place."""

import pytest
import torch
from case_compare import MEMORY, assert_same_numbers
from torch._subclasses import FakeTensorMode

import waterflow as wf
from waterflow.models.espcn import ESPCN, ESPCN_SMALL, Espcn, espcn

pytestmark = pytest.mark.cpu


def job(task, name="alone", batch=2, batches=3, epochs=1):
    torch.manual_seed(3)
    model = task.model()
    data = [task.batch(batch) for _ in range(batches)]
    optimizer = task.optimizer(model.parameters())
    return wf.Job(
        name, model=model, optimizer=optimizer, loss=task.loss, data=data, epochs=epochs, seed=5
    )


@pytest.mark.parametrize(
    ("task", "number"), [(ESPCN, 22_729), (ESPCN_SMALL, ESPCN_SMALL.parameters)]
)
def test_parameters(task, number):
    with torch.device("meta"):
        model = task.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == number == task.parameters


def test_shapes():
    shapes = []
    with FakeTensorMode():
        model, (small, large) = ESPCN.model(), ESPCN.batch(2)
        for part in (model.conv1, model.conv2, model.conv3, model.shuffle):
            part.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
        found = model(small)
        loss = ESPCN.loss(model, (small, large))
    assert small.shape == (2, 1, 85, 85)
    assert found.shape == large.shape == (2, 1, 255, 255)
    assert shapes[:4] == [(64, 85, 85), (32, 85, 85), (9, 85, 85), (1, 255, 255)]
    assert loss.shape == ()


def test_the_small_images_are_the_large_ones_made_smaller():
    small, large = ESPCN_SMALL.batch(2)
    torch.testing.assert_close(small[1, 0, 2, 3], large[1, 0, 6:9, 9:12].mean())


@pytest.mark.parametrize("upscale", [2, 3])
def test_channels_become_pixels(upscale):
    """Equation 4 of the paper, for one image channel."""
    torch.manual_seed(0)
    model, images = espcn(upscale), torch.randn(2, 1, 5, 4)
    maps = []
    model.conv3.register_forward_hook(lambda _, __, out: maps.append(out))
    large = model(images)
    for y in range(5 * upscale):
        for x in range(4 * upscale):
            channel = upscale * (y % upscale) + x % upscale
            assert torch.equal(large[:, 0, y, x], maps[0][:, channel, y // upscale, x // upscale])


def test_a_large_pixel_sees_nine_by_nine_small_ones():
    torch.manual_seed(0)
    images = torch.randn(1, 1, 15, 15, requires_grad=True)
    Espcn(3, 8)(images)[0, 0, 22, 22].backward()
    seen = images.grad[0, 0].ne(0)
    assert seen[3:12, 3:12].all()
    assert seen.sum() == 81


def test_thirty_steps_lower_the_loss():
    losses = wf.run_eager(job(ESPCN_SMALL, batch=4, batches=1, epochs=30), threads=1).losses
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])


def test_co_trained_as_alone():
    alone = job(ESPCN_SMALL)
    expected = wf.run_eager(alone, threads=1)
    jobs = [job(ESPCN_SMALL, name) for name in ("one", "two")]
    report = wf.run(jobs, memory=MEMORY, threads=1)
    for each in jobs:
        assert_same_numbers(alone, expected, each, report.jobs[each.name])
        assert report.jobs[each.name].captured == "captured"
