"""The VAE has the sizes named, its loss is the bound that torch.distributions gives; it trains."""

import pytest
import torch
from case_compare import MEMORY, assert_same_numbers
from torch._subclasses import FakeTensorMode
from torch.distributions import Bernoulli, Normal, kl_divergence

import waterflow as wf
from waterflow.models.vae import VAE, VAE_SMALL, Vae

pytestmark = pytest.mark.cpu


def job(task, name="alone", batch=2, batches=3, epochs=1):
    torch.manual_seed(3)
    model = task.model()
    data = [task.batch(batch) for _ in range(batches)]
    optimizer = task.optimizer(model.parameters())
    return wf.Job(
        name, model=model, optimizer=optimizer, loss=task.loss, data=data, epochs=epochs, seed=5
    )


@pytest.mark.parametrize(("task", "number"), [(VAE, 652_824), (VAE_SMALL, VAE_SMALL.parameters)])
def test_parameters(task, number):
    with torch.device("meta"):
        model = task.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == number == task.parameters


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


def test_thirty_steps_lower_the_loss():
    losses = wf.run_eager(job(VAE_SMALL, batch=4, batches=1, epochs=30), threads=1).losses
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_co_trained_as_alone():
    alone = job(VAE_SMALL)
    expected = wf.run_eager(alone, threads=1)
    jobs = [job(VAE_SMALL, name) for name in ("one", "two")]
    report = wf.run(jobs, memory=MEMORY, threads=1)
    for each in jobs:
        assert_same_numbers(alone, expected, each, report.jobs[each.name])
        assert report.jobs[each.name].captured == "captured"
