"""Inception v3 (Szegedy et al., Rethinking the Inception Architecture, 2015), 299 x 299 images.

The factorized modules are those of figures 5 (35 x 35), 6 (17 x 17, with n = 7), 7 (8 x 8) and 10
(the reductions between them). The stem and the channels are those of the authors' released model;
table 1 of Szegedy et al. gives a stem that differs in three layers and leaves channels open. The
auxiliary classifier of section 4 sits on the last 17 x 17 map. A batch is images (N, 3, H, W) and
their classes (N,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.images import Batch, classifier_task

Kernel = int | tuple[int, int]

_AUXILIARY_WEIGHT = 0.4
_DEPTHS = (3, 4, 2)


class Conv(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self, channels: int, out: int, kernel: Kernel, stride: int = 1, padding: Kernel = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, H, W) to (N, out, H', W')."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Parallel(nn.Module):
    """Branches over one input, concatenated; `channels` is the sum of theirs."""

    def __init__(self, channels: int, *branches: nn.Module) -> None:
        super().__init__()
        self.channels = channels
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, C, H, W) to (N, channels, H', W')."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _wide(channels: int, out: int, size: int) -> Conv:
    """A kernel of height 1 that keeps the map's size."""
    return Conv(channels, out, (1, size), padding=(0, size // 2))


def _tall(channels: int, out: int, size: int) -> Conv:
    """A kernel of width 1 that keeps the map's size."""
    return Conv(channels, out, (size, 1), padding=(size // 2, 0))


def _pooled(channels: int, out: int) -> nn.Sequential:
    """A mean over 3 x 3, zeros beyond the border included, and a projection."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(channels, out, 1))


def _mixed35(channels: int, width: int, pooled: int) -> Parallel:
    """Figure 5: a 5x5 branch and one of two 3x3 in its place, on the 35 x 35 map."""
    c48, c64, c96 = width * 3 // 2, width * 2, width * 3
    return Parallel(
        width * 7 + pooled,
        Conv(channels, c64, 1),
        nn.Sequential(Conv(channels, c48, 1), Conv(c48, c64, 5, padding=2)),
        nn.Sequential(
            Conv(channels, c64, 1), Conv(c64, c96, 3, padding=1), Conv(c96, c96, 3, padding=1)
        ),
        _pooled(channels, pooled),
    )


def _reduced17(channels: int, width: int) -> Parallel:
    """Figure 10: convolutions and pooling of stride 2 side by side, 35 x 35 to 17 x 17."""
    c64, c96, c384 = width * 2, width * 3, width * 12
    return Parallel(
        channels + width * 15,
        Conv(channels, c384, 3, stride=2),
        nn.Sequential(
            Conv(channels, c64, 1), Conv(c64, c96, 3, padding=1), Conv(c96, c96, 3, stride=2)
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _mixed17(channels: int, width: int, inner: int) -> Parallel:
    """Figure 6: 7x7 kernels as 1x7 and 7x1, on the 17 x 17 map."""
    out = width * 6
    return Parallel(
        width * 24,
        Conv(channels, out, 1),
        nn.Sequential(Conv(channels, inner, 1), _wide(inner, inner, 7), _tall(inner, out, 7)),
        nn.Sequential(
            Conv(channels, inner, 1),
            _tall(inner, inner, 7),
            _wide(inner, inner, 7),
            _tall(inner, inner, 7),
            _wide(inner, out, 7),
        ),
        _pooled(channels, out),
    )


def _reduced8(channels: int, width: int) -> Parallel:
    """The second reduction, 17 x 17 to 8 x 8, one branch with a 7x7 kernel in two."""
    c192, c320 = width * 6, width * 10
    return Parallel(
        channels + width * 16,
        nn.Sequential(Conv(channels, c192, 1), Conv(c192, c320, 3, stride=2)),
        nn.Sequential(
            Conv(channels, c192, 1),
            _wide(c192, c192, 7),
            _tall(c192, c192, 7),
            Conv(c192, c192, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _mixed8(channels: int, width: int) -> Parallel:
    """Figure 7: branches that end in 1x3 and 3x1 side by side, on the 8 x 8 map."""
    c192, c320, c384, c448 = width * 6, width * 10, width * 12, width * 14
    return Parallel(
        width * 64,
        Conv(channels, c320, 1),
        nn.Sequential(
            Conv(channels, c384, 1),
            Parallel(width * 24, _wide(c384, c384, 3), _tall(c384, c384, 3)),
        ),
        nn.Sequential(
            Conv(channels, c448, 1),
            Conv(c448, c384, 3, padding=1),
            Parallel(width * 24, _wide(c384, c384, 3), _tall(c384, c384, 3)),
        ),
        _pooled(channels, c192),
    )


class Auxiliary(nn.Module):
    """The classifier beside the trunk that helps in training only.

    Pooling takes a 17 x 17 map to 5 x 5, and a 5x5 kernel that to one place. On maps too small for
    that, of images for tests, both kernels are as large as their map.
    """

    def __init__(self, channels: int, width: int, classes: int, side: int) -> None:
        super().__init__()
        pooled = min(5, side)
        kernel = min(5, (side - pooled) // 3 + 1)
        self.pool = nn.AvgPool2d(pooled, stride=3)
        self.reduce = Conv(channels, width * 4, 1)
        self.conv = Conv(width * 4, width * 24, kernel)
        self.fc = nn.Linear(width * 24, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, side, side) to logits (N, classes)."""
        x = self.conv(self.reduce(self.pool(x)))
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


class Inception(nn.Module):
    """Inception v3 for images (N, 3, size, size); returns logits (N, classes).

    In training it returns two such logits, the trunk's and the auxiliary classifier's. Batch norm
    then needs two images or more.

    Args:
        classes: number of classes.
        width: channels of the first convolution, even; all others are multiples of its half.
        size: height and width of the images.
        depths: modules on the 35 x 35, 17 x 17 and 8 x 8 maps, from 1 to 3, 4 and 2.
        dropout: chance to drop a channel before the last layer.

    Raises:
        ValueError: if `width` is odd, `size` below 75 or one of `depths` out of range.
    """

    def __init__(
        self,
        classes: int = 1000,
        width: int = 32,
        size: int = 299,
        depths: tuple[int, int, int] = _DEPTHS,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"a width of {width}: some layers have half of it, so use an even one")
        if not all(0 < depth <= most for depth, most in zip(depths, _DEPTHS, strict=True)):
            raise ValueError(f"depths {depths}: use 1 or more, and at most {_DEPTHS}")
        c64, c80, c192 = width * 2, width * 5 // 2, width * 6
        self.stem = nn.Sequential(
            Conv(3, width, 3, stride=2),
            Conv(width, width, 3),
            Conv(width, c64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            Conv(c64, c80, 1),
            Conv(c80, c192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        maps35 = [partial(_mixed35, pooled=pooled) for pooled in (width, c64, c64)]
        maps17 = [partial(_mixed17, inner=width * times) for times in (4, 5, 5, 6)]
        channels, self.maps35 = _chain(c192, width, maps35[: depths[0]])
        channels, self.maps17 = _chain(channels, width, [_reduced17, *maps17[: depths[1]]])
        self.auxiliary = Auxiliary(channels, width, classes, _side_of_maps17(size))
        channels, self.maps8 = _chain(channels, width, [_reduced8, *[_mixed8] * depths[2]])
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits of a batch of images; in training with the auxiliary ones."""
        shared = self.maps17(self.maps35(self.stem(images)))
        x = self.maps8(shared).mean((2, 3))
        logits: torch.Tensor = self.fc(self.dropout(x))
        return (logits, self.auxiliary(shared)) if self.training else logits


def _chain(
    channels: int, width: int, makers: Iterable[Callable[[int, int], Parallel]]
) -> tuple[int, nn.Sequential]:
    """Modules one after the other, and the channels of the last one."""
    modules = []
    for make in makers:
        modules.append(make(channels, width))
        channels = modules[-1].channels
    return channels, nn.Sequential(*modules)


def _side_of_maps17(size: int) -> int:
    """Height and width, 17 for 299, behind four layers of stride 2 and others without padding."""
    side = size
    for without_padding in (2, 2, 0, 0):
        side = (side - 1) // 2 - without_padding
    if side < 3:
        raise ValueError(f"images of {size} x {size}: 75 x 75 are the least that leave a map")
    return side


def inception_v3(classes: int = 1000) -> Inception:
    """Inception v3: 27,161,264 parameters at 1,000 classes, 3,326,696 of them auxiliary."""
    return Inception(classes)


def _one_of_each() -> Inception:
    """For tests: narrow, for the smallest images, every kind of module once."""
    return Inception(10, width=2, size=75, depths=(1, 1, 1))


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy; while the model trains, 0.4 times that of the auxiliary logits besides."""
    images, labels = batch
    found = model(images)
    if isinstance(found, torch.Tensor):
        return F.cross_entropy(found, labels)
    logits, auxiliary = found
    main = F.cross_entropy(logits, labels)
    return main + _AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD as for other image classifiers; that of Szegedy et al. is RMSProp (section 8)."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


INCEPTION_V3 = classifier_task(
    "inception_v3", 27_161_264, inception_v3, _sgd, size=299, classes=1000, loss=_loss
)
INCEPTION_V3_SMALL = classifier_task(
    "inception_v3_small", 40_666, _one_of_each, _sgd, size=75, classes=10, loss=_loss
)
