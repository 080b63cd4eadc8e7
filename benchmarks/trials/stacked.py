"""Trials of one architecture as one model, by `torch.func.vmap`: the usual way to fuse them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import waterflow as wf


class _CalledWith(nn.Module):
    """Lets a loss call a model on the parameters of one of the stacked ones."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: object) -> Tensor:
        return self.loss(self.model, batch)


def train(jobs: Sequence[wf.Job]) -> list[list[float]]:
    """Trains jobs whose models and batches have equal shapes, each with its own learning rate."""
    parameters, buffers = stack_module_state([_CalledWith(job.model, job.loss) for job in jobs])
    skeleton = _CalledWith(jobs[0].model, jobs[0].loss)
    update = _updater(jobs, list(parameters.values()))

    def loss(own: dict[str, Tensor], kept: dict[str, Tensor], batch: list[Tensor]) -> Tensor:
        found: Tensor = functional_call(skeleton, (own, kept), (tuple(batch),))
        return found

    together = torch.func.vmap(loss, randomness="different")
    steps = min(int(job.steps or 1) for job in jobs)
    losses: list[Tensor] = []
    read = [itertools.islice(itertools.cycle(job.data), steps) for job in jobs]
    for batches in zip(*read, strict=True):
        stacked = [torch.stack(tensors) for tensors in zip(*batches, strict=True)]
        found = together(parameters, buffers, stacked)
        found.sum().backward()
        update()
        losses.append(found.detach())
    return torch.stack(losses).T.tolist()


def _updater(jobs: Sequence[wf.Job], parameters: list[Tensor]) -> Callable[[], None]:
    groups = [job.optimizer.param_groups[0] for job in jobs]
    rates = torch.tensor([group["lr"] for group in groups])
    shaped = [rates.reshape(-1, *[1] * (tensor.dim() - 1)) for tensor in parameters]
    if isinstance(jobs[0].optimizer, torch.optim.SGD):
        return _sgd(parameters, shaped, groups[0]["momentum"])
    return _adamw(parameters, shaped, groups[0])


def _sgd(parameters: list[Tensor], rates: list[Tensor], momentum: float) -> Callable[[], None]:
    means = [torch.zeros_like(tensor) for tensor in parameters]

    @torch.no_grad()
    def update() -> None:
        gradients = _taken(parameters)
        torch._foreach_mul_(means, momentum)
        torch._foreach_add_(means, gradients)
        torch._foreach_sub_(parameters, torch._foreach_mul(means, rates))

    return update


def _adamw(
    parameters: list[Tensor], rates: list[Tensor], group: dict[str, float]
) -> Callable[[], None]:
    means = [torch.zeros_like(tensor) for tensor in parameters]
    squares = [torch.zeros_like(tensor) for tensor in parameters]
    one, two = group["betas"]  # type: ignore[misc]
    decay = [1 - rate * group["weight_decay"] for rate in rates]
    step = 0

    @torch.no_grad()
    def update() -> None:
        nonlocal step
        step += 1
        gradients = _taken(parameters)
        torch._foreach_mul_(parameters, decay)
        torch._foreach_lerp_(means, gradients, 1 - one)
        torch._foreach_mul_(squares, two)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - two)
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, (1 - two**step) ** 0.5)
        torch._foreach_add_(below, group["eps"])
        change = torch._foreach_div(means, below)
        torch._foreach_mul_(change, rates)
        torch._foreach_sub_(parameters, torch._foreach_div(change, 1 - one**step))

    return update


def _taken(parameters: list[Tensor]) -> list[Tensor]:
    gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
    for tensor in parameters:
        tensor.grad = None
    return gradients
