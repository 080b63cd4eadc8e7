"""Code of somebody's own in torch is found wherever a step may come across it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from waterflow.account.patches import foreign_kernel, patched

pytestmark = pytest.mark.virtual


class Callable:
    def __call__(self, *arguments):
        return arguments[0]


def own(*arguments, **options):
    return arguments[0]


@functools.wraps(nn.functional.relu)
def disguised(*arguments, **options):
    return arguments[0]


def test_torch_as_it_is_has_none():
    assert patched() is None


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((nn.functional, "relu"), (torch, "matmul"), (nn.Linear, "forward")),
        *((nn.Module, "__call__"), (torch.Tensor, "add"), (torch.optim.Adam, "step")),
        *((torch.optim.Optimizer, "zero_grad"), (torch.utils.checkpoint, "checkpoint")),
    ],
)
@pytest.mark.parametrize(
    "value", [own, disguised, Callable(), Callable().__call__, functools.partial(own)]
)
def test_a_patch_is_found(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    assert name in patched()


def test_a_class_in_place_of_another(monkeypatch):
    class Linear(nn.Linear):
        pass

    monkeypatch.setattr(nn, "Linear", Linear)
    assert patched().endswith("Linear")


@pytest.mark.parametrize("owner", [nn.Module, nn.Linear, torch.Tensor, torch.optim.Optimizer])
def test_a_method_beside_torchs_own_is_none(monkeypatch, owner):
    """As transformers gives all modules one, for good, once a model of its is made."""
    monkeypatch.setattr(owner, "sweetened", own, raising=False)
    assert patched() is None


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((nn.Linear, "_load_from_state_dict"), (nn.ReLU, "__call__"), (nn.Linear, "half")),
        *((torch.Tensor, "__getattr__"), (nn.Module, "reset_parameters")),
    ],
)
def test_a_method_that_torch_comes_across_is_found(monkeypatch, owner, name):
    monkeypatch.setattr(owner, name, own, raising=False)
    assert name in patched()


def test_kernels_that_torch_makes_when_asked_are_its_own():
    torch.func.vmap(torch.sin)(torch.zeros(3))
    assert foreign_kernel() is None


def test_a_kernel_of_somebodys_own_is_found():
    library = torch.library.Library("aten", "IMPL")
    library.impl("tanh", lambda x: x.sigmoid(), "AutocastCPU")
    try:
        assert foreign_kernel() == "aten/tanh/AutocastCPU"
    finally:
        library._destroy()
    assert foreign_kernel() is None
