"""All models of ``timm`` and ``torchvision`` that are small enough, on images of 96 pixels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks.coverage.suites import Suite
from benchmarks.coverage.trial import Trial

_PIXELS, _BATCH, _CLASSES = 96, 2, 10
_LARGEST = 5_000_000  # parameters

MakeModel = Callable[[], nn.Module]


class _VisionSuite(Suite):
    """Classifiers by name; the small ones that the eager loop can train at this size are cases."""

    def __init__(self, makers: dict[str, MakeModel]) -> None:
        self._makers = makers

    def names(self) -> Sequence[str]:
        return list(self._makers)

    def trials(self, name: str) -> Sequence[Trial]:
        make = self._makers[name]
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in make().parameters())
        if count >= _LARGEST:
            raise ValueError(f"{count} parameters are too many")
        return [Trial("", functools.partial(_job, name, make))]


class Timm(_VisionSuite):
    """The models of ``timm``."""

    def __init__(self) -> None:
        import timm

        def make(name: str) -> nn.Module:
            model: nn.Module
            try:
                model = timm.create_model(name, num_classes=_CLASSES, img_size=_PIXELS)
            except TypeError:  # convolutional: any size will do
                model = timm.create_model(name, num_classes=_CLASSES)
            return model

        super().__init__({name: functools.partial(make, name) for name in timm.list_models()})


class TorchVision(_VisionSuite):
    """The classifiers of ``torchvision``."""

    def __init__(self) -> None:
        from torchvision import models

        def make(name: str) -> nn.Module:
            model: nn.Module = models.get_model(name, weights=None, num_classes=_CLASSES)
            return model

        names = models.list_models(module=models)
        super().__init__({name: functools.partial(make, name) for name in names})


def _job(name: str, make: MakeModel) -> wf.Job:
    model = make().train()
    images = [torch.randn(_BATCH, 3, _PIXELS, _PIXELS) for _ in range(2)]
    return wf.Job(
        name,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss=_loss,
        data=[(image, torch.randint(_CLASSES, (_BATCH,))) for image in images],
        steps=3,
        seed=0,
    )


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    result: Any = model(batch[0])
    if isinstance(result, (tuple, list)):  # auxiliary or distilled heads
        return torch.stack([F.cross_entropy(part, batch[1]) for part in result]).sum()
    return F.cross_entropy(result, batch[1])
