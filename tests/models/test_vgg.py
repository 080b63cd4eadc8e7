"""VGG16 is torchvision's, by parameters, multiplications, maps and logits."""

import pytest
import torch

from tests.support.vision import count, traced
from waterflow.models.vgg import VGG16, Vgg16

pytestmark = pytest.mark.cpu


def test_maps_and_multiplications():
    """Table 1 of Simonyan and Zisserman, column D; the multiplications are torchvision's."""
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
