"""ESPCN (Shi et al., 2016): super resolution whose last layer arranges channels as pixels.

All convolutions see the small image (section 3), its luminance alone. A batch is small images
(N, 1, H, W) and the large ones to be found (N, 1, r H, r W), values from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Batch = tuple[torch.Tensor, torch.Tensor]


class Espcn(nn.Module):
    """5x5 and 3x3 convolutions with tanh, and a sub-pixel convolution (Shi et al., section 3.2).

    Args:
        upscale: the factor r between the images' sizes.
        width: channels of the first layer; the second has half as many.
        channels: those of the images.
    """

    def __init__(self, upscale: int = 3, width: int = 64, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 5, padding=2)
        self.conv2 = nn.Conv2d(width, width // 2, 3, padding=1)
        self.conv3 = nn.Conv2d(width // 2, channels * upscale**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upscale)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps (N, channels, H, W) to (N, channels, r H, r W)."""
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(images))))
        large: torch.Tensor = self.shuffle(self.conv3(x))
        return large


def espcn(upscale: int = 3, width: int = 64) -> Espcn:
    """ESPCN: 22,729 parameters at three times the size and full width."""
    return Espcn(upscale, width)


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    small, large = batch
    return F.mse_loss(model(small), large)


def _images(count: int, size: int, upscale: int) -> Batch:
    large = torch.rand(count, 1, size * upscale, size * upscale)
    return F.avg_pool2d(large, upscale), large


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _task(
    name: str, parameters: int, model: Callable[[], Espcn], size: int, upscale: int = 3
) -> Task:
    return Task(
        name=name,
        unit="images",
        parameters=parameters,
        model=model,
        loss=_loss,
        batch=lambda count: _images(count, size, upscale),
        optimizer=_adam,
    )


#: Small images of 85 x 85 for large ones of 255 x 255, a common crop of photographs.
ESPCN = _task("espcn", 22_729, espcn, 85)
ESPCN_SMALL = _task("espcn_small", 833, lambda: espcn(3, 8), 9)
