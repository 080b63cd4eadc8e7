"""Scratch copies to measure a step on: they alias each other as the tensors do, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support.arenas import is_inside
from waterflow.executor.device.host import HostDevice
from waterflow.executor.profile.measured import Scratch

pytestmark = pytest.mark.cpu


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    scratch = Scratch(HostDevice())
    yield scratch
    scratch.close()


BASE = torch.arange(24.0)
COMPLEX = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
KINDS = {
    "parameter": nn.Parameter(torch.ones(3)),
    "part of a storage": BASE[5:9],
    "transposed": BASE.view(4, 6).t(),
    "expanded": BASE[:4].expand(3, 4),
    "no elements": BASE[:0],
    "no dimension": torch.tensor(3.0),
    "integers": torch.arange(5),
    "conjugated": COMPLEX.conj(),
    "negated": COMPLEX.conj().imag,
    "copy on write": torch._lazy_clone(torch.ones(5)),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_is_equal_in_all_but_its_memory(kind: str, scratch: Scratch) -> None:
    tensor = KINDS[kind]
    twin = scratch.twins({kind: tensor}, [kind])[kind]
    assert torch.equal(twin, tensor)
    assert (twin.dtype, twin.device, twin.stride()) == (
        tensor.dtype,
        tensor.device,
        tensor.stride(),
    )
    assert twin.storage_offset() == tensor.storage_offset()
    assert (twin.is_conj(), twin.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert twin.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert is_inside(twin)
    assert not is_inside(tensor)
    assert not twin.requires_grad


def test_twins_alias_each_other_as_the_tensors_do(scratch: Scratch) -> None:
    base = torch.zeros(8)
    tensors = {"all": base, "part": base[2:4], "other": torch.zeros(8)}
    twins = scratch.twins(tensors, ["part", "other"])
    twins["part"].fill_(1)
    assert twins["all"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert twins["other"].sum() == 0
    assert base.sum() == 0


def test_what_is_only_read_is_used_as_it_is(scratch: Scratch) -> None:
    tensors = {"read": torch.zeros(3), "written": torch.zeros(3)}
    twins = scratch.twins(tensors, ["written"])
    assert twins["read"] is tensors["read"]
    assert twins["written"] is not tensors["written"]


def test_measuring_changes_and_moves_nothing() -> None:
    """A budget that is too small ends the run after the measurement and before the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    tensors = model.state_dict(keep_vars=True)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    data = [torch.randn(8, 4)]
    with pytest.raises(wf.BudgetError):
        wf.run([wf.Job("a", model=model, optimizer=optimizer, loss=loss, data=data)], memory=64)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.data_ptr() == pointers[name]
        assert tensor._version == versions[name]
