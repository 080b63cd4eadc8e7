"""A variational autoencoder (Kingma and Welling, 2013) out of linear layers, for 28 x 28 images.

Encoder and decoder have one hidden layer each (appendix C), of 400 units, and the code 20. A batch
is one tensor of images (N, 1, H, W) whose pixels are 0 or 1, every eighth or so 1, as in
handwritten digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from waterflow.models.task import Task

Coded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Vae(nn.Module):
    """A Gaussian code and a Bernoulli decoder, over images of `pixels` pixels."""

    def __init__(self, pixels: int = 784, hidden: int = 400, code: int = 20) -> None:
        super().__init__()
        self.hidden = nn.Linear(pixels, hidden)
        self.mean = nn.Linear(hidden, code)
        self.log_variance = nn.Linear(hidden, code)
        self.unfold = nn.Linear(code, hidden)
        self.pixels = nn.Linear(hidden, pixels)

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and logarithm of the variance of each image's code, both (N, code)."""
        hidden = torch.tanh(self.hidden(images.flatten(1)))
        return self.mean(hidden), self.log_variance(hidden)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Maps codes (N, code) to logits of the pixels (N, pixels)."""
        logits: torch.Tensor = self.pixels(torch.tanh(self.unfold(codes)))
        return logits

    def forward(self, images: torch.Tensor) -> Coded:
        """Logits of the pixels (N, pixels), and mean and log variance of the codes (N, code).

        In training the codes are drawn (Kingma and Welling, section 2.4), else they are the means.
        """
        mean, log_variance = self.encode(images)
        codes = mean
        if self.training:
            codes = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(codes), mean, log_variance


def divergence(mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each Gaussian (N, code) from the standard one (appendix B)."""
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)


def vae() -> Vae:
    """The VAE for 28 x 28 pixels: 652,824 parameters."""
    return Vae()


def _loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Minus the lower bound of equation 10 for one sample, in nats per image."""
    logits, mean, log_variance = model(images)
    wrong = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="sum")
    return wrong / images.shape[0] + divergence(mean, log_variance).mean()


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _task(name: str, parameters: int, model: Callable[[], Vae], size: int) -> Task:
    return Task(
        name=name,
        unit="images",
        parameters=parameters,
        model=model,
        loss=_loss,
        batch=lambda count: (torch.rand(count, 1, size, size) < 0.13).float(),
        optimizer=_adam,
    )


VAE = _task("vae", 652_824, vae, 28)
VAE_SMALL = _task("vae_small", 18_248, lambda: Vae(64, 128, 4), 8)
