"""The jobs that the GPU benchmarks train: a model, its optimizer and loss, and batches on the host.

A job is made the same way by the same seed, so that runs of it can be compared bit by bit. Batches
are few and used again: what a data loader costs is not measured here, what a copy to the device
costs is. They lie in pinned memory where there is a GPU, as from `DataLoader(pin_memory=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from waterflow.job.job import LossFunction
from waterflow.models.bert import bert_base, bert_tiny
from waterflow.models.lstm import LstmModel
from waterflow.models.resnet import ResNet, resnet50

Batch = tuple[torch.Tensor, torch.Tensor]

#: Share of the tokens that a masked language model has to guess.
_MASKED = 0.15


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained: a model's name, the batch size, "fp32" or "bf16" (autocast), and where."""

    model: str
    batch: int
    dtype: str = "fp32"
    device: str = "cuda"
    tiny: bool = False

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if self.dtype not in ("fp32", "bf16"):
            raise ValueError(f"dtype must be 'fp32' or 'bf16', got {self.dtype!r}")

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a process that makes the same case of them."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} batch {self.batch}"


class DeepMlp(nn.Module):
    """x + tanh(Wx), again and again: a step of thousands of small kernels."""

    def __init__(self, depth: int, width: int, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: torch.Tensor = self.out(x)
        return logits


def _images(case: Case, generator: torch.Generator) -> Batch:
    side, classes = (32, 10) if case.tiny else (224, 1000)
    images = torch.rand(case.batch, 3, side, side, generator=generator)
    return images, torch.randint(classes, (case.batch,), generator=generator)


def _masked_text(case: Case, generator: torch.Generator) -> Batch:
    vocabulary, length = (128, 16) if case.tiny else (30_522, 128)
    ids = torch.randint(5, vocabulary, (case.batch, length), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < _MASKED
    hidden[:, 0] = True  # at least one token of every sequence
    return ids.masked_fill(hidden, 3), ids.masked_fill(~hidden, -100)


def _text(case: Case, generator: torch.Generator) -> Batch:
    length = 9 if case.tiny else 33
    ids = torch.randint(100, (case.batch, length), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _vectors(case: Case, generator: torch.Generator) -> Batch:
    vectors = torch.randn(case.batch, 16 if case.tiny else 256, generator=generator)
    return vectors, torch.randint(10, (case.batch,), generator=generator)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True)
class _Recipe:
    full: Callable[[], nn.Module]
    tiny: Callable[[], nn.Module]
    batch: Callable[[Case, torch.Generator], Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


MODELS: dict[str, _Recipe] = {
    "resnet50": _Recipe(resnet50, lambda: ResNet((1, 1, 1, 1), 10, 8), _images, _sgd),
    "bert_base": _Recipe(bert_base, bert_tiny, _masked_text, _adamw),
    "lstm": _Recipe(lambda: LstmModel(100, 256, 2), lambda: LstmModel(100, 16, 1), _text, _adamw),
    "mlp": _Recipe(lambda: DeepMlp(200, 256), lambda: DeepMlp(4, 16), _vectors, _sgd),
}
"""How each model, its batches and its optimizer are made, full size and tiny."""


def make_model(case: Case, seed: int = 0) -> nn.Module:
    """The model on its device, its weights drawn on the host: the same ones everywhere."""
    recipe = MODELS[case.model]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = recipe.tiny() if case.tiny else recipe.full()
    return model.to(case.device).train()


def make_optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the case's model is trained with, torch's defaults but for the rates."""
    return MODELS[case.model].optimizer(parameters)


@lru_cache(maxsize=2)
def make_batches(case: Case, count: int = 4) -> list[Batch]:
    """A few distinct batches on the host, shared by the jobs of a case."""
    generator = torch.Generator().manual_seed(1)
    batches = [MODELS[case.model].batch(case, generator) for _ in range(count)]
    if case.device == "cpu":
        return batches
    return [(inputs.pin_memory(), labels.pin_memory()) for inputs, labels in batches]


def make_loss(case: Case) -> LossFunction:
    """Cross entropy of the model's logits, under autocast for "bf16"."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        with torch.autocast(case.device, torch.bfloat16, enabled=case.dtype == "bf16"):
            logits = model(inputs)
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    return loss


def make_job(
    case: Case,
    name: str = "job",
    *,
    seed: int = 0,
    data: Iterable[Batch] | None = None,
    **rest: Any,
) -> wf.Job:
    """A job of the case; without `data`, its batches over and over for `steps` steps."""
    model = make_model(case, seed)
    return wf.Job(
        name,
        model=model,
        optimizer=make_optimizer(case, model.parameters()),
        loss=make_loss(case),
        data=_repeated(case, rest.get("steps") or 1) if data is None else data,
        seed=seed,
        **rest,
    )


def _repeated(case: Case, steps: int) -> list[Batch]:
    batches = make_batches(case)
    return [batches[step % len(batches)] for step in range(steps)]
