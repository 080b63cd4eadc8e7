"""The device of a name: what is taken, and what is refused with a remedy."""

from __future__ import annotations

import pytest
import torch

from waterflow.common.errors import JobError
from waterflow.executor.device import cuda, select
from waterflow.executor.device.host import HostDevice
from waterflow.executor.device.select import get_device

pytestmark = pytest.mark.virtual


class NamedDevice:
    """Stands for the CUDA device, which needs a driver."""

    def __init__(self, index: int | None) -> None:
        self.index = index


def test_the_host() -> None:
    assert isinstance(get_device("cpu"), HostDevice)


def test_a_device_is_taken_as_it_is() -> None:
    device = HostDevice()
    assert get_device(device) is device


@pytest.mark.parametrize(("name", "index"), [("cuda", None), ("cuda:0", 0), ("cuda:12", 12)])
def test_a_gpu_by_its_index(name: str, index: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "CudaDevice", NamedDevice)
    assert get_device(name).index == index  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cpu:0", ""])
def test_other_names_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "CudaDevice", NamedDevice)
    with pytest.raises(JobError, match="is unknown: use 'cpu', 'cuda' or 'cuda:0'"):
        get_device(name)


def test_without_cuda_in_torch_the_remedy_is_another_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(JobError, match=r"torch is built without CUDA\. Install a CUDA build"):
        get_device("cuda")


def test_without_cuda_in_the_extension_the_remedy_is_to_reinstall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda._C, "cuda_built", False)
    with pytest.raises(JobError, match=r"extension was built without CUDA\. Reinstall"):
        get_device("cuda:0")
