"""Jobs that are built without memory, and in memory where that does not work."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensor

import waterflow as wf
from tests.support.data import cross_entropy
from waterflow.capture.fake_job import (
    BuildError,
    build,
    build_fake,
    build_real,
    flat_batch,
    name_of,
    random_kept,
)
from waterflow.common.errors import CaptureError, JobError

pytestmark = pytest.mark.cpu


def job_around(model, data=None):
    batch = torch.randn(4, 4), torch.randint(3, (4,))
    return wf.Job(
        "a",
        model=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        loss=cross_entropy,
        data=[batch] if data is None else data,
    )


def plain():
    return job_around(nn.Linear(4, 3))


def huge():
    return job_around(nn.Linear(4, 1 << 30))


def of_meta():
    return job_around(nn.Linear(4, 3, device="meta").to("meta"))


def reading():
    model = nn.Linear(4, 3)
    return job_around(model) if model.weight.sum().item() > -1e9 else None


@pytest.mark.parametrize("make", [plain, huge, of_meta])
def test_a_job_without_memory(make):
    built = build(make, "it")
    assert not built.real
    assert all(isinstance(parameter, FakeTensor) for parameter in built.job.model.parameters())
    assert built.job.device.type == "cpu"
    assert [tuple(tensor.shape) for tensor in built.batch.tensors] == [(4, 4), (4,)]


def test_a_factory_that_reads_numbers_is_called_in_memory():
    with pytest.raises(BuildError):
        build_fake(reading, "it")
    built = build(reading, "it")
    assert built.real
    assert not isinstance(built.job.model.weight, FakeTensor)


def test_modules_are_as_they_were_afterwards():
    before = nn.Module._apply
    build(of_meta, "it")
    assert nn.Module._apply is before


def test_random_streams_are_where_they_were():
    def drawn():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = drawn()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with random_kept():
        drawn()
    build(plain, "it")
    assert drawn() == expected


def raising():
    raise KeyError("first line\nsecond")


def test_what_a_factory_raises_is_told_with_its_line():
    with pytest.raises(JobError, match=r"it raises at .*test_fake_job\.py:\d+ in raising: KeyErr"):
        build_real(raising, "it")


def test_what_is_no_job_is_refused():
    with pytest.raises(JobError, match=r"it must return a waterflow\.Job, it returned 3"):
        build(lambda: 3, "it")


def test_data_without_a_batch_are_refused():
    with pytest.raises(JobError, match="its data has no batch"):
        build(lambda: job_around(nn.Linear(4, 3), data=[]), "it")


def test_a_batch_that_may_hide_tensors_is_refused():
    with pytest.raises(CaptureError, match=r"job 'a': a batch holds a builtins\.object"):
        flat_batch(plain(), [object()])


def test_factories_are_called_by_their_name():
    line = plain.__code__.co_firstlineno
    assert name_of(plain) == f"job factory plain ({__file__}:{line})"
    assert name_of(functools.wraps(plain)(lambda: None)) == name_of(plain)
    assert name_of(len) == "job factory <built-in function len>"
