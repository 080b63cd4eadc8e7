"""DeepFM: its pairs as a double loop, and its parts one by one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.models.deepfm import DEEPFM, DEEPFM_SMALL, DeepFm, DeepFmConfig, pairwise_products

pytestmark = pytest.mark.cpu


def double_loop(vectors):
    total = torch.zeros(vectors.shape[0], dtype=vectors.dtype)
    for one in range(vectors.shape[1]):
        for other in range(one + 1, vectors.shape[1]):
            total += (vectors[:, one] * vectors[:, other]).sum(1)
    return total


@pytest.mark.parametrize("fields", [1, 2, 7])
def test_pairwise_products(fields):
    torch.manual_seed(0)
    vectors = torch.randn(4, fields, 3, dtype=torch.float64)
    torch.testing.assert_close(pairwise_products(vectors), double_loop(vectors))


def test_logits():
    torch.manual_seed(0)
    model = DeepFm(DeepFmConfig(fields=3, values=5, width=4, layers=(6,))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    values = torch.tensor([[4, 4, 0], [0, 1, 4]])
    # Equal values of different fields are different rows.
    rows = torch.tensor([[4, 9, 10], [0, 6, 14]])
    vectors = model.vectors.weight[rows]
    wanted = model.first_order.weight[rows].flatten(1).sum(1) + double_loop(vectors)
    hidden = model.deep[0](vectors.flatten(1)).relu()
    wanted = wanted + model.deep[-1](hidden).flatten()
    torch.testing.assert_close(model(values), wanted)


def test_dropout_draws_in_training():
    model, (values, _) = DEEPFM_SMALL.model(), DEEPFM_SMALL.batch(4)
    assert not torch.equal(model(values), model(values))


def test_a_batch():
    torch.manual_seed(0)
    values, clicked = DEEPFM.batch(2_000)
    assert 0 <= values.min() <= values.max() < 1_000
    assert set(clicked.tolist()) == {0.0, 1.0}
    assert 0.2 < clicked.mean() < 0.3


def test_shapes_at_full_size():
    with FakeTensorMode():
        model, batch = DEEPFM.model(), DEEPFM.batch(4)
        assert [tensor.shape for tensor in batch] == [(4, 39), (4,)]
        assert model(batch[0]).shape == (4,)
        assert DEEPFM.loss(model, batch).shape == ()
