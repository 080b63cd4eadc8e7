"""VGG16 (Simonyan and Zisserman, 2014: configuration D), with dropout.

A batch is images (N, 3, H, W) and their classes (N,).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from waterflow.models.images import classifier_task

#: 3x3 convolutions before each of the five poolings, and their channels in units of the width.
_STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


class Vgg16(nn.Module):
    """VGG16 for images (N, 3, size, size); returns logits (N, classes).

    Args:
        classes: number of classes.
        width: channels of the first convolution; the others are multiples of it.
        size: height and width of the images, a multiple of 32.
        hidden: width of the two hidden linear layers.
        dropout: chance to drop a hidden unit.

    Raises:
        ValueError: if `size` is no multiple of 32.
    """

    def __init__(
        self,
        classes: int = 1000,
        width: int = 64,
        size: int = 224,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if size < 32 or size % 32:
            raise ValueError(f"images of {size} x {size}: five poolings need a multiple of 32")
        self.features = nn.Sequential(*_features(width))
        self.classifier = nn.Sequential(
            nn.Linear(width * 8 * (size // 32) ** 2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        self.apply(_initialise)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _features(width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for depth, factor in _STAGES:
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width * factor, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width * factor
        layers.append(nn.MaxPool2d(2))
    return layers


def _initialise(module: nn.Module) -> None:
    """He et al. (2015): without batch norm, 16 layers of torch's usual weights pass nothing on."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # both are made with one


def vgg16(classes: int = 1000, width: int = 64, size: int = 224, hidden: int = 4096) -> Vgg16:
    """VGG16: 138,357,544 parameters at 1,000 classes and full width and size."""
    return Vgg16(classes, width, size, hidden)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Simonyan and Zisserman, section 3.1; without batch norm a rate of 0.1 diverges."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)


VGG16 = classifier_task("vgg16", 138_357_544, vgg16, _sgd, size=224, classes=1000)
VGG16_SMALL = classifier_task(
    "vgg16_small", 60_270, lambda: vgg16(10, 4, 32, 32), _sgd, size=32, classes=10
)
