"""What counts as the same number."""

import pytest
import torch

from waterflow.steps.same_bits import same_bits, same_number

pytestmark = pytest.mark.cpu


def test_bits_are_compared():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert same_bits(nan, (nan.view(torch.int32) ^ 1).view(torch.float32))
    assert not same_bits(nan, zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, torch.zeros(1, 1))
    assert same_bits(torch.ones(2, 3).T, torch.ones(3, 2))
    assert same_bits(torch.tensor([1j]).conj(), torch.tensor([complex(0, -1)]))
    assert same_bits(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.int8, torch.complex64):
        assert same_bits(torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype))
        assert not same_bits(torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype))


def test_nan_is_the_same_number():
    assert same_number(float("nan"), float("nan"))
    assert not same_number(1.0, float("nan"))
