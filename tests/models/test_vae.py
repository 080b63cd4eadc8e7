"""The VAE has the sizes named, and its loss is the bound that torch.distributions gives."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributions import Bernoulli, Normal, kl_divergence

from waterflow.models.vae import VAE, VAE_SMALL, Vae

pytestmark = pytest.mark.cpu


def test_shapes():
    with FakeTensorMode():
        model, images = VAE.model(), VAE.batch(3)
        found = [images, *model(images), VAE.loss(model, images)]
        assert model.hidden(images.flatten(1)).shape == (3, 400)
    assert [tuple(each.shape) for each in found] == [(3, 1, 28, 28), (3, 784), (3, 20), (3, 20), ()]


def test_batches_are_black_and_white():
    torch.manual_seed(0)
    images = VAE.batch(64)
    assert set(images.unique().tolist()) == {0.0, 1.0}
    assert 0.1 < images.mean() < 0.16


def test_loss_is_minus_the_bound():
    torch.manual_seed(0)
    model, images = VAE_SMALL.model(), VAE_SMALL.batch(5)
    torch.nn.init.normal_(model.log_variance.bias)
    torch.manual_seed(1)
    found = VAE_SMALL.loss(model, images)
    mean, log_variance = model.encode(images)
    coded = Normal(mean, (log_variance / 2).exp())
    torch.manual_seed(1)
    pixels = Bernoulli(logits=model.decode(coded.rsample()))
    likelihood = pixels.log_prob(images.flatten(1)).sum(1)
    away = kl_divergence(coded, Normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(found, (away - likelihood).mean())


def test_codes_are_drawn_in_training_only():
    torch.manual_seed(0)
    model, images = Vae(), VAE.batch(2)
    assert not torch.equal(model(images)[0], model(images)[0])
    model.eval()
    assert torch.equal(model(images)[0], model(images)[0])
