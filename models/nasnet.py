"""NASNet-A (Zoph et al., Learning Transferable Architectures, 2018), mobile: 4 @ 1056.

Cells of two searched kinds (figure 4) follow each other; each reads the output of the cell before
and that of the one before that. "4 @ 1056" says that each of the three stages has four normal cells
and that the last cell gives 1,056 channels.

What Zoph et al. leave open is as in the authors' released model: the two small reduction cells of
the stem, how an output of twice the height and width is fitted, and padding that gives half of an
even size. That model has no drop path in its mobile size, and neither has this one; its auxiliary
classifier, which helps in training only, is left out. A batch is images (N, 3, H, W) and their
classes (N,).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.images import classifier_task

_EPSILON = 1e-3


class Separable(nn.Module):
    """ReLU, depthwise and pointwise convolution, batch norm: all of it twice (appendix A.4).

    The first one has the stride and changes the channels.
    """

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        padding = kernel // 2 if stride == 1 else 0
        self.first = nn.Sequential(
            nn.Conv2d(channels, channels, kernel, stride, padding, groups=channels, bias=False),
            nn.Conv2d(channels, out, 1, bias=False),
            nn.BatchNorm2d(out, _EPSILON),
        )
        self.second = nn.Sequential(
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, kernel, padding=kernel // 2, groups=out, bias=False),
            nn.Conv2d(out, out, 1, bias=False),
            nn.BatchNorm2d(out, _EPSILON),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, H, W) to (N, out, H / stride, W / stride), rounded up."""
        x = F.relu(x)
        if self.stride == 2:
            x = F.pad(x, _margins(x, self.kernel))
        result: torch.Tensor = self.second(self.first(x))
        return result


def _margins(x: torch.Tensor, kernel: int) -> list[int]:
    """Zeros left, right, above and below for stride 2; an even size gets one less at its start."""
    height, width = x.shape[2:]
    far = kernel // 2
    return [far - (width % 2 == 0), far, far - (height % 2 == 0), far]


def _average(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """Mean over 3 x 3 pixels, those beyond the border left out."""
    near = _pool_margins(x, stride)
    return F.avg_pool2d(x, 3, stride, near, ceil_mode=True, count_include_pad=False)


def _largest(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Maximum over 3 x 3 pixels."""
    return F.max_pool2d(x, 3, stride, _pool_margins(x, stride), ceil_mode=True)


def _pool_margins(x: torch.Tensor, stride: int) -> list[int]:
    """The same places as those of the strided convolutions: the far margin is `ceil_mode`'s."""
    return [0 if stride == 2 and size % 2 == 0 else 1 for size in x.shape[2:]]


class Halve(nn.Module):
    """Half the height and width, without losing every second row: two shifted 1x1 kernels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, out - out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out, _EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, H, W) to (N, out, H / 2, W / 2), rounded up."""
        x = F.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))
        fitted: torch.Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))
        return fitted


def _squeeze(channels: int, out: int) -> nn.Module:
    """ReLU, 1x1 convolution, batch norm."""
    convolution = nn.Conv2d(channels, out, 1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(out, _EPSILON))


def _fit(channels: int, filters: int, halve: bool) -> nn.Module:
    """What brings the output before the last one to a cell's filters and size."""
    if halve:
        return Halve(channels, filters)
    return nn.Identity() if channels == filters else _squeeze(channels, filters)


class NormalCell(nn.Module):
    """Figure 4, left: the size stays, and 6 times `filters` channels come out.

    Args:
        channels: those of the last cell's output.
        before: those of the output before.
        filters: channels of each operation.
        halve: whether the output before has twice the height and width.
    """

    def __init__(self, channels: int, before: int, filters: int, halve: bool) -> None:
        super().__init__()
        self.channels = 6 * filters
        self.squeeze = _squeeze(channels, filters)
        self.fit = _fit(before, filters, halve)
        self.here5 = Separable(filters, filters, 5)
        self.before3 = Separable(filters, filters, 3)
        self.before5 = Separable(filters, filters, 5)
        self.before3_again = Separable(filters, filters, 3)
        self.here3 = Separable(filters, filters, 3)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, H, W) and the output before to (N, 6 * filters, H, W)."""
        x, before = self.squeeze(x), self.fit(before)
        mean = _average(before)
        blocks = [
            self.here5(x) + self.before3(before),
            self.before5(before) + self.before3_again(before),
            _average(x) + before,
            mean + mean,  # the search chose this sum of two equal operations
            self.here3(x) + x,
        ]
        return torch.cat([before, *blocks], 1)


class ReductionCell(nn.Module):
    """Figure 4, right: half the height and width, 4 times `filters` channels.

    Args:
        channels: those of the last cell's output.
        before: those of the output before; None for the first cell, which reads its one input
            twice, the second time as it is.
        filters: channels of each operation.
        halve: whether the output before has twice the height and width.
    """

    def __init__(self, channels: int, before: int | None, filters: int, halve: bool) -> None:
        super().__init__()
        self.channels = 4 * filters
        self.squeeze = _squeeze(channels, filters)
        self.fit = nn.Identity() if before is None else _fit(before, filters, halve)
        fitted = channels if before is None else filters
        self.here5 = Separable(filters, filters, 5, stride=2)
        self.before7 = Separable(fitted, filters, 7, stride=2)
        self.before7_again = Separable(fitted, filters, 7, stride=2)
        self.before5 = Separable(fitted, filters, 5, stride=2)
        self.inner3 = Separable(filters, filters, 3)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, H, W) and the output before to (N, 4 * filters, H / 2, W / 2)."""
        x, before = self.squeeze(x), self.fit(before)
        largest = _largest(x, 2)
        first = self.here5(x) + self.before7(before)
        second = largest + self.before7_again(before)
        third = _average(x, 2) + self.before5(before)
        return torch.cat([second, third, _average(first) + second, self.inner3(first) + largest], 1)


class NasNet(nn.Module):
    """NASNet-A for images (N, 3, H, W); returns logits (N, classes).

    Args:
        classes: number of classes.
        cells: normal cells in each stage.
        stages: stages of normal cells; each has twice the filters of the one before.
        filters: those of the first stage's operations, a multiple of 4; the last of three stages
            gives 24 times as many channels.
        stem: channels of the first convolution.
        dropout: chance to drop a channel before the last layer.

    Raises:
        ValueError: if `filters` is no multiple of 4, or there are no cells.
    """

    def __init__(
        self,
        classes: int = 1000,
        cells: int = 4,
        stages: int = 3,
        filters: int = 44,
        stem: int = 32,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if filters < 4 or filters % 4:
            raise ValueError(f"{filters} filters: the stem has a quarter, so use a multiple of 4")
        if cells < 1 or stages < 1:
            raise ValueError(f"{stages} stages of {cells} cells: use 1 or more of both")
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, 3, stride=2, bias=False), nn.BatchNorm2d(stem, _EPSILON)
        )
        self.cells = nn.ModuleList(_cells(cells, stages, filters, stem))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(6 * filters << stages - 1, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        x = before = self.stem(images)
        for cell in self.cells:
            x, before = cell(x, before), x
        logits: torch.Tensor = self.fc(self.dropout(F.relu(x).mean((2, 3))))
        return logits


def _cells(count: int, stages: int, filters: int, stem: int) -> list[nn.Module]:
    """Two reductions, then stages of normal cells, with a reduction between stages."""
    plan = [(True, filters // 2)]
    for stage in range(stages):
        plan += [(True, filters << stage)] * (stage > 0)
        plan += [(False, filters << stage)] * count
    first = ReductionCell(stem, None, filters // 4, halve=False)
    cells: list[nn.Module] = [first]
    channels, before, reduced = first.channels, stem, True
    for reduces, width in plan:
        kind = ReductionCell if reduces else NormalCell
        cell = kind(channels, before, width, halve=reduced)
        channels, before, reduced = cell.channels, channels, reduces
        cells.append(cell)
    return cells


def nasnet_mobile(classes: int = 1000) -> NasNet:
    """NASNet-A (4 @ 1056): 5,289,978 parameters at 1,000 classes."""
    return NasNet(classes)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD as for other image classifiers; that of Zoph et al. is RMSProp (appendix A)."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


NASNET_MOBILE = classifier_task(
    "nasnet_mobile", 5_289_978, nasnet_mobile, _sgd, size=224, classes=1000
)
NASNET_MOBILE_SMALL = classifier_task(
    "nasnet_mobile_small", 2_746, lambda: NasNet(10, 1, 1, 4, 4), _sgd, size=32, classes=10
)
