"""The ResNets are torchvision's, by parameters, multiplications, maps and logits."""

import pytest
import torch

from tests.support.vision import count, pair, traced
from waterflow.models.resnet import RESNET50, RESNET152, resnet50

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("task", "depths", "billions"),
    [(RESNET50, (3, 4, 6, 3), 4.089), (RESNET152, (3, 8, 36, 3), 11.514)],
)
def test_maps_and_multiplications(task, depths, billions):
    """Table 1 of He et al.; the multiplications are torchvision's."""
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
