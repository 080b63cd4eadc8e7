"""Inception v3 is torchvision's, by parameters, multiplications, maps and logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.vision import count, pair, traced
from waterflow.models.inception import INCEPTION_V3, INCEPTION_V3_SMALL, Inception

pytestmark = pytest.mark.cpu


def test_parameters_of_the_auxiliary_classifier():
    with torch.device("meta"):
        assert count(INCEPTION_V3.model().auxiliary) == 3_326_696


def test_maps_and_multiplications():
    """Torchvision counts the multiplications without the auxiliary classifier."""
    shapes, multiplications = traced(INCEPTION_V3, training=True)
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
