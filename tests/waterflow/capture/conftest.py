"""What tests of captures have in common."""

import pytest
import torch


@pytest.fixture
def validates():
    """torch.compile switches the validation of distributions off, for the process."""
    before = torch.distributions.Distribution._validate_args
    yield
    torch.distributions.Distribution.set_default_validate_args(before)
