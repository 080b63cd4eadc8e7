"""ESPCN has the layers of its paper, sees small images only and puts each pixel in its place."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from waterflow.models.espcn import ESPCN, ESPCN_SMALL, Espcn, espcn

pytestmark = pytest.mark.cpu


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
    """Equation 4 of Shi et al., for one image channel."""
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
