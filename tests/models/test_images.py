import pytest
import torch
from torch import nn, optim

from waterflow.models.images import classification_loss, classifier_task

pytestmark = pytest.mark.cpu


def task(**options):
    return classifier_task(
        "flat",
        3 * 8 * 8 * 5 + 5,
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)),
        lambda parameters: optim.SGD(parameters, lr=0.1),
        size=8,
        classes=5,
        **options,
    )


def test_batches_are_images_and_their_classes():
    images, labels = task().batch(64)
    assert images.shape == (64, 3, 8, 8)
    assert labels.shape == (64,)
    assert labels.unique().tolist() == [0, 1, 2, 3, 4]
    torch.manual_seed(1)
    first = task().batch(2)
    torch.manual_seed(1)
    assert all(map(torch.equal, first, task().batch(2)))  # from torch's own generator


def test_the_loss_is_of_the_right_class():
    made = task()
    model, batch = made.model(), made.batch(3)
    probabilities = model(batch[0]).softmax(1)
    expected = -torch.stack([probabilities[i, label].log() for i, label in enumerate(batch[1])])
    torch.testing.assert_close(made.loss(model, batch), expected.mean())
    assert made.loss is classification_loss
    assert (made.name, made.unit) == ("flat", "images")


def test_a_model_may_have_a_loss_of_its_own():
    own = lambda model, batch: model(batch[0]).sum()  # noqa: E731
    assert task(loss=own).loss is own
