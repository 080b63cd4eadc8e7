import math

import pytest
import torch
from torch import nn, optim

from waterflow.models.text import next_token_loss, next_token_task

pytestmark = pytest.mark.cpu

VOCABULARY, LENGTH = 7, 5


@pytest.fixture
def task():
    return next_token_task(
        "table",
        VOCABULARY * VOCABULARY,
        lambda: nn.Embedding(VOCABULARY, VOCABULARY),
        lambda parameters: optim.SGD(parameters, lr=0.1),
        length=LENGTH,
        vocabulary=VOCABULARY,
    )


def test_targets_are_the_tokens_that_follow(task):
    ids, following = task.batch(64)
    assert ids.shape == following.shape == (64, LENGTH)
    assert torch.equal(ids[:, 1:], following[:, :-1])
    assert set(ids.unique().tolist()) == set(range(VOCABULARY))
    assert ids.is_contiguous()
    assert following.is_contiguous()


def test_who_knows_what_follows_loses_nothing(task):
    batch = task.batch(4)

    class Knowing(nn.Module):
        def forward(self, ids):
            return 100.0 * nn.functional.one_hot(batch[1], VOCABULARY)

    assert next_token_loss(Knowing(), batch) < 1e-6
    blind = nn.Embedding(VOCABULARY, VOCABULARY)
    nn.init.zeros_(blind.weight)
    assert next_token_loss(blind, batch).item() == pytest.approx(math.log(VOCABULARY))
