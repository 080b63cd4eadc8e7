"""ResNet-50 and ResNet-152 (He et al., Deep Residual Learning, 2015), with strided 3x3 kernels.

A batch is images (N, 3, H, W) and their classes (N,).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from waterflow.models.images import classifier_task

_EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3 (with the stride), 1x1 expand, and the shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * _EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            shortcut = nn.Conv2d(channels, out, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, H, W) to (N, 4 * width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A bottleneck ResNet for images of shape (N, 3, H, W); returns logits (N, classes)."""

    def __init__(self, depths: tuple[int, ...], classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Bottleneck(channels, width << stage, stride))
                channels = (width << stage) * _EXPANSION
        self.blocks = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.avgpool(self.blocks(x))
        logits: torch.Tensor = self.fc(torch.flatten(x, 1))
        return logits


def resnet50(classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-50: 25,557,032 parameters at 1,000 classes and full width."""
    return ResNet((3, 4, 6, 3), classes, width)


def resnet152(classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-152: 60,192,808 parameters at 1,000 classes and full width."""
    return ResNet((3, 8, 36, 3), classes, width)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of He et al., section 3.4."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


RESNET50 = classifier_task("resnet50", 25_557_032, resnet50, _sgd, size=224, classes=1000)
RESNET50_SMALL = classifier_task(
    "resnet50_small", 38_830, lambda: ResNet((1, 1, 2, 1), 10, 4), _sgd, size=32, classes=10
)
RESNET152 = classifier_task("resnet152", 60_192_808, resnet152, _sgd, size=224, classes=1000)
RESNET152_SMALL = classifier_task(
    "resnet152_small", 44_558, lambda: ResNet((1, 2, 3, 1), 10, 4), _sgd, size=32, classes=10
)
